"""GIT captioners with their tokenizer (`model.tokenizer`) and preprocessing (`model.pretrained_cfg`, as in timm)."""

from typing import TYPE_CHECKING, Any

from dtem.errors import DtemError, first_line, require

if TYPE_CHECKING:
    from transformers import GitForCausalLM


def load(name: str, pretrained: bool = True, revision: str | None = None) -> "GitForCausalLM":
    """transformers' GIT from the Hub (``microsoft/git-base-coco``) or from a folder, in eval mode.

    Without `pretrained`, it has random weights, for a file of weights that is loaded afterwards. `revision`: branch,
    tag or commit on the Hub.
    """
    library = require("transformers", "transformers")
    version = {"revision": revision or "main"}
    try:
        config = library.AutoConfig.from_pretrained(name, **version)
        tokenizer = library.AutoTokenizer.from_pretrained(name, **version)
        processor = library.AutoImageProcessor.from_pretrained(name, **version)
        cls = library.GitForCausalLM
        model = cls.from_pretrained(name, **version) if pretrained else cls(config)
    except Exception as error:  # transformers, safetensors and the Hub raise errors of every kind here
        raise DtemError(
            f"{name!r} cannot be loaded as a captioner: {first_line(error)} Give a Hub id, or a folder with "
            "config.json, model.safetensors, preprocessor_config.json and a tokenizer"
        ) from error
    freeze_fixed(model)
    model.tokenizer = tokenizer
    model.pretrained_cfg = {
        "input_size": (config.vision_config.num_channels, *[config.vision_config.image_size] * 2),
        "mean": tuple(processor.image_mean),
        "std": tuple(processor.image_std),
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "crop_mode": "squash",  # resized to the square, nothing else
    }
    captioner: GitForCausalLM = model.eval()
    return captioner


def freeze_fixed(model: Any) -> None:
    """Freeze the modules that the config lists under ``dtem_fixed``; a published GIT has none."""
    for name in getattr(model.config, "dtem_fixed", ()):
        model.git.image_encoder.vision_model.get_submodule(name).requires_grad_(False)

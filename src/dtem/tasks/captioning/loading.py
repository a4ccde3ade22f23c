"""A captioner with all that it needs: its tokenizer (`model.tokenizer`) and how it wants its images
(`model.pretrained_cfg`, in timm's words)."""

from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from dtem.types import DtemError

if TYPE_CHECKING:
    from transformers import GitForCausalLM


def load(name: str) -> "GitForCausalLM":
    """transformers' GIT from the Hub (``microsoft/git-base-coco``) or from a folder, in eval mode."""
    try:
        import transformers
    except ImportError as error:
        raise DtemError('captioners need the package transformers: pip install "dtem[captioning]"') from error
    from dtem.hosts.captioner import freeze_fixed

    library: Any = transformers  # parts of it have no types
    try:
        config = library.AutoConfig.from_pretrained(name)
        if config.model_type != "git":
            raise DtemError(
                f"{name} is a {config.model_type!r} model; captioning takes GIT, e.g. microsoft/git-base-coco"
            )
        tokenizer = library.AutoTokenizer.from_pretrained(name)
        processor = library.AutoImageProcessor.from_pretrained(name)
        model = library.GitForCausalLM.from_pretrained(name)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, DtemError):
            raise
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DtemError(
            f"{name!r} cannot be loaded as a captioner: {first} Give a Hub id, or a folder with config.json, "
            "model.safetensors, preprocessor_config.json and a tokenizer"
        ) from error
    freeze_fixed(model)
    return equip(model.eval(), tokenizer, processor.image_mean, processor.image_std)


def equip(model: Any, tokenizer: Any, mean: Any, std: Any) -> "GitForCausalLM":
    """Give a model its tokenizer and the pixels that it was trained with."""
    vision = model.config.vision_config
    model.tokenizer = tokenizer
    model.pretrained_cfg = {
        "input_size": (vision.num_channels, vision.image_size, vision.image_size),
        "mean": tuple(mean),
        "std": tuple(std),
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "crop_mode": "squash",  # resized to the square, nothing else
    }
    captioner: GitForCausalLM = model
    return captioner

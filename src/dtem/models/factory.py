"""`create_model`: any supported model by its name, with its weights: timm's, transformers' and dtem's own."""

import contextlib
import difflib
import fnmatch
import os
import re
from pathlib import Path
from typing import Any

from torch import nn

from dtem.errors import DtemError, first_line
from dtem.models import hub

StrPath = str | os.PathLike[str]
ImageSize = int | tuple[int, int]

_TIMM_MODULES = ("vision_transformer", "deit", "eva", "vision_transformer_hybrid", "lvvit")
_UNSUPPORTED = re.compile(
    r"_(18x2|xp|rpn)_"  # parallel or post-norm blocks
    r"|^vit_(d|p|dp)(wee|little)_"  # differential attention, parallel blocks
)
"""Models of these modules that `dtem.patch` refuses."""


def create_model(
    name: str,
    *,
    pretrained: bool = True,
    weights: StrPath | None = None,
    num_classes: int | None = None,
    img_size: ImageSize | None = None,
    global_pool: str | None = None,
    drop_path_rate: float = 0.0,
    encoder_weights: StrPath | None = None,
    pixel_norm: str | None = None,
    revision: str | None = None,
) -> nn.Module:
    """Build a model that `dtem.patch` supports, in eval mode, with its published weights.

    Args:
        name: a timm name (``deit_small_patch16_224``); ``hf:owner/name``, a Hub id or a folder that `save_pretrained`
            wrote (transformers); or one of dtem's own: ``lvvit_s``, ``seg_s_mask_16``, …, ``digits_vit``. A GIT
            captioner comes with its tokenizer, as ``model.tokenizer``. A Hub id may name its revision:
            ``hf:owner/name@revision``.
        pretrained: load the published weights, downloaded once; False: random ones.
        weights: a .safetensors or torch file (tensors only) with the weights, instead of the published ones.
        num_classes: classes of the head, where not the model's own; 0: features without a head.
        img_size: image size where it is not the model's own: ``384`` or ``(height, width)``.
        global_pool: how the head pools tokens: token, avg or map (timm).
        drop_path_rate: stochastic depth, for training the model itself.
        encoder_weights: Segmenter: a file with the weights of the encoder alone (timm's ViT).
        pixel_norm: Segmenter: mean and standard deviation of pixels, ``half`` (0.5, the default) or ``imagenet``.
        revision: branch, tag or commit of the model on the Hub; None: the newest one. The commit is kept as
            ``model.hub_revision``, in records and in adapter files.

    Examples:
        >>> model = dtem.create_model("deit_tiny_patch16_224", pretrained=False)
        >>> handle = dtem.patch(model, r=16)
    """
    from dtem.models import digits_vit, segmenter
    from dtem.models.weights import load_weights

    changes: dict[str, Any] = {
        "num_classes": num_classes,
        "img_size": (img_size, img_size) if isinstance(img_size, int) else img_size,
        "global_pool": global_pool,
        "drop_path_rate": drop_path_rate or None,
    }
    changes = {option: value for option, value in changes.items() if value is not None}
    pretrained = pretrained and weights is None
    if revision is not None and name in (*segmenter.PRESETS, "digits_vit"):
        raise DtemError(f"revision = {revision!r} is for a model of the Hub, and {name} is dtem's own; leave it out")
    if name not in segmenter.PRESETS:
        for option, value in (("encoder_weights", encoder_weights), ("pixel_norm", pixel_norm)):
            if value is not None:
                raise DtemError(f"{option} = {str(value)!r} is for a Segmenter, and {name} is not one; leave it out")
    if name in segmenter.PRESETS:
        own = changes if pixel_norm is None else {**changes, "pixel_norm": pixel_norm}
        model = _segmenter(name, pretrained, weights, encoder_weights, own)
    elif name == "digits_vit":
        for option in changes:
            raise DtemError(f"{option}: digits_vit has a fixed configuration; leave it out")
        model = digits_vit.create(pretrained)
    elif is_transformers_name(name):
        model = hub.create(name, pretrained, with_tokenizer=weights is not None, revision=revision, **changes)
    else:
        model = _timm_model(name, pretrained, revision, changes)
    if weights is not None:
        load_weights(model, weights)
    return model.eval()


def list_models(filter: str = "") -> list[str]:
    """Names of the models that `create_model` builds and `patch` supports: timm's and dtem's own.

    They are chosen by name and timm module, without building them. Models of transformers are named by their Hub id
    (``hf:owner/name``) and not listed.

    Args:
        filter: a pattern with wildcards, such as ``deit*``.

    Examples:
        >>> dtem.list_models("deit3_small*")
        ['deit3_small_patch16_224', 'deit3_small_patch16_384']
    """
    from dtem.models import segmenter

    names = [name for module in _TIMM_MODULES for name in _timm().list_models(module=module)]
    known = sorted({*names, *segmenter.PRESETS, "digits_vit"})
    return [name for name in known if not _UNSUPPORTED.search(name) and fnmatch.fnmatch(name, filter or "*")]


def is_transformers_name(name: str) -> bool:
    """Whether a model's name means one of transformers: ``hf:NAME``, a Hub id, or a folder with a config.json."""
    return (
        name.startswith((hub.PREFIX, ".", "~"))
        or os.path.isfile(os.path.join(name, "config.json"))
        or (("/" in name or os.sep in name) and not name.startswith(("hf-hub:", "hf_hub:")))
    )


def _timm() -> Any:
    """timm, with dtem's own models in its registry."""
    import timm

    import dtem.models.lvvit  # noqa: F401 - adds lvvit_s

    return timm


def _timm_model(name: str, pretrained: bool, revision: str | None, options: dict[str, Any]) -> nn.Module:
    timm = _timm()
    on_hub = name.startswith(("hf-hub:", "hf_hub:"))
    if not on_hub:
        _check_timm_name(name, timm.list_models())
    version, full_name = {}, name
    if revision is not None and on_hub:
        full_name = f"{name.partition('@')[0]}@{revision}"
    elif revision is not None:
        hub_id = getattr(timm.models.get_pretrained_cfg(name, allow_unregistered=True), "hf_hub_id", None)
        if not hub_id or not pretrained:
            raise DtemError(f"revision = {revision!r} is for weights from the Hub, and {name} takes none; leave it out")
        version = {"pretrained_cfg_overlay": {"hf_hub_id": f"{hub_id}@{revision}", "source": "hf-hub"}}
    try:
        with hub.offline_without_network() if pretrained or on_hub else contextlib.nullcontext(True) as online:
            model: nn.Module = timm.create_model(full_name, pretrained=pretrained, **options, **version)
    except Exception as error:  # timm, its models and the Hub raise errors of every kind here
        if pretrained and isinstance(error, OSError):
            raise DtemError(
                f"the weights of {name} cannot be downloaded ({first_line(error) if online else 'no network'}): check "
                "the network, give weights = FILE, or pretrained = False for random ones"
            ) from error
        settings = ", ".join(f"{key}={value!r}" for key, value in {"pretrained": pretrained, **options}.items())
        raise DtemError(f"timm cannot build {name!r} with {settings}: {first_line(error)}") from error
    repository = (getattr(model, "pretrained_cfg", None) or {}).get("hf_hub_id")
    if repository and (pretrained or on_hub):
        repository, _, loaded = repository.partition("@")
        hub.note_revision(repository, loaded or None, model if pretrained else None)
    patch_size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    size = options.get("img_size")
    if size is not None and patch_size is not None and (size[0] % patch_size[0] or size[1] % patch_size[1]):
        raise DtemError(f"img_size = {size[0]}x{size[1]} is not a multiple of the patch size, {patch_size[0]}")
    return model


def _check_timm_name(name: str, known: list[str]) -> None:
    base = name.partition(".")[0]
    if base in known:
        return
    if Path(name).is_dir():
        raise DtemError(f"the folder {name} has no config.json, so it holds no model of transformers")
    similar = [model for model in known if base and model.startswith(base)][:3]
    similar = similar or difflib.get_close_matches(base, known, n=3)
    hint = f"did you mean {', '.join(similar)}?" if similar else "dtem.list_models() lists them, as `dtem models` does"
    raise DtemError(f"timm has no model {name!r}; {hint}")


def _segmenter(
    name: str, pretrained: bool, weights: StrPath | None, encoder_weights: StrPath | None, changes: dict[str, Any]
) -> nn.Module:
    from dtem.models import segmenter
    from dtem.models.weights import load_weights

    if "global_pool" in changes:
        raise DtemError(
            f"global_pool = {changes['global_pool']!r} is for classifiers: a Segmenter reads every patch; leave it out"
        )
    if weights is not None and encoder_weights is not None:
        raise DtemError("weights holds the encoder too; leave encoder_weights out")
    if pretrained and encoder_weights is None:
        raise DtemError(
            f"{name} has no weights to download: give weights = FILE (a Segmenter's), encoder_weights = FILE (timm's "
            "ViT), or pretrained = False for random ones"
        )
    model = segmenter.create(name, **changes)
    if encoder_weights is not None:
        load_weights(model, encoder_weights, part="encoder.")
    return model

"""Models of transformers: ``hf:owner/name``, a Hub id, or a folder that `save_pretrained` wrote."""

import contextlib
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dtem.errors import DtemError, first_line, require
from dtem.models import git, hf_processor

if TYPE_CHECKING:
    from torch import nn

PREFIX = "hf:"
NO_EMPTY_HEADS = ("siglip", "siglip2")
"""Types of models that transformers cannot build with a head of no classes."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


loaded: dict[str, str] = {}
"""Commit of each repository of the Hub that this process has loaded something from; records name them."""


def note_revision(repository: str, revision: str | None, model: Any = None) -> None:
    """Remember the commit that was loaded, or the revision where the cache does not know its commit.

    A model keeps it as ``model.hub_revision``, ``owner/name@commit``.
    """
    from huggingface_hub import constants

    folder = f"models--{repository.replace('/', '--')}"
    reference = os.path.join(constants.HF_HUB_CACHE, folder, "refs", revision or "main")
    try:
        with open(reference, encoding="utf-8") as file:
            commit: str | None = file.read().strip()
    except (OSError, ValueError):
        commit = revision
    if commit:
        loaded[repository] = commit
        if model is not None:
            model.hub_revision = f"{repository}@{commit}"


def split_revision(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """``owner/name@revision`` in its two parts; a name without one has `revision`."""
    repository, at, own = name.partition("@")
    if not at or not own or os.path.exists(name):
        return name, revision
    if revision not in (None, own):
        raise DtemError(f"revision = {revision!r}, and {name} names another one; leave one of them out")
    return repository, own


def create(
    name: str, pretrained: bool = False, with_tokenizer: bool = False, revision: str | None = None, **options: Any
) -> "nn.Module":
    """The model that a configuration names, in eval mode; with random weights unless `pretrained`.

    Args:
        name: ``hf:owner/name``, a Hub id (also ``owner/name@revision``) or a folder.
        pretrained: load its weights; a captioner then has its tokenizer too.
        with_tokenizer: a captioner has its tokenizer also with random weights.
        revision: branch, tag or commit of the Hub's repository.
        options: ``img_size`` and ``num_classes`` change the configuration; ``drop_path_rate`` too, where it has one.
    """
    transformers = require("transformers", "transformers")
    source, revision = split_revision(os.path.expanduser(name.removeprefix(PREFIX)), revision)
    if not os.path.isdir(source) and not _HUB_ID.fullmatch(source):
        raise DtemError(f"there is no folder {source}")
    if os.path.isdir(source) and revision is not None:
        raise DtemError(f"revision = {revision!r} is for a model of the Hub, and {name} is a folder; leave it out")
    if options.pop("global_pool", None) is not None:
        raise DtemError(f"global_pool: {name} reads its tokens in its own way; leave it out")
    with offline_without_network() as online:
        try:
            config = transformers.AutoConfig.from_pretrained(source, revision=revision or "main")
            cls = getattr(transformers, (config.architectures or [""])[0], None)
            if cls is None:
                raise DtemError(f"{name}: its configuration names no model class of transformers")
            if cls is transformers.GitForCausalLM and (pretrained or with_tokenizer):
                for option in options:
                    raise DtemError(f"{option}: the captioner {name} has a fixed configuration; leave it out")
                model: nn.Module = git.load(source, pretrained, revision)
            else:
                _change(config, options, name)
                settings = {"config": config, "revision": revision or "main"}
                if options.get("num_classes") is not None and options.get("img_size") is None:
                    settings["ignore_mismatched_sizes"] = True  # a new head, as timm makes one
                without_head = config.num_labels == 0 and config.model_type in NO_EMPTY_HEADS
                if without_head:
                    config.num_labels = 1
                    settings["ignore_mismatched_sizes"] = True
                model = cls.from_pretrained(source, **settings) if pretrained else cls(config)
                if without_head:
                    _drop_head(model)
                if cls.__name__.endswith("ForConditionalGeneration"):
                    _add_processor(model, source, revision)
                else:
                    _add_preprocessing(model, source, revision, options.get("img_size"))
        except DtemError:
            raise
        except Exception as error:  # transformers and the Hub raise errors of every kind here
            if not online and not os.path.isdir(source):
                raise DtemError(
                    f"there is no folder {source}, the Hub's model {source} is not in the cache, and the Hub cannot be "
                    "reached: check the network, or give a folder that save_pretrained wrote"
                ) from error
            raise DtemError(f"transformers cannot build {name!r}: {first_line(error)}") from error
    if not os.path.isdir(source):
        note_revision(source, revision, model if pretrained else None)
    return model.eval()


def _drop_head(model: Any) -> None:
    """Make a classifier give features."""
    from torch import nn

    model.classifier = nn.Identity()
    model.num_labels = model.config.num_labels = 0


def _add_preprocessing(model: Any, source: str, revision: str | None, img_size: tuple[int, int] | None) -> None:
    """`model.pretrained_cfg`, as timm's models have it; and the image size, if the model takes images of any size."""
    processor = hf_processor.read_processor(source, revision)
    cfg = None if processor is None else hf_processor.preprocessing(processor, model.config, source)
    if cfg is not None:
        model.pretrained_cfg = cfg
    if getattr(processor, "max_num_patches", None) is not None and img_size is None:  # NaFlex
        model.naflex_processor = processor
        model.dtem_image_size = (hf_processor.naflex_square(processor, vision_config(model.config)),) * 2
    size, patch = img_size if cfg is None else img_size or cfg["input_size"][1:], getattr(model.config, "patch_size", 1)
    if size is None or model.config.model_type not in hf_processor.ANY_SIZE:
        return
    if size[0] % patch or size[1] % patch:
        raise DtemError(f"img_size = {size[0]}x{size[1]} is not a multiple of the patch size, {patch}")
    model.dtem_image_size = size


def _add_processor(model: Any, source: str, revision: str | None) -> None:
    """`model.processor` of a vision-language model, if there is one, and `model.pretrained_cfg`, if it fits."""
    transformers = require("transformers", "transformers")
    try:
        model.processor = transformers.AutoProcessor.from_pretrained(source, revision=revision or "main")
    except Exception:  # transformers and the Hub raise errors of every kind; what needs it says that it is missing
        return
    with contextlib.suppress(DtemError):  # it cuts images into crops: there is no one shape
        _add_preprocessing(model, source, revision, None)


@contextlib.contextmanager
def offline_without_network() -> Iterator[bool]:
    """The Hub's offline mode where the Hub cannot be reached: cached files are used, and others fail at once.

    Without it, every file is tried for half a minute. Yields whether the Hub can be reached.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    online = not before and _reachable(constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = not online
    try:
        yield online
    finally:
        constants.HF_HUB_OFFLINE = before


def _reachable(url: str, seconds: float = 5.0) -> bool:
    if urllib.request.getproxies():
        return True  # a proxy resolves names itself: let the Hub's client try
    parts = urllib.parse.urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 443), seconds).close()
    except OSError:
        return False
    return True


def vision_config(config: Any) -> Any:
    """The part of a configuration of transformers that is about images."""
    return getattr(config, "vision_config", config)


def _change(config: Any, options: dict[str, Any], name: str) -> None:
    vision = vision_config(config)
    size = options.get("img_size")
    if size is not None and vision.model_type not in hf_processor.ANY_SIZE:
        if size[0] != size[1]:
            raise DtemError(f"img_size = {size[0]}x{size[1]}: models of transformers take square images; {name} too")
        vision.image_size = size[0]
    if options.get("num_classes") is not None:
        config.num_labels = options["num_classes"]
    if options.get("drop_path_rate") and hasattr(vision, "drop_path_rate"):
        vision.drop_path_rate = options["drop_path_rate"]

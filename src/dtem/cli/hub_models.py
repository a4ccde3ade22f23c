"""Models of transformers on the command line: ``hf:owner/name``, or a folder that `save_pretrained` wrote."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

PREFIX = "hf:"


def named(name: str) -> bool:
    """Whether a model's name means one of transformers."""
    return name.startswith(PREFIX) or os.path.isfile(os.path.join(name, "config.json"))


def create(name: str, pretrained: bool = False, **options: Any) -> "nn.Module":
    """The model that the configuration names, in eval mode; with random weights unless `pretrained`.

    Of the options, ``img_size`` and ``num_classes`` change the configuration; ``drop_path_rate`` too, where it has one.
    """
    from dtem.types import DtemError

    source = name.removeprefix(PREFIX)
    try:
        import transformers
    except ImportError as error:
        raise DtemError(f'{name} needs the package transformers: pip install "dtem[transformers]"') from error
    if options.pop("global_pool", None) is not None:
        raise DtemError(f"--pool: {name} reads its tokens in its own way; leave it out")
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        classes = [getattr(transformers, each, None) for each in config.architectures or ()]
        if not classes or classes[0] is None:
            raise DtemError(f"{name}: its configuration names no model class of transformers")
        _change(config, options, name)
        model = classes[0].from_pretrained(source, config=config) if pretrained else classes[0](config)
    except DtemError:
        raise
    except Exception as error:  # transformers and the Hub raise errors of every kind here
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DtemError(f"transformers cannot build {name!r}: {first}") from error
    return model.eval()


def _change(config: Any, options: dict[str, Any], name: str) -> None:
    from dtem.types import DtemError

    seen = getattr(config, "vision_config", config)
    size = options.get("img_size")
    if size is not None:
        if size[0] != size[1]:
            raise DtemError(f"--img-size {size[0]}x{size[1]}: models of transformers take square images; {name} too")
        seen.image_size = size[0]
    if options.get("num_classes") is not None:
        config.num_labels = options["num_classes"]
    if options.get("drop_path_rate") and hasattr(seen, "drop_path_rate"):
        seen.drop_path_rate = options["drop_path_rate"]

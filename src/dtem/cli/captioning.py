"""What the verbs share for captioning: the options of a captioner, building it, its contenders."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from dtem.cli import common
from dtem.cli.contenders import UNMERGED, known_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import GitForCausalLM

    from dtem.handle import Handle
    from dtem.tasks.captioning.style import Style

MODEL = "a GIT captioner: a Hub id (microsoft/git-base-coco) or a folder"
WEIGHTS = "of the whole model, as end-to-end training wrote them"
DATA = (
    "captions.json#test (Karpathy's or a list), FILE.jsonl, or Flickr's token .txt; ?images=DIR says where images are"
)


def add_style_arguments(parser: argparse.ArgumentParser) -> None:
    """How captions are written."""
    from dtem.tasks.captioning.style import Style

    parser.add_argument("--beams", metavar="N", type=int, default=Style.beams, help="default %(default)s")
    parser.add_argument(
        "--longest", metavar="N", type=int, default=Style.longest, help="most tokens of a caption; default %(default)s"
    )


def add_once_argument(parser: argparse.ArgumentParser) -> None:
    """How the decoder counts merged tokens."""
    parser.add_argument(
        "--once",
        action="store_true",
        help="the decoder counts every merged token once, as in the paper; without: by its size, for better captions",
    )


def count_as_asked(args: argparse.Namespace, *handles: "Handle") -> None:
    """What that option asks for, of methods that would count by size."""
    for handle in handles:
        if args.once and handle.method.everywhere:
            handle.method.config = dataclasses.replace(handle.method.config, proportional=True)


def rates(args: argparse.Namespace) -> list[str]:
    """The schedules of --r, of which each must say how many tokens the decoder gets."""
    from dtem import schedule
    from dtem.types import DtemError

    specs = common.schedules(args.r)
    for spec in specs:
        if isinstance(schedule.parse(spec), schedule.Threshold | schedule.Adaptive):
            raise DtemError(f"--r {spec}: thresholds do not go with captioning; give a number, such as 13")
    return specs


def style(args: argparse.Namespace) -> "Style":
    """What those options ask for."""
    from dtem.tasks.captioning.style import Style

    return Style(beams=args.beams, longest=args.longest)


def build(args: argparse.Namespace, drop_path_rate: float = 0.0, **options: Any) -> "GitForCausalLM":
    """The captioner that --model names, with its tokenizer; --weights are those of an end-to-end run."""
    from dtem.tasks.captioning.loading import load
    from dtem.types import DtemError

    common.check_method(args)
    for option in ("pool", "img_size", "classes"):
        if getattr(args, option, None) is not None:
            raise DtemError(f"--{option.replace('_', '-')} does not go with captioning: the model says that itself")
    if getattr(args, "random", False):
        raise DtemError("--random does not go with captioning: give --model a folder or a Hub id")
    model = load(args.model)
    if getattr(args, "weights", None) is not None:
        from dtem.cli.weights import load_weights

        load_weights(model, args.weights)
    return model


def check_longest(model: Any, style: "Style") -> None:
    """Refuse captions that are longer than the captioner's positions reach."""
    from dtem.types import DtemError

    most = model.config.max_position_embeddings - 2  # the first token and the last
    if style.longest > most:
        raise DtemError(f"--longest {style.longest} is more than this captioner can write: {most} tokens at most")


def contenders(
    host: Any, handles: "Mapping[str, Handle]", rates: "Sequence[str]"
) -> "dict[tuple[str, str], Callable[[], Any]]":
    """By method and r, what puts a model into that state and gives it; the unmerged one first."""
    from dtem.tasks.captioning.evaluate import at_rates

    found: dict[tuple[str, str], Callable[[], Any]] = {(UNMERGED, "0"): lambda: host}
    for label, handle in handles.items():
        for rate, ready in at_rates(handle, known_to(handle, rates)).items():
            ready()
            if handle.merger.active:
                found[label, rate] = ready
    return found

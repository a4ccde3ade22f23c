"""Groups of options that verbs share, each defined once, and what they mean to the public functions."""

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dtem.cli.parser import VerbParser, comma_list, image_size
from dtem.errors import DtemError, require
from dtem.evaluation import DTYPES

if TYPE_CHECKING:
    from dtem.handle import Handle

DEFAULT_MODEL = "deit_tiny_patch16_224"
R_HELP = (
    "tokens merged per block: 16, 16@-0.5 (falling), 16/16/8/0 (one per block), 20%% (of those left), 2.5G (what meets "
    "2.5 GMACs)"
)


def named(args: Namespace, *names: str) -> dict[str, Any]:
    """Parsed options as keyword arguments of the same names."""
    return {name: getattr(args, name) for name in names}


def add_model_options(parser: VerbParser, default: str | None = DEFAULT_MODEL, weights: bool = True) -> None:
    """`--model`, its weights (unless the verb needs none), and, as advanced options, changes to the model."""
    add = parser.group("model").add_argument
    text = "timm name, hf:owner/name, a folder of transformers, or one of dtem's own (dtem models)"
    add("--model", metavar="NAME", default=default, help=f"{text}; default {default}" if default else text)
    if weights:
        add("--weights", metavar="FILE", help="weights: a .safetensors or torch file (tensors only)")
        add("--random-weights", action="store_true", help="random weights instead of the published ones")
    add = parser.group("model details", advanced=True).add_argument
    add("--num-classes", metavar="N", type=int, help="classes of the head, where not the model's own")
    add("--img-size", metavar="N", help="image size where it is not the model's own: 384 or 224x320")
    add("--global-pool", choices=("token", "avg", "map"), help="how the head reads tokens (MAE: avg)")
    if weights:
        add("--revision", metavar="NAME", help="branch, tag or commit of a model on the Hub; default: the newest")
        add("--encoder-weights", metavar="FILE", help="Segmenter: weights of the encoder alone (timm's ViT)")
        add("--pixel-norm", choices=("half", "imagenet"), help="Segmenter: mean and deviation of pixels; default half")


def model_options(args: Namespace) -> dict[str, Any]:
    """The parsed options of `add_model_options`, as arguments of `dtem.create_model`."""
    settings = named(args, "num_classes", "global_pool")
    settings["img_size"] = image_size("--img-size", args.img_size)
    if not hasattr(args, "weights"):
        return settings
    if args.weights is not None and args.random_weights:
        raise DtemError("--weights and --random-weights exclude each other: leave one out")
    others = named(args, "weights", "encoder_weights", "pixel_norm", "revision")
    return {**settings, **others, "pretrained": not args.random_weights}


def add_method_options(
    parser: VerbParser, several: bool, method: str | None, r: str | None, several_r: bool | None = None
) -> None:
    """`--method`, `--adapter` and (unless `r` is None) `--r`; `several`: lists of methods, and adapters with labels."""
    add = parser.group("merging").add_argument
    commas = "with commas; " if several else ""
    default = method or ("all that need no training" if several else "dtem, or the adapter's")
    add("--method", metavar="LIST" if several else "NAME", default=method, help=f"{commas}default {default}")
    text = "adapter: a file, folder, Hub id or shipped name (dtem adapters); "
    if several:
        text += "may be given several times, with a label each"
        add("--adapter", metavar="[LABEL=]FILE", action="append", default=[], help=text)
    else:
        add("--adapter", metavar="FILE", help=f"{text}it brings its own method")
    several_r = several if several_r is None else several_r
    if r is not None:
        text = f"{R_HELP}; {'with commas; ' * several_r}default {r.replace('%', '%%')}"
        add("--r", metavar="LIST" if several_r else "R", default=r, help=text)
    add = parser.group("merging details", advanced=True).add_argument
    add("--shortcut", action="store_true", help="last block: compute the class token only (exact up to rounding)")


def add_run_options(parser: VerbParser, batch_size: int | None = 64) -> None:
    """Batch size (None: the task's own), device, precision and the processes that decode."""
    add = parser.group("run").add_argument
    text = f"images per forward; default {batch_size or '64, for captioning 16'}"
    add("--batch-size", metavar="N", type=int, default=batch_size, help=text)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="default %(default)s; others by autocast")
    add(
        "--workers",
        metavar="N",
        type=int,
        default=0,
        help="decoding processes; default %(default)s (main process)",
    )


def add_generation_options(
    add: Callable[..., Any], num_beams: int = 5, max_new_tokens: int = 30, text: str = "a caption"
) -> None:
    """How texts are generated; `add` is that of a group."""
    add("--num-beams", metavar="N", type=int, default=num_beams, help="beams of generation; default %(default)s")
    help_text = f"maximum number of tokens of {text}; default %(default)s"
    add("--max-new-tokens", metavar="N", type=int, default=max_new_tokens, help=help_text)
    help_text = "the language model counts every merged token once, not by its size"
    add("--no-proportional-decoder", dest="proportional_decoder", action="store_false", help=help_text)


def add_generating_model_options(parser: VerbParser, default: str, r: str) -> None:
    """The model of a verb that writes texts about images, at one r or several."""
    add_model_options(parser, default=default)
    add_method_options(parser, several=False, method=None, r=r, several_r=True)
    parser.group("run").add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")


def generating(args: Namespace) -> tuple["Handle", list[str], dict[str, Any]]:
    """Handle, every r, and settings of a verb that writes texts about `args.images`."""
    from dtem.data.images import open_image

    for image in args.images:
        open_image(image)  # a file that cannot be read is refused before the model is downloaded
    settings = named(args, "num_beams", "max_new_tokens", "proportional_decoder", "device")
    return build_handle(args, several_r=True), comma_list(args.r), settings


def add_evaluation_options(parser: VerbParser) -> None:
    """The images to evaluate on and the files to write."""
    add = parser.group("data").add_argument
    add("--data", metavar="SPEC", help="class folders, timm:…, hf:…, wds:…, camvid:…, …")
    add("--limit", metavar="N", type=int, help="only N images, drawn at random, the same every time")
    add("--out", metavar="DIR", help="write the outcomes of every image, and record.json")
    add("--plot", metavar="FILE", help="draw accuracy against GFLOPs: .png, .svg or .pdf")
    text = "use images with the name of a training image too: where names repeat, as 1.jpg in every folder"
    parser.group("merging details", advanced=True).add_argument("--keep-listed", action="store_true", help=text)


def evaluation_options(args: Namespace) -> dict[str, Any]:
    """The parsed options that `dtem.evaluate` and `dtem.compare` share; what cannot work is refused at once."""
    for option in ("model", "data"):
        if getattr(args, option) is None:
            raise DtemError(f"--{option} is missing")
    if args.plot is not None:
        from dtem.visualise import curves

        curves.form_of(args.plot)
        require("matplotlib", "plot")
    shared = named(args, "batch_size", "workers", "device", "dtype", "limit", "out", "shortcut", "keep_listed")
    return {"methods": args.method, "adapters": args.adapter, **shared, **model_options(args)}


def build_handle(args: Namespace, several_r: bool = False) -> "Handle":
    """The model of `add_model_options`, patched as `add_method_options` (of one method) says, at the first r."""
    from dtem import methods, schedule
    from dtem.adapters.attach import attach
    from dtem.models.factory import create_model

    rates = comma_list(args.r)
    if len(rates) != 1 and not several_r:
        raise DtemError(f"--r {args.r}: give one r")
    for rate in rates:
        schedule.parse(rate)  # refused before weights are downloaded, as an unknown method is
    if args.method is not None:
        methods.find(args.method)
    model = create_model(args.model, **model_options(args))
    return attach(model, args.method, args.adapter, r=rates[0], shortcut=args.shortcut)

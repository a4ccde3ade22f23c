"""Ask a vision-language model about images, at one r or several.

The model is one of transformers, from the Hub or a folder: PaliGemma, LLaVA and others (docs/vision-language.md).
Tokens are merged in its vision tower; the table shows how many image tokens its language model then reads.
"""

from argparse import Namespace

from dtem.cli import options
from dtem.cli.parser import VerbParser, comma_list
from dtem.cli.printing import print_report

HELP = "ask a vision-language model about images, with and without merging"
EXAMPLES = """\
examples:
  dtem ask photo.jpg "What is the dog doing?" --r 0,6
  dtem ask a.jpg b.jpg "How many people are there?" --model hf:llava-hf/llava-1.5-7b-hf --r 0,8 --json
  dtem ask photo.jpg "What does the sign say?" --model hf:HuggingFaceTB/SmolVLM-Instruct --r 0,40%
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    add = parser.group("question").add_argument
    add("images", metavar="IMAGE", nargs="+", help="PNG, JPEG or WebP files; each is asked about on its own")
    add("question", metavar="QUESTION", help="the text of the prompt")
    add("--num-beams", metavar="N", type=int, default=1, help="beams of generation; default %(default)s")
    add(
        "--max-new-tokens",
        metavar="N",
        type=int,
        default=50,
        help="maximum number of tokens of an answer; default %(default)s",
    )
    text = "the language model counts every merged token once, not by its size"
    add("--no-proportional-decoder", dest="proportional_decoder", action="store_false", help=text)
    options.add_model_options(parser, default="hf:google/paligemma-3b-mix-224")
    options.add_method_options(parser, several=False, method=None, r="0,6", several_r=True)
    parser.group("run").add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")


def run(args: Namespace) -> int:
    """Ask and print the report."""
    from dtem.data.images import open_image
    from dtem.tasks.answering.ask import ask

    for image in args.images:
        open_image(image)  # a file that cannot be read is refused before the model is downloaded
    handle = options.build_handle(args, several_r=True)
    settings = options.named(args, "num_beams", "max_new_tokens", "proportional_decoder", "device")
    print_report(args, ask(handle, args.images, args.question, comma_list(args.r), **settings))
    return 0

"""Ask a vision-language model about images, at one r or several.

The model is one of transformers, from the Hub or a folder: PaliGemma, LLaVA and others (docs/vision-language.md).
Tokens are merged in its vision tower; the table shows how many image tokens its language model then reads.
"""

from argparse import Namespace

from dtem.cli import options
from dtem.cli.parser import VerbParser
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
    options.add_generation_options(add, num_beams=1, max_new_tokens=50, text="an answer")
    options.add_generating_model_options(parser, default="hf:google/paligemma-3b-mix-224", r="0,6")


def run(args: Namespace) -> int:
    """Ask and print the report."""
    from dtem.tasks.answering.ask import ask

    handle, rates, settings = options.generating(args)
    print_report(args, ask(handle, args.images, args.question, rates, **settings))
    return 0

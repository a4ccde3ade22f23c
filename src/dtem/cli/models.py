"""List supported models: with a pattern their names, without one the families and the paper's models.

Every other model of these families works as well: `dtem flops --model NAME` says so, for transformers
`dtem flops --model hf:NAME`.
"""

import argparse

from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_parts, print_report

HELP = "list supported models, families and the paper's models"
EXAMPLES = """\
examples:
  dtem models
  dtem models 'deit*'
  dtem models --json
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help="list names that match it, such as 'deit*'")


def run(args: argparse.Namespace) -> int:
    """List names, or print the overview."""
    import dtem

    if args.pattern is None:
        print_report(args, dtem.model_overview())
    else:
        names = dtem.list_models(args.pattern)
        print_parts(args, {"models": names}, "\n".join(names) or f"no supported model matches {args.pattern}")
    return 0

"""List the adapters that come with the package, with their accuracy next to ToMe's at the same r.

The numbers are those of their cards: top-1 on images that they have not learned from, and the difference from ToMe,
paired image by image, with its 95 % interval.
"""

import argparse

from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_report

HELP = "list the adapters that come with the package, with their accuracy"
EXAMPLES = """\
examples:
  dtem adapters
  dtem adapters --json
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb: none of its own."""


def run(args: argparse.Namespace) -> int:
    """List them."""
    import dtem

    print_report(args, dtem.adapter_overview())
    return 0

"""Count what one image costs, for each r, in two conventions:

  MACs    multiply-adds of matrix products and convolutions, as timm prints them
  paper   as in the paper's tables: MACs plus biases, LayerNorm, softmax, GELU and sums; for a Segmenter MACs without
          the attention products of its decoder

Nothing is computed and no weights are needed, so any model takes a second or two.
"""

import argparse

from dtem.cli.options import add_method_options, add_model_options, model_options, named
from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_report

HELP = "count operations, tokens and added parameters"
EXAMPLES = """\
examples:
  dtem flops --model deit_small_patch16_224 --r 0,8,13,16
  dtem flops --model vit_large_patch16_224 --global-pool avg --r 8     MAE-L
  dtem flops --model vit_small_patch16_384 --r 48,20%,8G --json        other forms of r
  dtem flops --model seg_s_mask_16 --r 20%,30%,40%,50%                 Segmenter
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    add_model_options(parser, weights=False)
    add_method_options(parser, several=False, method=None, r="0,8,16", several_r=True)


def run(args: argparse.Namespace) -> int:
    """Count and print."""
    from dtem.evaluation.flops_report import count_flops

    settings = {**named(args, "method", "adapter", "shortcut"), **model_options(args)}
    print_report(args, count_flops(args.model, args.r, **settings))
    return 0

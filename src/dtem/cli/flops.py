"""Count what one image costs, for each r, in two conventions:

  MACs    multiply-adds of matrix products and convolutions, as timm prints them
  paper   MACs plus biases, LayerNorm, softmax, GELU and sums, as in the paper's tables

Nothing is computed and no weights are needed, so any model takes a second or two.
"""

import argparse

from dtem.cli import common, segmentation

NAME = "flops"
HELP = "count operations, tokens and added parameters"
EXAMPLES = """\
examples:
  dtem flops deit_small_patch16_224 --r 0,8,13,16
  dtem flops vit_large_patch16_224 --pool avg --r 8           MAE-L
  dtem flops vit_small_patch16_384 --r 48,20%,8G --json       other forms of r
  dtem flops seg_s_mask_16 --r 20%,30%,40%,50%                Segmenter, merged and unmerged in each half of a block
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    common.add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Count and print."""
    import contextlib

    import torch

    specs = common.schedules(args.r)
    # Without data where possible; an adapter file has data and so has its model then.
    with torch.device("meta") if args.adapter is None else contextlib.nullcontext():
        handle = common.patch(args, segmentation.build_any(args))
    whole = common.count(handle)
    rows = []
    for spec in specs:
        handle.r = spec
        count = common.count(handle)
        rows.append(
            {
                "r": spec,
                "plan": list(handle.plan),
                "tokens": handle.tokens[-1],
                "macs": count.macs,
                "paper": count.paper,
                "macs_reduction_percent": 100 * (1 - count.macs / whole.macs),
                "paper_reduction_percent": 100 * (1 - count.paper / whole.paper),
            }
        )
    document = {
        "model": args.model,
        "method": handle.method.name,
        "image": list(handle.host.image),
        "tokens": handle.host.patches + handle.host.prefix,
        "parameters_added": sum(parameter.numel() for parameter in handle.method.parameters()),
        "conventions": common.CONVENTIONS,
        "rows": rows,
    }
    common.show(args, document, _table(document))
    return 0


def _table(document: dict[str, object]) -> object:
    rows = document["rows"]
    assert isinstance(rows, list)
    return common.table(
        f"{document['model']}, {document['method']}, {document['tokens']} tokens",
        ("r", "plan", "tokens left", "GFLOPs (MACs)", "GFLOPs (paper)", "fewer MACs", "parameters added"),
        [
            (
                row["r"],
                common.short_plan(row["plan"]),
                str(row["tokens"]),
                common.giga(row["macs"]),
                common.giga(row["paper"]),
                f"{row['macs_reduction_percent']:.1f} %",
                f"{document['parameters_added']:,}",
            )
            for row in rows
        ],
    )

"""GFLOPs of Seg-S-Mask/16 by method and ratio, counted as the paper does; no weights, no images.

python -m benchmarks.segmentation_flops
"""

import argparse

import torch

import dtem
from benchmarks import common
from benchmarks.reproduce import specs
from dtem.measure import flops
from dtem.models import segmenter

IMAGE = (3, 512, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_arguments(parser)
    args = parser.parse_args()
    with torch.device("meta"):
        model = segmenter.create("seg_s_mask_16")
    study = specs.find("segmentation")
    rows = []
    for method, ratio, *metrics in study.paper.values:
        printed = dict(zip(study.paper.columns[2:], metrics, strict=True))["gflops"]
        if method == specs.UNMERGED:
            count = flops.count(model, IMAGE)
        else:
            handle = dtem.patch(model, method, r=float(ratio))
            count = flops.count(model, IMAGE)
            handle.unpatch()
        row = {"method": method, "ratio": ratio, "macs": count.macs, "paper": count.paper, "printed": printed}
        rows.append({**row, "decoder_attention": count.macs - count.paper})
    common.save_record("segmentation_flops", rows, args)


if __name__ == "__main__":
    main()

"""Speed-up of merged ONNX files over unmerged ones in onnxruntime on the CPU. Medians of interleaved rounds.

Both files are written by dtem in the same way and run at the same (full) optimisation level of onnxruntime, with the
threads that it takes by itself. So that the baseline is no straw man, the unmerged model as torch's exporter alone
writes it runs too, and the speed-up is taken over the faster of the two. How much merging itself costs is seen from a
third kind of file, which drops the first r tokens of each block instead: no matching could be faster.

python benchmarks/export_speed.py                                  DeiT-S, r = 13 and 16, batch 1 and 16
python benchmarks/export_speed.py --files onnx --rounds 40         keep the files, to be used again
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path

import common
import onnxruntime
import timm
import torch

import dtem
from dtem import export
from dtem.export import onnx
from dtem.measure import flops, throughput
from dtem.methods import METHODS
from dtem.methods.base import Method
from dtem.types import Taps, Tokens

OWN, PLAIN = "unmerged", "unmerged, torch's exporter"
REST = 0.05
"""Seconds between two runs: the threads of each file's session spin for some milliseconds after a run."""


class Dropping(Method):
    """Drops tokens without looking at them."""

    name = "dropping"
    keeps_mass = False

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        prefix = self.host.prefix
        return tokens.replace(x=torch.cat([tokens.x[:, :prefix], tokens.x[:, prefix + r :]], dim=1))


METHODS["dropping"] = f"{__name__}:Dropping"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--r", default="13,16")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds; default 12, and 60 at batch 1")
    parser.add_argument("--files", type=Path, help="folder for the files; those that are there are used as they are")
    common.add_arguments(parser)
    parser.set_defaults(threads=0)
    args = parser.parse_args()
    rates = list(map(int, args.r.split(",")))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.files or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        macs, image = write(args.model, rates, folder)
        rows = []
        for batch in map(int, args.batch.split(",")):
            runs = {
                name: onnx.runner(folder / f"{args.model}-{stem}.onnx", args.threads)
                for name, stem in {
                    OWN: "r0",
                    PLAIN: "plain",
                    **{f"r={r}": f"r{r}" for r in rates},
                    **{f"dropping {r}": f"drop{r}" for r in rates},
                }.items()
            }
            images = torch.randn(batch, *image)
            rounds = args.rounds or (60 if batch == 1 else 12)
            timing = throughput.compare(runs, images, rounds, warmup=3, rest=REST)
            over = OWN if timing[OWN].seconds <= timing[PLAIN].seconds else PLAIN
            if over == PLAIN:
                timing = throughput.compare({PLAIN: runs.pop(PLAIN), **runs}, images, rounds, warmup=1, rest=REST)
            for r in rates:
                spread = timing[f"r={r}"].speedup
                ratio = macs[0] / macs[r]
                rows.append(
                    {
                        "model": args.model,
                        "batch": batch,
                        "r": r,
                        "macs_ratio": ratio,
                        "speedup": dataclasses.asdict(spread),
                        "of_macs_ratio": spread.median / ratio,
                        "dropping_of_macs_ratio": timing[f"dropping {r}"].speedup.median / ratio,
                        "over": over,
                        "milliseconds": 1000 * timing[f"r={r}"].seconds,
                        "unmerged_milliseconds": 1000 * timing[over].seconds,
                        "rounds": rounds,
                        "threads": args.threads,
                        "onnxruntime": onnxruntime.__version__,
                    }
                )
                print(
                    f"batch {batch:2} r {r}: MACs ratio {ratio:.2f}, speed-up {common.show(rows[-1]['speedup'])} over "
                    f"{over}, {spread.median / ratio:.2f} of the ratio "
                    f"({rows[-1]['dropping_of_macs_ratio']:.2f} by dropping tokens)",
                    flush=True,
                )
    common.keep("export_speed", rows, args)


def write(name: str, rates: list[int], folder: Path) -> tuple[dict[int, int], tuple[int, int, int]]:
    """The files that are not there yet; MACs by r, and the size of an image."""
    torch.manual_seed(0)
    host = timm.create_model(name).eval()
    plain = folder / f"{name}-plain.onnx"
    handle = dtem.patch(host)
    image = handle.host.image
    checked = [torch.randn(2, *image)]
    macs = {}
    for r in [0, *rates]:
        handle.r = r
        macs[r] = flops.count(host, image).macs
        write_once(handle, folder / f"{name}-r{r}.onnx", checked)
    handle.unpatch()
    for r in rates:
        handle = dtem.patch(host, "dropping", r)
        write_once(handle, folder / f"{name}-drop{r}.onnx", checked)
        handle.unpatch()
    if not plain.exists():
        shapes = ({0: torch.export.Dim("batch", min=1)},)
        names = {"input_names": [onnx.INPUT], "output_names": [onnx.OUTPUT]}
        torch.onnx.export(host, (checked[0],), plain, dynamo=True, dynamic_shapes=shapes, external_data=False, **names)
    return macs, image


def write_once(handle: dtem.Handle, path: Path, checked: list[torch.Tensor]) -> None:
    if not path.exists():
        written = export.write(handle, path, "onnx", checked)
        print(f"{path.name}: largest difference {written.agreement.largest:.2g}", flush=True)


if __name__ == "__main__":
    main()

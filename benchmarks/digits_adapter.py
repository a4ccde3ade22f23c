"""Train the packaged embeddings of mnist_vit, and measure the accuracies that `dtem app` plots for it.

    python -m benchmarks.digits_adapter --out src/dtem/models/assets

Writes mnist_vit.dtem.safetensors (trained as in `dtem demo`, without labels, on the 4,000 training digits) and
mnist_vit.record.json (top-1 on the 1,000 held-out digits, ToMe and DTEM at every r).
"""

import argparse
import tempfile
from pathlib import Path

import dtem
from dtem.data import digits
from dtem.measure import record
from dtem.models import mnist_vit
from dtem.tasks.running import sample

RATES = [str(r) for r in range(4, 49, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--train-r", default="48")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=1000, help="held-out digits to evaluate on")
    args = parser.parse_args()
    train, held_out = digits.load()
    settings = {"r": args.train_r, "updates": args.updates, "lr": args.lr, "batch_size": args.batch_size}
    settings |= {"seed": args.seed, "loss": "distill", "learn": ["embeddings"], "workers": 0}
    with tempfile.TemporaryDirectory() as folder:
        handle = dtem.train(mnist_vit.create(), train, preset="few", out=folder, **settings).handle
    handle.r = 16  # the default r of the file
    dtem.save_pretrained(handle, args.out / f"{mnist_vit.NAME}.dtem.safetensors", trained_r=args.train_r)
    report = dtem.evaluate(handle, sample(held_out, args.images), RATES, batch_size=50)
    measured = record.collect("eval", report.to_dict() | {"trained": settings}, seed=args.seed)
    record.save(measured, args.out / f"{mnist_vit.NAME}.record.json")
    print(report)


if __name__ == "__main__":
    main()

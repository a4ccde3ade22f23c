"""Predict the classes of every image of a folder with a merging model, on Ray Data: on a laptop or a cluster.

Every actor loads the model once and predicts batch after batch; other workers read files ahead, and Ray repeats a batch
whose worker is lost. The result is a folder of Parquet files.

    pip install ".[ray]"
    python examples/ray_predict.py photos --model deit_small_patch16_224 --r 13 --out preds
    python examples/ray_predict.py s3://bucket/photos --address auto --actors 8 --gpus 1 --r 13 --out s3://bucket/preds
"""

import argparse
import io
from typing import Any

import numpy as np


class Predictor:
    """The model of one actor."""

    def __init__(self, model: str, r: str, weights: str | None, adapter: str | None, gpu: bool) -> None:
        import timm

        import dtem

        self.device = "cuda" if gpu else "cpu"
        self.model = dtem.create_model(model, weights=weights)
        self.transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=self.model))
        if adapter is None:
            dtem.patch(self.model, r=r)
        else:
            dtem.from_pretrained(adapter, self.model, r=r)
        self.model.to(self.device)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Paths and bytes of images -> paths, classes, probabilities and errors."""
        import torch
        from PIL import Image

        pixels, errors = [], []
        for content in batch["bytes"]:
            try:
                pixels.append(self.transform(Image.open(io.BytesIO(content)).convert("RGB")))
                errors.append("")
            except Exception as error:  # a bad file is a row with its reason, not the end of the run
                errors.append(str(error) or type(error).__name__)
        classes = np.full(len(errors), -1, dtype=np.int64)
        probabilities = np.zeros(len(errors), dtype=np.float32)
        if pixels:
            with torch.inference_mode():
                best = self.model(torch.stack(pixels).to(self.device)).float().softmax(dim=1).max(dim=1)
            read = np.array([not error for error in errors])
            classes[read], probabilities[read] = best.indices.cpu().numpy(), best.values.cpu().numpy()
        return {"path": batch["path"], "class": classes, "probability": probabilities, "error": np.array(errors)}


def main(argv: list[str] | None = None) -> None:
    """Predict and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of images, local or on s3://, gs://")
    parser.add_argument("--out", required=True, help="folder of Parquet files")
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--weights", help=".safetensors; default: the published ones")
    parser.add_argument("--adapter", help="adapter: a file, Hub id or shipped name")
    parser.add_argument("--r", default="13")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--actors", type=int, default=1, help="models at work at the same time")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per actor")
    parser.add_argument("--address", help="of a running cluster; default: Ray on this machine")
    args = parser.parse_args(argv)

    import ray

    ray.init(address=args.address, include_dashboard=False if args.address is None else None)
    images = ray.data.read_binary_files(
        args.data, include_paths=True, file_extensions=["jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"]
    )
    predicted = images.map_batches(
        Predictor,
        fn_constructor_args=(args.model, args.r, args.weights, args.adapter, args.gpus > 0),
        batch_size=args.batch_size,
        num_gpus=args.gpus or None,
        concurrency=args.actors,
    )
    predicted.write_parquet(args.out)
    ray.shutdown()


if __name__ == "__main__":
    main()

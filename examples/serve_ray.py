"""Serve an exported model on Ray Serve: copies of it on one machine or a cluster, requests collected into batches.

    pip install ".[serve]"
    dtem export --model deit_small_patch16_224 --r 13 --out deit_s_r13.onnx
    python examples/serve_ray.py deit_s_r13.onnx --copies 4
    curl --data-binary @cat.jpg http://127.0.0.1:8000/

On a cluster, start it on one of its machines with --address auto; the file must be on all, under the same path.
"""

import argparse
import time

import numpy as np
from ray import serve
from serve_onnx import Model
from starlette.requests import Request


@serve.deployment
class Classifier:
    """One copy of the model."""

    def __init__(self, path: str, threads: int, max_batch: int, wait: float) -> None:
        self.model = Model(path, threads)
        self.predict.set_max_batch_size(max_batch)
        self.predict.set_batch_wait_timeout_s(wait)

    @serve.batch
    async def predict(self, pictures: list[np.ndarray]) -> list[list[dict]]:
        """Ray Serve calls it with all the pictures that wait."""
        return self.model.predict(pictures)

    async def __call__(self, request: Request) -> object:
        """A picture in the body of a POST -> its most probable classes."""
        try:
            picture = self.model.prepare(await request.body())
        except Exception as error:  # Pillow raises errors of every kind on files that are no pictures
            return {"error": f"this is no picture: {error}"}
        return await self.predict(picture)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an .onnx file of dtem export")
    parser.add_argument("--address", help="of a running cluster; default: Ray on this machine")
    parser.add_argument("--port", type=int, default=8000, help="default %(default)s")
    parser.add_argument("--copies", type=int, default=1, help="of the model, on one CPU core each; default %(default)s")
    parser.add_argument("--max-batch", type=int, default=16, help="default %(default)s")
    parser.add_argument(
        "--wait", type=float, default=0.005, help="seconds to wait for more pictures; default %(default)s"
    )
    args = parser.parse_args()

    import ray

    ray.init(address=args.address, include_dashboard=False if args.address is None else None)
    serve.start(http_options={"port": args.port})
    copies = Classifier.options(num_replicas=args.copies, ray_actor_options={"num_cpus": 1})
    serve.run(copies.bind(args.model, 1, args.max_batch, args.wait))
    print(f"http://127.0.0.1:{args.port}/", flush=True)
    try:
        while True:
            time.sleep(1)
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()

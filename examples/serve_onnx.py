"""Serve an exported model over HTTP with onnxruntime: a picture in, its most probable classes out.

Requests that wait are run as one batch. Needs onnxruntime, numpy and Pillow; neither dtem nor torch.

    dtem export --model deit_small_patch16_224 --r 13 --out deit_s_r13.onnx
    python examples/serve_onnx.py deit_s_r13.onnx --port 8000
    curl --data-binary @cat.jpg http://127.0.0.1:8000/

It is an example: it has no log-in and no encryption, so keep it behind a server that has them.
"""

import argparse
import io
import json
import queue
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import onnxruntime
from PIL import Image

MAX_BYTES = 10_000_000


class Model:
    """An exported file, with the preprocessing that it says it needs."""

    def __init__(self, path: str, threads: int = 0) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        metadata = self.session.get_modelmeta().custom_metadata_map
        self.channels, self.height, self.width = json.loads(metadata["image"])
        self.mean, self.std = (np.float32(json.loads(metadata[name])) for name in ("mean", "std"))
        self.filter = Image.Resampling[json.loads(metadata["interpolation"]).upper()]
        self.crop = json.loads(metadata["crop_pct"])
        self.labels = json.loads(metadata["labels"]) if "labels" in metadata else None

    def prepare(self, content: bytes) -> np.ndarray:
        """An encoded picture -> pixels (c, h, w): the short side resized, the middle cut out."""
        image = Image.open(io.BytesIO(content)).convert("RGB" if self.channels == 3 else "L")
        short = int(min(self.height, self.width) / self.crop)
        scale = short / min(image.size)
        size = [short if side == min(image.size) else int(side * scale) for side in image.size]
        image = image.resize(size, self.filter)
        left, top = round((size[0] - self.width) / 2), round((size[1] - self.height) / 2)
        pixels = np.float32(image.crop((left, top, left + self.width, top + self.height))) / 255
        return ((pixels.reshape(self.height, self.width, self.channels) - self.mean) / self.std).transpose(2, 0, 1)

    def predict(self, pictures: list[np.ndarray], top: int = 5) -> list[list[dict]]:
        """The most probable classes of each picture."""
        (logits,) = self.session.run(["logits"], {"images": np.stack(pictures)})
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
        best = np.argsort(-probabilities, axis=1)[:, :top]
        return [
            [self.answer(row, int(index)) for index in order] for row, order in zip(probabilities, best, strict=True)
        ]

    def answer(self, row: np.ndarray, index: int) -> dict:
        """One class."""
        name = None if self.labels is None else self.labels[index]
        return {"class": index, "name": name, "probability": float(row[index])}


class Batcher(threading.Thread):
    """Runs what waits as one batch, at most `max_batch` pictures, and waits `wait` seconds for more."""

    def __init__(self, model: Model, max_batch: int, wait: float) -> None:
        super().__init__(daemon=True)
        self.model, self.max_batch, self.wait = model, max_batch, wait
        self.waiting: queue.Queue = queue.Queue(maxsize=20 * max_batch)
        self.pictures = self.batches = 0

    def submit(self, picture: np.ndarray) -> Future:
        """The answer, as soon as it is there; `queue.Full` if too many wait."""
        answer: Future = Future()
        self.waiting.put_nowait((picture, answer))
        return answer

    def run(self) -> None:
        """Collect and run, for ever."""
        while True:
            batch = [self.waiting.get()]
            try:
                while len(batch) < self.max_batch:
                    batch.append(self.waiting.get(timeout=self.wait))
            except queue.Empty:
                pass
            self.pictures, self.batches = self.pictures + len(batch), self.batches + 1
            try:
                answers = self.model.predict([picture for picture, _ in batch])
                for (_, future), answer in zip(batch, answers, strict=True):
                    future.set_result(answer)
            except Exception as error:  # all who wait must hear of it
                for _, future in batch:
                    future.set_exception(error)


class Handler(BaseHTTPRequestHandler):
    """POST: a picture. GET: how many were served, in how many batches."""

    model: Model
    batcher: Batcher
    timeout = 30

    def do_GET(self) -> None:
        self.reply(200, {"pictures": self.batcher.pictures, "batches": self.batcher.batches})

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            return self.reply(411, {"error": "the length of the picture is missing"})
        if not 0 < length <= MAX_BYTES:
            return self.reply(413, {"error": f"a picture has 1 to {MAX_BYTES} bytes"})
        try:
            picture = self.model.prepare(self.rfile.read(length))
        except Exception as error:  # Pillow raises errors of every kind on files that are no pictures
            return self.reply(400, {"error": f"this is no picture: {error}"})
        try:
            return self.reply(200, self.batcher.submit(picture).result())
        except queue.Full:
            return self.reply(503, {"error": "too many requests are waiting"})

    def reply(self, status: int, content: object) -> None:
        """A JSON document."""
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent."""


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an .onnx file of dtem export")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="default %(default)s; 0: any free one")
    parser.add_argument("--max-batch", type=int, default=16, help="default %(default)s")
    parser.add_argument(
        "--wait", type=float, default=0.005, help="seconds to wait for more pictures; default %(default)s"
    )
    parser.add_argument("--threads", type=int, default=0, help="of onnxruntime; default: its own choice")
    args = parser.parse_args()
    Handler.model = Model(args.model, args.threads)
    Handler.batcher = Batcher(Handler.model, args.max_batch, args.wait)
    Handler.batcher.start()
    with ThreadingHTTPServer((args.host, args.port), Handler) as server:
        print(f"http://{args.host}:{server.server_port}/", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()

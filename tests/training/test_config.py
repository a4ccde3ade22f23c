"""Settings: where they come from, which of them win, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from dtem.training.config import TrainConfig, build, flat, presets, resolve
from dtem.types import DtemError


def test_flags_win_over_a_file_and_a_file_over_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("lr: 3e-4\nbatch: 64\noptions: {temperature: 0.2}\n")
    config, model = resolve("deit_tiny", file, {"batch": 8, "options": {"scale": 0.3}})
    assert model == {"name": "deit_tiny_patch16_224"}
    assert config.augment.mixup == 0.0  # preset
    assert config.lr == 3e-4  # file; YAML reads 3e-4 as text
    assert config.batch == 8  # flag
    assert config.options == {"temperature": 0.2, "scale": 0.3}


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_config_and_names_no_more_than_a_model(name: str) -> None:
    config, model = resolve(name)
    assert isinstance(config, TrainConfig)
    assert set(model) <= {"name", "pool", "img_size", "classes"}


def test_of_a_presets_options_another_method_takes_what_it_has() -> None:
    assert resolve("few")[0].options == {"sparse": True, "temperature": 0.3}
    assert resolve("few", flags={"method": "evit", "mode": "finetune"})[0].options == {}
    assert resolve("few", flags={"method": "tome_gumbel"})[0].options == {"sparse": True, "temperature": 0.3}
    asked = resolve("few", flags={"method": "evit", "options": {"sparse": True}})[0]
    assert asked.options == {"sparse": True}, "what was asked for stays, to be refused by the method"


def test_presets_follow_the_paper() -> None:
    for name in ("deit_tiny", "mae_base", "mae_large"):
        assert resolve(name)[0].augment.mixup == resolve(name)[0].augment.cutmix == 0.0
    small = resolve("deit_small")[0]
    assert (small.augment.mixup, small.augment.cutmix, small.augment.erasing) == (0.8, 1.0, 0.25)
    assert (small.lr, small.min_lr, small.weight_decay, small.clip) == (1e-4, 1e-6, 1e-4, 5.0)
    assert (small.batch, small.epochs, small.r, small.host_r, small.every) == (1024, 30, "16", "13", 10)
    assert resolve("mae_large")[0].r == "8"
    assert resolve("augreg_small_384")[0].r == "48"


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = build({"lr": 0.5, "mixup": 0.1, "scale": [0.5, 1.0], "log": ["tensorboard"], "options": {"dim": 8}})
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(flat(config)))
    assert resolve(file=file)[0] == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "modula"}, "mode = 'modula'.*modular"),
        ({"loss": "labels"}, "loss = 'labels'"),
        ({"batch": 0}, "batch = 0"),
        ({"lr": -1.0}, "lr = -1.0"),
        ({"batch": 8.5}, "batch = 8.5 must be a whole number"),
        ({"lr": "fast"}, "lr = 'fast' must be a number"),
        ({"checkpointing": "yes"}, "checkpointing = 'yes' must be true or false"),
        ({"learning_rate": 1e-3}, "'learning_rate' is no training setting"),
        ({"smoothing": 1.0}, "smoothing = 1.0"),
        ({"log": ["visdom"]}, "log = 'visdom'"),
        ({"mixup": -0.5}, "mixup = -0.5"),
        ({"method": "tome_soft"}, "nothing that learns beside the model"),
        ({"scale": 0.5}, "scale = 0.5 must be a list of numbers"),
        ({"scale": ["a", "b"]}, "must be a list of numbers"),
        ({"scales": 0.5}, "scales = 0.5 must be a list of numbers"),
        ({"r": {"a": 1}}, "r = .* must be a text or a number"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(DtemError, match=message):
        build(settings)


def test_lists_and_texts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("r: [8, 16]\neval_r: [0, 8]\nlog: tensorboard\n")
    config, _ = resolve(file=file)
    assert (config.r, config.eval_rates, config.log) == ("8,16", ("0", "8"), ("tensorboard",))
    for options in ("", "[a]", "3"):
        file.write_text(f"options: {options}\n")
        with pytest.raises(DtemError, match=r"options = .* must be options by name"):
            resolve(file=file)


def test_files_that_are_no_settings_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    for content in ("- 1\n- 2\n", "a: [1\n"):
        file.write_text(content)
        with pytest.raises(DtemError, match=r"bad.yaml"):
            resolve(file=file)
    with pytest.raises(DtemError, match="no preset 'deit'"):
        resolve("deit")
    with pytest.raises(DtemError, match=r"missing.yaml"):
        resolve(file=tmp_path / "missing.yaml")


def test_every_field_has_a_help_text() -> None:
    from dtem.cli.options import _texts

    named = {field.name for field in dataclasses.fields(TrainConfig)} - {"augment", "views", "style"}
    assert named <= _texts(TrainConfig).keys()

"""Settings: where they come from, which of them win, and what is refused."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import dtem
from dtem.errors import DtemError
from dtem.training.config import TrainConfig, presets, resolve


def test_flags_win_over_a_file_and_a_file_over_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("lr: 3e-4\nbatch_size: 64\noptions: {temperature: 0.2}\n")
    config, model = resolve("deit_tiny", file, {"batch_size": 8, "options": {"scale": 0.3}})
    assert model == {"name": "deit_tiny_patch16_224"}
    assert config.augmentation.mixup == 0.0  # preset
    assert config.lr == 3e-4  # file; YAML reads 3e-4 as text
    assert config.batch_size == 8  # flag
    assert config.options == {"exclude": "size", "temperature": 0.2, "scale": 0.3}


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_config_and_names_no_more_than_a_model(name: str) -> None:
    config, model = resolve(name)
    assert isinstance(config, TrainConfig)
    assert set(model) <= {"name", "global_pool", "img_size", "num_classes"}


def test_the_guide_names_every_choice_of_the_papers_presets() -> None:
    ours = {"adapter", "few", "few_fisher", "segmenter_few", "segmenter_host"}
    guide = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
    section = guide.partition("### The paper's recipe")[2].partition("\n### ")[0]
    words = {word for code in re.findall(r"`([^`]+)`", section) for word in re.split(r"[ :,]+", code)}
    for name in presets().keys() - ours:
        content = yaml.safe_load(presets()[name].read_text(encoding="utf-8"))
        keys = content.keys() - {"model", "options"} | content.get("options", {}).keys()
        assert keys | {name} <= words, f"{name}: {sorted(keys - words)}"


def test_of_a_presets_options_another_method_takes_what_it_has() -> None:
    assert resolve("few")[0].options == {"sparse": True, "temperature": 0.3}
    assert resolve("few", settings={"method": "evit", "mode": "finetune"})[0].options == {}
    config = resolve("few", settings={"method": "evit", "options": {"sparse": True}})[0]
    assert config.options == {"sparse": True}, "what was asked for stays, to be refused by the method"


def test_presets_follow_the_paper() -> None:
    for name in ("deit_tiny", "mae_base", "mae_large"):
        assert resolve(name)[0].augmentation.mixup == resolve(name)[0].augmentation.cutmix == 0.0
    small = resolve("deit_small")[0]
    assert (small.augmentation.mixup, small.augmentation.cutmix, small.augmentation.erasing) == (0.8, 1.0, 0.25)
    assert (small.lr, small.min_lr, small.weight_decay, small.clip_grad) == (1e-4, 1e-6, 1e-4, 5.0)
    assert (small.batch_size, small.epochs, small.r, small.host_r, small.embedding_every) == (1024, 30, "16", "13", 10)
    assert resolve("mae_large")[0].r == "8"
    assert resolve("augreg_small_384")[0].r == "48"


PAPER = (
    "augreg_small_384",
    "deit_base",
    "deit_small",
    "deit_tiny",
    "git_base",
    "git_large",
    "lvvit_small",
    "mae_base",
    "mae_large",
)


@pytest.mark.parametrize("name", PAPER)
def test_presets_of_the_papers_models_exclude_by_size_and_keep_all_tokens(name: str) -> None:
    """τ = 0.1, labels, and the r tokens of smallest effective size excluded; what is ours has names of its own."""
    config = resolve(name)[0]
    options = dtem.DtemConfig(**config.options)
    assert (options.exclude, options.sparse, options.fisher, options.temperature) == ("size", False, False, 0.1)
    assert (config.loss, config.mode, config.smoothing) == ("task", "modular", 0.0)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = TrainConfig.from_dict(
        {"lr": 0.5, "mixup": 0.1, "scale": [0.5, 1.0], "log_with": ["tensorboard"], "options": {"dim": 8}}
    )
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    assert resolve(file=file)[0] == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "modula"}, "mode = 'modula'.*modular"),
        ({"loss": "labels"}, "loss = 'labels'"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"lr": -1.0}, "lr = -1.0"),
        ({"batch_size": 8.5}, "batch_size = 8.5 must be a whole number"),
        ({"lr": "fast"}, "lr = 'fast' must be a number"),
        ({"grad_checkpointing": "yes"}, "grad_checkpointing = 'yes' must be true or false"),
        ({"learning_rate": 1e-3}, "'learning_rate' is not a training setting"),
        ({"smoothing": 1.0}, "smoothing = 1.0"),
        ({"log_with": ["visdom"]}, "log_with = 'visdom'"),
        ({"mixup": -0.5}, "mixup = -0.5"),
        ({"dtype": "bf16"}, "dtype = 'bf16'.*bfloat16"),
        ({"scale": 0.5}, "scale = 0.5 must be a list of finite numbers"),
        ({"scale": ["a", "b"]}, "must be a list of finite numbers"),
        ({"scales": 0.5}, "scales = 0.5 must be a list of finite numbers"),
        ({"r": {"a": 1}}, "r = .* must be a text or a number"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(DtemError, match=message):
        TrainConfig.from_dict(settings)


def test_lists_and_texts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("r: [8, 16]\neval_r: [0, 8]\nlog_with: tensorboard\n")
    config, _ = resolve(file=file)
    assert (config.r, config.eval_rates, config.log_with) == ("8,16", ("0", "8"), ("tensorboard",))
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
    from dtem.cli.dataclass_flags import field_texts

    named = {field.name for field in dataclasses.fields(TrainConfig)} - {"augmentation", "cropping", "generation"}
    assert named <= field_texts(TrainConfig).keys()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deep"),
        ("a: " + "{b: " * 5000 + "1" + "}" * 5000, "nested too deep"),
        ("r: &a [*a]\n", "nested too deep"),
        ("lr: [[[[[1]]]]]\n", "nested too deep"),
        (
            "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
            + "lr: *a9\n",
            "nested too deep",
        ),
        ("lr: .inf\n", "lr = inf must be a finite number"),
        ("lr: .nan\n", "lr = nan must be a finite number"),
        ("max_seconds: .inf\n", "max_seconds = inf must be a finite number"),
        ("erasing: .nan\n", "erasing = nan must be a finite number"),
        ("scale: [.nan, 1.0]\n", "scale = .* must be a list of finite numbers"),
        ("scales: [0.5, .inf]\n", "scales = .* must be a list of finite numbers"),
        ("epochs: -1\n", "epochs = -1.0 must be more than 0"),
        ("lr: true\n", "lr = True must be a number"),
        ("updates: true\n", "updates = True must be a whole number"),
        ("scales: [true, 2]\n", "scales = .* must be a list of finite numbers"),
        ("lr: [1]\n", "lr = \\[1\\] must be a number"),
        ("data: [a, b]\n", "data = \\['a', 'b'\\] must be a text"),
        ("data: null\n", "data = None must be a text"),
        ("r: true\n", "r = True must be a text or a number"),
        ("r: [8, [16]]\n", "r = .* must be a text or a number"),
        ("mode: [modular]\n", "mode = \\['modular'\\] is not known"),
        ("seed: -1\n", "seed = -1 must be 0 or more"),
        ("list_files: -1\n", "list_files = -1 must be 0 or more"),
        ("1: 2\nx: 3\n", "1 is not a training setting"),
        ("? [1, 2]\n: 3\n", "cannot be read as YAML"),
        ("lr: 2020-99-99\n", "cannot be read as YAML"),
        (f"updates: {'9' * 5000}\n", "cannot be read as YAML"),
        ("", "must hold settings by name"),
    ],
)
def test_malformed_files_are_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(DtemError, match=message) as caught:
        resolve(file=file)
    assert len(str(caught.value)) < 2000


def test_numbers_of_numpy_and_torch_are_settings() -> None:
    settings = {
        "lr": np.float32(0.5),
        "updates": np.int64(3),
        "epochs": torch.tensor(2),
        "grad_checkpointing": np.bool_(True),
        "r": np.int32(8),
        "eval_r": np.array([0, 8]),
        "scale": np.array([0.5, 1.0]),
        "options": {"temperature": np.float32(0.25), "dim": np.int64(8)},
        "data": Path("photos"),
    }
    config = TrainConfig.from_dict(settings)
    assert (config.lr, config.updates, config.epochs, config.grad_checkpointing) == (0.5, 3, 2.0, True)
    assert (config.r, config.eval_rates, config.augmentation.scale) == ("8", ("0", "8"), (0.5, 1.0))
    assert config.options == {"temperature": 0.25, "dim": 8}
    assert config.data == "photos"
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_list_of_modes_is_no_mode() -> None:
    with pytest.raises(DtemError, match=r"mode = \('modular', 'finetune'\) is not known"):
        TrainConfig.from_dict({"mode": ("modular", "finetune")})

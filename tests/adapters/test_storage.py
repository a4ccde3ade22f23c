"""Integration files: what is saved comes back bit for bit, and what is wrong is refused before the model is touched."""

import ast
import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from huggingface_hub import errors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import dtem
from adapters.local_hub import LocalApi, local_hub
from dtem.adapters import locate, storage
from dtem.adapters.header import digest

HOST = "vit_tiny_patch16_224"
BASE_MODEL = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
FOLDER = ["README.md", "adapter.safetensors", "config.json"]
DIM = 16


def tiny(name: str = HOST, **options: Any) -> nn.Module:
    shape = {"img_size": 32, "patch_size": 4, "depth": 3, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    torch.manual_seed(0)
    return timm.create_model(name, **{**shape, **options}).eval()


def scramble(handle: dtem.Handle) -> None:
    """As if trained: embeddings that no fresh patch would have."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in handle.method.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def trained(r: object = 8, model: nn.Module | None = None, **options: Any) -> dtem.Handle:
    handle = dtem.patch(tiny() if model is None else model, r=r, **options)
    scramble(handle)
    return handle


def run(model: nn.Module) -> torch.Tensor:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(images)


def header(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["dtem"])


def rewrite(path: Path, tensors: dict[str, torch.Tensor] | None = None, **fields: Any) -> None:
    """The adapter at `path` again, with other tensors or header fields (None: without the field)."""
    if tensors is None:
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    fields = {**header(path), "digest": digest(tensors), **fields}
    changed = {name: value for name, value in fields.items() if value is not None}
    save_file(tensors, path, {"dtem": json.dumps(changed)})


def assert_untouched(model: nn.Module) -> None:
    assert not hasattr(model, "dtem")
    assert type(model) is timm.models.vision_transformer.VisionTransformer
    assert torch.equal(run(model), run(tiny()))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "adapter.safetensors"
    dtem.save_pretrained(trained(), path)
    return path


# Round trips


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dim": 48},
        {"dim": 8, "seed": 3},
        {"hidden": (24, 12), "init": "random", "temperature": 0.3, "candidates": 3, "exclude": "size"},
        {"proportional": "train"},
    ],
    ids=str,
)
def test_round_trip_gives_the_same_output_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    handle = trained(8, **options)
    expected = run(handle.model)
    dtem.save_pretrained(handle, tmp_path / "a.safetensors")
    loaded = dtem.from_pretrained(tmp_path / "a.safetensors", tiny())
    assert torch.equal(run(loaded.model), expected)
    assert loaded.method.config == handle.method.config
    assert not torch.equal(expected, run(dtem.patch(tiny(), r=8, **options).model)), "embeddings must matter here"


def test_changed_embeddings_are_what_is_saved(saved: Path) -> None:
    handle = dtem.from_pretrained(saved, tiny())
    before = run(handle.model)
    with torch.no_grad():
        for parameter in handle.method.parameters():
            parameter.neg_().add_(torch.linspace(0, 1, parameter.shape[-1]))
    changed = run(handle.model)
    dtem.save_pretrained(handle, saved)
    assert not torch.equal(before, changed)
    assert torch.equal(run(dtem.from_pretrained(str(saved), tiny()).model), changed)


def test_only_the_embeddings_are_in_the_file(saved: Path) -> None:
    tensors = load_file(saved)
    assert tensors.keys() == trained().method.state_dict().keys()
    assert sum(tensor.numel() for tensor in tensors.values()) == 3 * (32 * DIM + DIM)
    assert saved.stat().st_size < 4 * 3 * (32 * DIM + DIM) + 4096


@pytest.mark.parametrize(
    "options", [{"dim": np.int64(8)}, {"temperature": np.float32(0.5)}, {"seed": np.int64(3)}], ids=str
)
def test_options_may_be_numbers_of_numpy(tmp_path: Path, options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    dtem.save_pretrained(trained(**options), tmp_path / "a.safetensors")
    assert header(tmp_path / "a.safetensors")["options"][name] == value
    assert getattr(dtem.from_pretrained(tmp_path / "a.safetensors", tiny()).method.config, name) == value


def test_half_precision_host_takes_a_full_precision_file(saved: Path) -> None:
    handle = dtem.from_pretrained(saved, tiny().to(torch.bfloat16))
    for name, tensor in load_file(saved).items():
        assert torch.equal(handle.method.state_dict()[name], tensor.to(torch.bfloat16))


def test_header_says_what_the_file_is(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    handle = trained("5@-0.5", dim=12, hidden=(6,), init="random")
    dtem.save_pretrained(handle, path, trained_r=16, notes={"data": "photographs", "τ": "kühl"})
    assert header(path) == {
        "format": 2,
        "version": dtem.__version__,
        "method": "dtem",
        "options": {
            "proportional": None,
            "norms": False,
            "biases": False,
            "dim": 12,
            "hidden": [6],
            "init": "random",
            "seed": 0,
            "temperature": 0.1,
            "scale": 0.1,
            "candidates": None,
            "exclude": "mass",
            "sparse": False,
            "fisher": False,
        },
        "host": {
            "name": HOST,
            "family": "timm_vit",
            "depth": 3,
            "width": 32,
            "heads": 2,
            "head_dim": 16,
            "prefix": 1,
            "pooling": "prefix",
        },
        "dim": 12,
        "hidden": [6],
        "trained_r": "16",
        "schedule": "5@-0.5",
        "notes": {"data": "photographs", "τ": "kühl"},
        "digest": digest(handle.method.state_dict()),
    }


def test_default_width_is_written_out(saved: Path) -> None:
    assert header(saved)["options"]["dim"] is None
    assert header(saved)["dim"] == DIM


@pytest.mark.parametrize(("stored", "plan"), [(8, (8, 8, 8)), ([4, 0, 9], (4, 0, 9)), ("25%", (16, 12, 9))])
def test_stored_schedule_is_used_unless_another_is_given(tmp_path: Path, stored: object, plan: tuple[int, ...]) -> None:
    path = tmp_path / "a.safetensors"
    dtem.save_pretrained(trained(stored), path)
    assert dtem.from_pretrained(path, tiny()).plan == plan
    assert dtem.from_pretrained(path, tiny(), r=2).plan == (2, 2, 2)
    assert dtem.from_pretrained(path, tiny(), r=0).plan == (0, 0, 0)
    assert dtem.from_pretrained(path, tiny(), "1/2/3").plan == (1, 2, 3)


def test_options_that_keep_shapes_can_be_changed(saved: Path) -> None:
    handle = dtem.from_pretrained(saved, tiny(), proportional=False, temperature=0.5, shortcut=True)
    assert handle.method.config.proportional is False
    assert handle.method.config.temperature == 0.5
    assert handle.merger.shortcut
    assert torch.equal(handle.method.state_dict()["embeddings.0.0.weight"], load_file(saved)["embeddings.0.0.weight"])


@pytest.mark.parametrize("option", [{"dim": 8}, {"hidden": (4,), "init": "random"}, {"nonsense": 1}], ids=str)
def test_options_that_change_shapes_are_refused(saved: Path, option: dict[str, Any]) -> None:
    model = tiny()
    with pytest.raises(dtem.DtemError, match=next(iter(option))):
        dtem.from_pretrained(saved, model, **option)
    assert_untouched(model)


def test_written_file_can_be_read_by_others(saved: Path) -> None:
    plain = saved.with_name("plain")
    plain.write_bytes(b"")
    assert saved.stat().st_mode == plain.stat().st_mode


# The digest


def test_a_changed_byte_of_any_tensor_is_noticed(saved: Path) -> None:
    content = saved.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for place in range(start, len(content), 97):
        changed = bytearray(content)
        changed[place] ^= 1
        saved.write_bytes(bytes(changed))
        with pytest.raises(dtem.DtemError, match=r"its tensors differ from those that were saved\. Copy or download"):
            storage.read(saved)


def test_the_digest_covers_names_dtypes_and_shapes() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(6)}
    others = [
        {"a": tensors["a"], "c": tensors["b"]},
        {"b": tensors["a"], "a": tensors["b"]},
        {**tensors, "a": torch.zeros(3, 2)},
        {**tensors, "a": torch.zeros(2, 3, dtype=torch.int32)},
        {**tensors, "b": torch.ones(6, dtype=torch.bfloat16)},
        {**tensors, "c": torch.zeros(0)},
        {**tensors, "a": -tensors["a"]},  # -0.0
    ]
    assert digest({"b": tensors["b"], "a": tensors["a"].T.contiguous().T}) == digest(tensors)
    assert digest(tensors) not in [digest(other) for other in others]
    assert digest({}) != digest({"scalar": torch.tensor(True)})


def test_a_file_of_format_1_without_a_digest_loads(saved: Path) -> None:
    rewrite(saved, digest=None, format=1)
    assert "digest" not in header(saved)
    assert torch.equal(run(dtem.from_pretrained(saved, tiny()).model), run(trained().model))


# Sources


@pytest.mark.parametrize("name", ["adapter.safetensors", "dtem.safetensors"])
def test_folder(name: str, saved: Path) -> None:
    """Of a training run, or as dtem 0.4 uploaded it: without config.json."""
    folder = saved.parent / "folder"
    folder.mkdir()
    shutil.copy(saved, folder / name)
    assert torch.equal(run(dtem.from_pretrained(folder, tiny()).model), run(trained().model))


def test_shipped_name(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = saved.parent / "package"
    (package / "shipped").mkdir(parents=True)
    shutil.copy(saved, package / "shipped" / "tiny-vit.safetensors")
    monkeypatch.setattr(locate.resources, "files", lambda name: package)
    assert torch.equal(run(dtem.from_pretrained("tiny-vit", tiny()).model), run(trained().model))
    with pytest.raises(dtem.DtemError, match="shipped: digits_vit, tiny-vit"):
        dtem.from_pretrained("small-vit", tiny())


@pytest.mark.parametrize(
    "source", ["nowhere", "", "no/where/at-all", "missing/file.safetensors", "../x/y", "a" * 5000, "\0", 5, None]
)
def test_source_that_is_nothing_lists_what_was_tried(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the Hub"))
    model = tiny()
    with pytest.raises(dtem.DtemError, match="Hub id") as caught:
        dtem.from_pretrained(source, model)
    assert repr(source) in str(caught.value)
    assert_untouched(model)


def test_empty_local_folder_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the Hub"))
    with pytest.raises(dtem.DtemError, match=r"not a folder that holds adapter\.safetensors"):
        dtem.from_pretrained("owner/name", tiny())


# The Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[LocalApi]:
    return local_hub(tmp_path / "hub", monkeypatch)


def test_push_and_load_again(hub: type[LocalApi]) -> None:
    handle = trained(8)
    expected = run(handle.model)
    assert dtem.push_to_hub(handle, "me/tiny", trained_r=16) == "hub://me/tiny"
    assert hub.calls == [("token", None), ("private", False), ("revision", None)]
    assert sorted(path.name for path in (hub.root / "me/tiny").iterdir()) == FOLDER
    for source in (hub.root / "me/tiny", "me/tiny"):
        assert torch.equal(run(dtem.from_pretrained(source, tiny()).model), expected)
    assert hub.calls[3:] == [("download", None)]
    dtem.from_pretrained("me/tiny", tiny(), revision="v1")
    dtem.from_pretrained("me/tiny@v2", tiny())
    assert hub.calls[4:] == [("download", "v1"), ("download", "v2")]
    with pytest.raises(dtem.DtemError, match="names another one"):
        dtem.from_pretrained("me/tiny@v2", tiny(), revision="v1")
    assert header(hub.root / "me/tiny" / "adapter.safetensors")["trained_r"] == "16"


def test_push_writes_a_card(hub: type[LocalApi]) -> None:
    dtem.push_to_hub(trained(8), "me/tiny", trained_r=16)
    card = huggingface_hub.ModelCard.load(hub.root / "me/tiny" / "README.md")
    assert card.data.library_name == "dtem"
    assert {"dtem", "token-merging"} <= set(card.data.tags)
    assert card.data.base_model == BASE_MODEL
    assert card.data.base_model_relation == "adapter"
    assert 'dtem.from_pretrained("me/tiny", model)' in card.text
    assert f'dtem.create_model("{HOST}")' in card.text
    assert "trained with r = 16" in card.text


def test_push_passes_its_settings_on(hub: type[LocalApi]) -> None:
    dtem.push_to_hub(trained(), "me/tiny", private=True, revision="dev", token="secret", card="# Mine")
    assert hub.calls == [("token", "secret"), ("private", True), ("branch", ("dev", True)), ("revision", "dev")]
    assert (hub.root / "me/tiny" / "README.md").read_text() == "# Mine"


@pytest.mark.parametrize("repo_id", ["tiny", "a/b/c", "/tiny", "", "me/../tiny"])
def test_push_refuses_what_is_no_hub_id(hub: type[LocalApi], repo_id: str) -> None:
    with pytest.raises(dtem.DtemError, match="owner/name"):
        dtem.push_to_hub(trained(), repo_id)
    assert hub.calls == []


def test_push_refuses_a_method_without_trained_parts(hub: type[LocalApi]) -> None:
    with pytest.raises(dtem.DtemError, match="'tome' has nothing to save"):
        dtem.push_to_hub(dtem.patch(tiny(), method="tome", r=8), "me/tiny")
    assert hub.calls == []


HUB_ERRORS = [
    errors.HfHubHTTPError,
    errors.RepositoryNotFoundError,
    errors.GatedRepoError,
    errors.RevisionNotFoundError,
    errors.EntryNotFoundError,
    errors.LocalEntryNotFoundError,
    errors.OfflineModeIsEnabled,
    errors.HFValidationError,
    errors.LocalTokenNotFoundError,
    errors.HfHubHTTPError.__mro__[1],
    ConnectionError,
]


def raising(kind: type[Exception]) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise kind.__new__(kind, "the reason")  # past __init__: what it asks for differs between versions

    return fail


@pytest.mark.parametrize("kind", HUB_ERRORS, ids=lambda kind: kind.__name__)
def test_hub_errors_name_the_id(hub: type[LocalApi], kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(kind))
    monkeypatch.setattr(LocalApi, "upload_folder", raising(kind))
    model = tiny()
    with pytest.raises(dtem.DtemError, match=r"'me/tiny'.*Check the id") as fetched:
        dtem.from_pretrained("me/tiny", model)
    assert isinstance(fetched.value.__cause__, kind)
    assert_untouched(model)
    with pytest.raises(dtem.DtemError, match=r"'me/tiny'.*hf auth login"):
        dtem.push_to_hub(trained(), "me/tiny")


def test_the_hub_is_imported_only_where_it_is_used() -> None:
    top = ast.parse(Path(storage.__file__).read_text(encoding="utf-8")).body
    imported = {alias.name for node in top if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    imported |= {str(node.module) for node in top if isinstance(node, ast.ImportFrom)}
    assert "safetensors" in imported
    assert not {name.split(".")[0] for name in imported} & {"huggingface_hub", "timm", "transformers"}


# Refusals: the file


class Marker:
    """Pickled, it is a request to create a file on load."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_marker_really_fires(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Marker(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kind", ["pickle", "torch", "torch-legacy"])
def test_pickles_are_refused_and_not_run(tmp_path: Path, kind: str, suffix: str) -> None:
    path, marker, model = tmp_path / f"adapter{suffix}", tmp_path / "marker", tiny()
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Marker(marker)))
    else:
        torch.save({"a": Marker(marker)}, path, _use_new_zipfile_serialization=kind == "torch")
    with pytest.raises(dtem.DtemError, match="not a complete safetensors file") as caught:
        dtem.from_pretrained(path, model)
    assert str(path) in str(caught.value)
    assert not marker.exists()
    assert_untouched(model)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def scribble(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(bytes(content))


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def no_metadata(path: Path) -> None:
    save_file({name: tensor.clone() for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def broken_json(path: Path, text: str = "{") -> None:
    save_file({"a": torch.zeros(1)}, path, {"dtem": text})


def with_tensor(name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = {key: value.clone() for key, value in load_file(path).items()}
        tensors.pop(name, None)
        rewrite(path, {**tensors, name: tensor} if tensor is not None else tensors)

    return change


def with_field(**fields: Any) -> Callable[[Path], None]:
    return lambda path: rewrite(path, **fields)


def with_option(**options: Any) -> Callable[[Path], None]:
    return lambda path: rewrite(path, options={**header(path)["options"], **options})


WEIGHT = "embeddings.1.0.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "not a complete safetensors file"),
    "text": (lambda path: path.write_text("hello, I am text " * 9), "not a complete safetensors file"),
    "truncated": (truncate, "not a complete safetensors file"),
    "header cut": (cut_header, "not a complete safetensors file"),
    "scribbled": (scribble, "not a complete safetensors file"),
    "appended": (append, "not a complete safetensors file"),
    "no dtem metadata": (no_metadata, "not a dtem adapter"),
    "broken json": (broken_json, "cannot be read"),
    "deep json": (lambda path: broken_json(path, "[" * 100_000), "cannot be read"),
    "json list": (lambda path: broken_json(path, "[1]"), "not a dtem adapter"),
    "no format": (with_field(format=None), "not a dtem adapter"),
    "newer format": (with_field(format=3, version="9.9"), r"format 3 \(by dtem 9\.9\).*reads formats 1 to 2"),
    "format of another kind": (with_field(format="one"), "format 'one'"),
    "no digest": (with_field(digest=None), "damaged: digest = None"),
    "no method": (with_field(method=None), "damaged: method = None"),
    "unknown method": (with_field(method="magic"), "method 'magic' is not known"),
    "method no text": (with_field(method=["dtem"]), "damaged: method"),
    "options no dict": (with_field(options=[1]), "damaged: options"),
    "unknown option": (with_option(colour="red"), "no option 'colour'"),
    "option of another kind": (with_option(dim="wide"), "dim = 'wide' must be a whole number"),
    "option out of range": (with_option(temperature=-1), "temperature = -1 must be a positive number"),
    "complex tensor": (with_tensor(WEIGHT, torch.zeros(DIM, 32, dtype=torch.complex64)), "torch.complex64; adapters"),
    "vast width": (with_option(dim=10**9), "expected floats of shape"),
    "absurd width": (with_option(dim=10**40), "cannot be used"),
    "no host": (with_field(host=None), "damaged: host"),
    "host without fields": (with_field(host={"name": HOST}), "damaged: host"),
    "no schedule": (with_field(schedule=None), "damaged: schedule"),
    "bad schedule": (with_field(schedule="lots"), "'lots' is not a schedule"),
    "schedule beyond the host": (with_field(schedule="99"), "r = 99 is more than half"),
    "schedule of another depth": (with_field(schedule="1/2"), "one per block"),
    "digest of another kind": (with_field(digest=5), "digest = 5, expected str"),
    "digest of other tensors": (with_field(digest="blake2b:00"), "its tensors differ"),
    "host of another kind": (
        lambda path: rewrite(path, host={**header(path)["host"], "depth": "3"}),
        r"host\.depth = '3'",
    ),
    "host field missing": (
        lambda path: rewrite(path, host={k: v for k, v in header(path)["host"].items() if k != "pooling"}),
        r"host\.pooling = None, expected str",
    ),
    "notes no dict": (with_field(notes=["a"]), r"notes = \['a'\], expected dict"),
    "note no text": (with_field(notes={"lr": 1}), r"notes\.lr = 1, expected str"),
    "trained_r no text": (with_field(trained_r=[16]), r"trained_r = \[16\], expected str or null"),
    "format a flag": (with_field(format=True), "format True"),
    "seed no number": (with_option(seed="x"), "seed = 'x' must be a whole number"),
    "seed too large": (with_option(seed=10**30), "must be a whole number of at most 64 bits"),
    "proportional a number": (with_option(proportional=1), "proportional = 1 is not known"),
    "missing tensor": (with_tensor(WEIGHT, None), f"lacks tensors: {WEIGHT}"),
    "additional tensor": (with_tensor("head.weight", torch.zeros(2)), "unknown tensors: head.weight"),
    "misshapen tensor": (with_tensor(WEIGHT, torch.zeros(DIM, 31)), rf"{WEIGHT}.*\(16, 31\).*\(16, 32\)"),
    "integer tensor": (with_tensor(WEIGHT, torch.zeros(DIM, 32, dtype=torch.int32)), f"{WEIGHT} is torch.int32"),
    "boolean tensor": (with_tensor(WEIGHT, torch.zeros(DIM, 32, dtype=torch.bool)), f"{WEIGHT} is torch.bool"),
    "NaN": (with_tensor(WEIGHT, torch.full((DIM, 32), torch.nan)), f"{WEIGHT} has NaN"),
    "infinity": (with_tensor(WEIGHT, torch.full((DIM, 32), -torch.inf)), f"{WEIGHT} has NaN or infinite"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_and_foreign_files_are_refused(saved: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    damage(saved)
    model = tiny()
    with pytest.raises(dtem.DtemError, match=message) as caught:
        dtem.from_pretrained(saved, model)
    assert str(saved) in str(caught.value)
    assert_untouched(model)


def test_stored_schedule_that_does_not_fit_gives_way_to_r(saved: Path) -> None:
    rewrite(saved, schedule="99")
    assert dtem.from_pretrained(saved, tiny(), r=8).plan == (8, 8, 8)


# Refusals: the host


@pytest.mark.parametrize(
    ("options", "difference", "described"),
    [
        ({"depth": 4}, "depth", "4 blocks"),
        ({"embed_dim": 64}, "width, head_dim", "width 64"),
        ({"num_heads": 4}, "heads, head_dim", "4 heads of 8"),
        ({"reg_tokens": 2}, "prefix", "3 prefix tokens"),
        ({"global_pool": "avg", "class_token": False}, "prefix", "mean pooling"),
        ({"name": "vit_small_patch16_224"}, "name", "vit_small_patch16_224"),
    ],
    ids=str,
)
def test_wrong_host_is_refused_by_both_names(
    saved: Path, options: dict[str, Any], difference: str, described: str
) -> None:
    model = tiny(**options)
    before, kind = run(model), type(model)
    with pytest.raises(dtem.DtemError, match=rf"differ in {difference}\.") as caught:
        dtem.from_pretrained(saved, model)
    message = str(caught.value)
    assert str(saved) in message
    made_for, here = message.split("the model is")
    assert HOST in made_for
    assert "3 blocks, width 32, 2 heads of 16, 1 prefix tokens, prefix pooling" in made_for
    assert options.get("name", HOST) in here
    assert described in here
    assert type(model) is kind
    assert not hasattr(model, "dtem")
    assert torch.equal(run(model), before)


def test_one_adapter_serves_class_token_and_mean_pooling(tmp_path: Path) -> None:
    path = tmp_path / "mean.safetensors"
    dtem.save_pretrained(trained(model=tiny(global_pool="avg")), path)
    _, saved = storage.read(path)
    for pool in ("avg", "token"):
        loaded = dtem.from_pretrained(path, tiny(global_pool=pool)).method.state_dict()
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def nameless(**options: Any) -> nn.Module:
    model = tiny(**options)
    model.pretrained_cfg = None
    return model


def test_host_without_a_name_is_compared_by_structure(saved: Path) -> None:
    assert torch.equal(run(dtem.from_pretrained(saved, nameless()).model), run(trained().model))
    with pytest.raises(dtem.DtemError, match=r"without architecture name.*differ in depth"):
        dtem.from_pretrained(saved, nameless(depth=4))


def test_adapter_of_a_host_without_a_name_is_compared_by_structure(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    dtem.save_pretrained(trained(model=nameless()), path)
    assert header(path)["host"]["name"] is None
    assert torch.equal(run(dtem.from_pretrained(path, tiny()).model), run(trained().model))
    with pytest.raises(dtem.DtemError, match=r"without architecture name.*differ in depth"):
        dtem.from_pretrained(path, tiny(depth=2))


def test_unsupported_model_is_refused(saved: Path) -> None:
    with pytest.raises(dtem.DtemError, match="Linear is not supported"):
        dtem.from_pretrained(saved, nn.Linear(2, 2))


def test_patched_model_is_refused_and_stays_patched(saved: Path) -> None:
    handle = dtem.patch(tiny(), r=4)
    with pytest.raises(dtem.DtemError, match="patched already"):
        dtem.from_pretrained(saved, handle.model)
    assert handle.plan == (4, 4, 4)


@pytest.mark.parametrize("r", [-1, 99, "lots", [1, 2]])
def test_bad_r_leaves_the_model_unpatched(saved: Path, r: object) -> None:
    model = tiny()
    with pytest.raises(dtem.DtemError):
        dtem.from_pretrained(saved, model, r=r)
    assert_untouched(model)


def test_failure_while_copying_leaves_the_model_unpatched(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    model = tiny()
    monkeypatch.setattr(dtem.methods.Method, "load_state_dict", fail)
    with pytest.raises(MemoryError):
        dtem.from_pretrained(saved, model)
    assert_untouched(model)


# Refusals: writing


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("old", [b"the old file", None])
def test_failing_write_keeps_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, old: bytes | None
) -> None:
    path = tmp_path / "a.safetensors"
    if old is not None:
        path.write_bytes(old)

    def full(*args: Any) -> None:
        assert len(list(tmp_path.iterdir())) == 1 + (old is not None), "written beside the old file"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    handle = trained()
    monkeypatch.setattr(os, step, full)
    with pytest.raises(dtem.DtemError, match=os.strerror(errno.ENOSPC)) as caught:
        dtem.save_pretrained(handle, path)
    assert str(path) in str(caught.value)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == ([] if old is None else [old])


def test_interrupted_write_keeps_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    before = saved.read_bytes()
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dtem.save_pretrained(dtem.patch(tiny(), r=1), saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_save_leaves_nothing_beside_the_file(saved: Path) -> None:
    dtem.save_pretrained(trained(), saved)
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize(
    ("place", "reason"), [("missing/a.safetensors", "folder must exist"), ("file/a", "cannot be made a folder")]
)
def test_unwritable_path_is_named(tmp_path: Path, place: str, reason: str) -> None:
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / place
    with pytest.raises(dtem.DtemError, match=reason) as caught:
        dtem.save_pretrained(trained(), path)
    assert str(path) in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_method_without_trained_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dtem.DtemError, match="method 'tome' has nothing to save"):
        dtem.save_pretrained(dtem.patch(tiny(), method="tome", r=8), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_diverged_embeddings_are_not_saved(saved: Path) -> None:
    before, handle = saved.read_bytes(), trained()
    with torch.no_grad():
        next(handle.method.parameters())[0] = torch.nan
    with pytest.raises(dtem.DtemError, match="NaN"):
        dtem.save_pretrained(handle, saved)
    assert saved.read_bytes() == before


def test_save_takes_a_handle_of_a_patched_model(tmp_path: Path) -> None:
    handle = trained()
    with pytest.raises(dtem.DtemError, match="takes the handle"):
        dtem.save_pretrained(handle.model, tmp_path / "a.safetensors")
    handle.unpatch()
    with pytest.raises(dtem.DtemError, match="not patched"):
        dtem.save_pretrained(handle, tmp_path / "a.safetensors")


@pytest.mark.parametrize("extra", [{"notes": {"epochs": 30}}, {"notes": {1: "a"}}, {"trained_r": "lots"}], ids=str)
def test_bad_extras_are_refused(tmp_path: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(dtem.DtemError, match=r"text by name|not a schedule"):
        dtem.save_pretrained(trained(), tmp_path / "a.safetensors", **extra)
    assert list(tmp_path.iterdir()) == []

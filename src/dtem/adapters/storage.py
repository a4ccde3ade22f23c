"""Adapter files: the trained parts of a method, without the model, in one safetensors file.

The tensors are the method's own (`handle.method.state_dict()`). The header holds one JSON document under the key
``dtem``: format number, package version, method and its options, the host that it was made for, the schedule, and a
digest of the tensors. Nothing is ever unpickled, and a model is touched only after everything in the file has been
checked.
"""

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from dtem import integrations, methods
from dtem import schedule as schedules
from dtem._version import __version__
from dtem.adapters import header as headers
from dtem.adapters.header import FLOATS, FORMAT, HOST_FIELDS, Header, digest
from dtem.errors import DtemError
from dtem.files import write_file
from dtem.handle import Handle, patch
from dtem.types import HostSpec

FILE = "dtem.safetensors"  # inside a folder or a Hub repository

Source = str | os.PathLike[str]
Shapes = dict[str, tuple[torch.Size, bool]]
_HUB_ID = re.compile(r"(?!.*\.(safetensors|pth|pt|bin|ckpt)$)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def save_pretrained(
    handle: Handle, path: Source, *, trained_r: object = None, notes: Mapping[str, str] | None = None
) -> None:
    """Write the adapter: the method's trained parts, its settings and the schedule, without the model.

    A file that is there already is replaced as a whole, or kept where writing fails.

    Args:
        handle: of the patched model.
        path: the file, ``….safetensors``.
        trained_r: the schedule used in training.
        notes: more text for the file's header, by name.

    Examples:
        >>> handle = dtem.patch(model, r=16)
        >>> dtem.save_pretrained(handle, "my.safetensors", trained_r=16)
    """
    if not isinstance(handle, Handle):
        raise DtemError(f"save_pretrained takes the handle that dtem.patch returned, not a {type(handle).__name__}")
    state = handle.merger.method_state_dict()
    if not state:
        raise DtemError(f"method {handle.method.name!r} has nothing to save: it has no trained parts")
    tensors = {name: part.detach().cpu().clone(memory_format=torch.contiguous_format) for name, part in state.items()}
    check_finite(tensors)
    if Path(path).is_dir():
        raise DtemError(f"{path} is a folder; name a file in it, such as {Path(path) / FILE}")
    write(path, _header(handle, trained_r, notes or {}), tensors)


def from_pretrained(
    source: Source, model: nn.Module, r: object = None, *, revision: str | None = None, **options: Any
) -> Handle:
    """Patch `model` with a saved adapter. If anything is wrong, the model stays as it was.

    Args:
        source: a file, a folder with ``dtem.safetensors``, a shipped name, or a Hub id ``owner/name``.
        model: an unpatched model of the kind that the adapter was made for.
        r: any schedule of `dtem.schedule`; None: the one in the file.
        revision: branch, tag or commit of the Hub repository.
        options: settings of `dtem.patch` or the method to change, as far as the trained parts keep their shapes;
            ``norms=False`` uses the embeddings alone.

    Examples:
        >>> handle = dtem.from_pretrained("my.safetensors", model, r=16)
        >>> logits = model(images)
    """
    model = integrations.unwrap(model)
    if isinstance(getattr(model, "dtem", None), integrations.Merger):
        raise DtemError(f"{type(model).__name__} is patched already; unpatch it first (dtem.Handle(model).unpatch())")
    host = integrations.find(model).describe(model)
    path = locate(source, revision)
    try:
        header, tensors = _without_affine(*read(path), options)
        _check_host(header["host"], _describe(model, host))
        shapes = _shapes(header["method"], host, header["options"])
        _check_tensors(tensors, shapes)
        if r is None:
            r = schedules.parse(header["schedule"])
            schedules.check(r, host.patches, host.depth)
    except DtemError as error:
        raise DtemError(f"{path}: {error}") from error
    shortcut = options.pop("shortcut", False)
    changed = {**header["options"], **options}
    if _shapes(header["method"], host, changed) != shapes:
        listed = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise DtemError(f"{path}: {listed} would change the shapes of what was trained; leave it out")
    handle = patch(model, header["method"], shortcut=shortcut, **changed)
    try:
        handle.method.load_state_dict(tensors)
        handle.merger.mark_stored()
        handle.r = r  # only now: the schedule may be one that was learned
    except BaseException:
        handle.unpatch()
        raise
    return handle


def _without_affine(
    header: Header, tensors: dict[str, Tensor], options: Mapping[str, Any]
) -> tuple[Header, dict[str, Tensor]]:
    """The adapter without its norms (and biases), where `options` say so."""
    leaves_out = header["options"].get("norms") and options.get("norms") is False
    if not leaves_out:
        return header, tensors
    rest = {name: part for name, part in tensors.items() if not name.startswith("affine.")}
    if not rest:
        raise DtemError("norms=False leaves nothing of this adapter: it holds norms only")
    return {**header, "options": {**header["options"], "norms": False, "biases": False}}, rest


def start_from(handle: Handle, source: Source) -> Header:
    """Load what an adapter and the method of `handle` have in common; the rest stays as it is. Returns its header."""
    path = locate(source, None)
    try:
        header, tensors = read(path)
        _check_host(header["host"], _describe(handle.model, handle.host))
        own = handle.method.state_dict()
        common = {name: part for name, part in tensors.items() if name in own and part.shape == own[name].shape}
        if not common:
            raise DtemError(f"it has nothing that method {handle.method.name!r} learns here")
        check_finite(common)
    except DtemError as error:
        raise DtemError(f"{path}: {error}") from error
    handle.method.load_state_dict({**own, **common})
    return header


def push_to_hub(
    handle: Handle,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    card: str | None = None,
    trained_r: object = None,
) -> str:
    """Upload the adapter to the Hugging Face Hub. Returns the address of the repository.

    Args:
        handle: of the patched model.
        repo_id: ``owner/name``; the repository is created if it does not exist.
        private: create it as a private one.
        revision: branch to upload to, created if it does not exist.
        token: default: the one that ``hf auth login`` stored.
        card: text of README.md; default: a short one.
        trained_r: the schedule used in training.

    Examples:
        >>> handle = dtem.from_pretrained("my.safetensors", model)
        >>> dtem.push_to_hub(handle, "you/name")
    """
    import huggingface_hub

    if not _HUB_ID.fullmatch(repo_id):
        raise DtemError(f"{repo_id!r} is not a Hub id; write owner/name")
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(handle, Path(folder, FILE), trained_r=trained_r)
        text = _card(_header(handle, trained_r, {}), repo_id) if card is None else card
        Path(folder, "README.md").write_text(text, encoding="utf-8")
        with _hub_errors(repo_id):
            api = huggingface_hub.HfApi(token=token)
            url = api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, commit_message="Upload adapter")
    return str(url)


def write(path: Source, header: Header, tensors: dict[str, Tensor]) -> Header:
    """Write an adapter file; returns its header, which has the digest of the tensors too."""
    header = header | {"digest": digest(tensors)}
    write_file(path, to_bytes(tensors, {"dtem": json.dumps(header)}))
    return header


def read(path: Source) -> tuple[Header, dict[str, Tensor]]:
    """Header and tensors of an adapter file, checked as far as that goes without a host."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        header = json.loads(metadata.get("dtem", "null"))
    except SafetensorError as error:
        raise DtemError(f"this is not a whole safetensors file ({error}); other formats are never loaded") from error
    except Exception as error:  # torch and the JSON parser raise errors of every kind on foreign files
        raise DtemError(f"the file cannot be read: {error}") from error
    return headers.from_older_version(headers.check(header, tensors), tensors)


def _header(handle: Handle, trained_r: object, notes: Mapping[str, str]) -> Header:
    if not all(isinstance(text, str) for note in notes.items() for text in note):
        raise DtemError(f"notes = {notes!r} must be text by name")
    method = handle.method
    return {
        "format": FORMAT,
        "version": __version__,
        "method": method.name,
        "options": dataclasses.asdict(method.config),
        "host": _describe(handle.model, handle.host),
        "dim": getattr(method, "dim", None),
        "hidden": getattr(method.config, "hidden", None),
        "trained_r": None if trained_r is None else str(schedules.parse(trained_r)),
        "schedule": str(handle.merger.schedule),
        "notes": _revision_note(handle.model) | dict(notes),
    }


def _revision_note(model: nn.Module) -> dict[str, str]:
    revision = getattr(model, "hub_revision", None)
    return {} if revision is None else {"host_revision": str(revision)}


def _describe(model: nn.Module, host: HostSpec) -> Header:
    """The host as in the header. Its name is None if the model has no architecture name."""
    nameless = host.name in {cls.__name__ for cls in type(model).__mro__}
    return {name: None if name == "name" and nameless else getattr(host, name) for name in HOST_FIELDS}


def _description(host: Header) -> str:
    return (
        f"{host['name'] or 'a model without architecture name'} ({host['family']}, {host['depth']} blocks, width "
        f"{host['width']}, {host['heads']} heads of {host['head_dim']}, {host['prefix']} prefix tokens, "
        f"{host['pooling']} pooling)"
    )


def _check_host(saved: Header, here: Header) -> None:
    """Refuse another host. Its pooling may differ: the file has an embedding for every block in any case."""
    known = set(HOST_FIELDS) - {"pooling"} - (set() if saved["name"] and here["name"] else {"name"})
    if differing := [name for name in HOST_FIELDS if name in known and saved[name] != here[name]]:
        raise DtemError(
            f"this adapter was made for {_description(saved)}, the model is {_description(here)}: they differ in "
            f"{', '.join(differing)}. Load it onto the model that it was made for"
        )


def _shapes(method: str, host: HostSpec, options: Mapping[str, Any]) -> Shapes:
    """Shape of every trained tensor, and whether it holds floats. On the meta device: a file may name any width."""
    cls = methods.find(method, host.dense)
    try:
        with torch.device("meta"):
            state = cls.create(host, options).state_dict()
    except DtemError:
        raise
    except Exception as error:  # the options of a file, and methods of others, may fail in every way
        raise DtemError(f"the options {dict(options)} cannot be used: {error}") from error
    return {name: (part.shape, part.dtype in FLOATS) for name, part in state.items()}


def _check_tensors(tensors: Mapping[str, Tensor], shapes: Shapes) -> None:
    for what, names in (("lacks", shapes.keys() - tensors.keys()), ("has unknown", tensors.keys() - shapes.keys())):
        if names:
            raise DtemError(f"the file {what} tensors: {', '.join(sorted(names))}")
    for name, (shape, floats) in shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape or (tensor.dtype in FLOATS) != floats:
            expected = f"{'floats' if floats else 'whole numbers'} of shape {tuple(shape)}"
            raise DtemError(f"tensor {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected {expected}")
    check_finite(tensors)


def trained_on(header: Mapping[str, Any]) -> list[str]:
    """File names of the images that an adapter has learned from, by its header.

    The trainer keeps them as ``notes={"trained_on": json.dumps([...])}``. To evaluate on them would flatter.
    """
    text = header.get("notes", {}).get("trained_on", "[]")
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DtemError(f"the adapter's note trained_on is no JSON list: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DtemError(f"the adapter's note trained_on must be a list of file names, not {text:.80}")
    return names


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse what a training that went wrong has left."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise DtemError(f"tensor {name} has NaN or infinite values: the training that made it went wrong")


def locate(source: Source, revision: str | None) -> Path:
    """The local file that `source` stands for, fetched from the Hub if need be."""
    if not isinstance(source, str | os.PathLike):
        raise DtemError(f"{source!r} is a {type(source).__name__}, not a path, a shipped name or a Hub id")
    name, known = os.fspath(source), shipped()
    for path in (name, os.path.join(name, FILE)):
        if os.path.isfile(path):
            return Path(path)
    if name in known:
        return known[name]
    if _HUB_ID.fullmatch(name) and not os.path.exists(name):
        import huggingface_hub

        from dtem.models.hub import note_revision, offline_without_network

        with _hub_errors(name), offline_without_network():
            file = huggingface_hub.hf_hub_download(name, FILE, revision=revision)
        note_revision(name, revision)
        return Path(file)
    raise DtemError(
        f"no adapter found as {name!r}: it is not a file, not a folder that holds {FILE}, not a shipped name "
        f"(shipped: {', '.join(sorted(known)) or 'none'}) and not a Hub id (owner/name)"
    )


def shipped() -> dict[str, Path]:
    """Adapters inside the package, by name."""
    folder = Path(str(resources.files("dtem.adapters"))) / "shipped"
    return {path.stem: path for path in folder.glob("*.safetensors")}


def shipped_for(model: str) -> Path | None:
    """The adapter inside the package for a model of that name (a timm tag behind a point makes no difference)."""
    from dtem.models import mnist_vit

    return mnist_vit.asset("dtem.safetensors") if model == mnist_vit.NAME else shipped().get(model.partition(".")[0])


def list_adapters() -> list[str]:
    """Names of the adapters that come with the package, for `dtem.from_pretrained`.

    Examples:
        >>> dtem.list_adapters()
        ['deit_tiny_patch16_224', 'vit_tiny_patch16_224']
    """
    return sorted(shipped())


@contextlib.contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    from huggingface_hub import errors

    unreachable = errors.HTTPError  # type: ignore[attr-defined]  # of requests or httpx, whichever it stands on
    try:
        yield
    except (OSError, unreachable, errors.EntryNotFoundError, errors.HFValidationError) as error:
        raise DtemError(
            f"the Hub did not serve {repo_id!r}: {type(error).__name__}: {error}. Check the id, the network "
            "(HF_HUB_OFFLINE?) and that you may use it (hf auth login); a local file needs no Hub"
        ) from error


def _card(header: Header, repo_id: str) -> str:
    host, name = header["host"], json.dumps(header["host"]["name"] or "unnamed")
    trained = f"trained with r = {header['trained_r'] or '(not recorded)'}"
    if revision := header["notes"].get("host_revision"):
        trained += f" on the weights {revision}"
    return f"""---
library_name: dtem
base_host: {name}
tags: [dtem, token-merging, vision-transformer, {host["family"]}]
---
# {repo_id}

A `{header["method"]}` adapter for {_description(host)}, {trained}.

```python
model = timm.create_model({name}, pretrained=True)
handle = dtem.from_pretrained("{repo_id}", model)  # stored schedule: r = {header["schedule"]}
```
"""

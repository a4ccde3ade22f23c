"""Adapter files: the trained parts of a method, without the model, in one safetensors file.

The tensors are the method's own (`handle.method.state_dict()`). The header holds one JSON document under the key
``dtem``: format number, package version, method and its options, the host that it was made for, the schedule, and a
digest of the tensors. Nothing is ever unpickled, and a model is touched only after everything in the file has been
checked.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
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
from dtem.adapters.card import Metrics, base_model_of, card_data, card_text, eval_results, write_card
from dtem.adapters.header import FLOATS, FORMAT, HOST_FIELDS, Header, digest
from dtem.adapters.locate import CONFIG, FILE, Source, locate
from dtem.errors import DtemError
from dtem.files import write_file
from dtem.handle import Handle, patch
from dtem.measure.tuned import TunedPlan
from dtem.types import HostSpec

Shapes = dict[str, tuple[torch.Size, bool]]


def save_pretrained(
    handle: Handle,
    path: Source,
    *,
    trained_r: object = None,
    notes: Mapping[str, str] | None = None,
    name: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    datasets: str | Sequence[str] = (),
    metrics: Metrics | None = None,
) -> None:
    """Write the adapter: the method's trained parts, its settings and the schedule, without the model.

    A path that ends in ``.safetensors`` is one file. Any other path is a folder, as the Hub has them:
    ``adapter.safetensors``, the same file; ``config.json``, its settings for people and other programs; and a model
    card, ``README.md``. A file that is there already is replaced as a whole, or kept where writing fails; of a card
    that is there already, the text stays and the metadata are replaced.

    Args:
        handle: of the patched model.
        path: the file, ``….safetensors``, or the folder.
        trained_r: the schedule used in training.
        notes: more text for the file's header, by name.
        name: card: the adapter's name, ``owner/name``; default: the folder's.
        base_model: card: Hub repository of the model's weights. Default: the one that timm or transformers knows for
            this model; give yours if you have loaded other weights.
        license: card: the adapter's licence, as the Hub writes it: ``apache-2.0``.
        datasets: card: Hub names of the training data.
        metrics: card: an evaluation of this adapter: the report of `dtem.evaluate`, or the record.json that it wrote.
            Every r is listed with its paired differences and their 95 % intervals.

    Examples:
        >>> handle = dtem.patch(model, r=16)
        >>> dtem.save_pretrained(handle, "my.safetensors", trained_r=16)
        >>> dtem.save_pretrained(handle, "my-adapter", base_model="timm/deit_tiny_patch16_224.fb_in1k", license="mit")
    """
    if not isinstance(handle, Handle):
        raise DtemError(f"save_pretrained takes the handle that dtem.patch returned, not a {type(handle).__name__}")
    state = handle.merger.method_state_dict()
    if not state:
        raise DtemError(f"method {handle.method.name!r} has nothing to save: it has no trained parts")
    tensors = {name: part.detach().cpu().clone(memory_format=torch.contiguous_format) for name, part in state.items()}
    check_finite(tensors)
    header, path = _header(handle, trained_r, notes or {}), Path(path)
    about = {"name": name, "base_model": base_model, "license": license, "datasets": datasets}
    if path.suffix != ".safetensors" or path.is_dir():
        results = [] if metrics is None else eval_results(metrics, handle.method.name, datasets)
        name, base_model = name or path.resolve().name, base_model or base_model_of(handle.model)
        data = card_data(header, name, base_model, license=license, datasets=datasets, results=results)
        _write_folder(path, header, tensors, base_model)
        write_card(path, data, card_text(header, name, base_model, results))
        return
    for option, value in {**about, "metrics": metrics}.items():
        if value not in (None, ()):
            raise DtemError(f"{option} is for the card of a folder, and {path.name} is one file; leave it out")
    write(path, header, tensors)


def _write_folder(folder: Path, header: Header, tensors: dict[str, Tensor], base_model: str | None) -> None:
    """adapter.safetensors and config.json. The config.json of something else is not overwritten."""
    config = folder / CONFIG
    if config.is_file() and not _is_own(config):
        raise DtemError(f"{config} belongs to something other than an adapter of dtem: choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DtemError(f"{folder} cannot be made a folder: {error.strerror or error}") from error
    header = write(folder / FILE, header, tensors)
    content = {"library_name": "dtem", "base_model": base_model, **header}
    del content["notes"]
    write_file(config, json.dumps(content, indent=2) + "\n")


def _is_own(config: Path) -> dict[str, Any] | None:
    """The content of a config.json that dtem wrote; None for another one."""
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.get("library_name") == "dtem" else None


def from_pretrained(
    source: Source, model: nn.Module, r: object = None, *, revision: str | None = None, **options: Any
) -> Handle:
    """Patch `model` with a saved adapter. If anything is wrong, the model stays as it was.

    Args:
        source: a file, a folder that `save_pretrained` wrote, a shipped name, or a Hub id, ``owner/name`` or
            ``owner/name@revision``.
        model: an unpatched model of the kind that the adapter was made for.
        r: any schedule of `dtem.schedule`; None: the one in the file; "tuned": the plan of `dtem.tune` in the file.
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
        tuned = TunedPlan.from_dict(header["tuned"], host.depth) if "tuned" in header else None
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
        handle.merger.tuned = tuned
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
        raise DtemError(f"this is not a complete safetensors file ({error}); other formats are never loaded") from error
    except Exception as error:  # torch and the JSON parser raise errors of every kind on foreign files
        raise DtemError(f"the file cannot be read: {error}") from error
    config = _is_own(Path(path).parent / CONFIG) if Path(path).name == FILE else None
    if config is not None and config.get("digest") != digest(tensors):
        raise DtemError(f"{CONFIG} next to it belongs to another adapter: copy or download the folder again")
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
        **({} if handle.merger.tuned is None else {"tuned": handle.merger.tuned.to_dict()}),
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
        raise DtemError(f"the adapter's note trained_on is not a JSON list: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DtemError(f"the adapter's note trained_on must be a list of file names, not {text:.80}")
    return names


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse what a training that went wrong has left."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise DtemError(f"tensor {name} has NaN or infinite values: the training that made it went wrong")

"""Where an adapter is: a file, a folder, a repository of the Hub, or one that comes with the package."""

import contextlib
import os
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from dtem.errors import DtemError

FILE, OLD_FILE, CONFIG = "adapter.safetensors", "dtem.safetensors", "config.json"
"""Inside a folder or a repository; `OLD_FILE` was written by dtem 0.4 and older."""

Source = str | os.PathLike[str]
HUB_ID = re.compile(r"(?!.*\.(safetensors|pth|pt|bin|ckpt)$)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def locate(source: Source, revision: str | None = None) -> Path:
    """The local file that `source` stands for, fetched from the Hub if need be.

    Args:
        source: a file, a folder, a shipped name, or a Hub id: ``owner/name`` or ``owner/name@revision``.
        revision: branch, tag or commit of the Hub's repository.
    """
    if not isinstance(source, str | os.PathLike):
        raise DtemError(f"{source!r} is a {type(source).__name__}, not a path, a shipped name or a Hub id")
    name, known = os.fspath(source), shipped()
    local = _in_folder(name) or known.get(name)
    if local is not None:
        if revision is not None:
            raise DtemError(f"revision = {revision!r} is for an adapter on the Hub, and {name} is not; leave it out")
        return local
    from dtem.models import hub  # which imports timm

    repository, revision = hub.split_revision(name, revision)
    if HUB_ID.fullmatch(repository) and not os.path.exists(name):
        return _fetch(repository, revision)
    raise DtemError(
        f"no adapter found as {name!r}: it is not a file, not a folder that holds {FILE}, not a shipped name "
        f"(shipped: {', '.join(sorted(known))}) and not a Hub id (owner/name)"
    )


def _in_folder(path: str) -> Path | None:
    """The path itself if it is a file, or the adapter in that folder."""
    places = (path, os.path.join(path, FILE), os.path.join(path, OLD_FILE))
    return next((Path(each) for each in places if os.path.isfile(each)), None)


def _fetch(repository: str, revision: str | None) -> Path:
    """The adapter of a repository, all files of one commit."""
    import huggingface_hub

    from dtem.models import hub

    with hub_errors(repository), hub.offline_without_network():
        wanted = [FILE, OLD_FILE, CONFIG]
        folder = huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=wanted)
    file = _in_folder(folder)
    if file is None:
        raise DtemError(
            f"the repository {repository} holds neither {FILE} nor {OLD_FILE}: it is not an adapter of dtem"
        )
    hub.loaded[repository] = Path(folder).name  # the commit
    return file


def shipped() -> dict[str, Path]:
    """Adapters inside the package, by name."""
    from dtem.models import digits_vit

    folder = Path(str(resources.files("dtem.adapters"))) / "shipped"
    own = {path.stem: path for path in folder.glob("*.safetensors")}
    return {**own, digits_vit.NAME: digits_vit.asset("dtem.safetensors")}


def shipped_for(model: str) -> Path | None:
    """The adapter inside the package for a model of that name (a timm tag behind a point makes no difference)."""
    return shipped().get(model.partition(".")[0])


def list_adapters() -> list[str]:
    """Names of the adapters that come with the package, for `dtem.from_pretrained`.

    Their numbers: `dtem.adapter_overview`.

    Examples:
        >>> dtem.list_adapters()
        ['deit_tiny_patch16_224', 'digits_vit', 'vit_tiny_patch16_224']
    """
    return sorted(shipped())


@contextlib.contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """Errors of the Hub in the user's words."""
    from huggingface_hub import errors

    unreachable = errors.HTTPError  # type: ignore[attr-defined]  # of requests or httpx, whichever it stands on
    try:
        yield
    except (OSError, unreachable, errors.EntryNotFoundError, errors.HFValidationError) as error:
        raise DtemError(
            f"the Hub did not serve {repo_id!r}: {type(error).__name__}: {error}. Check the id, the network "
            "(HF_HUB_OFFLINE?) and that you may use it (hf auth login); a local file needs no Hub"
        ) from error

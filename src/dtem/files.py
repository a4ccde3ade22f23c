"""Atomic writing of files, locks on what a run writes, and reading of YAML."""

import contextlib
import datetime
import json
import os
import platform
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtem.errors import DtemError, require


def write_file(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file atomically: readers see the old file or the new one, never a part of it."""
    path = Path(path)
    temporary = path.parent / f".dtem-{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or error
        raise DtemError(f"{path} cannot be written ({reason}): its folder must exist and have free space") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_yaml(path: Path) -> Any:
    """The content of a YAML file."""
    yaml = require("yaml", "train")
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DtemError(f"{path} cannot be read as YAML: {error}") from error
    except RecursionError as error:
        raise DtemError(f"{path} cannot be read as YAML: it is nested too deeply") from error


@contextlib.contextmanager
def lock(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Lock a file or folder for this run; another run is refused and told which process holds the lock.

    The lock is the file ``PATH.lock``, or ``run.lock`` in a folder; a file ``.lock.json`` beside it names its holder.
    The operating system releases the lock of a process that dies. Of several processes of one run, only the first takes
    it.

    Args:
        path: what the run writes; its folder is created.
        what: kind of run, for the message: ``predict run``.
    """
    import filelock

    path = Path(path)
    stem = path / "run" if path.is_dir() else path
    lock_file, holder = stem.with_name(f"{stem.name}.lock"), stem.with_name(f"{stem.name}.lock.json")
    lock = filelock.FileLock(lock_file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise DtemError(
            f"{path} is in use by another {what} ({_holder(holder)}): wait for its end, stop it, or write elsewhere"
        ) from None
    except OSError as error:
        raise DtemError(f"{lock_file} cannot be created ({error.strerror or error}): choose another place") from error
    try:
        since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        write_file(holder, json.dumps({"pid": os.getpid(), "host": platform.node(), "since": since}))
        yield
    finally:
        for file in (holder, lock_file):
            with contextlib.suppress(OSError):
                file.unlink()
        lock.release()


def _holder(file: Path) -> str:
    try:
        holder = json.loads(file.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has just begun, or just ended
        return "a process that has just started"

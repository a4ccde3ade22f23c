"""Records: every measured number is stored as a JSON file that says how to reproduce it.

A record names the command, the commit, the versions, the seed, the data and the machine. It holds no absolute path
and no host name, so it can be published as it is. Tables and plots are drawn from records, never typed.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dtem._version import __version__
from dtem.errors import DtemError
from dtem.files import write_file
from dtem.models import hub

FORMAT = "dtem-record-1"


@dataclass(frozen=True)
class Record:
    """One measurement with its provenance. `collect` makes one, `load_record` reads one."""

    kind: str
    """What was measured, e.g. ``bench``."""
    results: Any
    """The numbers: anything that JSON can hold."""
    command: list[str]
    """The command line, without folders."""
    commit: str | None
    """Of the dtem checkout that it ran in; None outside of one."""
    dirty: bool | None
    """Whether tracked files differed from that commit."""
    versions: dict[str, str]
    seed: int | None
    data: str | None
    """`data_hash` of the files that went in; None where there were none."""
    machine: dict[str, Any]
    time: str
    """UTC, ISO 8601."""
    format: str = FORMAT
    revisions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Commit of each repository of the Hub that the process has loaded a model or an adapter from."""


def collect(
    kind: str,
    results: Any,
    *,
    seed: int | None = None,
    data: str | None = None,
    command: Sequence[str] | None = None,
) -> Record:
    """A record of `results`, with everything about this process filled in. `command` is `sys.argv` by default."""
    commit, dirty = _commit()
    return Record(
        kind=kind,
        results=results,
        command=plain_command(sys.argv if command is None else command),
        commit=commit,
        dirty=dirty,
        versions={
            "dtem": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "timm": importlib.metadata.version("timm"),
        },
        seed=seed,
        data=data,
        machine=machine(),
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        revisions=dict(hub.loaded),
    )


def save(record: Record, path: str | Path) -> Path:
    """Write a record: a reader sees the old file or the new one, never half of one."""
    path = Path(path)
    text = json.dumps(dataclasses.asdict(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DtemError(f"cannot write the record {path}: {error.strerror}") from error
    write_file(path, text)
    return path


def load_record(path: str | Path) -> Record:
    """Read a record: the numbers of a measurement, and the command, commit, versions, seed and machine behind them.

    Args:
        path: a JSON file that ``--out`` of a verb, or ``out`` of a function, wrote. A file that is damaged or something
            else is refused by name.

    Examples:
        >>> record = dtem.load_record("results/record.json")
        >>> record.results["rows"][0]["top1"]
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DtemError(f"cannot read the record {path}: {error.strerror}") from error
    except ValueError as error:
        raise DtemError(f"{path} is damaged or not a record: {error}. Measure again, or restore the file.") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise DtemError(f"{path} is not a record of this version: its format is {version!r}, expected {FORMAT!r}")
    fields = {field.name for field in dataclasses.fields(Record)}
    for what, names in (("lacks", fields - content.keys() - {"revisions"}), ("has unknown", content.keys() - fields)):
        if names:
            raise DtemError(f"{path} is a damaged record: it {what} {', '.join(sorted(names))}")
    return Record(**content)


def data_hash(root: str | Path) -> str:
    """SHA-256 over the names and contents of all files under `root` (or of one file), in the order of their names."""
    root = Path(root)
    if not root.exists():
        raise DtemError(f"there is no data at {root}")
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
    total = hashlib.sha256()
    for path in files:
        name = path.relative_to(root).as_posix() if root.is_dir() else path.name
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256")
        # Fixed-length digests keep the parts apart: no file name can pass for content.
        total.update(hashlib.sha256(name.encode()).digest() + content.digest())
    return total.hexdigest()


def plain_command(argv: Sequence[str]) -> list[str]:
    """The command as typed, with folders taken out of the program name and of absolute paths."""
    program = Path(argv[0]).name if argv else ""
    return ["dtem" if program == "__main__.py" else program, *map(_without_folder, argv[1:])]


def _without_folder(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    scheme, colon, path = value.partition(":")  # data may be written as hf:DIR
    if colon and scheme.isidentifier():
        option, value = f"{option}{equals}{scheme}:", path
        equals = ""
    return option + equals + Path(value).name if os.path.isabs(value) else argument


def _commit() -> tuple[str | None, bool | None]:
    """Commit of the working directory and whether it is dirty, if it is a checkout of dtem."""
    try:
        top = Path(_git("rev-parse", "--show-toplevel"))
        if not (top / "src" / "dtem" / "__init__.py").is_file():
            return None, None
        return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):  # no git here, or no repository
        return None, None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def machine() -> dict[str, Any]:
    """CPU, cores, threads, GPU and operating system, without names."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "os": f"{platform.system()} {platform.machine()}",
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"

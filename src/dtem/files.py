"""Writing files that others rely on."""

import contextlib
import os
import uuid
from pathlib import Path

from dtem.types import DtemError


def write_file(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write beside `path`, then move over it: a reader finds the old file or the new one, never half of one."""
    path = Path(path)
    beside = path.parent / f".dtem-{uuid.uuid4().hex}.tmp"
    try:
        with open(beside, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        reason = error.strerror or error
        raise DtemError(f"{path} cannot be written ({reason}): its folder must exist, with room in it") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()

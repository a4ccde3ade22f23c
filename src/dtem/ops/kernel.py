"""Matching and merging by a kernel of our own (`kernel.cpp`), for inference on a CPU under Linux.

At batch 1 the small operations of `match` and `merge` cost as much as a good part of a block; for long inputs the
kernel needs no similarity matrix. It is compiled on first use, in about a second, by the C++ compiler of the machine,
and kept in the user's cache folder. Without a compiler, or where something speaks against it (gradients, other dtypes
and devices, tracing), the operations of torch are used. The environment variable ``DTEM_KERNEL=0`` turns it off.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtem.hooks import is_plain_tensor, is_watched

SOURCE = Path(__file__).with_name("kernel.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
COMPILERS = ("c++", "g++", "clang++")
HALF = (torch.bfloat16, torch.float16)
"""Types that `match` takes beside float32; features are merged in float32 alone."""
SECONDS = 60
"""A compiler that takes longer is given up."""


def serves(x: Tensor, half: bool = False) -> bool:
    """Whether the kernel can be used for this input. With `half`, half precision is served, too."""
    return (
        not is_watched()
        and is_plain_tensor(x)
        and (x.dtype is torch.float32 or (half and x.dtype in HALF))
        and x.is_cpu
        and not (x.requires_grad and torch.is_grad_enabled())
        and library() is not None
    )


def match(z: Tensor, r: int, prefix: int) -> tuple[Tensor, Tensor, Tensor]:
    """`kept`, `merged` and `into` of `ops.match`, which compares half precision in float32, too."""
    z = z.float().contiguous()
    batch, tokens, width = z.shape
    kept = torch.empty(batch, tokens - r, dtype=torch.int64)
    merged, into = (torch.empty(batch, r, dtype=torch.int64) for _ in range(2))
    _loaded().dtem_match(
        *(z.data_ptr(), batch, tokens, width, r, prefix),
        *(kept.data_ptr(), merged.data_ptr(), into.data_ptr(), torch.get_num_threads()),
    )
    return kept, merged, into


def merge(x: Tensor, size: Tensor | None, kept: Tensor, merged: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """Features and sizes of `ops.merge`."""
    x = x.contiguous()
    kept, merged, into = kept.contiguous(), merged.contiguous(), into.contiguous()
    batch, left = kept.shape
    out, new_size = x.new_empty(batch, left, x.shape[2]), x.new_empty(batch, left)
    size = None if size is None else size.contiguous()
    _loaded().dtem_merge(
        *(x.data_ptr(), None if size is None else size.data_ptr(), kept.data_ptr(), merged.data_ptr()),
        *(into.data_ptr(), batch, left, merged.shape[1], x.shape[2]),
        *(out.data_ptr(), new_size.data_ptr(), torch.get_num_threads()),
    )
    return out, new_size


def match_and_merge(x: Tensor, size: Tensor | None, metric: Tensor, r: int, prefix: int) -> tuple[Tensor, Tensor]:
    """`merge` with the outcome of `match`, in one call: at batch 1 the calls themselves take time."""
    x, metric = x.contiguous(), metric.contiguous()
    batch, tokens, width = x.shape
    out, new_size = x.new_empty(batch, tokens - r, width), x.new_empty(batch, tokens - r)
    size = None if size is None else size.contiguous()
    _loaded().dtem_match_and_merge(
        *(metric.data_ptr(), x.data_ptr(), None if size is None else size.data_ptr()),
        *(batch, tokens, metric.shape[2], width, r, prefix),
        *(out.data_ptr(), new_size.data_ptr(), torch.get_num_threads()),
    )
    return out, new_size


def _loaded() -> Any:
    kernel = library()
    assert kernel is not None
    return kernel


@functools.cache
def library() -> Any | None:
    """The compiled kernel; None where it cannot be built or loaded."""
    if sys.platform != "linux" or os.environ.get("DTEM_KERNEL") == "0":
        return None
    try:
        path = _build()
        if path is None:
            return None
        kernel = ctypes.CDLL(os.fspath(path))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # no compiler that works, no home folder, …
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kernel.dtem_match.argtypes = [pointer, *[number] * 5, *[pointer] * 3, ctypes.c_int]
    kernel.dtem_merge.argtypes = [*[pointer] * 5, *[number] * 4, *[pointer] * 2, ctypes.c_int]
    kernel.dtem_match_and_merge.argtypes = [*[pointer] * 3, *[number] * 6, *[pointer] * 2, ctypes.c_int]
    for function in (kernel.dtem_match, kernel.dtem_merge, kernel.dtem_match_and_merge):
        function.restype = None
    return kernel


def _build() -> Path | None:
    """The compiled file, from the cache or the compiler; None without a compiler."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))), None)
    if compiler is None:
        return None
    flags = [*FLAGS, *(["-fopenmp"] if _torch_has_libgomp() else [])]
    version = os.stat(os.path.realpath(compiler))
    key = [SOURCE.read_text(encoding="utf-8"), *flags, compiler, str(version.st_size), str(version.st_mtime_ns), _cpu()]
    folder = _cache_folder()
    if folder is None:
        return None
    path = folder / f"merge-{hashlib.sha256('|'.join(key).encode()).hexdigest()[:20]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            made = Path(temporary) / path.name
            command = [compiler, *flags, os.fspath(SOURCE), "-o", os.fspath(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
            os.replace(made, path)
    return path


def _cache_folder() -> Path | None:
    """The user's own folder for compiled kernels; None if others can write to it, since code is loaded from it."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "dtem" / "kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return folder if status.st_uid == os.getuid() and not status.st_mode & others else None


def _torch_has_libgomp() -> bool:
    """Whether torch's threads are those of libgomp, which the kernel then shares. (Otherwise it has one thread.)"""
    return "libgomp" in Path("/proc/self/maps").read_text()


def _cpu() -> str:
    """What a kernel for this processor depends on: home folders are shared by machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags}"

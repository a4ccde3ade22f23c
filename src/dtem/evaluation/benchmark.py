"""`benchmark`: throughput, speed-up and peak memory of merging against the unmerged model, in one run."""

import copy
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from torch import nn

from dtem import methods, schedule
from dtem.adapters.attach import as_handle, attach, is_patched
from dtem.errors import DtemError
from dtem.evaluation.evaluation_report import public_name
from dtem.evaluation.oracle import as_oracle
from dtem.evaluation.variants import UNMERGED, check_device
from dtem.exporters import engines
from dtem.handle import Handle
from dtem.measure import flops, throughput
from dtem.measure.throughput import Spread
from dtem.models.factory import create_model
from dtem.progress import progress_bar
from dtem.tables import Column, Report, Table, giga, spread, table

ORACLE = "oracle "
"""Before r: the name of its drop oracle among the timed variants."""


def quartiles(ratio: Spread) -> str:
    """A ratio with its quartiles, for tables."""
    return spread(ratio.median, ratio.low, ratio.high)


@dataclass(frozen=True)
class BenchmarkRow:
    """One variant at one batch size."""

    batch: Annotated[int, Column("batch")]
    r: Annotated[str | None, Column("r", missing=UNMERGED)]
    """None: the unmerged model."""
    macs: Annotated[int, Column("GFLOPs (MACs)", giga)]
    macs_ratio: Annotated[float, Column("MACs ratio", "{:.2f}")]
    """MACs of the unmerged model over those of this one."""
    images_per_second: Annotated[float, Column("im/s", "{:.1f}")]
    seconds: Annotated[float, Column("latency ms", lambda seconds: f"{1000 * seconds:.2f}")]
    """Median time of one forward of the batch."""
    speedup: Annotated[Spread, Column("speed-up (quartiles)", quartiles)]
    """Time of the unmerged model over the time of this one, round by round."""
    oracle_seconds: float | None
    """Median time of the drop oracle at the same token counts, if it was asked for."""
    of_oracle: Annotated[Spread | None, Column("of the oracle", quartiles, optional=True)]
    """Time of the oracle over the time of this one, round by round: 1 where merging itself costs nothing."""
    peak_bytes: Annotated[int | None, Column("peak memory MB", lambda peak: f"{peak / 1e6:.1f}", missing="–")]
    """Most memory that a forward holds beyond weights and input; None where that is not known."""


@dataclass(frozen=True, repr=False)
class BenchmarkReport(Report):
    """What `benchmark` returns."""

    model: str
    method: str
    adapter: str | None
    device: str
    dtype: str
    engine: str
    shortcut: bool
    threads: int
    rounds: int
    rows: list[BenchmarkRow]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def parts(self) -> list[Table | str]:
        engine = "" if self.engine == "eager" else f" {self.engine},"
        title = f"{self.model}, {self.method},{engine} {self.device}, {self.dtype}, threads: {self.threads}"
        return [table(title, self.rows)]


def benchmark(
    model: str | nn.Module | Handle,
    r: object = (0, 8, 16),
    *,
    method: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    batch_size: int | Sequence[int] = (1, 32),
    rounds: int = 10,
    warmup: int = 2,
    engine: str = "eager",
    device: str = "cpu",
    dtype: str = "float32",
    threads: int | None = None,
    seed: int = 0,
    shortcut: bool = False,
    oracle: bool = False,
    progress: bool = True,
    **model_options: Any,
) -> BenchmarkReport:
    """Time a model at each r against the unmerged one, on random images.

    The variants take turns: each round times all of them once, in changing order. The speed-up is the median of the
    ratios within rounds, with its quartiles. The unmerged model is the library's own, never patched; r = 0 is the
    patched model with nothing to merge. `model` stays as it was: what is timed are copies.

    Args:
        model: a model's name (for `create_model`), a model, or a handle, which brings its own method.
        r: one schedule or a list of them (see `dtem.schedule`).
        method: name of the reduction method; default dtem, or the adapter's.
        adapter: trained adapter: a file, Hub id or shipped name.
        batch_size: one or several.
        rounds: timed rounds; each times every variant once.
        warmup: rounds before those, not timed.
        engine: what runs every variant, the unmerged one too: PyTorch ``eager``, ``compile`` (`torch.compile`), or
            ``onnx`` (onnxruntime) and ``openvino`` from files that `dtem.export` writes and checks.
        device: ``cpu`` or ``cuda``.
        dtype: float32, bfloat16, float16 or int8, as far as the engine has them.
        threads: CPU threads; default: as they are.
        seed: of images and random weights.
        shortcut: in the last block of a class-token model, compute the class token only.
        oracle: in the same rounds, time the drop oracle of each r, too: the same model with as many tokens in every
            block, which it keeps at fixed positions. What merging takes more than that is the cost of merging itself.
        progress: show a progress bar on stderr.
        model_options: what `create_model` takes (``pretrained``, ``img_size``, …), where `model` is a name.

    Examples:
        >>> report = dtem.benchmark("deit_small_patch16_224", r=[8, 16], batch_size=32, pretrained=False)
        >>> print(report)
    """
    specs = schedule.parse_list(r)
    sizes = [batch_size] if isinstance(batch_size, int) else list(dict.fromkeys(batch_size))
    _check(sizes, rounds, warmup, device, dtype, threads, engine)
    torch.manual_seed(seed)
    images_dtype = engines.input_dtype(engine, dtype)
    host, handles = _variants(model, specs, method, adapter, shortcut, device, images_dtype, model_options)
    first = handles[specs[0]]
    models = {UNMERGED: host, **{spec: handle.model for spec, handle in handles.items()}}
    oracles = {spec: as_oracle(handle).model for spec, handle in handles.items()} if oracle else {}
    macs = {name: flops.count(variant, first.host.image).macs for name, variant in models.items()}
    rows = []
    bar = progress_bar(len(sizes) * (rounds + warmup), "timing", "round", show=progress)
    with throughput.cpu_threads(threads), bar as advance:
        forwards: dict[str, throughput.Forward] = {}
        for size in sizes:
            images = torch.randn(size, *first.host.image, generator=torch.Generator().manual_seed(seed))
            batch, eager = images.to(device, images_dtype), engine == "eager"
            timed = {**models, **{f"{ORACLE}{spec}": variant for spec, variant in oracles.items()}}
            if not forwards or engine == "compile":  # which compiles for one batch size
                forwards = {name: engines.build(variant, engine, dtype) for name, variant in timed.items()}
            rest = engines.REST.get(engine, 0.0)
            timings = throughput.compare(forwards, batch, rounds, warmup, rest=rest, progress=lambda: advance(1))
            for name in models:
                timing, dropping = timings[name], timings.get(f"{ORACLE}{name}")
                row = BenchmarkRow(
                    batch=size,
                    r=None if name == UNMERGED else name,
                    macs=macs[name],
                    macs_ratio=macs[UNMERGED] / macs[name],
                    images_per_second=timing.images_per_second,
                    seconds=timing.seconds,
                    speedup=timing.speedup,
                    oracle_seconds=None if dropping is None else dropping.seconds,
                    of_oracle=None if dropping is None else timing.share_of(dropping),
                    peak_bytes=throughput.peak_bytes(forwards[name], batch) if batch.is_cuda or eager else None,
                )
                rows.append(row)
        return BenchmarkReport(
            model=model if isinstance(model, str) else first.host.name,
            method=first.method.name,
            adapter=None if adapter is None else public_name(os.fspath(adapter)),
            device=device,
            dtype=dtype,
            engine=engine,
            shortcut=first.merger.shortcut,
            threads=torch.get_num_threads(),
            rounds=rounds,
            rows=rows,
        )


def _check(
    sizes: list[int], rounds: int, warmup: int, device: str, dtype: str, threads: int | None, engine: str
) -> None:
    if not sizes or min(sizes) < 1:
        raise DtemError(f"batch_size = {','.join(map(str, sizes))} must be 1 or more, such as 1,32")
    if rounds < 1 or warmup < 0:
        raise DtemError(f"rounds = {rounds} must be 1 or more, warmup = {warmup} must be 0 or more")
    engines.check_engine(engine, dtype, device)
    check_device(device)
    if threads is not None and threads < 1:
        raise DtemError(f"threads = {threads} must be 1 or more")


def _variants(
    model: str | nn.Module | Handle,
    specs: list[str],
    method: str | None,
    adapter: str | os.PathLike[str] | None,
    shortcut: bool,
    device: str,
    dtype: torch.dtype,
    model_options: dict[str, Any],
) -> tuple[nn.Module, dict[str, Handle]]:
    """The unmerged model, and a freshly patched copy of it for each schedule: nothing that one keeps helps another."""
    if isinstance(model, str):
        methods.find(method or "dtem")  # an unknown name is refused before weights are fetched
        host = create_model(model, **model_options)
    elif model_options:
        raise DtemError(
            f"{', '.join(model_options)}: these are for a model given by name, and this one is built already"
        )
    elif is_patched(model):
        patched = copy.deepcopy(as_handle(model, method, adapter).model).to(device, dtype).eval()
        handles = {spec: Handle(copy.deepcopy(patched)) for spec in specs}
        for spec, handle in handles.items():
            handle.r, handle.mode = spec, "hard"
        return Handle(patched).unpatch(), handles
    else:
        assert isinstance(model, nn.Module)
        host = copy.deepcopy(model).eval()
    host = host.to(device, dtype)
    return host, {spec: attach(copy.deepcopy(host), method, adapter, r=spec, shortcut=shortcut) for spec in specs}

"""`benchmark_paper`: the throughput table of the paper (https://arxiv.org/abs/2412.10569), measured again."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from dtem.errors import DtemError
from dtem.evaluation.benchmark import benchmark, quartiles
from dtem.evaluation.variants import UNMERGED, check_device
from dtem.measure.throughput import Spread
from dtem.models.factory import create_model
from dtem.tables import Column, Report, Table, table

BATCH_SIZE = 128
MAE = {"num_classes": 1000, "global_pool": "avg"}
HOSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeiT-S": ("deit_small_patch16_224", {}),
    "DeiT-B": ("deit_base_patch16_224", {}),
    "MAE-B": ("vit_base_patch16_224.mae", MAE),
    "MAE-L": ("vit_large_patch16_224.mae", MAE),
}
"""The hosts by their names in the paper: the model's name, and options of `create_model`."""
ROWS: tuple[tuple[str, str, int, float, int], ...] = (
    ("DeiT-S", UNMERGED, 0, 4.64, 1390),
    ("DeiT-S", "tome", 11, 3.02, 1917),
    ("DeiT-S", "tome", 16, 2.32, 2457),
    ("DeiT-S", "dtem", 12, 2.91, 1991),
    ("DeiT-S", "dtem", 16, 2.35, 2430),
    ("DeiT-B", UNMERGED, 0, 17.7, 440),
    ("DeiT-B", "tome", 11, 11.5, 628),
    ("DeiT-B", "tome", 16, 8.82, 823),
    ("DeiT-B", "dtem", 12, 11.1, 653),
    ("DeiT-B", "dtem", 16, 8.88, 818),
    ("MAE-B", UNMERGED, 0, 17.7, 438),
    ("MAE-B", "tome", 11, 11.5, 628),
    ("MAE-B", "tome", 16, 8.82, 823),
    ("MAE-B", "dtem", 11, 11.6, 653),
    ("MAE-B", "dtem", 16, 8.88, 818),
    ("MAE-L", UNMERGED, 0, 61.8, 131),
    ("MAE-L", "tome", 5, 42.5, 186),
    ("MAE-L", "tome", 8, 31.1, 252),
    ("MAE-L", "dtem", 5, 42.9, 185),
    ("MAE-L", "dtem", 8, 31.4, 250),
)
"""Host, method, r (by its GFLOPs), GFLOPs, and images per second on an RTX 3090 at batch size 128 in float32."""


@dataclass(frozen=True)
class PaperSpeedRow:
    """One row of the paper's table, measured again."""

    model: Annotated[str, Column("model")]
    method: Annotated[str, Column("method")]
    r: Annotated[int, Column("r")]
    gflops: Annotated[float, Column("GFLOPs (MACs)", "{:.2f}")]
    paper_gflops: Annotated[float, Column("in the paper", "{:.2f}")]
    images_per_second: Annotated[float, Column("im/s", "{:.1f}")]
    paper_images_per_second: Annotated[int, Column("in the paper (RTX 3090)", "{}")]
    speedup: Annotated[Spread, Column("speed-up (quartiles)", quartiles)]
    """Time of the unmerged model over the time of this one, round by round."""
    paper_speedup: Annotated[float, Column("in the paper", "{:.2f}")]
    of_oracle: Annotated[Spread | None, Column("of the oracle", quartiles, optional=True)]
    """Time of the drop oracle over the time of this one, if it was asked for."""


@dataclass(frozen=True, repr=False)
class PaperSpeedReport(Report):
    """What `benchmark_paper` returns."""

    device: str
    dtype: str
    batch_size: int
    rounds: int
    rows: list[PaperSpeedRow]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def parts(self) -> list[Table | str]:
        title = f"throughput as in the paper: {self.device}, {self.dtype}, batch {self.batch_size}"
        return [table(title, self.rows)]


def benchmark_paper(
    models: Sequence[str] | None = None,
    *,
    batch_size: int = BATCH_SIZE,
    rounds: int = 10,
    warmup: int = 2,
    device: str = "cuda",
    dtype: str = "float32",
    oracle: bool = False,
    progress: bool = True,
) -> PaperSpeedReport:
    """Measure the paper's throughput table again: its models, rates, batch size and precision, beside its own numbers.

    Each merged model takes turns with the unmerged one, as in `benchmark`. Weights do not change the time of a forward,
    so the models have random ones.

    Args:
        models: names of some of the models, such as DeiT-S; None: all of the table.
        batch_size: images per forward; the paper's is 128.
        rounds: timed rounds; each times every variant once.
        warmup: rounds before those, not timed.
        device: ``cuda``, as in the paper, or ``cpu``.
        dtype: of weights and images: float32, as in the paper, bfloat16 or float16.
        oracle: time the drop oracle, too (see `benchmark`).
        progress: show progress bars on stderr.

    Examples:
        >>> print(dtem.benchmark_paper(["DeiT-S"], device="cpu", batch_size=1, rounds=1))
    """
    check_device(device, dtype)
    names = list(HOSTS) if models is None else list(models)
    for name in names:
        if name not in HOSTS:
            raise DtemError(f"model = {name!r} is not in the paper's throughput table; choose from {', '.join(HOSTS)}")
    settings: dict[str, Any] = {
        **{"batch_size": batch_size, "rounds": rounds, "warmup": warmup, "device": device, "dtype": dtype},
        **{"oracle": oracle, "progress": progress},
    }
    rows = [row for name in names for row in _measure(name, settings)]
    return PaperSpeedReport(device, dtype, batch_size, rounds, rows)


def _measure(name: str, settings: dict[str, Any]) -> list[PaperSpeedRow]:
    """The rows of one host."""
    timm_name, options = HOSTS[name]
    model = create_model(timm_name, pretrained=False, **options)
    published = [row for row in ROWS if row[0] == name]
    paper_base = published[0][4]
    measured = {}
    for method in ("tome", "dtem"):
        rates = [r for _, kind, r, _, _ in published if kind == method]
        for row in benchmark(model, rates, method=method, **settings).rows:
            measured[method if row.r else UNMERGED, int(row.r or 0)] = row
    rows = []
    for _, method, r, gflops, speed in published:
        row = measured[method, r]
        own = row.macs / 1e9, gflops, row.images_per_second, speed, row.speedup, speed / paper_base, row.of_oracle
        rows.append(PaperSpeedRow(name, method, r, *own))
    return rows

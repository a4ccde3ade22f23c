"""`adapter_overview`: the adapters that come with the package, with the accuracy that their cards state."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtem.adapters import storage
from dtem.adapters.card import eval_results
from dtem.adapters.locate import shipped
from dtem.tables import Report, Table

SHOWN_R = ("8", "13", "16", "32", "48")


@dataclass(frozen=True)
class AdapterAccuracy:
    """Top-1 accuracy in percent at one r, on images that the adapter has not learned from."""

    r: str
    images: int
    unmerged: float
    tome: float
    top1: float
    against_tome: tuple[float, float, float] | None
    """Difference from ToMe in points, with its 95 % interval; None where it was not measured."""


@dataclass(frozen=True)
class AdapterSummary:
    """One adapter."""

    name: str
    """For `from_pretrained`."""
    method: str
    model: str
    """Architecture that it was made for."""
    base_model: str | None
    """Hub repository of the weights that it was trained on."""
    trained_r: str | None
    parameters: int
    learned_from: int
    """Images that its header lists as its training images."""
    accuracy: list[AdapterAccuracy]


@dataclass(frozen=True, repr=False)
class AdapterOverview(Report):
    """What `adapter_overview` returns."""

    adapters: list[AdapterSummary]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def parts(self) -> list[Table | str]:
        columns = ("adapter", "parameters", "r", "images", "unmerged %", "ToMe %", "top-1 %", "against ToMe (95 %)")
        rows = []
        for adapter in self.adapters:
            first = (adapter.name, f"{adapter.parameters:,}")
            for row in adapter.accuracy:
                gain = "" if row.against_tome is None else "{:+.1f} ({:+.1f} … {:+.1f})".format(*row.against_tome)
                percents = (f"{value:.1f}" for value in (row.unmerged, row.tome, row.top1))
                rows.append((*first, row.r, str(row.images), *percents, gain))
                first = ("", "")
        return [Table("Adapters that come with dtem", columns, rows)]


def adapter_overview() -> AdapterOverview:
    """List the adapters that come with the package, with their accuracy at each r next to ToMe's, from their cards.

    Examples:
        >>> overview = dtem.adapter_overview()
        >>> print(overview)
        >>> [adapter.name for adapter in overview.adapters]
        ['deit_tiny_patch16_224', 'digits_vit', 'vit_tiny_patch16_224']
    """
    return AdapterOverview([_summary(name, path) for name, path in sorted(shipped().items())])


def _summary(name: str, path: Path) -> AdapterSummary:
    header, tensors = storage.read(path)
    record, base_model = path.with_name(f"{name}.record.json"), None
    if record.is_file():
        results = eval_results(record, header["method"])
    else:
        from huggingface_hub import ModelCard

        data: Any = ModelCard(path.with_suffix(".md").read_text(encoding="utf-8")).data
        results, base_model = data.eval_results or [], data.base_model
    accuracy = []
    for result in results:
        args = result.metric_args or {}
        if result.metric_type == "accuracy" and args["r"] in SHOWN_R:
            gain = args.get("difference_from_tome")
            accuracy.append(
                AdapterAccuracy(
                    r=args["r"],
                    images=args["images"],
                    unmerged=args["unmerged"],
                    tome=args["tome"],
                    top1=result.metric_value,
                    against_tome=None if gain is None else (gain["value"], gain["low"], gain["high"]),
                )
            )
    return AdapterSummary(
        name=name,
        method=header["method"],
        model=header["host"]["name"],
        base_model=base_model,
        trained_r=header.get("trained_r"),
        parameters=sum(part.numel() for part in tensors.values()),
        learned_from=len(storage.trained_on(header)),
        accuracy=accuracy,
    )

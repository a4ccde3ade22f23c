"""Model cards of adapters: README.md with the keys that the Hub reads, and the numbers of an evaluation."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from dtem.adapters.header import Header
from dtem.errors import DtemError, first_line
from dtem.files import write_file

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

CARD = "README.md"
_METRICS = {
    "classification": (
        "image-classification",
        (("top1", "accuracy", "top-1 accuracy (%)"), ("cross_entropy", "cross_entropy", "cross-entropy")),
    ),
    "segmentation": ("image-segmentation", (("miou", "mean_iou", "mean IoU (%)"),)),
    "captioning": ("image-to-text", (("CIDEr", "cider", "CIDEr"),)),
}
"""By task: the Hub's name of it, and the metrics: name in a report, the Hub's type, name in a card."""
_PAIRED = {"cross_entropy": "loss"}
"""Where a paired difference has another name than the metric."""


class HasDict(Protocol):
    """A report of `dtem.evaluate`, or anything else with a `to_dict`."""

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""


Metrics = HasDict | Mapping[str, Any] | str | os.PathLike[str]
"""A report of `dtem.evaluate`, its `to_dict()`, or the record.json that it wrote."""


def base_model_of(model: nn.Module) -> str | None:
    """The Hub repository of the model's weights, as far as the model knows it."""
    loaded = getattr(model, "hub_revision", None)
    if loaded is not None:
        return str(loaded).rpartition("@")[0]
    cfg = getattr(model, "pretrained_cfg", None)
    name = cfg.get("hf_hub_id") if isinstance(cfg, Mapping) else None
    name = name or getattr(getattr(model, "config", None), "_name_or_path", None)
    return name if isinstance(name, str) and name.count("/") == 1 and not os.path.exists(name) else None


def card_data(
    header: Header,
    name: str,
    base_model: str | None,
    *,
    license: str | None = None,
    datasets: str | Sequence[str] = (),
    results: "Sequence[EvalResult]" = (),
) -> "ModelCardData":
    """The metadata of a card."""
    from huggingface_hub import ModelCardData

    listed = [datasets] if isinstance(datasets, str) else list(datasets)
    return ModelCardData(
        model_name=name,
        library_name="dtem",
        base_model=base_model,
        base_model_relation=None if base_model is None else "adapter",
        license=license,
        datasets=listed or None,
        pipeline_tag=results[0].task_type if results else None,
        tags=["dtem", "token-merging", "vision-transformer", header["method"], header["host"]["family"]],
        eval_results=list(results) or None,
    )


def eval_results(metrics: Metrics, method: str, datasets: str | Sequence[str] = ()) -> "list[EvalResult]":
    """The rows of one method in an evaluation, with their paired differences from the unmerged model and from ToMe.

    The arguments of each metric are r, the number of images, the values of the unmerged model and of ToMe at the same
    r, and the differences from them with their 95 % intervals.
    """
    document = _document(metrics)
    try:
        return list(_results(document, method, datasets))
    except (KeyError, TypeError, IndexError) as error:
        raise DtemError(f"metrics is not an evaluation by dtem.evaluate ({error!r})") from error


def _document(metrics: Metrics) -> Mapping[str, Any]:
    if isinstance(metrics, str | os.PathLike):
        from dtem.measure import record  # which imports timm

        loaded: Any = record.load_record(os.fspath(metrics)).results
        return loaded
    return metrics if isinstance(metrics, Mapping) else metrics.to_dict()


def _results(document: Mapping[str, Any], method: str, datasets: str | Sequence[str]) -> "Iterator[EvalResult]":
    from huggingface_hub import EvalResult

    task, metrics = _METRICS[document.get("task", "classification")]
    rows = [row for row in document["rows"] if row["method"] == method]
    if not rows:
        listed = ", ".join(dict.fromkeys(row["method"] for row in document["rows"]))
        raise DtemError(f"metrics has rows of {listed}, and none of {method}: evaluate this adapter without a label")
    against_tome = {(pair["method"], pair["r"]): pair for pair in document.get("against_tome", ())}
    others = {(row["method"], row["r"]): row for row in document["rows"]}
    data = document["data"]
    kind = datasets if isinstance(datasets, str) else next(iter(datasets), data)
    for row in rows:
        pairs = {
            "difference_from_unmerged": row.get("against_unmerged"),
            "difference_from_tome": row.get("against_tome", against_tome.get((method, row["r"]))),
        }
        for name, metric_type, title in metrics:
            found = {key: _difference(pair, name) for key, pair in pairs.items()}
            beside = {"unmerged": others.get(("unmerged", "0")), "tome": others.get(("tome", row["r"]))}
            values = {key: _value(other, name) for key, other in beside.items() if other not in (None, row)}
            yield EvalResult(
                task_type=task,
                dataset_type=kind,
                dataset_name=data,
                metric_type=metric_type,
                metric_name=f"{title}, r = {row['r']}",
                metric_value=_value(row, name),
                metric_args={
                    "r": row["r"],
                    "images": document["images"],
                    **values,
                    **{key: pair for key, pair in found.items() if pair is not None},
                },
            )


def _value(row: Mapping[str, Any], name: str) -> Any:
    value = row[name] if name in row else row["scores"][name]
    return round(value, 4) if isinstance(value, float) else value


def _difference(pair: Mapping[str, Any] | None, name: str) -> dict[str, float] | None:
    """Value and 95 % interval of a paired difference; some reports hold one by metric."""
    if pair is not None and "low" not in pair:
        pair = pair.get(name, pair.get(_PAIRED.get(name, name)))
    return None if pair is None else {key: round(pair[key], 4) for key in ("value", "low", "high")}


def card_text(header: Header, name: str, base_model: str | None, results: "Sequence[EvalResult]") -> str:
    """The text of a card."""
    host = header["host"]
    trained = f"trained with r = {header['trained_r'] or '(not recorded)'}"
    if revision := header["notes"].get("host_revision"):
        trained += f" on the weights {revision}"
    model = f"hf:{base_model or 'owner/name'}" if host["family"].startswith("hf") else host["name"] or "unnamed"
    rows = [(result, result.metric_args or {}) for result in results]
    lines = [f"| {result.metric_name} | {result.metric_value} | {_intervals(args)} |" for result, args in rows]
    table = ["", "| metric | value | difference (95 %) |", "| --- | --- | --- |", *lines, ""] if lines else []
    return f"""# {name}

A `{header["method"]}` adapter for {host["name"] or "a model without a name"} ({host["family"]}, {host["depth"]} blocks,
width {host["width"]}), {trained}. It merges tokens while the model runs; the model's weights are not included.

```python
import dtem

model = dtem.create_model({json.dumps(model)})
handle = dtem.from_pretrained({json.dumps(name)}, model)  # stored schedule: r = {header["schedule"]}
```
""" + "\n".join(table)


def _intervals(args: Mapping[str, Any]) -> str:
    named = (("unmerged", "from unmerged"), ("tome", "from ToMe"))
    pairs = ((args.get(f"difference_from_{key}"), text) for key, text in named)
    return ", ".join(
        f"{pair['value']:+.2f} ({pair['low']:+.2f} … {pair['high']:+.2f}) {text}" for pair, text in pairs if pair
    )


def write_card(folder: Path, data: "ModelCardData", text: str) -> None:
    """Write README.md. The text of a card that is there stays; its metadata are replaced."""
    from huggingface_hub import ModelCard

    path = folder / CARD
    if path.is_file():
        try:
            card = ModelCard(path.read_text(encoding="utf-8"))
        except Exception as error:  # YAML that is damaged raises errors of every kind
            raise DtemError(f"{path} cannot be read as a model card: {first_line(error)}; fix or remove it") from error
        card.data = data
        write_file(path, str(card))
    else:
        write_file(path, f"---\n{data.to_yaml()}\n---\n\n{text}")

"""COCO caption metrics and teacher-forced loss of variants on the same images, with a bootstrap over images."""

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

from dtem.data.loader import Loader
from dtem.data.preprocessing import resolve_data_config
from dtem.data.transforms import eval_transform
from dtem.errors import DtemError
from dtem.evaluation.evaluation_report import EvaluationReport, differences, left_out_notes, shared_fields
from dtem.evaluation.variants import Setup, Variant, variants_of
from dtem.files import write_file
from dtem.measure.statistics import Difference
from dtem.progress import progress_bar
from dtem.tables import Column, Table, giga, table
from dtem.tasks.captioning import evaluator, metric
from dtem.tasks.captioning.captions import Captions, open_captions
from dtem.tasks.captioning.generate import check_generation, decoder_counts_sizes
from dtem.tasks.captioning.outcomes import CaptionOutcomes, paired, with_scores
from dtem.tasks.running import eval_mode

BATCH_SIZE = 16
Differences = dict[str, Difference]
"""By metric."""


def _cider(pairs: Differences) -> str:
    return pairs["CIDEr"].text(1) if "CIDEr" in pairs else ""


@dataclass(frozen=True)
class CaptioningRow:
    """One variant: the metrics of its captions and its cost."""

    method: Annotated[str, Column("method")]
    r: Annotated[str, Column("r")]
    scores: dict[str, metric.Score]
    """By metric, times 100, or a text that says what is missing to compute it."""
    loss: Annotated[float, Column("loss", "{:.4f}")]
    """Teacher-forced cross-entropy per token of the reference captions."""
    macs: Annotated[int, Column("GFLOPs (MACs)", giga)]
    """MACs of the vision encoder."""
    paper: int
    tokens: Annotated[int, Column("tokens")]
    """Image tokens that the decoder reads."""
    captions_per_second: Annotated[float, Column("captions/s", "{:.1f}")]
    against_unmerged: Annotated[Differences | None, Column("CIDEr against unmerged", _cider)]
    against_tome: Annotated[Differences | None, Column("against tome", _cider)]

    @property
    def cider(self) -> metric.Score:
        """CIDEr, times 100."""
        return self.scores["CIDEr"]


@dataclass(frozen=True, repr=False)
class CaptioningReport(EvaluationReport):
    """Caption metrics of every variant, with paired differences."""

    rows: list[CaptioningRow]
    outcomes: dict[str, CaptionOutcomes] = field(metadata={"json": False})
    num_beams: int
    unreadable: dict[str, str]
    """Reason by image that could not be decoded."""
    left_out: int
    """Images that some adapter was trained on."""

    task: ClassVar[str] = "captioning"
    plotted: ClassVar[tuple[str, str]] = ("cider", "CIDEr")

    def against_unmerged(self, row: CaptioningRow) -> Difference | None:
        return (row.against_unmerged or {}).get("CIDEr")

    def to_dict(self) -> dict[str, Any]:
        rows = []
        for row in map(asdict, self.rows):
            scores = row.pop("scores")
            rows.append({"method": row.pop("method"), "r": row.pop("r"), **scores, **row})
        return {**super().to_dict(), "rows": rows}

    def parts(self) -> list[Table | str]:
        metrics = [name for name in metric.NAMES if name not in ("BLEU-2", "BLEU-3")]
        missing = {value for row in self.rows for value in row.scores.values() if isinstance(value, str)}
        notes = [
            f"{self.images} images, {self.num_beams} beams; GFLOPs of the vision encoder; tokens for the decoder",
            *(f"{_without(self.rows, reason)} {reason}: {metric.HELP[reason]}" for reason in sorted(missing)),
            *left_out_notes(self.left_out, ["an adapter"], len(self.unreadable)),
        ]
        (method, r, *columns), cells = (plain := table(self.title, self.rows)).columns, plain.rows
        rows = []
        for row, (label, rate, *others) in zip(self.rows, cells, strict=True):
            scores = ("–" if isinstance(value := row.scores[name], str) else f"{value:.1f}" for name in metrics)
            rows.append((label, rate, *scores, *others))
        return [Table(self.title, (method, r, *metrics, *columns), rows, "\n".join(notes))]


def _without(rows: list[CaptioningRow], reason: str) -> str:
    """The metrics that are not known for a reason."""
    return ", ".join(name for name, score in rows[0].scores.items() if score == reason)


def evaluate_captioners(
    setup: Setup, num_beams: int, max_new_tokens: int, proportional_decoder: bool
) -> CaptioningReport:
    """Caption every image with the unmerged model and with every patched one, and score the captions."""
    model, settings = setup.model, setup.settings
    check_generation(model, num_beams, max_new_tokens)
    missing = metric.check()
    for reason in dict.fromkeys(missing.values()):
        names = ", ".join(metric_name for metric_name in missing if missing[metric_name] == reason)
        print(f"{names} {reason}: {metric.HELP[reason]}", file=sys.stderr)
    captions = open_captions(setup.source) if isinstance(setup.source, str) else setup.source
    if not isinstance(captions, Captions):
        raise DtemError(f"{captions.spec} has no captions; give a file of them, such as captions.json#test")
    source, left_out = setup.select(captions)
    transform, batch_size = eval_transform(resolve_data_config(model)), settings.batch_size or BATCH_SIZE
    loader = Loader(source, transform, batch_size, workers=settings.workers)
    captioner = functools.partial(evaluator.captioner, num_beams=num_beams, max_new_tokens=max_new_tokens)
    with (
        eval_mode(*setup.models),
        decoder_counts_sizes(proportional_decoder, *(entry.handle for entry in setup.patched)),
        progress_bar(source.length, show=settings.progress) as advance,
    ):
        variants = variants_of(model, setup.patched, function_of=captioner)
        forwards = {variant.name: variant.forward for variant in variants}
        outcomes = evaluator.run_variants(
            forwards, loader, captions.items, settings.device, dtype=settings.autocast, progress=advance
        )
    if settings.out is not None:  # before they are scored: generating them took the longest
        texts = {key: part.captions for key, part in outcomes.items()}
        write_file(settings.out / "captions.json", json.dumps(texts, indent=2, ensure_ascii=False) + "\n")
    outcomes = {key: with_scores(part, captions.items) for key, part in outcomes.items()}
    pairs = differences(variants, outcomes, paired)
    rows = [_row(variant, outcomes[variant.name], pairs[variant.name]) for variant in variants]
    return CaptioningReport(
        **shared_fields(setup, captions.spec, outcomes),
        rows=rows,
        num_beams=num_beams,
        unreadable=dict(loader.skipped),
        left_out=left_out,
    )


def _row(variant: Variant, own: CaptionOutcomes, against: Mapping[str, Differences | None]) -> CaptioningRow:
    assert own.scores is not None
    return CaptioningRow(
        method=variant.label,
        r=variant.r,
        scores=own.scores.corpus,
        loss=own.loss,
        macs=variant.macs,
        paper=variant.paper,
        tokens=int(variant.tokens),
        captions_per_second=own.captions_per_second,
        **against,
    )

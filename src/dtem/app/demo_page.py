"""The HTML page of the demo: plot, tables, and pictures of merged patches."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dtem.data.loader import Loader
from dtem.data.preprocessing import pixel_statistics, resolve_data_config
from dtem.data.sources import Source, Subset
from dtem.data.transforms import eval_transform
from dtem.evaluation.classification import ClassificationReport
from dtem.evaluation.variants import file_name
from dtem.handle import Handle
from dtem.measure import record
from dtem.tables import Table
from dtem.tasks.classification.outcomes import Outcomes
from dtem.visualise import curves, groups, html_page

if TYPE_CHECKING:
    from dtem.app.demo import DemoReport

NUM_PICTURES = 6


class Picture(NamedTuple):
    """One image with its merged patches, by both methods."""

    figure: str
    caption: str


def page(demo: "DemoReport", pictures: Sequence[Picture]) -> str:
    """The HTML page."""
    from dtem.app.demo import conclusions

    training, evaluation = demo.training, demo.evaluation
    document = html_page.Page(f"dtem demo: {evaluation.model}")
    document.text(
        f"Token merging makes a Vision Transformer faster by joining tokens that are alike. ToMe decides that by the "
        f"keys of attention; DTEM by an embedding that was trained for it, here for {training.seconds:.0f} seconds "
        f"on {demo.training_images} images without labels. Both are compared on the same {evaluation.images} images, "
        f"which {demo.unseen_by} never saw.",
        *conclusions(demo.verdicts),
    )
    document.heading("Accuracy and cost")
    document.plot(_plot(evaluation), "Bars: 95 % interval of the difference to the unmerged model (the star).")
    for table in evaluation.parts():
        if isinstance(table, Table):
            document.heading(table.title)
            document.table(table.columns, table.rows)
    document.heading("Merged patches")
    document.text("Patches that share a token have one colour, their mean, with a line around them.")
    for picture in pictures:
        document.figure(picture.figure, picture.caption)
    document.heading("How it was made")
    config, provenance = training.config, record.collect("demo", None, seed=training.config.seed)
    document.facts(
        {
            "command": " ".join(provenance.command),
            "data": evaluation.data,
            "training": f"{training.updates} updates, r = {config.r}, learning rate {config.lr:g}, seed {config.seed}; "
            f"last loss {training.loss:.4f}",
            "versions": ", ".join(f"{name} {version}" for name, version in provenance.versions.items()),
            "machine": f"{provenance.machine['cpu']}, threads: {provenance.machine['threads']}",
            "time": provenance.time,
        }
    )
    return document.html()


def draw_pictures(
    handles: Mapping[str, Handle], r: str, source: Source, evaluation: ClassificationReport
) -> list[Picture]:
    """Some images with their merged patches at `r`: first those on which the methods disagree."""
    outcomes = {label: evaluation.outcomes[file_name(label, r)] for label in handles}
    chosen = choose_images(*outcomes.values())
    names = next(iter(outcomes.values())).names
    config = resolve_data_config(next(iter(handles.values())).model)
    positions = {source.name(index): index for index in range(source.length or 0)}
    subset = Subset(source, [positions[names[index]] for index in chosen])
    [batch] = Loader(subset, eval_transform(config), len(chosen)).epoch(0)
    traces = {}
    for label, handle in handles.items():
        with torch.inference_mode(), handle.at(r=r), handle.trace() as trace:
            handle.model(batch.images)
        traces[label] = torch.stack(trace.sources, 1)  # (image, block, patch)
    grid: Any = next(iter(handles.values())).model.patch_embed.grid_size  # type: ignore[union-attr]
    return [
        Picture(
            _figure(batch.images[place], {label: each[place] for label, each in traces.items()}, config, tuple(grid)),
            _caption(outcomes, index, r),
        )
        for place, index in enumerate(chosen)
    ]


def choose_images(reference: Outcomes, trained: Outcomes) -> list[int]:
    """Indices of `NUM_PICTURES` images: two that each method alone has right, then others evenly spread."""
    only_trained = (trained.correct & ~reference.correct).nonzero().flatten().tolist()
    only_reference = (reference.correct & ~trained.correct).nonzero().flatten().tolist()
    spread = [len(reference) * place // NUM_PICTURES for place in range(NUM_PICTURES)]
    return list(dict.fromkeys([*only_trained[:2], *only_reference[:2], *spread]))[:NUM_PICTURES]


def _caption(outcomes: Mapping[str, Outcomes], index: int, r: str) -> str:
    label = int(next(iter(outcomes.values())).labels[index])
    predicted = {name: int(each.predicted[index, 0]) for name, each in outcomes.items()}
    words = [f"{name} predicts {value}{'' if value == label else ' (wrong)'}" for name, value in predicted.items()]
    return f"Class {label}, r = {r}: {', '.join(words)}."


def _figure(image: Tensor, sources: Mapping[str, Tensor], config: Mapping[str, Any], grid: tuple[int, int]) -> str:
    """The image and its merged patches after some blocks, one row per method."""
    mean, std = pixel_statistics(config)
    pixels = (image * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()
    left = [len(block.unique()) for block in next(iter(sources.values()))]
    blocks = groups.milestone_blocks(left, grid[0] * grid[1])
    plain = groups.plain(pixels, scale=groups.default_scale(pixels.shape[:2], grid))
    rows = [[plain, *(groups.draw_groups(pixels, own[block], grid) for block in blocks)] for own in sources.values()]
    captions = [f"block {block + 1}: {left[block]} groups" for block in blocks]
    return groups.figure(rows, list(sources), ["image", *captions])


def _plot(evaluation: ClassificationReport) -> str:
    lines, base = evaluation.curve()
    value = f"top-1 accuracy on {evaluation.images} images (%)"
    return curves.for_page([curves.Panel(lines, base, value=value)])

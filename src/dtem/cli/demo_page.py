"""What the demo found, as tables for the terminal and as a page with plot and pictures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dtem.cli import common
from dtem.cli.contenders import UNMERGED
from dtem.cli.outcome_tables import points

if TYPE_CHECKING:
    import torch

    from dtem.cli.demo_case import Case
    from dtem.handle import Handle
    from dtem.tasks.classification.outcomes import Outcomes

SHOWN = 6
"""Images of which pictures are drawn."""
_COLUMNS = ("method", "r", "tokens left", "top-1 %", "cross-entropy", "GFLOPs (MACs)", "im/s", "speed-up (quartiles)")
_PAIRS = ("r", "top-1 points (95 %)", "accuracy is", "cross-entropy (95 %)", "cross-entropy is")


class Picture(NamedTuple):
    """One image, and what both methods made of it."""

    figure: str
    caption: str


def tables(document: Mapping[str, Any]) -> list[object]:
    """For the terminal."""
    trained = document["trained"]
    title = f"{document['model']} on {document['images']} images that {document['unseen_by']} never saw"
    return [
        f"Trained {trained['steps']} steps of {trained['images_seen'] // max(1, trained['steps'])} images in "
        f"{trained['seconds']:.0f} s at r = {trained['r']}, without labels.",
        common.table(title, _COLUMNS, _rows(document), f"CPU, threads: {document['threads']}; contenders took turns"),
        common.table("dtem minus tome, image by image", _PAIRS, _pairs(document)),
        *conclusions(document),
        "",
        f"Plot and pictures: {document['report']}",
    ]


def conclusions(document: Mapping[str, Any]) -> list[str]:
    """In words, for whom the numbers speak: also where it is not the learned method."""
    groups: dict[str, list[str]] = {}
    for pair in document["against_tome"]:
        groups.setdefault(pair["verdict"]["top1"], []).append(pair["r"])
    words = {
        "better": "dtem is more accurate than tome",
        "worse": "dtem is LESS accurate than tome",
        "no clear difference": "dtem does not win: its accuracy and tome's cannot be told apart",
    }
    return [f"At r = {', '.join(groups[key])} {text}." for key, text in words.items() if key in groups]


def page(document: Mapping[str, Any], pictures: Sequence[Picture], command: Sequence[str]) -> str:
    """The HTML page."""
    from dtem.measure import record
    from dtem.visualise import curves, report

    kept = record.collect("demo", None, seed=document["trained"]["seed"], command=command)
    trained = document["trained"]
    made = report.Page(f"dtem demo: {document['model']}")
    made.text(
        f"Token merging makes a Vision Transformer faster by joining tokens that are alike. ToMe decides that by the "
        f"keys of attention; DTEM by an embedding that was trained for it, here for {trained['seconds']:.0f} seconds "
        f"on {trained['training_images']} images without labels. Both are compared on the same {document['images']} "
        f"images, which {document['unseen_by']} never saw.",
        *conclusions(document),
    )
    made.heading("Accuracy and cost")
    made.figure(
        _plot(document, curves), "Accuracy against operations per image; the star is the unmerged model.", plot=True
    )
    made.table(_COLUMNS, _rows(document))
    made.heading("DTEM minus ToMe, image by image")
    made.text("A difference is called better or worse where its 95 % interval leaves out zero.")
    made.table(_PAIRS, _pairs(document))
    made.heading("What was merged")
    made.text("Patches that share a token have one colour, their mean, with a line around them.")
    for picture in pictures:
        made.figure(picture.figure, picture.caption)
    made.heading("How it was made")
    made.facts(
        {
            "command": " ".join(kept.command),
            "data": document["data"],
            "training": f"{trained['steps']} steps, r = {trained['r']}, learning rate {trained['rate']:g}, "
            f"seed {trained['seed']}; loss {trained['first_loss']:.4f} at first, {trained['last_loss']:.4f} at last",
            "versions": ", ".join(f"{name} {version}" for name, version in kept.versions.items()),
            "machine": f"{kept.machine['cpu']}, threads: {kept.machine['threads']}",
            "time": kept.time,
        }
    )
    return made.html()


def pictures(
    case: "Case", handles: Mapping[str, "Handle"], r: str, outcomes: Mapping[str, "Outcomes"]
) -> list[Picture]:
    """Some images with their groups at `r`: those on which the methods disagree first, then others evenly spread."""
    import torch

    chosen = _chosen(*outcomes.values())
    images = _images(case, chosen)
    sources = {}
    for label, handle in handles.items():
        handle.r = r
        with torch.inference_mode(), handle.trace() as trace:
            handle.model(images)
        sources[label] = torch.stack(trace.sources, 1)  # (image, block, patch)
    return [
        Picture(
            _figure(case, images[place], {label: own[place] for label, own in sources.items()}),
            _caption(outcomes, index, r),
        )
        for place, index in enumerate(chosen)
    ]


def _images(case: "Case", chosen: Sequence[int]) -> "torch.Tensor":
    """The held-out images of these numbers, as the model gets them."""
    import torch

    found: dict[int, torch.Tensor] = {}
    seen = 0
    for batch in case.loader(case.held_out, 50).epoch(0):
        found.update({seen + place: batch.images[place] for place in range(len(batch.names)) if seen + place in chosen})
        seen += len(batch.names)
    return torch.stack([found[index] for index in chosen])


def _chosen(tome: "Outcomes", ours: "Outcomes") -> list[int]:
    count = len(tome)
    only_ours = (ours.correct & ~tome.correct).nonzero().flatten().tolist()
    only_tome = (tome.correct & ~ours.correct).nonzero().flatten().tolist()
    spread = [count * place // SHOWN for place in range(SHOWN)]
    return list(dict.fromkeys([*only_ours[:2], *only_tome[:2], *spread]))[:SHOWN]


def _caption(outcomes: Mapping[str, "Outcomes"], index: int, r: str) -> str:
    label = int(next(iter(outcomes.values())).labels[index])
    said = {name: int(own.predicted[index, 0]) for name, own in outcomes.items()}
    words = ", ".join(f"{name} says {answer}{'' if answer == label else ' (wrong)'}" for name, answer in said.items())
    return f"Class {label}, r = {r}: {words}."


def _figure(case: "Case", image: "torch.Tensor", sources: Mapping[str, "torch.Tensor"]) -> str:
    """The image and its groups after some blocks, one row per method."""
    import torch

    from dtem.visualise import groups

    mean, std = (torch.tensor(case.config[name]).view(-1, 1, 1) for name in ("mean", "std"))
    pixels = (image * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()
    embed: Any = case.host.patch_embed
    grid = tuple(embed.grid_size)
    left = [len(block.unique()) for block in next(iter(sources.values()))]
    blocks = groups.telling_blocks(left, grid[0] * grid[1])
    plain = groups.plain(pixels, scale=groups.default_scale(pixels.shape[:2], grid))
    rows = [[plain, *(groups.draw_groups(pixels, own[block], grid) for block in blocks)] for own in sources.values()]
    captions = [f"block {block + 1}: {left[block]} groups" for block in blocks]
    return groups.figure(rows, list(sources), ["image", *captions])


def _plot(document: Mapping[str, Any], curves: Any) -> str:
    lines: dict[str, list[Any]] = {}
    base = None
    for row in document["rows"]:
        point = curves.Point(row["macs"] / 1e9, row["top1"], f"r={row['r']}")
        if row["method"] == UNMERGED:
            base = point._replace(label=UNMERGED)
        else:
            lines.setdefault(row["method"], []).append(point)
    return curves.draw(lines, base=base, form="svg").decode()


def _rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            row["method"],
            row["r"],
            str(row["tokens"]),
            f"{row['top1']:.1f}",
            f"{row['cross_entropy']:.4f}",
            common.giga(row["macs"]),
            f"{row['images_per_second']:.0f}",
            "{median:.2f} ({low:.2f} – {high:.2f})".format(**row["speedup"]),
        )
        for row in document["rows"]
    ]


def _pairs(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            pair["r"],
            points(pair["top1"]),
            pair["verdict"]["top1"],
            points(pair["loss"], 4),
            pair["verdict"]["cross_entropy"],
        )
        for pair in document["against_tome"]
    ]

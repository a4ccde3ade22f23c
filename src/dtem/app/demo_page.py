"""The HTML page of the demo: headline, trade-off plot, photographs with their merged patches, then tables."""

from typing import TYPE_CHECKING

from dtem.app.demo_pictures import DemoPicture
from dtem.measure import record
from dtem.tables import Table
from dtem.visualise import curves, html_page
from dtem.visualise.html_page import Tile

if TYPE_CHECKING:
    from dtem.app.demo import DemoReport


def page(demo: "DemoReport") -> str:
    """The HTML page."""
    training, evaluation, headline = demo.training, demo.evaluation, demo.headline
    document = html_page.Page(f"dtem demo: {evaluation.model}")
    document.headline(str(headline), _footnote(demo))
    document.text(
        "Token merging makes a Vision Transformer faster by joining tokens that are alike. ToMe decides that by the "
        f"keys of attention; DTEM by an embedding that was trained for it, here for {training.seconds:.0f} seconds "
        f"on {demo.training_images} images without labels. Both are compared on the same {evaluation.images} images, "
        f"which {demo.unseen_by} never saw."
    )
    lines, base = evaluation.curve()
    measure = "top-1 accuracy" if headline.measure == "accuracy" else "agreement with the unmerged model"
    document.heading(f"{measure[0].upper()}{measure[1:]} and cost")
    value = f"{measure} on {evaluation.images} images (%)"
    bars = "Bars: 95 % interval of the difference to the unmerged model, image by image."
    document.plot(curves.for_page([curves.Panel(lines, base, value=value)]), bars)
    if demo.pictures:
        block = _shown_block(demo)
        document.heading("What is merged")
        document.text(
            f"Patches that share a token after block {block + 1} have one colour, their mean, with a line around them; "
            "below, what each method takes the image for."
        )
        for picture in demo.pictures:
            document.tiles(_tiles(picture, block), _caption(picture))
    document.heading("In numbers")
    document.text(*demo.lines())
    for table in (*evaluation.parts(), demo.speed_table()):
        if isinstance(table, Table):
            document.subheading(table.title)
            document.table(table.columns, table.rows)
    document.heading("How it was made")
    config, provenance = training.config, record.collect("demo", None, seed=training.config.seed)
    document.facts(
        {
            "command": " ".join(provenance.command),
            "data": evaluation.data,
            "training": f"{training.updates} updates, r = {config.r}, learning rates {config.lr:g} and "
            f"{config.norm_lr:g} (norms), seed {config.seed}; last loss {training.loss:.4f}",
            "versions": ", ".join(f"{name} {version}" for name, version in provenance.versions.items()),
            "machine": f"{provenance.machine['cpu']}, threads: {provenance.machine['threads']}",
            "time": provenance.time,
        }
    )
    return document.html()


def _footnote(demo: "DemoReport") -> str:
    """What the numbers of the headline are."""
    headline = demo.headline
    return (
        f"r = {headline.r}, {demo.evaluation.images} images; DTEM − ToMe: {headline.difference.text(1)} points (95 %); "
        f"speed at batch {headline.batch_size}, {headline.threads} threads, over the unmerged model in PyTorch."
    )


def _shown_block(demo: "DemoReport") -> int:
    """The block after which the methods differ most in what they keep on the object; else one with few patches left."""
    if demo.focus is not None:
        first, second = demo.focus.share.values()
        return max(range(len(first)), key=lambda block: abs(second[block] - first[block]))
    chosen = demo.pictures[0].shown.blocks()
    return chosen[len(chosen) // 2]


def _tiles(picture: DemoPicture, block: int) -> list[Tile]:
    """The image and each method's groups, with what is predicted."""
    shown, tiles = picture.shown, []
    for name, (index, probability) in picture.predictions.items():
        drawn = shown.groups(name, block) if name in shown.views else shown.plain()
        label = f"{picture.class_name(index)} {100 * probability:.0f} %"
        tiles.append(Tile(name, drawn, label, index == picture.label, _kept(picture, name, block)))
    return tiles


def _kept(picture: DemoPicture, name: str, block: int) -> str:
    """Tokens that stay on the object."""
    if name not in picture.shown.views:
        return ""
    shares = picture.shown.allocation(name, block)
    return "" if shares is None else f"{100 * shares.share:.0f} % of the tokens on the object"


def _caption(picture: DemoPicture) -> str:
    return f"Class: {picture.class_name(picture.label)}; {picture.reason}."

"""The HTML page of the demo: headline, plot, tables, and pictures of merged patches."""

from typing import TYPE_CHECKING

from dtem.app.demo_pictures import DemoPicture
from dtem.measure import record
from dtem.tables import Table
from dtem.visualise import curves, html_page

if TYPE_CHECKING:
    from dtem.app.demo import DemoReport


def page(demo: "DemoReport") -> str:
    """The HTML page."""
    training, evaluation, headline = demo.training, demo.evaluation, demo.headline
    document = html_page.Page(f"dtem demo: {evaluation.model}")
    document.text(
        str(headline),
        "Token merging makes a Vision Transformer faster by joining tokens that are alike. ToMe decides that by the "
        f"keys of attention; DTEM by an embedding that was trained for it, here for {training.seconds:.0f} seconds "
        f"on {demo.training_images} images without labels. Both are compared on the same {evaluation.images} images, "
        f"which {demo.unseen_by} never saw.",
        *demo.lines(),
    )
    document.heading("Accuracy and cost")
    document.plot(_plot(demo), "Bars: 95 % interval of the difference to the unmerged model (the star).")
    for table in (*evaluation.parts(), demo.speed_table()):
        if isinstance(table, Table):
            document.heading(table.title)
            document.table(table.columns, table.rows)
    document.heading("Merged patches")
    document.text("Patches that share a token have one colour, their mean, with a line around them.")
    for picture in demo.pictures:
        document.figure(picture.shown.svg(), _caption(picture))
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


def _caption(picture: DemoPicture) -> str:
    words = []
    for name, (index, probability) in picture.predictions.items():
        wrong = "" if index == picture.label else ", wrong"
        words.append(f"{name} predicts {picture.class_name(index)} ({100 * probability:.0f} %{wrong})")
    return f"Class {picture.class_name(picture.label)}: {', '.join(words)}. Shown because {picture.reason}."


def _plot(demo: "DemoReport") -> str:
    lines, base = demo.evaluation.curve()
    measure = "top-1 accuracy" if demo.headline.measure == "accuracy" else "agreement with the unmerged model"
    return curves.for_page([curves.Panel(lines, base, value=f"{measure} on {demo.evaluation.images} images (%)")])

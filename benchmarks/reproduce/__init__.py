"""Studies of the DTEM paper: each is a YAML file in benchmarks/experiments, run by ``python -m benchmarks.reproduce``.

specs.py               study specs, read from YAML
cells.py               the cells of a study: one training run, or one untrained method, with its evaluation rates
image_splits.py        training and evaluation images: class folders, random subsets, the packaged digits
study_setup.py         model, data and training config of each cell, and where its files are
runner.py              trains and evaluates the cells that have no result yet
per_image_outcomes.py  outcomes of a cell image by image, and paired comparison over seeds
search.py              search of a learning rate on held-out training images
speed.py               operations and time of a study's model with random weights
kendall.py             rank correlation of similarities by keys and by embeddings
foreground.py          share of remaining tokens on the foreground, and pictures of merged patches
study_record.py        all cells of a study as one record
study_tables.py        the record as tables, beside the paper's numbers
study_plots.py         the record as a plot
tome_soft.py, tome_gumbel.py   methods that exist as ablations only (`register_ablations`)
captioner.py, tokenizer.py     a small GIT captioner on a timm ViT
"""


def register_ablations() -> None:
    """Register the methods that exist as ablations only, `tome_soft` and `tome_gumbel`, with `dtem.patch`."""
    import dtem
    from benchmarks.reproduce.tome_gumbel import TomeGumbel
    from benchmarks.reproduce.tome_soft import TomeSoft

    dtem.register_method(TomeGumbel)
    dtem.register_method(TomeSoft)

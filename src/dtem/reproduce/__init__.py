"""The paper's studies as commands: a spec file says what a study is, cells of it are run, and records become tables.

specs.py       what a study is, from benchmarks/experiments/NAME.yaml
cells.py       what there is to run: every cell of a study at a scale
images.py      the images at hand: folders, parts of them, or the digits that come along
bench.py       a model and images: what a cell trains, and where it is kept
running.py     running what is not there yet
answers.py     what a cell said of every image, and how two of them are compared
kendall.py     rank correlation of similarities
pictures.py    the visualisations
summary.py     all cells of a study as one record
tables.py      records as tables, beside the paper's numbers
plots.py       records as plots
pages.py       records as one HTML page, and as the tables of docs/results.md
"""

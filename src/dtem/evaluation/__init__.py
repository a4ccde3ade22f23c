"""`evaluate`, `compare`, `benchmark` and `count_flops`: variants of a model side by side, compared image by image."""

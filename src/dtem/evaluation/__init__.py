"""`evaluate`, `compare`, `benchmark` and `count_flops`: variants of a model side by side, compared image by image."""

DTYPES = ("float32", "bfloat16", "float16")
"""Precisions that variants are run in."""

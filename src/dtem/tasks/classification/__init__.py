"""Image classification: loss, evaluation, per-image outcomes."""

"""Image classification: where images come from, how they are batched and augmented, how answers are scored."""

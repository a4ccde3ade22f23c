"""Image captioning: `data` (images with captions), `words` (a tokenizer of one's own), `loss`, `metric`, `generate`."""

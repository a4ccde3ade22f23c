"""Image captioning: datasets, loss, metrics, generation, evaluation."""

"""Training: `dtem.train` (`train`), its loop (`loop`), settings (`config`), tasks (`task`) and checkpoints."""

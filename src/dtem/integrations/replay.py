"""Forwards from the middle of a model on, for the search of plans."""

import dataclasses

from dtem.types import Tokens


@dataclasses.dataclass
class Replay:
    """Forwards that begin with tokens which are known already, and keep what every later block makes of them."""

    start: int = 0
    """The first block that is run."""
    tokens: Tokens | None = None
    """Its input; None: that of the model."""
    after: list[Tokens] = dataclasses.field(default_factory=list)
    """Tokens after every block that was run."""

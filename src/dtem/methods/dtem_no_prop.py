"""DTEM without proportional attention: the paper's ablation (https://arxiv.org/abs/2412.10569, soft grouping study).

In training and at inference a merged token counts in attention as one token, whatever its size. Merging itself still
weighs by size, and so does mean pooling.
"""

import dataclasses
from typing import ClassVar

from dtem.methods.base import Config
from dtem.methods.dtem import Dtem, DtemConfig


@dataclasses.dataclass(frozen=True)
class DtemNoPropConfig(DtemConfig):
    """Settings of DTEM, with another default."""

    proportional: bool | str | None = False
    """Proportional attention: off, which is what this ablation is about."""


class DtemNoProp(Dtem):
    """DTEM whose token sizes do not enter attention."""

    name: ClassVar[str] = "dtem_no_prop"
    config_class: ClassVar[type[Config]] = DtemNoPropConfig

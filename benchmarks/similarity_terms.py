"""DTEM with a rival's idea as one more term of its similarity: an experiment, driven by `benchmarks.frozen`.

Each takes the shipped embeddings (and norms) as they are, and the published constants of the rival.
"""

import dataclasses
from typing import ClassVar

import torch

from dtem import ops
from dtem.methods.base import full_size
from dtem.methods.dtem import Dtem, DtemConfig
from dtem.methods.mctf import MctfConfig, fusion_groups, received_attention
from dtem.methods.pitome import match_by_energy
from dtem.types import Taps, Tokens


@dataclasses.dataclass(frozen=True)
class TermsConfig(DtemConfig):
    """The terms, and how tokens are fused."""

    tau_info: float = 0.0
    """MCTF's τ of informativeness; 0: without."""
    received: bool = True
    """Informativeness: attention received from all tokens, as MCTF has it; False: from the class token."""
    tau_size: float = 0.0
    """MCTF's τ of size; 0: without."""
    bidirectional: bool = False
    """Half of the tokens from A to B and half back, as MCTF."""
    informed_mean: bool = False
    """Means weighted by informativeness × size, as MCTF; False: by size."""


class DtemWithTerms(Dtem):
    """DTEM, its pairs chosen by MCTF's product of criteria on the embeddings."""

    name: ClassVar[str] = "dtem_terms"
    needs: ClassVar[frozenset[str]] = Dtem.needs | {"q", "k", "class_token"}
    config_class = TermsConfig
    config: TermsConfig

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        config, size = self.config, full_size(tokens)
        if not config.tau_info and not config.informed_mean:
            informative = torch.ones_like(size)
        elif config.received:
            informative = received_attention(taps, self.bias(tokens))
        else:
            informative = self.class_attention(tokens, taps)
        terms = MctfConfig(tau_info=config.tau_info, tau_size=config.tau_size, bidirectional=config.bidirectional)
        step = fusion_groups(self.metric(layer, taps), informative, size, r, self.host.prefix, terms)
        weight = informative * size if config.informed_mean else size
        left = tokens.x.shape[1] - r
        source = None if tokens.source is None else ops.compose(tokens.source, step)
        x = ops.pool(tokens.x, weight, step, left)
        return tokens.replace(x=x, size=ops.pool_sizes(size, step, left), source=source)


class DtemWithProtection(Dtem):
    """DTEM, its pairs chosen as PiToMe does, by energy, on the embeddings."""

    name: ClassVar[str] = "dtem_protection"

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        margin, late = 0.9 * (1 - layer / self.host.depth), layer >= (self.host.depth + 1) // 2
        matching = match_by_energy(self.metric(layer, taps), r, margin, late, self.host.prefix)
        x, size = ops.merge(tokens.x, tokens.size, matching)
        source = None if tokens.source is None else ops.compose(tokens.source, matching.source)
        return tokens.replace(x=x, size=size, source=source)

"""DynamicViT: prune by small predictors that are trained with Gumbel-softmax masks.

Rao et al., "DynamicViT: Efficient Vision Transformers with Dynamic Token Sparsification", NeurIPS 2021,
https://arxiv.org/abs/2106.02034. Before a few blocks (the 4th, 7th and 10th of 12) a predictor gives each patch a
keep logit s_i. With e = GELU(Linear(LayerNorm(x))), split in two halves, local and global:

    z_i = [local e_i, Σ_j m_j global e_j / Σ_j m_j]        (s_i, d_i) = Linear(GELU(Linear(GELU(Linear(z_i)))))

    inference: the patches with the largest s_i − d_i are kept, the others are removed
    training:  m_i ← m_i · g_i, where g_i is 1 or 0 with odds exp(s_i − d_i) : 1 (Gumbel-softmax, straight-through).
               No token is removed; the attention weight of a token is multiplied by m_i.

The ratio loss Σ_stages (mean_i m_i − kept share of the schedule)² / stages pulls the masks to the share kept at
inference. The other losses of the published training come from the trainer: labels, and ``--loss both`` for the output
of the unpruned model. The published loss on the features of each kept token is left out: a method has no access to the
tokens of the unpruned model.

Differences from the publication:

* There a masked token attends to itself, here to kept tokens only. No kept token attends to a masked one, so outputs
  are the same; only the gradient through masked tokens differs.
* Predictors are initialised at a keep probability of about 0.7 (published: 0.5, which keeps an eighth of the tokens
  after three stages), with torch's default weights.
* Kept patches stay in order (published: sorted by score; the output is the same).
* In end-to-end mode, predictors and host are trained in turns, the host with hard pruning (published: jointly).
"""

import dataclasses
from collections.abc import Collection
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dtem import ops
from dtem.errors import DtemError
from dtem.methods.base import MASKED, Config, Method, check_positive, full_size
from dtem.schedule import check_stages
from dtem.types import SIZE_FLOOR, HostSpec, Tokens


@dataclasses.dataclass(frozen=True)
class DynamicVitConfig(Config):
    """Settings of DynamicViT."""

    proportional: bool | str | None = "train"
    """Always "train": sizes are 1 at inference, and the masks in training."""
    stages: tuple[int, ...] | None = None
    """Blocks (counted from 0) before which tokens are pruned, each with its own predictor; None: at a quarter, half and
    three quarters of the depth (3, 6 and 9 of 12)."""
    ratio_weight: float = 2.0
    """Weight of the ratio loss."""
    temperature: float = 1.0
    """Of the Gumbel-softmax."""
    seed: int = 0
    """Of the initialisation of the predictors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.proportional != "train":
            raise DtemError(
                f"proportional = {self.proportional!r}: dynamicvit masks tokens by their sizes in training, and at "
                "inference all are 1; leave it at 'train'"
            )
        if self.stages is not None and not (
            isinstance(self.stages, tuple)
            and self.stages
            and all(isinstance(stage, int) and not isinstance(stage, bool) and stage >= 0 for stage in self.stages)
        ):
            raise DtemError(f"stages = {self.stages!r} must be a tuple of blocks, counted from 0, or None")
        check_positive("temperature", self.temperature)
        check_positive("ratio_weight", self.ratio_weight)


class Predictor(nn.Module):
    """Keep and drop logits of every patch, from its own features and the mean of all kept patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.local = width // 2
        self.norm = nn.LayerNorm(width)
        self.embed = nn.Linear(width, width)
        self.hidden = nn.ModuleList([nn.Linear(width, width // 2), nn.Linear(width // 2, width // 4)])
        self.out = nn.Linear(width // 4, 2)
        with torch.no_grad():
            self.out.bias.copy_(torch.tensor([0.5, -0.5]))

    def forward(self, x: Float[Tensor, "b n c"], keep: Float[Tensor, "b n"] | None) -> Float[Tensor, "b n"]:
        """The keep logit minus the drop logit. `keep` holds the weights of tokens in the global mean; None: equal."""
        e = nn.functional.gelu(self.embed(self.norm(x)))
        local, rest = e[..., : self.local], e[..., self.local :]
        if keep is None:
            mean = rest.mean(dim=1, keepdim=True)
        else:
            share = keep / keep.sum(dim=1, keepdim=True).clamp(min=SIZE_FLOOR)
            mean = share.to(rest.dtype).unsqueeze(1) @ rest
        z = torch.cat([local, mean.expand_as(rest)], dim=-1)
        for layer in self.hidden:
            z = nn.functional.gelu(layer(z))
        keep_logit, drop_logit = self.out(z).unbind(dim=-1)
        score: Tensor = keep_logit - drop_logit
        return score if score.dtype == torch.float64 else score.float()


class DynamicVit(Method):
    """Pruning of r tokens before a few blocks, by trained predictors."""

    name: ClassVar[str] = "dynamicvit"
    config_class: ClassVar[type[Config]] = DynamicVitConfig
    config: DynamicVitConfig
    conserves_size = False

    def __init__(self, host: HostSpec, config: DynamicVitConfig) -> None:
        super().__init__(host, config)
        stages = default_stages(host.depth) if config.stages is None else tuple(sorted(set(config.stages)))
        if stages[-1] >= host.depth:
            raise DtemError(f"stages = {config.stages}: {host.name} has only the blocks 0 … {host.depth - 1}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.predictors = nn.ModuleDict({str(stage): Predictor(host.width) for stage in stages})

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(map(int, self.predictors))

    def has_soft_mode(self) -> bool:
        return True

    def before(self, layer: int, tokens: Tokens, r: int) -> Tokens:
        if r == 0:
            return tokens
        prefix = self.host.prefix
        predictor = self.predictors[str(layer)]
        if self.soft:
            return self._mask(predictor, layer, tokens, r)
        score = predictor(tokens.x[:, prefix:], None)
        kept, gone = ops.prune(nn.functional.pad(score, (prefix, 0)), r, prefix)
        source = tokens.source
        if source is not None:
            source = ops.compose(source, ops.pruned_source(kept, gone, -1))
        return tokens.replace(x=ops.take(tokens.x, kept), size=full_size(tokens).gather(1, kept), source=source)

    def _mask(self, predictor: nn.Module, layer: int, tokens: Tokens, r: int) -> Tokens:
        """The soft step: draw masks, and store the squared difference of their mean and the schedule's share."""
        patches = tokens.x[:, self.host.prefix :]
        keep, left = tokens.carry.get("keep"), tokens.carry.get("left")
        score = predictor(patches, keep)
        drawn = straight_through(score + logistic(score) if self.training else score, self.config.temperature)
        keep = drawn if keep is None else drawn * keep
        left = (score.new_tensor(patches.shape[1]) if left is None else left) - r
        miss = (keep.mean(dim=1) - left / patches.shape[1]).square().mean()
        size = nn.functional.pad(keep + MASKED, (self.host.prefix, 0), value=1.0)
        carry = {**tokens.carry, "keep": keep, "left": left, f"miss {layer}": miss}
        return tokens.replace(size=size, carry=carry)

    def losses(self, tokens: Tokens) -> dict[str, Tensor]:
        misses = [value for name, value in tokens.carry.items() if name.startswith("miss")]
        return {"ratio": self.config.ratio_weight * torch.stack(misses).mean()} if misses else {}


def logistic(like: Tensor) -> Tensor:
    """Logistic noise of the shape of `like`: the difference of two standard Gumbel variables."""
    tiny = torch.finfo(like.dtype).tiny
    first, second = (-torch.empty_like(like).exponential_().clamp(min=tiny).log() for _ in range(2))
    return first - second


def straight_through(logit: Float[Tensor, "b n"], temperature: float) -> Float[Tensor, "b n"]:
    """1 where the logit is positive, else 0; the gradient is that of sigmoid(logit / temperature)."""
    soft = torch.sigmoid(logit / temperature)
    return (logit > 0).to(soft.dtype) + (soft - soft.detach())


def default_stages(depth: int) -> tuple[int, ...]:
    """The blocks at a quarter, half and three quarters of the depth."""
    return tuple(sorted({depth // 4, depth // 2, 3 * depth // 4}))


def keep_rate(rate: float, patches: int, depth: int = 12, at: Collection[int] | None = None) -> tuple[int, ...]:
    """The published schedule as one r per block: ⌊rate^i · patches⌋ patches are kept after the i-th stage. A schedule
    removes at most half of the patches of a block, so rates below 0.5 are not reached, and 0.5 up to one patch.

    Examples:
        >>> dtem.patch(model, "dynamicvit", r=keep_rate(0.7, patches=196))
    """
    stages = sorted(default_stages(depth) if at is None else at)
    check_stages(stages, depth, rate)
    plan, left = [0] * depth, patches
    for index, layer in enumerate(stages):
        kept = int(patches * rate ** (index + 1) + 1e-9)
        plan[layer], left = left - kept, kept
    return tuple(plan)

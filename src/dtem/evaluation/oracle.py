"""The drop oracle: the same model at the same token counts, with nothing computed to choose or merge tokens.

It keeps tokens at fixed, evenly spread positions: no embedding, no matching, no merging, no sizes. In the same code, no
method that removes as many tokens in the same blocks can be faster, so the time of merging over the time of the oracle
is what merging itself costs. Its outputs mean nothing.
"""

import copy
import functools

import torch
from torch import Tensor

from dtem.errors import DtemError
from dtem.handle import Handle, patch
from dtem.hooks import is_watched
from dtem.methods.base import Config, Method
from dtem.types import HostSpec, Taps, Tokens


class FixedDrop(Method):
    """Drops r patches at fixed positions between attention and MLP."""

    name = "fixed_drop"
    conserves_size = False

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        kept = kept_tokens(tokens.x.shape[1], r, self.host.prefix, tokens.x.device)
        return tokens.replace(x=tokens.x.index_select(1, kept))


def kept_tokens(tokens: int, r: int, prefix: int, device: torch.device) -> Tensor:
    """The prefix, and all patches but r that are evenly spread. Cached, but not what export or counting makes."""
    make = _kept if is_watched() else _kept_once
    return make(tokens, r, prefix, device)


def _kept(tokens: int, r: int, prefix: int, device: torch.device) -> Tensor:
    patches, left = tokens - prefix, tokens - prefix - r
    with torch.inference_mode(False):
        spread = torch.arange(left, device=device) * patches // max(left, 1)
        return torch.cat([torch.arange(prefix, device=device), prefix + spread])


_kept_once = functools.lru_cache(maxsize=256)(_kept)


def as_oracle(handle: Handle) -> Handle:
    """A copy of a patched model that keeps as many tokens in every block, by the oracle."""
    method, merger = handle.method, handle.merger
    check_oracle(type(method), handle.host)
    plain = Handle(copy.deepcopy(handle.model)).unpatch()
    oracle = patch(plain, "tome", merger.schedule, shortcut=merger.shortcut)
    oracle.merger.method = FixedDrop(oracle.host, Config()).train(plain.training)
    return oracle


def check_oracle(method: type[Method], host: HostSpec) -> None:
    """Refuse what the oracle cannot copy: it drops r patches between attention and MLP."""
    other = method.before is not Method.before or method.after is not Method.after
    if host.dense or other or method.variable_length or method.restores or method.resets_each_block:
        reason = f"{host.name} needs every patch at its end" if host.dense else f"{method.name!r} does more than that"
        raise DtemError(
            "oracle = True times a model that drops r tokens between attention and MLP of each block for good, and "
            f"{reason}; leave it out"
        )

"""A plain block of timm at inference on a CPU, run without a module call for every step.

At batch 1 looking at modules (is this one hooked, replaced, quantised?) costs as much as small kernels. So a
`FastBlock` reads the parts of a block once, and in every forward `FastBlocks` sees that nothing has changed since: no
module, class, parameter, hook, forward or training mode. Any change makes them read again. Blocks that are not plain
are run module by module (`timm_block`).
"""

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from timm.layers.mlp import Mlp
from timm.layers.norm import LayerNorm as TimmLayerNorm
from torch import Tensor, nn

from dtem import ops
from dtem.hooks import are_untouched, has_global_hooks
from dtem.integrations import cpu_workspace
from dtem.integrations.cpu_workspace import CpuWorkspace, Linear
from dtem.types import Taps

Block = Any
"""timm.models.vision_transformer.Block"""


class Parts:
    """Weight and bias of a plain linear layer, read once: `weight` of a module is looked up in three places."""

    __slots__ = ("bias", "layer", "weight")

    def __init__(self, layer: nn.Linear) -> None:
        self.layer, self.weight, self.bias = layer, layer.weight, layer.bias

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.layer(x)


class FastBlock:
    """The parts of a plain block. `attention` and `mlp` are those of `timm_block`."""

    def __init__(self, block: Block) -> None:
        attn, inner = block.attn, block.mlp
        self.attn = attn
        self.gate = getattr(attn, "gate", None)
        self.norm1, self.norm2 = _norm(block.norm1), _norm(block.norm2)
        self.qkv, self.proj = _parts(attn.qkv), _parts(attn.proj)
        self.normed = not all(map(cpu_workspace.is_identity, (attn.q_norm, attn.k_norm)))
        self.attn_norm = _needed(attn.norm)
        self.after_attention = _needed(attn.proj_drop, block.ls1, block.drop_path1)
        self.is_plain_mlp = type(inner) is Mlp and type(inner.act) is nn.GELU
        self.inner = inner
        self.after_mlp: tuple[nn.Module, ...] = _needed(block.ls2, block.drop_path2)
        if self.is_plain_mlp:
            self.fc1, self.fc2 = _parts(inner.fc1), _parts(inner.fc2)
            self.act = inner.act
            self.hidden = _needed(inner.drop1, inner.norm)
            self.after_mlp = (*_needed(inner.drop2), *self.after_mlp)

    def attention(self, workspace: CpuWorkspace, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
        """Attention of the block, with its residual added."""
        h = self.norm1(x)
        y, taps = self._head_outputs(workspace, h, bias)
        if self.after_attention:
            return x + _chain(self.after_attention, self.proj(y)), taps
        return workspace.residual(x, self.proj, y), taps

    def attention_branch(self, workspace: CpuWorkspace, h: Tensor, bias: Tensor | None) -> Tensor:
        """The residual branch of attention, without x."""
        y, _ = self._head_outputs(workspace, h, bias)
        return _chain(self.after_attention, self.proj(y))

    def _head_outputs(self, workspace: CpuWorkspace, h: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
        """Concatenated head outputs, (b, n, c), after inner norm and gate (if any)."""
        attn = self.attn
        batch, count, _ = h.shape
        qkv = workspace.linear(self.qkv, h).view(batch, count, 3, attn.num_heads, attn.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.normed:
            q, k = attn.q_norm(q), attn.k_norm(k)
        dropout = attn.attn_drop.p if attn.training else 0.0
        y = ops.attend(q, k, v, bias, attn.scale, dropout).transpose(1, 2).flatten(2)
        y = _chain(self.attn_norm, y)
        if self.gate is not None:
            y = y * self.gate(h).sigmoid()
        return y, Taps(h, q, k, v, attn.scale)

    def mlp(self, workspace: CpuWorkspace, x: Tensor) -> Tensor:
        """MLP of the block, with its residual added."""
        h = self.norm2(x)
        if not self.is_plain_mlp or self.after_mlp:
            return x + self.mlp_branch(workspace, h)
        return workspace.residual(x, self.fc2, self._hidden(workspace, h))

    def mlp_branch(self, workspace: CpuWorkspace, h: Tensor) -> Tensor:
        """The residual branch of the MLP, without x."""
        y = self.fc2(self._hidden(workspace, h)) if self.is_plain_mlp else self.inner(h)
        return _chain(self.after_mlp, y)

    def _hidden(self, workspace: CpuWorkspace, h: Tensor) -> Tensor:
        return _chain(self.hidden, workspace.gelu(self.fc1, h, self.act.approximate))


class FastBlocks:
    """The `FastBlock` of every block that is plain (None: not), and what they were read from."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks = tuple(blocks)
        self.fast = [FastBlock(block) if is_plain(block) else None for block in self.blocks]
        self._modules = [module for block in self.blocks for module in block.modules()]
        self._types = list(map(type, self._modules))
        self._attributes = [module.__dict__ for module in self._modules]
        self._children = self._values("_modules")
        self._parameters = self._values("_parameters")
        self._training = self._all("training")
        self._untouched = self._is_untouched()

    def hold(self, blocks: Iterable[Block]) -> bool:
        """Whether these are the blocks that were read, and nothing of them has changed since."""
        return (
            self._untouched
            and _are(blocks, self.blocks)
            and list(map(type, self._modules)) == self._types
            and self._is_untouched()
            and self._all("training") == self._training
            and _are(self._values("_modules"), self._children)
            and _are(self._values("_parameters"), self._parameters)
        )

    def _all(self, name: str) -> list[Any]:
        """The attribute `name` of every module. (All in C: there are some 250 modules.)"""
        return list(map(operator.itemgetter(name), self._attributes))

    def _values(self, name: str) -> list[Any]:
        """The children or parameters of every module, in one list."""
        return list(itertools.chain.from_iterable(map(_VALUES, self._all(name))))

    def _is_untouched(self) -> bool:
        """Whether no module has hooks or a forward of its own. Otherwise the blocks are read anew in every forward."""
        return not (
            has_global_hooks()
            or any(self._all("_forward_hooks"))
            or any(self._all("_forward_pre_hooks"))
            or any(map(operator.contains, self._attributes, itertools.repeat("forward")))
        )


_VALUES = operator.methodcaller("values")


def _are(values: Iterable[Any], expected: Iterable[Any]) -> bool:
    """Whether these are the same objects."""
    values, expected = list(values), list(expected)
    return len(values) == len(expected) and all(map(operator.is_, values, expected))


def read(merger: Any, blocks: Iterable[Block]) -> list[FastBlock | None]:
    """The `FastBlock` of every block that is plain, kept with the state of the model while nothing changes."""
    kept = merger.fast_blocks
    if kept is None or not kept.hold(blocks):
        kept = merger.fast_blocks = FastBlocks(blocks)
    return kept.fast


def is_plain(block: Block) -> bool:
    """Whether no layer is anything but plain, and no hook would see buffers that are overwritten."""
    attn, inner = block.attn, block.mlp
    inner_layers = (layer for layer in (getattr(inner, "fc1", None), getattr(inner, "fc2", None)) if layer is not None)
    drops = (attn.proj_drop, block.ls1, block.drop_path1, inner, block.ls2, block.drop_path2)
    return are_untouched(*drops, *inner.children()) and all(
        map(cpu_workspace.is_plain_linear, (attn.qkv, attn.proj, *inner_layers))
    )


def _parts(layer: nn.Linear) -> Linear:
    """The layer's weights; the layer itself where they are no parameters that `FastBlocks` watches: the adapter changes
    them (`integrations.affine`), or they are plain tensors (replicas of DataParallel)."""
    return Parts(layer) if type(layer) is nn.Linear and _has_parameters(layer) else layer


def _has_parameters(module: nn.Module) -> bool:
    parameters = module._parameters
    return all(parameters.get(name) is getattr(module, name) for name in ("weight", "bias"))


def _norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """The function of a plain LayerNorm; else the module."""
    plain = type(norm) is nn.LayerNorm or (type(norm) is TimmLayerNorm and not norm._fast_norm)
    if not plain or not are_untouched(norm) or not _has_parameters(norm):
        return norm
    weight, bias = norm.weight, norm.bias
    return lambda x: torch.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def _needed(*modules: nn.Module) -> tuple[nn.Module, ...]:
    """Those that do not return their input."""
    return tuple(module for module in modules if not cpu_workspace.is_identity(module))


def _chain(modules: tuple[nn.Module, ...], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x

"""The decoupled embedding of DTEM (https://arxiv.org/abs/2412.10569): features that only token matching uses."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dtem import ops
from dtem.errors import DtemError
from dtem.hooks import are_untouched


class DecoupledEmbedding(nn.Sequential):
    """One affine layer from the host's width to `dim`, or an MLP with hidden layers of the widths `hidden`."""

    def __init__(self, width: int, dim: int, hidden: tuple[int, ...] = ()) -> None:
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [nn.Linear(width, size), nn.GELU()]
            width = size
        super().__init__(*layers, nn.Linear(width, dim))

    def forward(self, x: Float[Tensor, "*batch c"]) -> Float[Tensor, "*batch d"]:
        """Embed each token. (Flattened to a matrix: for more dimensions torch may choose a slower product.)"""
        if _is_plain(self, x):
            layer: Any = self._modules["0"]
            return ops.linear.linear(x, layer.weight, layer.bias)
        z: Tensor = super().forward(x.flatten(0, -2))  # type: ignore[no-untyped-call]
        return z.view(*x.shape[:-1], z.shape[-1])

    @property
    def affine(self) -> nn.Linear | None:
        """The only layer, or None if there are hidden layers."""
        layer = self[0]
        return layer if len(self) == 1 and isinstance(layer, nn.Linear) else None

    @torch.no_grad()
    def copy_keys(
        self,
        weight: Float[Tensor, "e c"],
        bias: Float[Tensor, "e"] | None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Initialise with the head-mean key projection W_k, so that similarities are ToMe's.

        A wider embedding is initialised with Q·W_k, where Q has random orthonormal columns: all cosines are the same. A
        narrower one uses orthonormal rows, which preserves cosines only approximately.
        """
        affine = self.affine
        if affine is None:
            raise DtemError("an embedding with hidden layers cannot be initialised from the keys; use init='random'")
        if bias is None:
            bias = weight.new_zeros(weight.shape[0])
        lift = _orthonormal(affine.out_features, weight.shape[0], generator).to(weight)
        affine.weight.copy_(lift @ weight)
        affine.bias.copy_(lift @ bias)


def _orthonormal(rows: int, columns: int, generator: torch.Generator | None) -> Float[Tensor, "rows columns"]:
    """Identity where square; else random with orthonormal columns (tall) or rows (wide)."""
    if rows == columns:
        return torch.eye(rows)
    tall = torch.randn(max(rows, columns), min(rows, columns), generator=generator, dtype=torch.float64)
    q = torch.linalg.qr(tall).Q.float()
    return q if rows > columns else q.T.contiguous()


def _is_plain(embedding: DecoupledEmbedding, x: Tensor) -> bool:
    """Whether this is one plain layer, without hooks, whose product is faster by oneDNN."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or len(embedding._modules) != 1:
        return False
    layer: Any = embedding._modules["0"]
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and ops.linear.serves(x)
        and layer.weight.dtype == x.dtype
        and layer.weight.is_cpu
        and are_untouched(embedding, layer)
        and not torch.is_autocast_enabled("cpu")
    )

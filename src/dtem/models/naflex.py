"""Images of any shape for NaFlex models (SigLIP 2): patches, padding and the grid of each image in one tensor.

dtem's loaders stack one tensor per image. Here it has a row for each patch, padded to one number of rows, and a last
row that begins with the height and width of the grid: (n + 1, d).
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image


class NaflexTransform:
    """The image processor of a NaFlex model, as a function from an image to one tensor (n + 1, d)."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, image: "Image.Image") -> Tensor:
        inputs = self.processor(images=image.convert("RGB"), return_tensors="pt")
        return pack(inputs["pixel_values"], inputs["spatial_shapes"])[0]


def pack(patches: Tensor, grids: Tensor) -> Tensor:
    """Padded patches (b, n, d) and the grid of each image (b, 2) as one tensor (b, n + 1, d)."""
    last = patches.new_zeros(len(patches), 1, patches.shape[2])
    last[:, 0, :2] = grids.to(last)
    return torch.cat([patches, last], dim=1)


def unpack(packed: Tensor) -> dict[str, Tensor]:
    """The inputs of a NaFlex model, from `pack`."""
    grids = packed[:, -1, :2].round().long()
    places = torch.arange(packed.shape[1] - 1, device=packed.device)
    return {
        "pixel_values": packed[:, :-1],
        "pixel_attention_mask": (places < grids.prod(dim=1, keepdim=True)).long(),
        "spatial_shapes": grids.cpu(),  # the host reads its values
    }

"""Segmenter: a ViT encoder, and a decoder that turns its patches into one mask per class.

Strudel et al., "Segmenter: Transformer for Semantic Segmentation", ICCV 2021, https://arxiv.org/abs/2105.05633.
The encoder is timm's VisionTransformer. Two decoders:

    linear    one class score per patch, by one linear layer
    mask      class tokens go through two more blocks together with the patches; the mask of a class is the product of
              its token with every patch

Names and shapes of the weights are those of the published checkpoints, but for the encoder's classifier, which is left
out. As published, LayerNorm has ε = 1e-5 and position embeddings are resized bilinearly.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.weight_init import trunc_normal_
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from dtem.errors import DtemError

PIXEL_NORMS = {"half": ((0.5,) * 3, (0.5,) * 3), "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
"""Mean and standard deviation of the pixels that the encoder was trained with."""
HEAD = 64  # width of an attention head in every preset
SIZES = {"t": (192, 12, 512), "s": (384, 12, 512), "b": (768, 12, 512), "l": (1024, 24, 640)}
"""Width, blocks, and side of the training crop on ADE20K."""
CLASSIFIER = re.compile(r"(encoder\.)?(head|head_dist|pre_logits)\.")
"""Weights of a published encoder that a Segmenter does not use."""


class LinearDecoder(nn.Module):
    """Class scores of each patch."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.num_classes = classes
        self.head = nn.Linear(width, classes)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """(b, p, c) -> (b, p, classes)."""
        return self.head(x)


class MaskDecoder(nn.Module):
    """Masks as products of patches with class tokens, after a few blocks that both go through."""

    def __init__(self, width: int, classes: int, depth: int = 2, heads: int = 0, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_classes = classes
        self.proj_dec = nn.Linear(width, width)
        self.cls_emb = nn.Parameter(torch.zeros(1, classes, width))
        block = functools.partial(Block, width, heads or width // HEAD, qkv_bias=True, norm_layer=nn.LayerNorm)
        self.blocks = nn.ModuleList(block(proj_drop=dropout, attn_drop=dropout) for _ in range(depth))
        self.decoder_norm = nn.LayerNorm(width)
        self.proj_patch = nn.Parameter(width**-0.5 * torch.randn(width, width))
        self.proj_classes = nn.Parameter(width**-0.5 * torch.randn(width, width))
        self.mask_norm = nn.LayerNorm(classes)
        self.apply(_initialise)
        trunc_normal_(self.cls_emb, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(b, p, c) -> (b, p, classes)."""
        patches = x.shape[1]
        x = torch.cat([self.proj_dec(x), self.cls_emb.expand(x.shape[0], -1, -1)], dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_norm(x)
        patch = F.normalize(x[:, :patches] @ self.proj_patch, dim=-1)
        cls = F.normalize(x[:, patches:] @ self.proj_classes, dim=-1)
        return self.mask_norm(patch @ cls.transpose(1, 2))


DECODERS = {"mask": MaskDecoder, "linear": LinearDecoder}
PRESETS = tuple(f"seg_{size}_{decoder}_16" for size in SIZES for decoder in DECODERS)


class Segmenter(nn.Module):
    """Images to class scores of every pixel.

    Args:
        encoder: a VisionTransformer of timm, e.g. ``timm.create_model("deit_tiny_patch16_224", num_classes=0)``.
        decoder: of the encoder's width.
        name: the model's name in files.
        mean, std: pixel statistics that the encoder was trained with.
    """

    def __init__(
        self,
        encoder: VisionTransformer,
        decoder: LinearDecoder | MaskDecoder,
        name: str = "",
        mean: tuple[float, ...] = (0.5, 0.5, 0.5),
        std: tuple[float, ...] = (0.5, 0.5, 0.5),
    ) -> None:
        super().__init__()
        if not isinstance(encoder, VisionTransformer):
            raise DtemError(f"the encoder is a {type(encoder).__name__}; give a VisionTransformer of timm")
        self.encoder = encoder
        self.decoder = decoder
        embed = encoder.patch_embed
        self.num_classes = decoder.num_classes
        self.pretrained_cfg: dict[str, Any] = {
            "architecture": name or type(self).__name__,
            "input_size": (embed.proj.in_channels, *embed.img_size),
            "mean": mean,
            "std": std,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
        }
        """Preprocessing, as timm's ``resolve_data_config`` reads it."""

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return tuple(self.encoder.patch_embed.patch_size)

    def paper_macs(self, macs: int, height: int, width: int) -> int:
        """GFLOPs as in the DTEM paper's table: `macs` of one image without QKᵀ and AV of the decoder's blocks."""
        if not isinstance(self.decoder, MaskDecoder):
            return macs
        patches = math.ceil(height / self.patch[0]) * math.ceil(width / self.patch[1])
        attention = 2 * (patches + self.num_classes) ** 2 * self.encoder.embed_dim
        return macs - len(self.decoder.blocks) * attention

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the encoder's blocks in the backward pass instead of storing their activations."""
        self.encoder.set_grad_checkpointing(enable)

    def forward(self, images: Tensor) -> Tensor:
        """(b, channels, height, width) -> (b, classes, height, width), for images of any size."""
        _check_images(self, images)
        height, width = images.shape[2:]
        images = F.pad(images, (0, -width % self.patch[1], 0, -height % self.patch[0]))
        padded = images.shape[2:]
        rows, columns = (side // step for side, step in zip(padded, self.patch, strict=True))
        scores = self.decoder(self.encode(images)[:, self.encoder.num_prefix_tokens :])
        masks = scores.transpose(1, 2).unflatten(2, (rows, columns))
        return F.interpolate(masks, size=padded, mode="bilinear")[:, :, :height, :width]

    def encode(self, images: Tensor) -> Tensor:
        """Features of all tokens, prefix first. Height and width are multiples of the patch."""
        x = self.embed(images)
        recompute = self.encoder.grad_checkpointing and torch.is_grad_enabled()
        for block in self.encoder.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return self.encoder.norm(x)

    def embed(self, images: Tensor) -> Tensor:
        """Images to tokens with position embeddings."""
        encoder: Any = self.encoder
        embed = encoder.patch_embed
        x = embed.proj(images)
        grid = tuple(x.shape[2:])
        x = embed.norm(x.flatten(2).transpose(1, 2))
        tokens = (encoder.cls_token, getattr(encoder, "dist_token", None), encoder.reg_token)
        prefix = [token.expand(x.shape[0], -1, -1) for token in tokens if token is not None]
        positions = encoder.pos_embed
        if encoder.no_embed_class:
            x = torch.cat([*prefix, x + resize_positions(positions, embed.grid_size, grid, 0)], dim=1)
        else:
            x = torch.cat([*prefix, x], dim=1)
            x = x + resize_positions(positions, embed.grid_size, grid, encoder.num_prefix_tokens)
        return encoder.norm_pre(encoder.patch_drop(encoder.pos_drop(x)))


def create(
    name: str,
    num_classes: int = 150,
    img_size: tuple[int, int] | None = None,
    drop_path_rate: float = 0.0,
    pixel_norm: str = "half",
) -> Segmenter:
    """A preset (`PRESETS`) with random weights; `img_size` is the size of its training crops."""
    if num_classes < 1:
        raise DtemError(f"num_classes = {num_classes}: a Segmenter needs classes; give the number of yours")
    if pixel_norm not in PIXEL_NORMS:
        raise DtemError(f"pixel_norm = {pixel_norm!r} is not known; choose one of: {', '.join(PIXEL_NORMS)}")
    _, size, decoder, patch = name.split("_")
    width, depth, side = SIZES[size]
    image = img_size or (side, side)
    if any(part < 1 or part % int(patch) for part in image):
        raise DtemError(f"img_size = {image[0]}x{image[1]} is not a multiple of the patch size, {patch}")
    encoder = plain_encoder(width, depth, int(patch), image, drop_path_rate)
    return Segmenter(encoder, DECODERS[decoder](width, num_classes), name, *PIXEL_NORMS[pixel_norm])


def plain_encoder(
    width: int, depth: int, patch: int, image: tuple[int, int], drop_path_rate: float = 0.0
) -> VisionTransformer:
    """The encoder as published: timm's ViT with ε = 1e-5, without classifier."""
    return VisionTransformer(
        img_size=image,
        patch_size=patch,
        embed_dim=width,
        depth=depth,
        num_heads=max(1, width // HEAD),
        num_classes=0,
        drop_path_rate=drop_path_rate,
        norm_layer=functools.partial(nn.LayerNorm, eps=1e-5),
    )


def checkpoint_filter_fn(state: Mapping[str, Tensor], model: Segmenter) -> dict[str, Tensor]:
    """A published state dict as `model` takes it: without the encoder's classifier, with positions of its grid."""
    state = {name: tensor for name, tensor in state.items() if not CLASSIFIER.match(name)}
    encoder: Any = model.encoder
    positions = state.get("encoder.pos_embed")
    if positions is not None and positions.shape != encoder.pos_embed.shape:
        prefix = 0 if encoder.no_embed_class else encoder.num_prefix_tokens
        side = math.isqrt(max(positions.shape[1] - prefix, 0)) if positions.ndim == 3 else 0
        if not side or side * side != positions.shape[1] - prefix:
            shape = tuple(positions.shape)
            raise DtemError(f"encoder.pos_embed of shape {shape} is not a square grid after {prefix} prefix tokens")
        grid = encoder.patch_embed.grid_size
        state["encoder.pos_embed"] = resize_positions(positions.float(), (side, side), grid, prefix)
    return state


def resize_positions(positions: Tensor, old: tuple[int, int], new: tuple[int, int], prefix: int) -> Tensor:
    """Position embeddings (1, prefix + p, c) for another grid of patches, bilinearly."""
    if tuple(old) == tuple(new):
        return positions
    grid = positions[:, prefix:].transpose(1, 2).reshape(positions.shape[0], -1, *old)
    grid = F.interpolate(grid, size=new, mode="bilinear").flatten(2).transpose(1, 2)
    return torch.cat([positions[:, :prefix], grid], dim=1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def _check_images(model: Segmenter, images: Tensor) -> None:
    channels = model.encoder.patch_embed.proj.in_channels
    if images.ndim != 4 or images.shape[1] != channels or 0 in images.shape:
        raise DtemError(f"expected images of shape (batch, {channels}, height, width), got {tuple(images.shape)}")

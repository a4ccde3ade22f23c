"""LV-ViT: a ViT trained by token labelling. timm has none, so this module adds ``lvvit_s`` to timm's registry.

Jiang et al., "All Tokens Matter: Token Labeling for Training Better Vision Transformers", NeurIPS 2021,
https://arxiv.org/abs/2104.10858. It differs from timm's VisionTransformer in three places:

    patches      four convolutions (7×7 by 2, 3×3, 3×3, then non-overlapping) instead of one
    residuals    x + f(x) / 2
    head         class token and best patch:  head(x_cls) + ½ max over patches of aux_head(x_patch)

Names and shapes of the weights are those of the official checkpoints. The token-labelling loss, and mixing of tokens,
with which it was trained are not part of this: in train mode too the output is the one above.
"""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers.patch_embed import PatchEmbed
from timm.layers.weight_init import trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from dtem.errors import DtemError

STEM_WIDTH = 64
POOL = "token+max"
"""What the head reads: the class token and the best patch."""


class ConvStem(PatchEmbed):
    """Image to patches by four convolutions."""

    def __init__(self, in_chans: int, embed_dim: int, patch_size: int, **options: Any) -> None:
        super().__init__(in_chans=in_chans, embed_dim=embed_dim, patch_size=patch_size, **options)
        if self.dynamic_img_pad:
            raise DtemError("dynamic_img_pad=True: LV-ViT cannot pad images; resize them to a multiple of the patch")
        where = {key: options[key] for key in ("device", "dtype") if key in options}
        del self.proj  # it comes last, and sees the stem instead of the image
        for layer, (kernel, stride) in enumerate([(7, 2), (3, 1), (3, 1)], start=1):
            seen = in_chans if layer == 1 else STEM_WIDTH
            convolution = nn.Conv2d(seen, STEM_WIDTH, kernel, stride, padding=kernel // 2, bias=False, **where)
            self.add_module(f"conv{layer}", convolution)
            self.add_module(f"bn{layer}", nn.BatchNorm2d(STEM_WIDTH, **where))
        half = patch_size // 2
        self.proj = nn.Conv2d(STEM_WIDTH, embed_dim, half, half, **where)

    def forward(self, x: Tensor) -> Tensor:
        """(b, channels, height, width) -> (b, p, c), or (b, rows, columns, c) for images of any size."""
        self._check(*x.shape[-2:])
        own: Any = self
        for convolution, norm in ((own.conv1, own.bn1), (own.conv2, own.bn2), (own.conv3, own.bn3)):
            x = nn.functional.relu(norm(convolution(x)), inplace=True)
        x = self.proj(x)
        return x.flatten(2).transpose(1, 2) if self.flatten else x.permute(0, 2, 3, 1)

    def _check(self, height: int, width: int) -> None:
        if self.strict_img_size and (height, width) != tuple(self.img_size):
            raise DtemError(f"the image is {height}×{width}, the model takes {self.img_size[0]}×{self.img_size[1]}")
        if height % self.patch_size[0] or width % self.patch_size[1]:
            raise DtemError(f"the image is {height}×{width}, which patches of {self.patch_size[0]} do not divide")


class Divide(nn.Module):
    """Takes the place of timm's layer scale: divides the output of a residual branch."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x / self.by

    def extra_repr(self) -> str:
        return f"by={self.by}"


class LvVit(VisionTransformer):
    """timm's VisionTransformer with LV-ViT's stem, residuals and head. `options` are those of timm's."""

    def __init__(self, global_pool: str = POOL, divide: float = 2.0, **options: Any) -> None:
        _check_pool(global_pool)
        settings = {"mlp_ratio": 3.0, "qkv_bias": False, "norm_layer": nn.LayerNorm, "embed_layer": ConvStem}
        super().__init__(**{**settings, **options})
        self.global_pool: Any = global_pool
        for block in self.blocks:
            block.ls1, block.ls2 = Divide(divide), Divide(divide)
        self._add_aux_head()

    def _add_aux_head(self) -> None:
        self.aux_head: nn.Module = nn.Identity()
        if self.num_classes:
            like = next(self.parameters())
            head = nn.Linear(self.embed_dim, self.num_classes, device=like.device, dtype=like.dtype)
            trunc_normal_(head.weight, std=0.02)
            nn.init.zeros_(head.bias)
            self.aux_head = head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New heads, for the class token and for patches."""
        _check_pool(global_pool or POOL)
        super().reset_classifier(num_classes)
        self._add_aux_head()

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """The class token."""
        return x[:, 0]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Class token and best patch; with `pre_logits`, or without classes, the class token's features."""
        pooled = super().forward_head(x, pre_logits)
        return pooled if pre_logits or not self.num_classes else pooled + 0.5 * self.best_patch(x)

    def best_patch(self, x: Tensor) -> Tensor:
        """For each class, the highest score that a patch gives it."""
        return self.aux_head(x[:, self.num_prefix_tokens :]).amax(dim=1)


def _check_pool(pool: str) -> None:
    if pool != POOL:
        raise DtemError(
            f"global_pool = {pool!r}: LV-ViT reads its class token and its best patch; leave the pooling out"
        )


default_cfgs = generate_default_cfgs(
    {
        "lvvit_s": {
            "url": "https://github.com/zihangJiang/TokenLabeling/releases/download/1.0/lvvit_s-26M-224-83.3.pth.tar",
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "fixed_input_size": True,
            "crop_pct": 0.9,
            "interpolation": "bicubic",
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "first_conv": "patch_embed.conv1",
            "classifier": ("head", "aux_head"),
        }
    }
)


@register_model
def lvvit_s(pretrained: bool = False, **options: Any) -> LvVit:
    """LV-ViT-S: 26.15 M parameters, 83.3 % on ImageNet."""
    shape = {"patch_size": 16, "embed_dim": 384, "depth": 16, "num_heads": 6}
    return build_model_with_cfg(
        LvVit,
        "lvvit_s",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **{**shape, **options},
    )

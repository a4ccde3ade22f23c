"""digits_vit: a small ViT with DeiT's 197 tokens and 12 blocks that reads cluttered digits, for the offline demo.

`benchmarks/train_digits.py` made the weights; `assets/digits_vit.md` is their card.
"""

from importlib import resources
from pathlib import Path
from typing import Any

NAME = "digits_vit"
CLASSES = 10
SIDE = 56
"""Height and width of its images in pixels."""
MEAN, STD = 0.25, 0.33


def create(pretrained: bool = True) -> Any:
    """The model, in eval mode: 56×56 grey pixels in 4×4 patches."""
    from timm.models.vision_transformer import VisionTransformer

    model: Any = VisionTransformer(
        img_size=SIDE, patch_size=4, in_chans=1, num_classes=CLASSES, embed_dim=64, depth=12, num_heads=2, mlp_ratio=4
    )
    # Its name, so that adapter files can tell it from other models, and how images are to be prepared for it.
    model.pretrained_cfg = {
        "architecture": NAME,
        "input_size": (1, SIDE, SIDE),
        "mean": (MEAN,),
        "std": (STD,),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "num_classes": CLASSES,
    }
    if pretrained:
        from safetensors.torch import load_file

        model.load_state_dict({name: tensor.float() for name, tensor in load_file(asset("safetensors")).items()})
    return model.eval()


def asset(ending: str) -> Path:
    """A file that comes with the model: its weights (``safetensors``), a trained adapter (``dtem.safetensors``), or
    the accuracy of both at each r (``record.json``)."""
    return Path(str(resources.files("dtem.models"))) / "assets" / f"{NAME}.{ending}"

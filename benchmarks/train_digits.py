"""Train the host that `dtem demo` ships (src/dtem/models/assets/digits_vit.safetensors).

    python -m benchmarks.train_digits --out digits_vit.safetensors

About a quarter of an hour of one core. Every stage has more tokens and more clutter than the one before: half of the
blocks on the 6×6 patches around the digit; all blocks (the new ones begin as the identity) on 10×10 and 12×12; then on
whole images. Clutter, and the turns and bends of digits, are drawn anew for every batch. The held-out digits are looked
at once, when training is over. To try another recipe use `--validation 500`, which takes its images from the training
digits instead.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import init_weights_vit_jax
from torch import Tensor, nn
from torch.nn import functional as F

from dtem.data import digits
from dtem.data.digits import BOX, MARGIN, Digits, Scenes, compose
from dtem.files import write_file
from dtem.models import digits_vit


class Stage(NamedTuple):
    blocks: int
    """Every one of them, or every second."""
    window: int
    """Rows and columns of patches that are kept around the digit."""
    epochs: int
    fragments: tuple[int, int]
    ground: float
    noise: float
    rate: tuple[float, float]
    """Factor on the learning rates at its beginning and at its end."""


PHASES = (
    (
        Stage(6, 6, 40, (4, 24), 0.3, 0.05, (1.0, 1.0)),
        Stage(12, 10, 4, (8, 24), 0.3, 0.05, (0.7, 0.567)),
    ),
    (
        Stage(12, 12, 2, (16, 40), 0.5, 0.1, (0.6, 0.5)),
        Stage(12, 14, 3, (16, 40), 0.5, 0.1, (0.5, 0.02)),
    ),
)
"""Each with a seed, optimisers and a warm-up of its own."""
BATCH, WARMUP, SMOOTHING, CLIP, BEND = 64, 100, 0.1, 1.0, 0.8
MUON = {"lr": 0.02, "weight_decay": 0.05, "momentum": 0.95}
"""For the matrices of blocks."""
ADAMW: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.01, "betas": (0.9, 0.98)}
PATCH, GRID = 4, 14


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation", type=int, default=0, metavar="N", help="training digits to leave out and score")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train, scored = digits.load_digits()
    if args.validation:
        order = torch.randperm(len(train.rows))
        train, scored = train.subset(order[args.validation :]), train.subset(order[: args.validation])
    model = begin(digits_vit.create(pretrained=False)).train()
    for phase, stages in enumerate(PHASES):
        torch.manual_seed(args.seed + phase)
        for _ in learn(model, train, stages):
            save_weights(model, args.out)
    held_out = digits.ClutteredDigits(scored, seed=2)
    print(
        json.dumps({"seed": args.seed, "trained_on": len(train.rows), **score(model.half().float().eval(), held_out)})
    )


def begin(model: Any) -> Any:
    """Weights as large as their width asks for, positions as waves, and every second block the identity."""
    for name, module in model.named_modules():
        init_weights_vit_jax(module, name)
    nn.init.trunc_normal_(model.head.weight, std=0.02)
    with torch.no_grad():
        model.pos_embed[0, 1:] = build_sincos2d_pos_embed([GRID, GRID], model.embed_dim) * 0.5
        for block in model.blocks[1::2]:
            for layer in (block.attn.proj, block.mlp.fc2):
                layer.weight.zero_()
                layer.bias.zero_()
    return model


def learn(model: Any, train: Digits, stages: tuple[Stage, ...]) -> Iterator[None]:
    """Muon for the matrices of blocks, AdamW for all else; yields after every epoch."""
    named = dict(model.named_parameters())
    inner = {name for name, parameter in named.items() if parameter.ndim == 2 and "blocks" in name}
    optimisers = (
        torch.optim.Muon([named[name] for name in named if name in inner], **MUON),
        torch.optim.AdamW([named[name] for name in named if name not in inner], **ADAMW),
    )
    peaks = [optimiser.param_groups[0]["lr"] for optimiser in optimisers]
    per_epoch, step, start = len(train.rows) // BATCH, 0, time.monotonic()
    for stage in stages:
        steps, first = stage.epochs * per_epoch, step
        for epoch in range(stage.epochs):
            total = 0.0
            for batch in torch.randperm(len(train.rows))[: per_epoch * BATCH].split(BATCH):
                begin_rate, end_rate = stage.rate
                factor = begin_rate + (end_rate - begin_rate) * (step - first) / steps
                for optimiser, peak in zip(optimisers, peaks, strict=True):
                    optimiser.param_groups[0]["lr"] = peak * factor * min(1, (step + 1) / WARMUP)
                low, high = stage.fragments
                fragments = int(low + (high - low) * torch.rand(1).item())
                bent = bend(train.pixels[batch][:, None])[:, 0].clamp(0, 1)
                scenes = compose(bent, train.pixels, fragments, stage.ground, stage.noise)
                with torch.autocast("cpu", torch.bfloat16):
                    logits = forward(model, scenes, stage)
                loss = F.cross_entropy(logits.float(), train.classes[batch], label_smoothing=SMOOTHING)
                for optimiser in optimisers:
                    optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                for optimiser in optimisers:
                    optimiser.step()
                total += loss.item()
                step += 1
            print(f"{stage.blocks} blocks, {stage.window}×{stage.window} patches, epoch {epoch + 1}/{stage.epochs}: "
                  f"loss {total / per_epoch:.3f}, {time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
            yield


def forward(model: Any, scenes: Scenes, stage: Stage) -> Tensor:
    """Logits from the blocks and the patches of a stage."""
    x = model.patch_embed(digits.normalise(scenes.images))
    x = torch.cat([model.cls_token.expand(len(x), -1, -1), x], 1) + model.pos_embed
    if stage.window < GRID:
        rows, columns = _window(scenes.top, stage.window), _window(scenes.left, stage.window)
        patches = 1 + (rows[:, :, None] * GRID + columns[:, None, :]).flatten(1)
        index = F.pad(patches, (1, 0))  # 0: the class token
        x = x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
    for block in model.blocks[:: len(model.blocks) // stage.blocks]:
        x = block(x)
    return model.head(model.norm(x)[:, 0])


def _window(corner: Tensor, window: int) -> Tensor:
    """Along one axis: patches of a random window that holds the digit's ink, (b, window)."""
    low = ((corner + BOX - MARGIN + PATCH - 1) // PATCH - window).clamp(min=0)
    high = ((corner + MARGIN) // PATCH).clamp(max=GRID - window)
    return (low + (torch.rand(len(corner)) * (high - low + 1)).long())[:, None] + torch.arange(window)


def bend(images: Tensor, strength: float = BEND) -> Tensor:
    """Every digit turned, scaled, sheared, moved and bent on its own; at strength 1 by 12°, 15 %, 15 %, 1.4 pixels."""
    count = len(images)

    def random(*shape: int) -> Tensor:
        return strength * (2 * torch.rand(count, *shape) - 1)

    angle, size, shear, shift = random() * math.radians(12), 1 + 0.15 * random(2), 0.15 * random(), 0.1 * random(2)
    cos, sin = angle.cos(), angle.sin()
    rows = (
        [cos * size[:, 0], shear - sin * size[:, 1], shift[:, 0]],
        [sin * size[:, 0], cos * size[:, 1], shift[:, 1]],
    )
    grid = F.affine_grid(torch.stack([torch.stack(row, 1) for row in rows], 1), images.shape, align_corners=False)
    waves = F.interpolate(0.04 * strength * torch.randn(count, 2, 5, 5), images.shape[2:], mode="bicubic")
    return F.grid_sample(images, grid + waves.permute(0, 2, 3, 1), align_corners=False)


@torch.no_grad()
def score(model: nn.Module, data: digits.ClutteredDigits) -> dict[str, float]:
    logits = torch.cat([model(images) for images in data.images.split(100)])
    return {
        "images": len(logits),
        "top1": 100 * (logits.argmax(1) == data.classes).double().mean().item(),
        "cross_entropy": F.cross_entropy(logits, data.classes).item(),
    }


def save_weights(model: nn.Module, out: Path) -> None:
    """In half precision."""
    write_file(out, save({name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}))


if __name__ == "__main__":
    main()

"""Train the host that `dtem demo` ships (src/dtem/pretrained/mnist_vit.safetensors).

    python -m benchmarks.train_digits --out mnist_vit.safetensors

About twenty minutes of one core. First on digits of half the size, which have a quarter of the tokens, then on whole
ones; digits are bent little at first and more and more later. The held-out digits are looked at once, when training is
over. To try another recipe use `--validation 500`, which takes its images from the training digits instead.
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
from dtem.files import write_file
from dtem.models import mnist_vit


class Stage(NamedTuple):
    shrink: int
    epochs: int
    rate: float
    bend: tuple[float, float]
    """Strength of augmentation at its beginning and at its end."""


STAGES = (Stage(2, 30, 1e-3, (0.2, 0.8)), Stage(1, 6, 4e-4, (0.6, 0.8)))
BATCH, WARMUP, DECAY, SMOOTHING, CLIP = 32, 100, 0.05, 0.1, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation", type=int, default=0, metavar="N", help="training digits to leave out and score")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train, scored = digits.load()
    if args.validation:
        order = torch.randperm(train.length)
        train, scored = train.subset(order[args.validation :]), train.subset(order[: args.validation])
    model = begin(mnist_vit.create(pretrained=False))
    for stage in STAGES:
        for _ in learn(model, train, stage):
            save_weights(model, args.out)
    print(json.dumps({"seed": args.seed, "trained_on": train.length, **score(model.half().float().eval(), scored)}))


def begin(model: Any) -> Any:
    """Weights as large as their width asks for, and positions as waves: a thin model needs both to get going."""
    for name, module in model.named_modules():
        init_weights_vit_jax(module, name)
    nn.init.trunc_normal_(model.head.weight, std=0.02)
    with torch.no_grad():
        model.pos_embed[0, 1:] = build_sincos2d_pos_embed(list(model.patch_embed.grid_size), model.embed_dim)
    return model


def learn(model: Any, train: digits.Digits, stage: Stage) -> Iterator[None]:
    """AdamW with a cosine after a short warm-up; yields after every epoch."""
    side = 14 // stage.shrink
    model.set_input_size(img_size=28 // stage.shrink)  # positions are interpolated
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    )
    pixels, labels = train.pixels[:, None] / 255, train.classes
    per_epoch = train.length // BATCH
    steps, step, start = stage.epochs * per_epoch, 0, time.monotonic()
    model.train()
    for epoch in range(stage.epochs):
        total = 0.0
        for batch in torch.randperm(train.length)[: per_epoch * BATCH].split(BATCH):
            done = step / steps
            for group in optimiser.param_groups:
                group["lr"] = stage.rate * min(1, (step + 1) / WARMUP) * (0.51 + 0.49 * math.cos(math.pi * done))
            low, high = stage.bend
            images = F.avg_pool2d(bend(pixels[batch], low + (high - low) * done), stage.shrink)
            loss = F.cross_entropy(model(digits.normalise(images)), labels[batch], label_smoothing=SMOOTHING)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimiser.step()
            total += loss.item()
            step += 1
        print(f"{side}×{side} patches, epoch {epoch + 1}/{stage.epochs}: loss {total / per_epoch:.3f}, "
              f"{time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
        yield


def bend(images: Tensor, strength: float) -> Tensor:
    """Every digit turned, scaled, sheared, moved and bent on its own; at strength 1 by 10°, 12 %, 12 %, 2 pixels."""
    count = len(images)

    def random(*shape: int) -> Tensor:
        return strength * (2 * torch.rand(count, *shape) - 1)

    angle, size, shear, shift = random() * math.radians(10), 1 + 0.12 * random(2), 0.12 * random(), 0.14 * random(2)
    cos, sin = angle.cos(), angle.sin()
    rows = (
        [cos * size[:, 0], shear - sin * size[:, 1], shift[:, 0]],
        [sin * size[:, 0], cos * size[:, 1], shift[:, 1]],
    )
    grid = F.affine_grid(torch.stack([torch.stack(row, 1) for row in rows], 1), images.shape, align_corners=False)
    waves = F.interpolate(0.04 * strength * torch.randn(count, 2, 5, 5), images.shape[2:], mode="bicubic")
    return F.grid_sample(images, grid + waves.permute(0, 2, 3, 1), align_corners=False)


@torch.no_grad()
def score(model: nn.Module, data: digits.Digits) -> dict[str, float]:
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

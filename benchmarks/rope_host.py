"""Train a small host with rotary positions alone, on which `benchmarks.rope_places` measures.

    python -m benchmarks.rope_host --data DIR/train DIR/extra --weights deit_tiny.safetensors --out host.safetensors

It is DeiT-T with DINOv3's rotary embedding in place of its position embedding, distilled from DeiT-T itself on the
photographs, without their labels. It is a host to compare on, not a good model: see its accuracy in the record.
"""

import argparse
import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save
from timm.models.eva import Eva
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import common
from dtem.data.preprocessing import pixel_statistics, resolve_data_config
from dtem.files import write_file
from dtem.models.weights import read_state_dict

BATCH, RATE, DECAY, WARMUP, SIDE = 32, 4e-4, 0.05, 0.03, 224


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of photographs")
    parser.add_argument("--weights", type=Path, required=True, help="of deit_tiny_patch16_224")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0, help="of one core; default %(default)s")
    parser.add_argument("--wall-minutes", type=float, default=120.0, help="stop after these too; default %(default)s")
    args = parser.parse_args()
    torch.manual_seed(0)
    teacher = timm.create_model("deit_tiny_patch16_224")
    state = read_state_dict(args.weights)
    teacher.load_state_dict(state)
    student = begin(state)
    images = read(sorted(file for folder in args.data for file in folder.rglob("*.jpg")))
    print(f"{len(images)} photographs", flush=True)
    learn(student, teacher.eval(), images, args)
    return 0


def create() -> Any:
    """DeiT-T's shape with DINOv3's rotary embedding, and no other positions."""
    return Eva(
        embed_dim=192, num_heads=3, attn_type="rope", rope_type="dinov3", rope_temperature=100.0,
        rope_rotate_half=True, use_rot_pos_emb=True, use_abs_pos_emb=False, global_pool="token",
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    )  # fmt: skip


def begin(state: dict[str, Tensor]) -> Any:
    """DeiT-T's weights; what its positions have in common goes into the biases of the patches and the class token."""
    model = create()
    state = {name: tensor.float() for name, tensor in state.items()}
    positions = state.pop("pos_embed")[0]
    state["cls_token"] = state["cls_token"] + positions[:1]
    state["patch_embed.proj.bias"] = state["patch_embed.proj.bias"] + positions[1:].mean(dim=0)
    model.load_state_dict(state)
    return model


def read(files: list[Path]) -> Tensor:
    """All photographs, (n, 3, height, width) in bytes; they have one size."""
    return torch.stack([torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1) for file in files])


def learn(student: Any, teacher: nn.Module, images: Tensor, args: argparse.Namespace) -> None:
    """AdamW with a cosine over the time; the loss is the divergence from the teacher, which sees the same crop."""
    mean, std = pixel_statistics(resolve_data_config(teacher))
    matrices = [p for p in student.parameters() if p.ndim > 1]
    vectors = [p for p in student.parameters() if p.ndim < 2]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    )
    core, wall, step, total, done = time.process_time(), time.monotonic(), 0, 0.0, 0.0
    student.train()
    while done < 1.0:
        batch = images[torch.randint(len(images), (BATCH,))]
        top, left = (torch.randint(side - SIDE + 1, ()).item() for side in images.shape[2:])
        batch = batch[:, :, top : top + SIDE, left : left + SIDE]
        batch = torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, batch.flip(3), batch)
        batch = (batch / 255 - mean) / std
        with torch.no_grad():
            target = teacher(batch).log_softmax(dim=1)
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, done / WARMUP + 0.01) * (0.505 + 0.495 * math.cos(math.pi * done))
        loss = F.kl_div(student(batch).log_softmax(dim=1), target, log_target=True, reduction="batchmean")
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimiser.step()
        step, total = step + 1, total + loss.item()
        done = max(
            (time.process_time() - core) / (60 * args.minutes), (time.monotonic() - wall) / (60 * args.wall_minutes)
        )
        if step % 20 == 0 or done >= 1.0:
            report = {"step": step, "images": step * BATCH, "done": round(done, 3), "loss": round(total / 20, 4)}
            print(json.dumps(report), flush=True)
            total = 0.0
            write_file(args.out, save({name: tensor.contiguous() for name, tensor in student.state_dict().items()}))
    minutes = (time.process_time() - core) / 60
    print(json.dumps({"updates": step, "images": step * BATCH, "core_minutes": round(minutes, 1)}), flush=True)


if __name__ == "__main__":
    sys.exit(common.run(main))

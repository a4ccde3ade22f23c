"""Memory of a modular training step: the most bytes of tensors that live at once, weights included.

python -m benchmarks.memory        AugReg ViT-S at 384 × 384 (577 tokens), r = 48; then what batch 32 needs

Counted, not sampled: every tensor that an operation returns is watched until it is freed, at batch 1 and 2; both grow
by the same amount per image. Work space inside kernels and what an allocator wastes come on top.
"""

import argparse

import timm
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dtem
import dtem.models
from benchmarks import common


class Watch(TorchDispatchMode):
    """Bytes of the tensors that operations return while this is on, and the most of them at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.living = {key: held for key, held in self.living.items() if not held[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.living.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, sum(size for _, size in self.living.values()))
        return out


def step_bytes(name: str, r: int, batch: int, checkpointing: bool, bf16: bool) -> int:
    """The most bytes in use at once in forward and backward."""
    model = timm.create_model(name).eval().requires_grad_(False)
    handle = dtem.patch(model, r=r)
    handle.mode = "soft"
    model.set_grad_checkpointing(checkpointing)
    weights = sum(p.nbytes * (2 if p.requires_grad else 1) for p in model.parameters())  # and their gradients
    images = torch.randn(batch, *handle.host.image)
    with Watch() as watch, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model(images).logsumexp(dim=1).sum().backward()
    return weights + images.nbytes + watch.most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_384")
    parser.add_argument("--r", type=int, default=48)
    parser.add_argument("--batch", type=int, default=32)
    common.add_arguments(parser)
    args = parser.parse_args()
    rows = []
    for checkpointing in (False, True):
        for bf16 in (False, True):
            one, two = (step_bytes(args.model, args.r, batch, checkpointing, bf16) for batch in (1, 2))
            each, all_of_them = two - one, one + (args.batch - 1) * (two - one)
            row = {"model": args.model, "r": args.r, "batch": args.batch, "checkpointing": checkpointing, "bf16": bf16}
            rows.append(row | {"bytes_per_image": each, "bytes": all_of_them})
            how = f"{'bf16' if bf16 else 'fp32'}{', checkpointing' if checkpointing else ''}"
            cost = f"{each / 1e6:.0f} MB per image, {all_of_them / 1e9:.2f} GB at batch {args.batch}"
            print(f"{args.model} {how:20} {cost}", flush=True)
    common.save_record("memory", rows, args)


if __name__ == "__main__":
    main()

"""Train the merging embeddings of a ViT in a training loop of your own, by distillation from the unmerged model.

    python examples/own_training_loop.py

It runs in seconds on random images with a small model that comes with dtem. Put your model and your data
loader in their places.
"""

import argparse

import torch
from torch.nn import functional as F

import dtem


def main(model_name: str, r: int, steps: int, path: str) -> float:
    """Train, save, reload. Returns the loss of the reloaded adapter: cross-entropy to the unmerged model."""
    torch.manual_seed(0)
    model = dtem.create_model(model_name).requires_grad_(False)  # freeze: only embeddings learn
    handle = dtem.patch(model, "dtem", r=r)
    images = torch.randn(8, *handle.host.image)  # here: batches of your data loader

    def loss_of(handle: dtem.Handle) -> torch.Tensor:
        with torch.no_grad(), handle.at(r=0, mode="hard"):
            target = handle.model(images).softmax(dim=-1)  # what the unmerged model predicts
        return F.cross_entropy(handle.model(images), target)

    handle.mode = "soft"  # differentiable merging, for training
    optimizer = torch.optim.AdamW(handle.parameters(), lr=1e-3)
    for step in range(steps):
        loss = loss_of(handle)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {loss.item():.4f}")

    handle.mode = "hard"  # merging as at inference
    handle.save_pretrained(path, trained_r=r)
    trained = loss_of(handle).item()

    reloaded = dtem.from_pretrained(path, handle.unpatch(), r=r)
    loss = loss_of(reloaded).item()
    print(f"{path}: loss {loss:.4f} with hard merging, r = {r}")
    assert loss == trained, "the file holds what was trained"
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        default="digits_vit",
        help="for dtem.create_model; default %(default)s, which is small and comes with dtem",
    )
    parser.add_argument("--r", type=int, default=48, help="tokens merged per block; default %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="default %(default)s")
    parser.add_argument("--out", default="my.safetensors", help="the adapter file; default %(default)s")
    args = parser.parse_args()
    main(args.model, args.r, args.steps, args.out)

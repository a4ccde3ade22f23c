"""The demo's own training: the embeddings learn to make the merged model say what the unmerged one says."""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtem.cli.demo_case import Case
    from dtem.handle import Handle
    from dtem.tasks.classification.data import Batch


def learn(handle: "Handle", case: "Case", args: argparse.Namespace) -> dict[str, Any]:
    """Train for --steps, or as many as fit into --seconds; the learning rate falls as a cosine over whichever it is."""
    import torch
    from torch import nn

    from dtem.tasks.classification.loss import distill_loss
    from dtem.training.optimise import groups

    learned = [parameter for parameter in handle.method.parameters() if parameter.requires_grad]
    for model in (case.host, handle.model.eval()):
        model.requires_grad_(False)
    for parameter in learned:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(groups(learned, weight_decay=1e-4), lr=args.rate)
    handle.mode = "soft"
    losses: list[float] = []
    start = time.monotonic()
    with _bar() as advance:
        for step, batch in enumerate(_batches(case, args.batch, args.seed)):
            done = (time.monotonic() - start) / args.seconds if args.steps is None else step / args.steps
            if step and done >= 1:
                break
            for group in optimiser.param_groups:
                group["lr"] = args.rate * (1 + math.cos(math.pi * min(1.0, done))) / 2
            with torch.no_grad():
                teacher = case.host(batch.images)
            loss = distill_loss(handle.model(batch.images), teacher)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(learned, 5.0)
            optimiser.step()
            losses.append(loss.item())
            advance(done, sum(losses[-20:]) / len(losses[-20:]))
    handle.mode = "hard"
    tail = losses[-max(1, len(losses) // 10) :]
    head = losses[: max(1, len(losses) // 10)]
    return {
        "steps": len(losses),
        "images_seen": len(losses) * args.batch,
        "training_images": case.train.length,
        "seconds": time.monotonic() - start,
        "r": args.train_r,
        "rate": args.rate,
        "seed": args.seed,
        "first_loss": sum(head) / len(head),
        "last_loss": sum(tail) / len(tail),
    }


def _batches(case: "Case", batch: int, seed: int) -> "Iterator[Batch]":
    loader = case.loader(case.train, batch, shuffle=True, seed=seed)
    return itertools.chain.from_iterable(map(loader.epoch, itertools.count()))


@contextmanager
def _bar() -> Iterator[Callable[[float, float], None]]:
    """A bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("training embeddings", total=1.0)

        def advance(done: float, loss: float) -> None:
            bar.update(task, completed=done, description=f"training embeddings, loss {loss:.4f}")

        yield advance

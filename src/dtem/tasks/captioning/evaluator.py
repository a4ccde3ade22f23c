"""Running captioners over images: generated captions, and teacher-forced losses of reference captions."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtem.tasks.captioning.captions import Item
from dtem.tasks.captioning.generation_config import GenerationConfig
from dtem.tasks.captioning.loss import token_losses
from dtem.tasks.captioning.outcomes import CaptionOutcomes, pool
from dtem.tasks.running import run_in_turns, synchronised_time

if TYPE_CHECKING:
    from dtem.data.loader import Batch, Loader

NUM_BEAMS, MAX_NEW_TOKENS = GenerationConfig.num_beams, GenerationConfig.max_new_tokens
Captioner = Callable[[Tensor, Sequence[Item]], CaptionOutcomes]
"""Images and their reference captions -> outcomes."""


@torch.inference_mode()
def generate_captions(
    model: Any, images: Tensor, num_beams: int = NUM_BEAMS, max_new_tokens: int = MAX_NEW_TOKENS
) -> list[str]:
    """A caption for each image by beam search. `model` has its tokenizer (`dtem.create_model`)."""
    from dtem.integrations.hf_git import cached_image_tokens, encode_image

    with cached_image_tokens(model, encode_image(model, images)):
        ids = model.generate(
            pixel_values=images,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            repetition_penalty=1.0,
            length_penalty=1.0,
        )
    texts: list[str] = model.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [text.strip() for text in texts]


def tokenize(tokenizer: Any, captions: Sequence[str], max_tokens: int, device: Any) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of captions, padded at the end: (b, t) each."""
    tokens = tokenizer(
        list(captions),
        padding=True,
        truncation=True,
        max_length=max_tokens + 2,  # the first token and the last
        padding_side="right",
        return_tensors="pt",
    )
    return tokens["input_ids"].to(device), tokens["attention_mask"].to(device)


@torch.inference_mode()
def caption_losses(
    model: Any, images: Tensor, items: Sequence[Item], max_tokens: int = MAX_NEW_TOKENS
) -> tuple[list[float], list[int]]:
    """For each image the summed cross-entropy of its reference captions, and the number of their tokens.

    The image is encoded once for all its captions: row by row, the first captions of all images, then the second ones.
    """
    most = max(len(item.captions) for item in items)
    texts = [item.captions[index % len(item.captions)] for index in range(most) for item in items]
    ids, mask = tokenize(model.tokenizer, texts, max_tokens, images.device)
    losses, present = token_losses(model(input_ids=ids, attention_mask=mask, pixel_values=images).logits, ids, mask)
    counted = torch.tensor(
        [index < len(item.captions) for index in range(most) for item in items], device=images.device
    )
    loss_sums, token_counts = (
        (part.sum(dim=1) * counted).double().view(most, len(items)).sum(dim=0).tolist() for part in (losses, present)
    )
    return loss_sums, [round(count) for count in token_counts]


def captioner(model: Any, num_beams: int = NUM_BEAMS, max_new_tokens: int = MAX_NEW_TOKENS) -> Captioner:
    """A function that captions images with `model` and computes the losses of their reference captions."""

    def run(images: Tensor, items: Sequence[Item]) -> CaptionOutcomes:
        start = synchronised_time(images)
        captions = generate_captions(model, images, num_beams, max_new_tokens)
        turn = (len(items), synchronised_time(images) - start)
        losses, token_counts = caption_losses(model, images, items, max_new_tokens)
        names = [item.name for item in items]
        return CaptionOutcomes(
            dict(zip(names, captions, strict=True)),
            dict(zip(names, losses, strict=True)),
            dict(zip(names, token_counts, strict=True)),
            turns=[turn],
        )

    return run


def run_variants(
    variants: Mapping[str, Captioner],
    loader: "Loader",
    items: Sequence[Item],
    device: torch.device | str = "cpu",
    **options: Any,
) -> dict[str, CaptionOutcomes]:
    """Outcomes of every `captioner` on every image; options as for `run_in_turns`.

    Labels of the loader are positions in `items`, the images with their reference captions (`captions.Captions`).
    """

    def batch_outcomes(variant: Captioner, batch: "Batch") -> CaptionOutcomes:
        return variant(batch.images, [items[index] for index in batch.labels.tolist()])

    return run_in_turns(variants, loader, batch_outcomes, pool, device, **options)

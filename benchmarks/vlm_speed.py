"""What merging inside the tower saves in a vision-language model, against dropping as many tokens after the tower.

python -m benchmarks.vlm_speed --size 224 --r 4,8        PaliGemma-3B's sizes, random weights, 6 of its 18 Gemma layers
python -m benchmarks.vlm_speed --size 448 --r 16,24

One image and a prompt of 8 words. Every variant answers with the same number of words (--words), so what is compared is
the work, not what random weights happen to say. *Tower*: the image through tower and projector. *First word*: until
the answer's first word, with the tower. *Words/s*: all later words. All come from one `generate`; variants take turns,
and ratios are those of the same round. Memory: most bytes that `generate` holds beside the weights, and the key-value
cache.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling

import dtem
from benchmarks import common
from dtem.integrations.weight_sharing import share
from dtem.measure import flops, throughput

PROMPT, PATCH = 8, 14


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=224, help="side of the image")
    parser.add_argument("--r", default="4,8")
    parser.add_argument("--layers", type=int, default=6, help="of the language model")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--words", type=int, default=6, help="of every answer")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights, to test this script")
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    host = build(args)
    runs: dict[str, Callable[[], dict[str, float]]] = {"unmerged": answering(host, args)}
    handles = {r: dtem.patch(share(host), r=r) for r in map(int, args.r.split(","))}
    for r, handle in handles.items():
        runs[f"merged {r}"] = answering(handle.model, args)
        runs[f"dropped {r}"] = answering(host, args, handle.tokens[-1])
    memory = {name: throughput.peak_bytes(lambda _, run=run: run(), torch.empty(1)) for name, run in runs.items()}
    rounds = in_turns(runs, args.rounds)
    rows = [row(args, name, rounds, memory, host, handles) for name in runs]
    for each in rows:
        print(show(each), flush=True)
    common.save_record(f"vlm_speed_{args.size}", rows, args)


def build(args: argparse.Namespace) -> Any:
    """PaliGemma of the published sizes, but for the number of layers of its language model."""
    width, inner, depth, heads = (32, 64, 3, 2) if args.tiny else (1152, 4304, 27, 16)
    vision = {"model_type": "siglip_vision_model", "hidden_size": width, "intermediate_size": inner}
    vision |= {"num_hidden_layers": depth, "num_attention_heads": heads, "image_size": args.size, "patch_size": PATCH}
    width, inner, heads, head_dim, words = (32, 64, 2, 16, 100) if args.tiny else (2048, 16384, 8, 256, 257152)
    text = {"model_type": "gemma", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": args.layers}
    text |= {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": head_dim, "vocab_size": words}
    config = PaliGemmaConfig(
        vision_config={**vision, "vision_use_head": False},
        text_config=text,
        projection_dim=width,
        hidden_size=width,
        vocab_size=words,
        image_token_index=words - 1,
    )
    with torch.device("meta"):
        model = PaliGemmaForConditionalGeneration(config)
    model = model.to_empty(device="cpu")
    noise = 0.02 * torch.randn(1 << 20)
    with torch.no_grad():
        for parameter in model.parameters():  # drawing a billion numbers would take minutes
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), noise.numel()):
                part = flat[start : start + noise.numel()]
                part.copy_(noise[: part.numel()])
        for module in model.modules():
            if hasattr(module, "original_inv_freq"):  # rotary angles are buffers, which meta tensors do not hold
                frequencies, _ = module.compute_default_rope_parameters(module.config)
                module.inv_freq = module.original_inv_freq = frequencies
            if hasattr(module, "position_ids"):
                module.position_ids = torch.arange(module.num_positions)[None]
            if hasattr(module, "embed_scale"):
                module.embed_scale = torch.tensor(module.scalar_embed_scale)
    model.tie_weights()
    model.generation_config.eos_token_id = None  # every answer has its full length
    return model.eval()


def answering(model: Any, args: argparse.Namespace, keep: int | None = None) -> Callable[[], dict[str, float]]:
    """Seconds of one answer by part. `keep`: so many evenly spaced tokens of the unmerged tower are read; None: all."""
    pixels = torch.randn(1, 3, args.size, args.size, generator=torch.Generator().manual_seed(1))
    count = (args.size // PATCH) ** 2
    token = model.config.image_token_id

    def prompt(tokens: int) -> dict[str, Any]:
        ids = torch.cat([torch.full((tokens,), token), torch.arange(10, 10 + PROMPT)])[None]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}

    def run() -> dict[str, float]:
        clock = Clock()
        hook = model.model.multi_modal_projector.register_forward_hook(lambda *_: clock.note())
        settings = {"max_new_tokens": args.words, "do_sample": False, "streamer": clock}
        try:
            with torch.inference_mode():
                if keep is None:
                    model.generate(**prompt(count), pixel_values=pixels, **settings)
                else:
                    features = model.get_image_features(pixels).pooler_output
                    kept = features[:, torch.linspace(0, count - 1, keep).round().long()]
                    images = {"image": BaseModelOutputWithPooling(pooler_output=kept)}
                    model.generate(**prompt(keep), mm_encoder_outputs=images, **settings)
        finally:
            hook.remove()
        return clock.parts()

    return run


class Clock:
    """A streamer of `generate` that notes when each word comes."""

    def __init__(self) -> None:
        self.start, self.times, self.seen_prompt = time.perf_counter(), [], False

    def note(self) -> None:
        self.times.append(time.perf_counter() - self.start)

    def put(self, ids: torch.Tensor) -> None:
        if self.seen_prompt:
            self.note()
        self.seen_prompt = True

    def end(self) -> None:
        pass

    def parts(self) -> dict[str, float]:
        tower, first, *_, last = self.times
        return {"tower": tower, "first": first, "word": (last - first) / (len(self.times) - 2)}


def in_turns(runs: dict[str, Callable[[], dict[str, float]]], rounds: int) -> list[dict[str, dict[str, float]]]:
    """Every variant in every round; the one that comes first changes."""
    names, outcomes = list(runs), []
    for turn in range(rounds):
        first = turn % len(names)
        outcomes.append({name: runs[name]() for name in names[first:] + names[:first]})
    return outcomes


def row(
    args: argparse.Namespace,
    name: str,
    rounds: list[dict[str, dict[str, float]]],
    memory: dict[str, int],
    host: Any,
    handles: dict[int, dtem.Handle],
) -> dict[str, Any]:
    kind, _, r = name.partition(" ")
    handle = handles.get(int(r or 0))
    tokens = (args.size // PATCH) ** 2 if handle is None else handle.tokens[-1]
    text = host.config.text_config
    out: dict[str, Any] = {
        "model": f"PaliGemma-3B, {text.num_hidden_layers} of 18 layers",
        "size": args.size,
        "variant": kind,
        "r": int(r or 0),
        "tokens": tokens,
        "tower_macs": flops.count(
            handle.model if kind == "merged" and handle else host, (3, args.size, args.size)
        ).macs,
        "cache_bytes": 2 * 4 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * (tokens + PROMPT),
        "peak_bytes": memory[name],
        "rounds": args.rounds,
        "words": args.words,
    }
    for part in ("tower", "first", "word"):
        own = [each[name][part] for each in rounds]
        base = [each["unmerged"][part] for each in rounds]
        out[f"{part}_seconds"] = sorted(own)[len(own) // 2]
        out[f"{part}_speedup"] = dataclasses.asdict(throughput.spread([b / o for b, o in zip(base, own, strict=True)]))
    if kind == "merged":
        dropped = [each[f"dropped {r}"]["first"] / each[name]["first"] for each in rounds]
        out["first_against_dropped"] = dataclasses.asdict(throughput.spread(dropped))
    return out


def show(row: dict[str, Any]) -> str:
    parts = ", ".join(
        f"{part} {row[f'{part}_seconds']:.2f} s ({common.spread(row[f'{part}_speedup'])})"
        for part in ("tower", "first", "word")
    )
    return f"{row['variant']:8} r {row['r']:2} tokens {row['tokens']:4}: {parts}; peak {row['peak_bytes'] / 1e6:.0f} MB"


if __name__ == "__main__":
    main()

"""What merging saves when captions are generated: encoder and decoder apart, batch 1 and 16, beam 1 and 5.

python -m benchmarks.captioning_speed                        GIT-B's sizes, random weights, r = 13
python -m benchmarks.captioning_speed --model FOLDER         a captioner of your own

Medians of interleaved rounds with quartiles, against the unmerged model in the same rounds. Both write captions of the
same length (--tokens), so what is compared is the work, not what random weights happen to say. *Encoder*: the images
through the vision encoder. *Decoder*: prefill and all steps on what the encoder handed on. *Whole*: `generate`, with
every image encoded once, not once per beam (`cached_image_tokens`, for both sides).
"""

import argparse
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GitConfig, GitForCausalLM

import dtem
from benchmarks import common
from dtem.integrations.hf_git import EncodedImages, cached_image_tokens, encode_image
from dtem.measure import flops, throughput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub id; default: random weights of GIT-B's sizes")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--beams", default="1,5")
    parser.add_argument("--r", default="13")
    parser.add_argument("--tokens", type=int, default=12, help="of every caption")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds; default 10, and 20 at batch 1")
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    host = (GitForCausalLM.from_pretrained(args.model) if args.model else GitForCausalLM(GitConfig())).eval()
    host.generation_config.eos_token_id = None  # every caption has its full length
    ours = copy.deepcopy(host)
    handle = dtem.patch(ours)
    rows = []
    for r in map(int, args.r.split(",")):
        for batch in map(int, args.batch.split(",")):
            for beams in map(int, args.beams.split(",")):
                handle.r = r
                rows.append(measure(args, host, handle, batch, beams))
                print(show(rows[-1]), flush=True)
    common.save_record("captioning_speed", rows, args)


def measure(args: argparse.Namespace, host: Any, handle: dtem.Handle, batch: int, beams: int) -> dict[str, Any]:
    images = torch.randn(batch, *handle.host.image)
    rounds = args.rounds or (20 if batch == 1 else 10)
    row: dict[str, Any] = {
        "model": args.model or "GIT-B",
        "r": int(str(handle.r)),
        "batch": batch,
        "beams": beams,
        "tokens": handle.tokens[-1],
        "macs_ratio": flops.count(host, handle.host.image).macs / flops.count(handle.model, handle.host.image).macs,
        "caption_tokens": args.tokens,
        "rounds": rounds,
    }
    models = {"unmerged": host, "merged": handle.model}
    parts: dict[str, Callable[[Any], Callable[[Tensor], object]]] = {
        "encoder": lambda model: lambda images: encode_image(model, images),
        "decoder": lambda model: decoding(model, images, beams, args.tokens),
        "whole": lambda model: lambda images: decode(model, images, encode_image(model, images), beams, args.tokens),
    }
    for name, make in parts.items():
        timing = throughput.compare({key: make(model) for key, model in models.items()}, images, rounds, warmup=2)
        row[name] = {
            "unmerged_seconds": timing["unmerged"].seconds,
            "merged_seconds": timing["merged"].seconds,
            "speedup": dataclasses.asdict(timing["merged"].speedup),
        }
    return row


def decode(model: Any, images: Tensor, encoded: EncodedImages, beams: int, tokens: int) -> object:
    """`generate` without the encoder."""
    with cached_image_tokens(model, encoded):
        return model.generate(
            pixel_values=images, num_beams=beams, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )


@torch.inference_mode()
def decoding(model: Any, images: Tensor, beams: int, tokens: int) -> Callable[[Tensor], object]:
    encoded = encode_image(model, images)
    return lambda images: decode(model, images, encoded, beams, tokens)


def show(row: dict[str, Any]) -> str:
    ratios = ", ".join(f"{name} {common.spread(row[name]['speedup'])}" for name in ("encoder", "decoder", "whole"))
    return f"r {row['r']} batch {row['batch']:2} beam {row['beams']}: {ratios} (encoder MACs {row['macs_ratio']:.2f})"


if __name__ == "__main__":
    main()

"""Tiny vision-language models with random weights of a size that matters, and prompts as processors write them."""

import pytest
import torch
import transformers

from contract.hosts import lively

IMAGE, PAD, PATCHES = 3, 0, 64
"""Ids of the placeholder and of padding; patches of an image."""
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": 32, "patch_size": 4}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False}
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 60,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_vlm(kind, vocab=60, image=IMAGE, **settings):
    """A PaliGemma, PaliGemma 2 or LLaVA (of CLIP or SigLIP) with a tower of four layers."""
    torch.manual_seed(sum(map(ord, kind)))
    language = {**_TEXT, "vocab_size": vocab}
    if kind.startswith("paligemma"):
        config = transformers.PaliGemmaConfig(
            vision_config={**_SIGLIP, "num_hidden_layers": 4},
            text_config={"model_type": "gemma", **language}
            if kind == "paligemma"
            else {"model_type": "gemma2", **language, "sliding_window": 24},
            image_token_index=image,
            projection_dim=32,
            hidden_size=32,
            vocab_size=vocab,
            **settings,
        )
        model = transformers.PaliGemmaForConditionalGeneration(config)
    else:
        clip = kind in ("llava", "llava_full", "llava_mistral")
        vision = {"model_type": "clip_vision_model", **_TOWER} if clip else _SIGLIP
        text = {"model_type": "mistral" if kind == "llava_mistral" else "llama", **language}
        config = transformers.LlavaConfig(
            vision_config={**vision, "num_hidden_layers": 5},
            text_config={**text, **({"sliding_window": 24} if kind == "llava_mistral" else {})},
            image_token_index=image,
            vision_feature_select_strategy="default" if kind in ("llava", "llava_mistral") else "full",
            **settings,
        )
        model = transformers.LlavaForConditionalGeneration(config)
    model = lively(model).eval()
    model.generation_config.eos_token_id = None  # answers do not end at once
    model.generation_config.pad_token_id = PAD
    model.generation_config.suppress_tokens = [image]
    return model


def placeholders(model):
    """Placeholders that the processor writes for an image."""
    full = getattr(model.config, "vision_feature_select_strategy", "full") == "full"
    return PATCHES + int(full and model.config.vision_config.model_type == "clip_vision_model")


def prompts(model, images=(1, 1), texts=(4, 4), seed=0, side="left"):
    """Inputs as a processor makes them: for each prompt its images, then text, padded to one length."""
    generator = torch.Generator().manual_seed(seed)
    count = placeholders(model)
    rows = []
    for number, length in zip(images, texts, strict=True):
        text = torch.randint(4, 60, (length,), generator=generator)
        rows.append(torch.cat([torch.tensor([1]), *[torch.tensor([5, *[IMAGE] * count])] * number, text]))
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for row, each in enumerate(rows):
        where = slice(width - len(each), None) if side == "left" else slice(0, len(each))
        ids[row, where], mask[row, where] = each, 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    if isinstance(model, transformers.PaliGemmaForConditionalGeneration):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    pixels = torch.randn(sum(images), 3, 32, 32, generator=generator)
    return {**inputs, "pixel_values": pixels}


def tiny_grid_vlm(kind):
    """A model that arranges the tokens of its tower by their places, and inputs for it."""
    torch.manual_seed(sum(map(ord, kind)))
    vision = {**_TOWER, "num_hidden_layers": 4}
    text = {"model_type": "llama", **_TEXT}
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, 3, 3, 32, 32, generator=generator)
    sizes = {"image_sizes": torch.tensor([[32, 64], [32, 64]])}
    if kind in ("Idefics3", "SmolVLM"):
        config = getattr(transformers, f"{kind}Config")(
            vision_config=vision, text_config=text, image_token_id=IMAGE, scale_factor=2, pad_token_id=PAD
        )
        count, inputs = 3 * 16, {"pixel_values": pixels}
    elif kind == "Gemma3":
        text = {**_TEXT, "query_pre_attn_scalar": 16, "sliding_window": 24}
        config = transformers.Gemma3Config(
            vision_config=_SIGLIP | vision, text_config=text, image_token_index=IMAGE, mm_tokens_per_image=16
        )
        count, inputs = 16, {"pixel_values": pixels[:, 0]}
    else:
        tower = {"model_type": "clip_vision_model", **vision} if kind == "LlavaNext" else _SIGLIP | vision
        config = getattr(transformers, f"{kind}Config")(
            vision_config=tower,
            text_config=text,
            image_token_index=IMAGE,
            image_grid_pinpoints=[[32, 64]],
            vision_feature_select_strategy="default" if kind == "LlavaNext" else "full",
            vision_feature_layer=-2,
        )
        count, inputs = 64 + 8 * 17, {"pixel_values": pixels, **sizes}
    model = lively(getattr(transformers, f"{kind}ForConditionalGeneration")(config)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    model.generation_config.suppress_tokens = [IMAGE]
    ids = torch.randint(4, 60, (2, 4 + count), generator=generator)
    ids[:, 1 : 1 + count] = IMAGE
    if kind == "Gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}


def xfail_where_the_host_disagrees(host, inputs, settings):
    """Expect a failure where the unpatched host itself answers otherwise with and without its cache: with beams, LLaVA,
    Idefics3 and SmolVLM of transformers 5.18 do. Elsewhere this does nothing."""
    answers = [host.generate(**inputs, **settings, use_cache=use_cache) for use_cache in (True, False)]
    if not torch.equal(*answers):
        pytest.xfail(f"transformers {transformers.__version__}: beams of the unpatched host depend on its cache")


def write_vlm(folder, kind, words):
    """A tiny model with its processor, as transformers saves them. LLaVA's has a chat template."""
    from benchmarks.reproduce.tokenizer import build

    tokenizer = build([" ".join(words)], least=1)
    square = {"height": 32, "width": 32}
    if kind == "paligemma":
        pixels = transformers.SiglipImageProcessor(size=square, image_seq_length=PATCHES)
        processor = transformers.PaliGemmaProcessor(pixels, tokenizer)
    else:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=square)
        template = (
            "{% for m in messages %}USER: {% for c in m['content'] %}{% if c['type'] == 'image' %}<image>"
            "{% else %}{{ c['text'] }}{% endif %}{% endfor %} ASSISTANT:{% endfor %}"
        )
        processor = transformers.LlavaProcessor(
            pixels,
            tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template,
        )
    image = tokenizer.convert_tokens_to_ids("<image>")
    tiny_vlm(kind, vocab=len(tokenizer), image=image).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder

"""Vision-language models: merged in the tower, read by the language model. Oracles: the host itself on a prompt that is
written for the shorter images, no cache, copies of tokens in place of sizes."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import dtem

transformers = pytest.importorskip("transformers")

from transformers.modeling_outputs import BaseModelOutputWithPooling  # noqa: E402

from dtem.integrations.hf_vlm import by_first_patch  # noqa: E402
from integrations.vlms import (  # noqa: E402
    IMAGE,
    PAD,
    placeholders,
    prompts,
    tiny_vlm,
    xfail_where_the_host_disagrees,
)

pytestmark = pytest.mark.contract
R = 9
KINDS = ("paligemma", "paligemma2", "llava", "llava_full", "llava_siglip", "llava_mistral")
NEW = {"max_new_tokens": 4, "do_sample": False}
ONCE = {"proportional": True}


@functools.cache
def host(kind):
    return tiny_vlm(kind)


def patched(kind, r=R, method="dtem", **options):
    model = copy.deepcopy(host(kind))
    return model, dtem.patch(model, method, r, **options)


def merged_count(kind, handle):
    return handle.tokens[-1] - (64 + handle.host.prefix - placeholders(host(kind)))


def written_for(model, inputs, features):
    """The prompt as if the processor knew the number of tokens of an image, with the images as they are encoded."""
    count, rows = len(features[0]), []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        row, seen = [], 0
        for token in ids[mask.bool()].tolist():
            if token != IMAGE or seen % placeholders(model) < count:
                row.append(token)
            seen += token == IMAGE
        rows.append(row)
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    images = BaseModelOutputWithPooling(pooler_output=features)
    out = {"input_ids": ids, "attention_mask": mask, "mm_encoder_outputs": {"image": images}}
    return {**out, "token_type_ids": torch.zeros_like(mask)} if "token_type_ids" in inputs else out


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes_at_r_0_and_after_unpatching(kind):
    model, handle = patched(kind, r=0)
    inputs = prompts(model)
    expected = host(kind)(**inputs).logits
    assert torch.equal(model(**inputs).logits, expected)
    sample = {"max_new_tokens": 4, "do_sample": True}
    for settings in (NEW | {"num_beams": 2}, sample):
        torch.manual_seed(0)
        theirs = host(kind).generate(**inputs, **settings)
        torch.manual_seed(0)
        assert torch.equal(model.generate(**inputs, **settings), theirs)
    handle.r = R
    assert model(**inputs).logits.shape[1] < expected.shape[1]
    handle.unpatch()
    assert [type(module) for module in model.modules()] == [type(module) for module in host(kind).modules()]
    for ours, theirs in zip(model.modules(), host(kind).modules(), strict=True):
        assert vars(ours).keys() == vars(theirs).keys()
        assert len(ours._forward_pre_hooks) == len(theirs._forward_pre_hooks)
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize(
    ("kind", "images"), [*((kind, (2, 1)) for kind in KINDS), ("paligemma", (1, 1)), ("llava", (0, 2))]
)
def test_the_host_reads_the_prompt_that_is_written_for_the_shorter_images(kind, images):
    """Different images, several in a prompt, none in a prompt; other r; greedy and beams."""
    model, handle = patched(kind, **ONCE)
    inputs = prompts(model, images, texts=(4, 6))
    for r, settings in ((R, NEW), (4, NEW | {"num_beams": 3, "num_return_sequences": 2})):
        handle.r = r
        features = model.get_image_features(inputs["pixel_values"]).pooler_output
        assert len(features) == sum(images)
        assert {len(each) for each in features} == {merged_count(kind, handle)}
        short = written_for(host(kind), inputs, features)
        theirs = host(kind).generate(**short, **settings)
        ours = model.generate(**inputs, **settings)
        start = inputs["input_ids"].repeat_interleave(len(ours) // 2, dim=0)
        assert torch.equal(ours, torch.cat([start, theirs[:, short["input_ids"].shape[1] :]], dim=1))


@pytest.mark.parametrize(
    ("kind", "proportional"), [*((kind, "everywhere") for kind in KINDS), ("paligemma2", True), ("llava", True)]
)
def test_cached_generation_is_that_without_a_cache(kind, proportional):
    model, _ = patched(kind, proportional=proportional)
    inputs = prompts(model, (2, 1))
    for settings in (NEW | {"num_beams": 3}, {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 2}):
        answers = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            answers.append(model.generate(**inputs, **settings, use_cache=use_cache))
        if "num_beams" in settings and not torch.equal(*answers):
            xfail_where_the_host_disagrees(host(kind), inputs, settings)
        assert torch.equal(*answers)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("images", [(2, 2), (2, 1)])
def test_the_cache_is_that_of_the_shorter_prompt(kind, images):
    """In every layer, against the host on a prompt that is written for the shorter images; no generation."""
    model, handle = patched(kind, **ONCE)
    inputs = prompts(model, images, texts=(4, 6))
    for r in (4, R):
        handle.r = r
        features = model.get_image_features(inputs["pixel_values"]).pooler_output
        short = written_for(host(kind), inputs, features)
        ours, theirs = (
            run(**given, position_ids=(given["attention_mask"].cumsum(1) - 1).clamp(min=0), use_cache=True)
            for run, given in ((model, inputs), (host(kind), short))
        )
        if images == (2, 2):  # otherwise prompts that lose more tokens are padded to those that lose fewer
            assert ours.past_key_values.get_seq_length() == short["input_ids"].shape[1]
        for mine, other in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
            for row, real in enumerate(short["attention_mask"].sum(dim=1).tolist()):
                kept = min(real, mine.keys.shape[2], other.keys.shape[2])  # a sliding window keeps the last ones
                for part in ("keys", "values"):
                    got, expected = (getattr(layer, part)[row, :, -kept:] for layer in (mine, other))
                    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_kinds_of_cache(cache):
    for kind in ("paligemma", "llava"):
        model, _ = patched(kind)
        inputs = prompts(model)
        expected = model.generate(**inputs, **NEW, use_cache=False)
        assert torch.equal(model.generate(**inputs, **NEW, cache_implementation=cache), expected)


def test_a_token_of_size_m_counts_as_m_tokens():
    """In PaliGemma, whose prompts attend in both directions: so m copies at one position are the same."""
    model, _ = patched("paligemma")
    inputs = prompts(model, (1,), (4,))
    with torch.no_grad():
        images = model.get_image_features(inputs["pixel_values"])
        sizes = images.last_hidden_state.dtem_size[0].long()
        assert sizes.sum() == 64
        assert sizes.max() > 1
        count = len(sizes)
        short = host("paligemma").get_input_embeddings()(inputs["input_ids"][:, : count + 6])
        short[:, 2 : count + 2] = images.pooler_output
        short[:, -4:] = host("paligemma").get_input_embeddings()(inputs["input_ids"][:, -4:])
        times = torch.cat([torch.ones(2), sizes, torch.ones(4)]).long()
        embeds = short.repeat_interleave(times, dim=1)
        positions = torch.arange(1, count + 7)[None].repeat_interleave(times, dim=1)
        theirs = host("paligemma")(
            inputs_embeds=embeds, position_ids=positions, token_type_ids=torch.zeros_like(positions)
        )
        ours = model(**inputs)
        torch.testing.assert_close(ours.logits[:, -4:], theirs.logits[:, -4:], rtol=1e-4, atol=1e-4)
        model.dtem.method.config = type(model.dtem.method.config)(**ONCE)
        assert not torch.allclose(model(**inputs).logits[:, -4:], theirs.logits[:, -4:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["paligemma", "llava"])
def test_every_row_of_a_batch_is_as_alone(kind):
    model, _ = patched(kind)
    inputs = prompts(model, (1, 2), (5, 3))
    together = model.generate(**inputs, **NEW)[:, -4:]
    for row, images in enumerate((slice(0, 1), slice(1, 3))):
        real = inputs["attention_mask"][row].bool()
        alone = {name: value[row : row + 1, real] for name, value in inputs.items() if name != "pixel_values"}
        answer = model.generate(**alone, pixel_values=inputs["pixel_values"][images], **NEW)
        assert torch.equal(answer[0, -4:], together[row])


@pytest.mark.parametrize("kind", ["paligemma", "llava"])
def test_losses_of_padded_batches(kind):
    """Labels are shortened too; prompts that lose more are padded, at the end if they were padded there."""
    model, _ = patched(kind)
    inputs = prompts(model, (1, 2), (6, 3), side="right")
    labels = inputs["input_ids"].masked_fill((inputs["input_ids"] == IMAGE) | (inputs["input_ids"] == PAD), -100)
    with torch.no_grad():
        together = model(**inputs, labels=labels).loss * 9
        alone, start = 0.0, 0
        for row, images in enumerate((1, 2)):
            real = inputs["attention_mask"][row].bool()
            each = {name: value[row : row + 1, real] for name, value in inputs.items() if name != "pixel_values"}
            pixels = inputs["pixel_values"][start : start + images]
            counted = (labels[row, real][1:] != -100).sum()
            alone += model(**each, pixel_values=pixels, labels=labels[row : row + 1, real]).loss * counted
            start += images
        counted = sum((labels[row][inputs["attention_mask"][row].bool()][1:] != -100).sum() for row in range(2))
        torch.testing.assert_close(together / 9 * counted, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["paligemma", "llava"])
def test_a_loop_of_ones_own_with_masks_of_the_whole_prompt(kind):
    model, _ = patched(kind)
    inputs = prompts(model, (1, 2), (5, 3))
    expected = model.generate(**inputs, **NEW)[:, -4:]
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0) + (kind == "paligemma")
    mask, answers = inputs["attention_mask"], []
    with torch.no_grad():
        out = model(**inputs, position_ids=positions, use_cache=True)
        for _ in range(4):
            scores = out.logits[:, -1]
            scores[:, IMAGE] = -torch.inf
            answers.append(scores.argmax(dim=-1, keepdim=True))
            mask, positions = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1), positions[:, -1:] + 1
            out = model(
                input_ids=answers[-1],
                attention_mask=mask,
                position_ids=positions,
                past_key_values=out.past_key_values,
                use_cache=True,
            )
    assert torch.equal(torch.cat(answers, dim=1), expected)


def test_conversations_go_on_from_a_cache():
    """With text, at every r; with more images at the same r only."""
    model, handle = patched("llava")
    inputs, later = prompts(model, (1, 1)), prompts(model, (1, 1), seed=5)
    first = model.generate(**inputs, **NEW, return_dict_in_generate=True)

    def answer(more, pixels=None, cached=False):
        ids = torch.cat([first.sequences, more], dim=1)
        cache = {"past_key_values": copy.deepcopy(first.past_key_values)} if cached else {}
        return model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **({} if pixels is None else pixels), **cache, **NEW
        )

    def pixel_values(*sources):
        return {"pixel_values": torch.stack([each["pixel_values"] for each in sources], dim=1).flatten(0, 1)}

    text = torch.tensor([[7, 8], [9, 10]])
    expected = answer(text, pixel_values(inputs))
    assert torch.equal(answer(text, cached=True), expected)
    images = answer(later["input_ids"], pixel_values(inputs, later))
    assert torch.equal(answer(later["input_ids"], pixel_values(later), cached=True), images)
    handle.r = 4
    assert torch.equal(answer(text, cached=True), expected)
    with pytest.raises(dtem.DtemError, match="28 tokens per image, and now an image has 48"):
        answer(later["input_ids"], pixel_values(later), cached=True)
    handle.r = 0
    with pytest.raises(dtem.DtemError, match="28 tokens per image, and now an image has 64"):
        answer(text, cached=True)
    first = model.generate(**inputs, **NEW, return_dict_in_generate=True)
    handle.r = R
    with pytest.raises(dtem.DtemError, match="64 tokens per image, and now an image has 28"):
        answer(later["input_ids"], pixel_values(later), cached=True)


def test_lengths_are_those_of_the_whole_prompt():
    model, _ = patched("llava")
    inputs = prompts(model)
    length = inputs["input_ids"].shape[1]
    assert model.generate(**inputs, max_length=length + 3, do_sample=False).shape[1] == length + 3
    config = transformers.GenerationConfig(max_length=length + 2, suppress_tokens=[IMAGE], pad_token_id=PAD)
    assert model.generate(**inputs, generation_config=config).shape[1] == length + 2
    assert config.max_length == length + 2
    with pytest.warns(UserWarning, match="model-agnostic default"):
        ours, theirs = model.generate(**inputs), host("llava").generate(**inputs)
    assert ours.shape == theirs.shape


def test_a_llava_tower_stops_at_the_layer_that_is_read():
    """Merged as a CLIP tower of four layers that has only those."""
    model, handle = patched("llava_full")
    tower = model.model.vision_tower
    assert handle.host.depth == 4
    assert len(tower.encoder.layers._modules) == 5
    config = copy.deepcopy(tower.config)
    config.num_hidden_layers = 4
    short = transformers.CLIPVisionModel(config).eval()
    short.load_state_dict(host("llava_full").model.vision_tower.state_dict(), strict=False)
    dtem.patch(short, r=R)
    ran = []
    tower.encoder.layers._modules["4"].mlp.fc1.register_forward_hook(lambda *_: ran.append(1))
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        ours, theirs = model.get_image_features(pixels).last_hidden_state, short(pixels).last_hidden_state
    assert not ran
    assert torch.equal(ours[:, 0], theirs[:, 0]), "the class token is first"
    for each, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(each[each[:, 0].argsort()], other[other[:, 0].argsort()])


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_tokens_come_in_the_order_of_their_first_patches(mode):
    """In soft mode too, where every patch keeps a token. A trace tells what the tower did."""
    model, handle = patched("llava")
    handle.mode = mode
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), handle.trace() as trace:
        images = model.get_image_features(pixels)
    source, size = trace.sources[-1], images.last_hidden_state.dtem_size
    order = by_first_patch(source, trace.sizes[-1].shape[1], 1)
    for row in range(2):
        held = source[row].tolist()
        firsts = [held.index(token) for token in order[row, 1:].tolist()]
        assert firsts == sorted(firsts)
    assert order[:, 0].eq(0).all()
    torch.testing.assert_close(size, trace.sizes[-1].gather(1, order))
    assert (firsts == list(range(64))) == (mode == "soft")


def test_methods_hand_on_as_many_tokens_as_they_say():
    for method in ("tome", "evit", "patch_merger", "etps", "token_pooling"):
        model, handle = patched("llava", r=0, method=method)
        stages = handle.method.stages
        handle.r = "/".join("8" if stages is None or layer in stages else "0" for layer in range(4))
        inputs = prompts(model)
        assert model.generate(**inputs, **NEW).shape[1] == inputs["input_ids"].shape[1] + 4, method
        assert len(model.get_image_features(inputs["pixel_values"]).pooler_output[0]) == handle.tokens[-1] - 1, method


@pytest.mark.parametrize("kind", ["paligemma", "llava"])
@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"fisher": True}])
def test_soft_mode_trains_every_embedding(kind, options):
    model, handle = patched(kind, **options)
    model.requires_grad_(False)
    handle.method.requires_grad_(True)
    handle.mode = "soft"
    inputs = prompts(model)
    with torch.no_grad():
        teacher = host(kind)(**inputs).logits[:, -4:].log_softmax(-1)
    with handle.auxiliary_losses() as losses:
        logits = model(**inputs).logits[:, -4:].log_softmax(-1)
        loss = nn.functional.kl_div(logits, teacher, log_target=True, reduction="batchmean")
        if options.get("fisher"):
            assert losses.merge_candidates
            return
    loss.backward()
    for name, parameter in handle.method.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_equal_and_independent(copied):
    model, handle = patched("paligemma")
    inputs = prompts(model)
    expected = model.generate(**inputs, **NEW)
    other = copied(model)
    dtem.Handle(other).r = 2
    assert handle.r == R
    assert torch.equal(model.generate(**inputs, **NEW), expected)
    dtem.Handle(other).r = R
    assert torch.equal(other.generate(**inputs, **NEW), expected)


def test_it_is_saved_as_the_host_and_its_adapter_apart(tmp_path):
    model, handle = patched("llava", init="random", norms=True)
    assert not any("layers.4." in name for name in handle.host.norms)
    inputs = prompts(model)
    expected = model.generate(**inputs, **NEW)
    model.save_pretrained(tmp_path / "host")
    assert torch.equal(model.generate(**inputs, **NEW), expected)
    again = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "host").eval()
    assert type(again) is type(host("llava"))
    handle.save_pretrained(tmp_path / "a.safetensors")
    dtem.from_pretrained(tmp_path / "a.safetensors", again, r=R)
    assert torch.equal(again.generate(**inputs, **NEW), expected)


def test_what_it_cannot_do_is_refused():
    model, _ = patched("llava")
    inputs = prompts(model)
    with pytest.raises(dtem.DtemError, match="vision_feature_layer = -1"):
        model(**inputs, vision_feature_layer=-1)
    with pytest.raises(dtem.DtemError, match="vision_feature_select_strategy = 'full'"):
        model(**inputs, vision_feature_select_strategy="full")
    with pytest.raises(dtem.DtemError, match="attention_mask of shape"):
        model(**{**inputs, "attention_mask": inputs["attention_mask"][:, :-1]})
    uneven = prompts(model, (1, 2))
    del uneven["attention_mask"]
    with pytest.raises(dtem.DtemError, match="need attention_mask"):
        model(**uneven)
    with pytest.raises(dtem.DtemError, match="a different number of tokens in each image"):
        patched("llava", method="ats")
    for settings, kind, reason in (
        ({"vision_feature_layer": [-1, -2]}, "llava", "several layers"),
        ({"vision_feature_layer": 0}, "llava", "before the first layer"),
    ):
        with pytest.raises(dtem.DtemError, match=reason):
            dtem.patch(tiny_vlm(kind, **settings))
    siglip = copy.deepcopy(host("llava_siglip"))
    siglip.config.vision_feature_select_strategy = "default"
    with pytest.raises(dtem.DtemError, match="no class token"):
        dtem.patch(siglip)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(dtem.DtemError, match="takes no attention bias"):
        model(**inputs)

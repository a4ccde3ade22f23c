"""GIT: merged in the vision encoder, read by the decoder. Oracles: the host itself, timm's adapter, no cache."""

import copy
import csv
import pickle

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import dtem

transformers = pytest.importorskip("transformers")

from benchmarks.reproduce.captioner import captioner  # noqa: E402
from dtem.integrations.hf_git import EncodedImages, ImageTokens, cached_image_tokens, encode_image  # noqa: E402
from integrations.gits import tiny_git  # noqa: E402

pytestmark = pytest.mark.contract
R = 9
NEW = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def host():
    return tiny_git()


@pytest.fixture
def model(host):
    return copy.deepcopy(host)


def pictures(batch=2, seed=0):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def prompt(batch=2, length=5):
    return torch.randint(4, 50, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("beams", [1, 3])
def test_without_merging_generation_is_the_hosts_token_for_token(host, model, beams):
    handle = dtem.patch(model, r=R)
    merged = model.generate(pixel_values=pictures(), num_beams=beams, **NEW)
    handle.r = 0
    expected = host.generate(pixel_values=pictures(), num_beams=beams, **NEW)
    assert torch.equal(model.generate(pixel_values=pictures(), num_beams=beams, **NEW), expected)
    assert not torch.equal(merged, expected), "merging must change something, or this test shows nothing"
    handle.unpatch()
    assert torch.equal(model.generate(pixel_values=pictures(), num_beams=beams, **NEW), expected)


ONCE = {"proportional": True}


@pytest.mark.parametrize(
    ("method", "r", "options"), [("dtem", 0, {}), ("dtem", R, {}), ("dtem", R, ONCE), ("ats", 3, {})]
)
@pytest.mark.parametrize("beams", [1, 3])
def test_the_cache_changes_nothing(model, r, beams, method, options):
    """With a cache, masks and positions are made step by step; without one, all at once."""
    dtem.patch(model, method, r, **options)
    inputs = {"pixel_values": pictures(), "num_beams": beams, **NEW}
    assert torch.equal(model.generate(**inputs), model.generate(**inputs, use_cache=False))
    padded = torch.ones(2, 5, dtype=torch.long)
    padded[1, :2] = 0
    inputs |= {"input_ids": prompt(), "attention_mask": padded}
    assert torch.equal(model.generate(**inputs), model.generate(**inputs, use_cache=False))


@pytest.mark.parametrize("r", [0, R])
def test_steps_say_what_the_whole_caption_says(model, r):
    handle = dtem.patch(model, r=r)
    x = pictures()
    generated = model.generate(pixel_values=x, output_logits=True, return_dict_in_generate=True, **NEW)
    uncached = model(input_ids=generated.sequences[:, :-1], pixel_values=x).logits
    assert uncached.shape[1] == handle.tokens[-1] + generated.sequences.shape[1] - 1
    for index, logits in enumerate(generated.logits):
        torch.testing.assert_close(logits, uncached[:, handle.tokens[-1] + index], rtol=1e-4, atol=1e-4)


def test_the_cache_knows_its_tokens_in_a_tuple_too(model):
    dtem.patch(model, r=R)
    words = prompt(length=2)
    with torch.no_grad():
        uncached = model(input_ids=words, pixel_values=pictures(), use_cache=False).logits[:, -1]
        cache = transformers.DynamicCache(config=model.config)
        inputs = {"past_key_values": cache, "use_cache": True, "return_dict": False}
        model(input_ids=words[:, :1], pixel_values=pictures(), **inputs)
        step = model(input_ids=words[:, 1:], position_ids=torch.tensor([[1]]), **inputs)[0][:, -1]
    torch.testing.assert_close(step, uncached, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["dtem", "ats"])
def test_an_image_alone_is_captioned_as_in_a_batch(model, method):
    dtem.patch(model, method, R)
    x = pictures(3)
    together = model(input_ids=prompt(3), pixel_values=x).logits[:, -5:]
    alone = model(input_ids=prompt(3)[1:2], pixel_values=x[1:2]).logits[:, -5:]
    torch.testing.assert_close(alone[0], together[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_the_loss_is_that_of_the_words(model, mode):
    handle = dtem.patch(model, r=R)
    handle.mode = mode
    ids = prompt()
    out = model(input_ids=ids, pixel_values=pictures(), labels=ids)
    words = out.logits[:, -ids.shape[1] : -1]
    torch.testing.assert_close(out.loss, F.cross_entropy(words.flatten(0, 1), ids[:, 1:].flatten()))


def test_counted_by_size_a_token_is_as_many_as_it_stands_for(model):
    """The decoder says the same of a merged token and of so many copies of it."""
    dtem.patch(model, r=R)
    ids, x = prompt(1), pictures(1)
    with torch.no_grad():
        encoded = encode_image(model, x)
        sizes = encoded.image_tokens.bias.exp().round().long()[0]
        assert sizes.sum() == 65
        assert sizes.max() > 1
        copies = EncodedImages(encoded.features.repeat_interleave(sizes, dim=1), ImageTokens(65, None))
        outputs = []
        for each in (encoded, copies, EncodedImages(encoded.features, ImageTokens(encoded.image_tokens.count, None))):
            with cached_image_tokens(model, each):
                outputs.append(model(input_ids=ids, pixel_values=x).logits[:, -5:])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
    assert (outputs[2] - outputs[1]).abs().max() > 0.01, "counted once it must differ, or this test shows nothing"


@pytest.mark.parametrize("options", [{}, ONCE])
def test_soft_merging_tends_to_hard_merging(model, options):
    ids, x = prompt(), pictures()
    handle = dtem.patch(model, r=4, **options)
    with torch.no_grad():
        hard = model(input_ids=ids, pixel_values=x).logits[:, -5:]
        handle.unpatch()
        gaps = []
        for temperature in (0.3, 1e-4):
            handle = dtem.patch(model, r=4, temperature=temperature, **options)
            handle.mode = "soft"
            gaps.append((model(input_ids=ids, pixel_values=x).logits[:, -5:] - hard).abs().max().item())
            handle.unpatch()
    assert gaps[1] < 0.02 * gaps[0]


def test_soft_merging_teaches_every_block(model):
    handle = dtem.patch(model, r=4)
    handle.mode = "soft"
    ids = prompt()
    model(input_ids=ids, pixel_values=pictures(), labels=ids).loss.backward()
    for name, parameter in handle.method.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_checkpointing_keeps_gradients(model):
    handle = dtem.patch(model, r=4)
    handle.mode = "soft"
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = prompt()
    found = []
    for again in (False, True):
        model.set_grad_checkpointing(again)
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, pixel_values=pictures(), labels=ids).loss.backward()
        found.append([p.grad.clone() for p in handle.method.parameters()])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(plain, checkpointed, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["tome", "evit"])
def test_the_encoder_merges_what_timms_adapter_merges(method):
    torch.manual_seed(0)
    vit = timm.create_model(
        "deit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=32, depth=4, num_heads=2, num_classes=0
    ).eval()
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    git = captioner(vit, 50, {"bos": 1, "eos": 2, "pad": 0}, hidden_size=32, num_attention_heads=2).eval()
    x = pictures()
    with torch.no_grad():
        torch.testing.assert_close(
            git.git.image_encoder(x).last_hidden_state, vit.forward_features(x), rtol=1e-3, atol=1e-4
        )
        theirs, ours = dtem.patch(vit, method, R), dtem.patch(git, method, R)
        assert theirs.tokens == ours.tokens
        torch.testing.assert_close(
            git.git.image_encoder(x).last_hidden_state, vit.forward_features(x), rtol=1e-3, atol=1e-4
        )


def test_videos_hand_on_the_tokens_of_all_frames():
    model = tiny_git(num_image_with_embedding=2)
    handle = dtem.patch(model, r=R)
    x = torch.stack([pictures(), pictures(seed=1)], dim=1)
    ids = prompt()
    out = model(input_ids=ids, pixel_values=x, labels=ids)
    assert out.logits.shape[1] == 2 * handle.tokens[-1] + 5
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[:, -5:-1].flatten(0, 1), ids[:, 1:].flatten()))
    assert torch.equal(model.generate(pixel_values=x, **NEW), model.generate(pixel_values=x, use_cache=False, **NEW))


@pytest.mark.parametrize("method", ["dtem", "ats"])
@pytest.mark.parametrize("beams", [1, 3])
def test_what_was_seen_need_not_be_seen_again(host, model, method, beams):
    x, sizes = pictures(), []
    padded = torch.ones(2, 5, dtype=torch.long)
    padded[1, :2] = 0
    inputs = {"pixel_values": x, "num_beams": beams, "input_ids": prompt(), "attention_mask": padded, **NEW}
    dtem.patch(model, method, R)
    for each in (host, model):
        expected = each.generate(**inputs)
        hook = each.git.image_encoder.vision_model.register_forward_hook(lambda m, a, out: sizes.append(len(out[0])))
        with cached_image_tokens(each, encode_image(each, x)):
            assert torch.equal(each.generate(**inputs), expected)
        hook.remove()
        assert torch.equal(each.generate(**inputs), expected)
    assert sizes == [2, 2], "each image is encoded once, not once per beam"


def test_unpatching_restores_every_module(host, model):
    handle = dtem.patch(model, r=R)
    assert {key for key in model.state_dict() if not key.startswith("dtem.")} == set(host.state_dict())
    model.generate(pixel_values=pictures(), **NEW)
    handle.unpatch()
    assert [type(module) for module in model.modules()] == [type(module) for module in host.modules()]
    for ours, theirs in zip(model.modules(), host.modules(), strict=True):
        assert vars(ours).keys() == vars(theirs).keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_equal_and_independent(model, copied):
    handle = dtem.patch(model, r=R)
    x = pictures()
    expected = model.generate(pixel_values=x, **NEW)
    other = copied(model)
    dtem.Handle(other).r = 2
    assert handle.r == R
    assert torch.equal(model.generate(pixel_values=x, **NEW), expected)
    dtem.Handle(other).r = R
    assert torch.equal(other.generate(pixel_values=x, **NEW), expected)


def test_a_patched_model_is_saved_as_the_host_that_it_is(host, model, tmp_path):
    handle = dtem.patch(model, r=R)
    model.save_pretrained(tmp_path)
    assert handle.r == R
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is type(host)
    assert torch.equal(again.generate(pixel_values=pictures(), **NEW), host.generate(pixel_values=pictures(), **NEW))


def test_embeddings_are_kept_and_loaded(model, host, tmp_path):
    handle = dtem.patch(model, r=R, init="random")
    dtem.save_pretrained(handle, tmp_path / "git.safetensors")
    other = dtem.from_pretrained(tmp_path / "git.safetensors", copy.deepcopy(host), r=R)
    x = pictures()
    assert torch.equal(other.model.generate(pixel_values=x, **NEW), model.generate(pixel_values=x, **NEW))


def test_hidden_states_of_the_decoder_can_be_asked_for(model):
    dtem.patch(model, r=R)
    out = model(input_ids=prompt(), pixel_values=pictures(), output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1


def test_tokens_handed_to_the_decoder_are_the_papers(data_dir):
    """197-token encoders of 12 (GIT-B) and 24 blocks (GIT-L), at every r of the paper's table."""
    table = data_dir.parent / "paper" / "captioning.csv"
    if not table.is_file():
        pytest.skip(f"no {table.name} beside the data")
    with table.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    listed = {name: {int(row["tokens"]) for row in rows if row["model"] == name} for name in ("GIT-B", "GIT-L")}
    rates = {"GIT-B": (12, (0, 4, 8, 9, 10, 11, 12, 13)), "GIT-L": (24, (0, 3, 4, 5, 6, 7, 8))}
    for name, (depth, each) in rates.items():
        small = tiny_git(vision={"num_hidden_layers": depth, "image_size": 224, "patch_size": 16})
        handle = dtem.patch(small)
        counted = set()
        for r in each:
            handle.r = r
            with torch.no_grad():
                logits = small(input_ids=prompt(1), pixel_values=torch.zeros(1, 3, 224, 224)).logits
            counted.add(logits.shape[1] - 5)
            assert handle.tokens[-1] == logits.shape[1] - 5
        assert counted == listed[name]

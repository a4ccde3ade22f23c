import copy

import pytest
import torch
from timm.data.config import resolve_data_config

import dtem
from dtem.data.loader import Loader
from dtem.data.transforms import eval_transform
from dtem.errors import DtemError
from dtem.models.git import load
from dtem.tasks.captioning import evaluator, outcomes
from dtem.tasks.captioning.captions import open_captions
from dtem.tasks.running import at_rates
from tasks.captioning.small import CAPTIONS, write_captioner, write_pictures


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("captioning")
    write_pictures(place)
    write_captioner(place / "model")
    return place


@pytest.fixture(scope="module")
def model(folder):
    return load(str(folder / "model"))


def pixels(model, source):
    loader = Loader(source, eval_transform(resolve_data_config(model=model)), 3)
    return next(iter(loader.epoch(0))).images, loader


def test_a_captioner_comes_with_tokenizer_and_pixels(model, folder):
    assert model.tokenizer("a brown dog").input_ids[0] == model.config.bos_token_id
    images, _ = pixels(model, open_captions(f"{folder}/captions.json#train"))
    assert images.shape == (3, 3, 32, 32)
    assert images.max() <= 2.0001  # (1 − 0.5) / 0.25
    with pytest.raises(DtemError, match=r"nowhere.*cannot be loaded as a captioner"):
        load(str(folder / "nowhere"))


def test_captions_are_written_as_the_host_writes_them(model, folder):
    images, _ = pixels(model, open_captions(f"{folder}/captions.json#train"))
    ids = model.generate(pixel_values=images, num_beams=3, max_new_tokens=5, do_sample=False)
    expected = [text.strip() for text in model.tokenizer.batch_decode(ids, skip_special_tokens=True)]
    assert evaluator.generate_captions(model, images, 3, 5) == expected
    assert any(expected)


def test_caption_losses_are_those_of_the_host(model, folder):
    source = open_captions(f"{folder}/captions.json#train")
    images, _ = pixels(model, source)
    losses, words = evaluator.caption_losses(model, images, source.items[:3])
    for image, item, loss, count in zip(images, source.items, losses, words, strict=False):
        expected, seen = 0.0, 0
        for caption in item.captions:
            ids = model.tokenizer(caption, return_tensors="pt").input_ids
            with torch.no_grad():
                expected += model(input_ids=ids, pixel_values=image[None], labels=ids).loss.item() * (ids.shape[1] - 1)
            seen += ids.shape[1] - 1
        assert count == seen
        assert loss == pytest.approx(expected, rel=1e-4)


def test_variants_see_the_same_images_and_leave_no_trace(model, folder):
    source = open_captions(f"{folder}/captions.json#train")
    _, loader = pixels(model, source)
    handle = dtem.patch(copy.deepcopy(model), "tome", 3)
    plain, patched = (evaluator.captioner(captioner, 1, 4) for captioner in (model, handle.model))
    variants = {"none": plain, **at_rates(handle, ["0", "9"], patched)}
    by_variant = evaluator.run_variants(variants, loader, source.items)
    assert handle.r == 3
    assert by_variant["none"].captions == by_variant["0"].captions
    assert by_variant["none"].losses == by_variant["0"].losses
    assert by_variant["none"].losses != by_variant["9"].losses
    assert list(by_variant["9"].captions) == source.names
    assert by_variant["9"].captions_per_second > 0
    both = outcomes.pool([by_variant["none"], by_variant["none"]])
    assert both.loss == by_variant["none"].loss


def test_words_that_captions_do_not_have_are_unknown(model):
    ids, mask = evaluator.tokenize(model.tokenizer, ["a zebra", CAPTIONS[0][0]], 30, "cpu")
    assert ids[0, 2] == model.tokenizer.unk_token_id
    assert mask[0].tolist() == [1] * 4 + [0] * 5
    assert ids.shape == mask.shape == (2, 9)

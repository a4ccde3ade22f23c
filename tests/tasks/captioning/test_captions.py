import json

import numpy as np
import pytest
import torch

from dtem.data.loader import Loader
from dtem.errors import DtemError
from dtem.tasks.captioning.captions import open_captions
from tasks.captioning.small import CAPTIONS, write_pictures


def to_pixels(image):
    return torch.from_numpy(np.array(image.convert("RGB")))


def test_a_list_with_splits(tmp_path):
    file = write_pictures(tmp_path)
    source = open_captions(f"{file}#train")
    assert source.names == ["0.png", "1.png", "2.png", "3.png"]
    assert source.items[1].captions == CAPTIONS[1]
    assert open_captions(str(file)).length == 6
    with pytest.raises(DtemError, match=r"no images of the split 'dev'.*test, train, val"):
        open_captions(f"{file}#dev")


def test_karpathys_file(tmp_path):
    write_pictures(tmp_path / "val2014")
    entries = [
        {"filepath": "val2014/images", "filename": "0.png", "split": "restval", "sentences": [{"raw": "One. "}]},
        {"filepath": "val2014/images", "filename": "1.png", "split": "test", "sentences": [{"raw": "a"}, {"raw": "b"}]},
    ]
    file = tmp_path / "dataset_coco.json"
    file.write_text(json.dumps({"images": entries, "dataset": "coco"}))
    train, test = open_captions(f"{file}#train"), open_captions(f"{file}#test")
    assert [item.captions for item in train.items] == [("One.",)]
    assert [item.captions for item in test.items] == [("a", "b")]
    assert test.read(0).image == (tmp_path / "val2014" / "images" / "1.png").read_bytes()


def test_flickrs_token_file(tmp_path):
    write_pictures(tmp_path)
    file = tmp_path / "Flickr8k.token.txt"
    file.write_text("0.png#0\tA dog .\n0.png#1\tThe dog .\n1.png#0\tTwo men .\n")
    assert [item.captions for item in open_captions(str(file)).items] == [("A dog .", "The dog ."), ("Two men .",)]
    file.write_text("0.png A dog .\n")
    with pytest.raises(DtemError, match="IMAGE#NUMBER"):
        open_captions(str(file))


def test_json_lines(tmp_path):
    write_pictures(tmp_path)
    file = tmp_path / "mine.jsonl"
    lines = [{"image": "2.png", "captions": ["x", "y"]}, {"image": "3.png", "caption": "z"}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert [item.captions for item in open_captions(str(file)).items] == [("x", "y"), ("z",)]
    line = json.dumps({"image": "2.png", "caption": "a dog\u2028runs"}, ensure_ascii=False)
    file.write_text(f"\ufeff{line}\r\n", encoding="utf-8")
    assert [item.captions for item in open_captions(str(file)).items] == [("a dog\u2028runs",)]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(DtemError, match=r"none of the 2 images.*images=DIR"):
        open_captions(f"{file}?images={tmp_path / 'elsewhere'}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[{", "damaged"),
        ("3", "neither a list"),
        ('[{"split": "train", "captions": ["a"]}]', "filename"),
        ('[{"filename": "0.png", "captions": []}]', "not text"),
        ("[]", "no captions"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, content, said):
    file = tmp_path / "captions.json"
    file.write_text(content)
    with pytest.raises(DtemError, match=said):
        open_captions(str(file))


def test_other_mistakes_are_said_too(tmp_path):
    file = write_pictures(tmp_path)
    with pytest.raises(DtemError, match="not a file of captions"):
        open_captions(str(tmp_path / "nothing.json"))
    with pytest.raises(DtemError, match="'pictures' is not known"):
        open_captions(f"{file}?pictures=x")
    with pytest.raises(DtemError, match="there is no folder"):
        open_captions(f"{file}?images={tmp_path / 'none'}")


def test_bad_and_missing_images_are_named_and_counted(tmp_path):
    file = write_pictures(tmp_path)
    (tmp_path / "images" / "1.png").unlink()
    (tmp_path / "images" / "2.png").write_bytes(b"no picture")
    source = open_captions(f"{file}#train")
    loader = Loader(source, to_pixels, 2)
    labels = [index for batch in loader.epoch(0) for index in batch.labels.tolist()]
    assert [source.items[index].name for index in labels] == ["0.png", "3.png"]
    assert set(loader.skipped) == {"1.png", "2.png"}

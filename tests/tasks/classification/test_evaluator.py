"""Evaluation on a tiny random model: what the model itself says, once per batch, with everything put back after."""

import json
from typing import NamedTuple

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtem
from dtem.errors import DtemError
from dtem.tasks.classification.evaluator import run_variants, sweep
from dtem.tasks.classification.outcomes import Outcomes
from dtem.tasks.running import at_rates, eval_mode

CLASSES = 7


class Batch(NamedTuple):
    images: Tensor
    labels: Tensor
    names: list[str]


class Photos:
    """A loader of random images that counts how often each is handed out."""

    def __init__(self, n: int = 10, batch: int = 4, labels: Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(n, 3, 32, 32, generator=generator)
        self.labels = torch.randint(CLASSES, (n,), generator=generator) if labels is None else labels
        self.size = batch
        self.read = 0

    def epoch(self, number: int, start: int = 0):
        for first in range(0, len(self.images), self.size):
            rows = slice(first, first + self.size)
            images = self.images[rows]
            self.read += len(images)
            yield Batch(images, self.labels[rows], [f"{first + i}.jpg" for i in range(len(images))])


def tiny(**options: object) -> nn.Module:
    small = {"img_size": 32, "patch_size": 4, "depth": 3, "embed_dim": 32, "num_heads": 2, "num_classes": CLASSES}
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**small, **options})
    with torch.no_grad():  # timm starts near zero: every image would get the same answer
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=0.4)
    return model.eval()


def evaluate(model: nn.Module, photos: Photos, **options: object) -> Outcomes:
    with eval_mode(model):
        return run_variants({"": model}, photos, **options)[""]


def test_outcomes_are_the_models_answers() -> None:
    model, photos = tiny(), Photos()
    measured = evaluate(model, photos)
    with torch.no_grad():
        logits = model(photos.images)
    assert measured.names == [f"{i}.jpg" for i in range(10)]
    assert torch.equal(measured.labels, photos.labels)
    assert torch.equal(measured.predicted, logits.argsort(1, descending=True)[:, :5])
    torch.testing.assert_close(measured.loss, F.cross_entropy(logits, photos.labels, reduction="none"))
    assert measured.top1 == pytest.approx(100 * (logits.argmax(1) == photos.labels).float().mean().item())
    assert len(measured.predicted[:, 0].unique()) > 1  # the model does tell the images apart


def test_outcomes_can_be_used_in_training() -> None:
    measured = evaluate(tiny(), Photos())
    assert not any(tensor.is_inference() for tensor in (measured.labels, measured.predicted, measured.loss))


def test_one_forward_per_batch_without_gradients() -> None:
    model = tiny()
    seen = []
    model.register_forward_hook(lambda module, inputs, out: seen.append((len(out), out.is_inference())))
    evaluate(model, Photos(n=10, batch=4))
    assert seen == [(4, True), (4, True), (2, True)]


def test_fewer_classes_than_five() -> None:
    measured = evaluate(tiny(num_classes=3), Photos(labels=torch.zeros(10).long()))
    assert measured.predicted[:, :3].sort().values.tolist() == [[0, 1, 2]] * 10
    assert measured.predicted[:, 3:].unique().tolist() == [-1]
    assert measured.top5 == 100


def test_a_sweep_is_one_evaluation_per_rate_on_batches_read_once() -> None:
    handle, photos = dtem.patch(tiny(), "tome"), Photos()
    outcomes = sweep(handle, photos, [0, "8", 0.25])
    assert photos.read == 10
    assert list(outcomes) == ["0", "8", "0.25"]
    for rate, own in zip([0, 8, 0.25], outcomes.values(), strict=True):
        handle.r = rate
        alone = evaluate(handle.model, Photos())
        assert torch.equal(own.loss, alone.loss)
        assert torch.equal(own.predicted, alone.predicted)
    assert not torch.equal(outcomes["0"].loss, outcomes["8"].loss)


def test_everything_is_put_back() -> None:
    handle = dtem.patch(tiny(), r=5)
    handle.mode = "soft"
    handle.model.train()
    handle.model.blocks[1].eval()
    modes = [module.training for module in handle.model.modules()]
    outcomes = sweep(handle, Photos(), [0, 8])
    assert [module.training for module in handle.model.modules()] == modes
    assert (handle.r, handle.mode, handle.plan) == (5, "soft", (5, 5, 5))
    fresh = evaluate(dtem.patch(tiny(), r=8).model, Photos())
    assert torch.equal(outcomes["8"].loss, fresh.loss)  # hard, in eval mode


def test_everything_is_put_back_after_an_error() -> None:
    handle = dtem.patch(tiny(), r=5)
    handle.mode = "soft"
    handle.model.train()
    with pytest.raises(DtemError, match="99"):
        sweep(handle, Photos(labels=torch.full((10,), 99)), [8])
    with pytest.raises(DtemError, match="500"):
        sweep(handle, Photos(), [8, 500])
    assert handle.model.training
    assert (handle.r, handle.mode, handle.plan) == (5, "soft", (5, 5, 5))


def test_a_budget_is_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = dtem.patch(tiny(), "tome")
    solved = []
    plain = dtem.Handle._solve
    monkeypatch.setattr(dtem.Handle, "_solve", lambda self, budget: solved.append(budget) or plain(self, budget))
    outcomes = sweep(handle, Photos(), ["0.002G"])
    assert len(solved) == 1
    assert list(outcomes) == ["0.002G"]


def test_variants_take_turns_in_coming_first() -> None:
    order: list[str] = []
    model = tiny()

    def variant(name: str):
        return lambda images: order.append(name) or model(images)

    with eval_mode(model):
        run_variants({name: variant(name) for name in "abc"}, Photos(n=10, batch=4))
    assert "".join(order) == "abc" + "bca" + "cab"


def test_rates_can_be_called_in_any_order() -> None:
    handle, images = dtem.patch(tiny(), "tome", r=3), Photos().images
    forwards = at_rates(handle, [0, 8])
    assert handle.r == 3
    with torch.inference_mode():
        eight, zero, again = (forwards[rate](images) for rate in ("8", "0", "8"))
    assert torch.equal(eight, again)
    assert not torch.equal(eight, zero)


def test_limit_cuts_the_last_batch_and_reads_no_further() -> None:
    photos, told = Photos(n=10, batch=4), []
    measured = evaluate(tiny(), photos, limit=5, progress=told.append)
    assert (measured.names, told, photos.read) == ([f"{i}.jpg" for i in range(5)], [4, 1], 8)
    on_all_images = evaluate(tiny(), Photos(n=10, batch=4))
    torch.testing.assert_close(measured.loss, on_all_images.loss[:5])
    assert len(evaluate(tiny(), Photos(n=10, batch=4), limit=4)) == 4
    assert len(evaluate(tiny(), Photos(n=10, batch=4), limit=99)) == 10


def test_autocast_changes_little_and_not_the_model() -> None:
    model = tiny()
    full, half = evaluate(model, Photos()), evaluate(model, Photos(), dtype=torch.bfloat16)
    assert half.loss.dtype == torch.float32
    assert not torch.equal(full.loss, half.loss)
    torch.testing.assert_close(full.loss, half.loss, rtol=0.05, atol=0.1)
    assert next(model.parameters()).dtype == torch.float32


def test_mistakes_are_named() -> None:
    with pytest.raises(DtemError, match=r"'3\.jpg' has label 9, the model has classes 0 … 6"):
        evaluate(tiny(), Photos(labels=torch.tensor([0, 1, 2, 9, 0, 0, 0, 0, 0, 0])))
    with pytest.raises(DtemError, match=r"'0\.jpg' has no label"):
        evaluate(tiny(), Photos(labels=torch.full((10,), -1)))
    with pytest.raises(DtemError, match="nothing to evaluate"):
        evaluate(tiny(), Photos(n=0))
    broken = tiny()
    with torch.no_grad():
        broken.head.bias.fill_(float("nan"))
    with pytest.raises(DtemError, match=r"'0\.jpg' is not finite"):
        evaluate(broken, Photos())


def test_the_list_of_training_images(tmp_path) -> None:
    handle = dtem.patch(tiny())
    dtem.save_pretrained(handle, tmp_path / "a.safetensors", notes={"trained_on": json.dumps(["x.jpg", "y.jpg"])})
    dtem.save_pretrained(handle, tmp_path / "b.safetensors")
    assert dtem.adapters.storage.trained_on(dtem.adapters.storage.read(tmp_path / "a.safetensors")[0]) == [
        "x.jpg",
        "y.jpg",
    ]
    assert dtem.adapters.storage.trained_on(dtem.adapters.storage.read(tmp_path / "b.safetensors")[0]) == []
    for damaged in ("[", "{}", "[1]", '"x"'):
        with pytest.raises(DtemError, match="trained_on"):
            dtem.adapters.storage.trained_on({"notes": {"trained_on": damaged}})

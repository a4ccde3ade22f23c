"""PatchMerger against the method written out token by token."""

import by_hand
import pytest
import torch

import dtem
from contract.hosts import fresh, gradients, images, lively, patched, vit


def merging(queries, prefix):
    """`queries`: one matrix per block that reduces, used up in order."""
    waiting = iter(queries)

    def step(states, looks, r):
        patches, matrix = states[prefix:], next(waiting)
        normed = [(x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt() for x in patches]
        new, groups, taken = list(states[:prefix]), [[index] for index in range(prefix)], set()
        for query in matrix[: len(patches) - r]:
            logits = torch.stack(normed) @ query
            share = (logits - logits.max()).exp()
            share = share / share.sum()
            new.append(share @ torch.stack(patches))
            best = int(share.argmax())
            groups.append([] if best in taken else [prefix + best])
            taken.add(best)
        return new, groups

    return step


def soften(handle):
    """Queries so small that every patch has a share."""
    with torch.no_grad():
        for parameter in handle.method.parameters():
            parameter.mul_(0.2)


@pytest.mark.parametrize("r", [9, [32, 0, 9, 3]], ids=str)
@pytest.mark.parametrize("name", ["distilled", "mae", "dinov2_registers"])
def test_patch_merger_is_itself_written_out(name, r):
    model, handle = patched(name, "patch_merger", r)
    soften(handle)
    model.double()
    x = images(name).double()
    prefix, host = handle.host.prefix, fresh(name).double()
    used = [layer for layer, count in enumerate(handle.plan) if count]
    for mode in ("hard", "soft"):
        handle.mode = mode
        for batch in (x, x[:1]):
            with torch.no_grad(), handle.trace() as trace:
                got = model(batch)
            assert all(torch.equal(size, torch.ones_like(size)) for size in trace.sizes)
            for index, (image, scores) in enumerate(zip(batch, got, strict=True)):
                step = merging([handle.method.queries[layer].weight for layer in used], prefix)
                with torch.no_grad():
                    expected, holds = by_hand.run(host, image, handle.plan, step)
                torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)
                if mode == "hard":
                    assert torch.equal(trace.sources[-1][index], by_hand.source_of(holds, prefix, 64))


def test_gradients_are_those_written_out():
    model, handle = patched("mae", "patch_merger", [20, 0, 9, 5])
    soften(handle)
    model.double()
    x = images("mae", batch=1).double()
    handle.mode = "soft"
    _, grads = gradients(model, x)
    host = fresh("mae").double()
    queries = [handle.method.queries[layer].weight.detach().clone().requires_grad_() for layer in (0, 2, 3)]
    out = by_hand.run(host, x[0], handle.plan, merging(queries, 1))[0].unsqueeze(0)
    (out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().backward()
    expected = dict(host.named_parameters()) | {
        f"dtem.method.queries.{layer}.weight": query for layer, query in zip((0, 2, 3), queries, strict=True)
    }
    for key, parameter in expected.items():
        torch.testing.assert_close(
            grads[key], parameter.grad, rtol=1e-8, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}"
        )
    assert grads["dtem.method.queries.1.weight"] is None
    assert grads["dtem.method.queries.0.weight"][44:].abs().max() == 0, "of 64 queries, 44 are used"


def test_every_query_has_its_own_start_by_seed():
    first, same, other = (patched("deit", "patch_merger", seed=seed)[1].method for seed in (0, 0, 1))
    for layer in range(4):
        weight = first.queries[layer].weight
        assert weight.shape == (64, 32)
        assert torch.equal(weight, same.queries[layer].weight)
        assert not torch.allclose(weight, other.queries[layer].weight)
    assert not torch.allclose(first.queries[0].weight, first.queries[1].weight)


def test_the_last_block_of_a_class_token_model_learns_nothing():
    for name, learns in (("deit", False), ("mae", True)):
        method = patched(name, "patch_merger")[1].method
        assert method.queries[-1].weight.requires_grad == learns
        assert method.queries[0].weight.requires_grad


def test_a_larger_image_needs_a_larger_r():
    model = lively(vit("vit_small_patch14_reg4_dinov2", dynamic_img_size=True)()).eval()
    handle = dtem.patch(model, "patch_merger", [8, 0, 0, 0])
    with torch.no_grad():
        with pytest.raises(dtem.DtemError, match=r"block 0.*92 patches.*64 queries"):
            model(torch.randn(1, 3, 40, 40))
        handle.r = 0.4
        assert model.forward_features(torch.randn(1, 3, 40, 40)).shape[1] == 5 + 14


def test_saved_and_loaded(tmp_path):
    model, handle = patched("deit", "patch_merger")
    soften(handle)
    dtem.save_pretrained(handle, tmp_path / "adapter.safetensors")
    other = fresh("deit")
    assert dtem.from_pretrained(tmp_path / "adapter.safetensors", other).method.name == "patch_merger"
    with torch.no_grad():
        assert torch.equal(other(images("deit")), model(images("deit")))

"""VideoMAE: tubes merge across space and time. Oracle: its layers by hand."""

import pytest
import torch

import dtem
from contract.hosts import fresh, images
from dtem import ops

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.contract


def by_hand(model, handle, video):
    """Logits with merging: attention that counts sizes, matching on the keys' mean, the mean by size."""
    encoder = model.videomae
    x, size = encoder.embeddings(video, None), None
    for layer, r in zip(encoder.encoder.layer._modules.values(), handle.plan, strict=True):
        h, attn = layer.layernorm_before(x), layer.attention.attention
        q, k, v = (each(h).unflatten(-1, (2, 16)).transpose(1, 2) for each in (attn.query, attn.key, attn.value))
        scores = q @ k.mT / 4 + (0 if size is None else size.log()[:, None, None])
        x = x + layer.attention.output.dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x, size = ops.merge(x, size, ops.match(k.mean(dim=1), r))
        x = x + layer.output.dense(layer.intermediate(layer.layernorm_after(x)))
    mean = (x * size[..., None]).sum(dim=1) / size.sum(dim=1, keepdim=True)
    return model.classifier(model.fc_norm(mean))


@torch.no_grad()
def test_tubes_merge_as_by_hand():
    model, video = fresh("hf_videomae"), images("hf_videomae")
    handle = dtem.patch(model, "tome", r=9, proportional=True)
    assert handle.host.patches == 64
    torch.testing.assert_close(model(video).logits, by_hand(model, handle, video), rtol=1e-4, atol=1e-4)
    macs = handle.gflops((9, 9, 9, 9))
    assert macs < 0.8 * handle.gflops((0, 0, 0, 0))


def test_the_bare_model_hands_on_the_merged_tubes():
    model = transformers.VideoMAEModel(fresh("hf_videomae").config).eval()
    handle = dtem.patch(model, r=9)
    assert model(images("hf_videomae")).last_hidden_state.shape == (2, handle.tokens[-1], 32)


def test_what_it_cannot_do_is_refused():
    config = fresh("hf_videomae").config
    with pytest.raises(dtem.DtemError, match="every tube in its place"):
        dtem.patch(transformers.VideoMAEForPreTraining(config))
    model = fresh("hf_videomae")
    with pytest.raises(dtem.DtemError, match="takes videos of 8 frames"):
        dtem.show(dtem.patch(model), torch.zeros(16, 16, 3, dtype=torch.uint8).numpy())
    dtem.Handle(model).unpatch()
    model.config.use_mean_pooling = False
    with pytest.raises(dtem.DtemError, match="reads the first tube"):
        dtem.patch(model)

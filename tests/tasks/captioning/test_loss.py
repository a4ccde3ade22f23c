import pytest
import torch

from dtem.tasks.captioning.loss import distill_loss, task_loss, token_losses


def case():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64)  # three image tokens, four words
    ids = torch.randint(5, (2, 4), generator=generator)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    return logits, ids, mask


def test_loss_of_a_token_is_its_cross_entropy_given_those_before():
    logits, ids, mask = case()
    losses, present = token_losses(logits, ids, mask)
    total, count = 0.0, 0
    for row in range(2):
        for place in range(1, 4):
            if not mask[row, place]:
                assert losses[row, place - 1] == 0
                continue
            log_probability = logits[row, 3 + place - 1].float().softmax(0)[ids[row, place]].log()
            assert losses[row, place - 1].item() == pytest.approx(-log_probability.item(), rel=1e-5)
            total, count = total - log_probability.item(), count + 1
    assert present.sum() == count == 5
    assert task_loss(logits, ids, mask).item() == pytest.approx(total / count, rel=1e-5)


def test_equal_logits_have_no_distillation_loss():
    logits, _, mask = case()
    longer = torch.cat([torch.randn(2, 4, 5, dtype=torch.float64), logits[:, 3:]], dim=1)
    assert distill_loss(logits, longer, mask).abs() < 1e-6
    other = logits.clone()
    other[1, 6] += torch.arange(5)  # what follows padding
    assert distill_loss(logits, other, mask).abs() < 1e-6
    other[0, 4] += torch.arange(5)
    assert distill_loss(logits, other, mask) > 0.01
    assert distill_loss(logits, other, mask, temperature=4.0) > 0

import pytest
import torch

from dtem.tasks.captioning.loss import distill_loss, task_loss, word_losses


def case():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64)  # three image tokens, four words
    ids = torch.randint(5, (2, 4), generator=generator)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    return logits, ids, mask


def test_every_word_is_judged_by_what_stands_before_it():
    logits, ids, mask = case()
    losses, follows = word_losses(logits, ids, mask)
    total, count = 0.0, 0
    for row in range(2):
        for place in range(1, 4):
            if not mask[row, place]:
                assert losses[row, place - 1] == 0
                continue
            said = logits[row, 3 + place - 1].float().softmax(0)[ids[row, place]].log()
            assert losses[row, place - 1].item() == pytest.approx(-said.item(), rel=1e-5)
            total, count = total - said.item(), count + 1
    assert follows.sum() == count == 5
    assert task_loss(logits, ids, mask).item() == pytest.approx(total / count, rel=1e-5)


def test_a_model_that_says_the_same_has_nothing_to_learn():
    logits, _, mask = case()
    longer = torch.cat([torch.randn(2, 4, 5, dtype=torch.float64), logits[:, 3:]], dim=1)
    assert distill_loss(logits, longer, mask).abs() < 1e-6
    other = logits.clone()
    other[1, 6] += torch.arange(5)  # what follows padding
    assert distill_loss(logits, other, mask).abs() < 1e-6
    other[0, 4] += torch.arange(5)
    assert distill_loss(logits, other, mask) > 0.01
    assert distill_loss(logits, other, mask, temperature=4.0) > 0

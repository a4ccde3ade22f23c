"""Tiny GIT models with random weights of a size that matters."""

import torch

from contract.hosts import lively


def tiny_git(vision=None, **settings):
    from transformers import GitConfig, GitForCausalLM

    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    torch.manual_seed(7)
    text = tiny | {"num_hidden_layers": 2, "vocab_size": 50, "max_position_embeddings": 64}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = GitConfig(
        vision_config=tiny | {"num_hidden_layers": 4, "image_size": 32, "patch_size": 4} | (vision or {}),
        **text | special | settings,
    )
    model = lively(GitForCausalLM(config)).eval()
    with torch.no_grad():
        model.output.bias[:3] = -3.0  # captions do not end at once
    return model

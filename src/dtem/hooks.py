"""Whether modules have hooks or a forward of their own, so that they must be called, not their weights used."""

from torch import nn
from torch.nn.modules import module as torch_module


def are_untouched(*modules: nn.Module) -> bool:
    """Whether these modules have the forward of their class and no hooks, so that their parts can be called instead."""
    return not any("forward" in module.__dict__ for module in modules) and not has_hooks(*modules)


def has_hooks(*modules: nn.Module) -> bool:
    """Whether one of these modules, or all modules of this process, have forward hooks."""
    if has_global_hooks():
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def has_global_hooks() -> bool:
    """Whether all modules of this process have forward hooks."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)

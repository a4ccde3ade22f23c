"""Whether something looks on: modules with hooks, and tensors whose operations must be those of torch."""

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


def is_plain_tensor(x: Tensor) -> bool:
    """Whether `x` holds numbers and nothing else: no fake tensor or other subclass, and not under vmap or grad."""
    return type(x) is Tensor and torch._C._functorch.peek_interpreter_stack() is None


def is_watched() -> bool:
    """Whether operations are recorded, counted or replaced: compilation, fake tensors, CUDA graphs, dispatch modes."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() != 0
        or torch._C._get_tracing_state() is not None
        or _is_capturing()
    )


def _is_capturing() -> bool:
    """Whether a CUDA graph is being recorded."""
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return begun and torch.cuda.is_current_stream_capturing()


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

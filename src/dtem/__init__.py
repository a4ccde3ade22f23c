"""dtem: faster Vision Transformers by learned token merging.

model = timm.create_model("deit_small_patch16_224", pretrained=True)
handle = dtem.patch(model, r=16)
"""

import importlib
from typing import TYPE_CHECKING, Any

from dtem._version import __version__

if TYPE_CHECKING:
    from dtem.adapters.averaging import average_adapters
    from dtem.adapters.storage import from_pretrained, list_adapters, push_to_hub, save_pretrained
    from dtem.errors import DtemError
    from dtem.evaluation.benchmark import benchmark
    from dtem.evaluation.compare import compare
    from dtem.evaluation.evaluate import evaluate
    from dtem.evaluation.flops_report import count_flops
    from dtem.evaluation.predict import predict
    from dtem.exporters.export import export
    from dtem.handle import Handle, patch
    from dtem.integrations import register_integration
    from dtem.measure.record import load_record
    from dtem.methods import list_methods, register_method
    from dtem.methods.dtem import DtemConfig
    from dtem.models.factory import create_model, list_models
    from dtem.training.train import train
    from dtem.visualise.show import show

_PUBLIC = {
    "DtemConfig": "dtem.methods.dtem",
    "DtemError": "dtem.errors",
    "Handle": "dtem.handle",
    "average_adapters": "dtem.adapters.averaging",
    "benchmark": "dtem.evaluation.benchmark",
    "compare": "dtem.evaluation.compare",
    "count_flops": "dtem.evaluation.flops_report",
    "create_model": "dtem.models.factory",
    "evaluate": "dtem.evaluation.evaluate",
    "export": "dtem.exporters.export",
    "from_pretrained": "dtem.adapters.storage",
    "list_adapters": "dtem.adapters.storage",
    "list_methods": "dtem.methods",
    "list_models": "dtem.models.factory",
    "load_record": "dtem.measure.record",
    "patch": "dtem.handle",
    "predict": "dtem.evaluation.predict",
    "push_to_hub": "dtem.adapters.storage",
    "register_integration": "dtem.integrations",
    "register_method": "dtem.methods",
    "save_pretrained": "dtem.adapters.storage",
    "show": "dtem.visualise.show",
    "train": "dtem.training.train",
}

__all__ = [
    "DtemConfig",
    "DtemError",
    "Handle",
    "__version__",
    "average_adapters",
    "benchmark",
    "compare",
    "count_flops",
    "create_model",
    "evaluate",
    "export",
    "from_pretrained",
    "list_adapters",
    "list_methods",
    "list_models",
    "load_record",
    "patch",
    "predict",
    "push_to_hub",
    "register_integration",
    "register_method",
    "save_pretrained",
    "show",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import on first use: `import dtem` and `dtem --help` need not wait for torch."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'dtem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})

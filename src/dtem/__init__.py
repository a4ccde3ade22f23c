"""dtem: faster Vision Transformers by learned token merging.

model = timm.create_model("deit_small_patch16_224", pretrained=True)
handle = dtem.patch(model, r=16)
"""

import importlib
from typing import TYPE_CHECKING, Any

from dtem._version import __version__ as __version__

if TYPE_CHECKING:
    from dtem.adapters.averaging import average_adapters as average_adapters
    from dtem.adapters.locate import list_adapters as list_adapters
    from dtem.adapters.overview import adapter_overview as adapter_overview
    from dtem.adapters.publish import push_to_hub as push_to_hub
    from dtem.adapters.storage import from_pretrained as from_pretrained
    from dtem.adapters.storage import save_pretrained as save_pretrained
    from dtem.app.demo import demo as demo
    from dtem.errors import DtemError as DtemError
    from dtem.evaluation.benchmark import benchmark as benchmark
    from dtem.evaluation.compare import compare as compare
    from dtem.evaluation.evaluate import evaluate as evaluate
    from dtem.evaluation.flops_report import count_flops as count_flops
    from dtem.evaluation.model_overview import model_overview as model_overview
    from dtem.evaluation.paper_speed import benchmark_paper as benchmark_paper
    from dtem.evaluation.predict import predict as predict
    from dtem.exporters.export import export as export
    from dtem.handle import Handle as Handle
    from dtem.handle import patch as patch
    from dtem.integrations import register_integration as register_integration
    from dtem.measure.record import load_record as load_record
    from dtem.methods import list_methods as list_methods
    from dtem.methods import register_method as register_method
    from dtem.methods.dtem import DtemConfig as DtemConfig
    from dtem.models.factory import create_model as create_model
    from dtem.models.factory import list_models as list_models
    from dtem.tasks.answering.ask import ask as ask
    from dtem.tasks.captioning.generate import caption as caption
    from dtem.training.train import train as train
    from dtem.tuning.tune import tune as tune
    from dtem.visualise.show import show as show

_PUBLIC = {
    "DtemConfig": "dtem.methods.dtem",
    "DtemError": "dtem.errors",
    "Handle": "dtem.handle",
    "adapter_overview": "dtem.adapters.overview",
    "ask": "dtem.tasks.answering.ask",
    "average_adapters": "dtem.adapters.averaging",
    "benchmark": "dtem.evaluation.benchmark",
    "benchmark_paper": "dtem.evaluation.paper_speed",
    "caption": "dtem.tasks.captioning.generate",
    "compare": "dtem.evaluation.compare",
    "count_flops": "dtem.evaluation.flops_report",
    "create_model": "dtem.models.factory",
    "demo": "dtem.app.demo",
    "evaluate": "dtem.evaluation.evaluate",
    "export": "dtem.exporters.export",
    "from_pretrained": "dtem.adapters.storage",
    "list_adapters": "dtem.adapters.locate",
    "list_methods": "dtem.methods",
    "list_models": "dtem.models.factory",
    "load_record": "dtem.measure.record",
    "model_overview": "dtem.evaluation.model_overview",
    "patch": "dtem.handle",
    "predict": "dtem.evaluation.predict",
    "push_to_hub": "dtem.adapters.publish",
    "register_integration": "dtem.integrations",
    "register_method": "dtem.methods",
    "save_pretrained": "dtem.adapters.storage",
    "show": "dtem.visualise.show",
    "train": "dtem.training.train",
    "tune": "dtem.tuning.tune",
}

__all__ = sorted(["__version__", *_PUBLIC])


def __getattr__(name: str) -> Any:
    """Import on first use: `import dtem` and `dtem --help` need not wait for torch."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'dtem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})

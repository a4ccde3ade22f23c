"""dtem: faster Vision Transformers by learned token merging.

model = timm.create_model("deit_small_patch16_224", pretrained=True)
handle = dtem.patch(model, r=16)
"""

import importlib
from typing import TYPE_CHECKING, Any

from dtem._version import __version__

if TYPE_CHECKING:
    from dtem.handle import Handle, patch
    from dtem.storage import from_pretrained, push_to_hub, save
    from dtem.tasks.classification.show import show
    from dtem.types import DtemError

_PUBLIC = {
    "DtemError": "dtem.types",
    "Handle": "dtem.handle",
    "from_pretrained": "dtem.storage",
    "patch": "dtem.handle",
    "push_to_hub": "dtem.storage",
    "save": "dtem.storage",
    "show": "dtem.tasks.classification.show",
}

__all__ = ["DtemError", "Handle", "__version__", "from_pretrained", "patch", "push_to_hub", "save", "show"]


def __getattr__(name: str) -> Any:
    """Import on first use: `import dtem` and `dtem --help` need not wait for torch."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'dtem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})

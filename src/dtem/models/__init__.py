"""Models that neither timm nor transformers ships, under the names in timm's registry.

>>> import dtem.models
>>> model = timm.create_model("lvvit_s", pretrained=True)
"""

from dtem.models import lvvit

__all__ = ["lvvit"]

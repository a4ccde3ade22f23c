"""Models that neither timm nor transformers ships, under the names in timm's registry.

>>> import dtem.hosts
>>> model = timm.create_model("lvvit_s", pretrained=True)
"""

from dtem.hosts import lvvit

__all__ = ["lvvit"]

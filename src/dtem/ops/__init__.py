"""The method's equations: pure functions on tensors, one per equation.

`matching` and `merging` are what runs at inference (`whole`: both as one operator, for files); `grouping` and
`soft_merge` their relaxation in training, `pricing` the way to learn without it;
`pruning` serves the methods that drop tokens instead, `squeezing` and `clustering` other ways to merge them.
"""

from dtem.ops.attention import attend, class_attention, log_size
from dtem.ops.clustering import cluster, pool, pool_sizes
from dtem.ops.dense import kept_rows, merge_along, unmerge_along
from dtem.ops.density import density_peaks
from dtem.ops.grouping import gumbel_group, row_mass, soft_group, step_gates
from dtem.ops.matching import Matching, compose, cosine, limit, match, sides
from dtem.ops.merging import SoftMerge, give_all, merge, soft_merge, take
from dtem.ops.pricing import Offer, effect, expected_cost
from dtem.ops.pruning import fuse, prune, pruned_source
from dtem.ops.sampling import sample
from dtem.ops.sensitivity import Moments, distance_embedding, moments
from dtem.ops.squeezing import find_hosts, squeeze
from dtem.ops.unmerge import unmerge
from dtem.ops.whole import is_whole, merge_whole, whole

__all__ = [
    "Matching",
    "Moments",
    "Offer",
    "SoftMerge",
    "attend",
    "class_attention",
    "cluster",
    "compose",
    "cosine",
    "density_peaks",
    "distance_embedding",
    "effect",
    "expected_cost",
    "find_hosts",
    "fuse",
    "give_all",
    "gumbel_group",
    "is_whole",
    "kept_rows",
    "limit",
    "log_size",
    "match",
    "merge",
    "merge_along",
    "merge_whole",
    "moments",
    "pool",
    "pool_sizes",
    "prune",
    "pruned_source",
    "row_mass",
    "sample",
    "sides",
    "soft_group",
    "soft_merge",
    "squeeze",
    "step_gates",
    "take",
    "unmerge",
    "unmerge_along",
    "whole",
]

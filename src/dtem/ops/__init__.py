"""The equations of the methods: pure functions on tensors.

Inference: `matching`, `merging` (`fused`: both as one operator, for export) and proportional `attention`.
Training: `grouping` and `soft_merge` relax them; `fisher` is a loss that needs no relaxation; `dense` is for dense
prediction. Other methods: `pruning`, `squeezing` and `clustering`.
"""

from dtem.ops import linear
from dtem.ops.attention import attend, class_attention, log_size
from dtem.ops.clustering import cluster, density_peaks, pool, pool_sizes
from dtem.ops.dense import kept_rows, merge_along, unmerge_along
from dtem.ops.fisher import MergeCandidates, Moments, distance_embedding, fisher_loss, moments, output_change
from dtem.ops.fused import fused_merge, fused_merge_op, is_fused_merge
from dtem.ops.grouping import row_mass, soft_group
from dtem.ops.matching import Matching, compose, cosine, limit, match, match_real, sides
from dtem.ops.merging import SoftMerge, match_and_merge, merge, normalise_largest, reordering, soft_merge, take, unmerge
from dtem.ops.pruning import fuse, prune, pruned_source, sample
from dtem.ops.squeezing import find_hosts, squeeze

__all__ = [
    "Matching",
    "MergeCandidates",
    "Moments",
    "SoftMerge",
    "attend",
    "class_attention",
    "cluster",
    "compose",
    "cosine",
    "density_peaks",
    "distance_embedding",
    "find_hosts",
    "fisher_loss",
    "fuse",
    "fused_merge",
    "fused_merge_op",
    "is_fused_merge",
    "kept_rows",
    "limit",
    "linear",
    "log_size",
    "match",
    "match_and_merge",
    "match_real",
    "merge",
    "merge_along",
    "moments",
    "normalise_largest",
    "output_change",
    "pool",
    "pool_sizes",
    "prune",
    "pruned_source",
    "reordering",
    "row_mass",
    "sample",
    "sides",
    "soft_group",
    "soft_merge",
    "squeeze",
    "take",
    "unmerge",
    "unmerge_along",
]

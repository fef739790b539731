"""Many processes: sums over ranks, and models whose wrappers communicate during a backward."""

from .accumulate import accumulate
from .holders import Spread, described, group_of, spread
from .ranks import Ranks
from .shards import Leaves, data_meshes, is_sharded, like_shard, own_part, owners, placed_like, zeros_for
from .tensor_parallel import held_by_several, ranks_of, whole
from .wrappers import undisturbed

__all__ = [
    "Leaves",
    "Ranks",
    "Spread",
    "accumulate",
    "data_meshes",
    "described",
    "group_of",
    "held_by_several",
    "is_sharded",
    "like_shard",
    "own_part",
    "owners",
    "placed_like",
    "ranks_of",
    "spread",
    "undisturbed",
    "whole",
    "zeros_for",
]

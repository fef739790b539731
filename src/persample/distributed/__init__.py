"""Many processes: sums over ranks, and models whose wrappers communicate during a backward."""

from .accumulate import accumulate
from .ranks import Ranks
from .shards import Leaves, is_sharded, like_shard, own_part, owners
from .wrappers import undisturbed

__all__ = [
    "Leaves",
    "Ranks",
    "accumulate",
    "is_sharded",
    "like_shard",
    "own_part",
    "owners",
    "undisturbed",
]

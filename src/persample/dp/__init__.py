"""Differentially private training that leaves the model alone.

>>> from persample import dp
>>> plan = dp.Plan(examples=1000, batch_size=50, epochs=5, noise_multiplier=1.0, delta=1e-5)
>>> round(plan.epsilon, 1)
3.5
"""

from . import schedules as schedules  # dp.schedules.linear
from .adam import AdamBC
from .clips import AdaptiveClip
from .errors import PrivacyError, PrivacyWarning
from .plan import Plan
from .private import Private
from .records import Spent, Step
from .scheduled import ScheduledClip
from .sharded import Shards
from .team import Team
from .teams import Replicas

__all__ = [
    "AdamBC",
    "AdaptiveClip",
    "Plan",
    "PrivacyError",
    "PrivacyWarning",
    "Private",
    "Replicas",
    "ScheduledClip",
    "Shards",
    "Spent",
    "Step",
    "Team",
]

"""Whether a run still has the processes that it was made for."""

from __future__ import annotations

import os

import torch.distributed as dist

from .errors import PrivacyError


class World:
    """The processes of ``torch.distributed`` when a run began: if more come later, each of them trains alone.

    All of them would then draw from the same data, and their accounts would count one of them.
    """

    def __init__(self, team_was_given: bool) -> None:
        self._chosen, self._size = team_was_given, _size()

    def check(self) -> None:
        """Refuse to train alone beside others, unless a team was chosen."""
        if self._chosen:
            return
        if _size() > self._size:
            raise PrivacyError(
                f"torch.distributed has {_size()} processes now, and had {self._size} when dp.Private was made: every "
                f"process would train on its own, and the accounts would count one of them. Make dp.Private after "
                f"init_process_group; or pass team=dp.Team() if this process is to train alone"
            )
        if not _is_initialised() and _started() > 1:
            raise PrivacyError(
                f"this is one of {_started()} processes (WORLD_SIZE), but torch.distributed is not initialised: every "
                f"process would train on its own, and the accounts would count one of them. Call init_process_group "
                f"before dp.Private is made; or pass team=dp.Team() if this process is to train alone"
            )


def _is_initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _size() -> int:
    return dist.get_world_size() if _is_initialised() else 1


def _started() -> int:
    """How many processes torchrun, or a launcher like it, has started."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if "RANK" in os.environ and count.isdecimal() else 1

"""What teams of several processes share: draws of the first process, and errors that reach all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed import Ranks, Spread
from .binding import trainable
from .errors import PrivacyError
from .fingerprints import of_tensors, summary
from .noise import Sum, blocks_before, shares
from .sums import Line, Whole
from .team import AddNoise, Alike, Team


class Several(Team):
    """What all teams of several processes share: draws of the first process, and errors that reach all of them."""

    _spread: Sequence[Spread] = ()  # which processes hold the same parts of parameters

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._params = trainable(model)
        self._device = next(iter(self._params.values())).device
        self._ranks = Ranks(group)
        self.rank, self.size = self.share, self.shares = self._ranks.rank, self._ranks.size

    def agree(self, value: bytes) -> bytes:
        with self._explaining_lost_processes():
            return self._ranks.first(value, self._device)

    def _noisy_total(self, sums: Sequence[Whole], add_noise: AddNoise, stream: int = 0) -> Line:
        """Local sums, in int64, to the process that makes their noise; the result from there to all, in float64.

        Every process has a share of them, as one alone would make it; of remembered noise, the first process has all.
        """
        line = torch.cat([whole.numbers.reshape(-1).to(self._device, torch.int64) for whole in sums])
        noisy = torch.empty_like(line, dtype=torch.float64)
        everything = shares(len(line), 1 if add_noise.is_remembered else self.size)
        with self._explaining_lost_processes():
            for place, share in enumerate(everything):
                if share:
                    dist.reduce(line[share.start : share.stop], group=self._ranks.group, group_dst=place)
            own = everything[self.rank] if self.rank < len(everything) else range(0)
            if own:
                noise = add_noise(_piece(sums, line, own), stream, blocks_before(own.start))
                torch.cat(noise.tensors, out=noisy[own.start : own.stop])
            for place, share in enumerate(everything):
                if share:
                    dist.broadcast(noisy[share.start : share.stop], group=self._ranks.group, group_src=place)
        return Line([Sum(noisy)])

    @contextmanager
    def together(self, alike: Alike) -> Iterator[None]:
        self._alike = alike
        yield

    def _confirm_agreement(self, failed: bool = False) -> None:
        """Wait for all, and hear whether one of them has failed, or is no longer what the others are."""
        mine = {} if failed else dict(self._alike())
        parts = [0 if failed else self._of_parts(spread) for spread in self._spread]
        with self._explaining_lost_processes():
            failing, same, *of_parts = zip(
                *self._ranks.each([failed, summary(mine), *parts], self._device), strict=True
            )
        failures = sum(failing)
        if failures and not failed:
            raise PrivacyError(
                f"{failures} of {self.size} processes could not make this step, and say why themselves: nothing was "
                f"released. The step counts as spent; resume from the last private.save"
            )
        drifted = [
            name
            for spread, each in zip(self._spread, of_parts, strict=True)
            if spread.differ(each)
            for name in spread.names
        ]
        if not failures and (drifted or len(set(same)) > 1):
            names = [f"parameter {name!r}" for name in drifted] or self._different(mine)
            raise PrivacyError(
                f"the processes have drifted apart, in {', '.join(names)}: each would train a model of "
                f"its own. Run the same loop in all of them: whatever follows a record of private.step (a schedule, a "
                f"clipped or rescaled p.grad, optimizer.step) follows it everywhere. Resume from the last private.save"
            )

    def _of_parts(self, spread: Spread) -> int:
        """One number for the parts of parameters that this process holds."""
        return summary(of_tensors({name: self._params[name] for name in spread.names}))

    def _different(self, mine: Mapping[str, int]) -> list[str]:
        """The names of what is not the same in all processes, by those that the first one has."""
        names = json.loads(self.agree(json.dumps(list(mine)).encode()))
        with self._explaining_lost_processes():
            answers = self._ranks.each([mine.get(name, -1) for name in names], self._device)
        return [name for name, *values in zip(names, *answers, strict=True) if len(set(values)) > 1] or ["settings"]

    @contextmanager
    def _explaining_lost_processes(self) -> Iterator[None]:
        """PyTorch's error for a process that is gone or does not answer, with the remedy."""
        try:
            yield
        except RuntimeError as error:
            raise PrivacyError(
                f"another of the {self.size} processes is gone, or does not come to the same step in time: end all of "
                f"them, and resume from the last private.save. What was accounted for is spent. PyTorch says: {error}"
            ) from error


def _piece(sums: Sequence[Whole], line: Tensor, some: range) -> list[Whole]:
    """Some of the numbers of sums that lie on a line, in their units."""
    found, start = [], 0
    for whole in sums:
        end = start + whole.numbers.numel()
        first, last = max(start, some.start), min(end, some.stop)
        if first < last:
            found.append(Whole(line[first:last], whole.unit))
        start = end
    return found


def everybody() -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "a team of several processes needs torch.distributed.init_process_group first, and torchrun to start them"
        )
    group = dist.group.WORLD
    assert group is not None
    return group

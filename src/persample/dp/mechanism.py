"""What a run releases: clipped sums with noise, over the expected batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..factors.limits import Unit
from ..kernels.ragged import always_ragged
from ..reductions.exact import ExactClippedSum
from .clips import Clipper
from .correlated.memory import Memory
from .correlated.stream import Stream
from .noise import Scale, Sum, add_noise
from .plan import Plan
from .sampling import most_samples
from .sources import Source
from .sums import Clipped, Line, Sums, Whole
from .team import Team


@dataclass(frozen=True)
class _Noisy:
    """Adds the noise of one release."""

    scale: Scale
    source: Source
    number: int
    memory: Memory | None

    @property
    def is_remembered(self) -> bool:
        return self.memory is not None

    def __call__(self, sums: Sequence[Whole], stream: int = 0, first_block: int = 0) -> Line:
        if self.scale.noise_multiplier == 0:  # then there is no grid, either
            return Line.of(sums, None)

        def add(to: Sequence[Sum]) -> None:
            add_noise(to, self.scale, self.source, self.number, stream, self.memory, first_block)

        return Line.of(sums, self.scale.grid, add)


class Mechanism:
    """The Gaussian mechanism of a run, from clipped sums to the gradients of its parameters.

    ``stream`` is its noise where that is correlated.
    """

    def __init__(self, plan: Plan, clipper: Clipper, team: Team, params: Mapping[str, Tensor]) -> None:
        self._plan, self._clipper, self._team, self._params = plan, clipper, team, params
        self._size = sum(p.numel() * (2 if p.is_complex() else 1) for p in params.values())  # in real numbers
        self._known_units: tuple[object, Mapping[str, Unit]] | None = None  # and the bound that they are for
        self.noise_std = 0.0  # on every coordinate of the gradients that were released last
        self.sums = Sums({name: team.own(p) for name, p in params.items()})
        self.stream: Stream | None = None
        if plan.mechanism != "gaussian" and plan.noise:
            made = [team.makes_noise_for(name) for name in params]
            own = sum(shape.size for shape, here in zip(self.sums.shapes, made, strict=True) if here)
            grid = Scale(clipper.sensitivity(), plan.noise, self._size).grid
            part = None if own == self._size else team.part
            self.stream = Stream(plan.encoder, own, grid, plan.encoder.factor(plan.noise, self._size), part)

    def exactly(self, padding: int = 0) -> ExactClippedSum:
        """This step's clipped sum, for as many samples as a batch may have."""
        return ExactClippedSum(self._clipper.reduction(), most_samples(self._plan), padding)

    def clipped(self, losses: Tensor, padding: int) -> Clipped:
        """The clipped sums of these losses, of which some at the end do not count."""
        with always_ragged(self._plan.users is not None):  # how one is clipped must not depend on others' items
            return self._team.clipped(losses, self._params, self.exactly(padding))

    def take(self) -> list[Whole]:
        """What the parts of this step have added up to."""
        return self.sums.take(self._units(), self._clipper.counted_in, self._clipper.counts)

    def _units(self) -> Mapping[str, Unit]:
        """The units of this step's sums."""
        bound = self._clipper.bound
        if self._known_units is None or self._known_units[0] != bound:
            self._known_units = bound, self.exactly().units_for(self._params)
        return self._known_units[1]

    def drawn_on_host(self, source: Source) -> int:
        """How many numbers of a release get noise that is not made where they are."""
        made_there = self.stream is None and all(source.draws_on(p.device) for p in self._params.values())
        return 0 if made_there or not self._plan.noise else self._size + self._clipper.counts

    def noisy_means(self, sums: Sequence[Whole], source: Source, number: int, step: int) -> list[Tensor]:
        """The sums with the noise of a release, over the expected batch size; a bound that moves follows the count.

        The noise is what a step, counted from 0, is accounted for with.
        """
        counted = self._clipper.counts
        scale = Scale(
            sensitivity=self._clipper.sensitivity() * self._plan.contributions,
            noise_multiplier=self._plan.noise_at(step),
            size=self._size + counted,
            factor=1.0 if self.stream is None else self.stream.factor,
        )

        memory = None if self.stream is None else self.stream.memory
        released = self._team.release(sums, _Noisy(scale, source, number, memory))
        if counted:
            self._clipper.follow(released.tensors[-1][-counted:].clone())
        self.noise_std = scale.std / self._plan.batch_size
        return released.divided(self._plan.batch_size, self.sums.shapes, self.sums.dtype)

    def give(self, means: Sequence[Tensor]) -> None:
        """Write them into ``p.grad``."""
        for p, mean in zip(self._params.values(), means, strict=True):
            self._team.give(p, mean)

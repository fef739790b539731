"""What is promised, and what it takes to keep it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch.utils.data import DataLoader

from . import schedules
from .accounting import ACCOUNTANTS, Accountant, epsilon, epsilon_of_all
from .correlated.choose import best_bands
from .correlated.encoders import Encoder, banded, buffered
from .correlated.settings import MechanismName, Sampling, check_settings, most_bands
from .deltas import asked, check_delta, check_needed, warn_of_large
from .loaders import planned
from .solve import CLOSE, least_noise, most_steps
from .units import name_of_one, units
from .words import in_words

_MOST_STEPS = 10_000_000
_BUFFERS = 3
_ROUNDING = 1e-6  # by how much an epsilon may be larger elsewhere, relatively, for the same noise and steps


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Noise, length and promise of a private training run; what is left out of the three is solved for.

    >>> from persample import dp
    >>> plan = dp.Plan(examples=60000, batch_size=256, epochs=10, epsilon=3.0, delta=1e-5, accountant="rdp")
    >>> print(plan)
    2344 steps (10 epochs) of 256 of 60000 examples on average, Poisson sampling
    noise multiplier 0.74217
    epsilon 3 at delta 1e-05 (RDP accountant, neighbours: one example more or less)

    Give two of length (``epochs`` or ``steps``), ``epsilon`` and ``noise_multiplier``. Noise is solved upward and
    length downward, so that the promise holds. With all three, they are checked against each other.

    Args:
        examples: the size of the dataset, which is public.
        users: in place of examples: how many users there are, whose data are protected as a whole. All else that is
            said of examples is then said of users (docs/private-training.md).
        items_per_user: how many items of a user a step takes at most; all, if it is left out. It changes no promise.
        batch_size: the expected size of a batch: every example is in it with probability batch_size / examples.
        delta: the probability with which the promise may fail; far below 1 / examples. A plan of length and noise can
            leave it out: epsilon is then asked for at a delta when a run reports, by `Private.spent`.
        epochs: the length, as expected passes over the dataset.
        steps: the length, as optimizer steps.
        epsilon: the budget.
        noise_multiplier: the noise's standard deviation over the sensitivity of the sum. 0 gives no privacy at all.
        noise_schedule: factors of the noise multiplier, each for an equal share of the steps: ``(1.0, 0.75, 0.5)``, or
            of `dp.schedules`. Every step is accounted for with its own noise.
        accountant: "pld" (privacy loss distributions: tight) or "rdp" (Rényi: a looser bound, fast).
        sampling: "poisson", or "shuffled": batches of equal size, every example once in an epoch. Nothing is gained by
            sampling then: an epoch costs as much as one step on all examples, and as neighbours differ in one example
            replaced, the sensitivity is twice as large. Or "cyclic": the same batches of nearly equal size, in the same
            order in every epoch; every example has a place, and neighbours differ in one that is empty.
        mechanism: "gaussian": noise that is independent in all steps (DP-SGD); or noise that later steps take away
            again in part: "banded" or "blt" (docs/correlated-noise.md).
        bands: of "banded": over how many steps noise is correlated; by default, what gives the least expected error.
            With Poisson sampling the examples are in so many parts, and each batch comes from the next of them.
        buffers: of "blt": how many vectors of the parameters' size are kept; 3 by default.
        momentum: of the optimizer (SGD), for which correlated noise is optimised. It changes no promise.
    """

    examples: int = 0
    users: int | None = None
    items_per_user: int | None = None
    batch_size: int
    delta: float | None = None
    epochs: float | None = None
    steps: int | None = None
    epsilon: float | None = None
    noise_multiplier: float | None = None
    noise_schedule: Sequence[float] | None = None
    accountant: Accountant = "pld"
    sampling: Sampling = "poisson"
    mechanism: MechanismName = "gaussian"
    bands: int | None = None
    buffers: int | None = None
    momentum: float = 0.0
    solved: str | None = field(default=None, init=False, repr=False, compare=False)  # the name of what was left out

    def __post_init__(self) -> None:
        self._set("examples", units(self))
        self._check_numbers()
        self._check_length()
        self._check_privacy()
        if self.delta is not None:
            warn_of_large(self.delta, self.examples, self._one)
        if self.epochs is not None:
            self._set("steps", max(1, math.ceil(self.epochs * self.steps_per_epoch - 1e-9)))
        missing = [name for name in ("steps", "epsilon", "noise_multiplier") if getattr(self, name) is None]
        if len(missing) > 1:
            raise ValueError(
                f"a plan needs two of length (epochs or steps), epsilon and noise_multiplier, and solves for the "
                f"third; missing are {' and '.join(missing)}"
            )
        check_needed(self.delta, missing)
        check_settings(self, solves_steps="steps" in missing)
        if self.noise_schedule is not None:
            self._set("noise_schedule", schedules.checked(self.noise_schedule, "noise_schedule"))
            schedules.check_goes_with(self.sampling, self.mechanism, solves_steps="steps" in missing)
        if self.mechanism == "banded" and self.bands is None:
            self._set("bands", self._best_bands())
        if self.mechanism == "blt":
            self._set("buffers", self.buffers or _BUFFERS)
        if not missing:
            self._check_promise()
        for name in missing if self.delta is not None else []:
            getattr(self, f"_solve_{name}")()
            self._set("solved", name)
        if (self.bands or 1) > self.length:
            raise ValueError(f"bands {self.bands} are more than the {self.length} steps: use fewer")
        self._set("epochs", self.length / self.steps_per_epoch)

    def _check_numbers(self) -> None:
        for name in ("examples", "batch_size", "steps"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value, int) and value >= 1):
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        for name in ("epochs", "epsilon", "noise_multiplier"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value, int, float) and value >= 0):
                raise ValueError(f"{name} must be a number that is not negative, not {value!r}")

    def _check_length(self) -> None:
        if self.batch_size > self.examples:
            raise ValueError(f"batch_size {self.batch_size} is larger than the dataset of {self.examples} {self._one}s")
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"length is given twice: epochs={self.epochs} and steps={self.steps}; leave one out")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be positive and finite, not {self.epochs}")

    def _check_privacy(self) -> None:
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError("epsilon must be positive: with epsilon 0 nothing may be learnt")
        if self.noise_multiplier == math.inf:
            raise ValueError("noise_multiplier must be finite")
        if self.delta is not None:
            check_delta(self.delta)
        if self.accountant not in ACCOUNTANTS:
            raise ValueError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {self.accountant!r}")

    @property
    def _one(self) -> str:
        return name_of_one(self)

    @classmethod
    def like(cls, loader: DataLoader[Any], **settings: Any) -> Plan:
        """A plan for as many examples, batches of the size and epochs of as many steps as a DataLoader has.

        >>> import torch
        >>> from persample import dp
        >>> data = torch.utils.data.TensorDataset(torch.randn(1000, 5), torch.randint(3, (1000,)))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
        >>> plan = dp.Plan.like(loader, epochs=2, epsilon=3.0, delta=1e-5, accountant="rdp")
        >>> plan.examples, plan.batch_size, plan.steps
        (1000, 64, 30)

        Args:
            loader: of a map-style dataset; `Private.epochs` and `Private.batches` take it, too, with its options.
            settings: as for a `Plan`.
        """
        return cls(**planned(loader, settings))

    @property
    def rate(self) -> float:
        """The probability with which an example is in a batch; with bands, in one that its part is asked for."""
        return min(1.0, self.batch_size / self.examples * (self.bands or 1))

    @property
    def steps_per_epoch(self) -> float:
        """How many steps see every example once, or once on average."""
        ratio = self.examples / self.batch_size
        return ratio if self.sampling == "poisson" else float(math.ceil(ratio))

    @property
    def length(self) -> int:
        """The number of steps, given or solved."""
        assert self.steps is not None
        return self.steps

    @property
    def noise(self) -> float:
        """The noise multiplier, given or solved."""
        assert self.noise_multiplier is not None
        return self.noise_multiplier

    def noise_at(self, step: int) -> float:
        """The noise multiplier of a step, counted from 0."""
        if self.noise_schedule is None:
            return self.noise
        return self.noise * schedules.factor_at(self.noise_schedule, step, self.length)

    @property
    def budget(self) -> float:
        """The epsilon that is promised, given or solved."""
        assert self.epsilon is not None
        return self.epsilon

    @property
    def contributions(self) -> int:
        """How far one example can move a sum, as a multiple of what one sample may add: 2 where it is replaced."""
        return 2 if self.sampling == "shuffled" else 1

    @property
    def encoder(self) -> Encoder:
        """What noise is correlated by; one band is no correlation at all."""
        if self.mechanism == "blt":
            assert self.buffers is not None
            return buffered(self.buffers, self.length, self.momentum, int(self.steps_per_epoch))
        return banded(self.bands or 1, self.length, self.momentum)

    @property
    def expected_error(self) -> float:
        """The noise in the sum of all gradients so far, as a multiple of the clip's sensitivity.

        It is the standard deviation on a coordinate, in root mean square over all steps. With momentum, of the sum that
        the optimizer makes.
        """
        if self.noise_schedule is not None:
            return self.noise * schedules.expected_error(self.noise_schedule, self.length, self.momentum)
        return self.noise * self.contributions * self.encoder.error

    def dp_sgd(self) -> Plan:
        """The plan with independent noise and Poisson sampling that promises the same, to compare with.

        It promises more where a noise multiplier of 1/64 would do: none below 1/32 is looked for then.
        """
        if self.delta is None:
            raise ValueError("plans that promise the same do so at a delta: give this one a delta to compare it")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a delta that this plan has warned of
            return replace(
                self,
                mechanism="gaussian",
                sampling="poisson",
                bands=None,
                buffers=None,
                epochs=None,
                noise_multiplier=None if self.budget < math.inf else 0.0,
            )

    def spent(self, steps: int, passes: int | None = None, delta: float | None = None) -> float:
        """The epsilon after so many steps; with shuffled batches, passes that were begun count.

        It is at the plan's delta, or at another.
        """
        if self.sampling == "shuffled" and passes is None:
            passes = math.ceil(steps / self.steps_per_epoch)
        return self._epsilon(steps, self.noise, passes, delta)

    def delta_for(self, delta: float | None = None) -> float:
        """The delta at which epsilon is asked for: this one, or the plan's."""
        return asked(self.delta, delta)

    def _epsilon(self, steps: int, noise: float, passes: int | None = None, delta: float | None = None) -> float:
        delta = self.delta_for(delta)
        if self.noise_schedule is not None:
            counts = schedules.counts(self.noise_schedule, steps, self.length)
            each = tuple((count, noise * factor) for factor, count in counts.items())
            return epsilon_of_all(each, self.rate, delta, self.accountant)
        if self.sampling == "poisson":
            return epsilon(math.ceil(steps / (self.bands or 1)), self.rate, noise, delta, self.accountant)
        if self.sampling == "cyclic":
            often = self._participations(steps)
            return epsilon(1, 1.0, noise / math.sqrt(often), delta, self.accountant) if steps else 0.0
        passes = math.ceil(steps / self.steps_per_epoch) if passes is None else passes
        return epsilon(passes, 1.0, noise, delta, self.accountant)

    def _participations(self, steps: int) -> float:
        """How often an example takes part in so many steps of cyclic batches."""
        if self.mechanism == "blt":
            return self.encoder.participations(steps, int(self.steps_per_epoch))
        return math.ceil(steps / self.steps_per_epoch)

    def _best_bands(self) -> int:
        """Those with the least expected error, for the epsilon that is given, or that independent noise would have."""
        if self.sampling == "cyclic" or self.noise_multiplier == 0:
            return best_bands(self.length, most_bands(self), self.momentum, lambda bands: 1.0)
        if (delta := self.delta) is None:
            raise ValueError("which bands are best depends on delta: give delta, or bands")

        def spent(bands: int, noise: float) -> float:  # by the faster accountant: for a choice, it is good enough
            return epsilon(math.ceil(self.length / bands), min(1.0, self.rate * bands), noise, delta, "rdp")

        budget = spent(1, self.noise) if self.epsilon is None else self.budget
        return best_bands(
            self.length,
            most_bands(self),
            self.momentum,
            lambda bands: least_noise(lambda noise: spent(bands, noise), budget),
        )

    def _solve_epsilon(self) -> None:
        self._set("epsilon", self._epsilon(self.length, self.noise))

    def _solve_noise_multiplier(self) -> None:
        noise = least_noise(lambda noise: self._epsilon(self.length, noise), self.budget)
        if noise is None:
            raise ValueError(
                f"no noise keeps epsilon {self.budget:g} at delta {self.delta:g} over {self.length} steps by the "
                f"{self.accountant.upper()} accountant: allow a larger epsilon, or fewer steps"
            )
        self._set("noise_multiplier", _rounded_up(noise))

    def _solve_steps(self) -> None:
        steps = most_steps(lambda steps: self._epsilon(steps, self.noise), self.budget, _MOST_STEPS)
        if not steps:
            one = self._epsilon(1, self.noise)
            raise ValueError(
                f"a single step with noise_multiplier {self.noise:g} already spends epsilon {one:.4g} of "
                f"{self.budget:g}: use more noise, a smaller batch_size or a larger epsilon"
            )
        if steps == _MOST_STEPS:
            raise ValueError(
                f"with noise_multiplier {self.noise:g}, epsilon {self.budget:g} lasts for more than {_MOST_STEPS} "
                f"steps: state steps or epochs, and solve for the noise or epsilon"
            )
        self._set("steps", steps)

    def _check_promise(self) -> None:
        spent = self._epsilon(self.length, self.noise)
        if spent > self.budget:
            raise ValueError(
                f"the plan contradicts itself: {self.length} steps with noise_multiplier {self.noise:g} spend epsilon "
                f"{spent:.4g}, more than {self.budget:g}. Leave one of the three out to have it solved"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def as_dict(self) -> dict[str, Any]:
        """Everything that the accounting depends on, to be stored and compared."""
        schedule = self.noise_schedule
        return {**asdict(self), "noise_schedule": None if schedule is None else list(schedule)}

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Where another plan, as a dict, promises something else than this one, or was kept in another way.

        What was given has to be the same. What was solved for may differ as much as solving does from one machine or
        version of the accounting to another, as long as this plan's value neither spends more than the other promised,
        nor counts less than its steps have spent.
        """
        own = self.as_dict()
        names = [f.name for f in fields(self) if f.name not in ("solved", "epochs")]  # epochs follow from steps
        wrong = [name for name in names if isinstance(other.get(name), bool) or other.get(name) != own[name]]
        if wrong == [self.solved] == [other.get("solved")] and _close(wrong[0], own[wrong[0]], other[wrong[0]]):
            return []
        remedy = " (solved for: to keep the old value, give it with the other two)" if wrong == [self.solved] else ""
        return [f"{name}={other.get(name)!r} instead of {own[name]!r}{remedy}" for name in wrong]

    def __str__(self) -> str:
        return in_words(self)


def _is_number(value: object, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _close(name: str, own: float, other: object) -> bool:
    """Whether a solved value may stand for another, with which a part of the steps was made.

    With fewer steps less is spent; less noise is what all steps are accounted with, and was solved to keep the promise.
    """
    if not isinstance(other, (int, float)) or not math.isfinite(other):
        return False
    above = _ROUNDING if name == "epsilon" else 0.0
    return other * (1 - CLOSE) - (name == "steps") <= own <= other * (1 + above)


def _rounded_up(value: float) -> float:
    """Rounded upward to five digits: what is printed is what is used."""
    scale = 10.0 ** (4 - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale

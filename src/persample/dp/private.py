"""Private training: batches as the accounting assumes, and steps that are accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.read.compiled import break_graph
from ..reductions import ClippedSum
from .adam import check_noise, tell_noise
from .binding import Binding, mark, trainable
from .books import Books
from .clippers import Clip, check_can_be_compiled, clipper
from .compiled import CompiledSums
from .early import Early
from .epochs import epochs
from .errors import PrivacyError
from .fingerprints import alike
from .given import Given
from .gradients import Gradients
from .guard import Guard
from .kept_noise import KeptNoise
from .ledger import Ledger
from .loaders import merged, taken_apart
from .masters import Masters
from .mechanism import Mechanism
from .plan import Plan
from .records import Spent, Step
from .releases import Copied, Releases
from .runs import RUNS, warn_of
from .sampling import BatchPart, Sampler, check_counts, check_data, check_stepped, loader, most_samples
from .sources import make_source
from .state import Checkpoint, load, read
from .steady import Steady
from .sums import Clipped
from .team import Team
from .teams import team_of
from .world import World


class Private:
    """Trains a model with differential privacy.

    >>> import torch, persample as ps
    >>> from persample import dp
    >>> from torch.nn import functional as F
    >>> _ = torch.manual_seed(0)
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 5), torch.randint(3, (100,)))
    >>> model = torch.nn.Linear(5, 3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> plan = dp.Plan(examples=100, batch_size=10, epochs=2, noise_multiplier=1.0, delta=1e-3, accountant="rdp")
    >>> private = dp.Private(model, optimizer, plan, clip=ps.ClippedSum(1.0))
    >>> for x, y in private.batches(data):
    ...     step = private.step(F.cross_entropy(model(x), y, reduction="none"))
    >>> print(private.spent())
    epsilon 2.716 at delta 0.001 after 20 steps

    Args:
        model: its trainable parameters are trained, in bfloat16, float32 or wider. It is not changed; while the run
            lives, hooks on these parameters tell of other backwards.
        optimizer: any of ``torch.optim`` (but LBFGS) that holds those parameters.
        plan: a `Plan`.
        clip: a ``ps.ClippedSum``, flat, per group or automatic, an `AdaptiveClip` or a `ScheduledClip`.
        secure: draw samples and noise from keys of the operating system, which nobody can foretell: by default, unless
            there is a seed.
        seed: for tests: draw the same samples and noise in every run that is set up alike, whatever its data; then they
            are as secret as the seed, and the difference of two such runs has no noise.
        check_every: after the first two steps, how often to re-run sub-batches in search of samples that interact;
            0 for never.
        journal: a file to which every step is written before it is released. If it exists, the run goes on: what it
            counts is spent. One run keeps it at a time.
        team: the processes that train together. By default all of ``torch.distributed``'s default group, if it is
            initialised: `Shards` for a model of FSDP2, else `Replicas`; and one alone if not (``dp.Team()``).
        compile: a function from a batch to one loss per sample, (B,). `step` and `backward` then take the batch in
            place of losses, and losses and clipped sums are computed by one compiled graph, as by ``ps.compile``. For
            one process.
        backend: what compiles, as for ``ps.compile``.
        masters: keep a float32 copy of every parameter in bfloat16, which the optimizer steps in its place; False if
            the optimizer keeps such copies itself.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        clip: Clip | None = None,
        *,
        secure: bool | None = None,
        seed: int | None = None,
        check_every: int = 100,
        journal: str | PathLike[str] | None = None,
        team: Team | None = None,
        compile: Callable[..., Tensor] | None = None,
        backend: str | Callable[..., Any] = "inductor",
        masters: bool = True,
    ) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a dp.Plan, not a {type(plan).__name__}")
        params = trainable(model)
        self._model, self._optimizer, self._plan = model, optimizer, plan
        self._team, self._world = team_of(model) if team is None else team, World(team is not None)
        self._clip = ClippedSum(1.0) if clip is None else clip
        self._clipper = clipper(self._clip, params, plan)
        self._binding = Binding(model, optimizer, self._clipper)
        self._source = Early(make_source(secure, seed, self._team.agree, self._binding.setup(plan)))
        self._ledger, self._releases = Ledger(plan), Releases()
        self._guard, self._steady = Guard(model, check_every if self._team.reruns else 0), Steady()
        self._gradients = Gradients(self, model, optimizer, params, after_step=self._after_step)
        self._masters = Masters(self, params, optimizer, keep=masters)
        check_noise(optimizer, plan)
        self._mechanism = Mechanism(plan, self._clipper, self._team, self._binding.params)
        check_can_be_compiled(compile, plan, self._team, self._clipper)
        self._compiled = compile and CompiledSums(compile, model, params, self._clipper, plan, backend)
        self._physical = most_samples(plan)  # how many samples there may be in a part of a batch
        self._part: BatchPart | None = None  # yielded, and not stepped yet
        self._marked, self._calls = 0, 0  # tensors that had been made by then; calls of batches()
        self._warned = False  # of earlier runs
        self.dropped = 0  # samples that were not finite, in all steps
        self._books = Books(self._ledger, self._clipper, self._team)
        self._noise = KeptNoise(self._mechanism.stream, self._ledger, self._team)
        if self._books.open(journal):
            self._renew()
            self._noise.forget("a journal does not have it")  # which `batches` says, if nothing is resumed before

    def __reduce_ex__(self, _: object) -> tuple[type, tuple[()]]:
        """Copies and pickles hold no more than a word about it: a run is one."""
        return Copied, ()

    @property
    def plan(self) -> Plan:
        """The plan, which stays."""
        return self._plan

    @property
    def clip(self) -> Clip:
        """The clip, which stays."""
        return self._clip

    @property
    def bound(self) -> float | list[float] | None:
        """The bound on a sample's gradient in the next step, where it moves; a list of those of groups."""
        return list(bound) if isinstance(bound := self._clipper.bound, list) else bound

    @property
    def steps(self) -> int:
        """Steps that are accounted for, those with empty batches included."""
        return self._ledger.steps

    def spent(self, delta: float | None = None) -> Spent:
        """What is spent so far, by the plan's accountant.

        Args:
            delta: at which epsilon is asked for; by default the plan's, which is what was promised.
        """
        return Spent(self._ledger.spent(delta), self.plan.delta_for(delta), self._ledger.steps)

    def epochs(self, data: Any, **options: Any) -> Iterator[Iterator[Any]]:
        """The batches of one epoch after another, until the plan's steps are done.

        ``for epoch in private.epochs(loader): for x, y in epoch: ...`` has a turn of the outer loop for every
        epoch.

        An epoch has as many steps as the loader has batches, or as see every example once, on average. A resumed run
        begins with what is left of its epoch.

        Args:
            data: as for `batches`: a dataset, or a ``DataLoader``.
            options: as for `batches`, but for ``steps``.
        """
        return epochs(self.batches, self._ledger, data, options)

    def batches(
        self,
        data: Any,
        *,
        users: Any = None,
        physical_batch_size: int | None = None,
        steps: int | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """Batches of a map-style dataset, sampled as the plan says, until its steps are done.

        `step` must follow each of them, but the last one before the loop is left. Batches vary in size. In place of an
        empty one the first example is yielded, and does not count: its step is of noise alone.

        Args:
            data: a dataset with a length, ``plan.examples``, and items by index; or a ``DataLoader`` of one, whose
                options are used, and whose batch size must be the plan's. Its batches are sampled anew, as the plan
                says.
            users: where the plan is for users: whose each item is, a tensor, array or list of integers or strings. A
                batch has the items of its users, and `step` takes one loss for each item, adds up those of a user, and
                clips the gradient of that.
            physical_batch_size: yield larger batches in parts of this size, each with a `step` of its own; the
                optimizer steps after the last part. All items of a user are in one part.
            steps: stop after so many steps, for instance at the end of an epoch; call again to go on.
            options: as for a ``DataLoader``: ``collate_fn``, ``num_workers``, ``pin_memory`` and others.
        """
        self._world.check()
        self._releases.check()
        data, given = taken_apart(data, self.plan.batch_size if self.plan.users is None else None)
        check_counts(physical_batch_size=physical_batch_size, steps=steps)
        whose = check_data(data, self.plan, users, physical_batch_size)
        earlier = RUNS.enter(self._ledger, self._model, data)
        self._warned = self._warned or warn_of(earlier, self._ledger)
        self._noise.warn()
        self._calls += 1
        self._part = None
        self._physical = min(most_samples(self.plan), physical_batch_size or most_samples(self.plan))
        self._mechanism.sums.clear()
        count = self._ledger.left if steps is None else min(steps, self._ledger.left)
        sampler = Sampler(self.plan, self._source, self._team, self._ledger.steps, count, physical_batch_size, whose)
        loaded = loader(data, sampler, merged(given, options))
        return self._go_through(loaded, sampler, self._calls)

    def _go_through(self, loaded: Any, sampler: Sampler, call: int) -> Iterator[Any]:
        for batch in loaded:
            self._check_turn(call)
            self._expect(sampler.parts.popleft())
            yield batch
        self._check_turn(call)

    def _check_turn(self, call: int) -> None:
        self._releases.check()
        if call != self._calls:
            raise PrivacyError("batches was called again since: the earlier loop cannot go on")
        check_stepped(self._part)

    def _expect(self, part: BatchPart) -> None:
        self._part, self._marked = part, mark() if self._compiled is None else 0
        self._masters.hide()
        self._clipper.begin(part.step)
        self._gradients.begin()
        self._steady.watch(self._binding.every())
        self._guard.watch(part.step)

    def _after_step(self) -> None:
        """If a batch waits, the optimizer has applied the gradients of the one before."""
        self._masters.hide()
        self._steady.stepped()
        if self._part is not None:
            self._steady.watch(self._binding.every())

    @break_graph
    def step(self, *given: Any, **options: Any) -> Step:
        """Clip, sum and add noise, then ``optimizer.step()``; all of it accounted for before.

        Args:
            given: ``losses``, one per sample of the batch just yielded, in its order, with their graph. With
                ``compile=`` the batch itself, as the function that was given takes it.
            options: arguments by name, likewise.

        Returns:
            A `Step`: what became of the batch.
        """
        record = self.backward(*given, **options)
        if record.updated:
            try:
                self._optimizer.step()
            finally:
                self._masters.hide()
            self._optimizer.zero_grad()
        return record

    @break_graph
    def backward(self, *given: Any, **options: Any) -> Step:
        """The first half of `step`: the noisy mean gradient into ``p.grad``, for loops that step by themselves.

        ``p.grad`` is overwritten, and only if the record returned says ``updated``.
        """
        with self._together():
            return self._backward(Given.of(given, options, compiled=self._compiled is not None))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """An error in one process is one in all of them: others may have counted the step."""
        try:
            with self._team.together(lambda: alike(self._binding.params, self._optimizer)):
                yield
        except BaseException:
            if self._team.size > 1:
                self._releases.stop()
            raise

    def _backward(self, given: Given) -> Step:
        self._releases.check()
        part = self._part
        if part is None:
            raise PrivacyError("no batch waits for a step: losses must come from a batch of private.batches, once each")
        if self._compiled is None:
            given.check(part.items, self._marked)
        elif self._guard.is_due and not self._is_left_out(part):
            self._compiled.show(given, part.size)  # to the guard, which sees what Python runs
        self._guard.hold()
        if part.last and self._team.size == 1:
            self._source.begin(self._releases.upcoming, self._mechanism.drawn_on_host(self._source))
        sums = self._of_batch(given, part)
        self._world.check()
        every = self._binding.check()
        self._gradients.check(self._optimizer)
        self._steady.check(every)
        self._guard.check(part.items, part.sizes)
        clipped, dropped = self._add(given, sums, part)
        self._part = None
        self.dropped += dropped
        if part.last:
            self._release(part)
        return Step(part.step + 1, part.last, part.size - part.padding, clipped, dropped)

    def _is_left_out(self, part: BatchPart) -> bool:
        """Whether no sample counts, and nobody waits for a backward."""
        return part.padding == part.size and not self._team.lockstep

    def _of_batch(self, given: Given, part: BatchPart) -> Clipped | None:
        """The clipped sums of a batch, where steps are compiled."""
        if self._compiled is None or self._is_left_out(part):
            return None
        return self._compiled.sums(given, part, self._clipper, self._physical, varies=self.plan.rate < 1)

    def _add(self, given: Given, sums: Clipped | None, part: BatchPart) -> tuple[float, int]:
        """Clip and add up; the share of samples that were weighed down, and how many were left out as not finite."""
        if self._is_left_out(part):
            return 0.0, 0
        if sums is None:
            sums = self._mechanism.clipped(part.per_sample(given.losses), part.padding)
        count, dropped = self._clipper.count(sums.asked), len(sums.clipping.dropped)
        self._part = None  # first: what may have been added must not be added again
        clipped = self._mechanism.sums.add(sums, count)
        self._mechanism.sums.check_reached()
        return clipped, dropped

    def _release(self, part: BatchPart) -> None:
        """Account, then add noise and write ``p.grad``: all of it, or nothing more until the run is resumed."""
        with self._releases.one() as number:
            sums = self._mechanism.take()
            with self._team.accounting():
                self._ledger.account(part.opens_pass)
            means = self._mechanism.noisy_means(sums, self._source, number, self._ledger.steps - 1)
            self._gradients.released()
            self._steady.released()
            self._mechanism.give(means)
            self._clipper.begin(self._ledger.steps)
        tell_noise(self._optimizer, self._mechanism.noise_std)

    def state_dict(self) -> dict[str, Any]:
        """The accounts, and what they are bound to: numbers, strings, lists and dicts, no tensors.

        Model and optimizer have states of their own; `save` keeps all three in one file.
        """
        return Checkpoint.of(self._ledger, self._binding, self.bound, self.dropped).as_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: what it has spent is spent, and no noise of before is drawn again."""
        checkpoint = Checkpoint.from_dict(state)
        checkpoint.check(self._ledger, self._binding)
        self._books.take_up(checkpoint)
        self.dropped = max(self.dropped, checkpoint.dropped)
        self._renew()
        self._noise.forget("a state_dict does not have it")
        self._noise.warn()

    def _renew(self) -> None:
        """Random numbers that no earlier process has seen, and no half of a batch."""
        self._releases.stop()  # until all processes agree
        self._source.renew()
        self._source.nonce = self._team.agree(self._source.nonce)
        self._calls, self._part = self._calls + 1, None
        self._mechanism.sums.clear()
        self._clipper.begin(self._ledger.steps)
        self._releases.renew()

    def save(self, path: str | PathLike[str]) -> None:
        """Model, optimizer and accounts in one safetensors file, which is replaced as a whole or not at all.

        The first save begins a journal beside it, if there is none yet: steps from then on are on disk before they are
        released, and count when the run is resumed from this file or an earlier one. Where noise is correlated, what it
        has to remember is written to another file, ``<path>.noise``, which must be kept as secret as the data.
        """
        with self._masters.shown():
            states = self._team.states(self._model, self._optimizer)
        self._books.save(path, self.state_dict(), states)
        self._noise.save(path)

    def resume(self, path: str | PathLike[str]) -> None:
        """Load what `save` has written into the model, the optimizer and these accounts, and what the journal says."""
        checkpoint, journal, states = read(path)
        checkpoint.check(self._ledger, self._binding)
        self._books.resume(path, journal, checkpoint)
        self._releases.stop()  # until all of it is loaded
        with self._masters.shown():
            load(path, lambda loaded: self._team.load_states(self._model, self._optimizer, loaded), states)
        self.dropped = max(self.dropped, checkpoint.dropped)
        self._renew()
        self._noise.resume(path, checkpoint.steps)
        self._noise.warn()

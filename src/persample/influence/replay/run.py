"""Going through a recorded run backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...shortcuts import dot
from ...verbs import grad
from ..files import load_plain, save_whole
from ..in_run import evaluated
from ..subject import copied_state
from ..time_left import counted
from ..twice import differentiable_twice
from .randomness import random_state, set_random_state
from .recording import check_state
from .updates import Adjoint, Numbers, kept_names

LossesFn = Callable[[nn.Module, Any], Tensor]
_CLOSE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
}  # relative: what rounding in another order may change in a few steps


class ReplayError(RuntimeError):
    """A run that, gone through again, is not the one that was recorded."""


def replay(
    folder: str | Path,
    model: nn.Module,
    losses_fn: LossesFn,
    queries: Any,
    *,
    data: Callable[[Tensor], Any] | None = None,
    examples: int | None = None,
    resume_from: str | Path | None = None,
    progress: bool | None = None,
) -> Tensor:
    """How every training example changed every query's loss, through the whole of a recorded run.

    The score of example i for query q is minus the derivative of q's loss at the end of the run with respect to the
    weight of i, wherever it came: 1 is how it was trained, 0 is without it (in a batch of the same size). Positive
    scores are of helpful examples; the sum over removed examples predicts by how much a loss rises without them.

    Args:
        folder: what a `Recording` has written.
        model: the model that was trained; it is as before afterwards.
        losses_fn: as given to the recording.
        queries: a batch for ``losses_fn``, in evaluation mode; Q losses. The work grows with Q, and so does memory: a
            few times Q times the parameters.
        data: from ids to a batch, if the batches themselves were not kept.
        examples: how many examples there are; by default, the largest id and 1.
        resume_from: a file for intermediate results, written after every checkpoint; if there, work goes on from it.
        progress: show how far it is; by default in terminals.

    Returns:
        (Q, examples), on the CPU, in the parameters' dtype (float32 or wider).
    """
    run = _Run.opened(Path(folder), model, losses_fn, data)
    kept, modes, random = copied_state(model), _modes(model), random_state()
    grads = [(p, p.grad) for p in model.parameters()]
    try:
        return run.scores(queries, examples, None if resume_from is None else Path(resume_from), progress)
    finally:
        model.load_state_dict(kept)
        _set_modes(model, modes)
        set_random_state(random)
        for p, own in grads:
            p.grad = own


@dataclass
class _Moment:
    """Parameters, and what the optimizer keeps of them, before a step."""

    parameters: dict[str, Tensor]
    kept: dict[str, Numbers]


@dataclass
class _Run:
    folder: Path
    model: nn.Module
    losses_fn: LossesFn
    data: Callable[[Tensor], Any] | None
    kind: str
    params: dict[str, nn.Parameter]
    starts: list[int]  # the first step of each stretch between two checkpoints
    end: int

    @classmethod
    def opened(cls, folder: Path, model: nn.Module, losses_fn: LossesFn, data: Callable[[Tensor], Any] | None) -> _Run:
        starts = sorted(int(path.stem.split("-")[1]) for path in folder.glob("steps-*.pt"))
        if not starts:
            raise FileNotFoundError(f"{folder} holds no recorded run: make one with Recording, and close() it")
        states = sorted(int(path.stem.split("-")[1]) for path in folder.glob("state-*.pt"))
        missing = [step for step in starts if step not in states]
        if missing or states[-1] <= starts[-1]:
            raise ValueError(f"{folder} lacks checkpoints (of step {missing or 'the end'}): the run was not closed")
        path = folder / f"state-{states[0]:08}.pt"
        first = load_plain(path)
        check_state(first, None, None, path)
        named = dict(model.named_parameters())
        unknown = [name for name in first["names"] if name not in named]
        if unknown:
            raise ValueError(f"the recorded run trained {unknown}, which this model does not have")
        params = {name: named[name] for name in first["names"]}
        return cls(folder, model, losses_fn, data, first["kind"], params, starts, states[-1])

    def scores(self, queries: Any, examples: int | None, partial: Path | None, progress: bool | None) -> Tensor:
        adjoint, losses = self._at_the_end(queries)
        dtype = torch.promote_types(torch.float32, losses.dtype)
        scores, left = torch.zeros(len(losses), examples or 0, dtype=dtype), len(self.starts)
        if partial is not None and partial.exists():
            scores, adjoint, left = _resumed(load_plain(partial), losses, self.end, partial, self.params)
        done = self.end - ([*self.starts, self.end][left])
        with counted("replay", self.end, done=done, show=progress) as advance:
            for index in reversed(range(left)):
                scores = self._through(index, adjoint, scores, examples, advance)
                if partial is not None:
                    save_whole(_to_resume(scores, adjoint, index, losses, self.end), partial)
        return scores

    def _at_the_end(self, queries: Any) -> tuple[dict[str, Adjoint], Tensor]:
        self._load(self.end)
        with evaluated(self.model), torch.enable_grad():
            losses = self.losses_fn(self.model, queries)
            rows = grad(losses, self._moving)
        frozen = {n: p.new_zeros(len(losses), *p.shape) for n, p in self.params.items() if n not in rows}
        adjoint = {name: Adjoint((rows | frozen)[name].clone(), {}) for name in self.params}
        return adjoint, losses.detach().cpu()

    @property
    def _moving(self) -> dict[str, nn.Parameter]:
        """The parameters that are not frozen: an optimizer may have others, which it leaves as they are."""
        return {name: p for name, p in self.params.items() if p.requires_grad}

    def _through(
        self,
        index: int,
        adjoint: dict[str, Adjoint],
        scores: Tensor,
        examples: int | None,
        advance: Callable[[], None],
    ) -> Tensor:
        """Back through one stretch, whose states are computed again first."""
        start, notes, moments = self._recomputed(index)
        for step in reversed(range(len(notes))):
            note = notes[step]
            products = self._back(note, moments.pop(), adjoint)
            scores = _added(scores, note["ids"], products, examples, start + step)
            advance()
        return scores

    def _recomputed(self, index: int) -> tuple[int, list[dict[str, Any]], list[_Moment]]:
        start, stop = self.starts[index], [*self.starts, self.end][index + 1]
        notes: list[dict[str, Any]] = load_plain(self.folder / f"steps-{start:08}.pt")
        if len(notes) != stop - start:
            raise ValueError(f"{self.folder}: steps {start} to {stop} are not all there; {len(notes)} are")
        optimizer = self._optimizer(self._load(start), notes[0])
        moments = []
        for note in notes:
            moments.append(self._moment(optimizer))
            with torch.enable_grad():
                losses = self._losses(note)
                found = torch.autograd.grad(losses.mean(), list(self._moving.values()), allow_unused=True)
            grads = dict(zip(self._moving, found, strict=True))
            for (name, p), options in zip(self.params.items(), _options(note), strict=True):
                p.grad = grads.get(name)
                group = next(group for group in optimizer.param_groups if group["name"] == name)
                group.update(options)
            optimizer.step()
        optimizer.zero_grad()
        self._compare(self._moment(optimizer), stop)
        return start, notes, moments

    def _optimizer(self, state: dict[str, Any], note: dict[str, Any]) -> torch.optim.Optimizer:
        """The optimizer of a checkpoint, with one group for each parameter."""
        groups = [{"params": [p], "name": name} for name, p in self.params.items()]
        optimizer: torch.optim.Optimizer
        optimizer = torch.optim.SGD(groups, lr=0.0) if self.kind == "sgd" else torch.optim.Adam(groups, lr=0.0)
        order = [index for group in state["optimizer"]["param_groups"] for index in group["params"]]
        for index, p in zip(order, self.params.values(), strict=True):
            own = state["optimizer"]["state"].get(index, {})
            for key, value in own.items():
                moved = value.to(p.device) if isinstance(value, Tensor) and key != "step" else value
                optimizer.state[p][key] = moved.clone() if isinstance(moved, Tensor) else moved
        return optimizer

    def _moment(self, optimizer: torch.optim.Optimizer) -> _Moment:
        kept = {}
        for name, p in self.params.items():
            own = optimizer.state.get(p, {})
            kept[name] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in own.items() if v is not None}
        return _Moment({name: p.detach().clone() for name, p in self.params.items()}, kept)

    def _compare(self, found: _Moment, step: int) -> None:
        """Is what was computed again what was recorded?"""
        recorded = load_plain(self.folder / f"state-{step:08}.pt")["model"]
        for name, p in found.parameters.items():
            want = recorded[name].to(p.device)
            error = float((p - want).norm() / want.norm().clamp_min(1e-30)) if p.numel() else 0.0
            if not error <= _CLOSE.get(p.dtype, 1e-2):
                raise ReplayError(
                    f"steps up to {step}, run again, give another {name!r} than was recorded (relative difference "
                    f"{error:.1e}): data in another order, other losses, clipped gradients or a second backward before "
                    f"optimizer.step(), or operations that are not deterministic "
                    f"(torch.use_deterministic_algorithms(True) finds them)"
                )

    def _back(self, note: dict[str, Any], moment: _Moment, adjoint: dict[str, Adjoint]) -> Tensor:
        """Move the adjoint to before a step; (B, Q): what each example of the step adds to the derivatives."""
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(moment.parameters[name])
        with torch.enable_grad(), differentiable_twice():
            losses, moving = self._losses(note), self._moving
            found = torch.autograd.grad(losses.mean(), list(moving.values()), create_graph=True, allow_unused=True)
            reached = {n: g for n, g in zip(moving, found, strict=True) if g is not None}
            towards = self._pulled(note, moment, adjoint, reached)
            if not towards:
                return losses.new_zeros(len(losses), len(next(iter(adjoint.values())).parameter))
            products = dot(losses, {name: self.params[name] for name in towards}, towards, retain_graph=True)
            self._add_curvature(reached, towards, adjoint)
        return products / len(losses)

    def _pulled(
        self, note: dict[str, Any], moment: _Moment, adjoint: dict[str, Adjoint], reached: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The adjoints of the gradients of a step; parameters that it did not reach, it has not changed."""
        towards = {}
        for name, options in zip(self.params, _options(note), strict=True):
            if name not in reached:
                continue
            own = adjoint[name]
            for key in kept_names(self.kind, options):
                own.kept.setdefault(key, torch.zeros_like(own.parameter))
            adjoint[name], towards[name] = own.pulled_back(
                self.kind, options, moment.parameters[name], reached[name].detach(), moment.kept[name]
            )
        return towards

    def _add_curvature(
        self, gradient: Mapping[str, Tensor], towards: Mapping[str, Tensor], adjoint: dict[str, Adjoint]
    ) -> None:
        """One Hessian-vector product for every query."""
        curved = {name: g for name, g in gradient.items() if g.requires_grad}
        if not curved:
            return
        params = [self.params[name] for name in towards]
        for q in range(len(next(iter(towards.values())))):
            moved = torch.autograd.grad(
                list(curved.values()),
                params,
                [towards[name][q] for name in curved],
                retain_graph=True,
                allow_unused=True,
            )
            for name, h in zip(towards, moved, strict=True):
                if h is not None:
                    adjoint[name].parameter[q] += h

    def _losses(self, note: dict[str, Any]) -> Tensor:
        """The losses of a recorded step, with its random numbers."""
        batch = note["batch"]
        if batch is None:
            if self.data is None:
                raise ValueError("the recording holds ids alone: give data=, a function from ids to a batch")
            batch = self.data(note["ids"])
        if note["random"] is not None:
            set_random_state(note["random"])
        _set_modes(self.model, note["modes"])
        losses = self.losses_fn(self.model, batch)
        if losses.shape != note["ids"].shape:
            raise ValueError(f"losses_fn gives {tuple(losses.shape)} for {len(note['ids'])} recorded examples")
        return losses

    def _load(self, step: int) -> dict[str, Any]:
        path = self.folder / f"state-{step:08}.pt"
        state: dict[str, Any] = load_plain(path)
        check_state(state, list(self.params), self.kind, path)
        self.model.load_state_dict(state["model"])
        return state


def _options(note: dict[str, Any]) -> list[Numbers]:
    return [note["options"][which] for which in note["which"]]


def _added(scores: Tensor, ids: Tensor, products: Tensor, examples: int | None, step: int) -> Tensor:
    size = int(ids.max()) + 1 if len(ids) else 0
    if examples is not None and size > examples:
        raise ValueError(f"step {step} has example {size - 1}, and there are {examples} examples")
    if size > scores.shape[1]:
        scores = torch.cat([scores, scores.new_zeros(len(scores), size - scores.shape[1])], 1)
    return scores.index_add_(1, ids, -products.t().to(scores))


def _modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def _set_modes(model: nn.Module, modes: list[bool]) -> None:
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode


def _to_resume(scores: Tensor, adjoint: Mapping[str, Adjoint], left: int, losses: Tensor, end: int) -> dict[str, Any]:
    plain = {name: {"parameter": own.parameter, "kept": own.kept} for name, own in adjoint.items()}
    return {"scores": scores, "adjoint": plain, "left": left, "losses": losses, "end": end}


def _resumed(
    state: Any, losses: Tensor, end: int, path: Path, params: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Adjoint], int]:
    known = isinstance(state, dict) and {"scores", "adjoint", "left", "losses", "end"} <= set(state)
    if not known or state["end"] != end or set(state["adjoint"]) != set(params):
        raise ValueError(f"{path} is not of this run: choose another resume_from")
    if state["losses"].shape != losses.shape or not torch.allclose(state["losses"], losses, rtol=1e-4):
        raise ValueError(f"{path} is of other queries (their losses differ): choose another resume_from")
    adjoint = {}
    for name, own in state["adjoint"].items():
        device = params[name].device
        adjoint[name] = Adjoint(own["parameter"].to(device), {k: v.to(device) for k, v in own["kept"].items()})
    return state["scores"], adjoint, state["left"]

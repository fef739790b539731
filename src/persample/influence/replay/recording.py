"""Recording a training run: what is needed to go through it again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..files import load_plain, save_whole
from ..in_run import _checked as checked_ids
from .randomness import random_state, same_randomness, set_random_state
from .updates import check_optimizer, options_of

FORMAT = 1


class Recording:
    """Notes of a run, in a folder: examples, random states and learning rates of all steps, and checkpoints.

    ``losses = recording.losses(batch, ids)`` takes the place of ``losses_fn(model, batch)``; then comes
    ``losses.mean().backward()`` and ``optimizer.step()``, as ever. What is in between (clipping of gradients, a second
    backward) is not known to `replay`, which finds out and refuses.

    >>> import tempfile, torch
    >>> from persample import influence as pi
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> losses_fn = lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]).square()
    >>> x, y = torch.randn(8, 3), torch.randn(8)
    >>> folder = tempfile.mkdtemp()
    >>> with pi.Recording(folder, model, optimizer, losses_fn, every=2) as recording:
    ...     for ids in torch.arange(8).split(4):
    ...         optimizer.zero_grad()
    ...         recording.losses((x[ids], y[ids]), ids).mean().backward()
    ...         optimizer.step()
    >>> data = lambda ids: (x[ids], y[ids])
    >>> pi.replay(folder, model, losses_fn, (torch.randn(2, 3), torch.randn(2)), data=data).shape
    torch.Size([2, 8])

    Args:
        folder: where to; made if it is not there. A run that is in it is continued after `resume`, else refused.
        model: the model that is trained. Buffers that change with the steps (BatchNorm in training mode) are refused.
        optimizer: SGD, Adam or AdamW of ``torch.optim``.
        losses_fn: ``losses_fn(model, batch)`` returns one loss per example.
        every: steps from one checkpoint to the next. Replaying keeps that many states of model and optimizer in memory.
        keep_batches: write the batches (tensors in tuples, lists and dicts), too; else `replay` is given ``data``.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        losses_fn: Callable[[nn.Module, Any], Tensor],
        *,
        every: int = 50,
        keep_batches: bool = False,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, not {every}")
        self.folder, self.model, self.optimizer, self.losses_fn = Path(folder), model, optimizer, losses_fn
        self.every, self.keep_batches = every, keep_batches
        self.kind = check_optimizer(optimizer)
        self.names = trained_names(model, optimizer)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.steps = 0
        self._waiting: dict[str, Any] | None = None  # a step whose update is still to come
        self._notes: list[dict[str, Any]] = []
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self._hook_after = optimizer.register_step_post_hook(self._after_step)
        self._closed = self._begun = False

    def losses(self, batch: Any, ids: Tensor) -> Tensor:
        """One loss per example of a batch, whose ``ids`` are the examples' places in the data."""
        if self._closed:
            raise RuntimeError("this recording is closed")
        if self._waiting is not None:
            raise RuntimeError("losses twice before optimizer.step(): a recorded step has one batch")
        if not self._begun:
            self._begin()
        buffers = {name: b.clone() for name, b in self.model.named_buffers()} if not self._notes else {}
        before = random_state()
        modes = [module.training for module in self.model.modules()]
        losses = self.losses_fn(self.model, batch)
        ids = checked_ids(losses, ids)
        changed = [
            name for name, b in self.model.named_buffers() if name in buffers and not torch.equal(b, buffers[name])
        ]
        if changed:
            raise ValueError(
                f"buffers {changed} change with every step, which cannot be replayed: put BatchNorm into evaluation "
                f"mode (module.eval()), or use a norm without running statistics"
            )
        drawn = None if same_randomness(before, random_state()) else before
        self._waiting = {"ids": ids, "random": drawn, "modes": modes, "batch": batch if self.keep_batches else None}
        return losses

    def resume(self) -> int:
        """Put model and optimizer back to the last checkpoint of the folder; the number of steps behind it."""
        states = sorted(self.folder.glob("state-*.pt"))
        if not states:
            return 0
        state = load_plain(states[-1])
        check_state(state, self.names, self.kind, states[-1])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        set_random_state(state["random"])
        self.steps, self._begun = int(state["step"]), True
        for path in self.folder.glob("steps-*.pt"):  # of what came after it
            if int(path.stem.split("-")[1]) >= self.steps:
                path.unlink()
        return self.steps

    def close(self) -> None:
        """Write what has not been written."""
        if not self._closed:
            if self._notes:
                self._write()
            self._hook.remove()
            self._hook_after.remove()
            self._closed = True

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        if any(self.folder.glob("state-*.pt")):
            raise FileExistsError(f"{self.folder} holds a run: call resume() to continue it, or choose another folder")
        self._save_state()
        self._begun = True

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._waiting is None:
            raise RuntimeError("optimizer.step() without recording.losses(batch, ids) before it")
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        options = {}
        for name, p in self.model.named_parameters():
            if name in self.names:
                options[name] = options_of(self.kind, groups[id(p)])
        check_optimizer(optimizer)
        distinct: list[dict[str, Any]] = []
        for each in options.values():
            if each not in distinct:
                distinct.append(each)
        self._waiting["options"] = distinct
        self._waiting["which"] = [distinct.index(options[name]) for name in self.names]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self._waiting is not None
        self._notes.append(self._waiting)
        self._waiting = None
        if len(self._notes) == self.every:
            self._write()

    def _write(self) -> None:
        save_whole(self._notes, self.folder / f"steps-{self.steps:08}.pt")
        self.steps += len(self._notes)
        self._notes = []
        self._save_state()

    def _save_state(self) -> None:
        state = {
            "format": FORMAT,
            "step": self.steps,
            "kind": self.kind,
            "names": self.names,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": random_state(),
        }
        save_whole(state, self.folder / f"state-{self.steps:08}.pt")


def trained_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in its order."""
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [tuple(p.shape) for p in trained if id(p) not in names]
    if foreign:
        raise ValueError(
            f"the optimizer has parameters of shapes {foreign} that are not the model's: give it these alone"
        )
    return [names[id(p)] for p in trained]


def check_state(state: Any, names: list[str] | None, kind: str | None, path: Path) -> None:
    """Is this a checkpoint of such a run?"""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of a recording of this version")
    if (names is not None and state["names"] != names) or (kind is not None and state["kind"] != kind):
        raise ValueError(f"{path} is of another model or optimizer: parameters {state['names']}, {state['kind']}")

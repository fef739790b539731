"""What the per-sample gradients say about a training run, every few steps."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import boundary, check_losses
from .distributed import accumulate
from .graph.read.compiled import break_graph
from .graph.read.roots import Roots
from .graph.read.saved import late_hooks
from .params import Params, named
from .reductions.spread import MeanAndNorms, Spread
from .verbs import reduce

Values = dict[str, float]


@runtime_checkable
class Writer(Protocol):
    """The methods of TensorBoard's ``SummaryWriter`` that are used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def add_text(self, tag: str, text_string: str, global_step: int) -> None: ...


Log = Writer | Callable[[Values], object] | str | os.PathLike[str]


@dataclass(frozen=True)
class Record:
    """What a `Monitor` saw in one step: the ``values`` that it logged, and what does not fit into them."""

    step: int
    values: Values
    norms: Tensor = field(repr=False)  # (B,): of every sample's gradient
    unusual: list[tuple[Any, float]]  # samples with the largest norms, and these
    nonfinite: list[Any]  # samples whose gradients are infinite or NaN


class Monitor:
    """Logs, every few steps of a training loop, what its per-sample gradients say.

    >>> import torch, persample as ps
    >>> model = torch.nn.Linear(3, 2)
    >>> monitor = ps.Monitor(model, log=lambda values: print(sorted(values)[:3]), every=10)
    >>> losses = model(torch.randn(5, 3)).square().sum(1)
    >>> record = monitor.backward(losses)  # in place of losses.mean().backward()
    ['persample/batch', 'persample/gradient/norm', 'persample/gradient/signal']
    >>> len(record.norms), [sample for sample, norm in record.unusual] == record.norms.argsort().flip(0).tolist()
    (5, True)

    ``monitor(losses)`` before the loop's own backward logs the same and leaves the gradients to it, for the price of
    another backward in the steps that are logged. docs/monitor.md says what is logged.

    Args:
        params: whose gradients: an ``nn.Module``, a mapping from names to leaf tensors, or a sequence.
        log: where to: a ``SummaryWriter`` of TensorBoard, a folder for a new one, or a function that is called with a
            dict of floats, ``step`` among them. None keeps the last `Record` in ``monitor.last`` and nothing else.
        every: look at one step in so many, the first one included.
        quantiles: of the norms, between 0 and 1.
        unusual: how many of the largest norms to name.
        smoothing: the weight of the past in the averages that noise scale and signal-to-noise ratios are taken from;
            0 for every step by itself.
        prefix: of the names of all that is logged, but ``step``.
    """

    def __init__(
        self,
        params: Params,
        *,
        log: Log | None = None,
        every: int = 10,
        quantiles: Sequence[float] = (0, 0.25, 0.5, 0.75, 0.95, 1),
        unusual: int = 5,
        smoothing: float = 0.9,
        prefix: str = "persample/",
    ) -> None:
        named(params)
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a number of steps, 1 or more, not {every!r}")
        if not isinstance(unusual, int) or unusual < 0:
            raise ValueError(f"unusual must be a number of samples, 0 or more, not {unusual!r}")
        if not all(0 <= q <= 1 for q in quantiles):
            raise ValueError(f"quantiles must lie between 0 and 1, but are {list(quantiles)}")
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing must be at least 0 and less than 1, not {smoothing!r}")
        self.params, self.every, self.quantiles, self.unusual = params, every, tuple(quantiles), unusual
        self.smoothing, self.prefix = smoothing, prefix
        self.step = 0  # of the next call
        self.last: Record | None = None
        self._own = _new_writer(log) if isinstance(log, (str, os.PathLike)) else None
        self._log = _logger(log if self._own is None else self._own)
        self._averages: dict[str | None, tuple[float, float]] = {}  # trace and signal by layer, None for all of them

    @break_graph
    def __call__(
        self,
        losses: Tensor,
        *,
        scale: float = 1.0,
        ids: Sequence[Any] | Tensor | None = None,
        step: int | None = None,
    ) -> Record | None:
        """Look at the losses' gradients if it is time to, before the loop's own backward; the graph is kept for it.

        Args:
            losses: one per sample, of shape (B,), with their graph.
            scale: what the losses are multiplied by for the backward, so that float16 holds their gradients:
                ``scaler.get_scale()``. What is logged is of the losses themselves.
            ids: what to call the samples; by default, by their place in the batch.
            step: the number of this step; by default, one more than the last.

        Returns:
            A `Record`, or None if it was not time.
        """
        if not self._due(losses, scale, ids, step):
            return None
        record, _ = self._look(losses, scale, ids, retain_graph=True)
        return record

    @break_graph
    def backward(
        self,
        losses: Tensor,
        *,
        scale: float = 1.0,
        ids: Sequence[Any] | Tensor | None = None,
        step: int | None = None,
    ) -> Record | None:
        """Do ``(scale * losses.mean()).backward()``, and look at the gradients on the way if it is time to.

        The steps that are logged take norms and ``p.grad`` from one backward; the others are ordinary ones.

        Args:
            losses: one per sample, of shape (B,), with their graph.
            scale: what the mean is multiplied by: 1 / n for gradients that are accumulated over n batches,
                ``scaler.get_scale()`` for those that a ``GradScaler`` will unscale. What is logged is of the losses
                themselves.
            ids: what to call the samples; by default, by their place in the batch.
            step: the number of this step; by default, one more than the last.

        Returns:
            A `Record`, or None if it was not time.
        """
        if not self._due(losses, scale, ids, step):
            (scale * losses.mean()).backward()
            return None
        alone = self._alone(losses)
        record, spread = self._look(losses, scale, ids, retain_graph=not alone)
        if not alone:
            (scale * losses.mean()).backward()
            return record
        params = named(self.params)
        means = {id(params[name]): (params[name], mean) for name, mean in spread.means.items()}  # may be there twice
        with boundary(losses):
            for p, mean in means.values():
                accumulate(p, mean, late_hooks(p))
        return record

    def close(self) -> None:
        """Close the writer that was made for a folder."""
        if self._own is not None:
            self._own.close()

    def _due(self, losses: Tensor, scale: float, ids: Sequence[Any] | Tensor | None, step: int | None) -> bool:
        """Count the step; whether it is one to be logged."""
        check_losses(losses)
        if not (math.isfinite(scale) and scale):
            raise ValueError(f"scale must be a finite number other than 0, not {scale!r}")
        if ids is not None and len(ids) != len(losses):
            raise ValueError(f"ids must name every sample: there are {len(losses)} losses and {len(ids)} ids")
        self.step = (self.step if step is None else step) + 1
        return (self.step - 1) % self.every == 0

    def _alone(self, losses: Tensor) -> bool:
        """Does a backward do no more than add to the gradients of our parameters?"""
        if not len(losses) or losses.grad_fn is None or (dist.is_available() and dist.is_initialized()):
            return False
        return not Roots.of_losses(losses).tape(named(self.params).values()).others

    def _look(
        self, losses: Tensor, scale: float, ids: Sequence[Any] | Tensor | None, *, retain_graph: bool
    ) -> tuple[Record, Spread]:
        """The record of the losses, and the spread of the losses times ``scale``."""
        scaled = losses if scale == 1 else losses * scale
        (spread,) = reduce(scaled, self.params, MeanAndNorms(), retain_graph=retain_graph)
        names = list(range(len(losses))) if ids is None else ids.tolist() if isinstance(ids, Tensor) else list(ids)
        self.last = self._record(spread.divided(abs(scale)), names)
        if self._log is not None:
            self._log(self.last, self.prefix)
        if self._own is not None:
            self._own.flush()  # TensorBoard's thread is not waited for at the end of a program
        return self.last, spread

    def _record(self, on_device: Spread, ids: Sequence[Any]) -> Record:
        norms_on_device = torch.linalg.vector_norm(on_device.norms, dim=0)
        spread = on_device.on_cpu()
        norms = norms_on_device if spread is on_device else torch.linalg.vector_norm(spread.norms, dim=0)
        finite = norms.isfinite()
        top = torch.where(finite, norms, -1).topk(min(self.unusual, int(finite.sum()))).indices.tolist()
        unusual = [(ids[i], norms[i].item()) for i in top]
        values = {"batch": float(len(norms)), "nonfinite": float((~finite).sum())}
        if finite.any():
            values["norms/mean"] = norms[finite].mean().item()
            levels = torch.quantile(norms[finite], norms.new_tensor(self.quantiles)).tolist()
            values |= {f"norms/q{q:g}": value for q, value in zip(self.quantiles, levels, strict=True)}
        values |= self._noise(spread, pairs=int(finite.sum()) * (int(finite.sum()) - 1))
        for rank, (sample, norm) in enumerate(unusual):
            values[f"unusual/{rank}/norm"] = norm
            if isinstance(sample, (int, float)):
                values[f"unusual/{rank}/sample"] = float(sample)
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        bad = [ids[i] for i in (~finite).nonzero().squeeze(1).tolist()]
        return Record(self.step - 1, values, norms_on_device, unusual, bad)

    def _noise(self, spread: Spread, pairs: int) -> Values:
        """Of this step alone, the parts of the noise scale; from averages over steps, the ratios.

        A step counts by its pairs of samples, of which the signal is the mean inner product: the last batch of an
        epoch may be a small one, and says little.
        """
        parts: dict[str | None, tuple[float, float]] = {None: (0.0, 0.0)}
        for name, *estimates in zip(spread.names, *(t.tolist() for t in spread.unbiased()), strict=True):
            for layer in (None, name.rpartition(".")[0] or name):
                before = parts.get(layer, (0.0, 0.0))
                parts[layer] = before[0] + estimates[0], before[1] + estimates[1]
        for layer, part in parts.items():
            if all(map(math.isfinite, part)):
                self._averages[layer] = self._averaged(layer, part, pairs)
        trace, signal = parts[None]
        squared = math.fsum(spread.mean_norms.square().tolist())
        values = {"gradient/norm": math.sqrt(squared), "gradient/variance": trace, "gradient/signal": signal}
        for layer, (trace, signal) in self._averages.items():
            if layer is None and signal > 0:
                values["noise_scale"] = trace / signal
            elif layer is not None and trace > 0:
                values[f"snr/{layer}"] = signal / trace
        return values

    def _averaged(self, layer: str | None, new: tuple[float, float], weight: float) -> tuple[float, float]:
        """Trace and signal each for itself: a ratio of averages is sound where an average of ratios is not.

        They are sums, not divided by the weights, which are the same for both.
        """
        old = self._averages.get(layer, (0.0, 0.0))
        trace, signal = (self.smoothing * a + weight * b for a, b in zip(old, new, strict=True))
        return trace, signal


def _logger(log: object) -> Callable[[Record, str], None] | None:
    """What to call with every record."""
    if log is None:
        return None
    if isinstance(log, Writer):
        writer = log
        return lambda record, prefix: _write(writer, record, prefix)
    if callable(log):
        return lambda record, prefix: _call(log, record, prefix)
    raise TypeError(
        f"log must be a SummaryWriter, a folder for one, or a function that takes a dict, not {type(log).__name__}"
    )


def _new_writer(folder: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"log={os.fspath(folder)!r} is a folder for TensorBoard, which is not installed: `pip install "
            f"tensorboard`, or pass a function that takes a dict"
        ) from error
    return SummaryWriter(os.fspath(folder))


def _call(log: Callable[[Values], object], record: Record, prefix: str) -> None:
    log({prefix + name: value for name, value in record.values.items()} | {"step": float(record.step)})


def _write(writer: Writer, record: Record, prefix: str) -> None:
    for name, value in record.values.items():
        if not name.startswith("unusual/"):  # which are in the text, with their names
            writer.add_scalar(prefix + name, value, record.step)
    lines = [f"| {sample} | {norm:.4g} |" for sample, norm in record.unusual]
    lines += [f"| {sample} | not finite |" for sample in record.nonfinite]
    writer.add_text(f"{prefix}unusual", "\n".join(["| sample | gradient norm |", "|---|---|", *lines]), record.step)

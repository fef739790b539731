"""How much the gradients of a batch differ: their norms, and the norm of their mean. Used by the monitor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..factors import Factor
from ..kernels.devices import can_look
from ..kernels.norms import row_norms
from .base import Call, Reduction
from .groups import Groups
from .norms import ParameterNorms


@dataclass(frozen=True)
class Spread:
    """Norms of gradients and of their mean for P parameters and B samples, in float64."""

    names: tuple[str, ...]
    norms: Tensor  # (P, B): of every sample's gradient
    mean_norms: Tensor  # (P,): of the mean over those samples whose gradients of that parameter are finite
    means: dict[str, Tensor]  # over all samples, of the parameters that the losses reach

    def divided(self, scale: float) -> Spread:
        """The same with all norms divided by a number, for gradients of losses that were multiplied by it."""
        return self if scale == 1 else replace(self, norms=self.norms / scale, mean_norms=self.mean_norms / scale)

    def on_cpu(self) -> Spread:
        """The same without the means, on the CPU: read by one copy."""
        if self.norms.device.type == "cpu":
            return self
        read = torch.cat([self.norms.flatten(), self.mean_norms]).cpu()
        sizes = [self.norms.numel(), self.mean_norms.numel()]
        norms, mean_norms = read.split(sizes)
        return Spread(self.names, norms.view(self.norms.shape), mean_norms, {})

    def unbiased(self) -> tuple[Tensor, Tensor]:
        """(P,) each: the trace of the gradients' covariance, and the squared norm of their expectation.

        With S the mean of n squared norms and G the squared norm of the mean, the trace is (S - G) n / (n - 1). The
        noise of the samples adds an n-th of it to G, which is subtracted. NaN for fewer than two samples.
        """
        finite = self.norms.isfinite()
        n = finite.sum(1, dtype=self.norms.dtype)
        S, G = self.norms.where(finite, 0).square().sum(1) / n, self.mean_norms.square()
        trace = (S - G).clamp(min=0) * (n / (n - 1))
        trace[n < 2] = torch.nan
        return trace, G - trace / n


class MeanAndNorms(Reduction):
    """A `Spread`: the norms and the mean of every parameter's gradients."""

    passes = 2

    def start(self, call: Call) -> None:
        self._call, self._norms = call, ParameterNorms(call)
        self._means: dict[str, Tensor] = {}
        self._mean_norms: dict[str, Tensor] = {}
        self._unseen: dict[str, Factor] = {}  # whose mean may have a norm that is not finite
        self._kept_bytes = 0

    def add(self, name: str, factor: Factor) -> None:
        self._norms.add(name, factor)
        mean = self._means[name] = self._mean(factor)
        self._mean_norms[name] = row_norms(mean.unsqueeze(0)).to(self._call.device)
        self._unseen[name] = factor
        self._kept_bytes += factor.nbytes
        if can_look(self._call.device) or self._kept_bytes > self._call.space.limit:
            self._leave_out_nonfinite()

    def _leave_out_nonfinite(self) -> None:
        """Look at norms of means; where one is not finite, it is computed again without samples that are not."""
        sizes = [self._mean_norms[name] for name in self._unseen]
        finite = (torch.cat(sizes) if len(sizes) > 1 else sizes[0]).isfinite().tolist() if sizes else []
        for (name, factor), is_finite in zip(self._unseen.items(), finite, strict=True):
            if not is_finite:
                kept = factor.cached_norms(self._call.space).isfinite().nonzero().squeeze(1)
                size = row_norms(self._mean(factor[kept]).unsqueeze(0)) if kept.numel() else self._call.zeros(1)
                self._mean_norms[name] = size.to(self._call.device)
        self._unseen, self._kept_bytes = {}, 0

    def _mean(self, factor: Factor) -> Tensor:
        weights = self._call.zeros(factor.batch) + 1 / factor.batch
        return factor.weighted_sum(weights.to(factor.device), self._call.space)

    def result(self) -> Spread:
        self._leave_out_nonfinite()
        call, names = self._call, tuple(self._call.params)
        norms = self._norms.by_group(Groups.of("parameter", call))
        sizes = [self._mean_norms[name] if name in self._mean_norms else call.zeros(1) for name in names]
        return Spread(
            names,
            torch.stack([norms[name] for name in names]) if names else call.zeros(0, call.batch),
            torch.cat(sizes) if names else call.zeros(0),
            self._means,
        )

"""Other libraries on the same checkpoint, data and queries, as their own guides use them.

Each is tried with several dampings, and the one that predicts best counts: their scores are chosen with the answers at
hand, ours are not. Scores are (queries, examples), positive for examples that help.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from .retrained import Retrained
from .tasks import output_losses_fn

DIM = 2048  # of TRAK's projections, as its guide has it
LARGEST_QUICK = 5000
LARGEST_EXPLICIT = 3000  # parameters of a Hessian that is written out
CG_ROWS = 25  # queries that dattri's conjugate gradients are given at a time


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without their progress bars and notices."""
    with open(os.devnull, "w") as nowhere, warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
                yield
        finally:
            logging.disable(logging.NOTSET)


def loader(batch: tuple[Tensor, Tensor], size: int | None = None) -> DataLoader[Any]:
    """All of it as one batch, so that curvatures are of the whole data."""
    return DataLoader(TensorDataset(*batch), batch_size=size or len(batch[0]), shuffle=False)


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """log p / (1 - p) of the labels: what TRAK explains."""
    own = labels.unsqueeze(-1) == torch.arange(logits.shape[-1])
    others = logits.masked_fill(own, -torch.inf).logsumexp(-1)
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - others


def chances(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


# dattri


def dattri_task(model: nn.Module, target: Callable[[Tensor, Tensor], Tensor] | None = None) -> Any:
    from dattri.task import AttributionTask

    def loss(params: Any, data: Any) -> Tensor:
        x, y = data
        return output_losses_fn(functional_call(model, params, (x,)), (x, y)).mean()

    def margin(params: Any, data: Any) -> Tensor:
        x, y = (t.unsqueeze(0) for t in data)
        assert target is not None
        return target(functional_call(model, params, (x,)), y).mean()

    chosen = loss if target is None else margin
    return AttributionTask(loss_func=chosen, model=model, checkpoints=model.state_dict())


def dattri_inner(make: Callable[[Any], Any], run: Retrained, size: int | None = None) -> Tensor:
    """One of dattri's inner products."""
    attributor = make(dattri_task(deepcopy(run.model)))
    attributor.cache(loader(run.train))
    with torch.no_grad():
        return attributor.attribute(loader(run.train), loader(run.queries, size)).t()


def dattri_cg(run: Retrained, damping: float) -> Tensor:
    from dattri.algorithm.influence_function import IFAttributorCG

    return dattri_inner(lambda task: IFAttributorCG(task, max_iter=10, regularization=damping), run, CG_ROWS)


def dattri_explicit(run: Retrained, damping: float) -> Tensor:
    from dattri.algorithm.influence_function import IFAttributorExplicit

    return dattri_inner(lambda task: IFAttributorExplicit(task, regularization=damping), run)


def dattri_ekfac(run: Retrained, damping: float) -> Tensor:
    """Of linear layers alone, which is what it knows."""
    from dattri.algorithm.influence_function import IFAttributorEKFAC

    return dattri_inner(lambda task: IFAttributorEKFAC(task, damping=damping), run)


def dattri_trak(run: Retrained, damping: float) -> Tensor:
    from dattri.algorithm.trak import TRAKAttributor

    model = deepcopy(run.model)

    def correct(params: Any, data: Any) -> Tensor:
        x, y = (t.unsqueeze(0) for t in data)
        return chances(functional_call(model, params, (x,)), y).mean()

    attributor = TRAKAttributor(
        dattri_task(model, margins), correct, projector_kwargs={"proj_dim": DIM}, regularization=damping
    )
    attributor.cache(loader(run.train))
    with torch.no_grad():
        return attributor.attribute(loader(run.queries)).t()


# kronfluence


def kronfluence(run: Retrained, damping: float | None, strategy: str = "ekfac") -> Tensor:
    """Of linear layers and convolutions, which is what it knows; true Fisher information, as is its default."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class CrossEntropy(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            x, labels = batch
            logits = model(x)
            if sample:
                rows = logits.detach().flatten(0, -2).softmax(-1)
                labels = torch.multinomial(rows, 1).view(labels.shape)
            return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / _positions(labels)

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        task = CrossEntropy()
        model = prepare_model(deepcopy(run.model), task)
        analyzer = Analyzer("lds", model, task, cpu=True, disable_tqdm=True, output_dir=folder)
        train, queries = TensorDataset(*run.train), TensorDataset(*run.queries)
        analyzer.fit_all_factors("f", train, 500, factor_args=FactorArguments(strategy=strategy))
        analyzer.compute_pairwise_scores(
            "s", "f", queries, train, len(queries), 500, score_args=ScoreArguments(damping_factor=damping)
        )
        return analyzer.load_pairwise_scores("s")["all_modules"]  # type: ignore[no-any-return]


def _positions(labels: Tensor) -> int:
    """Predictions per sample."""
    return labels[0].numel()


# traker


def traker(run: Retrained, damping: float) -> Tensor:
    from trak import TRAKer
    from trak.modelout_functions import AbstractModelOutput
    from trak.projectors import BasicProjector, NoOpProjector, ProjectionType

    class Margin(AbstractModelOutput):
        """TRAK's output for classifiers, and its mean over the positions of a text."""

        def __init__(self) -> None:
            """Theirs is abstract."""

        @staticmethod
        def get_output(model: nn.Module, weights: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
            logits = functional_call(model, (weights, buffers), (x.unsqueeze(0),))
            return margins(logits, y.unsqueeze(0)).mean()

        def get_out_to_loss_grad(self, model: nn.Module, weights: Any, buffers: Any, batch: Any) -> Tensor:
            x, y = batch
            missing = 1 - chances(functional_call(model, (weights, buffers), (x,)), y)
            return missing.view(len(y), -1).mean(1, keepdim=True).detach()

    size = sum(p.numel() for p in run.model.parameters())
    basic = partial(BasicProjector, proj_dim=DIM, seed=0, proj_type=ProjectionType.rademacher, device="cpu")
    projector = basic(grad_dim=size) if size > DIM else NoOpProjector(device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        made = TRAKer(
            deepcopy(run.model), Margin(), len(run.train[0]), save_dir=folder, device="cpu", projector=projector,
            proj_dim=min(size, DIM), use_half_precision=False, lambda_reg=damping, logging_level=logging.ERROR,
        )  # fmt: skip
        made.load_checkpoint(run.model.state_dict(), model_id=0)
        made.featurize(run.train, num_samples=len(run.train[0]))
        made.finalize_features()
        made.start_scoring_checkpoint("q", run.model.state_dict(), 0, len(run.queries[0]))
        made.score(run.queries, num_samples=len(run.queries[0]))
        return torch.from_numpy(made.finalize_scores("q").copy()).t()


Peer = Callable[[Retrained, Any], Tensor]
SMALL, LARGE, RIDGES = (1e-3, 5e-3, 2e-2, 1e-1), (5e-3, 2e-2, 1e-1, 5e-1), (1e-2, 1.0, 10.0, 100.0)
PEERS: dict[str, tuple[Peer, tuple[float | None, ...]]] = {
    "dattri, CG on the Hessian": (dattri_cg, LARGE),
    "dattri, explicit Hessian": (dattri_explicit, LARGE),
    "dattri, EK-FAC": (dattri_ekfac, SMALL),
    "dattri, TRAK": (dattri_trak, RIDGES),
    "kronfluence, EK-FAC": (kronfluence, (None, 1e-8, *SMALL)),
    "kronfluence, K-FAC": (partial(kronfluence, strategy="kfac"), (None, *SMALL)),
    "traker": (traker, RIDGES),
}


def peers_of(size: int) -> dict[str, tuple[Peer, tuple[float | None, ...]]]:
    """Those that a model of so many parameters has time for; dattri's CG takes minutes for each damping of the GPT."""
    found = {name: peer for name, peer in PEERS.items() if size <= LARGEST_EXPLICIT or "explicit" not in name}
    if size > LARGEST_QUICK:
        found["dattri, CG on the Hessian"] = dattri_cg, LARGE[1:]
    return found

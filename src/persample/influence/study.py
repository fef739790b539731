"""What commands study: the model, losses and data that a factory returns, and what is asked of them."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .._factories import Factories, FactoryError, device_of, seeded
from ..trees import tree_map
from . import loaders
from .curvature import KFAC, Adam, Covariance, Curvature, Shampoo
from .index import Index, Per
from .retraining import Retrain
from .search import Hits, Order
from .select import Method, Selection, select
from .sketches import Blocks, Sketch
from .store.files import SCRATCH

RETURNS = "a mapping (or an object) with the names model, losses_fn and loader"
CURVATURES: dict[str, Callable[..., Curvature]] = {"shampoo": Shampoo, "kfac": KFAC, "covariance": Covariance}


@dataclass(frozen=True)
class Study:
    """What a factory returns.

    Args:
        model: whose trainable parameters are meant, trained.
        losses_fn: ``losses_fn(model, batch)``, one loss per sample (B,), or one per token (B, T).
        loader: batches of training data in a fixed order.
        queries: one batch, as ``losses_fn`` takes it, or a DataLoader of several.
        sketch: of the index, 16 by 16 blocks by default.
        checkpoints: files or states of the model, if it is not the model as it is.
        ids_fn: ``ids_fn(batch)``, the ids of a batch's samples, if they are not their places in the data.
        sample_losses_fn: losses with labels drawn from the model, for ``--labels sampled``.
        optimizer: that has trained the model, for ``--curvature adam``.
        show: ``show(id)``, what to show of a training example: an image, a text, a list of tokens, a mapping of these.
        show_query: ``show_query(i)``, the same of query i.
        retrain: ``retrain(ids, seed)`` trains on some examples and returns the losses of the queries, for ``lds``.
    """

    model: nn.Module
    losses_fn: Callable[[nn.Module, Any], Tensor]
    loader: Any
    queries: Any = None
    sketch: Sketch = Blocks(16, 16)  # noqa: RUF009 (frozen)
    checkpoints: Sequence[Any] | None = None
    ids_fn: Callable[[Any], Any] | None = None
    sample_losses_fn: Callable[..., Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    show: Callable[[int], Any] | None = None
    show_query: Callable[[int], Any] | None = None
    retrain: Retrain | None = None

    def __post_init__(self) -> None:
        _check(self.model, "model", nn.Module, "an nn.Module")
        _check(self.sketch, "sketch", Sketch, "one such as pi.Blocks(16, 16)")
        _check(self.optimizer, "optimizer", torch.optim.Optimizer, "a torch.optim.Optimizer", optional=True)
        for name in ("losses_fn", "ids_fn", "sample_losses_fn", "show", "show_query", "retrain"):
            if not callable(getattr(self, name)) and (getattr(self, name) is not None or name == "losses_fn"):
                raise FactoryError(f"{name} must be a function, not {_kind(getattr(self, name))}")
        try:
            loaders.check_order(self.loader)
        except (TypeError, ValueError) as error:
            raise FactoryError(str(error)) from error

    def moved(self, device: torch.device) -> Study:
        """With the model on a device, where batches are moved to before they are used."""
        self.model.to(device)
        sampled = None if self.sample_losses_fn is None else partial(_on, device, self.sample_losses_fn)
        return replace(self, losses_fn=partial(_on, device, self.losses_fn), sample_losses_fn=sampled)

    # Indexes.

    def new_index(
        self,
        folder: str | PathLike[str],
        *,
        sketch: Sketch | None = None,
        dtype: Any = "float32",
        params: Sequence[str] | None = None,
    ) -> Index:
        """To be built, or to be gone on with; a folder of something else is refused."""
        place = Path(folder)
        if place.is_file():
            raise FactoryError(f"{folder} is a file: name a folder for the index")
        if place.is_dir() and not (place / "index.json").exists():
            others = [p.name for p in place.iterdir() if p.name != "chunks" and not p.name.endswith(SCRATCH)]
            if others:
                raise FactoryError(f"{folder} holds no index but {others[0]!r}: choose an empty folder, or a new one")
        chosen = sketch or self.sketch
        return Index(folder, self.model, self.losses_fn, sketch=chosen, dtype=dtype, params=params)

    def open_index(self, folder: str | PathLike[str]) -> Index:
        """One that has been built."""
        if not (Path(folder) / "index.json").exists():
            raise FactoryError(f"{folder} holds no index: persample index build makes one")
        index = Index.open(folder, self.model, self.losses_fn)
        _ = index.folder.samples  # which says so, if it is not complete
        return index if self.checkpoints is None else index.use(self.checkpoints)

    def curvature(self, name: str, labels: str = "given") -> Curvature | None:
        """By the names that commands have for them: one of `CURVATURES`, adam or none."""
        if name == "none":
            return None
        if name != "adam":
            return CURVATURES[name](labels=labels)
        if self.optimizer is None:
            raise FactoryError("--curvature adam needs the optimizer: let the factory return it as 'optimizer'")
        return Adam(self.optimizer, self.model)

    def fit(
        self, index: Index, curvature: str, labels: str, damping: float | None, *, progress: bool | None = None
    ) -> Index:
        """`Index.fit`, with a curvature by its name."""
        if labels == "sampled" and curvature in CURVATURES and self.sample_losses_fn is None:
            raise FactoryError(
                "--labels sampled needs sample_losses_fn: let the factory return one, as pi.categorical makes it"
            )
        return index.fit(
            self.curvature(curvature, labels),
            self.loader,
            damping=damping,
            sample_losses_fn=self.sample_losses_fn,
            progress=progress,
        )

    # Questions.

    def query_batches(self) -> Iterator[Any]:
        """One batch of queries after another."""
        if self.queries is None:
            raise FactoryError("there are no queries: let the factory return a batch of them as 'queries'")
        yield from self.queries if isinstance(self.queries, DataLoader) else [self.queries]

    def ask(
        self,
        index: Index,
        k: int,
        order: Order,
        *,
        normalise: bool = False,
        per: Per = "sample",
        parameters: Sequence[str] | None = None,
        tell: Callable[[str], None] = lambda stage: None,
        progress: Callable[[float], None] | None = None,
    ) -> Hits:
        """The hits of all queries; ``progress`` is told how much of the index has been read for a batch of them."""
        found: list[Hits] = []
        for batch in self.query_batches():
            tell(f"most {order} examples, batch {len(found) + 1} of queries")
            hits = index.query(
                batch, k, order=order, normalise=normalise, per=per, parameters=parameters, progress=progress
            )
            found.append(hits)
        if not found:
            raise FactoryError("there are no queries: the loader of queries is empty")
        return _joined(found)

    def scores(self, index: Index, *, normalise: bool = False) -> Tensor:
        """(Q, N): of all queries and examples."""
        return torch.cat([index.scores(batch, normalise=normalise) for batch in self.query_batches()])

    def vectors(self, index: Index) -> Tensor:
        """(Q, C·D): what exported rows are multiplied by, for all queries."""
        return torch.cat([index.vectors(batch) for batch in self.query_batches()])

    def select(
        self, index: Index, *, fraction: float | None, count: int | None, method: Method, normalise: bool, target: bool
    ) -> Selection:
        """Examples for the queries, all of which are one target; or, without a target, for the whole data."""
        if method == "top":
            chosen = select(self.scores(index, normalise=normalise), fraction=fraction, count=count)
            return replace(chosen, ids=index.ids()[chosen.ids])
        targets = self.vectors(index) if method == "diverse" and target else None
        return select(index, targets, fraction=fraction, count=count, method=method, normalise=normalise)


_REQUIRED = ("model", "losses_fn", "loader")
_NAMES = tuple(f.name for f in fields(Study))
_FACTORIES = Factories(
    RETURNS, tuple((name,) for name in _REQUIRED), tuple(name for name in _NAMES if name not in _REQUIRED)
)


def load(spec: str, *, seed: int = 0, device: str | None = None) -> Study:
    """What SPEC names: ``package.module:factory``, ``file.py:factory``, or a file that has the names at its top."""
    place = device_of(device)
    with seeded(seed):
        study = _read(*_FACTORIES.made(spec))
    return study if place is None else study.moved(place)


def _read(made: Any, what: str) -> Study:
    if isinstance(made, Mapping):
        unknown = [name for name in made if name not in _NAMES]
        if unknown:
            close = difflib.get_close_matches(str(unknown[0]), _NAMES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_NAMES)}"
            raise FactoryError(f"{what} gave a mapping with the name {str(unknown[0])!r}: {hint}")
        parts = dict(made)
    elif isinstance(made, (tuple, list, nn.Module, Tensor)) or not any(hasattr(made, name) for name in _REQUIRED):
        raise FactoryError(f"{what} gave a {type(made).__name__}: it must give {RETURNS}")
    else:
        parts = {name: getattr(made, name) for name in _NAMES if hasattr(made, name)}
    missing = [name for name in _REQUIRED if name not in parts]
    if missing:
        raise FactoryError(f"{what} gave no {' and no '.join(missing)}: it must give {RETURNS}")
    try:
        return Study(**parts)
    except FactoryError as error:
        raise FactoryError(f"{what}: {error}") from error


class Retraining:
    """A study's ``retrain`` by the ids of an index, which other processes get by loading SPEC for themselves."""

    def __init__(self, study: Study, spec: str, seed: int, device: str | None, ids: Tensor) -> None:
        if study.retrain is None:
            raise FactoryError("there is no retrain: let the factory return retrain(ids, seed), which trains on them")
        self.retrain: Retrain | None = study.retrain
        self.source, self.ids = (spec, seed, device), ids

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "ids": self.ids, "retrain": None}

    def __call__(self, places: Tensor, seed: int) -> Any:
        """The losses of the queries after training on the examples at these places of the index."""
        with redirect_stdout(sys.stderr):
            retrain = self.retrain or _loaded(*self.source).retrain
            assert retrain is not None
            return retrain(self.ids[places], seed)


@cache
def _loaded(spec: str, seed: int, device: str | None) -> Study:
    return load(spec, seed=seed, device=device)


def _joined(hits: Sequence[Hits]) -> Hits:
    """The hits of several batches of queries."""
    tokens = None if hits[0].tokens is None else torch.cat([h.tokens for h in hits if h.tokens is not None])
    shares = None
    if hits[0].by_parameter is not None:
        names = list(hits[0].by_parameter)
        shares = {name: torch.cat([h.by_parameter[name] for h in hits if h.by_parameter]) for name in names}
    return Hits(torch.cat([h.ids for h in hits]), torch.cat([h.scores for h in hits]), tokens, shares)


def _on(device: torch.device, fn: Callable[..., Tensor], model: nn.Module, batch: Any, *rest: Any) -> Tensor:
    """A function of a batch, which is moved to a device first."""
    move: Callable[[Any], Any] = lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf  # noqa: E731
    return fn(model, tree_map(move, batch), *rest)


def _check(value: Any, name: str, kind: type, words: str, optional: bool = False) -> None:
    if not isinstance(value, kind) and not (optional and value is None):
        raise FactoryError(f"{name} must be {words}, not {_kind(value)}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"

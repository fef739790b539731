"""`Index`: sketches of every example's gradient on disk, to be asked which of them made the model what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor, nn

from ..kernels.norms import row_norms
from . import kept, loaders, search
from .build import CHUNK_BYTES, Builder, IdsFn
from .checking import Check, Error, check, errors_of_dtypes
from .curvature.base import Curvature, Fitted, check_damping
from .export import by_sample, export
from .progress import progress as shown
from .sampling import drawing
from .search import Hits, Order, Search
from .sketches import Blocks, Sketch, sketch_of
from .store import DamagedError, Dtype, Encoding, Folder, MismatchError
from .store.fingerprints import of_batch
from .subject import Checkpoint, LossesFn, Subject
from .team import Team

Per = Literal["sample", "parameter", "token"]
_MEMORY = 2**28


class Index:
    """Sketches of the gradient of every training example, in a folder on disk.

    A positive score says that training on the example lowers the query's loss (helpful), a negative one that it raises
    it (harmful): scores are inner products of the gradients of both, with the inverse of a curvature between them after
    `fit`. The model is in evaluation mode whenever losses are computed.

    Args:
        folder: where chunks are kept; it is made by `build`.
        model: whose trainable parameters gradients are taken of.
        losses_fn: ``losses_fn(model, batch)`` returns one loss per sample (B,), or one per token (B, T).
        sketch: `Blocks`, `Sparse` or `Masked`.
        dtype: "float32", "float16" or "int8"; the last two with a scale for every row and parameter.
        params: names of parameters, if not all are asked.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        model: nn.Module,
        losses_fn: LossesFn,
        *,
        sketch: Sketch = Blocks(16, 16, seed=0),  # noqa: B008 (frozen)
        dtype: Dtype = "float32",
        params: Sequence[str] | None = None,
    ) -> None:
        self.subject = Subject.of(model, losses_fn, sketch, params)
        self.dtype = Encoding(dtype, ()).dtype  # refuses others
        self.folder = Folder(Path(folder))
        self._checkpoints: Sequence[Checkpoint] | None = None
        self._fitted: list[Fitted] | None = None

    @classmethod
    def open(cls, folder: str | PathLike[str], model: nn.Module, losses_fn: LossesFn) -> Index:
        """The index that a folder holds, with the sketch, the dtype and the parameters that it was built with."""
        plan = Folder(Path(folder)).plan
        try:
            sketch, params = sketch_of(plan.sketch), list(plan.blocks)
        except (TypeError, ValueError) as error:
            raise DamagedError(f"the sketch of {folder} cannot be read ({error}): build another index") from error
        missing = [name for name in params if name not in dict(model.named_parameters())]
        if missing:
            raise MismatchError(f"{folder} was built with parameters that the model does not have: {missing[:8]}")
        return cls(folder, model, losses_fn, sketch=sketch, dtype=plan.dtype, params=params)  # type: ignore[arg-type]

    def build(
        self,
        loader: Any,
        checkpoints: Sequence[Checkpoint] | None = None,
        *,
        ids_fn: IdsFn | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        progress: bool | None = None,
    ) -> Index:
        """Make the chunks that are missing: all of them at first, the rest after an interruption.

        Args:
            loader: an iterable of batches with a fixed order: a DataLoader that does not shuffle, a list.
            checkpoints: files or states of the model; scores are means over them. By default, the model as it is.
            ids_fn: ``ids_fn(batch)`` returns the ids of its samples; by default, their places in the data.
            chunk_bytes: about the size of a chunk.
            progress: show a bar; by default, in a terminal.
        """
        if checkpoints is not None and (isinstance(checkpoints, (str, PathLike, Mapping)) or not len(checkpoints)):
            raise ValueError("checkpoints must be a list of at least one file or state, or None for the model as it is")
        if not isinstance(chunk_bytes, int) or chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be a whole number of bytes, not {chunk_bytes!r}")
        self._checkpoints = [None] if checkpoints is None else list(checkpoints)
        Builder(self.folder, self.subject, self.dtype, loader, self._checkpoints, ids_fn, chunk_bytes, progress).build()
        return self

    def __len__(self) -> int:
        """The number of samples."""
        return sum(self.folder.samples)

    def use(self, checkpoints: Sequence[Checkpoint]) -> Index:
        """Say which checkpoints the index was built with, where it does not know their files."""
        self._checkpoints = list(checkpoints)
        return self

    # Curvature.

    def fit(
        self,
        curvature: Curvature | None,
        loader: Any = None,
        *,
        damping: float | None = None,
        sample_losses_fn: Callable[..., Tensor] | None = None,
        progress: bool | None = None,
    ) -> Index:
        """Put the inverse of a curvature between the gradients; None takes it away again.

        The stored gradients are gone through, or, if the curvature asks for sampled labels, the ``loader``: then
        ``sample_losses_fn(model, batch, generator)`` returns the losses with labels drawn from the model, as
        `categorical` makes it. It may do without the generator, and draw as ``losses_fn`` does.
        """
        check_damping(damping)
        team = Team(lockstep=self.subject.is_sharded)
        if curvature is None:
            self._keep(team, [])
            return self
        if not isinstance(curvature, Curvature):
            raise TypeError(f"curvature must be one such as pi.Shampoo(), or None, not {type(curvature).__name__}")
        sampled = curvature.labels == "sampled"
        if sampled and (loader is None or sample_losses_fn is None):
            raise ValueError(
                "labels='sampled' needs the data again: pass loader= and sample_losses_fn=, "
                "which returns losses with labels "
                "drawn from the model; or use labels='given'"
            )
        every = []
        for number, checkpoint in enumerate(self._states()):
            own = deepcopy(curvature)
            own.start(self.folder.plan.blocks)
            for _ in range(own.passes):
                if sampled:
                    with self.subject.at(checkpoint):
                        self._check_model(number)
                        self._add_sampled(own, loader, sample_losses_fn, team, progress)
                else:
                    self._add_stored(own, number, team)
                team.add_up(own.sums())
                own.end_pass()
            every.append(own.fitted(damping))
        self._keep(team, every)
        return self

    def _keep(self, team: Team, every: Sequence[Fitted]) -> None:
        self._fitted = None
        with team.together():
            if team.rank == 0:
                kept.write(self.folder, every)

    def _add_stored(self, curvature: Curvature, checkpoint: int, team: Team) -> None:
        for number in range(team.rank, len(self.folder.samples), team.size):
            for _, rows in self.folder.open(checkpoint, number).rows(CHUNK_BYTES):
                curvature.add(self._blocks(rows))

    def _add_sampled(self, curvature: Curvature, loader: Any, fn: Any, team: Team, show: bool | None) -> None:
        loaders.check_order(loader)
        with shown("fit", loaders.length(loader), show, first=team.rank == 0) as bar:
            for number, batch in team.batches(loader, team.takes):
                rows = self.subject.rows(batch, seed=number + 1, losses_fn=drawing(fn, number))
                if team.keeps:
                    curvature.add(rows.blocks)
                bar.advance(len(rows.losses))

    def fitted(self) -> list[Fitted] | None:
        """The curvature of every checkpoint; None without one."""
        if self._fitted is None:
            self._fitted = kept.read(self.folder)
        return self._fitted

    # Questions.

    def query(
        self,
        batch: Any,
        k: int = 10,
        *,
        order: Order = "helpful",
        normalise: bool = False,
        per: Per = "sample",
        parameters: Sequence[str] | None = None,
        max_memory: int = _MEMORY,
        progress: Callable[[float], None] | None = None,
    ) -> Hits:
        """The examples with the highest scores for every query of a batch, by reading the whole index once.

        Args:
            batch: queries, as ``losses_fn`` takes them; losses of tokens are added up.
            k: how many.
            order: "helpful" for the highest scores, "harmful" for the lowest.
            normalise: divide by the norms of both vectors: cosines, for which long gradients count no more than others.
            per: "sample"; "parameter" to have, beside the scores, what each parameter adds to them; "token" for single
                tokens of losses (B, T), whose scores add up to the sample's.
            parameters: names of those that count, if not all do.
            max_memory: bytes for rows that are read.
            progress: called with the share of the index that has been read, now and then.
        """
        if isinstance(k, bool) or not isinstance(k, SupportsIndex):
            raise TypeError(f"k must be a positive integer, not {k!r}")
        if (k := index(k)) < 1:
            raise ValueError(f"k must be a positive integer, not {k!r}")
        if order not in ("helpful", "harmful"):
            raise ValueError(f"order must be 'helpful' or 'harmful', not {order!r}")
        found = self._search(batch, normalise, per, parameters, max_memory)
        parts = found.parts() if progress is None else search.told(found.parts(), len(self), progress)
        ids, scores, tokens, places = search.top(parts, k, order)
        if per != "parameter":
            return Hits(ids, scores, tokens)
        names = list(self.folder.plan.blocks) if parameters is None else list(parameters)
        columns = {name: self._columns([name]) for name in names}
        if found.columns is not None:
            columns = {n: torch.isin(found.columns, c).nonzero().flatten() for n, c in columns.items()}
        return Hits(ids, scores, tokens, found.shares(places, columns))

    def scores(
        self,
        batch: Any,
        *,
        normalise: bool = False,
        per: Per = "sample",
        parameters: Sequence[str] | None = None,
        max_memory: int = _MEMORY,
    ) -> Tensor:
        """(Q, N): the scores of all examples, in the order of the data; see `query`. Per token, of all rows."""
        if per == "parameter":
            raise ValueError("scores per parameter: call scores(batch, parameters=[name]) for each of them")
        return search.every(self._search(batch, normalise, per, parameters, max_memory).parts()).scores

    def ids(self) -> Tensor:
        """(N,): the ids of all examples, in the order of `scores`."""
        nothing = torch.zeros(0, sum(self.folder.plan.encoding.widths))
        question = Search(self.folder, [nothing], None, False, True, _MEMORY)
        return search.every(question.parts()).ids

    def sketches(self, *, max_memory: int = _MEMORY) -> Iterator[Tensor]:
        """The stored gradients of all examples, (n, C·D) of them at a time, in the order of `ids`.

        All C checkpoints are beside each other, and the tokens of one example are added up.
        """
        return by_sample(self.folder, max_memory)

    def vectors(self, batch: Any) -> Tensor:
        """(Q, C·D): what exported rows are multiplied by; all C checkpoints beside each other."""
        queries = self._queries(batch)
        return torch.cat(queries, 1) / len(queries)

    def _search(
        self, batch: Any, normalise: bool, per: Per, parameters: Sequence[str] | None, max_memory: int
    ) -> Search:
        if per not in ("sample", "parameter", "token"):
            raise ValueError(f"per must be 'sample', 'parameter' or 'token', not {per!r}")
        plan = self.folder.plan
        if per == "token" and not plan.per_token:
            raise ValueError("this index has no tokens: build one with a losses_fn that returns losses of shape (B, T)")
        if normalise and parameters is not None and plan.per_token and per != "token":
            raise ValueError("norms of some parameters are not stored for sums over tokens: pass normalise=False")
        if per == "parameter" and normalise:
            raise ValueError("per='parameter' has shares of inner products: pass normalise=False")
        columns = None if parameters is None else self._columns(parameters)
        queries = [q if columns is None else q[:, columns] for q in self._queries(batch)]
        if normalise:
            lengths = [row_norms(q).clamp(min=torch.finfo(torch.float32).tiny) for q in queries]
            queries = [(q / n.unsqueeze(1)).to(q.dtype) for q, n in zip(queries, lengths, strict=True)]
        return Search(self.folder, queries, columns, normalise, per != "token", max_memory)

    def _columns(self, parameters: Sequence[str]) -> Tensor:
        """The columns of some parameters, in the order of the index."""
        widths = dict(zip(self.folder.plan.blocks, self.folder.plan.encoding.widths, strict=True))
        unknown = [name for name in parameters if name not in widths]
        if not len(parameters):
            raise ValueError("parameters are empty: name at least one, or pass None for all of them")
        if unknown or isinstance(parameters, str):
            raise ValueError(
                f"parameters that the index does not have: {unknown or parameters}; it has {list(widths)[:8]} …"
            )
        chosen = [torch.full((width,), name in parameters) for name, width in widths.items()]
        return torch.cat(chosen).nonzero().flatten()

    def _queries(self, batch: Any) -> list[Tensor]:
        """(Q, D) under every checkpoint, multiplied by the inverse of its curvature."""
        found, fitted = [], self.fitted()
        for number, checkpoint in enumerate(self._states()):
            curvature = None if fitted is None else fitted[number]
            with self.subject.at(checkpoint):
                self._check_model(number)
                rows = self.subject.query(batch, {} if curvature is None else curvature.scales)
            if curvature is not None:
                blocks = {name: block.to("cpu", torch.float32) for name, block in rows.blocks.items()}
                applied = curvature.apply(blocks)
                rows = type(rows)({name: applied[name] for name in blocks}, rows.losses)
            found.append(_finite(rows.line))
        return found

    def _states(self) -> Sequence[Checkpoint]:
        """The checkpoints, by what is known of them."""
        plan = self.folder.plan
        self._check_settings()
        if self._checkpoints is None:
            sources = [told["source"] for told in plan.checkpoints]
            if None in sources and len(sources) > 1:
                raise ValueError(
                    "the index was built with states that are not files: pass them by index.use(checkpoints)"
                )
            self._checkpoints = sources
        if len(self._checkpoints) != len(plan.checkpoints):
            raise ValueError(f"the index has {len(plan.checkpoints)} checkpoints, not {len(self._checkpoints)}")
        return self._checkpoints

    def _check_settings(self) -> None:
        plan = self.folder.plan
        if plan.sketch != self.subject.sketch.settings() or plan.blocks != self.subject.blocks:
            raise MismatchError(
                f"{self.folder.path} was built with sketch {plan.sketch} of parameters {list(plan.blocks)[:8]}: "
                f"make the Index with the same"
            )

    def _check_model(self, number: int) -> None:
        if self.subject.fingerprint() != self.folder.plan.checkpoints[number]["fingerprint"]:
            raise MismatchError(
                f"{self.folder.path} was built with other parameters or buffers of the model "
                f"(checkpoint {number}): load the "
                f"ones it was built with, or build another index"
            )

    def _blocks(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows (N, D) as (N, l, r) for every parameter."""
        plan = self.folder.plan
        parts = rows.split(list(plan.encoding.widths), 1)
        return {name: part.reshape(-1, *block) for (name, block), part in zip(plan.blocks.items(), parts, strict=True)}

    # Whether all is well.

    def check(self, batch: Any) -> Check:
        """Compare the sketches of a batch, and their inner products, with one backward per sample."""
        return check(self.subject, batch)

    def error(self, batch: Any) -> dict[str, Error]:
        """What float32, float16 and int8 add as errors, measured with the gradients of a batch."""
        return errors_of_dtypes(self.subject.rows(batch).line, Encoding("float32", self._widths()).widths)

    def _widths(self) -> tuple[int, ...]:
        return tuple(rows * columns for rows, columns in self.subject.blocks.values())

    def verify(self, loader: Any = None) -> None:
        """Compare every chunk with what was written; with a loader, also the data with those it was made of."""
        for checkpoint in range(len(self.folder.plan.checkpoints)):
            for number in range(len(self.folder.samples)):
                self.folder.open(checkpoint, number).verify()
        kept.verify(self.folder)
        if loader is None:
            return
        loaders.check_order(loader)
        told = [name for number in range(len(self.folder.samples)) for name in self.folder.open(0, number).told["data"]]
        count = 0
        for number, batch in loaders.batches(loader, lambda _: True):
            if number >= len(told) or told[number] != of_batch(batch):
                raise MismatchError(f"batch {number} of the loader is not the one that the index was built from")
            count += 1
        if count < len(told):
            raise MismatchError(f"the loader has {count} batches, and the index was built from {len(told)}")

    def export(self, format: str, path: str | PathLike[str], *, max_memory: int = _MEMORY) -> None:
        """Write all rows for other tools, as "npy", "parquet" or "faiss"; scores are inner products with `vectors`."""
        self._check_settings()
        export(self.folder, format, Path(path), max_memory)


def _finite(queries: Tensor) -> Tensor:
    wrong = (~torch.isfinite(queries).all(1)).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(f"queries {wrong[:8]} have gradients that are infinite or NaN: leave them out of the batch")
    return queries

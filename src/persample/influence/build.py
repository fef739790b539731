"""Building an index: every rank makes the chunks that are missing and its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..kernels.norms import row_norms
from . import loaders
from .progress import progress
from .store import Chunk, Folder, MismatchError, Plan
from .store.fingerprints import of_batch
from .subject import Checkpoint, Rows, Subject
from .team import Team

CHUNK_BYTES = 2**26
_NEAR = 1e-3  # between rows of the same batch, computed with other threads or on another machine

IdsFn = Callable[[Any], Sequence[int] | Tensor]


@dataclass
class Builder:
    """One call of `Index.build`."""

    folder: Folder
    subject: Subject
    dtype: str
    loader: Any
    checkpoints: Sequence[Checkpoint]
    ids_fn: IdsFn | None = None
    chunk_bytes: int = CHUNK_BYTES
    show: bool | None = None
    team: Team = field(init=False)

    def __post_init__(self) -> None:
        self.team = Team(lockstep=self.subject.is_sharded)

    def build(self) -> None:
        """Begin an index or go on with it, and finish it."""
        loaders.check_order(self.loader)
        with ExitStack() as held:
            with self.team.together():
                if self.team.rank == 0:
                    held.enter_context(self.folder.locked())
            with self.team.apart():
                if self.team.rank == 0 or self.team.lockstep:
                    self._begin_or_check()
            batches = 0
            with self.team.apart():
                for number, checkpoint in enumerate(self.checkpoints):
                    with self.subject.at(checkpoint):
                        batches = self._missing_chunks(number)
            batches = self.team.largest(batches)
            with self.team.together():
                if self.team.rank == 0:
                    self._finish(batches)

    def _finish(self, batches: int) -> None:
        size = self.folder.plan.batches_per_chunk
        self._check_end(batches)
        counts = [self.folder.open(0, number).told["samples"] for number in range(-(-batches // size))]
        if self.folder.noted("samples") != counts:
            self.folder.note(samples=counts)

    def _check_end(self, batches: int) -> None:
        """Do chunks that were there before end where the loader does? One without a length says so only now."""
        size = self.folder.plan.batches_per_chunk
        full, rest = divmod(batches, size)
        for checkpoint in range(len(self.checkpoints)):
            beyond = self.folder.has(checkpoint, full + bool(rest))
            last = full if rest else full - 1
            stored = last * size + len(self.folder.open(checkpoint, last).told["data"])
            if beyond or stored != batches:
                raise MismatchError(
                    f"the loader has {batches} batches now, and the folder holds {'more' if beyond else stored}: "
                    f"choose another folder, or remove this one"
                )

    # The plan.

    def _begin_or_check(self) -> None:
        batch = self.team.first_batch(self.loader)
        if batch is None:
            raise ValueError("the loader has no batches")
        empty, first = self._first_rows(batch)
        plan = self._plan(batch, first, empty)
        with self.team.between():
            if self.team.rank == 0:
                self._begin(plan, first)

    def _begin(self, plan: Plan, first: Rows) -> None:
        """Write the plan, or hold it and the first rows against those of the folder."""
        if self.folder.exists():
            self.folder.plan.check(plan)
        self.folder.remove_scratch()
        if not self.folder.exists():
            self.folder.begin(plan)
            return
        if self.folder.has(0, 0):
            self._compare(first)

    def _first_rows(self, batch: Any) -> tuple[int, Rows]:
        """How many batches without samples come first, and the rows of the next; those of an empty one, if all are."""
        empty = 0
        with self.subject.at(self.checkpoints[0]):
            rows = self.subject.rows(batch, seed=0)
            while not len(rows.losses) and (later := self.team.first_batch(self.loader, empty + 1)) is not None:
                empty += 1
                rows = self.subject.rows(later, seed=empty)
        return empty, rows

    def _plan(self, batch: Any, first: Rows, empty: int) -> Plan:
        """From the first batch, and the rows of the one after those that are empty, which get no chunk of their own."""
        fingerprints = []
        for checkpoint in self.checkpoints:
            with self.subject.at(checkpoint):
                source = fspath(checkpoint) if isinstance(checkpoint, (str, PathLike)) else None
                fingerprints.append({"source": source, "fingerprint": self.subject.fingerprint()})
        parameters = [
            [name, list(p.shape), list(self.subject.sketch.block(p))] for name, p in self.subject.params.items()
        ]
        per_token, sketch, own_ids = first.losses.ndim == 2, self.subject.sketch.settings(), self.ids_fn is not None
        data = of_batch(batch)
        plan = Plan(sketch, self.dtype, parameters, fingerprints, data, None, 1, per_token, own_ids, __version__)
        per_batch = max(1, first.losses.numel() * plan.encoding.row_bytes)
        values = {**vars(plan), "batches_per_chunk": max(empty + 1, self.chunk_bytes // per_batch)}
        return Plan(**{**values, "batches": loaders.length(self.loader)})

    def _compare(self, first: Rows) -> None:
        """Other losses of the same model and data show in the first batch."""
        now, count = first.line, len(first.line)
        stored, encoding = self.folder.open(0, 0).first(count), self.folder.plan.encoding
        coarse = 2 * float((encoding.decode(*encoding.encode(now)) - now).norm())  # what storing has added, and more
        if stored.shape != now.shape or float((stored - now).norm()) > _NEAR * float(now.norm()) + coarse + 1e-12:
            raise MismatchError(
                "the first batch has other gradients than the folder holds for it: losses_fn has "
                "changed. Choose another "
                "folder, or remove this one"
            )

    # The work.

    def _missing_chunks(self, checkpoint: int) -> int:
        """Make what is missing and this rank's; the number of batches there are."""
        size, total = self.folder.plan.batches_per_chunk, loaders.length(self.loader)
        lacking: dict[int, bool] = {}
        seen, finished, is_there = 0, self.folder.noted("samples"), self._finder(checkpoint)

        def mine(number: int) -> bool:
            nonlocal seen
            seen = max(seen, number + 1)
            chunk = number // size
            if finished is not None and chunk >= len(finished):
                raise MismatchError(
                    "the loader has more batches than the folder was built from: choose another folder, or "
                    "remove this one"
                )
            if chunk not in lacking:
                lacking[chunk] = self.team.takes(chunk) and not is_there(chunk)
            return lacking[chunk]

        count = None if total is None else sum(mine(number) for number in range(total))
        making = _Making(self, checkpoint)
        with progress(self._title(checkpoint), count, self.show, first=self.team.rank == 0) as bar:
            for number, batch in self.team.batches(self.loader, mine):
                making.add(number, batch)
                bar.advance(making.last)
            making.write()
        return seen

    def _finder(self, checkpoint: int) -> Callable[[int], bool]:
        """Says whether a chunk is there; in lockstep by what the first rank finds now."""
        if not self.team.lockstep:
            return lambda chunk: self._is_found(checkpoint, chunk)
        found: list[int] = []
        with self.team.between():
            if self.team.rank == 0:
                found = [chunk for chunk in self.folder.chunks(checkpoint) if self._is_found(checkpoint, chunk)]
        return set(self.team.of_first(found)).__contains__

    def _is_found(self, checkpoint: int, chunk: int) -> bool:
        if not self.folder.has(checkpoint, chunk):
            return False
        self.folder.open(checkpoint, chunk)  # which says so, if it is damaged
        return True

    def _title(self, checkpoint: int) -> str:
        count = len(self.checkpoints)
        return "index" if count == 1 else f"index, checkpoint {checkpoint + 1} of {count}"

    def ids_of(self, batch: Any, count: int, before: int) -> Tensor:
        """(B,): what ``ids_fn`` says, or places in the chunk."""
        if self.ids_fn is None:
            return torch.arange(before, before + count)
        try:
            ids = torch.as_tensor(self.ids_fn(batch), device="cpu").reshape(-1)
        except (TypeError, ValueError) as error:
            raise TypeError(f"ids_fn must return whole numbers, one for each sample: {error}") from error
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"ids_fn must return whole numbers, one for each sample, not {ids.dtype}")
        ids = ids.to(torch.int64)
        if len(ids) != count:
            raise ValueError(f"ids_fn returned {len(ids)} ids for a batch of {count} samples")
        return ids


class _Making:
    """The chunk that is being made, already in the dtype that it is stored in."""

    def __init__(self, builder: Builder, checkpoint: int) -> None:
        self.builder, self.checkpoint = builder, checkpoint
        self.number: int | None = None
        self.last = 0  # samples of the last batch
        self._forget()

    def _forget(self) -> None:
        self.parts: list[Chunk] = []
        self.data: list[str] = []
        self.samples = 0

    def add(self, number: int, batch: Any) -> None:
        """Take a batch, after writing the chunk before it if this is the first of another."""
        chunk = number // self.builder.folder.plan.batches_per_chunk
        if chunk != self.number:
            self.write()
            self.number = chunk
        data = of_batch(batch)
        if number == 0 and data != self.builder.folder.plan.data:
            raise ValueError(
                "the loader gave another first batch this time than a moment ago: it shuffles, or changes its data at "
                "random, so that ids would mean nothing and a build could not be resumed. Pass one with a fixed order"
            )
        rows = self.builder.subject.rows(batch, seed=number)
        self.parts.append(self._part(batch, rows))
        self.data.append(data)
        self.last = len(rows.losses)
        self.samples += self.last

    def _part(self, batch: Any, rows: Rows) -> Chunk:
        plan, count, line = self.builder.folder.plan, len(rows.losses), rows.line
        if (rows.losses.ndim == 2) != plan.per_token:
            raise ValueError(f"losses_fn returned {rows.losses.ndim} dims, and another number for the first batch")
        if plan.per_token and count and not rows.losses.shape[1]:
            raise ValueError(
                f"batch {_number_of(self)} has losses of shape {tuple(rows.losses.shape)}: a sample needs one token at "
                f"least, or there is nothing to keep of it. Leave such samples out of the data"
            )
        ids = self.builder.ids_of(batch, count, self.samples)
        norms, losses = row_norms(line).to(line.dtype), rows.losses.flatten().to("cpu", torch.float32)
        bad = ~(torch.isfinite(norms) & torch.isfinite(losses))
        if bool(bad.any()):
            per_row = rows.losses.shape[1] if plan.per_token else 1
            wrong = sorted({row // per_row for row in bad.nonzero().flatten().tolist()})
            raise ValueError(
                f"samples {wrong[:8]} of batch {_number_of(self)} have losses or gradients that are "
                f"infinite or NaN: leave them out of "
                f"the data, or give them a loss of zero by torch.where in losses_fn"
            )
        tokens = sample_norms = None
        if plan.per_token:
            length = rows.losses.shape[1]
            sample_norms = row_norms(line.view(count, length, -1).sum(1)).to(line.dtype)
            ids, tokens = ids.repeat_interleave(length), torch.arange(length, dtype=torch.int32).repeat(count)
        codes, scales = plan.encoding.encode(line)
        return Chunk(codes, scales, ids, norms, losses, tokens, sample_norms)

    def write(self) -> None:
        """Write what there is: all ranks hear of it if the one that keeps what all have made cannot."""
        if self.number is None or not self.parts:
            return
        with self.builder.team.between():
            if self.builder.team.keeps:
                self._write()
        self._forget()

    def _write(self) -> None:
        assert self.number is not None
        each = [part.tensors() for part in self.parts]
        self.parts = []
        whole = {name: torch.cat([part.pop(name) for part in each]) for name in list(each[0])}
        chunk = Chunk(whole.pop("codes"), whole.pop("scales", None), **whole)
        self.builder.folder.write(self.checkpoint, self.number, chunk, self.data, self.samples)


def _number_of(making: _Making) -> int:
    """The number of the batch that is being taken."""
    return (making.number or 0) * making.builder.folder.plan.batches_per_chunk + len(making.parts)

"""An index for other tools: checkpoints beside each other, so that scores are inner products with `Index.vectors`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .store import Folder, OpenChunk
from .store.files import make_folder, replace_together, replace_whole


def export(folder: Folder, format: str, path: Path, max_memory: int) -> None:
    """Write an index in one of `FORMATS`."""
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, not {format!r}")
    if not sum(folder.samples):
        raise ValueError("the index is empty: there is nothing to export")
    make_folder(path.parent)
    FORMATS[format](folder, path, max_memory)


def pieces(folder: Folder, max_memory: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Rows (N, C·D) with ids, tokens, losses and norms, a few at a time."""
    start, count = 0, len(folder.plan.checkpoints)
    for number, samples in enumerate(folder.samples):
        opened = [folder.open(checkpoint, number) for checkpoint in range(count)]
        first = opened[0]
        facts = {name: first.get(name) for name in ("ids", "losses", "norms")}
        facts["ids"] = facts["ids"] if folder.plan.own_ids else facts["ids"] + start
        if first.has_tokens:
            facts["tokens"] = first.get("tokens")
        start += samples
        for several in zip(*[chunk.rows(max_memory // count) for chunk in opened], strict=True):
            some = several[0][0]
            yield torch.cat([rows for _, rows in several], 1), {name: t[some] for name, t in facts.items()}


def by_sample(folder: Folder, max_memory: int) -> Iterator[Tensor]:
    """Rows (N, C·D), a few at a time; those of one sample's tokens are added up."""
    begun: Tensor | None = None  # the sum of a sample whose last token has not been seen
    for rows, told in pieces(folder, max_memory):
        if "tokens" not in told:
            yield rows
            continue
        sample = (told["tokens"] == 0).cumsum(0)  # 0 for what belongs to the sample before
        sums = rows.new_zeros(int(sample.max()) + 1, rows.shape[1]).index_add_(0, sample, rows)
        if begun is None:
            sums = sums[1:]
        else:
            sums[0] += begun
        begun = sums[-1]
        yield sums[:-1]
    if begun is not None:
        yield begun.unsqueeze(0)


def _to_npy(folder: Folder, path: Path, max_memory: int) -> None:
    """`path`: float32 (N, C·D); beside it, `.ids.npy` and, if there are any, `.tokens.npy`. All are new, or none."""
    numpy = import_module("numpy")
    rows = sum(len(chunk) for chunk in _chunks(folder))
    width = sum(folder.plan.encoding.widths) * len(folder.plan.checkpoints)
    facts: dict[str, list[Tensor]] = {}

    def write(scratch: Path) -> None:
        """Row after row: a file that is mapped into memory ends the process when the disk is full."""
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
        with scratch.open("wb") as file:
            numpy.lib.format.write_array_header_1_0(file, header)
            for piece, told in pieces(folder, max_memory):
                file.write(piece.contiguous().numpy().astype("<f4", copy=False).data)
                for name in ("ids", "tokens"):
                    if name in told:
                        facts.setdefault(name, []).append(told[name])

    def beside(name: str) -> tuple[Path, Callable[[Path], None]]:
        def write_facts(scratch: Path) -> None:
            with scratch.open("wb") as file:  # to a path, numpy would add an ending
                numpy.save(file, torch.cat(facts[name]).numpy())

        return path.with_suffix(f".{name}.npy"), write_facts

    names = ("ids", "tokens") if folder.plan.per_token else ("ids",)
    replace_together([(path, write), *[beside(name) for name in names]])


def _chunks(folder: Folder) -> list[OpenChunk]:
    return [folder.open(0, number) for number in range(len(folder.samples))]


def _to_parquet(folder: Folder, path: Path, max_memory: int) -> None:
    """One row for each loss: ids, tokens, losses, norms, and ``row``, a list of fixed size."""
    arrow = _package("pyarrow", "pyarrow", "parquet")
    parquet = _package("pyarrow.parquet", "pyarrow", "parquet")

    def write(scratch: Path) -> None:
        writer: Any = None
        try:
            for piece, told in pieces(folder, max_memory):
                columns = {name: arrow.array(t.numpy()) for name, t in told.items()}
                flat = arrow.array(piece.reshape(-1).numpy())
                columns["row"] = arrow.FixedSizeListArray.from_arrays(flat, piece.shape[1])
                table = arrow.table(columns)
                writer = writer or parquet.ParquetWriter(scratch, table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()

    replace_whole(path, write)


def _to_faiss(folder: Folder, path: Path, max_memory: int) -> None:
    """An `IndexFlatIP` with the ids of samples; of tokens, with the numbers of rows."""
    faiss = _package("faiss", "faiss-cpu", "faiss")
    index, start = None, 0
    for piece, told in pieces(folder, max_memory):
        index = index or faiss.IndexIDMap(faiss.IndexFlatIP(piece.shape[1]))
        ids = torch.arange(start, start + len(piece)) if "tokens" in told else told["ids"]
        index.add_with_ids(piece.contiguous().numpy(), ids.numpy())
        start += len(piece)
    replace_whole(path, lambda scratch: faiss.write_index(index, str(scratch)))


def _package(module: str, package: str, format: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"export to {format} needs the package {package}: pip install {package}, or 'persample[export]'"
        ) from error


FORMATS: dict[str, Callable[[Folder, Path, int], None]] = {"npy": _to_npy, "parquet": _to_parquet, "faiss": _to_faiss}

"""The folder of an index: `index.json`, which says what it is, and immutable chunks of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch import Tensor

from .encoding import Encoding
from .errors import DamagedError, MismatchError
from .files import SCRATCH, forget, locked, make_folder, safetensors, write_bytes, write_tensors
from .fingerprints import of_tensors

FORMAT = 1
_NAMES = ("codes", "scales", "ids", "norms", "losses", "tokens", "sample_norms")


@dataclass(frozen=True)
class Plan:
    """What an index is made from, and how it is cut into chunks; the same for every process and every resume."""

    sketch: dict[str, Any]
    dtype: str
    parameters: list[list[Any]]  # name, shape, [l, r]
    checkpoints: list[dict[str, Any]]  # source (a path or None) and fingerprint of the model's state
    data: str  # fingerprint of the first batch
    batches: int | None  # of the loader, where it knows
    batches_per_chunk: int
    per_token: bool
    own_ids: bool  # given by a function; otherwise ids are places in a chunk, and chunks lie one after another
    version: str
    format: int = FORMAT

    @property
    def name(self) -> str:
        """A fingerprint of all that decides what is in a chunk, which every chunk carries."""
        told = {key: value for key, value in asdict(self).items() if key not in ("version", "batches")}
        told["checkpoints"] = [checkpoint["fingerprint"] for checkpoint in self.checkpoints]
        return blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def encoding(self) -> Encoding:
        """How rows are stored."""
        return Encoding(self.dtype, tuple(n * m for _, _, (n, m) in self.parameters))  # type: ignore[arg-type]

    @property
    def blocks(self) -> dict[str, tuple[int, int]]:
        """The shape of every parameter's sketch."""
        return {name: (block[0], block[1]) for name, _, block in self.parameters}

    def check(self, other: Plan) -> None:
        """Refuse, by name, to go on with another plan."""
        words = {
            "sketch": "sketch or seed",
            "dtype": "dtype",
            "parameters": "parameters or their shapes",
            "data": "data: the first batch",
            "batches": "data: the number of batches",
            "per_token": "losses per sample or per token",
            "own_ids": "ids from ids_fn or not",
        }
        wrong = [
            f"{said} ({_short(getattr(self, key))} in the folder, {_short(getattr(other, key))} now)"
            for key, said in words.items()
            if getattr(self, key) != getattr(other, key)
            and not (key == "batches" and None in (self.batches, other.batches))
        ]
        mine, theirs = ([c["fingerprint"] for c in plan.checkpoints] for plan in (self, other))
        if mine != theirs:
            wrong.append(f"model: {_which(mine, theirs)}")
        if wrong:
            raise MismatchError(
                f"the folder holds an index of something else: {'; '.join(wrong)}. Choose another folder, or "
                f"remove this one"
            )


@dataclass(frozen=True)
class Chunk:
    """The rows of some consecutive batches under one checkpoint."""

    codes: Tensor  # (N, D)
    scales: Tensor | None  # (N, P)
    ids: Tensor  # (N,)
    norms: Tensor  # (N,)
    losses: Tensor  # (N,)
    tokens: Tensor | None = None  # (N,)
    sample_norms: Tensor | None = None  # (S,): of the sums over each sample's tokens

    def tensors(self) -> dict[str, Tensor]:
        """By the names they have on disk."""
        named = {key: getattr(self, key) for key in _NAMES}
        return {key: t for key, t in named.items() if t is not None}


@dataclass
class Folder:
    """The files of one index."""

    path: Path
    _plan: Plan | None = field(default=None, repr=False)

    @property
    def plan(self) -> Plan:
        """Read from `index.json`."""
        if self._plan is None:
            told = self._read()["plan"]
            try:
                self._plan = Plan(**told)
            except TypeError as error:
                raise DamagedError(
                    f"{self.path / 'index.json'} is damaged, or of another version ({error}): restore it, or build the "
                    f"index in another folder"
                ) from error
        return self._plan

    @property
    def samples(self) -> list[int]:
        """How many samples every chunk has."""
        found = self.noted("samples")
        if found is None:
            raise FileNotFoundError(
                f"the index in {self.path} is not complete: call index.build(loader) again, which makes the "
                f"chunks that are missing"
            )
        try:
            return [int(n) for n in found]
        except (TypeError, ValueError) as error:
            raise self._damaged(error) from error

    def exists(self) -> bool:
        """Has an index been begun here?"""
        return (self.path / "index.json").exists()

    def begin(self, plan: Plan) -> None:
        """Write the plan into an empty folder."""
        make_folder(self.path / "chunks")
        self._write({"plan": asdict(plan)})
        self._plan = plan

    def note(self, **values: Any) -> None:
        """Keep something beside the plan; None removes it."""
        kept = {**self._read(), **values}
        self._write({key: value for key, value in kept.items() if value is not None})

    def noted(self, key: str) -> Any:
        """What `note` has kept."""
        return self._read().get(key)

    def _read(self) -> dict[str, Any]:
        path = self.path / "index.json"
        if not path.exists():
            raise FileNotFoundError(f"{self.path} holds no index: call index.build(loader) first")
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            if found["plan"]["format"] != FORMAT:
                raise DamagedError(f"{path} has format {found['plan']['format']}; this version reads format {FORMAT}")
            plan = Plan(**found["plan"])
            _ = plan.blocks, plan.encoding, plan.name  # which say so, if they cannot be made of it
            return found
        except DamagedError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DamagedError:
        path = self.path / "index.json"
        return DamagedError(f"{path} is damaged ({error!r}): restore it, or build the index in another folder")

    def _write(self, content: dict[str, Any]) -> None:
        write_bytes(self.path / "index.json", (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())

    # Chunks.

    def file(self, checkpoint: int, number: int) -> Path:
        """Where a chunk lies."""
        return self.path / "chunks" / f"{checkpoint:02d}-{number:06d}.safetensors"

    def has(self, checkpoint: int, number: int) -> bool:
        """Is a chunk there?"""
        return self.file(checkpoint, number).exists()

    def chunks(self, checkpoint: int) -> list[int]:
        """The numbers of those that are there."""
        names = [path.stem for path in self.path.glob(f"chunks/{checkpoint:02d}-*.safetensors")]
        return sorted(int(name.split("-")[1]) for name in names if name.split("-")[1].isdigit())

    def write(self, checkpoint: int, number: int, chunk: Chunk, data: Sequence[str], samples: int) -> None:
        """Write a chunk, with the fingerprints of its batches."""
        tensors = chunk.tensors()
        told = {
            "plan": self.plan.name,
            "chunk": [checkpoint, number],
            "samples": samples,
            "data": list(data),
            "content": of_tensors(tensors),
        }
        write_tensors(self.file(checkpoint, number), tensors, json.dumps(told, sort_keys=True))

    def open(self, checkpoint: int, number: int) -> OpenChunk:
        """A chunk, to be read in parts; what is not one of this index is refused by name."""
        return OpenChunk(self, checkpoint, number)

    def locked(self) -> AbstractContextManager[None]:
        """No other build in this folder meanwhile; the system ends it with the process."""
        return locked(self.path)

    def remove_scratch(self) -> None:
        """Remove what processes were writing when they were ended."""
        for path in [*self.path.glob(f"*{SCRATCH}"), *self.path.glob(f"chunks/*{SCRATCH}")]:
            forget(path)


class OpenChunk:
    """A chunk on disk."""

    def __init__(self, folder: Folder, checkpoint: int, number: int) -> None:
        self.path, self.encoding = folder.file(checkpoint, number), folder.plan.encoding
        package = safetensors("safetensors")
        try:
            self._file = package.safe_open(self.path, framework="pt")
            self.told = json.loads((self._file.metadata() or {})["persample"])
            names = set(self._file.keys())
            width = self._file.get_slice("codes").get_shape()[1]
        except FileNotFoundError as error:
            raise DamagedError(
                f"chunk {self.path} is missing: call index.build(loader) again, which makes it anew"
            ) from error
        except (package.SafetensorError, LookupError, TypeError, ValueError, OSError) as error:
            raise DamagedError(
                f"chunk {self.path} is damaged ({error}): remove the file and call index.build(loader) again"
            ) from error
        if self.told.get("plan") != folder.plan.name or self.told.get("chunk") != [checkpoint, number]:
            raise DamagedError(
                f"chunk {self.path} belongs to another index: remove the file and call index.build(loader) again"
            )
        missing = {"codes", "ids", "norms", "losses"} - names
        if missing or width != sum(self.encoding.widths):
            raise DamagedError(
                f"chunk {self.path} is damaged (it lacks {sorted(missing) or 'columns'}): remove the file"
            )
        self._names, self.scaled, self.has_tokens = names, "scales" in names, "tokens" in names

    def __len__(self) -> int:
        return int(self._file.get_slice("codes").get_shape()[0])

    def get(self, name: str) -> Tensor:
        """A whole tensor of the chunk: ids, norms, losses, tokens."""
        found: Tensor = self._file.get_tensor(name)
        return found

    def rows(self, max_bytes: int, within: range | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The rows in float32, or some of them, as many at a time as fit into memory with what they are made from."""
        step = max(1, max_bytes // max(1, 12 * sum(self.encoding.widths)))
        wanted = range(len(self)) if within is None else within
        for start in range(wanted.start, wanted.stop, step):
            some = slice(start, min(start + step, wanted.stop))
            yield some, self.read(some)

    def first(self, count: int) -> Tensor:
        """The first rows, in float32."""
        return self.read(slice(0, min(count, len(self))))

    def read(self, some: slice) -> Tensor:
        """Consecutive rows, in float32."""
        codes = self._file.get_slice("codes")[some]
        return self.encoding.decode(codes, self._file.get_slice("scales")[some] if self.scaled else None)

    def verify(self) -> None:
        """Compare every bit with what was written."""
        tensors = {name: self.get(name) for name in _NAMES if name in self._names}
        if of_tensors(tensors) != self.told.get("content"):
            raise DamagedError(
                f"chunk {self.path} has changed since it was written: remove the file and call index.build(loader), "
                f"which makes it anew"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _which(mine: list[str], theirs: list[str]) -> str:
    if len(mine) != len(theirs):
        return f"{len(mine)} checkpoints in the folder, {len(theirs)} now"
    return (
        f"other parameters or buffers in checkpoint {[a == b for a, b in zip(mine, theirs, strict=True)].index(False)}"
    )

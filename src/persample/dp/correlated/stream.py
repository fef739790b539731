"""The correlated noise of a run: what it remembers in this process, and the file in which that outlives it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from .encoders import Encoder
from .memory import Memory

_VERSION = 1


@dataclass(frozen=True)
class When:
    """Which step of which run a memory is of."""

    run: str
    steps: int


@dataclass
class Stream:
    """Remembers noise from one step to the next.

    Who knows the memory can take the noise out of what was released: its file is as secret as the data. Without it,
    noise is correlated with that of fewer steps: the error grows, and no sensitivity does.
    """

    encoder: Encoder
    size: int  # of the numbers to which this process adds noise
    grid: float
    factor: float
    part: str | None = None  # which part of the model's numbers these are, if others have the rest
    _memory: Memory | None = field(default=None, init=False)
    _begun: int = field(default=0, init=False)  # steps of the run before the first that is remembered

    @property
    def memory(self) -> Memory:
        """What is remembered, which is nothing at first."""
        if self._memory is None:
            self._memory = self.encoder.memory(self.size)
        return self._memory

    def forget(self, steps: int) -> None:
        """Begin anew after so many steps: noise from now on is correlated with none of before."""
        self._memory, self._begun = None, steps

    def save(self, path: Path, when: When, *, finished: bool) -> None:
        """Write the memory to a file that nobody else may read, or remove it if there is nothing more to come.

        A step that failed may be accounted for and not remembered, or by some of the numbers alone. Memory that lags
        behind would bring steps closer together than examples are apart, and is of no use.
        """
        if finished or self._memory is None or self._begun + self._memory.steps != when.steps:
            path.unlink(missing_ok=True)
            return
        about = {"version": _VERSION, "remembered": self.memory.steps, **self._description(when)}
        scratch = path.with_name(path.name + ".new")
        scratch.unlink(missing_ok=True)
        os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        files = import_module("safetensors.torch")
        files.save_file({"memory": self.memory.saved()}, scratch, {"persample": json.dumps(about)})
        with scratch.open("rb+") as file:
            os.fsync(file.fileno())
        scratch.replace(path)

    def load(self, path: Path, when: When) -> str | None:
        """Go on with the memory in a file; or say why not, and begin anew."""
        self.forget(when.steps)
        if not path.exists():
            return f"there is no {path}"
        safetensors = import_module("safetensors")
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                about: dict[str, Any] = json.loads((file.metadata() or {})["persample"])
                kept: Tensor = file.get_tensor("memory")
            remembered = about.pop("remembered")
            if about != {"version": _VERSION, **self._description(when)}:
                return f"{path} is of another step or run, of another plan, or of another number of processes"
            memory = self.encoder.memory(self.size)
            memory.restore(kept, remembered)
        except OSError as error:  # only its owner may read it
            return f"{path} cannot be read: {error!r}"
        except (
            safetensors.SafetensorError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            return f"{path} is damaged: {error!r}"
        self._memory, self._begun = memory, when.steps - memory.steps
        return None

    def _description(self, when: When) -> dict[str, Any]:
        return {
            "run": when.run,
            "steps": when.steps,
            "grid": self.grid,
            "part": self.part,
            "encoder": self.encoder.describe(),
        }

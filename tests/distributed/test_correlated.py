"""Correlated noise in several processes: what one alone would add, and gone on with by each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from persample import dp
from tests.distributed.processes import Processes
from tests.distributed.test_private import EXAMPLES, mlp, private_for, same, train, wrap

STEPS = 8
KINDS: dict[str, dict[str, Any]] = {
    "banded": {"mechanism": "banded", "bands": 3},
    "blt": {"mechanism": "blt", "sampling": "cyclic", "buffers": 2},
}


def planned(kind: str) -> dp.Plan:
    return dp.Plan(
        examples=EXAMPLES,
        batch_size=8,
        steps=STEPS,
        noise_multiplier=1.0,
        delta=1e-3,
        accountant="rdp",
        **KINDS[kind],
    )


def as_alone(rank: int, world: int, kind: str) -> None:
    model, alone = mlp(), mlp()
    train(model, private_for(model, planned(kind), dp.Replicas(model)))
    train(alone, private_for(alone, planned(kind), dp.Team()))
    same(model, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_get_the_noise_of_one_process(two: Processes, kind: str) -> None:
    two.run(as_alone, kind)


def goes_on(rank: int, world: int, kind: str, how: str, path: str) -> None:
    """With the draws that the run would have made next; in earnest, a resumed run has new ones."""
    steady, model, later = (wrap(mlp(), how) for _ in range(3))
    train(steady, private_for(steady, planned(kind)))
    private = private_for(model, planned(kind))
    train(model, private, steps=4)
    private.save(path)
    dist.barrier()
    again = private_for(later, planned(kind))
    again.resume(path)
    again._source.nonce = private._source.nonce
    again._releases.upcoming = private._releases.upcoming
    train(later, again)
    same(later, steady)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("how", "files"), [("plain", 1), ("fsdp", 2)])
def test_noise_is_gone_on_with(two: Processes, kind: str, how: str, files: int, tmp_path: Path) -> None:
    """Replicas: the first process has it all. Shards: each has that of its part, in a file of its own."""
    two.run(goes_on, kind, how, str(tmp_path / "run"))
    kept = sorted(path.name for path in tmp_path.glob("run.noise*"))
    assert kept == ["run.noise", "run.noise-1"][:files]


def loses(rank: int, world: int, how: str) -> None:
    model = wrap(mlp(), how)
    private = private_for(model, planned("banded"))
    train(model, private, steps=4)
    state = private.state_dict()
    if rank:
        private.load_state_dict(state)  # which is said once, by the first
    else:
        with pytest.warns(dp.PrivacyWarning, match="correlated anew from step 5 on"):
            private.load_state_dict(state)
    train(model, private)
    assert private.steps == STEPS


@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_noise_that_is_lost_is_correlated_anew(two: Processes, how: str) -> None:
    two.run(loses, how)


def loses_one_file(rank: int, world: int, path: str) -> None:
    """Only the process whose file is gone knows of it."""
    private = private_for(model := wrap(mlp(), "fsdp"), planned("banded"))
    train(model, private, steps=4)
    private.save(path)
    dist.barrier()
    again = private_for(wrap(mlp(), "fsdp"), planned("banded"))
    assert again._mechanism.stream is not None
    if rank:
        Path(f"{path}.noise-1").unlink()
        with pytest.warns(dp.PrivacyWarning, match=r"correlated anew from step 5 on.*there is no .*run.noise-1"):
            again.resume(path)
    else:
        again.resume(path)
    assert again._mechanism.stream.memory.steps == (0 if rank else 4)


def test_a_shard_says_that_its_noise_is_lost(two: Processes, tmp_path: Path) -> None:
    two.run(loses_one_file, str(tmp_path / "run"))


def knows_its_part(rank: int, world: int) -> None:
    """Parts of one size may be of other rows, where there are more processes or fewer."""
    for how, part in (("plain", None), ("fsdp", f"{rank} of 2")):
        stream = private_for(wrap(mlp(), how), planned("banded"))._mechanism.stream
        assert stream is not None
        assert stream.part == part


def test_noise_is_of_one_part_of_the_model(two: Processes) -> None:
    two.run(knows_its_part)

"""Several processes: the same bytes as one, and a resume with another number of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from persample import influence as pi
from persample.influence.curvature.kinds import Shampoo
from tests.distributed.processes import Processes
from tests.influence import programs
from tests.influence.programs import content, index_of, losses_fn, model_of


def fit(rank: int, world: int, folder: str) -> torch.Tensor:
    index = index_of(Path(folder)).fit(Shampoo())
    return index.scores(programs.batches_of(2, 4, 9)[0])


def fail(rank: int, world: int, folder: str) -> str:
    index = index_of(Path(folder))
    data = programs.batches_of()
    if rank == 1:
        data[2] = (data[2][0] * torch.nan, data[2][1])
    try:
        index.build(data, chunk_bytes=programs.CHUNK["float32"], progress=False)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "built"


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_make_the_bytes_of_one_process(tmp_path: Path, world: int) -> None:
    programs.build(0, 1, str(tmp_path / "one"))
    want = content(tmp_path / "one")
    processes = Processes(world, tmp_path)
    try:
        assert processes.run(programs.build, str(tmp_path / "many")) == [32] * world
        assert content(tmp_path / "many") == want
        for name in ("00-000000", "00-000002"):  # made by another number of processes
            (tmp_path / "one" / "chunks" / f"{name}.safetensors").unlink()
        processes.run(programs.build, str(tmp_path / "one"))
        assert content(tmp_path / "one") == want
        if world > 1:
            said = processes.run(fail, str(tmp_path / "bad"))
            assert "infinite or NaN" in said[1]
            assert "another process of this build has failed" in said[0]
        alone = fit(0, 1, str(tmp_path / "one"))
        for scores in processes.run(fit, str(tmp_path / "many")):
            assert torch.allclose(scores, alone, rtol=1e-4, atol=1e-5)
    finally:
        processes.stop()


def sharded(rank: int, world: int, folder: str) -> None:
    """Data and queries are the same in all processes, and so are the answers; an index is refused before it waits."""
    plain, parted, data = model_of().eval(), model_of().eval(), programs.batches_of()
    fully_shard(parted)
    for ask in (pi.exact, pi.dual):
        want, found = (ask(model, losses_fn, data, data[0], damping=0.1) for model in (plain, parted))
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"\['0.weight', .* are sharded over several processes .* whole model"):
        pi.Index(folder, parted, losses_fn)
    newton = pi.GaussNewton(lambda m, b: m(b[0]), lambda z, b: losses_fn(torch.nn.Identity(), (z, b[1])))
    for product in (newton, pi.Hessian()):
        with pytest.raises(ValueError, match=r"are sharded .* use product=pi\.Fisher"):
            pi.exact(parted, losses_fn, data, data[0], product=product, damping=0.1)


def test_sharded_models(tmp_path: Path) -> None:
    processes = Processes(2, tmp_path)
    try:
        processes.run(sharded, str(tmp_path / "i"))
    finally:
        processes.stop()

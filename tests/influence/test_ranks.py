"""Several processes: the same bytes as one, and a resume with another number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

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


def parted_by(how: str) -> nn.Module:
    model = model_of()
    if how == "fsdp":
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
    elif how == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        first, last = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, mesh, {"0": first, "3": last})
    return model


def sharded(rank: int, world: int, folder: str) -> None:
    """Data and queries are the same in all processes, and so are the answers."""
    plain, parted, data = model_of().eval(), parted_by("fsdp").eval(), programs.batches_of()
    for ask in (pi.exact, pi.dual):
        want, found = (ask(model, losses_fn, data, data[0], damping=0.1) for model in (plain, parted))
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
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


def index_of_parts(rank: int, world: int, how: str, folder: str, checkpoint: str) -> dict[str, Tensor]:
    """Builds, builds again what is missing, fits by drawn labels, asks."""
    index = pi.Index(folder, parted_by(how), losses_fn, sketch=pi.Blocks(4, 4, seed=3))
    data, query = programs.batches_of(), programs.batches_of(2, 4, 9)[0]
    index.build(data, [checkpoint], chunk_bytes=programs.CHUNK["float32"], progress=False)
    if rank == 0 and world > 1:
        (Path(folder) / "chunks" / "00-000001.safetensors").unlink()
    index.build(data, [checkpoint], chunk_bytes=programs.CHUNK["float32"], progress=False)
    found = {"plain": index.scores(query)}
    index.fit(Shampoo(labels="sampled"), data, sample_losses_fn=drawn_losses, progress=False)
    found["sampled"] = index.scores(query)
    index.fit(Shampoo())
    found["stored"] = index.scores(query)
    if world > 1:
        with pytest.raises(ValueError, match="check the index with the whole model"):
            index.check(query)
    return found


def drawn_losses(model: nn.Module, batch: Any, generator: torch.Generator) -> Tensor:
    outputs = model(batch[0])
    labels = torch.multinomial(outputs.detach().softmax(1), 1, generator=generator).squeeze(1)
    return F.cross_entropy(outputs, labels, reduction="none")


def cannot_write(rank: int, world: int, folder: str) -> str:
    """Only the first rank writes; the others would wait for it for ever."""
    index = pi.Index(folder, parted_by("fsdp"), losses_fn, sketch=pi.Blocks(4, 4, seed=3))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr("persample.influence.store.folder.Folder.write", lambda *_: 1 / 0)
        try:
            index.build(programs.batches_of(), chunk_bytes=programs.CHUNK["float32"], progress=False)
        except (ZeroDivisionError, RuntimeError) as error:
            return str(error)
    return "built"


@pytest.mark.parametrize("how", ["fsdp", "tp"])
def test_an_index_of_a_sharded_model_is_that_of_the_whole_one(tmp_path: Path, how: str) -> None:
    torch.manual_seed(4)
    state = {name: t + 0.1 * torch.randn_like(t) for name, t in model_of().state_dict().items()}
    torch.save(state, tmp_path / "state.pt")
    want = index_of_parts(0, 1, "whole", str(tmp_path / "whole"), str(tmp_path / "state.pt"))
    processes = Processes(2, tmp_path)
    try:
        answers = processes.run(index_of_parts, how, str(tmp_path / "parts"), str(tmp_path / "state.pt"))
        for found in answers:
            for kind, scores in found.items():
                torch.testing.assert_close(scores, want[kind], rtol=1e-3, atol=1e-5, msg=kind)
        if how == "fsdp":
            assert chunks(tmp_path / "parts") == chunks(tmp_path / "whole")
            said = processes.run(cannot_write, str(tmp_path / "full"))
            assert "division" in said[0]
            assert "another process of this build has failed" in said[1]
    finally:
        processes.stop()


def chunks(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(folder).items() if name.startswith("chunks") or name == "index.json"}

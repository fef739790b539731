"""Several processes: the same bytes as one, and a resume with another number of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
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


class Failing:
    """Batches without a length, of which one cannot be loaded."""

    def __init__(self, data: list[Any], at: int) -> None:
        self.data, self.at = data, at

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.data):
            if number == self.at:
                raise OSError("this batch is gone")
            yield batch


def not_alike(rank: int, world: int, how: str, kind: str, folder: str) -> str:
    """What the build, or the fit, of a sharded model says if one rank has other data than the other, or none."""
    index = pi.Index(folder, parted_by(how), losses_fn, sketch=pi.Blocks(4, 4, seed=3))
    data = programs.batches_of()
    loaders: dict[str, Any] = {
        "first is gone": Failing(data, 0 if rank else len(data)),
        "one is gone": Failing(data, 3 if rank else len(data)),
        "ends early": data[:-3] if rank else data,
        "begins elsewhere": data[1:] if rank else data,
        "another": [*data[:2], (data[2][0] + rank, data[2][1]), *data[3:]],
    }
    try:
        if kind == "fit":
            index.build(data, chunk_bytes=programs.CHUNK["float32"], progress=False)
            drawn = Shampoo(labels="sampled")
            index.fit(drawn, loaders["one is gone"], sample_losses_fn=drawn_losses, progress=False)
        else:
            index.build(loaders[kind], chunk_bytes=programs.CHUNK["float32"], progress=False)
    except (OSError, ValueError, RuntimeError) as error:
        return str(error)
    return "built"


def computes_no_losses(rank: int, world: int, folder: str) -> str:
    """A rank that fails while the others compute with it cannot tell them, and ends."""

    def some_losses(model: nn.Module, batch: Any) -> Tensor:
        if rank == 1:
            raise ValueError("no losses here")
        return losses_fn(model, batch)

    try:
        pi.Index(folder, parted_by("fsdp"), some_losses).build(programs.batches_of(), progress=False)
    except (ValueError, RuntimeError) as error:
        if rank == 1:
            Path(f"{folder}.txt").write_text(str(error))
            os._exit(1)
        return str(error)
    return "built"


def test_ranks_of_a_sharded_model_do_not_wait_for_one_that_has_other_data(tmp_path: Path) -> None:
    processes = Processes(2, tmp_path)
    try:
        for how, kind in [*(("fsdp", kind) for kind in ("first is gone", "one is gone", "fit")), ("tp", "one is gone")]:
            said = processes.run(not_alike, how, kind, str(tmp_path / f"{how} {kind}"))
            assert "another process of this build has failed" in said[0], kind
            assert "this batch is gone" in said[1], kind
        for how in ("fsdp", "tp"):
            for kind in ("ends early", "begins elsewhere", "another"):
                for text in processes.run(not_alike, how, kind, str(tmp_path / f"{how} {kind}")):
                    assert "the processes have different batches" in text, kind
        with pytest.raises(AssertionError, match="rank 1:\nthe process has ended"):
            processes.run(computes_no_losses, str(tmp_path / "losses"))
        assert (tmp_path / "losses.txt").read_text() == "no losses here"
    finally:
        processes.stop()


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

"""`Index`: what is stored and answered equals autograd's, whatever interrupted the build."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import persample as ps
from persample import influence as pi
from persample.influence import progress as bars
from persample.influence.store import files
from tests.influence import programs
from tests.influence.programs import CHUNK, batches_of, content, index_of, losses_fn, model_of, token_losses_fn
from tests.reference import definition

EXACT = pi.Blocks(None, None)
DATA, QUERY = batches_of(), batches_of(2, 4, 9)[0]


def rows_by_autograd(model: nn.Module, data: list[Any]) -> Tensor:
    model.eval()
    each = [definition(losses_fn(model, batch), model) for batch in data]
    return torch.cat([torch.cat([g.flatten(1) for g in grads.values()], 1) for grads in each])


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("float16", 1e-3), ("int8", 2e-2)])
def test_scores_are_inner_products_of_gradients(tmp_path: Path, dtype: Any, close: float) -> None:
    index = index_of(tmp_path / "i", dtype, EXACT).build(DATA, chunk_bytes=4096)
    model = model_of()
    want = rows_by_autograd(model, [QUERY]) @ rows_by_autograd(model, DATA).t()
    got = index.scores(QUERY, max_memory=3000)
    assert got.shape == (4, 32)
    assert len(index) == 32
    assert float((got - want).abs().max()) <= close * float(want.abs().max())
    for order, sign in (("helpful", 1), ("harmful", -1)):
        hits = index.query(QUERY, k=5, order=order)  # type: ignore[arg-type]
        best = (sign * got).sort(dim=1, descending=True, stable=True)
        assert torch.equal(hits.ids, best.indices[:, :5])
        assert torch.allclose(hits.scores, sign * best.values[:, :5], atol=1e-6)  # read in other parts
    assert index.subject.model.training  # as it was


def test_normalised_scores_are_cosines(tmp_path: Path) -> None:
    index = index_of(tmp_path / "i", sketch=EXACT).build(DATA)
    model = model_of()
    want = torch.cosine_similarity(
        rows_by_autograd(model, [QUERY])[:, None], rows_by_autograd(model, DATA)[None], dim=2
    )
    assert torch.allclose(index.scores(QUERY, normalise=True), want, atol=1e-6)


def test_parameters_add_up(tmp_path: Path) -> None:
    index = index_of(tmp_path / "i").build(DATA, chunk_bytes=CHUNK["float32"])
    hits = index.query(QUERY, k=3, per="parameter")
    assert hits.by_parameter is not None
    assert list(hits.by_parameter) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert torch.allclose(sum(hits.by_parameter.values(), torch.zeros(())), hits.scores, atol=1e-6)
    one = index.scores(QUERY, parameters=["3.bias"])
    assert torch.allclose(one.gather(1, hits.ids), hits.by_parameter["3.bias"], atol=1e-6)


def test_tokens_add_up_to_samples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    data = [torch.randint(7, (n, 4)) for n in (3, 3, 2)]
    tokens = pi.Index(tmp_path / "t", model, token_losses_fn, sketch=EXACT).build(data, chunk_bytes=1)
    whole = pi.Index(tmp_path / "s", model, lambda m, b: token_losses_fn(m, b).sum(1), sketch=EXACT).build(data)
    by_token, query = tokens.scores(data[0], per="token"), data[0]
    assert by_token.shape == (3, 24)
    assert torch.allclose(by_token.view(3, 8, 3).sum(2), whole.scores(query), atol=1e-5)
    for normalise in (False, True):
        want = whole.scores(query, normalise=normalise)
        assert torch.allclose(tokens.scores(query, normalise=normalise), want, atol=1e-5)
    hits = tokens.query(query, k=2, per="token")
    assert hits.tokens is not None
    assert torch.equal(hits.ids * 3 + hits.tokens, by_token.sort(dim=1, descending=True, stable=True).indices[:, :2])
    with pytest.raises(
        ValueError, match=r"no tokens: build one with a losses_fn that returns losses of shape \(B, T\)"
    ):
        whole.query(query, per="token")


def test_checkpoints_are_averaged_and_the_model_is_left_alone(tmp_path: Path) -> None:
    states = [model_of(seed).state_dict() for seed in (1, 2)]
    torch.save(states[1], tmp_path / "b.pt")
    index = index_of(tmp_path / "i", sketch=EXACT)
    before = {name: t.clone() for name, t in index.subject.model.state_dict().items()}
    index.build(DATA, checkpoints=[states[0], tmp_path / "b.pt"])
    want = sum(rows_by_autograd(m, [QUERY]) @ rows_by_autograd(m, DATA).t() for m in (model_of(1), model_of(2)))
    assert torch.allclose(index.scores(QUERY), want / 2, atol=1e-5)
    assert all(torch.equal(t, before[name]) for name, t in index.subject.model.state_dict().items())
    with pytest.raises(ValueError, match=r"not files: pass them by index\.use"):
        index_of(tmp_path / "i", sketch=EXACT).scores(QUERY)
    index.export("npy", tmp_path / "rows.npy")
    import numpy as np

    rows = torch.from_numpy(np.load(tmp_path / "rows.npy"))
    assert torch.allclose(index.vectors(QUERY) @ rows.t(), want / 2, atol=1e-5)
    assert np.load(tmp_path / "rows.ids.npy").tolist() == list(range(32))


KILL = """
import os, sys, signal
from pathlib import Path
from tests.influence import programs
from persample.influence.store import files
folder, point = Path(sys.argv[1]), int(sys.argv[2])
count, real = 0, files.os.fsync
def fsync(number):  # a kill before, between and after the writes of a file and its rename
    global count
    count += 1
    if count == point:
        os.kill(os.getpid(), signal.SIGKILL)
    real(number)
files.os.fsync = fsync
programs.build(0, 1, str(folder))
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", range(1, 13))
def test_a_killed_build_goes_on_to_the_same_bytes(tmp_path: Path, point: int) -> None:
    programs.build(0, 1, str(tmp_path / "whole"))
    ended = subprocess.run(
        [sys.executable, "-c", KILL, str(tmp_path / "killed"), str(point)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == -9
    programs.build(0, 1, str(tmp_path / "killed"))
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_missing_chunks_are_made_again_byte_by_byte(tmp_path: Path, dtype: str) -> None:
    programs.build(0, 1, str(tmp_path), dtype)
    whole = content(tmp_path)
    assert len(whole) == 5
    for name in [*whole][:4]:
        (tmp_path / name).unlink()
        (tmp_path / "chunks" / "left.7.writing").write_bytes(b"half")
        programs.build(0, 1, str(tmp_path), dtype)
        assert content(tmp_path) == whole


def test_a_finished_index_is_not_computed_again(tmp_path: Path) -> None:
    index, calls = index_of(tmp_path), list[int]()
    index.build(DATA)
    counted = pi.Index(
        tmp_path, model_of(), lambda m, b: (calls.append(1), losses_fn(m, b))[1], sketch=pi.Blocks(4, 4, seed=3)
    )
    counted.build(DATA)
    assert len(calls) == 1  # the first batch, which shows that losses are the same


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: index_of(f, seed=5).build(DATA), "model: other parameters or buffers in checkpoint 0"),
        (lambda f: index_of(f, sketch=pi.Blocks(4, 4, seed=4)).build(DATA), "sketch or seed"),
        (lambda f: index_of(f, "int8").build(DATA), r"dtype \(float32 in the folder, int8 now\)"),
        (lambda f: index_of(f).build(batches_of(seed=2)), "data: the first batch"),
        (lambda f: index_of(f).build(DATA[:4]), r"the number of batches \(7 in the folder, 4 now\)"),
        (
            lambda f: pi.Index(f, model_of(), lambda m, b: 2 * losses_fn(m, b), sketch=pi.Blocks(4, 4, seed=3)).build(
                DATA
            ),
            "losses_fn has changed",
        ),
        (lambda f: index_of(f, seed=5).query(QUERY), "other parameters or buffers of the model"),
        (lambda f: index_of(f, sketch=EXACT).query(QUERY), "make the Index with the same"),
        (lambda f: index_of(f).verify(DATA[:-1]), "has 6 batches, and the index was built from 7"),
        (lambda f: index_of(f).verify([*DATA, DATA[0]]), "batch 7 of the loader is not the one"),
        (lambda f: index_of(f).verify([*DATA[:3], DATA[4]]), "batch 3 of the loader is not the one"),
    ],
)
def test_something_else_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    index_of(tmp_path).build(DATA)
    before = content(tmp_path)
    with pytest.raises(pi.MismatchError, match=message):
        change(tmp_path)
    assert content(tmp_path) == before


def test_damaged_and_foreign_chunks_are_named(tmp_path: Path) -> None:
    for name in "ab":
        index_of(tmp_path / name, seed=ord(name)).build(DATA, chunk_bytes=CHUNK["float32"])
    index = index_of(tmp_path / "a", seed=ord("a"))
    index.verify(DATA)
    chunk = tmp_path / "a" / "chunks" / "00-000001.safetensors"
    good = chunk.read_bytes()
    for bad, message in [
        (good[:-1], "is damaged"),
        (b"", "is damaged"),
        ((tmp_path / "b" / "chunks" / "00-000001.safetensors").read_bytes(), "belongs to another index"),
        ((tmp_path / "a" / "chunks" / "00-000000.safetensors").read_bytes(), "belongs to another index"),
    ]:
        chunk.write_bytes(bad)
        for ask in (lambda: index.query(QUERY), lambda: index.build(DATA, chunk_bytes=CHUNK["float32"])):
            with pytest.raises(pi.DamagedError, match=rf"00-000001.safetensors {message}.*remove the file"):
                ask()
    chunk.write_bytes(good[:-3] + b"\x01\x02\x03")
    with pytest.raises(pi.DamagedError, match=r"00-000001.safetensors has changed since it was written"):
        index.verify()
    chunk.unlink()
    with pytest.raises(pi.DamagedError, match=r"00-000001.safetensors is missing: call index.build"):
        index.query(QUERY)
    index.build(DATA, chunk_bytes=CHUNK["float32"])
    assert chunk.read_bytes() == good


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "make room"), (errno.EROFS, "read-only: choose another")])
def test_a_full_or_read_only_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    programs.build(0, 1, str(tmp_path / "whole"))
    real, calls = files.os.fsync, list[int]()

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) > 6:
            raise OSError(number, os.strerror(number))
        real(file)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(pi.StorageError, match=rf"{words}.*all that was finished is kept") as caught:
        programs.build(0, 1, str(tmp_path / "i"))
    assert caught.value.errno == number
    kept = content(tmp_path / "i")
    assert 2 <= len(kept) < 5
    assert not [name for name in kept if name.endswith(".writing")]
    monkeypatch.setattr(files.os, "fsync", real)
    with pytest.raises(FileNotFoundError, match=r"is not complete: call index\.build"):
        index_of(tmp_path / "i").query(QUERY)
    programs.build(0, 1, str(tmp_path / "i"))
    assert content(tmp_path / "i") == content(tmp_path / "whole")


def test_loaders(tmp_path: Path) -> None:
    x, y = (torch.cat(parts) for parts in zip(*DATA, strict=True))
    data = TensorDataset(x, y)
    with pytest.raises(ValueError, match=r"the loader shuffles \(RandomSampler\).*shuffle=False"):
        index_of(tmp_path / "no").build(DataLoader(data, 5, shuffle=True))
    with pytest.raises(TypeError, match="gone through once only: pass a list"):
        index_of(tmp_path / "no").build(iter(DATA))
    with pytest.raises(ValueError, match="no batches"):
        index_of(tmp_path / "no").build([])
    programs.build(0, 1, str(tmp_path / "list"))
    index = index_of(tmp_path / "loader").build(DataLoader(data, 5), chunk_bytes=CHUNK["float32"])
    first = tmp_path / "loader" / "chunks" / "00-000000.safetensors"
    first.unlink()
    index.build(DataLoader(data, 5), chunk_bytes=CHUNK["float32"])
    for name in ("00-000000", "00-000003"):
        mine, other = (load_file(tmp_path / f / "chunks" / f"{name}.safetensors") for f in ("loader", "list"))
        assert all(torch.equal(mine[key], other[key]) for key in other)
    own = index_of(tmp_path / "ids").build(DATA, ids_fn=lambda b: (b[0][:, 0] * 1e6).long())
    assert torch.equal(own.ids(), (x[:, 0] * 1e6).long())
    assert index.ids().tolist() == list(range(32))


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return ((2 * x, y) for x, y in super().__iter__())


def test_batches_of_a_loader_with_a_way_of_its_own_are_never_made_without_it(tmp_path: Path) -> None:
    loader = Doubling(TensorDataset(*(torch.cat(parts) for parts in zip(*DATA, strict=True))), 5)
    folder, size = tmp_path / "i", CHUNK["float32"]
    want = index_of(folder).build(loader, chunk_bytes=size).scores(QUERY)
    assert torch.allclose(want, index_of(tmp_path / "j").build([(2 * x, y) for x, y in DATA]).scores(QUERY), atol=1e-6)
    (folder / "chunks" / "00-000001.safetensors").unlink()
    assert torch.equal(index_of(folder).build(loader, chunk_bytes=size).scores(QUERY), want)
    index_of(folder).verify(loader)


class Shuffling:
    def __iter__(self) -> Iterator[Any]:
        return (DATA[i] for i in torch.randperm(len(DATA)).tolist())


def test_a_loader_that_shuffles_in_a_way_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="another first batch this time than a moment ago: it shuffles"):
        index_of(tmp_path).build(Shuffling())


def test_bad_losses_and_arguments(tmp_path: Path) -> None:
    model = model_of()
    with pytest.raises(ValueError, match=r"shape \(B,\), or \(B, T\) for one per token, not \(\)"):
        pi.Index(tmp_path, model, lambda m, b: losses_fn(m, b).mean()).build(DATA)
    bad = [(DATA[0][0].clone().index_fill_(0, torch.tensor([1]), torch.nan), DATA[0][1])]
    with pytest.raises(ValueError, match=r"samples \[1\] of batch 0 have losses or gradients that are infinite or NaN"):
        pi.Index(tmp_path / "nan", model, losses_fn).build(bad)
    with pytest.raises(ValueError, match="dtype must be one of 'float32', 'float16', 'int8'"):
        index_of(tmp_path, "float8")
    with pytest.raises(FileNotFoundError, match=r"holds no index: call index\.build"):
        index_of(tmp_path / "none").query(QUERY)
    with pytest.raises(TypeError, match=r"params must be names of parameters, \['0.weight'\], not one string"):
        pi.Index(tmp_path, model, losses_fn, params="0.weight")
    index = index_of(tmp_path / "i").build(DATA)
    with pytest.raises(TypeError, match=r"targets as sketches \(Q, D\), index\.vectors\(batch\), or none"):
        pi.select(index, QUERY, count=2, method="diverse")
    with pytest.raises(ValueError, match="k must be a positive integer"):
        index.query(QUERY, k=0)
    with pytest.raises(ValueError, match=r"parameters that the index does not have: \['x'\]"):
        index.query(QUERY, parameters=["x"])
    with pytest.raises(ValueError, match="format must be one of 'npy', 'parquet', 'faiss'"):
        index.export("csv", tmp_path / "x")
    assert index.query(QUERY, k=100).ids.shape == (4, 32)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(tmp_path).build(DATA)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match="needs the package faiss-cpu: pip install"):
        index.export("faiss", tmp_path / "x.faiss")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'persample\[influence\]'"):
        index_of(tmp_path / "other").build(DATA)


def test_check_and_errors(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    found = index.check(DATA[0])
    assert found.samples == 5
    assert found.worst < 1e-6
    errors = index.error(DATA[0])
    assert errors["float32"].rows == 0 < errors["float16"].largest < 1e-3 < errors["int8"].largest < 1e-2


def test_check_of_checkpoints_and_of_regions_that_can_be_gone_through_once(tmp_path: Path) -> None:
    def checkpointed(model: nn.Module, batch: Any) -> Tensor:
        h = checkpoint(model[0], batch[0].clone().requires_grad_(), use_reentrant=True)
        return F.cross_entropy(model[1:](h), batch[1], reduction="none")

    index = pi.Index(tmp_path / "reentrant", model_of(), checkpointed).build(DATA)
    assert index.check(DATA[0]).worst < 1e-6
    torch._dynamo.reset()  # Dynamo keeps what other tests have compiled, with other settings
    try:
        compiled = torch.compile(model_of(), backend="aot_eager")
        assert isinstance(compiled, nn.Module)
        index = pi.Index(tmp_path / "compiled", compiled, losses_fn).build(DATA)
        with pytest.raises(ps.UnsupportedError, match=r"use the model without torch\.compile"):
            index.check(DATA[0])
    finally:
        torch._dynamo.reset()


def test_a_data_parallel_model_is_the_model_itself(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        index = pi.Index(tmp_path, nn.parallel.DistributedDataParallel(model_of()), losses_fn).build(DATA)
    finally:
        dist.destroy_process_group()
    assert torch.equal(pi.Index(tmp_path, model_of(), losses_fn).scores(QUERY), index.scores(QUERY))


@pytest.mark.parametrize("size", [0, -1, "64MB", 1.5])
def test_the_size_of_chunks_is_a_number_of_bytes(tmp_path: Path, size: Any) -> None:
    with pytest.raises(ValueError, match="chunk_bytes must be a whole number of bytes, not"):
        index_of(tmp_path / "i").build(DATA, chunk_bytes=size)
    assert not (tmp_path / "i").exists()


def test_the_bar_says_rate_and_time_left() -> None:
    bar = bars.Silent("index", 10, sys.stderr)
    for _ in range(4):
        bar.advance(50)
    assert bar.line(20.0).endswith(" 4 of 10 batches, 10 samples/s, 0:30 left")


def test_index_json_says_what_it_is(tmp_path: Path) -> None:
    index_of(tmp_path).build(DATA)
    told = json.loads((tmp_path / "index.json").read_text())
    assert told["plan"]["sketch"] == {"kind": "blocks", "left": 4, "right": 4, "seed": 3}
    assert told["plan"]["version"] == ps.__version__

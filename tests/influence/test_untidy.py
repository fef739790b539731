"""Models, data and calls as users have them: what is right is answered exactly, and the rest refused by name."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import persample as ps
from persample import influence as pi
from persample.influence.store import files
from tests.influence.programs import CHUNK, batches_of, content, index_of, losses_fn, model_of, token_losses_fn

DATA, QUERY = batches_of(), batches_of(2, 4, 9)[0]
X, Y = (torch.cat(parts) for parts in zip(*DATA, strict=True))
EXACT = pi.Blocks(None, None)


def products_of(model: nn.Module, query: Any, data: list[Any]) -> Tensor:
    """Inner products of gradients by `ps.grad`, whose own tests hold it against autograd."""
    model.eval()
    line = lambda batch: torch.cat([g.flatten(1).double() for g in ps.grad(losses_fn(model, batch), model).values()], 1)  # noqa: E731
    return torch.cat([line(query) @ line(batch).t() for batch in data], 1)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float16, 5e-3), (torch.bfloat16, 3e-2), (torch.float64, 1e-6)])
def test_other_precisions(tmp_path: Path, dtype: torch.dtype, close: float) -> None:
    model, data = model_of().to(dtype), [(x.to(dtype), y) for x, y in DATA]
    index = pi.Index(tmp_path, model, losses_fn, sketch=EXACT).build(data)
    want = products_of(model_of().double(), (QUERY[0].double(), QUERY[1]), [(x.double(), y) for x, y in DATA])
    got = index.scores((QUERY[0].to(dtype), QUERY[1]))
    assert got.dtype == torch.float32
    assert float((got - want).abs().max()) <= close * float(want.abs().max())
    assert bool(index.fit(pi.Shampoo()).scores(data[0]).isfinite().all())


class Tied(nn.Module):
    """One matrix as embedding and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 9)
        self.head.weight = self.inputs.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inputs(ids).tanh())  # type: ignore[no-any-return]


def test_tied_and_frozen_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Tied(), [(torch.randint(9, (n,)), torch.randint(9, (n,))) for n in (4, 4, 1)]
    torch.save(model.state_dict(), tmp_path / "state.pt")
    index = pi.Index(tmp_path / "i", model, losses_fn, sketch=EXACT).build(data, checkpoints=[tmp_path / "state.pt"])
    assert list(index.folder.plan.blocks) == ["inputs.weight", "head.bias"]
    assert torch.allclose(index.scores(data[0]).double(), products_of(model, data[0], data), atol=1e-5)
    model.head.bias.requires_grad_(False)
    frozen = pi.Index(tmp_path / "f", model, losses_fn).build(data)
    assert list(frozen.folder.plan.blocks) == ["inputs.weight"]
    with pytest.raises(ValueError, match="no trainable parameters"):
        pi.Index(tmp_path / "n", model.requires_grad_(False), losses_fn)


def test_batch_norm_uses_its_own_statistics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model(X)
    index = pi.Index(tmp_path, model, losses_fn, sketch=EXACT).build(DATA)
    assert model.training
    assert index.check(QUERY).worst < 1e-5
    assert torch.allclose(index.scores(QUERY).double(), products_of(model, QUERY, DATA), atol=1e-4)


def test_samples_that_meet_in_a_loss(tmp_path: Path) -> None:
    def centred(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits - logits.mean(0), batch[1], reduction="none")

    with pytest.warns(ps.PerformanceWarning, match="samples interact"):
        index = pi.Index(tmp_path, model_of(), centred).build(DATA[:2])
    with pytest.warns(ps.PerformanceWarning, match="samples interact"):
        assert index.check(DATA[0]).worst < 1e-5


def test_cut_otherwise_the_scores_are_the_same(tmp_path: Path) -> None:
    columns = X.t().contiguous().t()  # not contiguous
    one = [(columns[i : i + 1], Y[i : i + 1]) for i in range(len(X))]
    empty = [DATA[0], (X[:0], Y[:0]), *DATA[1:]]
    want = index_of(tmp_path / "i").build(DATA).scores(QUERY)
    for name, data in {"one": one, "empty": empty}.items():
        index = index_of(tmp_path / name).build(data, chunk_bytes=CHUNK["float32"])
        assert torch.allclose(index.scores(QUERY), want, atol=1e-5)
        assert index.ids().tolist() == list(range(32))


@pytest.mark.parametrize("chunk_bytes", [1, CHUNK["float32"], 2**26])
def test_batches_without_samples_at_first_get_no_chunk_of_their_own(tmp_path: Path, chunk_bytes: int) -> None:
    empty = [(X[:0], Y[:0])] * 2
    index = index_of(tmp_path / "i").build([*empty, *DATA], chunk_bytes=chunk_bytes)
    want = index_of(tmp_path / "want").build(DATA, chunk_bytes=chunk_bytes)
    assert torch.allclose(index.scores(QUERY), want.scores(QUERY), atol=1e-5)
    assert index.ids().tolist() == list(range(32))
    assert all(index.folder.samples)
    batches = index.folder.plan.batches_per_chunk
    assert batches == max(3, want.folder.plan.batches_per_chunk)  # as large as batches with samples make it
    index_of(tmp_path / "i").build([*empty, *DATA], chunk_bytes=chunk_bytes)  # which is there
    with pytest.raises(pi.MismatchError, match="losses_fn has changed"):
        pi.Index(tmp_path / "i", model_of(), lambda m, b: 2 * losses_fn(m, b), sketch=index.subject.sketch).build(
            [*empty, *DATA], chunk_bytes=chunk_bytes
        )


def test_an_index_without_any_samples_is_not_exported(tmp_path: Path) -> None:
    index = index_of(tmp_path / "i").build([(X[:0], Y[:0])] * 2)
    with pytest.raises(ValueError, match="the index is empty: there is nothing to export"):
        index.export("npy", tmp_path / "rows.npy")


@pytest.mark.parametrize("tokens", [False, True])
def test_a_query_tells_how_much_it_has_read(tmp_path: Path, tokens: bool) -> None:
    def per_token(model: nn.Module, batch: Any) -> Tensor:
        return losses_fn(model, batch).unsqueeze(1).expand(-1, 3)

    index = pi.Index(tmp_path, model_of(), per_token if tokens else losses_fn).build(DATA, chunk_bytes=1)
    shares: list[float] = []
    hits = index.query(QUERY, k=2, per="token" if tokens else "sample", progress=shares.append)
    assert torch.equal(hits.scores, index.query(QUERY, k=2, per="token" if tokens else "sample").scores)
    assert shares == sorted(shares)
    assert len(shares) == len(DATA)
    assert shares[-1] == 1


class Stream(IterableDataset[Any]):
    """Without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(X[i], Y[i]) for i in range(self.samples)])


def test_streams_and_workers(tmp_path: Path) -> None:
    bytes_of_two = CHUNK["float32"]
    stream = index_of(tmp_path / "stream").build(DataLoader(Stream(32), 5), chunk_bytes=bytes_of_two)
    loader = DataLoader(TensorDataset(X, Y), 5, num_workers=2)
    workers = index_of(tmp_path / "workers").build(loader, chunk_bytes=bytes_of_two)
    assert torch.equal(stream.scores(QUERY), workers.scores(QUERY))
    missing = tmp_path / "workers" / "chunks" / "00-000001.safetensors"
    before = missing.read_bytes()
    missing.unlink()
    workers.build(loader, chunk_bytes=bytes_of_two)
    assert missing.read_bytes() == before
    whole = content(tmp_path / "stream")
    for samples in (10, 25):
        with pytest.raises(pi.MismatchError, match="the folder holds more"):
            index_of(tmp_path / "stream").build(DataLoader(Stream(samples), 5))
    assert content(tmp_path / "stream") == whole
    with pytest.raises(pi.MismatchError, match="more batches than the folder was built from"):
        index_of(tmp_path / "stream").build(_Longer(DataLoader(Stream(32), 5), 2))


def test_a_stream_that_ends_elsewhere_within_a_chunk(tmp_path: Path) -> None:
    index_of(tmp_path).build(DataLoader(Stream(32), 5), chunk_bytes=3 * CHUNK["float32"] // 2)  # 3 and 3 and 1 batches
    with pytest.raises(pi.MismatchError, match="the loader has 8 batches now, and the folder holds 7"):
        index_of(tmp_path).build(_Longer(DataLoader(Stream(32), 5)))


class _Longer:
    """Some batches more."""

    def __init__(self, loader: Any, more: int = 1) -> None:
        self.loader, self.more = loader, more

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader
        yield from DATA[: self.more]


@pytest.mark.parametrize(
    ("ids_fn", "error", "message"),
    [
        (lambda b: ["a"] * len(b[0]), TypeError, "ids_fn must return whole numbers, one for each sample: "),
        (lambda b: b[0][:, 0], TypeError, r"ids_fn must return whole numbers, one for each sample, not torch\.float32"),
        (lambda b: [1, 2], ValueError, "ids_fn returned 2 ids for a batch of 5 samples"),
    ],
)
def test_ids_that_are_none(tmp_path: Path, ids_fn: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        index_of(tmp_path).build(DATA, ids_fn=ids_fn)


def test_ids_may_come_twice(tmp_path: Path) -> None:
    index = index_of(tmp_path).build(DATA, ids_fn=lambda b: [7] * len(b[0]), chunk_bytes=CHUNK["float32"])
    hits = index.query(QUERY, k=3, per="parameter")
    assert bool((hits.ids == 7).all())
    assert hits.by_parameter is not None
    assert torch.allclose(sum(hits.by_parameter.values(), torch.zeros(())), hits.scores, atol=1e-5)


def test_queries_without_samples_or_numbers(tmp_path: Path) -> None:
    index = index_of(tmp_path).build(DATA)
    assert index.query((QUERY[0][:0], QUERY[1][:0]), k=2).ids.shape == (0, 2)
    assert index.scores((QUERY[0][:0], QUERY[1][:0])).shape == (0, 32)
    assert index.query(QUERY, k=np.int64(2)).ids.shape == (4, 2)  # type: ignore[arg-type]
    for k in (True, False, 2.0, "3", None):
        with pytest.raises(TypeError, match="k must be a positive integer"):
            index.query(QUERY, k=k)  # type: ignore[arg-type]
    for k in (0, -1):
        with pytest.raises(ValueError, match="k must be a positive integer"):
            index.query(QUERY, k=k)
    bad = QUERY[0].clone().index_fill_(0, torch.tensor([1]), torch.nan)
    with pytest.raises(ValueError, match=r"queries \[1\] have gradients that are infinite or NaN"):
        index.query((bad, QUERY[1]))
    with pytest.raises(ValueError, match=r"samples \[0, 1, 2, 3, 4\] of batch 0 have losses or gradients"):
        pi.Index(tmp_path / "n", model_of(), lambda m, b: losses_fn(m, b) + torch.nan).build(DATA)


def test_a_curvature_that_is_none(tmp_path: Path) -> None:
    index = index_of(tmp_path).build(DATA)
    with pytest.raises(TypeError, match=r"curvature must be one such as pi\.Shampoo\(\), or None, not str"):
        index.fit("kfac")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="damping must be finite and not negative"):
        index.fit(pi.Shampoo(), damping=-1)


def test_labels_are_drawn_with_a_generator_too(tmp_path: Path) -> None:
    index = index_of(tmp_path).build(DATA)
    sampled = pi.categorical(lambda model, batch: model(batch[0]))
    index.fit(pi.Shampoo(labels="sampled"), DATA, sample_losses_fn=sampled)
    first = index.scores(QUERY)
    index.fit(pi.Shampoo(labels="sampled"), DATA, sample_losses_fn=sampled)
    assert torch.equal(index.scores(QUERY), first)


def test_a_fit_that_is_killed_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(tmp_path).build(DATA, checkpoints=[model_of(s).state_dict() for s in (1, 2)])
    before = index.fit(pi.Shampoo(), damping=0.1).scores(QUERY)
    real, calls = files.os.fsync, list[int]()
    for point in range(1, 6):
        calls.clear()

        def killed(number: int, point: int = point) -> None:
            calls.append(number)
            if len(calls) == point:
                raise KeyboardInterrupt
            real(number)

        monkeypatch.setattr(files.os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            index.fit(pi.KFAC(), damping=0.5)
        monkeypatch.setattr(files.os, "fsync", real)
        again = index_of(tmp_path).use([model_of(s).state_dict() for s in (1, 2)])
        assert torch.equal(again.scores(QUERY), before)
    index.fit(pi.KFAC(), damping=0.5)
    assert len(list(tmp_path.glob("curvature-*"))) == 2  # of what does not count any more, nothing is left
    index.fit(None)
    assert not list(tmp_path.glob("curvature-*"))


BUILDS = """
import sys, time
from importlib import import_module
from pathlib import Path
from tests.influence.programs import batches_of, index_of
class Slow(list):
    def __getitem__(self, k):
        print("at", flush=True)
        time.sleep(600)
index_of(Path(sys.argv[1])).build(Slow(batches_of()))
"""


def test_two_builds_at_once_are_refused(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", BUILDS, str(tmp_path / "i")], env=env, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            with pytest.raises(pi.StorageError, match="another process is building this index: wait for it"):
                index_of(tmp_path / "i").build(DATA)
        finally:
            other.kill()
    assert len(index_of(tmp_path / "i").build(DATA)) == 32  # a lock ends with its process


def test_what_is_not_an_index(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(pi.StorageError, match="a file is in its way: choose another folder"):
        index_of(tmp_path / "file").build(DATA)
    with pytest.raises(ValueError, match="no batches"):
        index_of(tmp_path / "none").build([])
    assert not (tmp_path / "none").exists()
    index_of(tmp_path / "i").build(DATA)
    told = json.loads((tmp_path / "i" / "index.json").read_text())
    del told["plan"]["dtype"]
    for text in ("", "[]", json.dumps(told)):
        (tmp_path / "i" / "index.json").write_text(text)
        with pytest.raises(pi.DamagedError, match=r"index\.json is damaged"):
            index_of(tmp_path / "i").query(QUERY)


@pytest.mark.parametrize("max_memory", [1, 2000, 2**28])
def test_every_amount_of_memory_gives_the_same(tmp_path: Path, max_memory: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    data = [torch.randint(7, (3, length)) for length in (4, 7, 2, 5)]
    for dtype in ("float32", "int8"):
        index = pi.Index(tmp_path / dtype, model, token_losses_fn, dtype=dtype)  # type: ignore[arg-type]
        index.build(data, checkpoints=[model.state_dict(), model.state_dict()], chunk_bytes=2000)
        for options in ({}, {"normalise": True}, {"per": "token"}, {"parameters": ["1.bias"]}):
            few, all_ = (index.query(data[0], 5, max_memory=m, **options) for m in (max_memory, 2**30))  # type: ignore[arg-type]
            assert torch.allclose(few.scores, all_.scores, atol=1e-5)
            want = index.scores(data[0], max_memory=2**30, **options)  # type: ignore[arg-type]
            assert torch.allclose(index.scores(data[0], max_memory=max_memory, **options), want, atol=1e-5)  # type: ignore[arg-type]
        hits = index.query(data[0], 5, per="parameter", max_memory=max_memory)
        assert hits.by_parameter is not None
        assert torch.allclose(sum(hits.by_parameter.values(), torch.zeros(())), hits.scores, atol=1e-4)
        for name, share in hits.by_parameter.items():
            assert torch.allclose(index.scores(data[0], parameters=[name]).gather(1, hits.ids), share, atol=1e-4)


def test_an_export_to_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(tmp_path / "i").build(DATA)
    index.export("npy", tmp_path / "rows.npy")
    assert np.load(tmp_path / "rows.npy").shape == (32, 35)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(pi.StorageError, match="the disk is full"):
        index.export("npy", tmp_path / "other.npy")
    assert [path.name for path in tmp_path.glob("other*")] == []


@pytest.mark.parametrize("failing", ["rows.npy", "rows.ids.npy", "rows.tokens.npy"])
def test_files_of_an_export_are_replaced_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def per_token(model: nn.Module, batch: Any) -> Tensor:
        return losses_fn(model, batch).unsqueeze(1).expand(-1, 3)

    def folder() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.glob("rows*")}

    few, all_ = (pi.Index(tmp_path / str(n), model_of(), per_token).build(DATA[:n]) for n in (2, len(DATA)))
    few.export("npy", tmp_path / "rows.npy")
    before = folder()
    assert sorted(before) == ["rows.ids.npy", "rows.npy", "rows.tokens.npy"]
    opened = Path.open

    def full(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if path.name.startswith(f"{failing}.") and mode == "wb":
            opened(path, mode).close()  # begun, and then there is no more room
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, mode, *rest, **more)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "open", full)
        with pytest.raises(pi.StorageError, match=f"the disk is full.*{failing}|{failing}.*the disk is full"):
            all_.export("npy", tmp_path / "rows.npy")
    assert folder() == before
    all_.export("npy", tmp_path / "rows.npy")
    rows, ids, tokens = (np.load(tmp_path / f"rows{name}.npy") for name in ("", ".ids", ".tokens"))
    assert len(rows) == len(ids) == len(tokens) == 96


def test_diverse_selection_is_the_best_with_weights_of_at_least_zero() -> None:
    from scipy.optimize import nnls

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 12, generator=generator)
    rows[1], rows[3] = rows[0], 0  # a copy, and nothing at all
    start = time.process_time()
    chosen = pi.select(rows, count=60, method="diverse", normalise=False)
    assert time.process_time() - start < 30
    target = rows.mean(0).double()
    for count in (1, 5, 12):
        some = pi.select(rows, count=count, method="diverse", normalise=False)
        assert torch.equal(some.ids, chosen.ids[:count])
        _, want = nnls(rows[some.ids].double().t().numpy(), target.numpy())
        assert some.weights is not None
        assert bool((some.weights >= 0).all())
        assert float((target - some.weights @ rows[some.ids].double()).norm()) <= want + 1e-9


def test_exports_for_other_tools(tmp_path: Path) -> None:
    parquet, faiss = import_module("pyarrow.parquet"), import_module("faiss")
    index = index_of(tmp_path / "i").build(
        DATA, chunk_bytes=CHUNK["float32"], ids_fn=lambda b: (b[0][:, 0] * 1e6).long()
    )
    want, vectors = index.scores(QUERY), index.vectors(QUERY)
    index.export("parquet", tmp_path / "rows.parquet")
    table = parquet.read_table(tmp_path / "rows.parquet")
    rows = torch.tensor(table["row"].to_pylist())
    assert torch.allclose(vectors @ rows.t(), want, atol=1e-5)
    assert table["ids"].to_pylist() == index.ids().tolist()
    index.export("faiss", tmp_path / "rows.faiss")
    found, ids = faiss.read_index(str(tmp_path / "rows.faiss")).search(vectors.numpy(), 3)
    hits = index.query(QUERY, k=3)
    assert np.allclose(found, hits.scores.numpy(), atol=1e-5)
    assert ids.tolist() == hits.ids.tolist()

"""What a factory may return for `persample index`, what is said of everything else, and the examples that there are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from persample import influence as pi
from persample._factories import FactoryError
from persample.influence import study
from tests.influence.programs import batches_of, index_of, losses_fn, model_of

FILE = """
import torch
from types import SimpleNamespace
from torch.utils.data import DataLoader
from tests.influence.programs import batches_of, losses_fn, model_of
parts = {"model": model_of(), "losses_fn": losses_fn, "loader": batches_of()}
def factory():
    return """


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield
    sys.modules.pop("_spec_mine", None)


def returning(what: str) -> str:
    Path("mine.py").write_text(FILE + what)
    return "mine.py"


@pytest.mark.parametrize("what", ["parts", "SimpleNamespace(**parts)", "SimpleNamespace(more=1, **parts)"])
def test_a_mapping_or_an_object(what: str) -> None:
    found = study.load(returning(what))
    assert isinstance(found.model, nn.Sequential)
    assert found.sketch == pi.Blocks(16, 16)
    assert found.queries is None


def test_a_file_may_have_the_names_at_its_top() -> None:
    Path("mine.py").write_text(
        "from tests.influence.programs import *\nmodel, loader, queries = model_of(), batches_of(), batches_of()[0]\n"
    )
    assert len(next(study.load("mine.py").query_batches())[0]) == 5


WRONG = {
    "None": r"mine.py\(\) gave a NoneType: it must give a mapping",
    "(1, 2)": r"gave a tuple: it must give",
    "parts['model']": r"gave a Sequential: it must give",
    "{'model': parts['model']}": r"gave no losses_fn and no loader: it must give",
    "SimpleNamespace(model=1)": r"gave no losses_fn and no loader",
    "parts | {'querys': 1}": r"with the name 'querys': did you mean 'queries'\?",
    "parts | {'zzz': 1}": r"with the name 'zzz': known are model, losses_fn, loader, queries",
    "parts | {'model': 1}": r"mine.py\(\): model must be an nn.Module, not a int",
    "parts | {'losses_fn': None}": r"losses_fn must be a function, not None",
    "parts | {'retrain': 3}": r"retrain must be a function, not a int",
    "parts | {'sketch': 16}": r"sketch must be one such as pi.Blocks\(16, 16\), not a int",
    "parts | {'optimizer': 'adam'}": r"optimizer must be a torch.optim.Optimizer, not a str",
    "parts | {'loader': iter([])}": r"can be gone through once only",
    "parts | {'loader': 5}": r"loader must be an iterable of batches",
    "parts | {'loader': DataLoader([1, 2], shuffle=True)}": r"the loader shuffles",
    "1 / 0": r"mine.py\(\) raised ZeroDivisionError: division by zero \(mine.py, line 8\)",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told(what: str) -> None:
    with pytest.raises(FactoryError, match=WRONG[what]):
        study.load(returning(what))


def test_no_factory() -> None:
    Path("mine.py").write_text("def other(): pass")
    with pytest.raises(
        FactoryError, match=r"nor names 'model' and 'losses_fn' and 'loader': say which .*functions other"
    ):
        study.load("mine.py")
    Path("mine.py").write_text("def factory(width): pass")
    with pytest.raises(FactoryError, match="needs arguments width: nothing is ever given, so give them defaults"):
        study.load("mine.py")


def test_batches_are_moved_to_the_device() -> None:
    seen: list[Any] = []

    def fn(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch["x"][0].device.type)
        return model(batch["x"][0]).sum(1)  # type: ignore[no-any-return]

    moved = study.Study(nn.Linear(2, 2), fn, []).moved(torch.device("meta"))
    moved.losses_fn(moved.model, {"x": [torch.ones(3, 2)], "text": "as it is"})
    assert seen == ["meta"]


def test_an_index_is_opened_as_it_was_built(tmp_path: Path) -> None:
    for number, sketch in enumerate([pi.Blocks(2, None, seed=3), pi.Sparse(5, 2), pi.Masked(4, seed=1)]):
        folder = tmp_path / str(number)
        built = index_of(folder, "float16", sketch).build(batches_of())
        opened = pi.Index.open(folder, model_of(), losses_fn)
        assert (opened.subject.sketch, opened.dtype) == (sketch, "float16")
        torch.testing.assert_close(opened.scores(batches_of()[0]), built.scores(batches_of()[0]))
    with pytest.raises(pi.MismatchError, match=r"parameters that the model does not have: \['0.weight', '0.bias'"):
        pi.Index.open(tmp_path / "0", nn.Linear(2, 2), losses_fn)
    with pytest.raises(FileNotFoundError, match="holds no index"):
        pi.Index.open(tmp_path, model_of(), losses_fn)


def test_labels_may_be_drawn_by_a_generator(tmp_path: Path) -> None:
    """As `pi.categorical` draws them; the same ones every time."""
    sampled = pi.categorical(lambda model, batch: model(batch[0]))
    index = index_of(tmp_path / "idx").build(batches_of())
    found = []
    for _ in range(2):
        index.fit(pi.KFAC(labels="sampled"), batches_of(), sample_losses_fn=sampled)
        found.append(index.scores(batches_of()[0]))
    assert torch.equal(*found)
    index.fit(pi.KFAC())
    assert not torch.allclose(index.scores(batches_of()[0]), found[0])


def test_unknown_sketches_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind of sketch 'dense': this version knows blocks, sparse, masked"):
        pi.sketches.sketch_of({"kind": "dense"})


@pytest.mark.parametrize("name", ["digits", "sentences"])
def test_examples_are_the_same_at_every_call(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    spec = f"persample.influence.examples:{name}"
    made = study.load(spec)
    built = made.new_index(tmp_path / "idx").build(made.loader)
    again = study.load(spec, seed=1)
    torch.manual_seed(5)
    assert again.ask(again.open_index(tmp_path / "idx"), 3, "helpful").ids.shape[1] == 3
    assert len(built) == sum(len(batch[0]) if name == "digits" else len(batch) for batch in made.loader)
    assert again.show is not None
    assert again.show(0) is not None
    if again.retrain is not None:
        assert again.retrain(torch.arange(0, 600, 2), 0).shape == (10,)
        assert SimpleNamespace(**again.show_query(0)).label in range(10)  # type: ignore[misc]

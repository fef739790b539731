"""SPEC: what it may be, and what is said about every way in which it can be wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

from persample.audit import AuditError, audit_spec
from persample.audit.problem import Problem, first_losses
from persample.audit.spec import load

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
net = nn.Linear(3, 2)
x, y = torch.randn(6, 3), torch.randint(2, (6,))
def each(output):
    return output.square().sum(1)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every test has a directory and a search path of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith((str(tmp_path), "mine.py", "folder")):
            del sys.modules[name]


def file(body: str, name: str = "mine.py") -> str:
    Path(name).write_text(HEAD + dedent(body))
    return name


def returning(what: str) -> str:
    return file(f"def factory():\n    return {what}\n")


FORMS = {
    "model, inputs": ("(nn.Sequential(net, Each()), x)", "model(inputs)"),
    "a list": ("[nn.Sequential(net, Each()), x]", "model(inputs)"),
    "loss of the output": ("(net, x, each)", "loss(model(inputs))"),
    "loss of model and batch": ("(net, (x, y), losses)", "loss(model, inputs)"),
    "targets": ("(net, x, y, nn.CrossEntropyLoss(reduction='none'))", "loss(model(inputs), targets)"),
    "arguments": ("(net, (x,), each)", "loss(model(*inputs))"),
    "keywords": ("(net, {'input': x}, each)", "loss(model(**inputs))"),
    "mapping": ("{'model': net, 'inputs': x, 'targets': y, 'loss': losses_of}", "loss(model(inputs), targets)"),
    "mapping with a batch": ("{'model': net, 'batch': (x, y), 'loss': losses}", "loss(model, inputs)"),
}
HELPERS = """
class Each(nn.Module):
    def forward(self, output):
        return each(output)
def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
def losses_of(output, targets):
    return F.cross_entropy(output, targets, reduction="none")
def factory():
    return """


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_losses_that_it_describes(name: str) -> None:
    what, how = FORMS[name]
    problem = load(file(HELPERS + what))
    assert problem.how == how
    module = sys.modules["_spec_mine"]
    output = module.net(module.x)
    by_targets = how == "loss(model, inputs)" or "targets" in how
    want = module.losses_of(output, module.y) if by_targets else module.each(output)
    torch.testing.assert_close(first_losses(problem), want)


def test_a_file_may_have_the_names_at_its_top() -> None:
    problem = load(file("model, inputs, loss = net, x, each"))
    assert problem.how == "loss(model(inputs))"
    assert len(first_losses(problem)) == 6
    with pytest.raises(AuditError, match=r"mine.py has no factory to be told a batch size of 3"):
        load("mine.py", batch_size=3)


def test_a_module_in_the_current_directory_is_found() -> None:
    file("class Makers:\n    @staticmethod\n    def one():\n        return net, x, each", "near_by.py")
    assert len(first_losses(load("near_by:Makers.one"))) == 6


def test_a_file_finds_its_neighbours() -> None:
    Path("folder").mkdir()
    Path("folder/beside_it.py").write_text("WIDTH = 3\n")
    file("import beside_it\ndef make():\n    return nn.Linear(beside_it.WIDTH, 2), x, each", "folder/mine.py")
    assert len(first_losses(load("folder/mine.py:make"))) == 6


def test_the_batch_size_and_the_seed_reach_the_factory() -> None:
    name = file("def factory(batch_size=4):\n    return nn.Linear(3, 2), torch.randn(batch_size, 3), each")
    assert [len(first_losses(load(name, batch_size=size))) for size in (2, 5)] == [2, 5]
    assert len(first_losses(load(name))) == 4
    before = torch.get_rng_state()
    first, again, other = (load(name, seed=seed).inputs for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_a_named_tuple_is_one_argument() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(2, 2)])
    assert isinstance(packed, PackedSequence)
    assert Problem(torch.nn.LSTM(2, 2), packed).how == "model(inputs)"


def test_everything_is_moved_to_the_device() -> None:
    problem = load(returning("{'model': net, 'inputs': (x, None, 'text'), 'loss': each}"), device="meta")
    assert problem.inputs[0].device.type == "meta"
    assert problem.inputs[1:] == (None, "text")
    assert problem.model.weight.device.type == "meta"


MISTAKES: dict[str, tuple[str, str]] = {
    "": ("", "SPEC '' names nothing: write package.module:factory"),
    "mine.py:": ("", "SPEC 'mine.py:' names nothing"),
    "no-module:factory": ("", "'no-module' is no name of a module"),
    "not_there:factory": ("", "there is no module 'not_there', searched for from"),
    "torch.not_there:factory": ("", "there is no module 'torch.not_there'"),
    "not_there.py:factory": ("", r"there is no file not_there.py \(looked in"),
    "some/where:factory": ("", "there is no file some/where"),
    ".": ("", "'.' is no name of a module"),
    "./": ("", "./ is a directory: give a .py file"),
    "notes.txt": ("", "notes.txt is no Python file: give a .py file"),
    "mine.py:missing": ("def other(): pass", "mine.py has no 'missing'. It has the functions each, other"),
    "mine.py:factroy": ("def factory(): pass", "mine.py has no 'factroy'. Did you mean 'factory'?"),
    "mine.py:net.nothing": ("", "mine.py has no 'net.nothing'"),
    "mine.py": ("", "mine.py has neither a function 'factory' nor names 'model' and 'inputs'"),
    "mine:x": ("", "mine:x is a Tensor, which cannot be called: name a function that returns"),
    "mine.py:needs": ("def needs(width, depth): pass", "mine.py:needs needs arguments width, depth"),
}


@pytest.mark.parametrize("spec", MISTAKES)
def test_a_wrong_name_is_told(spec: str) -> None:
    body, message = MISTAKES[spec]
    file(body)
    Path("notes.txt").write_text("notes")
    with pytest.raises(AuditError, match=message):
        load(spec)


def test_what_the_code_raises_is_told_with_its_line() -> None:
    with pytest.raises(
        AuditError, match=r"running mine.py raised ZeroDivisionError: division by zero \(mine.py, line 9\)"
    ):
        load(file("1 / 0"))
    with pytest.raises(AuditError, match=r"running mine.py raised SystemExit: 3"):
        load(file("raise SystemExit(3)"))
    with pytest.raises(AuditError, match=r"running mine.py raised ModuleNotFoundError: No module named 'not_there'"):
        load(file("import not_there"))
    with pytest.raises(AuditError, match=r"running mine.py raised SyntaxError: "):
        load(file("def"))
    file("import not_there", "module.py")
    with pytest.raises(AuditError, match=r"importing module raised ModuleNotFoundError: No module named 'not_there'"):
        load("module:factory")
    with pytest.raises(AuditError, match=r"mine.py:make\(\) raised KeyError: 'width' \(mine.py, line 10\)"):
        load(file("def make():\n    return {}['width']") + ":make")


def test_a_factory_that_takes_no_batch_size_cannot_be_told_one() -> None:
    with pytest.raises(AuditError, match=r"mine.py takes no argument batch_size, so it cannot be told 3"):
        load(returning("net, x, each"), batch_size=3)


WRONG = {
    "None": "gave a NoneType: it must give",
    "net": "gave a model without a batch: it must give",
    "(net,)": "gave 1 values: it must give",
    "(net, x, y, each, 3)": "gave 5 values: it must give",
    "{'model': net}": "gave a mapping with the names model: it must give",
    "{'model': net, 'inputs': x, 'criterion': each}": "with the names model, inputs, criterion: it must give",
    "(x, net)": r"mine.py\(\): the model must be an nn.Module, not a Tensor",
    "(net, x, 3)": "the loss must be callable, not a int",
    "{'model': net, 'inputs': x, 'targets': y}": "there are targets but no loss",
    "(net, x, lambda a, b, c: a)": "the loss must take one argument .* or two .*, but takes 3",
    "(net, x, lambda: 0)": "the loss must take one argument .* but takes 0",
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_result_is_told(what: str) -> None:
    with pytest.raises(AuditError, match=WRONG[what]):
        load(returning(what))


LOSSES = {
    "(net, 'text')": r"model\(inputs\) raised TypeError: .*Without a loss the model itself must give the losses",
    "(net, x)": r"model\(inputs\) gave shape \(6, 2\), not \(B,\): return one loss per sample.*Without a loss",
    "(net, x, lambda o: o.mean())": r"loss\(model\(inputs\)\) gave shape \(\), not \(B,\): .*reduction='none'",
    "(net, x, lambda o: {'loss': o})": "gave a dict, not losses of shape",
    "(net, x, lambda o: o.sum(1).detach())": r"gave losses of dtype torch.float32 without a graph",
    "(net, x, lambda o: o.sum(1).long())": r"gave losses of dtype torch.int64 without a graph",
    "(net, x[:1], each)": "the batch has 1 sample: whether samples interact can be asked of two or more",
    "(net, x[:0], each)": "the batch has 0 samples: ",
    "(net, x * float('nan'), each)": "losses of 6 of 6 samples are not finite: 0, 1, 2, 3, 4, 5. Use finite data",
    "(nn.ReLU(), x, each)": r"the model has no trainable parameters \(0 frozen\)",
    "(net.requires_grad_(False), x, each)": r"no trainable parameters \(2 frozen\)",
    "(net, x.t(), each)": r"loss\(model\(inputs\)\) raised RuntimeError: .*shapes cannot be multiplied",
    "(net, (x, y), F.cross_entropy)": r"loss\(model, inputs\) raised TypeError.*for loss\(output, targets\) return",
    "(net, x, lambda o: exit(0))": r"raised SystemExit: 0",
    "(net, x, lambda o: each(o) + count())": "gave other losses at a second call",
}


@pytest.mark.parametrize("what", LOSSES)
def test_wrong_losses_are_told(what: str) -> None:
    name = file(f"import itertools\ncount = itertools.count().__next__\ndef factory():\n    return {what}\n")
    with pytest.raises(AuditError, match=LOSSES[what]):
        audit_spec(name, repeats=0)


def test_a_device_that_is_not_there_is_told() -> None:
    with pytest.raises(AuditError, match="device 'nowhere' cannot be used here: "):
        load(returning("net, x, each"), device="nowhere")


def test_losses_are_the_same_at_every_call_with_dropout_and_statistics() -> None:
    model = torch.nn.Sequential(
        torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 4)),
        torch.nn.BatchNorm1d(4),
        torch.nn.Dropout(),
    )
    problem = Problem(model, torch.randn(6, 3), None, lambda output: output.square().sum(1))
    before = {name: b.clone() for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    assert torch.equal(problem.losses(), problem.losses())
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert torch.equal(state, torch.get_rng_state())

"""`persample.testing.check`: it sees what is wrong, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample.testing import Report, Row, check, definition
from tests import reference
from tests.case_library.functions import OwnLinear
from tests.models import mlp_and_losses
from tests.reference import assert_same


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Let `check` see results that were changed on their way."""

    def wrong(losses: Tensor, params: Any) -> Any:
        result = ps.grad(losses, params)
        change(result)
        return result

    monkeypatch.setattr("persample.testing.compare.grad", wrong)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_right_answer_is_ok(dtype: torch.dtype) -> None:
    model, losses = mlp_and_losses(dtype=dtype)
    report = check(losses, model)
    assert isinstance(report, Report)
    assert report.ok
    assert bool(report)
    assert [row.name for row in report.rows] == [name for name, _ in model.named_parameters()]
    assert [row.shape for row in report.rows] == [tuple(p.shape) for p in model.parameters()]
    assert report.batch == 5
    assert report.warnings == ()
    report.raise_if_wrong()


def test_the_report_prints_a_table() -> None:
    model, losses = mlp_and_losses()
    lines = str(check(losses, model)).splitlines()
    assert lines[0].split() == ["parameter", "shape", "largest", "gradient", "relative", "error"]
    assert set(lines[1]) == {"-", " "}
    assert lines[2].startswith("0.weight")
    assert "(4, 3)" in lines[2]
    assert lines[2].endswith("ok")
    assert lines[-1] == "4 parameters, 5 samples: all agree"


CHANGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "one element a little": lambda g: g["2.weight"][3, 1, 2].mul_(1 + 1e-9),
    "sign": lambda g: g["2.weight"].neg_(),
    "twice": lambda g: g["2.weight"].mul_(2),
    "rows exchanged": lambda g: g["2.weight"].copy_(g["2.weight"].flip(0)),
    "zeros": lambda g: g["2.weight"].zero_(),
    "nan": lambda g: g["2.weight"][0, 0].fill_(torch.nan),
    "inf": lambda g: g["2.weight"][0, 0, 0].fill_(-torch.inf),
    "the mean in every row": lambda g: g["2.weight"].copy_(g["2.weight"].mean(0, keepdim=True).expand(5, 2, 4)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_wrong_answer_is_reported(
    change: Callable[[dict[str, Tensor]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, losses = mlp_and_losses()
    spoil(monkeypatch, change)
    report = check(losses, model)
    assert not report.ok
    assert not report
    assert [row.name for row in report.rows if not row.ok] == ["2.weight"]
    assert report.max_error > 1e-12
    assert "1 WRONG" in str(report).splitlines()[-1]
    assert [line.split()[0] for line in str(report).splitlines() if line.endswith("WRONG")][:1] == ["2.weight"]
    with pytest.raises(AssertionError, match=r"differ from the definition\n(.|\n)*2\.weight .* WRONG"):
        report.raise_if_wrong()


def test_a_gradient_where_there_is_none_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter whose gradient is zero has no scale to measure an error by."""
    model, losses = mlp_and_losses()
    params = {"spare": nn.Parameter(torch.zeros(2).double()), **dict(model.named_parameters())}
    assert check(losses, params).ok
    spoil(monkeypatch, lambda g: g["spare"].fill_(1e-3))
    report = check(losses, params)
    assert [row.name for row in report.rows if not row.ok] == ["spare"]


def test_tolerances_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model, losses = mlp_and_losses()
    spoil(monkeypatch, lambda g: g["2.bias"].mul_(1.01))
    assert not check(losses, model)
    assert check(losses, model, rtol=0.02)
    assert not check(losses, model, rtol=0.005)
    assert check(losses, model, atol=10.0)
    assert not check(losses, model, atol=1e-6)


def test_nan_in_the_same_place_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(1, 3).double() * torch.nan
    assert check(lambda: model(x).square().sum(1), model).ok
    spoil(monkeypatch, lambda g: g["bias"].zero_())
    assert not check(lambda: model(x).square().sum(1), model).ok


def test_a_program_that_is_not_repeatable_is_refused() -> None:
    model, losses = mlp_and_losses()
    noisy = lambda: nn.functional.dropout(losses(), 0.5) + torch.rand(5)  # noqa: E731
    with pytest.raises(ValueError, match=r"losses_fn gave two different results: make it repeatable \(model\.eval\(\)"):
        check(noisy, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.sum(), r"losses must have shape \(B,\) or \(B, K…\), but have shape \(\)"),
        (lambda t: t.detach(), r"losses of shape \(5,\) have no graph"),
    ],
)
def test_wrong_losses_get_the_errors_of_grad(change: Callable[[Tensor], Tensor], message: str) -> None:
    model, losses = mlp_and_losses()
    with pytest.raises((ValueError, RuntimeError), match=message):
        check(lambda: change(losses()), model)


def test_wrong_params_get_the_errors_of_grad() -> None:
    model, losses = mlp_and_losses()
    with pytest.raises(TypeError, match="not generator"):
        check(losses, model.parameters())  # type: ignore[arg-type]


def test_slow_paths_are_noted_and_not_warned_about() -> None:
    w, b, x = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4)), torch.randn(5, 3)
    report = check(lambda: OwnLinear.apply(x, w, b).square().sum(1), [w, b])  # warnings are errors here
    assert report.ok
    assert len(report.warnings) == 2
    assert "OwnLinear" in report.warnings[0]
    assert str(report).count("\nnote: ") == 2


@pytest.mark.parametrize("B", [0, 1])
def test_no_samples_and_one_sample_agree(B: int) -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(B, 3).double()
    report = check(lambda: model(x).square().sum(1), model)
    assert report.ok
    assert report.batch == B
    assert f"2 parameters, {B} samples: all agree" in str(report)


def test_no_parameters_agree() -> None:
    _, losses = mlp_and_losses()
    report = check(losses, [])
    assert report.ok
    assert report.max_error == 0.0
    assert "0 parameters, 5 samples: all agree" in str(report)


def test_sequences_are_named_by_position() -> None:
    model, losses = mlp_and_losses()
    assert [row.name for row in check(losses, list(model.parameters())).rows] == ["0", "1", "2", "3"]


def test_the_definition_is_the_definition() -> None:
    """The public slow way and the one the tests use were written apart."""
    model, losses = mlp_and_losses()
    assert_same(definition(losses(), model), reference.definition(losses(), model))
    table = nn.Embedding(5, 2, sparse=True)
    rows = lambda: table(torch.tensor([[1, 1], [0, 4]])).square().sum((1, 2))  # noqa: E731
    assert_same(definition(rows(), table), reference.definition(rows(), table), rtol=1e-6)


def test_rows_are_plain_records() -> None:
    row = Row("w", (2,), 0.0, 1.0, True)
    with pytest.raises(AttributeError):
        row.ok = False  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_is_rounded_under_autocast_is_no_error(dtype: torch.dtype) -> None:
    """Gradients of float32 parameters are as coarse as what they were computed from; a wrong one is still seen."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 20), nn.LayerNorm(20), nn.Linear(20, 3)), torch.randn(5, 40, 6)

    def losses() -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(x).float().square().mean((1, 2))

    report = check(losses, model)
    assert report.ok, report
    assert report.max_error > 1e-5
    assert not check(losses, model, rtol=1e-6, atol=0.0).ok


@pytest.mark.parametrize("shape", [(5, 1), (5, 5), (5, 2, 3), (1, 4), (0, 3), (5, 0)])
@pytest.mark.parametrize("meet", [True, False])
def test_several_losses_per_sample(shape: tuple[int, ...], meet: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(*(shape if not meet else shape[:1]), 3).double()
    mix = torch.randn(3, *shape[1:]).double()

    def losses() -> Tensor:
        out = model(x)
        return torch.tensordot(out, mix, 1).tanh() if meet else out.square().sum(-1)

    report = check(losses, model)
    assert report.ok, report
    assert report.batch == shape[0]
    assert [row.shape for row in report.rows] == [tuple(p.shape) for p in model.parameters()]
    want = definition(losses(), model)
    each = reference.definition(losses().reshape(-1), model)
    assert_same({name: g.flatten(0, len(shape) - 1) for name, g in want.items()}, each)
    assert all(g.shape[: len(shape)] == shape for g in want.values())


def test_one_of_several_losses_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda g: g["weight"][2, 1].mul_(1.01))
    layer, x = nn.Linear(3, 4).double(), torch.randn(5, 3).double()
    report = check(lambda: layer(x).square(), layer)
    assert [row.ok for row in report.rows] == [False, True]


def test_losses_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda g: g["weight"].copy_(g["weight"].transpose(0, 1).clone()))
    layer, x = nn.Linear(3, 5).double(), torch.randn(5, 3).double()
    assert not check(lambda: layer(x).square(), layer)

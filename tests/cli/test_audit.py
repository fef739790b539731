"""The audit tells exact from wrong, independent from interacting, covered from refused; and leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample.audit import EXIT_CODES, STAGES, AuditError, Report, audit, audit_spec
from persample.audit import run as auditing
from persample.audit.costs import LOOP, PLAIN, STEPS
from persample.audit.memory import peaks
from persample.audit.models import MODELS
from persample.audit.report import Parameter
from persample.testing import definition
from tests import models
from tests.case_library.functions import OwnLinear


def each(output: Tensor) -> Tensor:
    return output.square().sum(1)


def report(model: nn.Module, inputs: Any = None, loss: Callable[..., Tensor] | None = each, **more: Any) -> Report:
    torch.manual_seed(0)
    given = torch.randn(6, 3) if inputs is None else inputs
    return audit(model, given, loss, **{"repeats": 0, **more})


def mlp() -> nn.Sequential:
    return models.mlp(dtype=torch.float32)


def test_a_clean_model_is_exact_and_independent() -> None:
    found = report(mlp())
    assert (found.works, found.exact, found.independent, found.exit_code, found.ok) == (True, True, True, 0, True)
    assert found
    assert found.batch == 6
    assert found.coverage() == {"rule": 4}
    assert [(p.name, p.shape, p.kind) for p in found.parameters] == [
        ("0.weight", (4, 3), "rule"),
        ("0.bias", (4,), "rule"),
        ("2.weight", (2, 4), "rule"),
        ("2.bias", (2,), "rule"),
    ]
    assert found.max_error is not None
    assert found.max_error < 1e-5
    assert found.stack_bytes == 6 * 4 * (12 + 4 + 8 + 2)


def test_the_definition_is_what_it_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(losses: Tensor, params: Any) -> Any:
        found = ps.grad(losses, params)
        found["2.weight"][3] *= 1.01
        return found

    monkeypatch.setattr("persample.testing.compare.grad", wrong)
    found = report(mlp())
    assert [p.name for p in found.parameters if not p.ok] == ["2.weight"]
    assert found.max_error == pytest.approx(0.01, rel=1e-3)
    assert (found.exact, found.exit_code) == (False, 1)
    assert report(mlp(), tolerance=0.1).exit_code == 0


class Of(nn.Module):
    """A module from a function of a linear layer and its input."""

    def __init__(self, fn: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.fn = nn.Linear(3, 2), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.inner, x)


def test_interaction_that_the_graph_shows() -> None:
    found = report(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    assert (found.graph.answer, found.graph.where) == ("interacting", ("NativeBatchNorm",))
    assert (found.rerun.answer, found.rerun.where) == ("interacting", ("module '1' (BatchNorm1d)",))
    assert (found.exact, found.independent, found.exit_code) == (True, False, 3)
    assert any("1.running_mean" in note for note in found.notes)
    assert report(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()).exit_code == 0


def test_interaction_that_only_running_again_shows() -> None:
    def detached(linear: nn.Module, x: Tensor) -> Tensor:
        h: Tensor = linear(x)
        return h - h.mean(0).detach()

    found = report(nn.Sequential(nn.Identity(), Of(detached)))
    assert found.graph.answer == "independent"
    assert (found.rerun.answer, found.rerun.where) == ("interacting", ("module '1' (Of)",))
    assert found.exit_code == 3


def test_interaction_in_the_loss_is_told_from_the_model() -> None:
    def centred(output: Tensor) -> Tensor:
        return each(output - output.mean(0).detach())

    found = report(mlp(), loss=centred)
    assert (found.rerun.answer, found.rerun.where) == ("interacting", ("the loss",))
    assert found.exit_code == 3


def test_targets_are_cut_with_the_inputs() -> None:
    y = torch.randint(2, (6,))
    found = report(mlp(), loss=lambda o, t: F.cross_entropy(o, t, reduction="none"), targets=y)
    assert found.rerun.answer == "independent"
    assert found.exit_code == 0


def test_what_cannot_be_run_again_is_unknown() -> None:
    weights = torch.arange(6.0)  # belongs to the samples, but is not part of the batch
    found = report(mlp(), loss=lambda output: each(output) * weights)
    assert (found.rerun.answer, found.independent, found.exit_code) == ("unknown", None, 5)
    assert "could not be run on a part of the 6 samples" in found.rerun.reason


def test_what_the_graph_hides_is_unknown() -> None:
    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return OwnLinear.apply(x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]

    found = report(Hidden(3, 2))
    assert (found.graph.answer, found.rerun.answer, found.exit_code) == ("unknown", "independent", 5)
    assert "OwnLinear" in found.graph.reason
    assert "independent=True" not in found.graph.reason
    assert found.coverage() == {"fallback": 2}


def test_reentrant_checkpoints_are_compared() -> None:
    class Reentrant(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)  # type: ignore[no-any-return]

    found = report(Reentrant(3, 2), repeats=1)
    assert (found.works, found.exact, found.exit_code) == (True, True, 0)
    assert found.coverage() == {"rule": 2}


def test_a_refusal_is_told() -> None:
    class Forgetful(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            noisy = lambda x: nn.functional.dropout(nn.functional.linear(x, self.weight, self.bias))  # noqa: E731
            return checkpoint(noisy, x.requires_grad_(), use_reentrant=True, preserve_rng_state=False)  # type: ignore[no-any-return]

    found = report(Forgetful(3, 2), repeats=1)
    assert (found.works, found.exact, found.exit_code) == (False, False, 4)
    assert "preserve_rng_state=True" in (found.refusal or "")
    assert found.coverage() == {"refused": 2}
    assert found.costs == ()
    assert "refused: " in str(found)


def test_hooks_are_a_refusal() -> None:
    model = mlp()
    model[0].weight.register_hook(lambda g: g)
    found = report(model)
    assert found.exit_code == 4
    assert "0.weight" in (found.refusal or "")


def test_whatever_goes_wrong_in_the_comparison_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(losses: Tensor, params: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("persample.testing.compare.grad", broken)
    found = report(mlp())
    assert found.exit_code == 4
    assert (found.refusal or "").startswith("RuntimeError: out of luck")


def test_unreached_and_frozen_parameters_are_counted() -> None:
    model = mlp()
    model.spare = nn.Parameter(torch.ones(2))
    model[0].requires_grad_(False)
    found = report(Reaching(model))
    assert found.frozen == 2
    assert found.coverage() == {"rule": 2, "zeros": 1}
    assert "the losses do not reach net.spare: their gradients are zeros" in found.notes
    assert found.exit_code == 0


class Reaching(nn.Module):
    """Uses the layers of a network, but not what was added to it."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def test_dropout_is_no_obstacle() -> None:
    assert report(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), repeats=1).exit_code == 0


def test_nothing_is_left_behind() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    torch.manual_seed(5)
    state, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    audit(model, torch.ones(6, 3) * torch.arange(6.0).unsqueeze(1), each, repeats=2)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_costs_are_relative_to_a_plain_step() -> None:
    found = report(mlp(), repeats=3)
    assert [c.name for c in found.costs] == [*STEPS, LOOP]
    assert [c.rounds for c in found.costs] == [3, 3, 3, 3, 1]
    plain = found.costs[0]
    assert (plain.name, plain.ratio, plain.low, plain.high) == (PLAIN, 1.0, 1.0, 1.0)
    for cost in found.costs:
        assert 0 < cost.low <= cost.ratio <= cost.high
        assert cost.ms > 0
        assert cost.bytes_above is None


def test_time_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is made slow is seen to be slow."""
    now = [0.0]

    def slow(losses: Tensor, model: nn.Module) -> None:
        now[0] += 3.0

    def plain(losses: Tensor, model: nn.Module) -> None:
        now[0] += 1.0

    monkeypatch.setattr("persample.audit.costs.STEPS", {PLAIN: plain, "norms": slow})
    monkeypatch.setattr("persample.audit.costs.time.perf_counter", lambda: now[0])
    found = {c.name: c for c in report(mlp(), repeats=5).costs}
    assert found["norms"].ratio == 3.0
    assert found["norms"].ms == 3000.0
    assert found["norms"].rounds == 4  # 2 for warming up and 3 took 20 seconds: no further one is begun


def test_memory_is_that_of_what_is_written_out() -> None:
    """All gradients of 64 samples are 21 MB; norms need none of that."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("memory is measured on Linux only")
    found = audit_spec("persample.audit.models:mlp", repeats=1)
    above = {c.name: c.bytes_above for c in found.costs}
    assert above[LOOP] is None
    written, norms, plain = above["grad"], above["norms"], above[PLAIN]
    assert written is not None
    assert norms is not None
    assert plain is not None
    assert 0.9 * found.stack_bytes < written < 1.5 * found.stack_bytes
    assert norms < 0.2 * found.stack_bytes
    assert plain < 0.2 * found.stack_bytes
    assert found.activations is not None


def test_memory_that_cannot_be_measured_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("persample.audit.memory._CLEAR_REFS", tmp_path / "none")
    found = audit_spec("persample.audit.models:mlp", batch_size=2, repeats=1)
    assert found.notes == ("memory can be measured on Linux only",)
    assert found.exit_code == 0
    monkeypatch.undo()
    monkeypatch.setattr("persample.audit.memory._CHILD", "raise SystemExit('lost its way')")
    if Path("/proc/self/clear_refs").exists():
        with pytest.raises(AuditError, match="memory could not be measured in a process of its own: lost its way"):
            peaks("persample.audit.models:mlp", batch_size=2, seed=0)


def test_too_little_memory_is_told_before_it_runs_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 1 kB\n")
    monkeypatch.setattr(auditing, "_MEMINFO", meminfo)
    with pytest.raises(
        AuditError, match=r"gradients of 6 samples .* needs about 0.0 GB, and 0.0 GB are free: use fewer"
    ):
        report(mlp())


def test_stages_are_told_as_they_begin() -> None:
    told: list[str] = []
    report(mlp(), repeats=1, progress=told.append)
    assert told == list(STAGES[:5])


def test_a_report_is_plain_values_and_text() -> None:
    found = report(mlp(), repeats=1)
    data = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert data["exit_code"] == 0
    assert data["parameters"][0] == {
        "name": "0.weight",
        "shape": [4, 3],
        "handled": ["rule: Outer"],
        "error": found.parameters[0].error,
        "magnitude": found.parameters[0].magnitude,
        "ok": True,
        "kind": "rule",
    }
    text = str(found)
    assert text.splitlines()[0] == "Sequential: 6 samples, losses = loss(model(inputs))"
    assert text.splitlines()[-1] == EXIT_CODES[0]
    for name in ("0.weight", "rule: Outer", "by the graph: independent", LOOP):
        assert name in text


def test_what_is_not_finite_is_a_string_in_json() -> None:
    found = report(mlp())
    odd = Parameter("a", (1,), ("rule: Dense",), float("inf"), float("nan"), False)
    changed = Report(**{**{n: getattr(found, n) for n in Report.__dataclass_fields__}, "parameters": (odd,)})
    assert json.loads(json.dumps(changed.as_dict(), allow_nan=False))["parameters"][0]["error"] == "inf"
    assert changed.exit_code == 1


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_are_exact_and_independent(name: str) -> None:
    assert audit_spec(f"persample.audit.models:{name}", batch_size=3, repeats=0).exit_code == 0


def test_two_samples_are_enough() -> None:
    assert report(mlp(), inputs=torch.randn(2, 3)).exit_code == 0


def test_the_loop_is_the_definition() -> None:
    """What is timed as one backward per sample is what results are compared with."""
    model, x = mlp(), torch.randn(4, 3)
    rows = definition(each(model(x)), model)
    want = torch.autograd.grad(each(model(x))[2], model[0].weight)[0]
    torch.testing.assert_close(rows["0.weight"][2], want)

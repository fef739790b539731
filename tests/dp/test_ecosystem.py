"""The examples with transformers, PEFT and Lightning: they train, spend what was planned, and leave the model alone."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import persample as ps
from persample import dp
from persample.dp.sampling import poisson
from persample.dp.sources import Seeded
from tests.dp.helpers import flat

SCRIPTS = ("private_transformer", "private_lora", "private_lightning")

# Lightning recommends workers for loaders of any size, and builds nested pytrees by a deprecated function of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
]


def script(name: str) -> Any:
    """Imported when it is needed: these libraries take seconds."""
    module: ModuleType = importlib.import_module(f"examples.{name}")
    return module


def plan(**more: Any) -> dp.Plan:
    base: dict[str, Any] = {"examples": 40, "batch_size": 8, "steps": 6, "noise_multiplier": 1.0, "delta": 1e-5}
    return dp.Plan(**{**base, "accountant": "rdp", **more})


def sparse_plan(**more: Any) -> dp.Plan:
    """With empty batches."""
    found = plan(batch_size=1, steps=12, **more)
    assert 2 < sum(not poisson(found, Seeded(0), step) for step in range(12)) < 10
    return found


def check_spent(private: dp.Private) -> None:
    assert private.steps == private.plan.length
    assert private.spent().epsilon == private.plan.epsilon


def untouched(model: nn.Module) -> bool:
    """No hook is left, and no parameter has been given anything."""
    parts = list(model.modules())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in parts]
    return not any(hooks) and not any(hasattr(p, "grad_sample") for p in model.parameters())


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "transformer" in name else []) for name in SCRIPTS]
)
def test_the_script_trains_within_its_budget(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script(name).main(["--quick"]) == 0
    said = capsys.readouterr().out
    assert "epsilon 3 at delta 1e-05" in said
    assert said.splitlines()[-1].startswith(("epsilon 2.9", "epsilon 3 "))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_trains_to_what_it_promises(name: str) -> None:
    assert script(name).main([]) == 0


# transformers


def bert_trainer(plan_: dp.Plan, folder: Path, **more: Any) -> Any:
    """The example's Trainer with plain SGD, so that a loop can follow it."""
    example = script("private_transformer")
    torch.manual_seed(0)
    trainer = example.trainer(plan_, str(folder), options={"seed": 0, **more.pop("options", {})}, **more)
    without_dropout(trainer.model)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    return trainer


def warmup_and_cosine(step: int, length: int) -> float:
    warmup = length // 10
    if step < warmup:
        return step / warmup
    return 0.5 + math.cos(math.pi * (step - warmup) / (length - warmup)) / 2


@pytest.mark.parametrize(
    ("physical", "make_plan"),
    [
        (None, plan),
        (3, sparse_plan),
        pytest.param(None, sparse_plan, marks=pytest.mark.slow),
        pytest.param(3, plan, marks=pytest.mark.slow),
    ],
)
def test_the_trainer_is_a_loop_of_private_steps(make_plan: Any, physical: int | None, tmp_path: Path) -> None:
    """Parameters after the Trainer are those after a plain loop with its schedule, empty batches included."""
    example, planned = script("private_transformer"), make_plan()
    trainer = bert_trainer(planned, tmp_path, physical_batch_size=physical)
    kind = type(trainer.model)
    trainer.train()
    check_spent(trainer.private)
    assert trainer.state.global_step == planned.length
    assert type(trainer.model) is kind
    assert untouched(trainer.model)

    torch.manual_seed(0)
    model = without_dropout(example.build()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = dp.Private(model, optimizer, planned, ps.ClippedSum(1.0), seed=0)
    for step in range(planned.length):
        optimizer.param_groups[0]["lr"] = 0.5 * warmup_and_cosine(step, planned.length)
        for batch in private.batches(example.reviews(planned.examples, seed=1), steps=1):
            labels = batch.pop("labels")
            private.step(example.losses_of(model(**batch), labels))
    torch.testing.assert_close(flat(trainer.model), flat(model), atol=1e-4, rtol=0)


def test_the_trainer_logs_schedule_and_epsilon_but_no_loss_of_the_training_data(tmp_path: Path) -> None:
    planned = plan(steps=10)
    trainer = bert_trainer(planned, tmp_path)
    trainer.train()
    *steps, end = trainer.state.log_history
    assert [log["step"] for log in steps] == list(range(1, 11))
    assert [log["epsilon"] for log in steps] == [planned.spent(n) for n in range(1, 11)]
    rates = [log["learning_rate"] for log in steps]
    assert rates[0] == 0
    assert sorted(rates[1:], reverse=True) == rates[1:]
    assert [log["epoch"] for log in steps] == pytest.approx([n / 5 for n in range(1, 11)])
    assert all(log["grad_norm"] > 0 for log in steps)
    assert not any("loss" in key for log in [*steps, end] for key in log)


def test_the_trainer_refuses_its_own_accumulation(tmp_path: Path) -> None:
    example = script("private_transformer")
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir=str(tmp_path), gradient_accumulation_steps=2, use_cpu=True)
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be 1: use physical_batch_size="):
        example.PrivateTrainer(model=example.build(), args=arguments, plan=plan())


def test_the_trainer_refuses_shuffled_batches(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="as in Poisson sampling; the plan has 'shuffled'"):
        bert_trainer(plan(sampling="shuffled"), tmp_path)


def test_a_trainer_that_goes_on_from_a_checkpoint_has_not_forgotten_what_was_spent(tmp_path: Path) -> None:
    planned, options = plan(steps=6), {"journal": tmp_path / "journal"}
    first = bert_trainer(planned, tmp_path, options=options)
    first.args.save_strategy, first.args.save_steps = "steps", 3
    first.training_step = stopping(first.training_step, after=4)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert first.private.steps == 4

    second = bert_trainer(planned, tmp_path, options=options)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert second.state.global_step == 6
    check_spent(second.private)  # the step after the checkpoint was spent: the last of the Trainer's steps do nothing


def stopping(step: Any, after: int) -> Any:
    made = []

    def stop(*args: Any) -> Tensor:
        if len(made) == after:
            raise KeyboardInterrupt
        made.append(step(*args))
        return made[-1]  # type: ignore[no-any-return]

    return stop


# PEFT


def test_only_adapters_have_gradients_and_learn() -> None:
    example = script("private_lora")
    torch.manual_seed(0)
    model = example.adapted(example.pretrained(steps=5)).eval()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapters = {name for name, p in model.named_parameters() if p.requires_grad}
    assert adapters
    assert all("lora_" in name for name in adapters)

    ids = example.texts(3, -1, seed=0)
    rows = ps.grad(example.losses_of(model, ids), model)
    assert set(rows) == adapters
    params = [p for p in model.parameters() if p.requires_grad]
    for i, loss in enumerate(example.losses_of(model, ids)):
        expected = torch.autograd.grad(loss, params, retain_graph=True)
        for name, g in zip(rows, expected, strict=True):
            torch.testing.assert_close(rows[name][i], g, atol=1e-6, rtol=1e-4)

    private = example.train(model, example.texts(40, -1, seed=1), plan(), seed=0)
    check_spent(private)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == adapters
    assert all(p.grad is None for p in model.parameters())
    assert untouched(model)


def test_adapters_in_the_trainer(tmp_path: Path) -> None:
    """A PEFT model in `PrivateTrainer`, its base frozen."""
    from peft import LoraConfig, get_peft_model

    planned = plan(steps=3)
    trainer = bert_trainer(planned, tmp_path)
    trainer.model = trainer.model_wrapped = get_peft_model(trainer.model, LoraConfig(target_modules=["query", "value"]))
    trainer.optimizer = None
    trainer.train()
    check_spent(trainer.private)
    assert all("lora_" in name for name in trainer.private.state_dict()["bindings"]["parameters"])


# Lightning


@pytest.mark.filterwarnings("ignore::persample.dp.PrivacyWarning")
@pytest.mark.parametrize("make_plan", [plan, sparse_plan])
def test_lightning_is_a_loop_of_private_steps(make_plan: Any) -> None:
    example = script("private_lightning")
    data, held_out = example.load()
    data.tensors = tuple(t[:40] for t in data.tensors)
    found, planned = [], make_plan()
    for physical in (32, 3):
        torch.manual_seed(0)
        model = nn.Linear(30, 2)
        module = example.PrivateClassifier(model, data, planned, seed=0)
        module.physical_batch_size = physical
        training = example.trainer(planned)
        training.fit(module, val_dataloaders=DataLoader(held_out, batch_size=len(held_out)))
        check_spent(module.private)
        assert training.global_step == planned.length
        assert module.lr_schedulers().last_epoch == planned.length
        assert training.callback_metrics["epsilon"] == pytest.approx(planned.epsilon)
        assert untouched(model)
        found.append(flat(model))

    torch.manual_seed(0)
    model = nn.Linear(30, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, planned.length)
    private = dp.Private(model, optimizer, planned, ps.ClippedSum(1.0), seed=0)
    for _ in range(planned.length):
        for x, y in private.batches(data, steps=1):
            private.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
        schedule.step()
    for parameters in found:
        torch.testing.assert_close(parameters, flat(model), atol=1e-4, rtol=0)

"""Train on scikit-learn's breast cancer data privately with PyTorch Lightning, by manual optimization.

Prints accuracy on validation data and what was spent. Exits with status 1 below 93% accuracy (with --quick: if the loss
is not below that of the start).
"""

import argparse
import sys
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import persample as ps
from persample import dp

HELD_OUT, EPSILON, DELTA, GOAL = 119, 3.0, 1e-5, 0.93


class PrivateClassifier(L.LightningModule):
    """Each of Lightning's steps is one of the plan's, empty batches included: schedules and logs count what it counts.

    The data stay with the module, and the training dataloader has nothing but places for steps, because Lightning
    reads ahead, and a batch has to be drawn when its step is made.
    """

    def __init__(self, model: nn.Module, data: TensorDataset, plan: dp.Plan, **options: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.data, self.plan, self.options = model, data, plan, options
        self.physical_batch_size = 32  # in place of the Trainer's accumulate_grad_batches

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.private = dp.Private(self.model, optimizer, self.plan, clip=ps.ClippedSum(1.0), **self.options)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.plan.length)]

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(round(self.plan.steps_per_epoch)), batch_size=1)

    def training_step(self, *_: Any) -> None:
        for x, y in self.private.batches(self.data, steps=1, physical_batch_size=self.physical_batch_size):
            logits = self.model(x.to(self.device))
            self.private.backward(F.cross_entropy(logits, y.to(self.device), reduction="none"))
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.lr_schedulers().step()

    def on_train_epoch_end(self) -> None:
        self.log("epsilon", self.private.spent().epsilon, prog_bar=True)

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        x, y = batch
        logits = self.model(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_accuracy", (logits.argmax(1) == y).float().mean())


def load() -> tuple[TensorDataset, TensorDataset]:
    """Data to train with and to validate with; the latter are taken to be public, and set the scale of the columns."""
    found = load_breast_cancer()
    x, y = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    public, secret = order[:HELD_OUT], order[HELD_OUT:]
    x = (x - x[public].mean(0)) / x[public].std(0)
    return TensorDataset(x[secret], y[secret]), TensorDataset(x[public], y[public])


def trainer(plan: dp.Plan, **more: Any) -> L.Trainer:
    """Quiet and without files; `max_steps` is the plan's length."""
    return L.Trainer(
        max_steps=plan.length,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    torch.manual_seed(0)
    data, held_out = load()
    plan = dp.Plan(examples=len(data), batch_size=100, epochs=2 if quick else 10, epsilon=EPSILON, delta=DELTA)
    print(plan, "\n")
    model = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))
    module = PrivateClassifier(model, data, plan, seed=0)  # a seed for tests: leave it out in earnest
    validation = DataLoader(held_out, batch_size=HELD_OUT)
    training = trainer(plan)
    (before,) = training.validate(module, validation, verbose=False)
    training.fit(module, val_dataloaders=validation)
    (after,) = training.validate(module, validation, verbose=False)
    for name in ("val_loss", "val_accuracy"):
        print(f"{name}: {before[name]:.3f} before, {after[name]:.3f} after")
    print(module.private.spent())
    good = after["val_loss"] < before["val_loss"] if quick else after["val_accuracy"] >= GOAL
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Train a small BERT privately with the Trainer of `transformers`: is a review friendly or not?

`PrivateTrainer` is what you would copy. Prints what the Trainer logs, accuracy and what was spent. Exits with status 1
below 80% accuracy. With --quick everything is smaller, and 60% are enough.
"""

import argparse
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer, TrainingArguments

import persample as ps
from persample import dp

WORDS, LENGTH = 40, 12  # the first half of the words is friendly
PADDING, BEGIN = 0, 1  # these are no words; the classifier looks at what is made of the second
EPSILON, DELTA = 3.0, 1e-5


class PrivateTrainer(Trainer):
    """A Trainer whose every step is a private one.

    ``compute_loss_func`` has to return one loss per sample. Each of the Trainer's steps is one of the plan's, empty
    batches included, so that its learning-rate schedule, logs and callbacks count what the plan counts. The loss on
    the training data, which has no noise, is not logged; epsilon is.

    Args:
        plan, clip, options: for `dp.Private`.
        physical_batch_size: how many samples fit into memory, in place of gradient_accumulation_steps.
        more: as for a Trainer.
    """

    def __init__(
        self,
        *,
        plan: dp.Plan,
        clip: ps.ClippedSum | dp.AdaptiveClip | None = None,
        physical_batch_size: int | None = None,
        options: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        if self.args.gradient_accumulation_steps != 1:
            raise ValueError("gradient_accumulation_steps must be 1: use physical_batch_size=, which adds up exactly")
        if plan.sampling != "poisson":
            raise ValueError(f"batches are drawn step by step, as in Poisson sampling; the plan has {plan.sampling!r}")
        self.args.max_steps = plan.length
        self.plan, self.clip, self.options = plan, clip, options or {}
        self.physical_batch_size = physical_batch_size
        self.private: dp.Private | None = None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        if self.private is None:
            self.private = dp.Private(self.model, optimizer, self.plan, self.clip, **self.options)
        return optimizer

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Places for an epoch's steps. Batches are drawn in the step, because this may be read ahead of time."""
        return DataLoader([{} for _ in range(round(self.plan.steps_per_epoch))], batch_size=1)

    def training_step(self, model: nn.Module, *_: Any) -> Tensor:
        model.train()
        batches = self.private.batches(
            self.train_dataset, steps=1, physical_batch_size=self.physical_batch_size, collate_fn=self.data_collator
        )
        for inputs in batches:  # the parts of one batch
            with self.compute_loss_context_manager():
                losses = self.compute_loss(model, self._prepare_inputs(inputs))
            self.private.backward(losses)  # the Trainer steps the optimizer
        return torch.zeros((), device=self.args.device)

    def log(self, logs: dict[str, float], *more: Any) -> None:
        shown = {name: value for name, value in logs.items() if name not in ("loss", "train_loss")}
        if self.private is not None:
            shown["epsilon"] = self.private.spent().epsilon
        super().log(shown, *more)


def losses_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """One loss per sample. Evaluation takes its mean."""
    return F.cross_entropy(outputs.logits, labels, reduction="none")


def reviews(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Words in any order and number; the label says whether friendly ones prevail."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=generator))
        label = torch.randint(2, (), generator=generator)
        friendly = torch.rand(length, generator=generator) < (0.8 if label else 0.2)
        words = 2 + torch.randint(WORDS // 2, (length,), generator=generator) + (WORDS // 2) * ~friendly
        ids = F.pad(F.pad(words, (1, 0), value=BEGIN), (0, LENGTH - length), value=PADDING)
        found.append({"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": label})
    return found


def build() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=2 + WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=1 + LENGTH,
        pad_token_id=PADDING,
        initializer_range=0.2,  # the default is for layers twenty times as wide
    )
    return BertForSequenceClassification(config)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer(plan: dp.Plan, folder: str, **more: Any) -> PrivateTrainer:
    arguments = TrainingArguments(
        output_dir=folder,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=plan.length // 10,
        max_grad_norm=0.0,  # samples are clipped; clipping the noisy sum once more gains nothing
        logging_steps=max(plan.length // 6, 1),
        per_device_eval_batch_size=256,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    return PrivateTrainer(
        model=build(),
        args=arguments,
        plan=plan,
        clip=ps.ClippedSum(1.0),
        train_dataset=reviews(plan.examples, seed=1),
        eval_dataset=reviews(500, seed=2),
        compute_loss_func=losses_of,
        compute_metrics=accuracy,
        **more,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    torch.manual_seed(0)
    examples, epochs, goal = (1000, 4, 0.6) if quick else (4000, 8, 0.8)
    plan = dp.Plan(examples=examples, batch_size=examples // 16, epochs=epochs, epsilon=EPSILON, delta=DELTA)
    print(plan, "\n")
    options = {"seed": 2}  # for tests, because so little data is not enough with any noise: leave it out in earnest
    with tempfile.TemporaryDirectory() as folder:
        training = trainer(plan, folder, physical_batch_size=128, options=options)
        before = training.evaluate()
        training.train()
        after = training.evaluate()
    for name in ("eval_loss", "eval_accuracy"):
        print(f"{name}: {before[name]:.3f} before, {after[name]:.3f} after")
    print(training.private.spent())
    return 0 if after["eval_accuracy"] > goal else 1


if __name__ == "__main__":
    sys.exit(main())

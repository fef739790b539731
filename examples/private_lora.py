"""Adapt a small causal language model privately with LoRA (PEFT): the base stays as it is, adapters learn.

The base model has learnt, from public text, to count upward; the private text counts downward. Prints loss and what was
spent. Exits with status 1 if the loss is not below half of what it was (with --quick: not below what it was).
"""

import argparse
import sys
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import persample as ps
from persample import dp

WORDS, LENGTH = 20, 12
EPSILON, DELTA = 3.0, 1e-5


def texts(count: int, step: int, seed: int) -> Tensor:
    """Sequences that count by ``step``, modulo the number of words, (count, LENGTH)."""
    start = torch.randint(WORDS, (count, 1), generator=torch.Generator().manual_seed(seed))
    return (start + step * torch.arange(LENGTH)) % WORDS


def losses_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean loss of each text, (B,): `model(ids, labels=ids).loss` would be one number for all of them."""
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def pretrained(steps: int) -> GPT2LMHeadModel:
    """In place of a download: an ordinary training on public text."""
    shape = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(steps):
        losses_of(model, texts(64, 1, seed)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def adapted(base: nn.Module) -> PeftModel:
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))


def train(model: nn.Module, data: Tensor, plan: dp.Plan, **options: Any) -> dp.Private:
    """Nothing here knows of LoRA: what does not require a gradient is not trained, and has no part in the noise."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    private = dp.Private(model, optimizer, plan, clip=ps.ClippedSum(1.0), **options)
    for ids in private.batches(data, physical_batch_size=64):
        step = private.step(losses_of(model, ids))
        if step.updated and step.number % 20 == 0:
            print(private.spent(), flush=True)
    return private


@torch.no_grad()
def mean_loss(model: nn.Module, ids: Tensor) -> float:
    return losses_of(model.eval(), ids).mean().item()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    torch.manual_seed(0)
    examples, epochs, share = (300, 3, 1.0) if quick else (2000, 10, 0.5)
    model = adapted(pretrained(steps=20 if quick else 200))
    model.print_trainable_parameters()
    plan = dp.Plan(examples=examples, batch_size=examples // 16, epochs=epochs, epsilon=EPSILON, delta=DELTA)
    print(plan, "\n")

    test = texts(200, -1, seed=2)
    before = mean_loss(model, test)
    private = train(model, texts(examples, -1, seed=1), plan, seed=0)  # a seed for tests: leave it out in earnest
    after = mean_loss(model, test)
    print(f"\nloss {before:.3f} before, {after:.3f} after\n{private.spent()}")
    return 0 if after < share * before else 1


if __name__ == "__main__":
    sys.exit(main())

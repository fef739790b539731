"""Choose what to adapt a language model to, as LESS does: LoRA (PEFT), Adam's moments, a few examples of the target.

The pool counts by 1, 2, 3, 5 and 7; what is wanted is counting by 3, told by eight examples. After a short warm-up on
random texts, an index of the adapters' gradients is asked for the texts that lead where the target leads. Prints how
many of the chosen count by 3, and the loss of the target after training on them, beside as many texts at random.
Exits with status 1 if the choice is no better than chance.
"""

import sys
import tempfile
from copy import deepcopy

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from persample import influence as pi

WORDS, LENGTH, KINDS, WANTED = 23, 10, (1, 2, 3, 5, 7), 3
EACH, CHOSEN = 120, 60


def texts(count: int, step: int, seed: int) -> Tensor:
    """Sequences that count by ``step``, modulo the number of words."""
    start = torch.randint(WORDS, (count, 1), generator=torch.Generator().manual_seed(seed))
    return (start + step * torch.arange(LENGTH)) % WORDS


def losses_fn(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def adapted() -> PeftModel:
    """A tiny model with random weights, and adapters in all of its layers; the head learns, too."""
    shape = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    base = GPT2LMHeadModel(
        GPT2Config(**shape, **dropout, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)
    )
    layers = ["c_attn", "c_fc", "c_proj"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=layers, modules_to_save=["lm_head"], fan_in_fan_out=True)
    return get_peft_model(base, config)


def train(model: nn.Module, data: Tensor, epochs: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for epoch in range(epochs):
        for ids in torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).split(20):
            optimizer.zero_grad()
            losses_fn(model, data[ids]).mean().backward()
            optimizer.step()
    return optimizer


@torch.no_grad()
def mean_loss(model: nn.Module, ids: Tensor) -> float:
    return losses_fn(model.eval(), ids).mean().item()


def main() -> int:
    torch.manual_seed(0)
    pool = torch.cat([texts(EACH, step, seed=step) for step in KINDS])
    kind = torch.tensor(KINDS).repeat_interleave(EACH)
    target, test = texts(8, WANTED, seed=100), texts(200, WANTED, seed=101)
    random = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))[:CHOSEN]
    start = adapted()

    warm = deepcopy(start)
    optimizer = train(warm, pool[random], epochs=4)
    with tempfile.TemporaryDirectory() as folder:
        index = pi.Index(f"{folder}/index", warm, losses_fn, sketch=pi.Blocks(16, 16, seed=0))
        index.build(list(pool.split(50))).fit(pi.Adam(optimizer, warm))
        chosen = pi.select(index, target, count=CHOSEN).ids

    share = {
        name: (kind[ids] == WANTED).float().mean().item() for name, ids in (("chosen", chosen), ("random", random))
    }
    loss = {"before": mean_loss(start, test)}
    for name, ids in (("random", random), ("chosen", chosen)):
        model = deepcopy(start)
        train(model, pool[ids], epochs=20)
        loss[name] = mean_loss(model, test)
        print(f"{CHOSEN} {name} texts: {share[name]:.0%} count by {WANTED}, loss of the target {loss[name]:.2f} then")
    print(f"(before training {loss['before']:.2f}; {1 / len(KINDS):.0%} of the pool count by {WANTED})")
    return 0 if share["chosen"] > 2 * share["random"] and loss["chosen"] < loss["random"] else 1


if __name__ == "__main__":
    sys.exit(main())

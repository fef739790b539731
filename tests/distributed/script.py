"""A private training script that can be started alone or by torchrun; prints what became of the parameters."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F

import persample as ps
from persample import dp


def main() -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(60, 4).double(), torch.randint(3, (60,)))
    model = torch.nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = dp.Plan(examples=60, batch_size=6, epochs=2, noise_multiplier=1.0, delta=1e-3, accountant="rdp")
    private = dp.Private(model, optimizer, plan, clip=ps.ClippedSum(1.0), seed=1)
    for x, y in private.batches(data):
        private.step(F.cross_entropy(model(x), y, reduction="none"))
    print(f"{float(sum(p.square().sum() for p in model.parameters())):.9f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

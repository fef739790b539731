"""A file with small studies, which tests of `persample index` and `persample lds` write and name."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

from persample.influence.study import Study, load

FILE = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from persample import influence as pi

generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(20, 6, generator=generator), torch.randint(3, (20,), generator=generator)
QX, QY = torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)

def losses_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

def trained(ids, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        losses_fn(model, (X[ids], Y[ids])).mean().backward()
        optimizer.step()
    return model, optimizer

def retrain(ids, seed):
    print("trained by the user")
    return losses_fn(trained(ids, seed)[0], (QX, QY)).detach()

def study(**more):
    print("made by the user")
    model, optimizer = trained(torch.arange(20), 0)
    return {
        "model": model, "losses_fn": losses_fn, "loader": list(zip(X.split(8), Y.split(8))), "queries": (QX, QY),
        "sample_losses_fn": pi.categorical(lambda model, batch: model(batch[0])), "optimizer": optimizer,
        "sketch": pi.Blocks(3, 3), "show": lambda i: f"row {i} <b>&", "show_query": lambda i: {"label": int(QY[i])},
        "retrain": retrain, **more,
    }

def good(): return study()
def unasked(): return {key: value for key, value in study().items() if key not in ("queries", "retrain", "optimizer")}
def unsampled(): return {key: value for key, value in study().items() if key != "sample_losses_fn"}
def several(): return study(queries=DataLoader(TensorDataset(QX, QY), batch_size=3))
def none_to_ask(): return study(queries=DataLoader(TensorDataset(QX[:0], QY[:0]), batch_size=3))
def named(): return study(ids_fn=lambda batch: (100 * batch[0][:, 0]).long())
def other(): return study(model=trained(torch.arange(20), 5)[0])
def broken(): return study(losses_fn=lambda model, batch: batch["text"])
def scalar(): return study(losses_fn=lambda model, batch: losses_fn(model, batch).mean())
def empty(): return study(loader=[])
def silent(): return {key: value for key, value in study().items() if not key.startswith("show")}
def leaving(*given): sys.exit(0)
def left(): return study(losses_fn=leaving)
def walking_out(): return study(retrain=leaving)
def untrainable(): return study(retrain=lambda ids, seed: 1 / 0)
def unseen(): return study(show=lambda i: {}["column"])
def tokens():
    torch.manual_seed(2)
    model, ids = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), torch.randint(7, (6, 5))
    def per_token(model, ids):
        return F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
    return {"model": model, "losses_fn": per_token, "loader": list(ids.split(4)), "queries": ids[:2],
            "show": lambda i: [f" w{j}" for j in ids[i, 1:].tolist()]}
"""


def loaded(spec: str) -> Study:
    """A study in this process; what it prints is not taken for a command's."""
    with redirect_stdout(sys.stderr):
        return load(spec)

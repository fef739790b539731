"""The factors of several positions keep ``max_memory``, seen from outside of the process that makes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read on Linux only")

CODE = """
import sys, torch, persample as ps
from torch import nn
from benchmarks import memory
verb, most = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
memory._return_freed_memory()
model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(256, 256), nn.Tanh())], nn.Linear(256, 16))

def above(samples):
    outputs = model(torch.randn(samples, 256))
    memory._forget_peak()
    before = memory._resident()
    if verb == "norms":
        ps.norms(outputs, model, max_memory=most)
    else:
        ps.clipped_sum(outputs, model, 1.0, max_memory=most)
    return (memory._peak() - before) / 2**20

above(2)  # loads the code of every kernel
print(above(1024))
"""
ACTIVATIONS, SUMS = 12, 1.6  # MiB: of 16 positions, 6 x 1024 x 256 numbers in twelve layers; and all parameters


@pytest.mark.parametrize(
    ("verb", "most"), [("norms", 1), pytest.param("norms", 60, marks=pytest.mark.slow), ("clipped_sum", 60)]
)
def test_portions_keep_the_bound(verb: str, most: int) -> None:
    """All positions at once would take 150 MiB and more; a bound of 1 MiB leaves one position, streamed."""
    command = [sys.executable, "-c", CODE, verb, str(most * 2**20)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < max(most, ACTIVATIONS / 2) + 3 * SUMS + 4

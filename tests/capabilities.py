"""`python -m tests.capabilities`: the other kinds of CPU that PyTorch can take this one for (ATEN_CPU_CAPABILITY)."""

from __future__ import annotations

import torch

OTHERS = {"AVX512": ("default", "avx2"), "AVX2": ("default",)}


def others(own: str) -> tuple[str, ...]:
    """Those with less than this one; what it does not have would end the process."""
    return OTHERS.get(own, ())


if __name__ == "__main__":
    print(*others(torch.backends.cpu.get_cpu_capability()))

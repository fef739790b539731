"""Normal numbers made where they are added: ChaCha in tensor ops, and the transform of Box and Muller.

A stream cipher that is written as additions, exclusive ors and rotations of tensors runs on every accelerator, without
a kernel of its own. ChaCha12 has a key of 256 bits; no attack on more than 7 of its rounds is known that is better
than trying keys, and the random numbers of several operating systems and languages are made by 8 to 20 of them. A key
is drawn from the operating system for every release, used once and kept nowhere, as for `Secure` noise on the host: its
32 bytes are all that is copied to the device.

The radius of a pair is made from 76 random bits, so that numbers reach to 10 standard deviations, and the angle from
52. What the device's logarithm, sine and cosine round off is far below the grid to which noise is rounded.
"""

from __future__ import annotations

import math
import secrets
import struct

import torch
from torch import Tensor

_ROUNDS = 12
_CONSTANTS = struct.unpack("<4i", b"expand 32-byte k")
_WORDS = 16  # of a block; a pair of normal numbers takes four
_HALF = 0xFFFFFFFF


def normals(size: int, device: torch.device, key: bytes | None = None) -> Tensor:
    """(size,) standard normal numbers in float64, from a key that nobody else has."""
    pairs = -(-size // 2)
    words = keystream(secrets.token_bytes(32) if key is None else key, -(-pairs * 4 // _WORDS), device)
    return _from_words(words.view(-1)[: pairs * 4].view(pairs, 4)).view(-1)[:size]


def _from_words(words: Tensor) -> Tensor:
    """(n, 2): two independent normal numbers from four words each (Box & Muller 1958)."""
    high, low, first, second = (words.to(torch.int64) & _HALF).unbind(1)
    spare, angle = second & 0xFFF, (first << 20) + (second >> 12)  # 12 bits and 52
    uniform = (spare.double() + 0.5) * 2.0**-76
    uniform += low.double() * 2.0**-64
    uniform += high.double() * 2.0**-32  # from the smallest to the largest: those near 0 keep all of their bits
    radius = uniform.log_().mul_(-2).sqrt_()
    turn = angle.double().mul_(2 * math.pi * 2.0**-52)
    return torch.stack([turn.cos() * radius, turn.sin() * radius], 1)


def keystream(key: bytes, blocks: int, device: torch.device, rounds: int = _ROUNDS) -> Tensor:
    """(blocks, 16) words of 32 bits: what ChaCha encrypts zeros to, with a counter of 64 bits that begins at 0."""
    first = torch.tensor([*_CONSTANTS, *struct.unpack("<8i", key)], dtype=torch.int32, device="cpu").to(device)
    counter = torch.arange(blocks, dtype=torch.int64, device=device)
    low = (counter << 32 >> 32).to(torch.int32)  # of both halves, the bits as they are
    start = torch.zeros(4, 4, blocks, dtype=torch.int32, device=device)
    start[:3] = first.view(3, 4, 1)
    start[3, 0], start[3, 1] = low, (counter >> 32).to(torch.int32)
    rows = list(start.clone())
    for _ in range(rounds // 2):
        _mix(rows)
        rows = [row.roll(-place, 0) for place, row in enumerate(rows)]  # columns become diagonals
        _mix(rows)
        rows = [row.roll(place, 0) for place, row in enumerate(rows)]
    return (torch.stack(rows) + start).view(_WORDS, blocks).t().contiguous()


def _mix(rows: list[Tensor]) -> None:
    """Four quarter rounds at once, one in each column."""
    a, b, c, d = rows
    for left, right in ((16, 12), (8, 7)):
        a += b
        d ^= a
        d = _turned(d, left)
        c += d
        b ^= c
        b = _turned(b, right)
    rows[:] = a, b, c, d


def _turned(words: Tensor, places: int) -> Tensor:
    """Every word's bits moved to the left, and those that fall out in again on the right."""
    out = words << places
    out |= (words >> (32 - places)) & ((1 << places) - 1)  # the shift to the right repeats the sign
    return out

"""The definition: Toeplitz matrices written out, and NumPy's linear algebra."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Matrix = np.ndarray[Any, np.dtype[np.float64]]


def matrix(column: Any) -> Matrix:
    """The lower-triangular Toeplitz matrix with this first column."""
    c = np.asarray(column, dtype=np.float64)
    n = len(c)
    return np.array([[c[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])


def patterns(n: int, separation: int, first: int = 0) -> Iterator[list[int]]:
    """All sets of steps that are at least so far apart."""
    yield []
    for start in range(first, n):
        for rest in patterns(n, separation, start + separation):
            yield [start, *rest]


def squared_sensitivity(encoder: Matrix, among: Sequence[Sequence[int]]) -> float:
    """The largest square of a sum of columns, with contributions of either sign, over all ways to take part."""
    gram = np.abs(encoder.T @ encoder)
    return max(float(gram[np.ix_(steps, steps)].sum()) for steps in among)

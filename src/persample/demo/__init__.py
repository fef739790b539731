"""``python -m persample.demo``: what per-sample gradients are good for, on real images, in one run and one page."""

from .command import main

__all__ = ["main"]

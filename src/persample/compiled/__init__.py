"""Compiled steps: losses and reductions traced into one graph, which a compiler makes fast code of.

step.py      `compile`: the public function, and what happens at each call; builds are compared with the eager engine
region.py    a graph that Dynamo has captured of the losses, and the builds for its sizes
build.py     one build: traced and compiled
trace.py     the engine of this package, run on tensors without numbers, written down as a graph
batches.py   one graph for all batch sizes, from traces of a few
watched.py   what a build depends on that Dynamo does not watch over
facts.py     what a build depends on, and how to say what has changed
compilers.py what is used of PyTorch's compilers
"""

from .step import CompiledStep, compile

__all__ = ["CompiledStep", "compile"]

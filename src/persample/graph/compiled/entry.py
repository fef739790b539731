"""Compiled nodes as nodes that somebody has taught: a flow and a rule, read from their backward graphs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...factors import Factor
from ...python_nodes import function_of
from ..layout import Flow, Labels, Layout, Outcome
from ..ops.custom import COMPILED, enter_op
from ..ops.table import Layouts
from ..ops.use import Use
from ..read.compiled import Unreadable, arguments_of, backward_of
from ..read.saved import in_backward, in_checkpoint, metadata, will_run
from ..read.site import Site
from .program import Program
from .states import Computed, NoFactor, Separable, Summed

_MOST = 16  # programs of one region: shapes of batches, arrangements of samples
_PROGRAMS: WeakKeyDictionary[type, OrderedDict[Hashable, Program | str]] = WeakKeyDictionary()


def flow(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Where samples lie in output k, by the backward graph; the data decide where it cannot be read."""
    if in_checkpoint(site.node):  # whose saved tensors are not there yet
        return Flow.PROBE
    if "program" not in site.memo:
        empty = [torch.empty(m.shape, dtype=m.dtype, device=m.device) for m in metadata(site.node)]
        site.memo["program"], _ = _program(site, empty, layouts)
    program = site.memo["program"]
    if isinstance(program, str):
        return Flow.PROBE
    try:
        state = program.state(_outputs(site, program)[k])
    except Unreadable:
        return Flow.PROBE
    if isinstance(state, Separable):
        return state.layout
    if state is None:
        return None
    return Flow.SHARED if site.is_weight(k) else Flow.PROBE


def rule(use: Use) -> Factor | None:
    """The factor of a weight; None, with a note of what is not known, where it takes one sample after another."""
    site = use.site
    try:
        program, outputs, computed = _computed(site, use)
        state = program.state(outputs[use.k])
        factor = state.build(computed) if isinstance(state, Summed) else None
    except (Unreadable, NoFactor) as reason:
        site.memo["unread"] = f"{reason} (in a compiled region)"
        return None
    if factor is None or factor.shape != use.target or factor.dtype != site.metadata(use.k).dtype:
        return None
    return factor


def _computed(site: Site, use: Use) -> tuple[Program, dict[int, int], Computed]:
    """What all factors of a node are made from, computed once."""
    if "computed" not in site.memo:
        program, arguments = _program(site, use.cotangents, use.layouts)
        if isinstance(program, str):
            raise Unreadable(program)
        outputs = _outputs(site, program)
        wanted = [outputs[k] for k, _ in site.outputs if isinstance(program.state(outputs[k]), Summed)]
        used_up = in_backward() and will_run(site.node)  # compiled code may take what it has saved as scratch memory
        site.memo["computed"] = program, outputs, program.run(arguments, wanted, apart=used_up)
    found: tuple[Program, dict[int, int], Computed] = site.memo["computed"]
    return found


def _program(site: Site, cotangents: Sequence[Tensor | None], layouts: Layouts) -> tuple[Program | str, list[Any]]:
    """The program for this call, or why there is none, and what to run it with."""
    arguments: list[Any] = []
    try:
        backward = backward_of(site.node)
        arguments = arguments_of(site.node, cotangents)
    except Unreadable as reason:
        return str(reason), arguments
    known = _PROGRAMS.setdefault(function_of(site.node), OrderedDict())  # type: ignore[arg-type]
    key = _key(arguments, layouts)
    found = known.pop(key, None)
    if found is None:
        found = _read(backward, arguments, [layouts[k] for k in backward.cotangents])
    known[key] = found
    if len(known) > _MOST:
        known.popitem(last=False)
    return found, arguments


def _read(backward: Any, arguments: Sequence[Any], layouts: Sequence[Layout | None]) -> Program | str:
    live = [layout for layout in layouts if layout is not None]
    if not live:
        return "no cotangents"
    try:
        return Program(backward, arguments, layouts, live[0].batch)
    except Unreadable as reason:
        return str(reason)


def _outputs(site: Site, program: Program) -> dict[int, int]:
    """By backward output of the node, the output of its graph."""
    wants = site.node.needs_input_grad  # type: ignore[attr-defined]
    edges = [k for k, (child, _) in enumerate(site.node.next_functions) if child is not None]
    needed = [n for n, wanted in enumerate(wants) if wanted]
    if program.count != len(wants) or len(edges) != len(needed):
        raise Unreadable(f"{program.count} outputs for {len(wants)} inputs")
    return dict(zip(edges, needed, strict=True))


def _key(arguments: Sequence[Any], layouts: Layouts) -> Hashable:
    """What a program depends on: shapes, strides and dtypes, numbers, and where samples lie."""
    given = [(tuple(a.shape), a.stride(), a.dtype, a.device) if isinstance(a, Tensor) else a for a in arguments]
    return tuple(given), tuple(_layout_key(layout) for layout in layouts)


def _layout_key(layout: Layout | None) -> Hashable:
    if isinstance(layout, Labels):
        return layout.batch, tuple(layout.index.shape), tuple(layout.index.flatten().tolist())
    return layout


enter_op(COMPILED, rule, flow)

"""Compiled nodes as nodes that somebody has taught: a flow and a rule, read from their backward graphs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...factors import Factor
from ...python_nodes import function_of
from ..layout import Flow, Labels, Layout, Outcome
from ..ops.custom import COMPILED, enter_op
from ..ops.table import Layouts
from ..ops.use import Use
from ..read.compiled import Backward, Unreadable, arguments_of, backward_of, kind_of, kinds_given
from ..read.notes import ask, by_data
from ..read.saved import in_backward, in_checkpoint, metadata, unpacked_often, will_run
from ..read.site import Site
from .program import Program
from .states import Separable, State, Summed

_MOST = 16  # programs of one region: shapes of batches, arrangements of samples
_REGIONS: WeakKeyDictionary[type, _Region] = WeakKeyDictionary()


class _Region:
    """What has been read of the backward that all nodes of one compiled region have in common."""

    def __init__(self, backward: Backward) -> None:
        self._backward, self.inductor = backward, backward.inductor
        self._programs: OrderedDict[Hashable, Program | str] = OrderedDict()

    def program(self, arguments: Sequence[Any], layouts: Layouts) -> Program:
        """The program for this call; `Unreadable` if there is none."""
        key = _key(arguments, layouts)
        found = self._programs.pop(key, None)
        if found is None:
            found = self._made(arguments, [layouts[k] for k in self._backward.cotangents])
        self._programs[key] = found
        if len(self._programs) > _MOST:
            self._programs.popitem(last=False)
        if isinstance(found, str):
            raise Unreadable(found)
        return found

    def _made(self, arguments: Sequence[Any], layouts: Sequence[Layout | None]) -> Program | str:
        """A new program, or why there is none."""
        live = [layout for layout in layouts if layout is not None]
        if not live:
            return "no cotangents"
        try:
            return Program(self._backward, arguments, layouts, live[0].batch)
        except Unreadable as reason:
            return str(reason)


def flow(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Where samples lie in output k, by the backward graph; the data decide where it cannot be read."""
    if "flows" not in site.memo:
        site.memo["flows"] = _flows(site, layouts)
    outcome: Outcome = site.memo["flows"].get(k, Flow.PROBE)
    return Flow.PROBE if outcome is Flow.SHARED and not site.is_weight(k) else outcome


def _flows(site: Site, layouts: Layouts) -> dict[int, Outcome]:
    """Where samples lie in all outputs; nothing where the backward cannot be read."""
    if in_checkpoint(site.node):  # whose saved tensors are not there yet
        return {}
    try:
        ask(
            site.node, kinds_given
        )  # a plan relies on nothing else: on no numbers, and the form says which region it is
    except AttributeError:  # in another release of PyTorch
        by_data()
    empty = [torch.empty(m.shape, dtype=m.dtype, device=m.device) for m in metadata(site.node)]
    try:
        reading = _read(site, empty, layouts)
    except Unreadable:
        return {}
    return {k: _outcome(reading.program.state(n)) for k, n in reading.outputs.items()}


def _outcome(state: State) -> Outcome:
    if isinstance(state, Separable):
        return state.layout
    return None if state is None else Flow.SHARED


def rule(use: Use) -> Factor | None:
    """The factor of a weight; None, with a note of what is not known, where it takes one sample after another."""
    site = use.site
    if "factors" not in site.memo:
        site.memo["factors"] = _factors(site, use)
    factor = site.memo["factors"].get(use.k)
    if isinstance(factor, str):
        site.memo["unread"] = f"{factor} (in a compiled region)"
        return None
    if factor is None or factor.shape != use.target or factor.dtype != site.metadata(use.k).dtype:
        return None
    return factor  # type: ignore[no-any-return]


def _factors(site: Site, use: Use) -> Mapping[int, Factor | str]:
    """The factors of all shared tensors that a node uses, or why there are none."""
    try:
        with unpacked_often(site.node):
            reading = _read(site, use.cotangents, use.layouts)
    except Unreadable as reason:
        return dict.fromkeys([k for k, _ in site.outputs], str(reason))
    program, outputs = reading.program, reading.outputs
    wanted = {outputs[k]: k for k, _ in site.outputs if isinstance(program.state(outputs[k]), Summed)}
    used_up = in_backward() and will_run(site.node)  # compiled code may take what it has saved as scratch memory
    factors = program.factors(reading.arguments, wanted, apart=used_up)
    return {k: factors[n] for n, k in wanted.items()}


@dataclass(frozen=True, slots=True)
class Whole:
    """The factors of all parameters of a call, as a function of the tensors that one compiled region is given."""

    region: type  # what is kept for it is to go with it
    key: Hashable  # equal for calls that one graph serves, with parameters of the same names
    tensors: Sequence[Tensor]
    factors: Callable[[Sequence[Tensor]], Mapping[str, Factor]]  # raises where something is not known


def whole(
    site: Site,
    cotangents: Sequence[Tensor | None],
    layouts: Layouts,
    name_of: Callable[[int], str],
    common: Hashable,
) -> Whole | None:
    """The factors of parameters by output of a node; None if the region was not compiled by Inductor.

    ``common`` stands for what the plan relies on: it is equal only where the same region has saved tensors of the same
    kinds (`kinds_given`), and where the same parameters are asked for.
    """
    function = function_of(site.node)  # type: ignore[arg-type]
    region = _REGIONS.get(function)
    if region is None or not region.inductor:
        return None
    arguments = arguments_of(site.node, cotangents)

    def factors(tensors: Sequence[Tensor]) -> Mapping[str, Factor]:
        reading = _reading(site, arguments, layouts)
        names = {k: name_of(k) for k, _ in site.outputs}
        wanted = {reading.outputs[k]: name for k, name in names.items()}
        built = reading.program.built(tensors, wanted)
        for k in names:
            factor = built[reading.outputs[k]]
            if factor.shape != site.target(k) or factor.dtype != site.metadata(k).dtype:
                raise Unreadable("a gradient of another shape or dtype than its parameter")
        return {name: built[n] for n, name in wanted.items()}

    key = common, tuple(map(kind_of, cotangents)), tuple(map(_layout_key, layouts))
    return Whole(function, key, [a for a in arguments if isinstance(a, Tensor)], factors)


class _Reading(NamedTuple):
    program: Program
    arguments: Sequence[Any]
    outputs: Mapping[int, int]  # by backward output of the node, that of its graph


def _read(site: Site, cotangents: Sequence[Tensor | None], layouts: Layouts) -> _Reading:
    """The program for this call, and what to run it with."""
    function = function_of(site.node)  # type: ignore[arg-type]
    if function not in _REGIONS:
        _REGIONS[function] = _Region(backward_of(site.node))
    return _reading(site, arguments_of(site.node, cotangents), layouts)


def _reading(site: Site, arguments: Sequence[Any], layouts: Layouts) -> _Reading:
    function = function_of(site.node)  # type: ignore[arg-type]
    program = _REGIONS[function].program(arguments, layouts)
    wants = site.node.needs_input_grad  # type: ignore[attr-defined]
    edges = [k for k, (child, _) in enumerate(site.node.next_functions) if child is not None]
    needed = [n for n, wanted in enumerate(wants) if wanted]
    if program.count != len(wants) or len(edges) != len(needed):
        raise Unreadable(f"{program.count} outputs for {len(wants)} inputs")
    return _Reading(program, arguments, dict(zip(edges, needed, strict=True)))


def _key(arguments: Sequence[Any], layouts: Layouts) -> Hashable:
    """What a program depends on: shapes, strides and dtypes, numbers, and where samples lie."""
    return tuple(map(kind_of, arguments)), tuple(map(_layout_key, layouts))


def _layout_key(layout: Layout | None) -> Hashable:
    if isinstance(layout, Labels):
        return layout.batch, tuple(layout.index.shape), tuple(layout.index.flatten().tolist())
    return layout


enter_op(COMPILED, rule, flow)

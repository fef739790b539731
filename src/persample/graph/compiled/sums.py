"""Calls on what is summed over samples already: gradients of weights, on their way to parameters.

Of a view or a cast, the factor of the one is the factor of the other. All else is given the gradients of all samples,
one beside another; as each of them is what the call would be given for its sample alone, this holds for whatever is
called.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ...factors import Dense, Factor, combine
from ..ops.table import Aten, Op, aten_calls
from ..read.compiled import Unreadable
from .linear import SUMS, is_elementwise
from .site import CallSite
from .states import Computed, NoFactor, Summed, one_shape, unknown, value_of

_DEEPEST = 100  # each is a call within a call
_ALSO = "sum.default sum.dim_IntList mean.dim expand.default slice.Tensor gather.default select.int".split()


def of_sums(call: fx.Node, given: Mapping[fx.Node, Summed], reading: tuple[Op, Aten] | None) -> Summed:
    """The state of a call that is given nothing else that depends on cotangents."""
    _refuse_unknown(call)
    needs = {n: None for state in given.values() for n in state.needs}
    needs |= {n: None for n in call.all_input_nodes if n not in given}
    if _adds(call, given):
        terms = [term for n in call.args for term in given[n].terms or (given[n],)]  # type: ignore[index]
        depth = max(term.depth for term in terms)
        build_all = lambda values: combine([term.build(values) for term in terms])  # noqa: E731
        return Summed(tuple(needs), build_all, tuple(terms), depth)
    depth = 1 + max(state.depth for state in given.values())
    if depth > _DEEPEST:
        raise Unreadable(f"more than {_DEEPEST} ops one after another on a weight, the last of them {call.target}")

    def build(values: Computed) -> Factor:
        lifted = None if reading is None else _lifted(call, *reading, given, values)
        return Dense(_stacked(call, given, values)) if lifted is None else lifted

    return Summed(tuple(needs), build, depth=depth)


def pulled(call: fx.Node, op: Op, aten: Aten, given: Summed) -> tuple[Summed, ...]:
    """All results of a call for which the table has a way from the gradients of all samples at once."""
    pull = op.pull
    assert pull is not None
    needs = tuple(dict.fromkeys([*given.needs, *call.all_input_nodes]))
    live = {n for n in call.all_input_nodes if n in CallSite(call, op, aten, value_of).cotangents}

    def build(values: Computed, k: int) -> Factor:
        if call not in values.stacks:
            site = CallSite(call, op, aten, lambda n: value_of(n) if n in live else values(n))
            values.stacks[call] = pull(site, given.build(values).stack())
        found: Factor = values.stacks[call][k]
        return found

    count = len(value_of(call))
    own = tuple(n for n in needs if n not in live)
    return tuple(Summed(own, partial(build, k=k), depth=given.depth + 1) for k in range(count))


def _refuse_unknown(call: fx.Node) -> None:
    """Only what is known to do the same for several at once, and returns one tensor."""
    name = str(call.target).removeprefix("aten.")
    known = is_elementwise(call) or name in _ALSO or (name in aten_calls() and "_backward" not in name)
    if not known or not isinstance(value_of(call), Tensor):
        raise unknown(call)


def _adds(call: fx.Node, given: Mapping[fx.Node, Summed]) -> bool:
    """Is this a plain sum, as of all uses of one weight?"""
    plain = str(call.target) == SUMS[0] and not call.kwargs and len(call.args) == 2
    return plain and all(n in given and one_shape(n) == one_shape(call) for n in call.args)  # type: ignore[arg-type]


def _lifted(call: fx.Node, op: Op, aten: Aten, given: Mapping[fx.Node, Summed], values: Computed) -> Factor | None:
    """The factor without writing it out, if the table has a way."""
    (summed,) = given.values()
    assert op.lift is not None

    def value(node: fx.Node) -> Any:
        return value_of(node) if node in given else values(node)

    return op.lift(CallSite(call, op, aten, value), summed.build(values), one_shape(call))


def _stacked(call: fx.Node, given: Mapping[fx.Node, Summed], values: Computed) -> Tensor:
    """(B, *shape): the call for the gradients of every sample."""
    found = values.stacks.get(call)
    if found is not None:
        return found  # type: ignore[no-any-return]
    stacks = [state.build(values).stack() for state in given.values()]

    def one(*rows: Tensor) -> Any:
        known = dict(zip(given, rows, strict=True))
        args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda n: known[n] if n in known else values(n))
        return call.target(*args, **kwargs)  # type: ignore[operator]

    try:
        result: Tensor = torch.vmap(one)(*stacks)
    except RuntimeError as error:
        raise NoFactor(f"{call.target} for several samples at once ({error})") from error
    if tuple(result.shape[1:]) != one_shape(call):
        raise NoFactor(f"{call.target}, under vmap of another shape")
    values.stacks[call] = result
    return result

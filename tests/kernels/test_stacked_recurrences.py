"""The replay of layers above one another against one-sample-at-a-time autograd, by modules in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from persample.kernels.stacked_recurrences import Kind, Replay, Stack, replay
from tests.reference import assert_same, definition

d, h = 3, 4
MODULES: dict[Kind, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    Kind.RELU: (nn.RNN, {"nonlinearity": "relu"}),
    Kind.TANH: (nn.RNN, {}),
    Kind.LSTM: (nn.LSTM, {}),
    Kind.GRU: (nn.GRU, {}),
}
BOTH = [False, True]
LENGTHS = {"as long": (5, 5, 5, 5), "shorter ones": (5, 3, 3, 1), "one": (5,)}
OUTPUTS = {"output": (0,), "h_n": (1,), "c_n": (2,), "all": (0, 1, 2)}
every_kind = pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)


class Example:
    """A module that has been run on sequences of some lengths, and cotangents of its results."""

    def __init__(self, kind: Kind, layers: int, both: bool, lengths: tuple[int, ...], bias: bool = True) -> None:
        torch.manual_seed(int(kind) + layers)
        make, options = MODULES[kind]
        self.kind, self.both, self.lengths = kind, both, lengths
        self.net = make(d, h, layers, bidirectional=both, bias=bias, dtype=torch.float64, **options)
        batch, places = len(lengths), layers * (1 + both)
        x, self.h0, self.c0 = (
            self.draw(*s) for s in ((max(lengths), batch, d), (places, batch, h), (places, batch, h))
        )
        packed = pack_padded_sequence(x, list(lengths))
        self.x, _ = pad_packed_sequence(packed)
        states = (self.h0, self.c0) if kind is Kind.LSTM else self.h0
        output, last = self.net(packed, states)
        self.results = [pad_packed_sequence(output)[0], *(last if kind is Kind.LSTM else (last,))]
        self.cotangents = [self.draw(*y.shape) * (y != 0) for y in self.results]

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    def losses(self, used: tuple[int, ...]) -> Tensor:
        terms = [(self.results[nr] * self.cotangents[nr]).sum((0, 2)) for nr in used if nr < len(self.results)]
        return sum(terms, self.x.new_zeros(len(self.lengths)))

    def stack(self, kept: bool, dtype: torch.dtype = torch.float64) -> Stack:
        flat = [p.detach().to(dtype) for p in self.net.parameters()]
        each = 4 if self.net.bias else 2
        absent = torch.arange(max(self.lengths)).unsqueeze(1) >= torch.tensor(self.lengths)
        return Stack(
            self.kind,
            self.x.to(dtype),
            self.h0.to(dtype),
            self.c0.to(dtype) if self.kind is Kind.LSTM else None,
            [flat[start : start + each] for start in range(0, len(flat), each)],
            1 + self.both,
            self.results[0].detach().to(dtype) if kept else None,
            absent.unsqueeze(2) if absent.any() else None,
        )

    def replayed(self, stack: Stack, used: tuple[int, ...], lowest: int = 0) -> dict[int, Replay]:
        given = [g if nr in used else None for nr, g in enumerate(self.cotangents)]
        given = [None if g is None else g.to(stack.input.dtype) for g in given]
        return replay(stack, *[*given, None][:3], lowest=lowest)  # type: ignore[arg-type]


def contract(replays: dict[int, Replay], bias: bool) -> list[Tensor]:
    """Per-sample gradients of all weights, in the order of the module's."""
    found = []
    for _, one in sorted(replays.items()):
        sides = (one.d_input_side, one.input), (one.d_hidden_side, one.h_previous)
        found += [torch.einsum("tbp,tbd->bpd", d_gates, x) for d_gates, x in sides]
        found += [d_gates.sum(0) for d_gates, _ in sides] if bias else []
    return found


@every_kind
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("both", BOTH)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("used", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("kept", BOTH, ids=["run again", "output kept"])
def test_weights(
    kind: Kind, layers: int, both: bool, lengths: tuple[int, ...], used: tuple[int, ...], kept: bool
) -> None:
    if kind is not Kind.LSTM and used == (2,):
        used = ()
    example = Example(kind, layers, both, lengths)
    losses = example.losses(used)
    want = (
        definition(losses, example.net)
        if used
        else {n: p.new_zeros(len(lengths), *p.shape) for n, p in example.net.named_parameters()}
    )
    got = contract(example.replayed(example.stack(kept), used), bias=True)
    assert_same(dict(zip(want, got, strict=True)), {name: g.detach() for name, g in want.items()}, rtol=1e-10)


@every_kind
def test_without_biases_and_in_narrower_dtypes(kind: Kind) -> None:
    example = Example(kind, 2, both=True, lengths=(5, 3, 1), bias=False)
    want = definition(example.losses((0, 1)), example.net)
    for dtype, rtol in ((torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        got = contract(example.replayed(example.stack(kept=True, dtype=dtype), (0, 1)), bias=False)
        assert {g.dtype for g in got} == {torch.promote_types(dtype, torch.float32)}
        assert_same(dict(zip(want, [g.double() for g in got], strict=True)), want, rtol=rtol)


@every_kind
def test_layers_that_nobody_asks_for_are_left_out(kind: Kind) -> None:
    example = Example(kind, 3, both=True, lengths=(5, 3))
    stack = example.stack(kept=True)
    everything, some = (example.replayed(stack, (0, 1), lowest) for lowest in (0, 2))
    assert sorted(some) == [4, 5]
    torch.testing.assert_close([some[p].d_hidden_side for p in some], [everything[p].d_hidden_side for p in some])


@every_kind
def test_arguments_are_left_alone(kind: Kind) -> None:
    example = Example(kind, 2, both=True, lengths=(5, 3))
    stack = example.stack(kept=True)
    given = [stack.input, stack.h0, stack.output, *[w for one in stack.weights for w in one], *example.cotangents]
    before = [t.clone() for t in given]
    example.replayed(stack, (0, 1, 2))
    torch.testing.assert_close(given, before, rtol=0, atol=0)


@every_kind
def test_no_sequences(kind: Kind) -> None:
    stack = Example(kind, 2, both=True, lengths=(5, 5)).stack(kept=True)
    none = Stack(
        kind, stack.input[:, :0], stack.h0[:, :0], None if stack.c0 is None else stack.c0[:, :0], stack.weights, 2
    )
    found = replay(none, torch.zeros(5, 0, 2 * h, dtype=torch.float64), None, None)
    assert {tuple(one.d_input_side.shape[:2]) for one in found.values()} == {(5, 0)}

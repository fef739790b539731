"""Every private name and behaviour of PyTorch that persample relies on. Holds for torch 2.13 to 2.15.

On any other torch one test is skipped, to say so, and the others tell which names are gone.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from persample.graph.ops.answers import LstmAnswer, Outputs
from persample.graph.read import saved
from persample.graph.read.compiled import is_compiled, original_of
from persample.graph.read.nodes import is_leaf, op_name
from persample.python_nodes import node_type_of
from tests.graph.names import NODES, SOME, names_read
from tests.graph.samples.leaves import c, w, z
from tests.graph.saved_rows import ELSEWHERE, RECURRENT, SAVED, Row
from tests.graph.sites import find, nodes
from tests.graph.versions import OLDEST, TESTED, VERSION

ROWS = [
    pytest.param(row, id=f"{row.node}-{i}") for i, row in enumerate(SAVED) if row.node in NODES or row.node not in SOME
]


def test_this_torch_is_one_that_was_checked() -> None:
    assert VERSION >= OLDEST, f"torch {torch.__version__} is older than {OLDEST}, the oldest that persample works with"
    if VERSION not in TESTED:
        pytest.skip(f"torch {torch.__version__} is not one of {TESTED}; the other tests say whether its names hold")


@pytest.mark.parametrize("row", ROWS)
def test_saved(row: Row) -> None:
    node = find(row.build(), row.node)
    for name, want in row.saved.items():
        _assert_saved(node, name, want)


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_saved_by_nodes_of_other_devices(kind: str) -> None:
    assert {f"_saved_{name}" for name in ELSEWHERE[kind]} <= set(dir(getattr(torch._C._functions, kind)))


def test_every_name_that_rules_read_has_a_row() -> None:
    covered = {name for row in SAVED for name in row.saved} | set().union(*ELSEWHERE.values())
    read = set(names_read(files("persample.graph")))
    assert {"padding_idx", "normalized_shape", "dim0", "has_biases"} <= read
    assert sorted(read - covered) == []


def test_negative_numbers_are_shown_unsigned() -> None:
    assert F.embedding(torch.tensor([0]), w(2, 3)).grad_fn._saved_padding_idx == 2**64 - 1
    assert w(2, 3).sum(-1).grad_fn._saved_dim == (2**64 - 1,)
    assert saved.signed(2**64 - 1) == -1
    assert saved.signed(2**63 - 1) == 2**63 - 1


def test_a_fused_lstm_without_biases_saves_its_weights_in_their_place() -> None:
    node = find(RECURRENT[1].build(), "MkldnnRnnLayer")
    shapes = [tuple(getattr(node, f"_saved_weight{i}").shape) for i in range(4)]
    assert shapes == [(16, 3), (16, 4), (16, 3), (16, 4)]
    assert [child is None for child, _ in node.next_functions] == [True, False, False, True, True, True, True]
    assert saved.tensor(node, "input").shape == (5, 2, 3)  # time first
    assert saved.tensor(node, "result0").shape == (5, 2, 4)


def test_a_fused_lstm_runs_backwards_in_a_layer_of_its_own() -> None:
    x = torch.randn(5, 2, 3)
    output, _ = torch.nn.LSTM(3, 4, bidirectional=True)(x)
    layers = [node for node in nodes(output) if op_name(node) == "MkldnnRnnLayer"]
    assert sorted(node._saved_reverse for node in layers) == [False, True]
    assert all(torch.equal(node._saved_input, x) for node in layers)  # the same order of time for both


def test_a_fused_lstm_takes_an_answer_for_its_backward() -> None:
    x = torch.randn(5, 2, 3, requires_grad=True)
    output, _ = torch.nn.LSTM(3, 4)(x.neg())
    (want,) = torch.autograd.grad(output.sum(), x, retain_graph=True)

    def answer() -> Outputs:
        return torch.ones(5, 2, 3), *[None] * 6

    def give(grads: tuple[Tensor | None, ...]) -> Outputs:
        return tuple(None if g is None else LstmAnswer(g, answer) for g in grads)

    handle = output.grad_fn.register_prehook(give)
    (answered,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    handle.remove()
    (after,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(answered, torch.full((5, 2, 3), -1.0))
    assert torch.equal(after, want)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output.sum(), x)


def test_an_answer_for_a_fused_lstm_answers_nothing_else() -> None:
    with pytest.raises(TypeError, match=r"aten\.neg"):
        LstmAnswer(torch.ones(2, 3), tuple).neg()


def test_saved_tensors_are_cut_off_from_their_graph() -> None:
    node = (w(3).exp() * w(3)).grad_fn
    assert node._saved_self.grad_fn is not None
    assert not saved.tensor(node, "self").requires_grad


def test_metadata_tells_the_cotangents() -> None:
    node = torch.linalg.slogdet(z(2, 3, 3)).logabsdet.grad_fn
    about = [(tuple(m.shape), m.dtype, m.device.type) for m in saved.metadata(node)]
    assert about[:2] == [((2,), torch.complex128, "cpu"), ((2,), torch.float64, "cpu")]
    leaf = find(w(2, 3).exp(), "Exp").next_functions[0][0]
    assert is_leaf(leaf)
    assert [tuple(m.shape) for m in saved.metadata(leaf)] == [(2, 3)]


def test_leaves_show_their_parameter() -> None:
    parameter = w(3)
    leaf = parameter.exp().grad_fn.next_functions[0][0]
    assert leaf.name() == "torch::autograd::AccumulateGrad"
    assert leaf.variable is parameter
    assert leaf.next_functions == ()


def test_hooks_of_a_parameter_are_seen() -> None:
    parameter = w(3)
    assert not parameter._backward_hooks
    handle = parameter.register_hook(lambda g: g)
    assert parameter._backward_hooks
    handle.remove()
    assert not parameter._backward_hooks


def test_a_node_is_called_with_its_cotangents() -> None:
    g = c(2, 3)
    assert torch.equal(_call(w(2, 3).neg(), g), -g)  # one edge: a tensor
    assert [tuple(t.shape) for t in _call(w(2, 3) + w(3), g)] == [(2, 3), (2, 3)]  # not yet summed to (3,)
    assert _call(c(2, 3) * w(2, 3), g)[0] is None  # an edge that leads nowhere
    assert not _call(z(2, 3) * w(2, 3), z(2, 3))[0].requires_grad
    pieces = _call(w(4, 3).split(2)[0], None, g)  # a missing cotangent counts as zeros
    assert torch.equal(pieces, torch.cat([torch.zeros_like(g), g]))


def _call(output: Tensor, *cotangents: Tensor | None) -> Any:
    with torch.no_grad():
        return output.grad_fn(*cotangents)


class Custom(torch.autograd.Function):
    """Two tensors, a number between them, and a tensor that needs no gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, number: float, b: Tensor, constant: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * number + b * constant

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        return g * 2, None, g * 3, None


def test_a_custom_node_answers_for_every_argument() -> None:
    a, b = w(3), w(3)
    output = Custom.apply(a, 2.0, b, c(3))  # must outlive the use of its node (torch < 2.13)
    node = output.grad_fn
    assert saved.is_custom(node)
    assert type(node).__name__ == "CustomBackward"
    assert node.needs_input_grad == (True, False, True, False)
    assert [child is not None for child, _ in node.next_functions] == [True, True, False]  # tensors only
    assert [id(t) for t in node.saved_tensors] == [id(a), id(b)]
    with torch.no_grad():
        values = node.apply(torch.ones(3))
    assert [None if v is None else float(v[0]) for v in values] == [2.0, None, 3.0, None]


def test_a_backward_has_a_number_and_outside_there_is_none() -> None:
    seen: list[tuple[int, bool]] = []
    y = w(3).exp()
    y.register_hook(lambda g: seen.append((torch._C._current_graph_task_id(), saved.in_backward())))
    y.sum().backward()
    ((number, inside),) = seen
    assert number >= 0
    assert inside
    assert torch._C._current_graph_task_id() == -1
    assert not saved.in_backward()


def test_outputs_that_a_backward_does_not_need_are_not_computed_in_it() -> None:
    a, b = w(2, 3), w(3, 2)
    product = a.mm(b)
    node, g = product.grad_fn, c(2, 2)
    calls: dict[str, list[bool]] = {}

    def call(when: str) -> None:
        with torch.no_grad():
            calls[when] = [t is not None for t in node(g)]

    def within(grads: tuple[Tensor, ...]) -> None:
        call("in the backward")
        saved.in_own_task(lambda: call("in a backward of its own"))

    node.register_prehook(within)
    torch.autograd.grad(product.sum(), [a], retain_graph=True)
    call("outside")
    assert calls == {
        "in the backward": [True, False],
        "in a backward of its own": [True, True],
        "outside": [True, True],
    }


def test_a_requested_edge_ends_the_backward_and_hooks_see_cotangents_in_passing() -> None:
    a = w(3)
    middle = a.exp()
    top = middle.sin()
    ran: list[str] = []
    top.grad_fn.register_prehook(lambda grads: ran.append("sin") if len(grads) == 1 else None)
    middle.grad_fn.register_prehook(lambda grads: ran.append("exp"))
    (g,) = torch.autograd.grad(top.sum(), [GradientEdge(middle.grad_fn, 0)])
    assert torch.equal(g, middle.detach().cos())
    assert ran == ["sin"]


def test_a_requested_edge_on_the_way_to_another_is_returned_before_hooks_on_its_tensor() -> None:
    """So that only a hook on the node itself sees what the node gets."""
    a = w(3)
    middle = a.exp()
    middle.register_hook(lambda g: g * 2)
    seen: list[Tensor] = []
    middle.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))
    edge = GradientEdge(middle.grad_fn, 0)
    above, below = torch.autograd.grad(middle.sin().sum(), [edge, get_gradient_edge(a)])
    assert torch.equal(above, middle.detach().cos())
    assert torch.equal(seen[0], 2 * above)
    assert torch.equal(below, 2 * above * middle.detach())


def test_reentrant_checkpoints_are_known_by_name() -> None:
    y = checkpoint(torch.sin, w(3), use_reentrant=True)
    assert type(y.grad_fn).__name__ == "CheckpointFunctionBackward"


def test_holders_of_checkpointed_tensors() -> None:
    inside = checkpoint(lambda x: x.sin() * x.exp(), w(3), use_reentrant=False).grad_fn
    assert not saved.in_checkpoint((w(3) * w(3)).grad_fn)
    assert saved.in_checkpoint(inside)
    holders = {name: getattr(inside, f"_raw_saved_{name}").data for name in ("self", "other")}
    assert all(type(holder.handles) is dict and not holder.handles for holder in holders.values())
    keys: list[tuple[int, list[Any]]] = []

    def read() -> None:
        task = torch._C._current_graph_task_id()
        before = inside._saved_self
        assert isinstance(before, Tensor)
        keys.append((task, [holders["self"].handles[task], holders["other"].handles[task]]))
        with pytest.raises(torch.utils.checkpoint.CheckpointError, match="already unpacked once"):
            _ = inside._saved_self

    saved.in_own_task(read)
    ((task, (used, unused)),) = keys
    assert task >= 0
    assert used is None  # struck out once it was unpacked
    assert unused is not None  # recomputed with the rest of the region


def test_raw_names_are_those_of_saved_tensors() -> None:
    node = (w(3) * w(3)).grad_fn  # must outlive what its raw attributes return
    assert {name for name in dir(type(node)) if "_saved_" in name} == {
        "_saved_self",
        "_saved_other",
        "_raw_saved_self",
        "_raw_saved_other",
    }
    assert not hasattr(getattr(node._raw_saved_self, "data", None), "handles")


def test_compiled_regions_are_known_by_name() -> None:
    compiled = torch.compile(lambda x: x.sin().exp(), backend="aot_eager")
    output = compiled(w(3))
    node = output.grad_fn
    assert type(node).__name__ == "CompiledFunctionBackward"
    assert is_compiled(node)
    assert saved.is_custom(node)
    assert isinstance(node.saved_tensors, tuple)


def test_donated_buffers_can_be_switched_off() -> None:
    before = torch._functorch.config.donated_buffer
    assert isinstance(before, bool)
    with torch._functorch.config.patch(donated_buffer=not before):
        assert torch._functorch.config.donated_buffer is not before
    assert torch._functorch.config.donated_buffer is before


def _assert_saved(node: Node, name: str, want: Any) -> None:
    if isinstance(want, Tensor):
        found = saved.tensor(node, name)
        assert found is not None, name
        torch.testing.assert_close(found, want.detach(), msg=lambda text: f"{name}: {text}")
    elif want is Tensor:
        assert isinstance(saved.tensor(node, name), Tensor), name
    elif isinstance(want, tuple) and any(isinstance(v, Tensor) for v in want):
        found = saved.read(node, name)
        assert len(found) == len(want), name
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, want, strict=True)), name
    elif isinstance(want, tuple):
        assert tuple(saved.signed(int(n)) for n in saved.read(node, name)) == want, name
    elif type(want) is int:
        assert saved.signed(int(saved.read(node, name))) == want, name
    else:
        found = saved.read(node, name)
        assert type(found) is type(want), name
        assert found == want, name


class TestBackwardUnderWay:
    """What a node may ask of the backward that runs it."""

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, told):  # type: ignore[no-untyped-def]
            ctx.told = told
            return x * w

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            ctx.told.update(keeps=saved.keeps_graph(), runs=[saved.will_run(n) for n, _ in ctx.next_functions])
            return g, g, None

    @pytest.mark.parametrize("keep", [False, True])
    def test_whether_its_graph_is_kept(self, keep: bool) -> None:
        x, w, told = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), {}
        self.Asks.apply(x, w, told).sum().backward(retain_graph=keep)
        assert told == {"keeps": keep, "runs": [True, True]}

    def test_which_nodes_it_comes_to(self) -> None:
        x, w, told = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), {}
        torch.autograd.grad(self.Asks.apply(x * 2, w * 2, told).sum(), x)  # PyTorch does not answer for leaves here
        assert told["runs"] == [True, False]

    def test_the_function_of_a_node(self) -> None:
        out = self.Asks.apply(torch.ones(3, requires_grad=True), torch.ones(3), {})
        assert saved.function_of(out.grad_fn) is self.Asks
        assert type(out.grad_fn) is node_type_of(self.Asks)


def test_versions_are_shared_by_views_and_detached_tensors() -> None:
    t = torch.ones(3)
    before = saved.version(t)
    t.detach()[0] = 2
    assert saved.version(t) == before + 1


def test_late_hooks_of_a_parameter_are_seen() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    assert not saved.has_late_hooks(p)
    handle = p.register_post_accumulate_grad_hook(lambda p: None)
    assert saved.has_late_hooks(p)
    handle.remove()
    assert not saved.has_late_hooks(p)


def test_a_compiled_module_shows_its_original() -> None:
    module = torch.nn.Linear(2, 2)
    assert original_of(module) is None
    assert original_of(torch.compile(module)) is module

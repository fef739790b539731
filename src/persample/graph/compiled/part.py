"""The part of a compiled region's backward that factors are made from, and the factors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from torch import Tensor, fx

from ...factors import Factor, Form, form_of, kind_of, split, together
from ..read.compiled import as_written, compiled_by_inductor, retraced
from .states import Computed, NoFactor, Summed

_FEW = 1  # calls of one shape before it pays to compile for it

Makes = list[tuple[list[int], int, Callable[[Sequence[Tensor]], Factor]]]  # of which outputs, of how many tensors, how


class Part:
    """The nodes that the factors of some outputs need, and nothing else; compiled, if the region was."""

    def __init__(
        self, graph: fx.GraphModule, inputs: Sequence[fx.Node], states: Mapping[int, Summed], inductor: bool
    ) -> None:
        needs = dict.fromkeys(n for state in states.values() for n in state.needs)
        self._states, self._inputs = states, inputs
        self._wanted = [n for n in needs if n.op != "placeholder"]
        self._graph = _pruned(graph, self._wanted)
        self._calls, self._inductor = 0, inductor
        self._whole: Callable[..., Sequence[Tensor]] | None = None  # from arguments to the tensors of factors
        self._makes: Makes = []  # how these are put together
        self._refused: dict[int, str] = {}  # outputs for which a rule has found nothing

    def factors(self, tensors: Sequence[Tensor], *, apart: bool) -> Mapping[int, Factor | str]:
        """The factors of all outputs, or why there are none."""
        self._calls += 1
        if self._inductor and self._calls == _FEW + 1:
            self._compile(tensors)
        with as_written(tensors):
            results = self._tensors(*tensors) if self._whole is None else list(self._whole(*tensors))
        if apart:
            results = _apart(results, tensors)
        found: dict[int, Factor | str] = dict(self._refused)
        for outputs, count, make in self._makes:
            own, results = results[:count], results[count:]
            found.update(zip(outputs, split(make(own), len(outputs)), strict=True))
        return found

    def built(self, tensors: Sequence[Tensor]) -> Mapping[int, Factor]:
        """The factors of all outputs as rules make them, for a graph that goes on from them.

        Raises:
            NoFactor: a rule has found nothing.
        """
        computed = self._computed(tensors)
        return {k: state.build(computed) for k, state in self._states.items()}

    def _compile(self, tensors: Sequence[Tensor]) -> None:
        """All from arguments to the tensors of factors as one compiled function, if the compiler can do that."""
        before = self._makes, self._refused
        try:
            graph = retraced(self._tensors, tensors, {})
            self._whole = compiled_by_inductor(graph, tensors)
        except Exception:  # whatever the compiler has stumbled over: the same is computed without it
            self._makes, self._refused = before

    def _tensors(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors of all factors, in the order in which they are put together again."""
        computed, alike = self._computed(tensors), dict[Hashable, dict[int, Form]]()
        self._refused = {}
        for k, state in self._states.items():
            try:
                form = form_of(state.build(computed))
            except NoFactor as reason:
                self._refused[k] = str(reason)
                continue
            if form is None:
                self._refused[k] = "a factor of another form"
            else:
                kind = kind_of(form)
                alike.setdefault(("alone", k) if kind is None else kind, {})[k] = form
        made = [(list(forms), _joined(list(forms.values()))) for forms in alike.values()]
        self._makes = [(outputs, len(form.tensors), form.make) for outputs, form in made]
        return [t for _, form in made for t in form.tensors]

    def _computed(self, tensors: Sequence[Tensor]) -> Computed:
        values: dict[fx.Node, Tensor] = dict(zip(self._inputs, tensors, strict=True))
        if self._wanted:
            values.update(zip(self._wanted, self._graph(*tensors), strict=True))
        return Computed(values)


def _joined(forms: Sequence[Form]) -> Form:
    """Of several that are alike, the form of all together."""
    form = forms[0] if len(forms) == 1 else form_of(together(forms))
    assert form is not None
    return form


def _apart(values: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[Tensor]:
    """The same, with copies of what lies in the memory of arguments."""
    taken = {a.untyped_storage().data_ptr() for a in arguments}
    return [t.clone() if t.untyped_storage().data_ptr() in taken else t for t in values]


def _pruned(graph: fx.GraphModule, wanted: Sequence[fx.Node]) -> fx.GraphModule:
    """The same graph, but it returns these nodes and computes nothing else."""
    pruned, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        if node.op != "output":
            copies[node] = pruned.node_copy(node, copies.__getitem__)
    pruned.output(tuple(copies[n] for n in wanted))
    pruned.eliminate_dead_code()
    for node in pruned.nodes:
        if str(node.target) == "aten.convolution_backward.default":  # computes only what it is told to
            read = {user.args[1] for user in node.users}
            mask = [bool(on) and k in read for k, on in enumerate(node.args[-1])]
            node.args = (*node.args[:-1], mask)
    return fx.GraphModule(graph, pruned)

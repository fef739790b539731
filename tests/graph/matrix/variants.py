"""The same samples otherwise: operands of another dtype, in another form, and with some of them frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from persample.graph.ops.table import named
from persample.graph.read.site import Site
from tests.forms import forms
from tests.graph.matrix.nodes import Build, harvest, sites
from tests.graph.matrix.rules import OWN_WAYS, Combination, combinations

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.complex128)
_DRAWN = (torch.randn, torch.rand)


class Cast(TorchFunctionMode):
    """What is drawn in double precision is drawn in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.used = dtype, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DRAWN and kwargs.get("dtype") is torch.float64:
            self.used = True
            return func(*args, **kwargs).to(self.dtype)
        return func(*args, **kwargs)


class Formed(TorchFunctionMode):
    """What is drawn comes in another form of memory, where it has one of that name."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.used = form, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _DRAWN:
            return found
        make = dict(forms(tuple(found.shape), found.dtype)).get(self.form)
        if make is None:
            return found
        self.used = True
        formed = make(tuple(found.shape), found.dtype)
        return formed if func is torch.randn else formed.abs().fmod(1)


class Frozen(TorchFunctionMode):
    """All parameters but one are constants."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept, self.count, self.used = kept, 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.requires_grad_:
            self.count += 1
            if self.count - 1 != self.kept:
                self.used = True
                return args[0]
        return func(*args, **(kwargs or {}))


FORMS = (
    "transposed",
    "channels last",
    "expanded along 0",
    "expanded along 1",
    "spaced",
    "columns",
    "conjugate",
    "negative",
)
VARIANTS: dict[str, Callable[[], Any]] = {
    **{str(dtype): lambda dtype=dtype: Cast(dtype) for dtype in DTYPES},
    **{form: lambda form=form: Formed(form) for form in FORMS},
    **{f"only parameter {kept}": lambda kept=kept: Frozen(kept) for kept in range(4)},
}
# PyTorch's own backward takes these for contiguous: running statistics.
MISREAD = {("NativeBatchNorm", "expanded along 0"), ("NativeBatchNorm", "spaced")}


def varied(build: Build, name: str) -> Iterator[tuple[str, Site]]:
    """The nodes of one name in every variant of a sample that PyTorch can build, and that differs from the sample."""
    for variant, make in VARIANTS.items():
        mode = make()
        found = sites(build, mode)
        if mode.used and (name, variant) not in MISREAD:
            yield from ((variant, site) for site in found if site.name == name)


def planned(name: str, every: bool = False) -> Iterator[tuple[str, Site, Combination]]:
    """All that is asked of one rule about its variants."""
    made = list({id(build): build for _, build in harvest()[name]}.values())
    for build in made if every else made[:4] if not named(name).pointwise or name in OWN_WAYS else made[:1]:
        for variant, site in varied(build, name):
            asked = list(combinations(site, every))
            for combination in asked[:: max(1, len(asked) // (12 if every else 3))]:
                yield variant, site, combination

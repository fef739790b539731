"""Which parameters belong together: the ``per`` argument of norms and clipped sums."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .base import Call

Member = str | int | Tensor | nn.Module
Group = nn.Module | Iterable[Member]
Per = str | Sequence[Group] | Mapping[str, Group] | None


@dataclass(frozen=True)
class Groups:
    """Names of parameters by group."""

    members: dict[Hashable, tuple[str, ...]]
    per: Per
    call: Call

    @classmethod
    def of(cls, per: Per, call: Call) -> Groups:
        """All parameters in one group, every one in its own, or as given."""
        if per is None:
            return cls({None: tuple(call.params)}, per, call)
        if isinstance(per, str):
            if per != "parameter":
                raise ValueError(f"per must be None, 'parameter', a list of groups or a dict of them, not {per!r}")
            return cls({name: (name,) for name in call.params}, per, call)
        if not isinstance(per, (Mapping, Sequence)):
            raise TypeError(f"per must be None, 'parameter', a list of groups or a dict of them, not {per!r}")
        pairs = per.items() if isinstance(per, Mapping) else enumerate(per)
        return cls({key: _names(group, key, call.params) for key, group in pairs}, per, call)

    def check_partition(self) -> None:
        """Every parameter must be in one group: what is in none would not be bounded."""
        every = [name for names in self.members.values() for name in names]
        missing = [name for name in self.call.params if name not in every]
        twice = sorted({name for name in every if every.count(name) > 1})
        if missing or twice:
            raise ValueError(
                f"groups of a clipped sum must hold every parameter once: {missing} are in none, {twice} in several"
            )

    def pack(self, found: Mapping[Hashable, Any]) -> Any:
        """Results by group as ``per`` asks: one value, like the parameters, a tuple for a list, a dict for a dict."""
        if self.per is None:
            return found[None]
        if isinstance(self.per, str):
            return self.call.pack({name: found[name] for name in self.call.params})
        return dict(found) if isinstance(self.per, Mapping) else tuple(found.values())


def _names(group: Group, key: Hashable, params: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The parameters of one group, in the order of ``params``."""
    if isinstance(group, (str, int, Tensor)):
        raise TypeError(f"group {key!r} must be a module or a list of parameters, not {type(group).__name__}")
    found: set[str] = set()
    for member in [group] if isinstance(group, nn.Module) else group:
        found |= _matching(member, key, params)
    return tuple(name for name in params if name in found)


def _matching(member: Member, key: Hashable, params: Mapping[str, Tensor]) -> set[str]:
    if isinstance(member, nn.Module):
        inside = {id(p) for p in member.parameters()}
        return {name for name, p in params.items() if id(p) in inside}
    if isinstance(member, Tensor):
        found = {name for name, p in params.items() if p is member}
    else:
        found = {name for name in params if name == str(member)}
    if not found:
        what = f"a tensor of shape {tuple(member.shape)}" if isinstance(member, Tensor) else repr(member)
        raise ValueError(f"group {key!r} holds {what}, which is none of the parameters {list(params)}")
    return found

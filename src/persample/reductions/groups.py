"""Which parameters belong together: the ``per`` argument of norms and clipped sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .base import Call

Member = str | int | Tensor | nn.Module
Group = nn.Module | Iterable[Member]
Per = str | Sequence[Group] | Mapping[str, Group] | None


def frozen(per: Per) -> Per:
    """Groups that can be gone through again and again, whatever they were given as; nonsense is refused."""
    if per is None or isinstance(per, str):
        if per not in (None, "parameter"):
            raise ValueError(f"per must be None, 'parameter', a list of groups or a dict of them, not {per!r}")
        return per
    if isinstance(per, Mapping):
        return {key: _members(group, key) for key, group in per.items()}
    if isinstance(per, (Tensor, nn.Module)) or not isinstance(per, Iterable):
        raise TypeError(f"per must be None, 'parameter', a list of groups or a dict of them, not {type(per).__name__}")
    return [_members(group, key) for key, group in enumerate(per)]


def _members(group: Group, key: Hashable) -> tuple[Member, ...]:
    if isinstance(group, nn.Module):
        return (group,)
    if isinstance(group, (str, Tensor)) or not isinstance(group, Iterable):
        raise TypeError(f"group {key!r} must be a module or a list of parameters, not {type(group).__name__}")
    return tuple(group)


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
            return cls({name: (name,) for name in call.params}, per, call)
        pairs = per.items() if isinstance(per, Mapping) else enumerate(per)
        return cls({key: _names(_members(group, key), key, call.params) for key, group in pairs}, per, call)

    def check_partition(self) -> None:
        """Every parameter must be in one group: what is in none would not be bounded."""
        times = Counter(name for names in self.members.values() for name in names)
        missing = [name for name in self.call.params if name not in times]
        twice = sorted(name for name, count in times.items() if count > 1)
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


def _names(group: Iterable[Member], key: Hashable, params: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The parameters of one group, in the order of ``params``."""
    found: set[str] = set()
    for member in group:
        found |= _matching(member, key, params)
    return tuple(name for name in params if name in found)


def _matching(member: Member, key: Hashable, params: Mapping[str, Tensor]) -> set[str]:
    if isinstance(member, nn.Module):
        inside = {id(p) for p in member.parameters() if p.requires_grad}
        found = {name for name, p in params.items() if id(p) in inside}
        if not inside:
            return found
    elif isinstance(member, Tensor):
        found = {name for name, p in params.items() if p is member}
    else:
        found = {name for name in params if name == str(member)}
    if not found:
        what = repr(member) if isinstance(member, (str, int)) else f"a {type(member).__name__}"
        raise ValueError(f"group {key!r} holds {what}, which is none of the parameters {list(params)}")
    return found

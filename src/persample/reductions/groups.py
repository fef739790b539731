"""Groups of parameters: what the ``per`` argument of norms and clipped sums may be, and which parameters it names."""

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


def as_groups(per: Per) -> Per:
    """``per`` with groups as tuples, as they may have been given as iterators; anything else raises an error."""
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


def by_names(per: Per, params: Mapping[str, Tensor]) -> Per:
    """The same groups with the names of parameters in place of modules and tensors."""
    if per is None or isinstance(per, str):
        return per
    if isinstance(per, Mapping):
        return {key: _names(_members(group, key), key, params) for key, group in per.items()}
    return [_names(_members(group, key), key, params) for key, group in enumerate(per)]


@dataclass(frozen=True)
class Groups:
    """Names of parameters by group."""

    members: dict[Hashable, tuple[str, ...]]
    per: Per
    call: Call

    @classmethod
    def of(cls, per: Per, call: Call) -> Groups:
        """The groups that ``per`` names: one of all parameters, one for each parameter, or those given."""
        if per is None:
            return cls({None: tuple(call.params)}, per, call)
        if isinstance(per, str):
            return cls({name: (name,) for name in call.params}, per, call)
        pairs = per.items() if isinstance(per, Mapping) else enumerate(per)
        return cls({key: _names(_members(group, key), key, call.params) for key, group in pairs}, per, call)

    def check_partition(self) -> None:
        """Raise unless every parameter is in exactly one group: one in no group would not be bounded."""
        times = Counter(name for names in self.members.values() for name in names)
        missing = [name for name in self.call.params if name not in times]
        twice = sorted(name for name, count in times.items() if count > 1)
        if missing or twice:
            raise ValueError(
                f"groups of a clipped sum must hold every parameter once: {missing} are in none, {twice} in several"
            )

    def pack(self, results: Mapping[Hashable, Any]) -> Any:
        """Results by group in the form of ``per``: one value, like the parameters, a tuple for a list, a dict."""
        if self.per is None:
            return results[None]
        if isinstance(self.per, str):
            return self.call.pack({name: results[name] for name in self.call.params})
        return dict(results) if isinstance(self.per, Mapping) else tuple(results.values())


def _names(group: Iterable[Member], key: Hashable, params: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The parameters of one group, in the order of ``params``."""
    names: set[str] = set()
    for member in group:
        names |= _matching(member, key, params)
    return tuple(name for name in params if name in names)


def _matching(member: Member, key: Hashable, params: Mapping[str, Tensor]) -> set[str]:
    """The parameters that a member of a group stands for; it must be at least one, if it has any that are trained."""
    if isinstance(member, nn.Module):
        inside = {id(p) for p in member.parameters() if p.requires_grad}
        names = {name for name, p in params.items() if id(p) in inside}
        if not inside:
            return names
    elif isinstance(member, Tensor):
        names = {name for name, p in params.items() if p is member}
    else:
        names = {name for name in params if name == str(member)}
    if not names:
        what = repr(member) if isinstance(member, (str, int)) else f"a {type(member).__name__}"
        raise ValueError(f"group {key!r} holds {what}, which is none of the parameters {list(params)}")
    return names


def listed(values: Any) -> list[Tensor]:
    """Norms or weights as a list with one tensor per group."""
    if isinstance(values, Tensor):
        return [values]
    return list(values.values() if isinstance(values, Mapping) else values)

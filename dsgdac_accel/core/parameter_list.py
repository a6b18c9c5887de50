"""The parameters of an optimizer, read every step and listed anew only where they have changed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from itertools import chain

from torch.nn import Parameter

from dsgdac_accel.core.buckets import as_parameter_list


class ParameterList:
    """Every distinct parameter that `find` names, as `as_parameter_list` gives them.

    To list 400 parameters costs as much as to mix them, to see that they are still the same ones a fifth of it.

    Args:
        find: asked at every call; its answer must not be a generator.
    """

    def __init__(self, find: Callable[[], object]) -> None:
        self._find = find
        self._seen: list[Parameter] | None = None
        self._listed: list[Parameter] = []

    def __call__(self) -> list[Parameter]:
        """The same list object as long as nothing has changed; not to be altered."""
        found = self._find()
        seen = _of_groups(found)
        if seen is None or self._seen is None or not _same(seen, self._seen):
            self._listed = as_parameter_list(found)
            self._seen = seen
        return self._listed


def _of_groups(found: object) -> list[Parameter] | None:
    """The parameters in ordinary parameter groups one after the other; None for anything else."""
    if not isinstance(found, list):
        return None
    inner = [group["params"] for group in found if isinstance(group, Mapping) and "params" in group]
    ordinary = len(inner) == len(found) and all(type(parameters) is list for parameters in inner)
    return list(chain.from_iterable(inner)) if ordinary else None


def _same(these: list[Parameter], those: list[Parameter]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))

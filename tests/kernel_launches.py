"""Counts the kernels that a GPU would be given, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_KERNEL = {
    "view", "_unsafe_view", "as_strided", "slice", "select", "split", "split_with_sizes", "unsqueeze", "squeeze", "t",
    "transpose", "permute", "expand", "detach", "alias", "unbind", "_reshape_alias", "empty", "empty_like",
    "empty_strided", "new_empty", "unfold", "lift_fresh", "is_pinned",
}  # fmt: skip
"""Operations that give a device nothing to do."""


class KernelLaunches(TorchDispatchMode):
    """Operations on tensors, views and allocations aside.

    A reduction of a large tensor may take two kernels of a GPU, and one over a list of tensors one for some hundred.
    """

    def __init__(self, ignored: Iterable[Any] = ()) -> None:
        super().__init__()
        self.launches: list[tuple[str, int]] = []
        """Name, and bytes of the largest tensor."""
        self._not_counted = NO_KERNEL | {packet.__name__ for packet in ignored}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name not in self._not_counted:
            leaves = tree_leaves((args, kwargs, result))
            self.launches.append((name, max((leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)), default=0)))
        return result

    def on(self, nbytes: int) -> int:
        """Return the number of launches that some tensor of so many bytes, or more, takes part in."""
        return sum(largest >= nbytes for _, largest in self.launches)

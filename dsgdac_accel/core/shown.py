"""Other values that tensors show for a while: the average of the workers in the models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dsgdac_accel.core.copies import Copies, Use
from dsgdac_accel.tensor_bytes import bits_differ, narrowed, version_of

Place = tuple[Tensor, Tensor, Tensor]
"""A tensor that a script sees, a copy of its own value, and the value to show."""
KeptPlace = tuple[Tensor, Tensor, Tensor | None]
"""The same, or None if the tensor shows what is in it, and only gets its own value back."""


class Shown:
    """Shows other values in tensors, and gives them their own back, every byte.

    Autograd does not notice: the versions of the tensors stay.

    Args:
        places: the tensors. Values and copies are rounded to the dtype of the tensor. The copy of a buffer becomes what
            that is when it is overwritten; all else is left alone.
        copies: those that hold a kept average of which these are the places.
        models: those that have the buffers among the places, under the same names again after `restore`.
    """

    def __init__(
        self, places: Sequence[KeptPlace], copies: Sequence[Copies] = (), models: Sequence[nn.Module] = ()
    ) -> None:
        self.places = places
        self.copies = copies
        self.models = models
        self._memory: list[Tensor] = []
        """The memory of each tensor when it was overwritten."""
        self._versions: list[int] = []
        """The version of each tensor then, which in-place operations of a script count up."""
        self._named: list[tuple[nn.Module, str, Tensor | None]] = []
        """The buffers by module and name then. A module may assign new ones, and `model.double()` does."""

    def is_current(self) -> bool:
        """Return whether the average is kept, and no script has written into the parameters since. Waits once.

        Buffers do not count: a forward pass changes them, perhaps on one worker alone.
        """
        return all(copies.use is Use.KEPT for copies in self.copies) and not any(
            bits_differ((tensor, own.to(tensor.dtype)) for tensor, own, _ in self.places if _is_parameter(tensor))
        )

    @torch.no_grad()
    def show(self) -> None:
        """Overwrite the tensors until `restore`, which must follow."""
        for copies in self.copies:
            copies.use = Use.BACKUP
        modules = [module for model in self.models for module in model.modules()]
        self._named = [(module, *named) for module in modules for named in module._buffers.items()]
        self._versions = [version_of(tensor) for tensor, _, _ in self.places]
        self._memory = [tensor.data for tensor, _, _ in self.places]
        for memory, (tensor, own, value) in zip(self._memory, self.places, strict=True):
            if not _is_parameter(tensor):
                own.copy_(tensor)
            if value is not None:
                _write(memory, value)

    def leave(self) -> None:
        """Overwrite the tensors for good."""
        self.show()
        for copies in self.copies:
            copies.use = Use.KEPT

    @torch.no_grad()
    def restore(self, keep_edits: bool = False) -> bool:
        """Give the tensors their own values back, in the memory that they had, also if they were re-pointed since.

        Args:
            keep_edits: if a script has given parameters other values since `show`, whatever it has written stays, also
                what is equal to the average, as of a state dictionary that it has loaded. The host waits once.

        Returns:
            Whether something stays.
        """
        edited: list[Tensor] = []
        if keep_edits:
            valued = [(tensor, value.to(tensor.dtype)) for tensor, _, value in self.places if value is not None]
            edited = [tensor for (tensor, _), differs in zip(valued, bits_differ(valued), strict=True) if differs]
        stay: set[int] = set()
        if any(map(_is_parameter, edited)):
            versions = zip(self.places, self._versions, strict=True)
            written = [tensor for (tensor, _, _), version in versions if version_of(tensor) > version]
            stay = {id(tensor) for tensor in (*edited, *written)}
        for memory, (tensor, own, _) in zip(self._memory, self.places, strict=True):
            if id(tensor) not in stay:
                if tensor.data_ptr() != memory.data_ptr():
                    tensor.data = memory
                _write(memory, own)
        for module, name, buffer in () if stay else self._named:
            module._buffers[name] = buffer
        for copies in self.copies:
            copies.use = Use.KEPT
        return bool(stay)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, Parameter) or tensor.requires_grad


def _write(memory: Tensor, value: Tensor) -> None:
    narrowed(memory, memory).copy_(narrowed(value, memory))

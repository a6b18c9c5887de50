"""What a variant holds beyond model, gradients and optimizer."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each memory block that the tensors lie in, by its address."""
    found = {}
    for tensor in tensors:
        if tensor.layout != torch.strided:
            continue  # sparse ones have no block of their own
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def all_storages() -> dict[int, int]:
    """The memory blocks of all tensors that Python code of this process holds."""
    gc.collect()
    return storages(thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter))


def extra_copies(before: dict[int, int], model: torch.nn.Module, others: Iterable[Tensor]) -> float:
    """Memory that came since `before` and is none of the model, its gradients and the `others`.

    Working space of a fixed size counts as well. That of bf16 and int8 is 2 MiB: nothing beside a large model, and 4
    copies of one that is smaller than 0.5 MiB.

    Returns:
        In copies of the parameters.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    known = storages([*parameters, *model.buffers(), *gradients, *others])
    extra = {address: size for address, size in all_storages().items() if address not in before | known}
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return sum(extra.values()) / total

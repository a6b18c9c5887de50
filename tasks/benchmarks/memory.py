"""Measures the memory of a variant beyond model, gradients and optimizer."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor

from dsgdac_accel.distributed.shards import local_of


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Size in bytes of each memory block that the tensors, or their shards here, use, by its address."""
    found = {}
    for tensor in map(local_of, tensors):
        if tensor.layout != torch.strided:
            continue  # sparse tensors have no block of their own
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def all_storages() -> dict[int, int]:
    """Memory blocks of all tensors that this process's Python code references."""
    gc.collect()
    return storages(thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter))


def extra_copies(before: dict[int, int], model: torch.nn.Module, others: Iterable[Tensor]) -> float:
    """Memory allocated since `before`, without the model, its gradients and the `others`, in copies of the parameters.

    Of a sharded model, all of this is about the shards of this process.

    Workspaces of a fixed size count, too. That of bf16 and int8 is 2 MiB: negligible for a large model, and 4 copies
    of a model of 0.5 MiB.

    Args:
        before: memory blocks that are not counted.
        model: the model.
        others: tensors that are not counted, such as the batch and the optimizer's state.
    """
    parameters = list(map(local_of, model.parameters()))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    known = storages([*parameters, *model.buffers(), *gradients, *others])
    extra = {address: size for address, size in all_storages().items() if address not in before | known}
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return sum(extra.values()) / total

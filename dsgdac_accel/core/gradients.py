"""Looking at gradients, dense or sparse: whether they are finite, and clipping their norm."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.nn import Parameter

from dsgdac_accel.distributed.row import Row
from dsgdac_accel.distributed.shards import local_of

_SMALL = 2**12  # elements
_IS_SPARSE = operator.attrgetter("is_sparse")


@torch.no_grad()
def nonfinite_workers(parameters: Sequence[Iterable[Parameter]]) -> list[int]:
    """Return the workers with a gradient that is not finite, given the parameters of each. One pass, one wait."""
    by_worker = [_gradients(mine) for mine in parameters]
    norms = _norms([gradient for gradients in by_worker for gradient in gradients])
    if all(bool(torch.isfinite(norm)) for norm in norms):
        return []
    # A norm can overflow where every element is finite: look at the elements before calling it a fault.
    return [
        worker
        for worker, gradients in enumerate(by_worker)
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    ]


@torch.no_grad()
def nonfinite_flags(parameters: Sequence[Iterable[Parameter]]) -> Tensor:
    """Return for each worker 1 if one of its gradients is not finite, else 0, (workers,), like `nonfinite_flag`."""
    flags = [nonfinite_flag(mine) for mine in parameters]
    like = next((flag for flag in flags if flag is not None), torch.zeros((), device="cpu"))
    return torch.stack([torch.zeros_like(like) if flag is None else flag.to(like.device) for flag in flags])


def nonfinite(value: Tensor) -> Tensor:
    """Return 1 if a number is not finite, else 0, in float32. `isfinite` launches twice as many kernels."""
    return value.mul(0.0).ne(0.0).float()


@torch.no_grad()
def nonfinite_flag(parameters: Iterable[Parameter]) -> Tensor | None:
    """Return 1 if some gradient is not finite, else 0, shape (), on the device and without waiting for it.

    None if there are no gradients.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in _gradients(parameters):
        if gradient.numel():
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    # The largest magnitudes, since other norms can overflow where every element is finite.
    largest = [torch.stack(torch._foreach_norm(gradients, math.inf)).amax() for gradients in alike.values()]
    if not largest:
        return None
    if len(largest) == 1:
        return nonfinite(largest[0])
    return torch.stack([nonfinite(magnitude).to(largest[0].device) for magnitude in largest]).amax()


@functools.cache
def _asks_the_scaler(step: Callable[..., Any]) -> bool:
    """Return whether an optimizer's `step` wants the GradScaler itself, and so does not look at `found_inf`."""
    return "grad_scaler" in inspect.signature(step).parameters


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the next `optimizer.step()` changes nothing if the tensor `optimizer.found_inf` is 1.

    torch's fused optimizers do that for `GradScaler`. Their SGD creates momentum buffers even in a step that it skips,
    from uninitialized memory: while it has none, it must not be called.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if _asks_the_scaler(type(optimizer).step):
        return False
    for group in optimizer.param_groups:
        if not group.get("fused", True):  # loaded from a state dict of an optimizer that was not fused
            return False
        if group.get("momentum"):
            states = [optimizer.state.get(p, {}) for p in group["params"] if p.grad is not None]
            if any(state.get("momentum_buffer") is None for state in states):
                return False
    return True


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return norms of groups of gradients, shape () each, which are all finite only if every element is.

    Small gradients are gathered first: a call for each of them would take longer than the arithmetic.
    """
    norms = []
    devices = set(map(Tensor.get_device, gradients))
    for device in devices:
        here = gradients if len(devices) == 1 else [g for g in gradients if g.get_device() == device]
        large = [gradient for gradient in here if gradient.numel() > _SMALL]
        small = here if not large else [gradient for gradient in here if gradient.numel() <= _SMALL]
        if small:
            norms.append(torch.linalg.vector_norm(_flatten_dense_tensors(small)))
        if large:
            norms.append(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(large))))
    return norms


def _gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    gradients = [gradient for gradient in [parameter.grad for parameter in parameters] if gradient is not None]
    if set(map(type, gradients)) - {Tensor}:  # a call for each of many gradients takes longer than their arithmetic
        gradients = list(map(local_of, gradients))
    if not any(map(_IS_SPARSE, gradients)):
        return gradients
    return [gradient_values(gradient) if gradient.is_sparse else gradient for gradient in gradients]


def gradient_values(gradient: Tensor) -> Tensor:
    """Return the stored values of a gradient; for a sparse one those of its rows, each row once."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient.detach()


def any_sparse(parameters: Iterable[Parameter]) -> bool:
    """Return whether a gradient is sparse, as from `nn.Embedding(sparse=True)`."""
    return any(p.grad is not None and p.grad.is_sparse for p in parameters)


def clip_grad_norm_(parameters: Sequence[Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_`, also if some of the gradients are sparse, which torch refuses.

    Returns:
        The total norm before clipping, shape ().
    """
    if any_sparse(parameters):
        return _clip_sparse(parameters, max_norm, norm_type)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def clip_worker_grad_norms_(
    by_worker: Sequence[Sequence[Parameter]], max_norm: float, norm_type: float = 2.0, row: Row | None = None
) -> Tensor:
    """Clip the gradient of each worker of this process by its own norm.

    Args:
        by_worker: the parameters of each worker.
        max_norm: the largest norm that a worker's gradient may have.
        norm_type: order of the norm.
        row: the processes of a sharded worker, which has one norm. Collective in the row.

    Returns:
        The mean of the workers' norms before clipping, shape ().
    """
    if row is not None and row.mesh is not None:
        (parameters,) = by_worker
        return _clip_shards(parameters, max_norm, norm_type, row)
    norms = [clip_grad_norm_(parameters, max_norm, norm_type) for parameters in by_worker]
    return norms[0] if len(norms) == 1 else torch.stack(norms).mean()


@torch.no_grad()
def _clip_shards(parameters: Iterable[Parameter], max_norm: float, norm_type: float, row: Row) -> Tensor:
    """Clip by (sum over the processes of a worker of ||shard||^p)^(1/p), the norm of the worker's whole gradient."""
    parameters = list(parameters)
    if not all(row.is_own(p) or not p.requires_grad for p in parameters):
        raise ValueError(
            "clip_grad_norm_ got parameters that FSDP has gathered, and shards have the gradients. Pass "
            "model.parameters() itself, not a list that was made before."
        )
    p, what = float(norm_type), "clipping the gradient"
    if not p > 0:
        raise ValueError(f"norm_type must be > 0 for a sharded model; got {norm_type}. Use 2, or math.inf.")
    shards = _values_in_place(parameters)
    counted = [values for values in shards if values.numel()]  # inf needs elements
    own = torch.nn.utils.get_total_norm(counted, norm_type).double()
    if p == math.inf:
        total = row.max(torch.where(own.isnan(), math.inf, own), what)  # maxima over processes may lose NaN
    else:
        total = row.sum(own**p, what) ** (1 / p)
    if shards:
        torch._foreach_mul_(shards, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def _values_in_place(parameters: Iterable[Parameter]) -> list[Tensor]:
    """Return the values of each gradient in this process, in the gradient's own memory."""
    with_gradient = [p for p in parameters if p.grad is not None]
    for parameter in with_gradient:
        if parameter.grad.is_sparse:  # type: ignore[union-attr]
            parameter.grad = parameter.grad.coalesce()  # type: ignore[union-attr]
    return [gradient_values(local_of(p.grad)) for p in with_gradient]  # type: ignore[arg-type]


@torch.no_grad()
def _clip_sparse(parameters: Iterable[Parameter], max_norm: float, norm_type: float) -> Tensor:
    values = _values_in_place(parameters)
    total = torch.nn.utils.get_total_norm(values, norm_type)
    torch._foreach_mul_(values, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total

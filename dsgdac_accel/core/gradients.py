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
def nonfinite_flags(by_worker: Sequence[Iterable[Parameter]], device: torch.device) -> Tensor:
    """Return for each worker 1 if one of its gradients is not finite, else 0, (workers,), without waiting for a GPU.

    Args:
        by_worker: the parameters of each worker.
        device: where the flags are to be.
    """
    gradients = [_gradients(parameters) for parameters in by_worker]
    together = [gradient for mine in gradients for gradient in mine]
    if set(map(Tensor.get_device, together)) <= {-1} and _has_finite_norm(together):
        return torch.zeros(len(gradients), device=device)
    return torch.stack([nonfinite_flag(mine, device) for mine in gradients])


def _has_finite_norm(gradients: Sequence[Tensor]) -> bool:
    """Return whether a norm of gradients of the CPU is finite; it is only if they are, but can overflow.

    Small gradients are gathered first: a call for each of them would take longer than the arithmetic.
    """
    large = [gradient for gradient in gradients if gradient.numel() > _SMALL]
    small = [gradient for gradient in gradients if gradient.numel() <= _SMALL] if large else gradients
    norms = [torch.linalg.vector_norm(_flatten_dense_tensors(small))] if small else []
    norms += [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(large)))] if large else []
    return all(map(math.isfinite, norms))


def nonfinite_flag(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return 1 if a gradient is not finite, else 0, shape (), on `device`; found on that of the gradients."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    if not alike:
        return torch.zeros((), device=device)
    # The largest magnitudes, since other norms can overflow where every element is finite.
    flags = [nonfinite(torch.stack(torch._foreach_norm(mine, math.inf)).amax()).to(device) for mine in alike.values()]
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()


def nonfinite(value: Tensor) -> Tensor:
    """Return 1 if a number is not finite, else 0, in float32. `isfinite` launches twice as many kernels."""
    return value.mul(0.0).ne(0.0).float()


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


def _gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    """Return the values of each gradient in this process; of a sparse one those of its rows, each row once."""
    gradients = [gradient for gradient in [parameter.grad for parameter in parameters] if gradient is not None]
    if set(map(type, gradients)) - {Tensor}:  # a call for each of many gradients takes longer than their arithmetic
        gradients = list(map(local_of, gradients))
    if not any(map(_IS_SPARSE, gradients)):
        return gradients
    return [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]


@torch.no_grad()
def clip_worker_grad_norms_(
    by_worker: Sequence[Sequence[Parameter]], max_norm: float, norm_type: float = 2.0, row: Row | None = None
) -> Tensor:
    """Clip the gradient of each worker of this process by its own norm, as `torch.nn.utils.clip_grad_norm_`.

    Gradients may be sparse, which torch refuses.

    Args:
        by_worker: the parameters of each worker.
        max_norm: the largest norm that a worker's gradient may have.
        norm_type: order of the norm.
        row: the processes of a sharded worker, which has one norm. Collective in the row.

    Returns:
        The mean of the workers' norms before clipping, shape ().
    """
    norms = [_clip(parameters, max_norm, float(norm_type), row or Row()) for parameters in by_worker]
    return norms[0] if len(norms) == 1 else torch.stack(norms).mean()


def _clip(parameters: Sequence[Parameter], max_norm: float, p: float, row: Row) -> Tensor:
    """Clip by (sum over the processes of a worker of ||shard||^p)^(1/p), the norm of the worker's whole gradient."""
    is_sharded = row.mesh is not None
    if is_sharded and not all(row.is_own(parameter) or not parameter.requires_grad for parameter in parameters):
        raise ValueError(
            "clip_grad_norm_ got parameters that FSDP has gathered, and shards have the gradients. Pass "
            "model.parameters() itself, not a list that was made before."
        )
    if is_sharded and not p > 0:
        raise ValueError(f"norm_type must be > 0 for a sharded model; got {p}. Use 2, or math.inf.")
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # whose values are its own memory
    gradients = [gradient for gradient in _gradients(parameters) if gradient.numel()]  # inf needs elements
    total = torch.nn.utils.get_total_norm(gradients, p)
    if is_sharded:
        own, what = total.double(), "clipping the gradient"
        if p == math.inf:
            total = row.max(torch.where(own.isnan(), math.inf, own), what)  # maxima over processes may lose NaN
        else:
            total = row.sum(own**p, what) ** (1 / p)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for device in {gradient.device for gradient in gradients}:
        torch._foreach_mul_([mine for mine in gradients if mine.device == device], scale.to(device))
    return total

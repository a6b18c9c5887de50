"""Looking at gradients, dense or sparse."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.flat import as_parameter_list


def gradients_are_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every gradient that the next local step would use is finite. One pass, dense or sparse."""
    gradients = [gradient_values(p.grad) for p in as_parameter_list(optimizer.param_groups) if p.grad is not None]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return True
    norms = torch._foreach_norm(gradients)
    if bool(torch.isfinite(torch.stack([norm.float() for norm in norms])).all()):
        return True
    # A norm can overflow where every element is finite: look again before calling it a fault.
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def gradient_values(gradient: Tensor) -> Tensor:
    """The stored values of a gradient; of a sparse one, those of its rows, each row once."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient.detach()


def any_sparse(parameters: Iterable[Parameter]) -> bool:
    """Whether a gradient is sparse, as from `nn.Embedding(sparse=True)`."""
    return any(p.grad is not None and p.grad.is_sparse for p in parameters)


@torch.no_grad()
def clip_sparse_grad_norm_(parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for gradients of which some are sparse, which torch refuses.

    Returns the total norm before clipping, shape ().
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    for parameter in with_gradient:
        if parameter.grad.is_sparse:  # type: ignore[union-attr]
            parameter.grad = parameter.grad.coalesce()  # type: ignore[union-attr]
    values = [gradient_values(p.grad) for p in with_gradient]  # type: ignore[arg-type]
    total = torch.nn.utils.get_total_norm(values, norm_type)
    torch._foreach_mul_(values, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total

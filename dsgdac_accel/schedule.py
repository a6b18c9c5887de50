"""Adaptive consensus: how strongly the workers mix, as a function of the step and its learning rate.

    gamma(t) = (a(t) / a_max)^p  once adaptive consensus is active, 1 before     (DSGD-AC, Algorithm 1)

Everything a worker needs is the step and the rate, which are the same on all workers, so gamma is too.
"""

import copy
import functools
import math
import numbers
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau


def adaptive_gamma(lr: float, max_lr: float, power: float) -> float:
    """Consensus factor (rate / max_lr)^power, clamped to [0, 1] (Algorithm 1).

    A max_lr of 0 gives 1: there the rate, 0, is also the largest. Raises ValueError for an argument that is
    negative or not finite.

    >>> adaptive_gamma(0.05, max_lr=0.1, power=2)
    0.25

    Inverse square root schedule with 4000 warm-up updates and peak 5e-4, at update 16000:

    >>> adaptive_gamma(5e-4 * (4000 / 16000) ** 0.5, max_lr=5e-4, power=2)
    0.25
    """
    lr, max_lr, power = _checked("lr", lr), _checked("max_lr", max_lr), _checked("power", power)
    if lr >= max_lr:
        return 1.0
    return (lr / max_lr) ** power


class AdaptiveConsensus:
    """Gamma of each step: 1 until adaptive consensus is active, (rate / a_max)^power from then on.

    Args:
        power: exponent p >= 0; 0 is plain decentralized SGD, gamma 1.
        start_step: first active step, counted from 0. Without it and start_epoch, step 0.
        start_epoch: first active epoch, counted from 0, instead of start_step.
        max_lr: a_max. "active": the largest rate among the active steps (the paper's appendix); "run": the largest
            of the whole run (Algorithm 1); or a number > 0. Without planned_lrs, the largest so far stands in.
        floor: gamma never falls below it, in [0, 1].
        constant: a control experiment: gamma is this number once active, in [floor, 1], whatever the rate.
        planned_lrs: the rate of every step of the run, as `planned_lrs` computes it, so that a_max is
            known beforehand. A larger rate that turns up all the same counts too.

    Gamma is always in [0, 1]. Once active, consensus stays adaptive for all later steps. Asking for one step several
    times is harmless. Raises ValueError for settings outside these ranges.

    >>> consensus = AdaptiveConsensus(power=2, start_step=1)
    >>> [consensus.gamma(step, rate) for step, rate in enumerate([0.5, 1.0, 0.5, 0.25])]
    [1.0, 1.0, 0.25, 0.0625]
    """

    def __init__(
        self,
        power: float = 3.0,
        start_step: int | None = None,
        start_epoch: int | None = None,
        max_lr: float | Literal["active", "run"] = "active",
        floor: float = 0.0,
        constant: float | None = None,
        planned_lrs: Sequence[float] | None = None,
    ) -> None:
        if start_step is not None and start_epoch is not None:
            raise ValueError(
                f"start_step and start_epoch exclude each other; got {start_step} and {start_epoch}. Give one of them."
            )
        self.power = _checked("power", power, way_out="Use 0 for plain DSGD")
        self.start_step = _checked_count("start_step", 0 if start_epoch is None and start_step is None else start_step)
        self.start_epoch = _checked_count("start_epoch", start_epoch)
        self.max_lr = _checked_max_lr(max_lr)
        self.floor = _checked("floor", floor, at_most=1.0, way_out="Use 0 for none")
        self.constant = None if constant is None else _checked("constant", constant, self.floor, 1.0)
        self.planned_lrs = [] if planned_lrs is None else [_checked("each planned rate", a) for a in planned_lrs]
        # What a run learns as it goes: the first active step, and the largest rate that counts for a_max.
        self._active_since: int | None = None
        self._largest_rate = max(self.planned_lrs, default=0.0) if max_lr == "run" else 0.0

    def gamma(self, step: int, lr: float, epoch: int | None = None) -> float:
        """Consensus factor of `step` (from 0), whose local update uses `rate`; in [0, 1].

        `epoch` (from 0) is needed with start_epoch only, and the step at which it is first reached becomes the
        start. Raises ValueError for a rate that is negative or not finite.
        """
        lr = _checked("lr", lr)
        active = self._is_active(step, epoch)
        if active or self.max_lr == "run":
            self._largest_rate = max(self._largest_rate, lr)
        if not active:
            return 1.0
        if self.constant is not None:
            return self.constant
        max_lr = self._largest_rate if isinstance(self.max_lr, str) else self.max_lr
        return max(self.floor, adaptive_gamma(lr, max_lr, self.power))

    @property
    def active_since(self) -> int | None:
        """Step at which adaptive consensus began, or None before."""
        return self._active_since

    def state_dict(self) -> dict[str, Any]:
        """What the run has learnt so far, in plain numbers that JSON keeps exactly."""
        return {"active_since": self._active_since, "largest_rate": self._largest_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken: a start already passed, and a_max, stay as they were."""
        missing = {"active_since", "largest_rate"} - state.keys()
        if missing:
            raise ValueError(f"the state lacks {sorted(missing)}; got {sorted(state)}. Pass what state_dict() gave.")
        self._active_since = _checked_count("active_since", state["active_since"])
        self._largest_rate = _checked("largest_rate", state["largest_rate"])

    def __repr__(self) -> str:
        names = ("power", "start_step", "start_epoch", "max_lr", "floor", "constant")
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None)
        return f"AdaptiveConsensus({settings})"

    def _is_active(self, step: int, epoch: int | None) -> bool:
        if self.start_epoch is not None and epoch is None:
            raise ValueError(
                f"start_epoch={self.start_epoch} is set, so gamma() needs the epoch of step {step}; got None. "
                f"Pass epoch=..., or use start_step."
            )
        if self._active_since is None:
            self._start_if_due(step, epoch)
        return self._active_since is not None and step >= self._active_since

    def _start_if_due(self, step: int, epoch: int | None) -> None:
        if self.start_step is not None and step >= self.start_step:
            self._active_since = self.start_step
        elif self.start_epoch is not None and epoch is not None and epoch >= self.start_epoch:
            self._active_since = step
        if self._active_since is not None and self.max_lr == "active":
            # Kept in the state, so that a resumed run needs no plan to find the same a_max.
            self._largest_rate = max(self.planned_lrs[self._active_since :], default=0.0)


def planned_lrs(scheduler: Any, total_steps: int | None = None) -> list[float] | None:
    """The rate of each of the first `total_steps` steps under a torch scheduler that has not been stepped yet.

    The rate is that of the parameter group with the largest base rate. A copy of the scheduler runs on a stand-in for
    the optimizer: scheduler, optimizer and random states stay as they are. Without `total_steps` the scheduler must
    declare it (OneCycleLR, the Hugging Face schedules that end). None when the future cannot be known: no declared
    length, ReduceLROnPlateau, a scheduler already under way or one that cannot be copied.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    >>> planned_lrs(scheduler, total_steps=5)
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    total_steps = _checked_count("total_steps", total_steps)
    if total_steps is None:
        total_steps = _declared_total_steps(scheduler)
    under_way = getattr(scheduler, "last_epoch", 0) > 0
    if total_steps is None or under_way or isinstance(scheduler, ReduceLROnPlateau):
        return None
    try:
        return _rates_of_a_copy(scheduler, total_steps)
    except Exception:  # a scheduler is the user's code: whatever stops its copy, the running maximum still serves
        return None


def current_lr(optimizer: Optimizer) -> float:
    """The rate a(t) that gamma uses: that of the parameter group with the largest base rate, the first of equals.

    >>> slow, fast = {"params": [torch.zeros(1)], "lr": 0.1}, {"params": [torch.zeros(1)], "lr": 0.3}
    >>> current_lr(torch.optim.SGD([slow, fast]))
    0.3
    """
    group = max(optimizer.param_groups, key=lambda group: float(group.get("initial_lr", group["lr"])))
    return float(group["lr"])


def _declared_total_steps(scheduler: Any) -> int | None:
    """The length of the run that a scheduler was built for, where it says so."""
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps)
    if isinstance(scheduler, LambdaLR):
        # Hugging Face builds its schedules as LambdaLR(optimizer, partial(..., num_training_steps=...)).
        for factor in scheduler.lr_lambdas:
            if isinstance(factor, functools.partial) and "num_training_steps" in factor.keywords:
                return int(factor.keywords["num_training_steps"])
    return None


def _rates_of_a_copy(scheduler: Any, total_steps: int) -> list[float]:
    stand_in = _stand_in(scheduler.optimizer)
    ghost = copy.deepcopy(scheduler, memo={id(scheduler.optimizer): stand_in})
    lrs = []
    # Torch's reminders about the order of steps, and SequentialLR's own, are not about the user's code here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(total_steps):
            lrs.append(current_lr(stand_in))
            ghost.step()
    return lrs


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """An optimizer with the same settings in each group (rates, betas, momentum) and one tiny parameter each."""
    groups = [
        {**copy.deepcopy({key: value for key, value in group.items() if key != "params"}), "params": [torch.zeros(1)]}
        for group in optimizer.param_groups
    ]
    return torch.optim.SGD(groups, lr=0.0)


def _checked(name: str, value: Any, at_least: float = 0.0, at_most: float = math.inf, way_out: str = "") -> float:
    """The finite number `value` as a float, or a ValueError when it is out of range."""
    number = math.nan if _is_no_number(value) else float(value)
    if not (math.isfinite(number) and at_least <= number <= at_most):
        bounds = f">= {at_least:g}" if at_most == math.inf else f"in [{at_least:g}, {at_most:g}]"
        hint = f" {way_out}." if way_out else ""
        raise ValueError(f"{name} must be a finite number {bounds}; got {value!r}.{hint}")
    return number


def _checked_count(name: str, value: Any) -> int | None:
    """A whole number >= 0 as an int, None as None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise ValueError(f"{name} must be a whole number >= 0, counted from 0; got {value!r}. Leave it out for none.")
    return int(value)


def _checked_max_lr(value: Any) -> float | str:
    if isinstance(value, str) and value in ("active", "run"):
        return value
    if not _is_no_number(value) and 0 < value < math.inf:
        return float(value)
    raise ValueError(f"max_lr must be 'active', 'run' or a finite number > 0; got {value!r}. The default is 'active'.")


def _is_no_number(value: Any) -> bool:
    """True for what only looks like a number: text, and the booleans that Python counts among the integers."""
    is_number = isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)
    return isinstance(value, bool) or not is_number

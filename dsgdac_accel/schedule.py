"""The consensus factor gamma as a function of the step and its learning rate.

    gamma(t) = (lr(t) / max_lr)^p  once adaptive consensus is active, 1 before     (DSGD-AC, Algorithm 1)

The step and the learning rate are the same on all workers, so gamma is the same without communication.
"""

import copy
import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, PolynomialLR, ReduceLROnPlateau, SequentialLR

from dsgdac_accel.checks import check_integer, check_number, did_you_mean

_MAX_LR_WORDS = ("active", "run")


def adaptive_gamma(lr: float, max_lr: float, power: float) -> float:
    """Return the consensus factor gamma = (lr / max_lr)^power, clamped to [0, 1] (Algorithm 1).

    Args:
        lr: learning rate >= 0 of the step.
        max_lr: learning rate >= 0 at which gamma is 1. If it is 0, gamma is 1.
        power: exponent p >= 0.

    Raises:
        ValueError: an argument is negative or not finite.

    >>> adaptive_gamma(0.05, max_lr=0.1, power=2)
    0.25

    Inverse square root schedule with 4000 warm-up updates and peak 5e-4, at update 16000:

    >>> adaptive_gamma(5e-4 * (4000 / 16000) ** 0.5, max_lr=5e-4, power=2)
    0.25
    """
    lr, max_lr, power = _nonnegative("lr", lr), _nonnegative("max_lr", max_lr), _nonnegative("power", power)
    return 1.0 if lr >= max_lr else (lr / max_lr) ** power


class AdaptiveConsensus:
    """Schedule of gamma: 1 until adaptive consensus is active, then (lr / max_lr)^power.

    Gamma is always in [0, 1]. Once active, consensus stays adaptive for all later steps. Asking for the same step
    several times changes nothing.

    Args:
        power: exponent p >= 0; 0 is plain decentralized SGD (gamma 1).
        start_step: first active step, counted from 0. The default is 0 if start_epoch is not given.
        start_epoch: first active epoch, counted from 0. Give this or start_step.
        max_lr: learning rate at which gamma is 1. "active": the largest among the active steps (the paper's appendix);
            "run": the largest of the whole run (Algorithm 1); or a number > 0. Without `planned_lrs`, the largest
            learning rate so far is used.
        floor: lower bound of gamma, in [0, 1].
        constant: fixed gamma in [floor, 1] once active, whatever the learning rate; a control experiment.
        planned_lrs: learning rate of every step of the run, as returned by the function `planned_lrs`, so that max_lr
            is known in advance. A larger learning rate that occurs later still counts.

    Raises:
        ValueError: a setting is out of range.

    >>> consensus = AdaptiveConsensus(power=2, start_step=1)
    >>> [consensus.gamma(step, lr) for step, lr in enumerate([0.5, 1.0, 0.5, 0.25])]
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
            got = f"start_step={start_step} and start_epoch={start_epoch}"
            raise ValueError(f"start_step and start_epoch exclude each other; got {got}. Keep one.")
        self.power = _nonnegative("power", power, "Use 0 for plain DSGD (gamma is 1 throughout).")
        start_step = 0 if start_epoch is None and start_step is None else start_step
        advice = "Counting starts at 0. Leave it out to start at the first step."
        self.start_step = _count_or_none("start_step", start_step, advice)
        self.start_epoch = _count_or_none("start_epoch", start_epoch, advice)
        self.max_lr = _checked_max_lr(max_lr)
        self.floor = check_number("floor", floor, minimum=0, maximum=1, advice="It is the smallest gamma.")
        self.constant = None if constant is None else self._checked_constant(constant)
        self.planned_lrs = [] if planned_lrs is None else [_nonnegative("each planned lr", lr) for lr in planned_lrs]
        # The state of the run: its first active step, and the largest learning rate that counts for max_lr so far.
        self._active_since: int | None = None
        self._largest_lr = max(self.planned_lrs, default=0.0) if max_lr == "run" else 0.0

    def gamma(self, step: int, lr: float, epoch: int | None = None) -> float:
        """Return the consensus factor of a step, in [0, 1].

        Args:
            step: optimizer step, counted from 0.
            lr: learning rate >= 0 of the local update of this step.
            epoch: epoch of this step, counted from 0. Only needed with start_epoch: adaptive consensus starts at the
                first step with epoch >= start_epoch.

        Raises:
            ValueError: the learning rate is negative or not finite, or the epoch is missing.
        """
        lr = _nonnegative("lr", lr)
        active = self._is_active(step, epoch)
        if active or self.max_lr == "run":
            self._largest_lr = max(self._largest_lr, lr)
        if not active:
            return 1.0
        if self.constant is not None:
            return self.constant
        max_lr = self._largest_lr if isinstance(self.max_lr, str) else self.max_lr
        return max(self.floor, adaptive_gamma(lr, max_lr, self.power))

    @property
    def active_since(self) -> int | None:
        """First active step, or None before adaptive consensus starts."""
        return self._active_since

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run in plain numbers, which JSON preserves exactly."""
        return {"active_since": self._active_since, "largest_lr": self._largest_lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ValueError: an entry is missing or out of range.
        """
        missing = {"active_since", "largest_lr"} - state.keys()
        if missing:
            raise ValueError(
                f"the state lacks {sorted(missing)}; got {sorted(state)}. Pass what state_dict() returned."
            )
        self._active_since = _count_or_none("active_since", state["active_since"])
        self._largest_lr = _nonnegative("largest_lr", state["largest_lr"])

    @property
    def formula(self) -> str:
        """The rule in words, such as "gamma = (lr / max_lr)^3 from step 100 on, max_lr the largest since then"."""
        if self.constant is None and self.power == 0:
            return "gamma = 1"
        law = f"gamma = {self.constant:g}" if self.constant is not None else f"gamma = (lr / max_lr)^{self.power:g}"
        begin = f"epoch {self.start_epoch}" if self.start_epoch is not None else f"step {self.start_step}"
        floor = f", at least {self.floor:g}" if self.floor else ""
        if self.constant is not None:
            return f"{law}{floor} from {begin} on"
        words = {"active": "the largest since then", "run": "the largest of the run"}
        return f"{law}{floor} from {begin} on, max_lr {words.get(str(self.max_lr), self.max_lr)}"

    def __repr__(self) -> str:
        names = ("power", "start_step", "start_epoch", "max_lr", "floor", "constant")
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None)
        return f"AdaptiveConsensus({settings})"

    def _checked_constant(self, constant: float) -> float:
        advice = f"It is a gamma, and no gamma is below floor = {self.floor:g}. Leave it out for the power law."
        return check_number("constant", constant, minimum=self.floor, maximum=1, advice=advice)

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
            # Part of the state, so a resumed run finds the same max_lr without a plan.
            self._largest_lr = max(self.planned_lrs[self._active_since :], default=0.0)


def planned_lrs(scheduler: Any, total_steps: int | None = None, ticks: int = 1) -> list[float] | None:
    """Compute the learning rate of each future optimizer step of a torch scheduler that has not been stepped yet.

    A copy of the scheduler runs on a stand-in for the optimizer, so the scheduler, the optimizer and the random states
    do not change. The learning rate is that of `current_lr`.

    Args:
        scheduler: a learning rate scheduler of torch or Transformers.
        total_steps: number of optimizer steps. Optional if the scheduler declares its length (see `declared_length`).
        ticks: how often the scheduler ticks in an optimizer step, as for `tick`.

    Returns:
        One learning rate per step. None if the future is unknown: no declared length, ReduceLROnPlateau, a scheduler
        that has been stepped already, or one that cannot be copied.

    Raises:
        ValueError: total_steps is not an integer >= 0.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    >>> planned_lrs(scheduler, total_steps=5)
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    total_steps = _count_or_none("total_steps", total_steps)
    length = declared_length(scheduler)
    if total_steps is None and length is not None:
        total_steps = math.ceil(length / ticks)
    under_way = getattr(scheduler, "last_epoch", 0) > 0
    if total_steps is None or under_way or isinstance(scheduler, ReduceLROnPlateau):
        return None
    try:
        return _lrs_of_a_copy(scheduler, total_steps, ticks)
    except Exception:  # a scheduler is user code and may fail in any way; the running maximum works without a plan
        return None


def current_lr(optimizer: Optimizer) -> float:
    """Return the learning rate that gamma uses.

    It is the one of the parameter group with the largest base learning rate (the first such group); 0 for an optimizer
    that chooses its step sizes by a rule of its own, such as Adafactor with relative_step=True.

    >>> slow, fast = {"params": [torch.zeros(1)], "lr": 0.1}, {"params": [torch.zeros(1)], "lr": 0.3}
    >>> current_lr(torch.optim.SGD([slow, fast]))
    0.3
    """
    return lr_of(lr_group(optimizer))


def lr_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group; 0 if it chooses its step sizes by a rule of its own."""
    return 0.0 if group["lr"] is None or group.get("relative_step") else float(group["lr"])


def lr_group(optimizer: Optimizer) -> dict[str, Any]:
    """Return the parameter group whose learning rate gamma uses, see `current_lr`."""
    if len(optimizer.param_groups) == 1:  # reading a base lr that is a tensor on a GPU would wait for it
        return optimizer.param_groups[0]
    return max(optimizer.param_groups, key=lambda group: float(group.get("initial_lr", group["lr"]) or 0))


def declared_length(scheduler: Any) -> int | None:
    """Return the number of ticks that a scheduler was built for, or None if it does not say.

    Known are OneCycleLR, CosineAnnealingLR, PolynomialLR, a SequentialLR that ends with one of them, and the schedules
    of Transformers that end.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> declared_length(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20))
    20
    """
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps)
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max)
    if isinstance(scheduler, PolynomialLR):
        return int(scheduler.total_iters)
    if isinstance(scheduler, SequentialLR):
        last = declared_length(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    for factor in getattr(scheduler, "lr_lambdas", ()):
        # Transformers builds its schedules as LambdaLR(optimizer, partial(..., num_training_steps=...)).
        settings = factor.keywords if isinstance(factor, functools.partial) else {}
        if settings.get("num_training_steps") is not None:
            return int(settings["num_training_steps"])
        if {"num_warmup_steps", "num_stable_steps", "num_decay_steps"} <= settings.keys():  # warm-up, stable, decay
            return sum(int(settings[f"num_{part}_steps"]) for part in ("warmup", "stable", "decay"))
    return None


def tick(scheduler: Any, times: int, *args: Any, **kwargs: Any) -> None:
    """Advance a scheduler by several ticks; OneCycleLR stops at its end, beyond which torch raises an error.

    Args:
        scheduler: a learning rate scheduler of torch or Transformers.
        times: number of ticks.
        *args, **kwargs: of `scheduler.step`.
    """
    for _ in range(times):
        if not isinstance(scheduler, OneCycleLR) or scheduler.last_epoch < scheduler.total_steps:
            scheduler.step(*args, **kwargs)


def _lrs_of_a_copy(scheduler: Any, total_steps: int, ticks: int) -> list[float]:
    stand_in = _stand_in(scheduler.optimizer)
    ghost = copy.deepcopy(scheduler, memo={id(scheduler.optimizer): stand_in})
    lrs = []
    # Torch warns about the order of optimizer and scheduler steps, which is not the user's code here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(total_steps):
            lrs.append(current_lr(stand_in))
            tick(ghost, ticks)
    return lrs


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same settings per group (lr, betas, momentum), each with one tiny parameter."""
    groups = [
        {
            **copy.deepcopy({key: value for key, value in group.items() if key != "params"}),
            "params": [torch.zeros(1, device="cpu")],
        }
        for group in optimizer.param_groups
    ]
    return torch.optim.SGD(groups, lr=0.0)


def _nonnegative(name: str, value: Any, advice: str = "") -> float:
    return check_number(name, _plain(value), minimum=0, advice=advice)


def _checked_max_lr(value: Any) -> float | str:
    if not isinstance(value, str):
        return check_number("max_lr", _plain(value), above=0, advice="Or use 'active' or 'run'.")
    if value not in _MAX_LR_WORDS:
        suggestion = did_you_mean(value, _MAX_LR_WORDS)
        raise ValueError(f"max_lr must be 'active', 'run' or a number > 0; got {value!r}.{suggestion}")
    return value


def _count_or_none(name: str, value: Any, advice: str = "") -> int | None:
    return None if value is None else check_integer(name, value, minimum=0, advice=advice)


def _plain(value: Any) -> Any:
    """Return the number in a one-element tensor: an optimizer may hold its learning rate in one."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

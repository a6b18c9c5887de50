"""Averages of the weights over the steps of a run (EMA, SWA, LAWA), evaluated and deployed in place of the last ones.

    EMA   w <- decay w + (1 - decay) x     after every step (Polyak and Juditsky 1992; decay as in torch)
    SWA   w  = mean of the x at the ends of the epochs from start_epoch on (Izmailov et al. 2018, arXiv 1803.05407)
    LAWA  w  = mean of the x at the ends of the last epochs (Kaddour 2022, arXiv 2209.14981)

x is the average of the workers. Each process averages the mean of its own workers over the steps, without
communication; the mean of these over the processes is the same, since all three are linear in x.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from dsgdac_accel.checks import check_integer, check_number
from dsgdac_accel.virtual_workers import replicas_of
from tasks.common.config import ConfigError
from tasks.common.output_dir import AnyAccelerator

_KINDS = {"decay": ("ema",), "last": ("lawa",), "start_epoch": ("ema", "swa"), "every": ("ema", "swa", "lawa")}
"""The kinds for which each key has a meaning."""


@dataclass(frozen=True, kw_only=True)
class WeightAverageConfig:
    """Average of the weights over the steps of the run, evaluated and deployed in place of the last weights."""

    kind: Literal["none", "ema", "swa", "lawa"] = "none"
    """ema is an exponential moving average, swa the mean of snapshots from start_epoch on, lawa the mean of the last
    snapshots, none takes the weights of the last step. Training itself does not change."""

    decay: float | None = None
    """Decay of ema per update, in (0, 1). null takes 0.99, a memory of about 100 updates."""

    last: int | None = None
    """Number of snapshots that lawa averages. null takes 5."""

    start_epoch: int | None = None
    """First epoch (0-based) that ema and swa average. null takes 0 for ema, and three quarters of the run for swa."""

    every: int | None = None
    """Optimizer steps between updates or snapshots, from the start of start_epoch. null takes 1 for ema, and one epoch
    for swa and lawa."""

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            if getattr(self, name) is not None and self.kind not in kinds:
                raise ValueError(
                    f"{name} is for kind {' or '.join(kinds)}; got {getattr(self, name)} with kind {self.kind}. Leave "
                    f"it out, or set kind."
                )
        if self.decay is not None:
            check_number("decay", self.decay, above=0, maximum=1, advice="0.99 is a memory of about 100 updates.")
            if self.decay == 1:
                raise ValueError("decay must be in (0, 1), below 1; got 1.0. 1 keeps the first weights for ever.")
        for name, minimum in (("last", 1), ("start_epoch", 0), ("every", 1)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=minimum)


class WeightAverage:
    """Averages the weights of a run over its steps. Registered for checkpointing, it resumes bit by bit.

    Args:
        config: what to average.
        model: the prepared model.
        accelerator: accelerator of the run.
        steps_per_epoch: optimizer steps in an epoch.
        total_steps: optimizer steps of the run.

    Raises ConfigError if the run ends before the first update.
    """

    def __init__(
        self, config: WeightAverageConfig, model: nn.Module, accelerator: AnyAccelerator, steps_per_epoch: int,
        total_steps: int,
    ) -> None:  # fmt: skip
        self.config = config
        self.model = model
        self.accelerator = accelerator
        self.count = 0
        """Updates so far."""
        epochs = -(-total_steps // steps_per_epoch)
        start = config.start_epoch if config.start_epoch is not None else epochs * 3 // 4 if config.kind == "swa" else 0
        self.start_step = start * steps_per_epoch
        self.every = config.every or (1 if config.kind == "ema" else steps_per_epoch)
        if config.kind != "none" and self.start_step + self.every > total_steps:
            raise ConfigError(
                f"weight_average: the first of its updates would be at step {self.start_step + self.every} "
                f"(start_epoch {start}, every {self.every} steps), but the run has {total_steps}. Lower start_epoch or "
                f"every."
            )
        # LAWA keeps its last snapshots, the others one running average.
        self._kept: deque[list[Tensor]] = deque(maxlen=(config.last or 5) if config.kind == "lawa" else 1)
        decay = 0.99 if config.decay is None else config.decay
        self._update = get_ema_multi_avg_fn(decay) if config.kind == "ema" else get_swa_multi_avg_fn()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Take the weights after optimizer step `step`, counted from 1, if they are due. Each process its own."""
        since = step - self.start_step
        if self.config.kind == "none" or since <= 0 or since % self.every:
            return
        weights = mean_of_replicas(self.model)
        if self.config.kind == "lawa" or self.count == 0:
            self._kept.append([weight.clone() for weight in weights])
        else:
            self._update(self._kept[0], weights, self.count)
        self.count += 1

    @contextmanager
    def swapped_in(self, deployed: nn.Module) -> Iterator[None]:
        """Inside, the trained parameters of `deployed` are the average over steps and workers. Collective.

        BatchNorm statistics are left alone: calibrate them inside. Before the first update nothing changes.

        Args:
            deployed: the deployed model, whose parameters are equal on all workers.
        """
        with torch.no_grad():
            parameters = _trained(deployed) if self.count else []
            before = [parameter.detach().clone() for parameter in parameters]
            for number, parameter in enumerate(parameters):
                mean = torch.stack([kept[number].double() for kept in self._kept]).mean(0).to(parameter.dtype).flatten()
                if self.accelerator.gossip_steps:
                    self.accelerator.group.all_reduce_mean_(mean, "averaging the weights over steps and workers")
                parameter.copy_(mean.view(parameter.shape))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """This process's part of the average."""
        return {
            "count": self.count,
            "kept": [list(weights) for weights in self._kept],
            "processes": self.accelerator.group.size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called.

        Raises ConfigError for a state of another number of processes, each of which has a part of the average.
        """
        processes = self.accelerator.group.size
        if state["count"] and state["processes"] != processes:
            raise ConfigError(
                f"weight_average: the checkpoint has its parts from {state['processes']} processes, and there are "
                f"{processes}. Launch as many, or choose another output_dir for a new run."
            )
        self.count = state["count"]
        device = self.accelerator.device
        self._kept.extend([weight.to(device) for weight in weights] for weights in state["kept"])


def mean_of_replicas(model: nn.Module) -> Sequence[Tensor]:
    """Return the trained parameters of a model; of `VirtualWorkers`, their mean over the replicas."""
    first, *others = [_trained(replica) for replica in replicas_of(model)]
    if not others:
        return first
    total = [parameter.detach().clone() for parameter in first]
    for other in others:
        torch._foreach_add_(total, other)
    torch._foreach_div_(total, 1 + len(others))
    return total


def _trained(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]

"""The average of the workers at the end of a pass over the training data, for scripts that evaluate and save there.

All workers take the last optimizer step of a pass together. `PassAverage` forms their average right after it and keeps
a copy. Until the next step, evaluation passes and `save_pretrained` show the copy, without communication, so that
nothing waits if a single worker evaluates or saves.
"""

from __future__ import annotations

import functools
import logging
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from dsgdac_accel.deployed_model import Deployment
from dsgdac_accel.gossip_training import GossipTraining
from dsgdac_accel.virtual_workers import first_replica, replicas_of, values_of

logger = logging.getLogger(__name__)


@dataclass
class _Kept:
    """A tensor of a model with its value on this worker and in the average; one of them is in the tensor."""

    tensor: Tensor
    other: Tensor
    """In host memory: the value that is not in the tensor."""
    own: int
    """Checksum of this worker's value."""
    average: int
    """Checksum of the average."""

    def exchange(self) -> None:
        """Put the other value into the tensor."""
        value = _on_host(self.tensor)
        self.tensor.data.copy_(self.other)
        self.other = value


class PassAverage:
    """Keeps the average of the workers from the last optimizer step of a pass until the next step.

    It is formed after the last step of a pass over a prepared loader, and after the last step of the learning rate
    schedule, since scripts often leave the last pass by `break`. It stays in host memory, and each worker shows it by
    itself:

    - in a pass over a prepared loader that has not been trained on, if the models are in eval mode or gradients are
      disabled when the pass begins;
    - in `save_pretrained` of a prepared model.

    Where there is no average to show, the first such pass, and the first `state_dict()` of a worker's own weights, log
    a warning with the line to write.

    Args:
        training: the models and GossipSteps of the accelerator.
        deployment: forms the average.
        loaders: the accelerator's list of prepared loaders, whose position is preserved.
        gradient_state: Accelerate's record of the loaders that are being read.
        enabled: whether to keep averages.
        watching: whether to show them, and to warn where there is none to show. False where a framework evaluates and
            saves.
    """

    def __init__(
        self,
        training: GossipTraining,
        deployment: Deployment,
        loaders: Sequence[Any],
        gradient_state: GradientState,
        enabled: bool,
        watching: bool,
    ) -> None:
        self.training = training
        self.deployment = deployment
        self.loaders = loaders
        self.gradient_state = gradient_state
        self.enabled = enabled
        self.watching = watching
        self.last_steps: set[int] = set()
        """Optimizer steps with which the run may end."""
        self._kept: list[_Kept] = []
        self._steps: list[int] = []
        self._shown_by: object | None = None
        self._trained_on: weakref.WeakSet[Any] = weakref.WeakSet()
        self._said: set[str] = set()
        self._hooks: list[Any] = []

    # ---- keeping

    def before_step(self) -> None:
        """Drop the average before an optimizer step.

        Raises:
            RuntimeError: the gradient was taken at the average, inside an evaluation pass.
        """
        if self._shown_by is not None:
            raise RuntimeError(
                "this optimizer step lies in a pass with the model in eval mode, which reads the average of the "
                "workers. Call model.train() before a pass that trains, or pass GossipAccelerator(keep_average=False)."
            )
        self._kept = []
        if self.watching and self.gradient_state.active_dataloader is not None:
            self._trained_on.add(self.gradient_state.active_dataloader)

    def after_step(self) -> None:
        """Keep the average if this was the last step of a pass or of the schedule. Then collective."""
        if not self.enabled or self.training.num_workers == 1:
            return
        if self.gradient_state.end_of_dataloader or self._position[0] in self.last_steps:
            self._kept = self.training.group.retry_after_loss(self._take)
            self._steps = self._position

    def _take(self) -> list[_Kept]:
        averages: dict[int, tuple[Tensor, Tensor]] = {}
        with ExitStack() as contexts:
            for model in self._models:
                contexts.enter_context(self.deployment.deployed(model, self.loaders, None, None))
                by_replica = [_may_differ(replica) for replica in replicas_of(model)]
                for tensors in [*zip(*by_replica, strict=True), *self.deployment.unmixed]:
                    average = _on_host(tensors[0])
                    averages |= {id(tensor): (tensor, average) for tensor in tensors}
        checksums = {id(average): _checksum(average) for _, average in averages.values()}
        return [
            _Kept(tensor, average, _checksum(tensor), checksums[id(average)]) for tensor, average in averages.values()
        ]

    def drop(self) -> None:
        """Forget the average, because the parameters change or the script evaluates by itself."""
        self._hide()
        self._kept = []

    @property
    def _models(self) -> list[nn.Module]:
        """The prepared models that are trained."""
        mixed = self.training.mixed
        return [model for model in self.training.models if any(id(p) in mixed for p in model.parameters())]

    @property
    def _position(self) -> list[int]:
        return [step.mixer.step for step in self.training.steps]

    # ---- showing

    @property
    def available(self) -> bool:
        """Whether the average of the present parameters is there, kept or deployed."""
        return self.deployment.active or (bool(self._kept) and self._steps == self._position)

    @contextmanager
    def shown(self) -> Iterator[bool]:
        """Inside, the prepared models hold the kept average. No communication. Contexts nest.

        Yields whether they hold an average. Parameters that the script has changed since the last step stay as they
        are, and so do parameters that it changes inside.
        """
        if self.deployment.active or self._shown_by is not None:
            yield True
            return
        if not self.available:
            yield False
            return
        if any(_checksum(kept.tensor) != kept.own for kept in self._kept):
            self._kept = []  # such as by an average of the script's own, which is what it evaluates
            yield False
            return
        context = self._shown_by = object()
        for kept in self._kept:
            kept.exchange()
        try:
            yield True
        finally:
            if self._shown_by is context:
                self._hide()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, the prepared models hold this worker's own parameters."""
        shown_by = self._shown_by
        self._hide()
        try:
            yield
        finally:
            if shown_by is not None and self._shown_by is None and self.available:
                for kept in self._kept:
                    kept.exchange()
                self._shown_by = shown_by

    def _hide(self) -> None:
        if self._shown_by is None:
            return
        self._shown_by = None
        # Parameters that were changed inside, such as by `load_state_dict`, are what the script wants.
        changed = {id(kept) for kept in self._kept if _checksum(kept.tensor) != kept.average}
        replaced = any(id(kept) in changed and isinstance(kept.tensor, nn.Parameter) for kept in self._kept)
        for kept in self._kept:
            if not (replaced and id(kept) in changed):
                kept.exchange()
        if replaced:
            self._kept = []

    @contextmanager
    def during_pass(self, loader: Any) -> Iterator[None]:
        """Enter this for a pass over a prepared loader: an evaluation pass shows the average."""
        if not self._evaluates(loader):
            if self.deployment.phase.is_training():
                self._hide()  # an evaluation pass that was left without an end
            yield
            return
        with self.shown() as average:
            if average:
                self.say_shown("this evaluation pass")
            else:
                self.warn_of_own_evaluation()
            yield

    def _evaluates(self, loader: Any) -> bool:
        if not self._differ or self.deployment.active or self._shown_by or loader in self._trained_on:
            return False
        return not torch.is_grad_enabled() or self._in_eval_mode

    @property
    def _in_eval_mode(self) -> bool:
        models = self._models
        return bool(models) and not any(model.training for model in models)

    @property
    def _differ(self) -> bool:
        """Whether the workers have taken a step, and what they evaluate and save is watched."""
        return self.watching and self.training.num_workers > 1 and any(self._position)

    # ---- saving

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Make `save_pretrained` of newly prepared models show the average, and their `state_dict()` warn."""
        if not self.watching or self.training.num_workers == 1:
            return
        for model in models:
            inner = extract_model_from_parallel(first_replica(model), keep_torch_compile=False)
            self._hooks.append(inner.register_state_dict_pre_hook(_WarnOfOwnState(self, inner)))
            if hasattr(type(inner), "save_pretrained"):
                _AVERAGES[inner] = weakref.ref(self)
                inner.save_pretrained = _SavePretrained(inner)

    def end(self) -> None:
        """Drop the average, and no longer watch the models."""
        self.drop()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for model in [model for model, average in _AVERAGES.items() if average() is self]:
            del _AVERAGES[model]
            vars(model).pop("save_pretrained", None)

    # ---- saying

    def say_shown(self, what: str) -> None:
        """Say once that `what` reads the kept average."""
        if self._differ and not self.deployment.active:
            self._say(
                what,
                f"{what} reads the average of the workers after step {max(self._position)}, the deployed model; "
                f"training goes on from each worker's own weights. To turn this off, pass "
                f"GossipAccelerator(keep_average=False).",
            )

    def warn_of_own_state(self, what: str) -> None:
        """Warn once if `what` takes this worker's own weights now."""
        if self._differ and not self.deployment.active and self._shown_by is None:
            self._say(
                "own state",
                f"{what} at step {max(self._position)} has this worker's own weights, not the average of the workers. "
                f"To save the average, write on all workers: `accelerator.save_model(model, folder)`, or "
                f"`state_dict = accelerator.get_state_dict(model)`.",
            )

    def warn_of_own_evaluation(self) -> None:
        """Warn once if the models are evaluated now with this worker's own weights."""
        if self._differ and not self.deployment.active and self._shown_by is None:
            self._say(
                "own pass",
                f"this evaluation at step {max(self._position)} scores each worker's own model, not the average of the "
                f"workers. Evaluate inside `with accelerator.deployed_model(model):`, on all workers.",
            )

    def warn_of_gathered_evaluation(self) -> None:
        """The same, for results that are gathered: only if the models are in eval mode."""
        if "own pass" not in self._said and self._differ and self._in_eval_mode:
            self.warn_of_own_evaluation()

    def _say(self, topic: str, message: str) -> None:
        if topic not in self._said and self.training.group.rank == 0:
            self._said.add(topic)
            logger.warning(message)


class _WarnOfOwnState:
    """A hook before `state_dict()`. In a copied or pickled model it does nothing."""

    def __init__(self, average: PassAverage | None = None, model: nn.Module | None = None) -> None:
        self.average = None if average is None else weakref.ref(average)
        self.model = None if model is None else weakref.ref(model)

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        average = None if self.average is None else self.average()
        if average is not None and self.model is not None and self.model() is module and not keep_vars:
            average.warn_of_own_state("state_dict()")

    def __reduce__(self) -> tuple:
        return _WarnOfOwnState, ()


_AVERAGES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[PassAverage]] = weakref.WeakKeyDictionary()
"""The average of each prepared model with a `save_pretrained`. Copies of a model are not in it."""


class _SavePretrained:
    """The model's own `save_pretrained`, with the weights of the kept average.

    It does not keep the model alive. A copied or pickled model has one of its own, which saves the copy as it is.
    """

    def __init__(self, model: Any) -> None:
        self.model = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model()
        own = functools.partial(type(model).save_pretrained, model, *args, **kwargs)
        reference = _AVERAGES.get(model)
        average = None if reference is None else reference()
        if average is None:
            return own()
        with average.shown() as shown:
            if shown:
                average.say_shown("save_pretrained()")
            elif kwargs.get("state_dict") is None:
                average.warn_of_own_state("save_pretrained()")
            return own()

    def __reduce__(self) -> tuple:
        return _SavePretrained, (self.model(),)


def _may_differ(replica: nn.Module) -> list[Tensor]:
    """Return the tensors of a model that may differ between the workers: trained parameters, and buffers."""
    return [tensor for tensor in values_of(replica) if tensor.requires_grad or not isinstance(tensor, nn.Parameter)]


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _checksum(tensor: Tensor) -> int:
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data) if data.numel() else 0

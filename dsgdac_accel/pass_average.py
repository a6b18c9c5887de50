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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate.state import GradientState
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from dsgdac_accel.data.dataloader_state import OpenPass, recorder_of
from dsgdac_accel.deployed_model import Deployment
from dsgdac_accel.gossip_training import GossipTraining
from dsgdac_accel.tensor_bytes import as_bytes
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

    - in a pass over a prepared loader that has not been trained on and does not count as training when it begins, see
      `TrainingPhase.is_training`;
    - in `save_pretrained` of a prepared model.

    The first such pass without an average to show, and the first `state_dict()` of a worker's own weights, log a
    warning that says what to write instead.

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
        self._in_models = False  # whether the models hold the average
        self._showing: set[object] = set()  # the `shown` contexts that are open
        self._passes: list[OpenPass] = []  # over recorded loaders, the outermost first
        self._trained_in: OpenPass | None = None
        self._at_end = False  # of the pass to which the last step belongs
        self._trained_on: weakref.WeakSet[Any] = weakref.WeakSet()
        self._said: set[str] = set()
        self._hooks: list[Any] = []
        deployment.phase.ask_for_evaluations(self.evaluates_in)

    # ---- keeping

    def before_step(self) -> None:
        """Drop the average before an optimizer step.

        Raises:
            RuntimeError: the gradient was taken at the average, inside an evaluation pass.
        """
        if self._in_models:
            raise RuntimeError(
                "this optimizer step lies in a pass with the model in eval mode, which reads the average of the "
                "workers. Call model.train() before a pass that trains, or pass GossipAccelerator(keep_average=False)."
            )
        self._kept = []
        self._showing.clear()
        loader, self._at_end = self._pass_of_this_step()
        if loader is not None:
            self._trained_on.add(loader)

    def _pass_of_this_step(self) -> tuple[Any, bool]:
        """Return the loader whose pass this optimizer step belongs to (or None), and whether it is at its last batch.

        All workers get the same answer, also if one of them reads a sample of another loader in between: of the passes
        that handed out a batch since the last step, it is the one that began first. One that runs in step with it, as
        in `zip`, may end it.
        """
        active = self.gradient_state.active_dataloader
        if active is not None and recorder_of(active) is None:  # such as from `skip_first_batches`
            return active, active.end_of_dataloader
        fresh = [pass_ for pass_ in self._passes if pass_.fresh]
        for pass_ in fresh:
            pass_.fresh, pass_.steps = False, pass_.steps + 1
        if fresh:
            self._trained_in = fresh[0]
            fresh[0].trained_in = True
            steps = fresh[0].steps
            # After a single step, the other pass may also be a worker's that only takes a sample.
            ends = [pass_.last for pass_ in fresh[1:] if pass_.steps == steps > 1]
            return fresh[0].loader(), fresh[0].last or any(ends)
        # No new batch: a second optimizer steps on the same one.
        return (None, False) if self._trained_in is None else (self._trained_in.loader(), self._at_end)

    def after_step(self) -> None:
        """Keep the average if this was the last step of a pass or of the schedule. Then collective."""
        if not self.enabled or self.training.num_workers == 1:
            return
        if self._at_end or self._position[0] in self.last_steps:
            self._kept = self._take()
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
        self._showing.clear()
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
        if self.deployment.active:
            yield True
            return
        if not self._in_models:
            if not self.available:
                yield False
                return
            if any(_checksum(kept.tensor) != kept.own for kept in self._kept):
                self._kept = []  # such as by an average of the script's own, which is what it evaluates
                yield False
                return
            self._show()
        context = object()
        self._showing.add(context)
        try:
            yield True
        finally:
            # Passes over two loaders may end in any order.
            if context in self._showing:
                self._showing.remove(context)
                if not self._showing:
                    self._hide()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, the prepared models hold this worker's own parameters."""
        shown = self._in_models
        self._hide()
        try:
            yield
        finally:
            if shown and self._showing and not self._in_models and self.available:
                self._show()

    def _show(self) -> None:
        self._in_models = True
        for kept in self._kept:
            kept.exchange()

    def _hide(self) -> None:
        if not self._in_models:
            return
        self._in_models = False
        # Parameters that were changed inside, such as by `load_state_dict`, are what the script wants.
        changed = {id(kept) for kept in self._kept if _checksum(kept.tensor) != kept.average}
        replaced = any(id(kept) in changed and isinstance(kept.tensor, nn.Parameter) for kept in self._kept)
        for kept in self._kept:
            if not (replaced and id(kept) in changed):
                kept.exchange()
        if replaced:
            self._kept = []

    @contextmanager
    def during_pass(self, loader: Any) -> Iterator[OpenPass]:
        """Enter this for a pass over a prepared loader, which reports its batches: an evaluation shows the average."""
        pass_ = OpenPass(weakref.ref(loader))
        self._passes.append(pass_)
        try:
            training = self.deployment.phase.is_training(loader)
            pass_.evaluation = not training
            if not training and self._differ and not self.deployment.active and loader not in self._trained_on:
                with self.shown() as average:
                    if average:
                        self.say_shown("this evaluation pass")
                    else:
                        self.warn_of_own_evaluation()
                    yield pass_
                return
            if training and not self._in_eval_mode:  # an evaluation pass was left, and its iterator lives on
                self._showing.clear()
                self._hide()
            yield pass_
        finally:
            self._passes.remove(pass_)
            if self._trained_in is pass_:
                self._trained_in = None

    def evaluates_in(self, loader: Any) -> bool:
        """Return whether a pass over a prepared loader is one of evaluation because the models are in eval mode.

        It is not if an optimizer step was taken in a pass over the loader. A script that trains in eval mode shows that
        at its first step.
        """
        return recorder_of(loader) is not None and loader not in self._trained_on and self._in_eval_mode

    @property
    def _in_eval_mode(self) -> bool:
        models = self._models or self.training.models  # a script that only evaluates has no optimizer
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
            inner: Any = extract_model_from_parallel(first_replica(model), keep_torch_compile=False)
            self._hooks.append(inner.register_state_dict_pre_hook(_WarnOfOwnState(self, inner)))
            if hasattr(type(inner), "save_pretrained") or "save_pretrained" in vars(inner):
                _AVERAGES[inner] = weakref.ref(self)
                patched = vars(inner).get("save_pretrained")  # by the script
                own = patched.own if isinstance(patched, _SavePretrained) else patched
                inner.save_pretrained = _SavePretrained(inner, own)

    def end(self) -> None:
        """Drop the average, and no longer watch the models."""
        self.drop()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for model in [model for model, average in _AVERAGES.items() if average() is self]:
            del _AVERAGES[model]
            present = vars(model).get("save_pretrained")
            if isinstance(present, _SavePretrained):
                del model.save_pretrained
                if present.own is not None:
                    model.save_pretrained = present.own  # type: ignore[assignment]

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
        if self._differ and not self.deployment.active and not self._in_models:
            self._say(
                "own state",
                f"{what} at step {max(self._position)} has this worker's own weights, not the average of the workers. "
                f"To save the average, write on all workers: `accelerator.save_model(model, folder)`, or "
                f"`state_dict = accelerator.get_state_dict(model)`.",
            )

    def warn_of_own_evaluation(self) -> None:
        """Warn once if the models are evaluated now with this worker's own weights."""
        if self._differ and not self.deployment.active and not self._in_models:
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
        if topic not in self._said and self.training.group.everyone.rank == 0:
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

    Args:
        model: the model.
        own: the model's `save_pretrained` where the script has set one on the model itself; otherwise its class's.
    """

    def __init__(self, model: Any, own: Callable[..., Any] | None = None) -> None:
        self.model = weakref.ref(model)
        self.own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model()
        save = functools.partial(type(model).save_pretrained, model) if self.own is None else self.own
        own = functools.partial(save, *args, **kwargs)
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
        return _SavePretrained, (self.model(), self.own)


def _may_differ(replica: nn.Module) -> list[Tensor]:
    """Return the tensors of a model that may differ between the workers: trained parameters, and buffers."""
    return [tensor for tensor in values_of(replica) if tensor.requires_grad or not isinstance(tensor, nn.Parameter)]


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _checksum(tensor: Tensor) -> int:
    data = as_bytes(tensor.to("cpu"))
    return zlib.crc32(data.numpy().data) if data.numel() else 0

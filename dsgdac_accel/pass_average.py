"""When scripts see the average of the workers that evaluate and save at the end of a pass over the training data.

All workers take the last optimizer step of a pass together. `PassAverage` lets `Deployment` form their average right
after it, beside the models. Until the next step, evaluation passes and `save_pretrained` show it, without
communication, so that nothing waits if a single worker evaluates or saves.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.state import GradientState
from accelerate.utils import extract_model_from_parallel
from torch import nn

from dsgdac_accel.core.copies import Use
from dsgdac_accel.core.shown import Shown
from dsgdac_accel.data.dataloader_state import OpenPass, recorder_of
from dsgdac_accel.deployed_model import Deployment
from dsgdac_accel.gossip_training import GossipTraining
from dsgdac_accel.virtual_workers import first_replica

logger = logging.getLogger(__name__)

_COPY_FIRST = (
    "To average weights such as those of an EMA over the workers, copy them into the prepared model on all workers "
    "(`ema.copy_to`), and evaluate and save then, by `deployed_model` and `save_model`."
)


class PassAverage:
    """Keeps the average of the workers from the last optimizer step of a pass until the next step.

    It is formed after the last step of a pass over a prepared loader, and after the last step of the learning rate
    schedule, since scripts often leave the last pass by `break`; and again when such a state is loaded. Each worker
    shows it by itself:

    - in a pass over a prepared loader that has not been trained on and does not count as training when it begins, see
      `TrainingPhase.is_training`;
    - in `save_pretrained` of a prepared model.

    The first such pass without an average to show, and the first `state_dict()` of a worker's own weights, log a
    warning that says what to write instead.

    Args:
        training: the models and GossipSteps of the accelerator.
        deployment: forms the average.
        gradient_state: Accelerate's record of the loaders that are being read.
        enabled: whether to keep averages.
        watching: whether to show them, and to warn where there is none to show. False where a framework evaluates and
            saves.
    """

    def __init__(
        self,
        training: GossipTraining,
        deployment: Deployment,
        gradient_state: GradientState,
        enabled: bool,
        watching: bool,
    ) -> None:
        self.training = training
        self.deployment = deployment
        self.gradient_state = gradient_state
        self.enabled = enabled
        self.watching = watching
        self.last_steps: set[int] = set()
        """Optimizer steps with which the run may end."""
        self._kept: Shown | None = None
        """The average that was formed after the last step."""
        self._in_models = False  # whether the models hold the average
        self._showing: set[object] = set()  # the `shown` contexts that are open
        self._passes: list[OpenPass] = []  # over recorded loaders, the outermost first
        self._trained_in: OpenPass | None = None
        self._at_end = False  # of the pass to which the last step belongs
        self._trained_on: weakref.WeakSet[Any] = weakref.WeakSet()
        self._evaluated_at: int | None = None
        """The number of steps when an evaluation pass has read the average."""
        self._said: set[str] = set()
        self._hooks: list[Any] = []
        self._saving: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """The models whose `save_pretrained` shows the average."""
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
        self._kept = None
        self._showing.clear()
        loader, self._at_end = self._pass_of_this_step()
        if loader is not None:
            self._trained_on.add(loader)

    def _pass_of_this_step(self) -> tuple[Any, bool]:
        """Return the loader whose pass this optimizer step belongs to (or None), and whether it is at its last batch.

        All workers get the same answer, also if one of them reads a sample of another loader in between: of the passes
        that handed out a batch since the last step, it is the one that began first, and an evaluation, whose iterator
        may live on, only if there is no other. One that runs in step with it, as in `zip`, may end it. At the first
        step of several passes each may be a sample: the step belongs to none, and is at the end if all of them are.
        """
        active = self.gradient_state.active_dataloader
        if active is not None and recorder_of(active) is None:  # such as from `skip_first_batches`
            return active, active.end_of_dataloader
        fresh = [pass_ for pass_ in self._passes if pass_.fresh]
        for pass_ in fresh:
            pass_.fresh, pass_.steps = False, pass_.steps + 1
        fresh = [pass_ for pass_ in fresh if not pass_.evaluation] or fresh
        if fresh:
            steps = fresh[0].steps
            if steps == 1 < len(fresh):
                return None, all(pass_.last for pass_ in fresh)
            self._trained_in, fresh[0].trained_in = fresh[0], True
            return fresh[0].loader(), any(pass_.last for pass_ in fresh if pass_ is fresh[0] or pass_.steps == steps)
        # No new batch: a second optimizer steps on the same one.
        return (None, False) if self._trained_in is None else (self._trained_in.loader(), self._at_end)

    def after_step(self) -> None:
        """Keep the average if this was the last step of a pass or of the schedule. Then collective."""
        if not self.enabled or self.training.num_workers == 1:
            return
        if self._at_end or self.training.steps[0].steps_taken in self.last_steps:
            try:
                self._kept = self.deployment.form()
            except ValueError as error:  # on all workers; a script that never reads an average goes on
                self._say("no average", f"no average is kept at the end of a pass: {error}")

    def after_load(self) -> None:
        """Keep the average of loaded weights, unless copies of them are on their way as they were at the save."""
        steps = self.training.steps if self.enabled and self.training.num_workers > 1 else []
        if steps and all(step.mixer.copies.use is Use.FREE for step in steps):
            self._kept = self.deployment.form()

    def drop(self) -> None:
        """Forget the average, because the parameters change or the script evaluates by itself."""
        self._showing.clear()
        self._hide()
        self._kept = None

    # ---- showing

    @property
    def available(self) -> bool:
        """Whether the average of the present parameters is there, kept or deployed."""
        return self.deployment.active or self._kept is not None

    @contextmanager
    def shown(self) -> Iterator[bool]:
        """Inside, the prepared models hold the kept average. No communication. Contexts nest.

        Yields whether they hold an average. Parameters that the script has changed since the last step stay as they
        are, and so do parameters that it changes inside.
        """
        if self.deployment.active:
            yield True
            return
        if not self._in_models and not self._show():
            yield False
            return
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
            if shown and self._showing and not self._in_models:
                self._show()

    def _show(self) -> bool:
        """Show the kept average, and return whether there is one."""
        if self._kept is None or not self._kept.is_current():
            self._kept = None  # a script has written weights, such as an average of its own, which it evaluates
            return False
        for virtual in self.training.owners.virtual_models:
            virtual.follow_the_first()  # before its buffers are overwritten
        self._in_models = True
        self._kept.show()
        return True

    def _hide(self) -> None:
        if self._in_models and self._kept is not None:
            self._in_models = False
            # Weights that were written inside, such as by `load_state_dict`, are what the script wants.
            if self._kept.restore(keep_edits=True):
                self._kept = None

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
                        self._evaluated_at = self.training.taken_steps
                        self.say_shown("this evaluation pass")
                    else:
                        self.warn_of_own_evaluation()
                    yield pass_
                return
            if not training:
                self.warn_of_edited_average()
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
        models = self.training.trained_models or self.training.models  # a script that only evaluates has no optimizer
        return bool(models) and not any(model.training for model in models)

    @property
    def _differ(self) -> bool:
        """Whether the workers have taken a step, and what they evaluate and save is watched."""
        return self.watching and self.training.num_workers > 1 and self.training.taken_steps > 0

    @property
    def _own_are_read(self) -> bool:
        """Whether what is read from the models now is this worker's own, while the workers differ."""
        return self._differ and not self.deployment.active and not self._in_models

    # ---- saving

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Make `save_pretrained` of newly prepared models show the average, and their `state_dict()` warn."""
        if not self.watching or self.training.num_workers == 1:
            return
        for model in models:
            inner: Any = extract_model_from_parallel(first_replica(model), keep_torch_compile=False)
            self._hooks.append(inner.register_state_dict_pre_hook(_WarnOfOwnState(self, inner)))
            if hasattr(type(inner), "save_pretrained") or "save_pretrained" in vars(inner):
                self._saving.add(inner)
                patched = vars(inner).get("save_pretrained")  # by the script
                own = patched.own if isinstance(patched, _SavePretrained) else patched
                inner.save_pretrained = _SavePretrained(inner, own, self)

    def end(self) -> None:
        """Drop the average, and no longer watch the models."""
        self.drop()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for model in self._saving:
            present = vars(model).get("save_pretrained")
            if isinstance(present, _SavePretrained) and present.average() is self:
                del model.save_pretrained
                if present.own is not None:
                    model.save_pretrained = present.own  # type: ignore[assignment]

    # ---- saying

    def say_shown(self, what: str) -> None:
        """Say once that `what` reads the kept average."""
        if self._differ and not self.deployment.active:
            self._say(
                what,
                f"{what} reads the average of the workers after step {self.training.taken_steps}, the deployed model; "
                f"training goes on from each worker's own weights. To turn this off, pass "
                f"GossipAccelerator(keep_average=False).",
            )

    def warn_of_own_state(self, what: str) -> None:
        """Warn once if `what` takes this worker's own weights now."""
        if self._own_are_read:
            self._say(
                "own state",
                f"{what} at step {self.training.taken_steps} has this worker's own weights, not the average of the "
                f"workers. To save the average, write on all workers: `accelerator.save_model(model, folder)`, or "
                f"`state_dict = accelerator.get_state_dict(model)`.",
            )

    def warn_of_own_evaluation(self, gathered: bool = False) -> None:
        """Warn once if the models are evaluated now with this worker's own weights.

        Args:
            gathered: whether its results are gathered, which only counts if the models are in eval mode.
        """
        if gathered and (not self._in_eval_mode or self._evaluated_at == self.training.taken_steps):
            return
        if "own pass" not in self._said and self._own_are_read:
            self._say(
                "own pass",
                f"this evaluation at step {self.training.taken_steps} scores each worker's own model, not the average "
                f"of the workers. Evaluate inside `with accelerator.deployed_model(model):`, on all workers.",
            )

    def warn_of_unprepared(self, model: nn.Module) -> None:
        """Warn once if the state of `model` is saved, and the workers may each have another one."""
        if self._differ and not any(id(p) in self.training.mixed for p in model.parameters()):
            self._say(
                "unprepared",
                f"get_state_dict() of a model that was not prepared has this worker's own weights at step "
                f"{self.training.taken_steps}. {_COPY_FIRST}",
            )

    def warn_of_hooks(self) -> None:
        """Warn once if hooks of a script save objects of its own, of which it has one for each worker."""
        if self._differ:
            self._say(
                "hooks",
                "hooks before save_state() read this worker's own objects: an EMA that one saves is worker 0's, not "
                f"the average. {_COPY_FIRST}",
            )

    def warn_of_edited_average(self) -> None:
        """Warn once if a script has written weights of its own into models that show the average now."""
        topic = "edited average"
        shown = self.deployment.active or self._in_models
        if topic not in self._said and self._differ and shown and self.deployment.is_edited():
            self._say(
                topic,
                f"weights were written into the deployed average at step {self.training.taken_steps}: they are each "
                f"worker's own, not the average of the workers. {_COPY_FIRST}",
            )

    def _say(self, topic: str, message: str) -> None:
        if topic not in self._said and self.training.group.everyone.rank == 0:
            logger.warning(message)
        self._said.add(topic)


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


class _SavePretrained:
    """The model's own `save_pretrained`, with the weights of the kept average.

    It does not keep the model alive. A copied or pickled model has one of its own, which saves the copy as it is.

    Args:
        model: the model.
        own: the model's `save_pretrained` where the script has set one on the model itself; otherwise its class's.
        average: what to show.
    """

    def __init__(self, model: Any, own: Callable[..., Any] | None, average: PassAverage | None) -> None:
        self.model = weakref.ref(model)
        self.own = own
        self.average = (lambda: None) if average is None else weakref.ref(average)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model()
        save = functools.partial(type(model).save_pretrained, model) if self.own is None else self.own
        own = functools.partial(save, *args, **kwargs)
        average = self.average()
        if average is None:
            return own()
        with average.shown() as shown:
            if shown:
                average.say_shown("save_pretrained()")
            elif kwargs.get("state_dict") is None:
                average.warn_of_own_state("save_pretrained()")
            return own()

    def __reduce__(self) -> tuple:
        return _SavePretrained, (self.model(), self.own, None)

"""`GossipAccelerator`: an `accelerate.Accelerator` whose workers gossip parameters instead of averaging gradients."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import InitProcessGroupKwargs

from dsgdac_accel.accelerator.deploying import DeploysAverage
from dsgdac_accel.accelerator.preparing import PreparesForGossip
from dsgdac_accel.checkpoint.saving import AcceleratorCheckpoints
from dsgdac_accel.compatibility import refuse_unsupported_launch
from dsgdac_accel.config import GossipConfig
from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.rendezvous import announce_waiting, init_method_after_restart
from dsgdac_accel.distributed.signals import STOP_SIGNALS
from dsgdac_accel.distributed.stopping import StopOnSignals
from dsgdac_accel.metrics import ConsensusLogger, consensus_metrics


class GossipAccelerator(PreparesForGossip, DeploysAverage, Accelerator):
    """Accelerate for DSGD-AC and DAdam-AC: put this class where `Accelerator` was, and the script gossips.

    Differences from `Accelerator`, all meant: models are not wrapped in DDP; all workers start from worker 0's state;
    random streams then differ per worker while data order is shared; schedulers tick once per optimizer step on every
    worker; passes over data of uneven length stop at the shortest.

    Args:
        gossip: topology, gamma schedule and policies. Default: DSGD-AC on the one-peer ring with p = 3.
        *args, **kwargs: those of `accelerate.Accelerator`. Without an accelerator device, `cpu=True` is set.

    Raises:
        ValueError, TypeError: a launch or a setting under which workers cannot gossip, with the way out.
    """

    _group_is_the_users = False
    """Whether the default process group was there before Accelerate; then `end_training` leaves it running."""

    _adopted_group: WorkerGroup | None = None
    """The workers of the last accelerator that was adopted in this process."""

    def __init__(self, *args: Any, gossip: GossipConfig | None = None, **kwargs: Any) -> None:
        config = _checked_config(gossip)
        if not PartialState._shared_state:  # of Accelerate's state there is one per process, so of this there is, too
            GossipAccelerator._group_is_the_users = torch.distributed.is_initialized()
        if len(args) < 5 and not torch.accelerator.is_available():
            kwargs.setdefault("cpu", True)
        handlers = list(kwargs.pop("kwargs_handlers", None) or [])
        if not any(isinstance(handler, InitProcessGroupKwargs) for handler in handlers):
            timeout = timedelta(seconds=config.timeout)
            handlers.append(InitProcessGroupKwargs(init_method=init_method_after_restart(), timeout=timeout))
        announce_waiting()
        super().__init__(*args, kwargs_handlers=handlers, **kwargs)
        self._begin_gossip(config)

    @classmethod
    def adopt(cls, accelerator: Accelerator, gossip: GossipConfig | None = None) -> GossipAccelerator:
        """Make a gossiping accelerator of one that exists, in place, for frameworks that build their own. Collective.

        To be called before anything is prepared. Everybody who holds `accelerator` then holds the gossiping one.

        Raises:
            ValueError, TypeError: as of the constructor, or something is prepared already.
        """
        config = _checked_config(gossip)
        if accelerator._models or accelerator._optimizers:
            raise ValueError("`adopt` comes before `prepare`: a model or optimizer of this accelerator is prepared.")
        refuse_unsupported_launch(accelerator)
        earlier = GossipAccelerator._adopted_group
        kind = type(accelerator)
        accelerator.__class__ = cls if kind is Accelerator else type(f"Gossip{kind.__name__}", (cls, kind), {})
        adopted = cast(GossipAccelerator, accelerator)
        # A search makes an Accelerator for each trial, and process groups cost threads and sockets: use them again.
        again = earlier is not None and earlier.serves(accelerator.device, config.timeout)
        adopted._begin_gossip(config, earlier if again else None)
        GossipAccelerator._adopted_group = adopted.group
        return adopted

    def _begin_gossip(self, config: GossipConfig, group: WorkerGroup | None = None) -> None:
        self.gossip_config = config
        self.workers_per_process = config.workers_per_process
        refuse_unsupported_launch(self)
        if group is None:
            group = WorkerGroup(self.device, config.timeout, on_loss=config.on_worker_loss)
        self.group = group
        group.when_workers_change(self._follow_survivors)
        group.policy.cover_collectives(self)
        self._stopping = StopOnSignals(group)
        self.gossip_steps: list[GossipStep] = []
        self._checkpoints = AcceleratorCheckpoints(
            self, group, self.gossip_steps, config, workers_per_process=config.workers_per_process
        )
        self.consensus_logger = ConsensusLogger(lambda: consensus_metrics(self.gossip_steps), [self._log_to_trackers])
        self._places = {}
        self._seeded = False
        self._deployed = 0

    def _follow_survivors(self) -> None:
        """Accelerate's own numbers, and with them who is the main process, are those of the workers that are left."""
        for shared in (PartialState._shared_state, AcceleratorState._shared_state):
            shared["num_processes"], shared["process_index"] = self.group.size, self.group.rank
            shared["local_process_index"] = self.group.local_rank

    # ---- checkpoints

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        wait: bool = True,
        facts: Mapping[str, Any] | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save the state of every worker, as `Accelerator.save_state` does for one. Collective.

        A checkpoint holds models, optimizers, schedulers, gradient scaler, random streams, positions in topology, gamma
        schedule and prepared loaders, registered objects, and inside an accumulation window the gradients. Nothing is
        pickled, and training is not disturbed. Automatic naming and `total_limit` work as in Accelerate, but older
        checkpoints are deleted only after this one is complete.

        Args:
            output_dir: folder on a file system that all workers share. Leave it out with automatic naming.
            safe_serialization, save_model_func_kwargs: Accelerate's; ignored, files are always safetensors.
            wait: False writes in the background after a copy to host memory. The checkpoint becomes complete a little
                later, and the next `save_state` or `finish_saving` raises its errors.
            facts: plain values for the manifest, such as the run's configuration.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: on all workers, if any of them could not write; older checkpoints are untouched.
            RuntimeError: called inside `deployed_model`.
        """
        return self._checkpoints.save(output_dir, wait=wait, facts=facts)

    def finish_saving(self) -> Path | None:
        """Wait until the checkpoint that is written in the background, if any, is complete. Collective.

        Returns:
            Its folder; None if there was none, or if a worker was lost that may not have written its part.

        Raises:
            CheckpointError: on all workers, if any of them could not write its part.
        """
        return self._checkpoints.finish()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        on_other_worker_count: Literal["refuse", "deployed"] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load each worker's own state from `save_state` into the same prepared objects. Collective.

        Training then continues bit by bit as if it had not stopped. Take the rest of the interrupted pass from
        `resumed_batches`.

        Args:
            input_dir: the checkpoint. Leave it out with automatic naming to load the newest complete one.
            load_kwargs, load_model_func_kwargs: Accelerate's; ignored.
            on_other_worker_count: what to do with a checkpoint of more or fewer workers: "refuse", or "deployed" to
                start all workers from the average of the saved ones. Parameters and floating-point optimizer states
                are then averaged, BatchNorm statistics are pooled, everything else is worker 0's, and random streams
                are seeded anew. Default: the GossipConfig's.

        Raises:
            WorkerCountError: another number of workers, refused.
            CheckpointError: no complete checkpoint, a damaged file, or a checkpoint of another model or setup.
            RuntimeError: called inside `deployed_model`.
        """
        self._checkpoints.load(input_dir, on_other_worker_count=on_other_worker_count)

    # ---- logging

    def measure_consensus(self, again: bool = True) -> dict[str, float]:
        """Measure the exact consensus radius now and return all consensus metrics. Collective.

        With `again=False` a radius that was measured at this very step is not measured again.
        """
        for step in self.gossip_steps:
            last = step.mixer.last_consensus
            if again or last is None or last.step != step.mixer.step:
                step.mixer.measure_consensus()
        return consensus_metrics(self.gossip_steps)

    _log_kwargs: dict | None = None

    def log(self, values: dict, step: int | None = None, log_kwargs: dict | None = None) -> None:
        """Log `values` together with the consensus metrics, to the trackers and every other sink of the logger."""
        if self.is_main_process:
            self._log_kwargs = log_kwargs
            self.consensus_logger.log(
                values, self.gossip_steps[0].mixer.step if step is None and self.gossip_steps else step
            )

    def _log_to_trackers(self, values: dict[str, Any], step: int | None) -> None:
        super().log(values, step=step, log_kwargs=self._log_kwargs)

    # ---- stopping on a signal

    def stop_on_signals(self, signals: Iterable[int] = STOP_SIGNALS) -> AbstractContextManager[None]:
        """Inside, a signal to any one worker makes `should_stop` True on all of them, after the same step. Collective.

            with accelerator.stop_on_signals():
                for batch in loader:
                    ...
                    optimizer.step()
                    if accelerator.should_stop():
                        accelerator.save_state(folder)
                        raise SystemExit(EXIT_STOPPED)

        Without it, a signal takes its usual effect. Details in `StopOnSignals.listening`.
        """
        return self._stopping.listening(signals)

    def should_stop(self) -> bool:
        """Whether a signal stops the run at this step; call it after every optimizer step, on all workers."""
        return self._stopping.should_stop()

    @property
    def stop_reason(self) -> str | None:
        """Which signal to which worker stops the run, as in "SIGTERM to worker 1"; None if none does."""
        return self._stopping.reason

    # ---- ending

    def free_memory(self, *objects: Any) -> Any:
        """As `Accelerator.free_memory`; also lets go of the flat buffers."""
        self._end_gossip()  # what is in flight is waited for: its other side would wait for ever
        for optimizer in self._optimizers:
            optimizer.gossip = None  # prepared again, it gossips again
        for model in self._models:
            vars(model).pop("_is_accelerate_prepared", None)  # or no accelerator would wrap it in DDP again
        self._seeded = False
        self._places = {}
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Finish what is in flight or being saved, close the trackers, end the process group unless it was there."""
        self.finish_saving()
        for step in self.gossip_steps:
            step.mixer.drain()
        if self.group.size > 1:
            self.group.close()
        if self._group_is_the_users:
            for tracker in self.trackers:
                tracker.finish()
        else:
            super().end_training()


def _checked_config(gossip: GossipConfig | None) -> GossipConfig:
    config = GossipConfig() if gossip is None else gossip
    if not isinstance(config, GossipConfig):
        raise TypeError(f"gossip must be a GossipConfig; got {type(gossip).__name__}. Write gossip=GossipConfig(...).")
    return config

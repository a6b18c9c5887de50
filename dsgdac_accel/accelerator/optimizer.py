"""The prepared optimizer: one mix around every local step."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from dsgdac_accel.core.step import GossipStep
from dsgdac_accel.data.dataloader_state import epoch_of


class GossipOptimizer(AcceleratedOptimizer):
    """The prepared optimizer: one mix around every local step. Used through `optimizer.step()` as ever."""

    gossip: GossipStep | None = None

    def step(self, closure: Any = None) -> None:
        """Take one optimizer step: local update and one mix (nothing inside an accumulation window)."""
        if closure is not None:
            raise ValueError(
                "optimizer.step(closure) evaluates the loss at several points, which one mix per step cannot serve. "
                "Call accelerator.backward(loss) and then optimizer.step() without a closure."
            )
        if self.gossip is None or not self.gradient_state.sync_gradients:
            super().step()
            return
        local_step = self.gossip.before_local_step(self._epoch(), self.scaler)
        if local_step or self.scaler is not None:  # after an overflow the scaler skips the update itself, and backs off
            super().step()
        self.gossip.after_local_step()

    def _epoch(self) -> int | None:
        epoch = epoch_of(self.gradient_state.active_dataloader)
        if epoch is None and self.gossip is not None and self.gossip.config.start_epoch is not None:
            raise ValueError(
                "start_epoch counts the passes over a prepared loader, and none is being read at this step. "
                "Pass the loader through `prepare`, or give start_step instead."
            )
        return epoch

    def __getstate__(self) -> dict[str, Any]:
        """Without the gossip step, whose process groups stay in this process."""
        return {key: value for key, value in super().__getstate__().items() if key != "gossip"}

    @property
    def step_was_skipped(self) -> bool:
        """Always False: every step mixes and counts, so schedulers tick with it and rates stay equal on all workers."""
        return False

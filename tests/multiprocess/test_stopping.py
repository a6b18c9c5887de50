"""A signal to any one worker stops all of them after the same step; what else signals do stays as it was."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from algorithms import SynchronousAccelerator
from torch import nn
from torch.utils.data import DataLoader

from dsgdac_accel import EXIT_STOPPED, GossipAccelerator, GossipConfig, StoppedBySignal
from dsgdac_accel.checkpoint import is_complete, load_worker
from dsgdac_accel.stopping import StopAgreement
from tests.multiprocess.small_model import flat, inputs, make_model
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.multiprocess

STEPS = 400


def make(synchronous: bool = False, timeout: float = 20.0) -> tuple[Any, nn.Module, Any]:
    if synchronous:
        accelerator: Any = SynchronousAccelerator(timeout=timeout, cpu=True)
    else:
        accelerator = GossipAccelerator(gossip=GossipConfig(timeout=timeout, log_every=0))
    model = make_model()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))


def send_later(number: int, seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


def train(rank: int, senders: dict[int, tuple], synchronous: bool, folder: Any, pace: float = 0.005) -> tuple:
    """Steps done, how often this worker asked, why it stopped, and its weights; `senders` get (signal, seconds)."""
    accelerator, model, optimizer = make(synchronous)
    stopped, reason = None, None
    with accelerator.stop_on_signals():
        if rank in senders:
            send_later(*senders[rank])
        for step in range(1, STEPS + 1):
            accelerator.backward(model(inputs(rank, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.group.steps_taken = step
            time.sleep(pace * (1 + rank))  # those who wait for a slower one are the ones that are ahead
            if accelerator.should_stop():
                stopped, reason = step, accelerator.stop_reason
                accelerator.save_state(folder)
                break
    return stopped, reason, flat(model)


@pytest.mark.parametrize(
    ("senders", "synchronous"),
    [
        ({0: (signal.SIGTERM, 0.02)}, False),
        ({1: (signal.SIGUSR1, 0.31)}, False),
        ({2: (signal.SIGTERM, 0.13)}, False),
        ({0: (signal.SIGUSR1, 0.1), 2: (signal.SIGTERM, 0.1)}, False),
        ({1: (signal.SIGTERM, 0.17)}, True),
    ],
    ids=["worker 0", "worker 1", "worker 2", "two at once", "baseline"],
)
def test_all_workers_stop_after_the_same_step(senders, synchronous, tmp_path):
    results = run_workers(train, 3, senders, synchronous, tmp_path / "checkpoint")
    assert len({(step, reason) for step, reason, _ in results}) == 1
    step, reason, _ = results[0]
    assert step is not None
    assert 0 < step < STEPS
    assert reason in {f"{signal.Signals(number).name} to worker {rank}" for rank, (number, _) in senders.items()}
    assert is_complete(tmp_path / "checkpoint")
    for rank, (_, _, weights) in enumerate(results):
        saved = load_worker(tmp_path / "checkpoint", rank)
        assert saved["steps_taken"] == step
        kept = torch.cat([value.flatten() for value in saved["models"][0]["parameters"].values()])
        assert torch.equal(kept, weights)

"""A signal to any one worker stops all of them after the same step. Otherwise signals do what they always did."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from dsgdac_accel import EXIT_STOPPED, GossipAccelerator, GossipCallback, GossipConfig, StoppedBySignal
from dsgdac_accel.checkpoint import is_complete, load_worker
from dsgdac_accel.distributed.signals import SignalReceiver
from dsgdac_accel.distributed.stopping import StopAgreement
from tasks.common.algorithms import SynchronousAccelerator
from tests.multiprocess import trainer_model
from tests.multiprocess.small_model import FAST, flat, inputs, make_model
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
    """The step where it stopped, why, and its weights. `senders` maps a worker to the (signal, seconds) it gets."""
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
            time.sleep(pace * (1 + rank))  # fast workers are ahead, and wait for slow ones
            if accelerator.should_stop():
                stopped, reason = step, accelerator.stop_reason
                accelerator.save_state(folder)
                break
    return stopped, reason, flat(model)


@pytest.mark.parametrize(
    ("senders", "synchronous"),
    [
        pytest.param({0: (signal.SIGTERM, 0.02)}, False, marks=pytest.mark.slow),
        ({1: (signal.SIGUSR1, 0.31)}, False),
        pytest.param({2: (signal.SIGTERM, 0.13)}, False, marks=pytest.mark.slow),
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


# ---- signals at special moments


def train_and_evaluate(rank: int, sender: int) -> tuple:
    """Worker `sender` gets the signal during an evaluation between the third step and the fourth."""
    accelerator, model, optimizer = make()
    with accelerator.stop_on_signals():
        for step in range(1, 20):
            accelerator.backward(model(inputs(rank, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.should_stop():
                return step, accelerator.stop_reason
            if step == 3:
                with accelerator.deployed_model(model):
                    if rank == sender:
                        os.kill(os.getpid(), signal.SIGUSR1)
                    time.sleep(1.0)
    return None, None


def test_a_signal_during_an_evaluation_stops_at_the_next_step():
    assert run_workers(train_and_evaluate, 2, 1) == [(4, "SIGUSR1 to worker 1")] * 2


def train_with_a_lost_worker(rank: int, moment: str) -> None:
    """Worker 2 is killed at `moment`, and all others get SIGTERM, as from a launcher."""
    accelerator, model, optimizer = make(timeout=30.0)

    def die(*_: Any) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    if moment == "before it answers":
        publish = StopAgreement._publish
        StopAgreement._publish = lambda self: die() or publish(self)  # type: ignore[method-assign, func-returns-value]
    elif moment == "after it answered":
        decide = StopAgreement._decide
        StopAgreement._decide = lambda self: die() or decide(self)  # type: ignore[method-assign, func-returns-value]
    with accelerator.stop_on_signals():
        for step in range(1, 2000):
            if rank < 2 and step == 6:  # worker 2 may have been killed after step 5
                send_later(signal.SIGTERM, 0.2)
            accelerator.backward(model(inputs(rank, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if moment == "before the signal" and step == 5:
                die()
            time.sleep(0.002)
            if accelerator.should_stop():
                accelerator.group.barrier("stopping")
                break


@pytest.mark.parametrize("moment", ["before the signal", "before it answers", "after it answered"])
def test_a_worker_that_is_lost_while_all_agree_to_stop_is_named(moment):
    outcomes = try_workers(train_with_a_lost_worker, 3, moment)
    for outcome in outcomes[:2]:
        assert outcome.exit_code == 1, outcome.error
        assert outcome.seconds < 20
        assert "WorkerLostError" in outcome.error
    told = " ".join(outcome.error for outcome in outcomes[:2])
    assert "worker 2 was lost" in told
    assert ("agreeing on where to stop" in told) == (moment == "before it answers")


def leave_early(rank: int, left: Path) -> tuple:
    """Worker 0 leaves before it sees the signal that worker 1 gets before its last step."""
    accelerator, _, optimizer = make()
    answers = []
    with accelerator.stop_on_signals():
        for step in range(1, 4):
            optimizer.step()
            begun = time.monotonic()
            if rank == 1 and step == 3:
                while not left.exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGTERM)
                while accelerator.stop_reason is None:  # until its own thread has seen it
                    time.sleep(0.01)
            answers.append(accelerator.should_stop())
    left.touch()
    return answers, time.monotonic() - begun


def test_a_signal_after_the_last_step_of_another_lets_the_run_end(tmp_path):
    for answers, seconds in run_workers(leave_early, 2, tmp_path / "left"):
        assert answers == [False] * 3
        assert seconds < 15  # it waits for no answer: that would take 20


# ---- what does not change


def ends_by(number: int, process: int) -> bool:
    _, status = os.waitpid(process, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == number


def in_child(work: Any) -> int:
    """A forked process that does `work` and then sleeps until it is ended."""
    process = os.fork()
    if process == 0:
        work()
        time.sleep(30)
        os._exit(0)
    return process


def send(number: int, times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)


def alone(rank: int) -> None:
    accelerator, _, _ = make()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    assert not accelerator.should_stop()
    with accelerator.stop_on_signals():
        assert not accelerator.should_stop()
        child = in_child(lambda: None)
        time.sleep(0.05)
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.05)
        os.kill(child, signal.SIGTERM)
        assert ends_by(signal.SIGTERM, child)
        batches = iter(DataLoader([1.0, 2.0, 3.0], num_workers=1, prefetch_factor=1))
        assert next(batches) == 1
        loader_process = batches._workers[0]
        time.sleep(0.1)
        in_child(lambda: (os.kill(loader_process.pid, signal.SIGTERM), os._exit(0)))  # as a launcher does
        os.kill(loader_process.pid, signal.SIGUSR1)
        os.wait()
        time.sleep(0.1)
        assert [float(batch) for batch in batches] == [2.0, 3.0]
        batches = iter(DataLoader([1.0] * 9, num_workers=1, prefetch_factor=1))
        assert next(batches) == 1
        batches._workers[0].terminate()  # by its parent
        batches._workers[0].join(5)
        assert batches._workers[0].exitcode == 0
        assert not accelerator.should_stop()
        send(signal.SIGUSR1, 2)
        assert accelerator.should_stop()
        assert accelerator.should_stop()
        assert accelerator.stop_reason == "SIGUSR1"
        with pytest.raises(RuntimeError, match="entered already"), accelerator.stop_on_signals():
            pass
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert not accelerator.should_stop()

    def insist() -> None:
        with accelerator.stop_on_signals():
            send(signal.SIGTERM, 3)

    def end() -> None:
        with accelerator.stop_on_signals():
            send(signal.SIGTERM)
            if accelerator.should_stop():
                raise StoppedBySignal("done")

    assert ends_by(signal.SIGTERM, in_child(insist))
    process = in_child(lambda: _exit_as_scripts_do(end))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == EXIT_STOPPED == 75


def _exit_as_scripts_do(work: Any) -> None:
    try:
        work()
    except SystemExit as end:
        send(signal.SIGTERM)  # as launchers do when the first worker has ended
        os._exit(end.code)


def test_signals_to_a_single_process_and_to_its_children():
    run_workers(alone, 1)


def in_another_thread(work: Any) -> Any:
    """The result of `work` in a thread, where Ray trains."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def train_in_a_thread(rank: int, sender: int) -> tuple:
    """The step where a request of worker `sender` after step 3 stopped training, and why."""
    accelerator, model, optimizer = make()
    with pytest.raises(ValueError, match="Use `stop_on_request`"), accelerator.stop_on_signals():
        pass
    with pytest.raises(RuntimeError, match="inside `stop_on_request`"):
        accelerator.request_stop()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with accelerator.stop_on_request():
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
        with pytest.raises(ValueError, match="got ''"):
            accelerator.request_stop("")
        for step in range(1, STEPS + 1):
            accelerator.backward(model(inputs(rank, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if rank == sender and step == 3:
                accelerator.request_stop("preemption")
                accelerator.request_stop("again")
            time.sleep(0.01)
            if accelerator.should_stop():
                return step, accelerator.stop_reason
    return None, None


@pytest.mark.parametrize(("workers", "reason"), [(2, "preemption of worker 1"), (1, "preemption")])
def test_a_request_stops_all_workers_where_signals_cannot(workers, reason):
    results = run_workers(work_in_a_thread, workers, workers - 1)
    assert len(set(results)) == 1
    step, said = results[0]
    assert 3 <= step < STEPS
    assert said == reason


def work_in_a_thread(rank: int, sender: int) -> tuple:
    return in_another_thread(lambda: train_in_a_thread(rank, sender))


@pytest.mark.parametrize(
    ("signals", "error", "message"),
    [
        ((), ValueError, "at least one signal"),
        ((signal.SIGKILL,), ValueError, "that a process can catch"),
        ((1000,), ValueError, r"got \(1000,\)"),
        ("SIGTERM", TypeError, "sequence such as"),
        (signal.SIGTERM, TypeError, "sequence such as"),
    ],
)
def test_signals_that_cannot_be_caught_are_refused(signals, error, message):
    with pytest.raises(error, match=message):
        SignalReceiver(signals)


# ---- Trainer


class Slow(TrainerCallback):
    """Records this worker's weights after every step, and slows the run down. A sender calls `stop` after step 4."""

    def __init__(self, sender: bool, stop: Any) -> None:
        self.seen: dict[int, torch.Tensor] = {}
        self.sender = sender
        self.stop = stop

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.seen[state.global_step + 1] = flat(kwargs["model"])
        if self.sender and state.global_step == 4:
            self.stop()
        time.sleep(0.05)


def fit(rank: int, folder: Any, rows: int, settings: dict[str, Any], sender: int | None, way: str) -> dict[str, Any]:
    if way == "request":
        return in_another_thread(lambda: fit_here(rank, folder, rows, settings, sender, way))
    return fit_here(rank, folder, rows, settings, sender, way)


def fit_here(
    rank: int, folder: Any, rows: int, settings: dict[str, Any], sender: int | None, way: str
) -> dict[str, Any]:
    model = trainer_model.Model(dropout=0.3, batch_norm=True)
    gossip = GossipCallback(GossipConfig(power=2.0, **FAST), **{f"stop_on_{way}": True})
    watched = Slow(rank == sender, gossip.request_stop if way == "request" else lambda: send(signal.SIGTERM))
    trainer = Trainer(
        model,
        trainer_model.arguments(
            str(folder), **{"max_steps": 22, "logging_strategy": "steps", "logging_steps": 1, **settings}
        ),
        train_dataset=trainer_model.Rows(rows),
        eval_dataset=trainer_model.Rows(16, 1),
        callbacks=[watched, gossip],
    )
    stop = None
    try:
        trainer.train(resume_from_checkpoint="auto")
    except StoppedBySignal as error:
        stop = (trainer.state.global_step, error.code, str(error))
    evaluations = [
        {key: value for key, value in record.items() if key in ("step", "eval_loss", "gossip/radius")}
        for record in trainer.state.log_history
        if "eval_loss" in record
    ]
    return {"seen": watched.seen, "stop": stop, "evaluations": evaluations, "model": flat(model)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "settings", "way"),
    [
        (44, {"eval_strategy": "epoch"}, "signals"),  # 8 steps per epoch; saved only at the stop
        (44, {"eval_strategy": "epoch"}, "request"),
        (  # 1 step per epoch
            6,
            {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "loss"},
            "signals",
        ),
    ],
    ids=["mid-epoch", "by a request in a thread", "at the end of an epoch"],
)
def test_a_trainer_that_was_stopped_resumes_as_if_it_had_not_been(rows, settings, way, tmp_path):
    whole = run_workers(fit, 2, tmp_path / "whole", rows, settings, None, way)
    stopped = run_workers(fit, 2, tmp_path / "stopped", rows, settings, 1, way)
    resumed = run_workers(fit, 2, tmp_path / "stopped", rows, settings, None, way)
    step, code, message = stopped[0]["stop"]
    assert [worker["stop"] for worker in stopped] == [(step, code, message)] * 2
    assert 5 <= step < 22
    assert code == EXIT_STOPPED
    reason = {"signals": "SIGTERM to worker 1", "request": "a request of worker 1"}[way]
    assert f"stopped by {reason} at step {step} of 22" in message
    for unbroken, rest in zip(whole, resumed, strict=True):
        assert rest["stop"] is None
        assert list(rest["seen"]) == list(range(step + 1, 23))
        assert all(torch.equal(weights, unbroken["seen"][number]) for number, weights in rest["seen"].items())
        assert rest["evaluations"] == unbroken["evaluations"]
        assert torch.equal(rest["model"], unbroken["model"])


def test_stopping_needs_checkpoints_that_can_be_resumed(tmp_path):
    with pytest.raises(ValueError, match="Set save_only_model=False"):
        Trainer(
            trainer_model.Model(),
            trainer_model.arguments(str(tmp_path), save_only_model=True),
            callbacks=[GossipCallback(stop_on_signals=True)],
        )
    with pytest.raises(TypeError, match="stop_on_signals must be True or False; got 15"):
        GossipCallback(stop_on_signals=15)  # type: ignore[arg-type]

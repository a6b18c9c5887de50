"""Every way to set up GossipCallback works, or is refused with the way out."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import HPSearchBackend

from dsgdac_accel import GossipCallback, GossipConfig, build_topology
from tests.multiprocess.small_model import Trailing
from tests.multiprocess.trainer_model import Model, Rows, arguments, flat
from tests.workers import run_workers

pytestmark = pytest.mark.multiprocess

GOSSIP = GossipConfig(timeout=30)


def build(folder: Path, *, model=None, callbacks=(), **settings) -> Trainer:
    model = {"model": Model(dropout=0.1)} if model is None else model
    return Trainer(
        args=arguments(str(folder), max_steps=4, **settings),
        train_dataset=Rows(40),
        eval_dataset=Rows(16, 1),
        callbacks=list(callbacks),
        **model,
    )


# ---- what works


def set_up_in_many_ways(rank: int, folder: Path) -> dict[str, tuple]:
    def attached() -> Trainer:
        trainer = build(folder)
        GossipCallback(GOSSIP).attach(trainer)
        return trainer

    def used_after_an_error() -> Trainer:
        class Mistake(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                raise ZeroDivisionError

        callback = GossipCallback(GOSSIP)
        with contextlib.suppress(ZeroDivisionError):
            build(folder, callbacks=[callback, Mistake()]).train()
        return build(folder, callbacks=[callback])

    def attached_after_evaluation() -> Trainer:
        trainer = build(folder)
        trainer.evaluate()
        GossipCallback(GOSSIP).attach(trainer)
        return trainer

    def evaluated_before() -> Trainer:
        trainer = build(folder, callbacks=[GossipCallback(GOSSIP)])
        trainer.evaluate()
        trainer.predict(Rows(8))
        return trainer

    def used_before() -> Trainer:
        callback = GossipCallback(GOSSIP)
        build(folder, callbacks=[callback]).train()
        return build(folder, callbacks=[callback])

    ways = {
        "constructor": lambda: build(folder, callbacks=[GossipCallback(GOSSIP)]),
        "class": lambda: build(folder, callbacks=[GossipCallback]),
        "model_init": lambda: build(folder, model={"model_init": lambda: Model(dropout=0.1)},
                                    callbacks=[GossipCallback(GOSSIP)]),
        "attached": attached,
        "attached after evaluation": attached_after_evaluation,
        "evaluated before": evaluated_before,
        "used before": used_before,
        "used after an error": used_after_an_error,
        "compiled": lambda: build(folder, callbacks=[GossipCallback(GOSSIP)], torch_compile=True,
                                  torch_compile_backend="aot_eager"),
    }  # fmt: skip
    found = {}
    for name, make in ways.items():
        trainer = make()
        before = flat(trainer.model)
        trainer.train()
        wrapped = any(isinstance(module, DistributedDataParallel) for module in trainer.model_wrapped.modules())
        found[name] = (flat(trainer.model), before, wrapped, trainer.evaluate()["eval_loss"])
    return found


def test_every_way_to_set_it_up_trains(tmp_path):
    first, second = run_workers(set_up_in_many_ways, 2, tmp_path, timeout=150.0)
    reference = first["constructor"][0]
    for name, (deployed, before, wrapped, loss) in first.items():
        assert not wrapped, name
        assert torch.equal(deployed, second[name][0]), f"{name}: the workers must end equal"
        assert not torch.equal(deployed, before), name
        assert loss == second[name][3]
        if not name.startswith("used"):
            torch.testing.assert_close(deployed, reference, rtol=0, atol=1e-9, msg=f"{name} trains otherwise")


def search(rank: int, folder: Path) -> list[bool]:
    """Train as a hyperparameter search does, which creates an Accelerator per trial."""
    trainer = build(folder, model={"model_init": lambda: Model()}, callbacks=[GossipCallback(GOSSIP)])
    trainer.train()
    before = len(os.listdir("/proc/self/fd"))
    wrapped = []
    for _ in range(2):
        trainer.create_accelerator_and_postprocess()
        trainer.train()
        wrapped.append(isinstance(trainer.model_wrapped, DistributedDataParallel))
        wrapped.append(len(os.listdir("/proc/self/fd")) > before)
    return wrapped


def test_the_new_accelerator_of_every_trial_gossips(tmp_path):
    assert run_workers(search, 2, tmp_path) == [[False] * 4] * 2, "no DDP, and no sockets per trial"


class Pruned(Exception):
    """What optuna raises where a trial is pruned."""


class SearchTrial(SimpleNamespace):
    """A trial as optuna gives it to worker 0, the only one that has a study; pruned at its second report."""

    def report(self, objective, step):
        self.reported.append((step, objective))

    def should_prune(self):
        return self.prunes and len(self.reported) == 2


def prune(rank: int, folder: Path) -> dict[str, Any]:
    """Search as transformers does with optuna, which is stood in for; the first of two trials is pruned."""
    sys.modules["optuna"] = SimpleNamespace(  # type: ignore[assignment]
        TrialPruned=Pruned, trial=SimpleNamespace(BaseTrial=SearchTrial), __spec__="a stand-in"
    )
    gossip = GossipCallback(GossipConfig())
    trainer = build(
        folder, model={"model_init": lambda: Model()}, callbacks=[gossip], eval_strategy="steps", eval_steps=1
    )
    with pytest.raises(ValueError, match="by the clock of worker 0 alone; got timeout=60"):
        trainer.hyperparameter_search(n_trials=2, timeout=60)
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = lambda trial: {"learning_rate": 0.05}
    trainer.hp_name, trainer.compute_objective = None, lambda metrics: metrics["eval_loss"]
    study = SimpleNamespace(_is_multi_objective=lambda: False)
    steps, weights = [], []
    for number in range(2):
        trial = SearchTrial(
            number=number, params={}, prunes=number == 0, reported=[], **({"study": study} if rank == 0 else {})
        )
        with pytest.raises(Pruned) if rank == 0 and number == 0 else contextlib.nullcontext():
            trainer.train(trial=trial)
        steps.append(trainer.state.global_step)
        weights.append(flat(trainer.model))
    return {"steps": steps, "weights": weights, "objective": trainer.objective}


def test_a_search_that_prunes_on_worker_0_ends_the_trial_on_all(tmp_path):
    first, second = run_workers(prune, 2, tmp_path)
    assert first["steps"] == second["steps"] == [2, 4]
    assert all(torch.equal(*weights) for weights in zip(first["weights"], second["weights"], strict=True))
    assert first["objective"] == second["objective"]


# ---- what is refused


class OwnWrapping(Trainer):
    def _wrap_model(self, model, *args, **kwargs):
        return DistributedDataParallel(model)


def refuse_all(rank: int, folder: Path) -> dict[str, str]:
    def added_later() -> None:
        trainer = build(folder)
        trainer.add_callback(GossipCallback(GOSSIP))
        trainer.train()

    def attached_too_late() -> None:
        trainer = build(folder)
        trainer.train()
        GossipCallback(GOSSIP).attach(trainer)

    def wrapped_by_a_subclass() -> None:
        OwnWrapping(Model(), arguments(str(folder)), train_dataset=Rows(40), callbacks=[GossipCallback(GOSSIP)]).train()

    def several_gpus() -> None:
        class Several(type(arguments(str(folder)))):
            n_gpu = 2

        settings = arguments(str(folder))
        settings.__class__ = Several
        Trainer(Model(), settings, train_dataset=Rows(40), callbacks=[GossipCallback(GOSSIP)])

    def given(kind, **settings) -> None:
        model = Model()
        optimizers = {"model": model, "optimizers": (kind(model.parameters(), **settings), None)}
        build(folder, model=optimizers, callbacks=[GossipCallback(GOSSIP)]).train()

    def launched_but_alone() -> None:
        os.environ["WORLD_SIZE"] = "4"
        try:
            build(folder, callbacks=[GossipCallback(GOSSIP)])
        finally:
            os.environ["WORLD_SIZE"] = "2"

    def batch_norm_of_all() -> None:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(Model(batch_norm=True))
        build(folder, model={"model": model}, callbacks=[GossipCallback(GOSSIP)]).train()

    def shared() -> None:
        callback = GossipCallback(GOSSIP)
        first = build(folder, callbacks=[callback])
        build(folder, callbacks=[callback])
        first.train()

    def removed() -> None:
        trainer = build(folder, callbacks=[GossipCallback(GOSSIP)])
        trainer.remove_callback(GossipCallback)
        trainer.train()

    def impatient_metric() -> None:
        trainer = build(folder, callbacks=[GossipCallback(GOSSIP)])

        def compute_metrics(prediction):
            raise RuntimeError("NCCL error: the connection to the glossary server timed out")

        trainer.compute_metrics = compute_metrics
        trainer.evaluate()

    three = build_topology("ring", 3)
    ways = {
        "shared": shared,
        "removed": removed,
        "error of the user": impatient_metric,
        "calibrate": lambda: GossipCallback(GOSSIP, calibrate=5),
        "read once": lambda: GossipCallback(GOSSIP, calibrate=iter([1])),
        "forward": lambda: GossipCallback(GOSSIP, calibration_forward=3),
        "fsdp": lambda: build(folder, callbacks=[GossipCallback(GOSSIP)], fsdp="full_shard"),
        "added later": added_later,
        "attached too late": attached_too_late,
        "two": lambda: build(folder, callbacks=[GossipCallback(GOSSIP), GossipCallback(GOSSIP)]),
        "DDP": lambda: build(folder, model={"model": DistributedDataParallel(Model())},
                             callbacks=[GossipCallback(GOSSIP)]).train(),
        "subclass": wrapped_by_a_subclass,
        "several GPUs": several_gpus,
        "complex": lambda: build(folder, model={"model": Model().to(torch.complex64)},
                                 callbacks=[GossipCallback(GOSSIP)]),
        "closure": lambda: given(torch.optim.LBFGS),
        "copy": lambda: given(Trailing, lr=0.1),
        "WORLD_SIZE": launched_but_alone,
        "lomo": lambda: build(folder, callbacks=[GossipCallback(GOSSIP)], optim="lomo"),
        "layerwise": lambda: build(folder, callbacks=[GossipCallback(GOSSIP)], optim="galore_adamw_layerwise"),
        "schedule free": lambda: build(folder, callbacks=[GossipCallback(GOSSIP)], optim="schedule_free_adamw"),
        "projected": lambda: build(folder, callbacks=[GossipCallback(GOSSIP)], optim="galore_adamw",
                                   save_strategy="steps"),
        "SyncBatchNorm": batch_norm_of_all,
        "no config": lambda: GossipCallback({"power": 3}),
        "topology": lambda: build(folder, callbacks=[GossipCallback(GossipConfig(topology=three))]).train(),
    }  # fmt: skip
    said = {}
    for name, attempt in ways.items():
        try:
            attempt()
            said[name] = "accepted"
        except (ValueError, TypeError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


REFUSED = {
    "shared": "make one for each Trainer",
    "removed": "was removed from this Trainer",
    "error of the user": "RuntimeError: NCCL error: the connection to the glossary server timed out",
    "calibrate": "TypeError: calibrate must be True, False or batches",
    "read once": "more than once",
    "forward": "TypeError: calibration_forward must be a function",
    "fsdp": "fsdp= has no effect on CPUs; leave it out. On CPUs, shard the model by fully_shard",
    "topology": "is for 3 workers, but 2 were launched",
    "added later": "callbacks=[GossipCallback(...)]), or call GossipCallback(...).attach(trainer)",
    "attached too late": "attach GossipCallback before the first train()",
    "two": "two GossipCallbacks",
    "DDP": "pass the bare m",
    "subclass": "wrapped its model in DistributedDataParallel",
    "several GPUs": "torchrun --nproc_per_node 2",
    "complex": "from_pretrained(..., dtype=torch.float32)",
    "copy": "Trailing, in 'mean': this optimizer keeps another copy of the weights",
    "closure": "LBFGS: this optimizer evaluates the loss at several points",
    "WORLD_SIZE": "use_cpu=True",
    "lomo": "adamw_torch",
    "layerwise": "adamw_torch",
    "schedule free": "adamw_torch",
    "projected": "save_only_model=True",
    "SyncBatchNorm": "Keep plain BatchNorm",
    "no config": "GossipCallback(GossipConfig(...))",
}


def test_what_cannot_gossip_is_refused_with_the_way_out(tmp_path):
    for said in run_workers(refuse_all, 2, tmp_path):
        for name, words in REFUSED.items():
            if name == "fsdp" and "no available devices found" in said[name]:
                continue  # older versions of Transformers refuse it without a GPU by themselves
            assert words.lower() in said[name].lower(), f"{name}: {said[name]}"

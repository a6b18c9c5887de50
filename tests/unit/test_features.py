"""What combines with what: `FEATURES` decides for every pair, and the page shows the same table."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsgdac_accel import GossipConfig, Topology
from dsgdac_accel.features import FEATURES, Setup, refuse_combinations, refuse_optimizer

CYCLE = Topology.from_matrices([torch.eye(3).roll(1, 0) / 2 + torch.eye(3) / 2], "cycle")
ON: dict[str, dict[str, Any]] = {
    "sharded workers": {"sharded": True},
    "several workers in a process": {"config.workers_per_process": 2},
    "several processes": {"processes": 2},
    "devices other than CPU and CUDA": {"device": torch.device("xpu:0")},
    "directed rounds": {"topology": CYCLE},
    "comm_dtype other than full": {"config.comm_dtype": "int8"},
    "mixed_precision='fp16'": {"accelerator.mixed_precision": "fp16"},
    "cpu_offload of FSDP2": {"accelerator.state.fsdp_plugin.cpu_offload.pin_memory": False},
    "calibrate= of a model with BatchNorm": {"calibrates": True},
    "a communication hook of DistributedDataParallelKwargs": {
        "accelerator.ddp_handler.comm_hook": SimpleNamespace(value="fp16")
    },
    "examine": {"call": "examine"},
    "hyperparameter_search": {"call": "hyperparameter_search"},
    "trainers of TRL other than SFTTrainer": {"trainer": "DPOTrainer"},
    "save_only_model=True": {"trainer.args.save_only_model": True},
    "stop_on_signals and stop_on_request": {"callback.stop_on_request": True},
    "auto_find_batch_size=True": {"trainer.args.auto_find_batch_size": True},
    "save_on_each_node=True": {"trainer.args.save_on_each_node": True},
    "even_batches=False": {"trainer.args.accelerator_config.even_batches": False},
    "train_sampling_strategy='batch_rebalance'": {"trainer.args.train_sampling_strategy": "batch_rebalance"},
    "models sharded when loaded (DistributedConfig)": {"trainer.is_distributed_loading_by_transformers": True},
    "load_best_model_at_end=True of models saved under other names (mixtures of experts)": {"renamed": True},
    "8-bit layers of bitsandbytes": {"trainer.model.is_loaded_in_8bit": True},
    "prompt learning of PEFT": {"trainer.model.peft_config": {"default": SimpleNamespace(is_prompt_learning=True)}},
    "activation_checkpointing of adapters of PEFT": {
        "trainer.model.peft_config": {},
        "accelerator.state.fsdp_plugin.activation_checkpointing": True,
    },
    "load_best_model_at_end=True with add_adapter": {
        "trainer.model.peft_config": {},
        "trainer.args.load_best_model_at_end": True,
    },
}


class Thing:
    def named_modules(self) -> list:
        return []


def setup_of(*names: str) -> Setup:
    """Return a setup with the features of these names, and no other."""
    facts = {path: value for name in names for path, value in ON[name].items()}
    found: Any = Thing()
    found.config = Thing()
    for path, value in sorted(facts.items()):
        *places, last = path.split(".")
        at = found
        for place in places:
            if not hasattr(at, place):
                setattr(at, place, Thing())
            at = getattr(at, place)
        setattr(at, last, type(value, (Thing,), {"__module__": "trl.trainer"})() if path == "trainer" else value)
    return Setup(**{**vars(found), "config": GossipConfig(**vars(found.config))})


@pytest.mark.parametrize("name", ON)
def test_each_example_has_its_feature_alone(name):
    assert [feature.name for feature in FEATURES if feature.is_on(setup_of(name))] == [name]


def test_exactly_the_pairs_of_the_table_are_refused():
    excluded = {frozenset((feature.name, other)) for feature in FEATURES for other in feature.excludes}
    assert {feature.name for feature in FEATURES} == ON.keys() == {*ON} | {name for pair in excluded for name in pair}
    for pair in combinations(ON, 2):
        refused = ""
        try:
            refuse_combinations(setup_of(*pair))
        except ValueError as error:
            refused = str(error)
        assert bool(refused) == (frozenset(pair) in excluded), f"{pair}: {refused}"
        row = next((feature for feature in FEATURES if {feature.name, *feature.excludes} >= set(pair)), None)
        assert not refused or refused.endswith(row.way_out), pair


def test_a_refusal_shows_the_settings():
    with pytest.raises(ValueError, match=r"workers_per_process=2.*device_mesh or parallelism_config"):
        refuse_combinations(setup_of("several workers in a process", "sharded workers"))
    with pytest.raises(ValueError, match=r"DPOTrainer.*workers_per_process=2.*SFTTrainer"):
        refuse_combinations(setup_of("several workers in a process", "trainers of TRL other than SFTTrainer"))


def test_the_page_shows_the_table():
    page = (Path(__file__).resolve().parents[2] / "docs" / "accelerate.md").read_text(encoding="utf-8")
    rows = (
        page.partition("| this | does not work with | way out |\n|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    )
    assert rows == [f"| {f.name} | {', '.join(f.excludes)} | {f.way_out} |" for f in FEATURES if f.excludes]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("AdamWScheduleFree SGDScheduleFree schedule_free_radam Lookahead Ranger21 ASGD SWA MADGRAD", "another copy"),
        ("ZeroRedundancyOptimizer PostLocalSGDOptimizer DistributedShampoo DistributedFusedAdam OSS", "exchanges"),
        ("LBFGS SAM ASAM WSAM", "several points"),
        ("Prodigy DAdaptAdam DAdaptSGD DoG LDoG", "learning rate itself"),
        ("lomo AdaLomo galore_adamw_layerwise", "backward pass"),
        ("AdamW Adafactor Muon SWATS SparseAdam Rprop Lamb Lion Shampoo apollo_adamw rmsprop_bnb_8bit", None),
    ],
)
def test_optimizers_are_refused_by_name(names, words):
    for name in names.split():
        with pytest.raises(ValueError, match=f"{name}: .*{words}") if words else nullcontext():
            refuse_optimizer([name], name)


def test_the_classes_of_trl_and_peft_are_told_apart():
    def on(name: str, setup: Setup) -> Any:
        return next(feature for feature in FEATURES if feature.name == name).is_on(setup)

    sft = type("Own", (type("SFTTrainer", (), {"__module__": "trl.trainer.sft_trainer"}),), {})
    assert not on("trainers of TRL other than SFTTrainer", Setup(trainer=sft()))
    model = type("PeftModelForCausalLM", (type("PeftModel", (), {"__module__": "peft.peft_model"}),), {})()
    model.peft_config = {}
    args = SimpleNamespace(load_best_model_at_end=True)
    for held in (model, SimpleNamespace(_orig_mod=model, peft_config={})):
        assert not on(
            "load_best_model_at_end=True with add_adapter", Setup(trainer=SimpleNamespace(args=args, model=held))
        )

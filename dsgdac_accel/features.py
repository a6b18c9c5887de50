"""A table of features that exclude each other, with the way out. A new mode adds a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dsgdac_accel.config import GossipConfig
from dsgdac_accel.devices import BACKENDS
from dsgdac_accel.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The facts about a run that are known where it is checked. A fact that is left out refuses nothing."""

    config: GossipConfig = field(default_factory=GossipConfig)
    topology: Topology | None = None
    """The topology whose messages are sent in `comm_dtype`; None if nothing is sent."""
    processes: int = 1
    device: torch.device | None = None
    sharded: bool = False
    """Whether a worker is several processes."""
    accelerator: Any = None
    """An `accelerate.Accelerator`."""
    trainer: Any = None
    """A `transformers.Trainer`."""
    callback: Any = None
    """The GossipCallback of the Trainer."""
    calibrates: bool = False
    """Whether BatchNorm statistics are to be measured."""
    renamed: bool = False
    """Whether the best checkpoint, to be loaded at the end, has other names than the model."""
    call: str = ""
    """The function that is called."""


@dataclass(frozen=True)
class Feature:
    """A row of the table."""

    name: str
    is_on: Callable[[Setup], Any]
    """Whether a setup has it. A text is the setting that an error message shows."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """Names of other features, each with the reason."""
    way_out: str = ""


def _get(setup: Setup, path: str) -> Any:
    """Return what is at a dotted path; None if a part of it is missing."""
    found: Any = setup
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _classes(instance: Any) -> set[str]:
    """Return the classes of an object, as in "trl.SFTTrainer"."""
    return {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(instance).__mro__}


def _directed(setup: Setup) -> Any:
    topology = setup.topology
    if topology is None or all(torch.equal(topology.matrix(k), topology.matrix(k).T) for k in range(topology.period)):
        return False
    return f"topology {topology.name!r}, which has directed rounds"


def _wraps_adapters(setup: Setup) -> Any:
    if _get(setup, "trainer.model.peft_config") is None:
        return False
    wrapped = any("_checkpoint_wrapped_module" in name for name, _ in setup.trainer.model.named_modules())
    return wrapped or _get(setup, "accelerator.state.fsdp_plugin.activation_checkpointing")


def _loads_own_adapters(setup: Setup) -> Any:
    model = getattr(setup.trainer, "model", None)
    by_peft = "peft.PeftModel" in _classes(getattr(model, "_orig_mod", model))
    return _get(setup, "trainer.args.load_best_model_at_end") and hasattr(model, "peft_config") and not by_peft


def _compares_rows(setup: Setup) -> Any:
    classes = _classes(setup.trainer)
    of_trl = any(name.startswith("trl.") for name in classes)
    return of_trl and "trl.SFTTrainer" not in classes and type(setup.trainer).__name__


_SHARDED, _SEVERAL = "sharded workers", "several workers in a process"

FEATURES = (
    Feature(_SHARDED, lambda s: s.sharded and f"{_SHARDED} (device_mesh or parallelism_config)"),
    Feature(
        _SEVERAL,
        lambda s: s.config.workers_per_process > 1 and f"workers_per_process={s.config.workers_per_process}",
        {_SHARDED: "a worker is several processes then"},
        "Leave one of them out.",
    ),
    Feature("several processes", lambda s: s.processes > 1 and f"{s.processes} processes"),
    Feature(
        "devices other than CPU and CUDA",
        lambda s: s.device is not None and s.device.type not in BACKENDS and f"the device '{s.device}'",
        {"several processes": "they exchange by gloo (CPU) or NCCL (CUDA)"},
        "Launch one process with GossipConfig(workers_per_process=N), or train on CPU (ACCELERATE_USE_CPU=true).",
    ),
    Feature("directed rounds", _directed),
    Feature(
        "comm_dtype other than full",
        lambda s: s.config.comm_dtype != "full" and f"comm_dtype={s.config.comm_dtype!r}",
        {"directed rounds": "neighbors take opposite steps"},
        "Use comm_dtype='full'.",
    ),
    Feature(
        "mixed_precision='fp16'",
        lambda s: _get(s, "accelerator.mixed_precision") == "fp16",
        {_SHARDED: "shards have no common loss scale"},
        "Use 'bf16'.",
    ),
    Feature(
        "cpu_offload of FSDP2",
        lambda s: _get(s, "accelerator.state.fsdp_plugin.cpu_offload.pin_memory") is not None,  # a CPUOffloadPolicy
        {_SHARDED: "parameters on the CPU cannot be mixed with those of another GPU"},
        "Leave cpu_offload (fsdp_offload_params) out.",
    ),
    Feature(
        "calibrate= of a model with BatchNorm",
        lambda s: s.calibrates,
        {_SHARDED: "their processes would need equally many batches"},
        "Leave it out (GossipCallback(calibrate=False)), so that the statistics are pooled, or use LayerNorm.",
    ),
    Feature(
        "a communication hook of DistributedDataParallelKwargs",
        lambda s: getattr(_get(s, "accelerator.ddp_handler.comm_hook"), "value", "no") != "no",
        {"several processes": "gradients are not sent"},
        "Leave it out; GossipConfig(comm_dtype=...) rounds the weights that are.",
    ),
    Feature(
        "examine",
        lambda s: s.call == "examine",
        {_SHARDED: "it takes every process for a worker"},
        "Examine the launch without device_mesh, one process per worker.",
    ),
    Feature(
        "hyperparameter_search",
        lambda s: s.call == "hyperparameter_search",
        {_SHARDED: "it was not tried"},
        "Search with workers of one process, or launch a run for each trial.",
    ),
    Feature(
        "trainers of TRL other than SFTTrainer",
        _compares_rows,
        {
            _SHARDED: "it was not tried",
            _SEVERAL: "it compares rows of a batch, of which each worker gets a part",
        },
        "Use SFTTrainer, or launch one process per worker (workers_per_process=1).",
    ),
    Feature("save_only_model=True", lambda s: _get(s, "trainer.args.save_only_model")),
    Feature(
        "stop_on_signals and stop_on_request",
        lambda s: next(
            (f"{n}=True" for n in ("stop_on_signals", "stop_on_request") if getattr(s.callback, n, 0)), False
        ),
        {"save_only_model=True": "training resumes from complete checkpoints"},
        "Set save_only_model=False, or do not stop.",
    ),
    Feature(
        "auto_find_batch_size=True",
        lambda s: _get(s, "trainer.args.auto_find_batch_size"),
        {_SHARDED: "a process that runs out of memory leaves the others waiting"},
        "Set per_device_train_batch_size.",
    ),
    Feature(
        "save_on_each_node=True",
        lambda s: _get(s, "trainer.args.save_on_each_node"),
        {_SHARDED: "the average is gathered on the main process only"},
        "Save to a file system that all nodes share.",
    ),
    Feature(
        "even_batches=False",
        lambda s: _get(s, "trainer.args.accelerator_config.even_batches") is False,
        {_SHARDED: "their processes gather shards together, and would evaluate unequal numbers of batches"},
        "Leave it out of accelerator_config.",
    ),
    Feature(
        "train_sampling_strategy='batch_rebalance'",
        lambda s: _get(s, "trainer.args.train_sampling_strategy") == "batch_rebalance",  # of newer Transformers
        {_SHARDED: "it deals batches to processes, not to workers"},
        "Use 'group_by_length'.",
    ),
    Feature(
        "models sharded when loaded (DistributedConfig)",
        lambda s: _get(s, "trainer.is_distributed_loading_by_transformers"),
        {_SHARDED: "processes of several workers share the model"},
        "Load it without, and pass device_mesh= (on CPUs) or parallelism_config= (on GPUs).",
    ),
    Feature(
        "load_best_model_at_end=True of models saved under other names (mixtures of experts)",
        lambda s: s.renamed,
        {_SHARDED: "shards are loaded by the names of the model"},
        "Leave it out, and load the best checkpoint by from_pretrained afterwards.",
    ),
    Feature(
        "8-bit layers of bitsandbytes",
        lambda s: _get(s, "trainer.model.is_loaded_in_8bit"),
        {_SHARDED: "they cannot compute with shards"},
        "Load the model in 4 bits or unquantized.",
    ),
    Feature(
        "prompt learning of PEFT",
        lambda s: any(
            getattr(a, "is_prompt_learning", False) for a in (_get(s, "trainer.model.peft_config") or {}).values()
        ),
        {_SHARDED: "PEFT computes the prompts that it saves from whole parameters"},
        "Use LoRA or another adapter that is not prompt learning, or workers of one process.",
    ),
    Feature(
        "activation_checkpointing of adapters of PEFT",
        _wraps_adapters,
        {_SHARDED: "PEFT does not find its adapters in wrapped layers, and would save none"},
        "Set gradient_checkpointing=True in place of fsdp_config={'activation_checkpointing': True}.",
    ),
    Feature(
        "load_best_model_at_end=True with add_adapter",
        _loads_own_adapters,
        {_SHARDED: "such adapters are not loaded into shards"},
        "Use get_peft_model of PEFT, or leave it out.",
    ),
)
"""The table."""


COPIES_WEIGHTS = (
    "this optimizer keeps another copy of the weights, which the workers do not mix. Use one without, such as AdamW "
    "(optim='adamw_torch'): the deployed model is an average already."
)
COMMUNICATES = (
    "this optimizer exchanges parameters or gradients between the workers. Use the optimizer inside it, or one that "
    "takes its step alone, such as AdamW or torch.optim.Muon."
)
SEVERAL_POINTS = (
    "this optimizer evaluates the loss at several points of one step, which does not fit one mix per step. Use an "
    "optimizer that evaluates it once, such as AdamW."
)
OPTIMIZERS = {
    "schedulefree|lookahead|^ranger|^asgd$|^swa$|madgrad": COPIES_WEIGHTS,
    "^distributed|zeroredundancy|postlocalsgd|deepspeedzero|^oss$": COMMUNICATES,
    "lbfgs|sam$": SEVERAL_POINTS,
    "prodigy|dadapt|^l?dog$": (
        "this optimizer finds its learning rate itself, another one on each worker. Use one with a given lr, such as "
        "AdamW."
    ),
    "lomo|layerwise": (
        "this optimizer updates parameters during the backward pass, before the workers can mix. Use one with a "
        "separate step, such as AdamW (optim='adamw_torch')."
    ),
}
"""Why optimizers do not gossip, by a pattern of their names in lower case, without underscores.

`OptimizerWatch` notices others that keep a copy of the weights or communicate.
"""


def refuse_optimizer(names: Iterable[str], shown: str) -> None:
    """Raise ValueError if an optimizer of one of these names is in `OPTIMIZERS`; `shown` begins the message."""
    for name in names:
        for pattern, reason in OPTIMIZERS.items():
            if re.search(pattern, name.lower().replace("_", "")):
                raise ValueError(f"{shown}: {reason}")


def refuse_combinations(setup: Setup) -> None:
    """Raise ValueError if a setup has two features of `FEATURES` that exclude each other."""
    found = {feature.name: feature.is_on(setup) for feature in FEATURES}
    shown = {name: value if isinstance(value, str) else name for name, value in found.items() if value}
    for feature in FEATURES:
        for other, reason in feature.excludes.items():
            if feature.name in shown and other in shown:
                raise ValueError(
                    f"{shown[feature.name]} does not work with {shown[other]}: {reason}. {feature.way_out}"
                )

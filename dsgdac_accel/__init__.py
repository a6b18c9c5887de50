"""Decentralized training with controlled disagreement (DSGD-AC, DAdam-AC) for Hugging Face Accelerate.

Importing this package has no side effects: it touches no process group, no device and no Accelerate state. Public names
are imported on first use, because torch and Transformers take seconds to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dsgdac_accel.version import __version__

if TYPE_CHECKING:
    from dsgdac_accel.accelerator import GossipAccelerator
    from dsgdac_accel.checkpoint import CheckpointError, WorkerCountError
    from dsgdac_accel.config import GossipConfig
    from dsgdac_accel.core.mixer import Mixer
    from dsgdac_accel.core.nonfinite import NonFiniteError
    from dsgdac_accel.distributed.failure_detection import WorkerLostError
    from dsgdac_accel.distributed.group import WorkerGroup
    from dsgdac_accel.distributed.launcher_variables import join_slurm_step
    from dsgdac_accel.distributed.stopping import StoppedBySignal
    from dsgdac_accel.metrics import ConsensusLogger, JsonlSink
    from dsgdac_accel.pytorch import Gossip
    from dsgdac_accel.schedule import AdaptiveConsensus
    from dsgdac_accel.topology import Topology, build_topology
    from dsgdac_accel.trainer import GossipCallback
    from dsgdac_accel.virtual_workers import VirtualWorkers

__all__ = [
    "EXIT_STOPPED",
    "AdaptiveConsensus",
    "CheckpointError",
    "ConsensusLogger",
    "Gossip",
    "GossipAccelerator",
    "GossipCallback",
    "GossipConfig",
    "JsonlSink",
    "Mixer",
    "NonFiniteError",
    "StoppedBySignal",
    "Topology",
    "VirtualWorkers",
    "WorkerCountError",
    "WorkerGroup",
    "WorkerLostError",
    "__version__",
    "build_topology",
    "join_slurm_step",
]

_MODULES = {
    "AdaptiveConsensus": "schedule",
    "CheckpointError": "checkpoint",
    "ConsensusLogger": "metrics",
    "EXIT_STOPPED": "distributed.stopping",
    "Gossip": "pytorch",
    "GossipAccelerator": "accelerator",
    "GossipCallback": "trainer",
    "GossipConfig": "config",
    "JsonlSink": "metrics",
    "Mixer": "core.mixer",
    "NonFiniteError": "core.nonfinite",
    "StoppedBySignal": "distributed.stopping",
    "Topology": "topology",
    "VirtualWorkers": "virtual_workers",
    "WorkerCountError": "checkpoint",
    "WorkerGroup": "distributed.group",
    "WorkerLostError": "distributed.failure_detection",
    "build_topology": "topology",
    "join_slurm_step": "distributed.launcher_variables",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"dsgdac_accel.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

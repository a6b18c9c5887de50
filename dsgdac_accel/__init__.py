"""Decentralized training with controlled disagreement (DSGD-AC, DAdam-AC) for Hugging Face Accelerate.

Importing it has no side effects: no process group, no device and no Accelerate state is touched.
"""

from typing import TYPE_CHECKING, Any

from dsgdac_accel.accelerator import GossipAccelerator
from dsgdac_accel.checkpoint import CheckpointError, WorkerCountError
from dsgdac_accel.config import GossipConfig
from dsgdac_accel.group import WorkerGroup, WorkerLostError
from dsgdac_accel.metrics import ConsensusLogger, JsonlSink
from dsgdac_accel.mixing import Mixer, NonFiniteError
from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.topology import Topology, build_topology
from dsgdac_accel.version import __version__
from dsgdac_accel.workers import VirtualWorkers

if TYPE_CHECKING:
    from dsgdac_accel.trainer import GossipCallback

__all__ = [
    "AdaptiveConsensus",
    "CheckpointError",
    "ConsensusLogger",
    "GossipAccelerator",
    "GossipCallback",
    "GossipConfig",
    "JsonlSink",
    "Mixer",
    "NonFiniteError",
    "Topology",
    "VirtualWorkers",
    "WorkerCountError",
    "WorkerGroup",
    "WorkerLostError",
    "__version__",
    "build_topology",
]


def __getattr__(name: str) -> Any:
    """GossipCallback needs Transformers, which takes seconds to import: only who asks for it pays."""
    if name == "GossipCallback":
        from dsgdac_accel.trainer import GossipCallback

        return GossipCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

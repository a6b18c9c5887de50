"""Decentralized training with controlled disagreement (DSGD-AC, DAdam-AC) for Hugging Face Accelerate.

Importing it has no side effects: no process group, no device and no Accelerate state is touched.
"""

from dsgdac_accel.accelerator import GossipAccelerator
from dsgdac_accel.config import GossipConfig
from dsgdac_accel.group import WorkerGroup, WorkerLostError
from dsgdac_accel.metrics import ConsensusLogger, JsonlSink
from dsgdac_accel.mixing import Mixer, NonFiniteError
from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.topology import Topology, build_topology
from dsgdac_accel.version import __version__

__all__ = [
    "AdaptiveConsensus",
    "ConsensusLogger",
    "GossipAccelerator",
    "GossipConfig",
    "JsonlSink",
    "Mixer",
    "NonFiniteError",
    "Topology",
    "WorkerGroup",
    "WorkerLostError",
    "__version__",
    "build_topology",
]

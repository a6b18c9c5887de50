"""`GossipAccelerator`: Accelerate for workers that gossip."""

from dsgdac_accel.accelerator.accelerator import GossipAccelerator
from dsgdac_accel.accelerator.optimizer import GossipOptimizer

__all__ = ["GossipAccelerator", "GossipOptimizer"]

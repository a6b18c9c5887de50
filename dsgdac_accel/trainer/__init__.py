"""`GossipCallback`: an unmodified Hugging Face Trainer for workers that gossip."""

from dsgdac_accel.trainer.callback import GossipCallback

__all__ = ["GossipCallback"]

"""`GossipCallback`: gossip for an unmodified Hugging Face Trainer."""

from dsgdac_accel.trainer.callback import GossipCallback

__all__ = ["GossipCallback"]

"""The mixing core: buckets, the exchange with the neighbors, and one gossip step around an optimizer."""

from dsgdac_accel.core.mixer import Mixer
from dsgdac_accel.core.nonfinite import NonFiniteError

__all__ = ["Mixer", "NonFiniteError"]

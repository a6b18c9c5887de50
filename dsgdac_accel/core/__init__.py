"""The mixing core: flat buffers, the exchange with the neighbours, one gossip step around an optimizer."""

from dsgdac_accel.core.arrivals import NonFiniteError
from dsgdac_accel.core.mixer import Mixer

__all__ = ["Mixer", "NonFiniteError"]

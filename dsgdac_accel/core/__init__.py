"""The mixing core: copies of the parameters, their exchange with the neighbors, and a step around an optimizer."""

from dsgdac_accel.core.mixer import Mixer
from dsgdac_accel.core.nonfinite import NonFiniteError

__all__ = ["Mixer", "NonFiniteError"]

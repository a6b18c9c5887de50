"""Curvature of the loss at the deployed model, and how the workers' disagreement lies in it.

The loss is F(x) = (1/B) sum_b f(x; s_b), the plain mean of the batch losses over a fixed list of batches. Measuring it
changes nothing of the model: no gradient, no buffer, no mode, no random stream.
"""

from dsgdac_accel.curvature.lanczos import Spectrum, lanczos
from dsgdac_accel.curvature.measures import (
    Estimate,
    NoiseAlignment,
    Penalty,
    alignment,
    curvature_exposure,
    gradient_noise_alignment,
    hutchinson_trace,
    measure_penalty,
    random_direction_baseline,
)
from dsgdac_accel.curvature.operator import HessianOperator
from dsgdac_accel.curvature.parameters import (
    ParameterLayout,
    consensus_errors,
    flatten,
    set_parameters,
)
from dsgdac_accel.curvature.report import CurvatureReport, measure_curvature

__all__ = [
    "CurvatureReport",
    "Estimate",
    "HessianOperator",
    "NoiseAlignment",
    "ParameterLayout",
    "Penalty",
    "Spectrum",
    "alignment",
    "consensus_errors",
    "curvature_exposure",
    "flatten",
    "gradient_noise_alignment",
    "hutchinson_trace",
    "lanczos",
    "measure_curvature",
    "measure_penalty",
    "random_direction_baseline",
    "set_parameters",
]

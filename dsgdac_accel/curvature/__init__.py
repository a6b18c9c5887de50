"""Curvature of the loss at the deployed model, and the workers' disagreement relative to it.

The loss is F(x) = sum_b w_b f(x; s_b) / sum_b w_b, the mean of the losses of a fixed list of batches. The weights w_b
are 1 unless given. Measurements leave the model unchanged: gradients, buffers, training modes and random states stay as
they are.
"""

from dsgdac_accel.curvature.batch_derivatives import LossFunction
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
from dsgdac_accel.curvature.report import CurvatureCost, CurvatureReport, ShowProgress, measure_curvature

__all__ = [
    "CurvatureCost",
    "CurvatureReport",
    "Estimate",
    "HessianOperator",
    "LossFunction",
    "NoiseAlignment",
    "ParameterLayout",
    "Penalty",
    "ShowProgress",
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

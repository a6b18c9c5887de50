"""Curvature of the loss at the deployed model, and the workers' disagreement relative to it.

The loss is F(x) = sum_b w_b f(x; s_b) / sum_b w_b, the mean of the losses of a fixed list of batches. The weights w_b
are 1 unless given. Measurements leave the model unchanged: gradients, buffers, training modes and random states stay as
they are.
"""

from dsgdac_accel.curvature.lanczos import Product, Spectrum, lanczos
from dsgdac_accel.curvature.measures import (
    Estimate,
    NoiseAlignment,
    Penalty,
    gradient_noise_alignment,
    hutchinson_trace,
    measure_penalty,
)
from dsgdac_accel.curvature.operator import HessianOperator, LossFunction
from dsgdac_accel.curvature.parameters import consensus_errors, flatten, set_parameters
from dsgdac_accel.curvature.report import CurvatureCost, CurvatureReport, ShowProgress, measure_curvature

__all__ = [
    "CurvatureCost",
    "CurvatureReport",
    "Estimate",
    "HessianOperator",
    "LossFunction",
    "NoiseAlignment",
    "Penalty",
    "Product",
    "ShowProgress",
    "Spectrum",
    "consensus_errors",
    "flatten",
    "gradient_noise_alignment",
    "hutchinson_trace",
    "lanczos",
    "measure_curvature",
    "measure_penalty",
    "set_parameters",
]

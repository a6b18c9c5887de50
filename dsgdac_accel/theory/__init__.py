"""Predictions of the workers' disagreement by the paper's linear model (arXiv 2602.02899, Section 3.4).

Near the deployed model, the loss is approximated by a quadratic with a fixed Hessian. The consensus error then splits
into modes, one for each pair of an eigenvalue mu of the graph Laplacian I - W and an eigenvalue lam of the Hessian.
With learning rate alpha, gradient noise xi and momentum b, a mode z follows (Lemma 1)

    z <- (1 - gamma mu - alpha lam) z - alpha xi                       without momentum
    m <- b m + lam z + xi,   z <- (1 - gamma mu) z - alpha m           with momentum, as in torch.optim.SGD

`modes` has the closed forms of one mode, in the paper's letters. `radius` sums them over a topology, in the stationary
state or along a schedule. `quadratic` simulates the algorithm to check the predictions. Weight decay acts as curvature:
add it to lam.

Suffixes of shapes: N workers, J modes of the graph, K directions of the Hessian, C chains of a simulation, T rounds of
a period.
"""

from dsgdac_accel.theory.modes import (
    consensus_penalty,
    graph_modes,
    is_mixing_dominated,
    is_stable,
    mixing_dominated_variance,
    modal_variance,
    modal_variance_bounds,
)
from dsgdac_accel.theory.quadratic import Estimate, QuadraticRun, quadratic_chains, quadratic_step, simulate_quadratic
from dsgdac_accel.theory.radius import Disagreement, predicted_radius, radius_along

__all__ = [
    "Disagreement",
    "Estimate",
    "QuadraticRun",
    "consensus_penalty",
    "graph_modes",
    "is_mixing_dominated",
    "is_stable",
    "mixing_dominated_variance",
    "modal_variance",
    "modal_variance_bounds",
    "predicted_radius",
    "quadratic_chains",
    "quadratic_step",
    "radius_along",
    "simulate_quadratic",
]

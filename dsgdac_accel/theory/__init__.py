"""What the paper's linear model (arXiv 2602.02899, Section 3.4) predicts of the workers' disagreement.

Near the deployed model the loss is taken as a quadratic with a fixed Hessian. The consensus error then splits into
modes, one for each pair of an eigenvalue mu of the graph Laplacian I - W and an eigenvalue lam of the Hessian, and a
mode follows (Lemma 1)

    z <- (1 - gamma mu - a lam) z - a xi            without momentum,
    m <- b m + lam z + xi,   z <- (1 - gamma mu) z - a m     with momentum b, as in torch.optim.SGD.

`modes` holds the closed forms of one mode, in the paper's letters (alpha is the rate a); `radius` sums them up for a
topology, in stationary state or along a schedule; `quadratic` simulates the algorithm, to see that it is true. Weight
decay counts as curvature: add it to lam.

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

"""All checks, in the order in which they run."""

from __future__ import annotations

from tasks.gpu import host_cost, links, one_process, processes, sharded

CHECKS = (
    *one_process.CHECKS,
    *sharded.CHECKS,
    *host_cost.CHECKS,
    *one_process.LARGE,
    *processes.CHECKS,
    *links.CHECKS,
    *processes.FAULTS,
)
"""Large and slow ones come late, since a deadline cuts the rest; those that end their processes come last."""

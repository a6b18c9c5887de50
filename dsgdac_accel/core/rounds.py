"""The rounds of a topology, seen from one process: its neighbors and groups. No communication."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dsgdac_accel.distributed.members import Members
from dsgdac_accel.topology import RoundPlan, Topology


class Rounds:
    """The rounds of a topology, for the workers of this process.

    Workers are numbered over all processes, `local_workers` per process. A local worker is counted from 0.

    Args:
        topology: the rounds of all workers.
        members: the processes.
        local_workers: workers of each process.
        all_reduce: whether rounds that average whole groups of three or more workers use an all-reduce. Otherwise these
            workers exchange in pairs.

    Raises:
        ValueError: the topology is for another number of workers.
    """

    def __init__(self, topology: Topology, members: Members, local_workers: int = 1, all_reduce: bool = True) -> None:
        if topology.num_workers != members.size * local_workers:
            each = f" processes of {local_workers} workers each" if local_workers > 1 else ""
            raise ValueError(
                f"topology '{topology.name}' is for {topology.num_workers} workers, but {members.size}{each} were "
                f"launched. Launch {topology.num_workers} workers, or build it for {members.size * local_workers}."
            )
        self.members = members
        self.local_workers = local_workers
        self.all_reduce = all_reduce
        self.topology = topology
        self.workers = range(members.rank * local_workers, (members.rank + 1) * local_workers)
        """Numbers of the workers of this process."""
        period = range(topology.period)
        self.plans = [[self.plan_of(round_, worker) for worker in self.workers] for round_ in period]
        """Plans of the local workers, by round."""
        self._partners = [[self._partner_of(round_, worker) for worker in self.workers] for round_ in period]
        self.slots = [self._slots_of(local) for local in range(local_workers)]
        """Sets of receive buffers that each local worker needs: one per simultaneous neighbor in another process."""

    def _slots_of(self, local: int) -> int:
        plans = [plans[local] for plans in self.plans if plans[local].weights]
        # An update needs one in any case, and the sum over an averaging group, too.
        return max((1 if p.averaging_group else max(1, len(self.elsewhere(p.weights))) for p in plans), default=0)

    def require_workers(self, saved: int) -> None:
        """Raise ValueError if a state is of another number of workers."""
        if saved != self.topology.num_workers:
            raise ValueError(f"the state is of {saved} workers, but {self.topology.num_workers} were launched.")

    # ---- one round

    def plan(self, round_: int, local: int = 0) -> RoundPlan:
        """Return the part of a local worker in a round."""
        return self.plans[round_ % len(self.plans)][local]

    def plan_of(self, round_: int, worker: int) -> RoundPlan:
        """Return the part of any worker in a round, by its number."""
        plan = self.topology.plan(round_, worker)
        return plan if self.all_reduce else replace(plan, averaging_group=None)

    def elsewhere(self, workers: Iterable[int]) -> list[int]:
        """Return the workers among `workers` that other processes hold."""
        return [worker for worker in workers if worker not in self.workers]

    def local(self, workers: Iterable[int]) -> list[int]:
        """Return the workers among `workers` that this process holds, as local workers."""
        return [worker - self.workers.start for worker in workers if worker in self.workers]

    def partner(self, round_: int, local: int = 0) -> int | None:
        """Return the worker that a local worker is paired with: neither exchanges with anyone else."""
        return self._partners[round_ % len(self._partners)][local]

    def _partner_of(self, round_: int, worker: int) -> int | None:
        plan = self.plan_of(round_, worker)
        if len(plan.weights) != 1:
            return None
        (other,) = plan.weights
        back = self.plan_of(round_, other)
        only_each_other = {*plan.recipients} == {other} and {*back.weights, *back.recipients} == {worker}
        return other if only_each_other else None

    def peers(self, round_: int) -> tuple[int, ...]:
        """Return the ranks of the other processes that send to this one in a round."""
        plans = self.plans[round_ % len(self.plans)]
        return self.processes(self.elsewhere({worker for plan in plans for worker in plan.weights}))

    def processes(self, workers: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of the processes that hold `workers`, in order."""
        return tuple(sorted({worker // self.local_workers for worker in workers}))

    def all_reduce_groups(self, round_: int) -> list[tuple[int, ...]]:
        """Return the averaging groups of a round with workers here and in other processes, in order."""
        groups = {plan.averaging_group for plan in self.plans[round_ % len(self.plans)] if plan.averaging_group}
        return sorted(group for group in groups if self.elsewhere(group))

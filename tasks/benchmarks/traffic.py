"""The messages of gossip without gossip: what they cost on a machine that carries the emulated network, too."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.nn import Parameter

from dsgdac_accel import GossipConfig, WorkerGroup
from dsgdac_accel.distributed.shards import local_of
from dsgdac_accel.topology import Topology, build_topology


class Traffic:
    """Sends as many bytes as gossip sends, to the same workers, by plain messages of torch from a thread.

    Args:
        parameters: of the model; zeros travel in their place.
        config: its topology decides who sends to whom.
        group: the workers.
    """

    def __init__(self, parameters: Iterable[Parameter], config: GossipConfig, group: WorkerGroup) -> None:
        topology = config.topology
        self._topology = topology if isinstance(topology, Topology) else build_topology(topology, group.size)
        self._group = group
        self._sent = torch.zeros(sum(local_of(parameter).numel() for parameter in parameters), device="cpu")
        plans = [self._topology.plan(round_, group.rank) for round_ in range(self._topology.period)]
        self._received = [torch.zeros_like(self._sent) for _ in range(max(len(plan.weights) for plan in plans))]
        self._thread = ThreadPoolExecutor(1)
        self._posted: Future[list[dist.Work]] | None = None
        self._step = 0
        self.waited_seconds = 0.0
        """Duration of the latest `wait`."""
        self.bytes_sent = 0.0
        """By this process in the latest exchange."""

    def post(self) -> None:
        """Begin an exchange; returns at once."""
        plan = self._topology.plan(self._step, self._group.rank)
        self._step += 1
        self.bytes_sent = float(self._sent.nbytes * len(plan.recipients))
        self._posted = self._thread.submit(self._post, list(plan.weights), plan.recipients)

    def _post(self, senders: Iterable[int], receivers: Iterable[int]) -> list[dist.Work]:
        handle = self._group.process_groups.exchange
        buffers = zip(self._received, senders, strict=False)
        works = [dist.irecv(buffer, group=handle, group_src=sender) for buffer, sender in buffers]
        works += [dist.isend(self._sent, group=handle, group_dst=receiver) for receiver in receivers]
        return [work for work in works if work is not None]

    def wait(self) -> None:
        """Wait until the exchange is done, if one was posted."""
        posted, self._posted = self._posted, None
        began = time.perf_counter()
        for work in posted.result() if posted is not None else ():
            work.wait()
        self.waited_seconds = time.perf_counter() - began

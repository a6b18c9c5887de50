"""Starts the workers of a benchmark, on this machine's own network or on a slower one that a relay emulates."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator

from dsgdac_accel import WorkerGroup, WorkerLostError
from dsgdac_accel.topology import Topology, build_topology
from tasks.benchmarks import LAUNCHED
from tasks.benchmarks.config import BenchmarkConfig, NetworkConfig
from tasks.benchmarks.names import VariantName
from tasks.benchmarks.relay_process import RelayClient, running_relay
from tasks.benchmarks.relayed_store import RelayedStore
from tasks.benchmarks.sharding import mesh_of

_RELAY = "BENCHMARK_RELAY"
"""Environment variable with the port of the relay, from the launcher to its workers."""
_HOST = "127.0.0.1"
_LATE_SECONDS = 0.002
"""Average delay of pieces from which on the relay is too slow for its network."""


@dataclass
class Joined:
    """A process of the benchmark that has joined its group."""

    group: WorkerGroup
    """The workers; where they have several processes, those in the same place of each."""
    relay: RelayClient | None = None
    notes: list[str] = field(default_factory=list)
    """Lines about the network for the report."""

    @property
    def bytes_carried(self) -> Callable[[], Mapping[int, int]] | None:
        """A function that asks the relay for the bytes sent by each worker; None without a relay."""
        relay = self.relay
        return None if relay is None else lambda: relay.counters().bytes_sent

    def lines(self) -> list[str]:
        """The notes, and whether the relay was fast enough."""
        if self.relay is None:
            return self.notes
        counters = self.relay.counters()
        late = f"pieces arrived {1e3 * counters.late:.2f} ms late on average, {1e3 * counters.latest:.0f} at most"
        if counters.late > _LATE_SECONDS:
            late += ": this machine is too busy or the network too fast for the relay, do not trust these figures"
        return [*self.notes, late]

    @contextlib.contextmanager
    def relay_is_blamed(self) -> Iterator[None]:
        """Raise ConnectionError in place of a WorkerLostError inside the context if the relay is gone."""
        try:
            yield
        except WorkerLostError:
            if self.relay is not None:
                self.relay.counters()
            raise


def must_launch(config: BenchmarkConfig) -> bool:
    """Whether this process has to start the workers, because no launcher did."""
    return "RANK" not in os.environ and config.processes > 1


def launch_workers(config: BenchmarkConfig, main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Call `main(arguments)` in each process, and start the relay if there is a network to emulate.

    The others are ended when a process fails. Returns its exit status, 128 + n for signal n, or 0.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background processes ignore it
    os.environ[LAUNCHED] = "true"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # like torchrun
    with contextlib.ExitStack() as ended:
        if config.network is not None:
            os.environ["ACCELERATE_USE_CPU"] = "true"
            os.environ[_RELAY] = str(ended.enter_context(_relay_for(config.network)))
        server = socket.create_server((_HOST, 0))  # a TCPStore by itself would be reachable from other machines
        port = server.getsockname()[1]
        store = dist.TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
        size = str(config.processes)
        variables = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": _HOST, "MASTER_PORT": str(port)}
        workers = mp.start_processes(
            _work, (main, list(arguments), variables), config.processes, join=False, start_method="spawn"
        )
        assert workers is not None
        try:
            while not workers.join():
                pass
        except mp.ProcessExitedException as failed:
            if failed.signal_name is not None:
                worker = failed.error_index // config.shards
                print(f"error: worker {worker} was ended by {failed.signal_name}", file=sys.stderr, flush=True)
            return failed.exit_code if failed.exit_code >= 0 else 128 - failed.exit_code
        finally:
            for process in workers.processes:
                process.kill()
                process.join()
            del store
    return 0


def _work(
    rank: int, main: Callable[[Sequence[str]], None], arguments: Sequence[str], variables: Mapping[str, str]
) -> None:
    """Be process `rank`: a client of the launcher's store, as with torchrun."""
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    main(arguments)


def check_workers(config: BenchmarkConfig) -> None:
    """Raise ValueError if the variants or the network are impossible with the number of workers."""
    if must_launch(config):
        size = here = config.processes
    else:
        size, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    workers = size // config.shards
    if config.network is not None and (workers < 2 or here != size):
        raise ValueError(
            f"an emulated network needs several workers on one machine; got {workers}, {here // config.shards} of them "
            f"on this one. Set workers and start the script with python alone."
        )
    for text in config.variants:
        name = VariantName.parse(text)
        topology = name.settings(config.gossip).topology
        if name.kind == "gossip" and not isinstance(topology, Topology):
            build_topology(topology, workers)


@contextlib.contextmanager
def joined(config: BenchmarkConfig) -> Iterator[Joined]:
    """Join the group of workers, whichever launcher started this one. Collective."""
    network = config.network
    if network is None:
        accelerator = Accelerator(cpu=not torch.accelerator.is_available())
        yield Joined(_group(config, accelerator.device))
        accelerator.end_training()
        return
    with contextlib.ExitStack() as ended:
        store, relay = _rendezvous(network, config.shards, ended)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        ended.callback(dist.destroy_process_group)
        notes = [f"network: {network.described()}, by a relay of connections"]
        yield Joined(_group(config, torch.device("cpu")), relay, notes)


def _group(config: BenchmarkConfig, device: torch.device) -> WorkerGroup:
    mesh = None if config.shards == 1 else mesh_of(device.type, config.shards)
    return WorkerGroup.make(mesh, device, config.gossip.timeout)


def _rendezvous(network: NetworkConfig, shards: int, ended: contextlib.ExitStack) -> tuple[dist.Store, RelayClient]:
    rank = int(os.environ["RANK"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = next(iter(dist.rendezvous("env://")))[0]
    port = os.environ.get(_RELAY)
    if port is None:  # another launcher started the workers, so worker 0 runs the relay
        if rank == 0:
            store.set("benchmark/relay", str(ended.enter_context(_relay_for(network))))
        port = store.get("benchmark/relay").decode()
    relay = RelayClient(int(port))
    ended.callback(relay.close)
    return RelayedStore(store, rank, relay, shards), relay


def _relay_for(network: NetworkConfig) -> contextlib.AbstractContextManager[int]:
    return running_relay(network.bytes_per_second, network.delay_ms / 1e3, network.queue_kb * 1024)

"""Starting the workers of a benchmark, on this machine's own network or on a slower one that is emulated."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from accelerate import Accelerator

from dsgdac_accel import WorkerGroup, WorkerLostError
from dsgdac_accel.elastic.launch import launch
from dsgdac_accel.elastic.launch_plan import Launch
from dsgdac_accel.topology import Topology, build_topology
from tasks.benchmarks import LAUNCHED, namespaces
from tasks.benchmarks.config import BenchmarkConfig, NetworkConfig
from tasks.benchmarks.names import VariantName
from tasks.benchmarks.relay_process import RelayClient, running_relay
from tasks.benchmarks.relayed_store import RelayedStore

# Variables of the environment from the launcher to its workers:
_RELAY = "BENCHMARK_RELAY"  # port of the relay
_NAMESPACES = "BENCHMARK_NAMESPACES"  # names of the namespaces, by rank
_STORE = "BENCHMARK_STORE"  # file of the rendezvous: namespaces have no network in common with the launcher
_LATE_SECONDS = 0.002
"""From so much on average the relay has not kept up."""


@dataclass
class Joined:
    """A worker's place in the benchmark."""

    group: WorkerGroup
    relay: RelayClient | None = None
    notes: list[str] = field(default_factory=list)
    """About the network, for the report."""

    @property
    def carried(self) -> Callable[[], Mapping[int, int]] | None:
        """Asks the relay for the bytes sent by each worker; None without one."""
        relay = self.relay
        return None if relay is None else lambda: relay.counters().bytes_sent

    def lines(self) -> list[str]:
        """The notes, and how well the relay has kept up."""
        if self.relay is None:
            return self.notes
        counters = self.relay.counters()
        late = f"pieces arrived {1e3 * counters.late:.2f} ms late on average, {1e3 * counters.latest:.0f} at most"
        if counters.late > _LATE_SECONDS:
            late += ": this machine is too busy or the network too fast for the relay, do not trust these figures"
        return [*self.notes, late]

    @contextlib.contextmanager
    def relay_is_blamed(self) -> Iterator[None]:
        """Without the relay the workers have only lost each other: then inside, ConnectionError is raised instead."""
        try:
            yield
        except WorkerLostError:
            if self.relay is not None:
                self.relay.counters()
            raise


def must_launch(config: BenchmarkConfig) -> bool:
    """Whether this process is to start the workers, rather than one of them."""
    return "RANK" not in os.environ and (config.workers or 1) > 1


def launch_workers(config: BenchmarkConfig, command: list[str]) -> int:
    """Start `command` for each worker on the network of the configuration; the exit status of the whole.

    Raises KeyboardInterrupt where it was interrupted, when no worker is left.
    """
    assert config.workers is not None
    os.environ[LAUNCHED] = "true"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    with contextlib.ExitStack() as ended:
        if config.network is not None:
            os.environ["ACCELERATE_USE_CPU"] = "true"
            mode, note = choose(config.network)
            if note:
                print(note, flush=True)
            if mode == "namespaces":
                names = ended.enter_context(namespaces.joined_namespaces(config.workers, config.network))
                folder = ended.enter_context(tempfile.TemporaryDirectory())
                os.environ |= {_NAMESPACES: " ".join(names), _STORE: os.path.join(folder, "store")}
            else:
                os.environ[_RELAY] = str(ended.enter_context(_relay_for(config.network)))
        status = launch(Launch(command=command, workers=config.workers, stop_on_failure=True))
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    return status


def choose(network: NetworkConfig) -> tuple[str, str]:
    """How the network is emulated here, and a line on why not as it would be better ("" where there is nothing to say).

    Raises ValueError where namespaces were asked for and are not possible.
    """
    if network.by == "relay":
        return "relay", ""
    reason = namespaces.reason_against(network)
    if reason is None:
        return "namespaces", ""
    if network.by == "namespaces":
        raise ValueError(f"network.by: namespaces are not possible here: {reason}. Use auto or relay.")
    return "relay", f"no network namespaces here: {reason}. A relay carries the connections instead."


def check_workers(config: BenchmarkConfig) -> None:
    """Raises ValueError where the variants or the network are impossible with as many workers as there are to be."""
    if must_launch(config):
        size = here = config.workers or 1
    else:
        size, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if config.network is not None and (size < 2 or here != size):
        raise ValueError(
            f"an emulated network needs several workers on one machine; got {size}, {here} of them on this one. Give "
            f"workers and start the script with python alone."
        )
    for text in config.variants:
        name = VariantName.parse(text)
        topology = name.settings(config.gossip).topology
        if name.kind == "gossip" and not isinstance(topology, Topology):
            build_topology(topology, size)


@contextlib.contextmanager
def joined(config: BenchmarkConfig) -> Iterator[Joined]:
    """This worker's place, whoever launched it. Collective."""
    network, timeout = config.network, config.gossip.timeout
    if network is None:
        accelerator = Accelerator(cpu=not torch.accelerator.is_available())
        yield Joined(WorkerGroup(accelerator.device, timeout))
        accelerator.end_training()
        return
    with contextlib.ExitStack() as ended:
        how, store, relay = _rendezvous(network, ended)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        ended.callback(dist.destroy_process_group)
        yield Joined(WorkerGroup(torch.device("cpu"), timeout), relay, [f"network: {network.described()}, by {how}"])


def _rendezvous(network: NetworkConfig, ended: contextlib.ExitStack) -> tuple[str, dist.Store, RelayClient | None]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if names := os.environ.get(_NAMESPACES, "").split():
        namespaces.enter(names[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = namespaces.DEVICE
        return "network namespaces", dist.FileStore(os.environ[_STORE], size), None
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = next(iter(dist.rendezvous("env://")))[0]
    port = os.environ.get(_RELAY)
    if port is None:  # launched by somebody else: worker 0 keeps the relay
        if rank == 0:
            store.set("benchmark/relay", str(ended.enter_context(_relay_for(network))))
        port = store.get("benchmark/relay").decode()
    relay = RelayClient(int(port))
    ended.callback(relay.close)
    return "a relay of connections", RelayedStore(store, rank, relay), relay


def _relay_for(network: NetworkConfig) -> contextlib.AbstractContextManager[int]:
    return running_relay(network.bytes_per_second, network.delay_ms / 1e3, network.queue_kb * 1024)


def launch_command() -> list[str]:
    """What this process was started with: script and arguments."""
    return [os.path.abspath(sys.argv[0]), *sys.argv[1:]]

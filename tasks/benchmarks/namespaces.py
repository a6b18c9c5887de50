"""A slower network by the kernel's own means: network namespaces, one for each worker, joined by a bridge.

Needs Linux, root, `ip` and `tc`. What a worker sends passes tbf (rate and queue) on its own side, and what it receives
passes netem (delay, rate and queue) on the bridge's side.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tasks.benchmarks.config import NetworkConfig

DEVICE = "e0"
"""Of a worker, in its namespace."""
_NAMED = Path("/run/netns")
_OURS = re.compile(r"bench-(?:probe-(\d+)|(\d+)-(?:switch|\d+))")
_BURST = 32 * 1024
_CLONE_NEWNET = 0x40000000
_FRAME = 1500


def reason_against(network: NetworkConfig) -> str | None:
    """Why namespaces are not possible here, or None."""
    if sys.platform != "linux":
        return "they are Linux's"
    if os.geteuid() != 0:
        return "they need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"there is no {missing[0]} (install iproute2)"
    name = f"bench-probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
    except RuntimeError as error:
        return f"the kernel does not permit them ({error})"
    try:
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *_bucket(network))
        if network.delay_ms:
            _run("tc", "-n", name, "qdisc", "replace", "dev", "lo", "root", *_delay(network))
    except RuntimeError as error:
        return f"the kernel cannot shape traffic ({error})"
    finally:
        _run("ip", "netns", "delete", name)
    return None


@contextlib.contextmanager
def joined_namespaces(workers: int, network: NetworkConfig) -> Iterator[list[str]]:
    """Names of the namespaces of the workers, removed at the end. Raises RuntimeError where the kernel refuses.

    Those that a killed benchmark has left behind are removed as well.
    """
    _remove_abandoned()
    prefix = f"bench-{os.getpid()}"
    switch, names = f"{prefix}-switch", [f"{prefix}-{rank}" for rank in range(workers)]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for rank, name in enumerate(names):
            port = f"p{rank}"
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "add", DEVICE, "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", name, "addr", "add", f"10.77.{rank // 250}.{rank % 250 + 1}/16", "dev", DEVICE)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge0")
            for place, device in ((name, "lo"), (name, DEVICE), (switch, port)):
                _run("ip", "-n", place, "link", "set", device, "up")
            _run("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *_bucket(network))
            shaped = _delay(network) if network.delay_ms else _bucket(network)
            _run("tc", "-n", switch, "qdisc", "add", "dev", port, "root", *shaped)
        yield names
    finally:
        for name in (*names, switch):
            with contextlib.suppress(RuntimeError):
                _run("ip", "netns", "delete", name)


def enter(name: str) -> None:
    """Move this process into a namespace; threads started later follow."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(_NAMED / name, "rb") as file:
        if library.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"entering the network namespace {name}")


def _remove_abandoned() -> None:
    """Delete namespaces of benchmarks whose process is gone."""
    for file in sorted(_NAMED.glob("bench-*")):
        found = _OURS.fullmatch(file.name)
        if found and not Path("/proc", found[1] or found[2]).exists():
            with contextlib.suppress(RuntimeError):  # another benchmark may have been quicker
                _run("ip", "netns", "delete", file.name)


def _bucket(network: NetworkConfig) -> list[str]:
    limit = max(int(network.queue_kb * 1024), _BURST)
    return ["tbf", "rate", f"{network.rate_mbit:g}mbit", "burst", str(_BURST), "limit", str(limit)]


def _delay(network: NetworkConfig) -> list[str]:
    # netem counts packets, and those that are only travelling as well as those that wait.
    travelling = network.bytes_per_second * network.delay_ms / 1e3
    packets = int((network.queue_kb * 1024 + travelling) / _FRAME) + 1
    return ["netem", "delay", f"{network.delay_ms:g}ms", "rate", f"{network.rate_mbit:g}mbit", "limit", str(packets)]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"status {done.returncode}"
        raise RuntimeError(f"{command[0]}: {said}")

"""`dsgdac doctor`: launched like the training, it reports what would make a run fail, wrong or slow."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsgdac_accel.cli.parsing import amount

if TYPE_CHECKING:
    from dsgdac_accel.doctor import Report

EXAMPLES = """examples:
  torchrun --nproc_per_node 4 -m dsgdac_accel doctor --topology one_peer_ring --parameters 10M
  accelerate launch --config_file configs/accelerate/cpu_4_workers.yaml -m dsgdac_accel doctor \\
    --config configs/digits.yaml
"""
DEFAULT_PARAMETERS = 10_000_000
GRACE_SECONDS = 3.0
"""How long the others wait for worker 0 to print, because launchers end all processes when the first one fails."""


def add_commands(commands: Any) -> None:
    """Add the parser of the command."""
    doctor = commands.add_parser(
        "doctor",
        help="examine a launch before training: workers, links, data, settings",
        description="Launched like the training, compare its workers: versions, configuration, model, random streams, "
        "data, threads and devices, and measure an exchange over each link. With --config the run of a task is built "
        "as in training, in a temporary folder, but not trained; further arguments are keys of the task. Exit status: "
        "0 without errors, 1 with errors, 2 for a mistake in the command.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = doctor.add_argument
    add("--config", metavar="FILE", type=Path, help="configuration of the task whose run is examined")
    add("--topology", metavar="NAME", help="without --config: topology (default: one_peer_ring)")
    add("--parameters", metavar="N", type=amount, help="without --config: parameters of the model (default: 10M)")
    add("--workers_per_process", metavar="M", type=int, help="without --config: workers in each process (default: 1)")
    add("--timeout", metavar="S", type=float, default=30.0, help="seconds to wait for a silent worker (default: 30)")
    add("--json", metavar="FILE", type=Path, help="also write the report as JSON")
    doctor.set_defaults(run=_doctor, takes_rest=True, parser=doctor)


def _doctor(options: argparse.Namespace) -> int:
    rank = os.environ.get("RANK", "0")
    try:
        _check(options)
        return run_examination(_examination(options), options.json, options.timeout)
    except (ValueError, OSError, ImportError) as error:
        if rank == "0":
            raise
        time.sleep(GRACE_SECONDS)  # if worker 0 has the same problem, it alone reports it
        raise type(error)(f"worker {rank}: {error}") from error


def _check(options: argparse.Namespace) -> None:
    from dsgdac_accel.checks import LONGEST_TIMEOUT, check_number

    check_number("--timeout", options.timeout, above=0, maximum=LONGEST_TIMEOUT, advice="It is in seconds.")
    if options.json is not None and options.json.is_dir():
        raise ValueError(f"--json must be a file; {options.json} is a folder.")
    if options.config is None:
        if options.rest:
            options.parser.refuse(options.rest)
        return
    if not options.config.is_file():
        raise FileNotFoundError(f"--config must be the configuration of a task; {options.config} does not exist.")
    for name in ("topology", "parameters", "workers_per_process"):
        if getattr(options, name) is not None:
            key = f"--gossip.{name}" if name != "parameters" else "a key of the model"
            raise ValueError(f"--{name} cannot be combined with --config, which sets it. Use {key}.")


def _examination(options: argparse.Namespace) -> Callable[[], Report]:
    """Return the function that examines. Reads the settings now, so every process finds a mistake in them."""
    if options.config is not None:
        words = ["--config", str(options.config), *(word for word in options.rest if word != "--")]
        return _task_examination()(options.config, words, options.timeout)
    from dsgdac_accel.config import GossipConfig
    from dsgdac_accel.topology import build_topology

    per_process = 1 if options.workers_per_process is None else options.workers_per_process
    name = options.topology or "one_peer_ring"
    config = GossipConfig(topology=name, workers_per_process=per_process)
    build_topology(name, launched_processes()[1] * per_process)  # raises if they do not fit together
    parameters = DEFAULT_PARAMETERS if options.parameters is None else round(options.parameters)
    if parameters < 1:
        raise ValueError(f"--parameters must be a number >= 1; got {options.parameters:g}.")
    return lambda: _examine_links(config, parameters, options.timeout)


def _examine_links(config: Any, parameters: int, timeout: float) -> Report:
    """Without a task there is no model: only its size counts."""
    from dsgdac_accel import GossipAccelerator
    from dsgdac_accel.doctor import examine

    accelerator = GossipAccelerator(gossip=replace(config, timeout=timeout))
    return examine(accelerator, parameters=parameters, settings={"parameters": parameters}, timeout=timeout)


def _task_examination() -> Any:
    """Return the function by which the installed tasks examine one of their runs."""
    for plugin in entry_points(group="dsgdac.preflight"):
        return plugin.load()
    raise FileNotFoundError(
        "--config needs the tasks of the repository: pip install -e '.[tasks]'. In your own script, call "
        "dsgdac_accel.doctor.examine."
    )


# ---- the processes of the launch


def run_examination(examine: Callable[[], Report], json_file: Path | None, timeout: float) -> int:
    """Examine in all processes of the launch, and let one of them print the report.

    Returns:
        The exit status of this process. Does not return if a worker was lost.
    """
    from dsgdac_accel import WorkerLostError
    from dsgdac_accel.doctor import Report
    from dsgdac_accel.doctor.examination import lost_worker

    rank, size = launched_processes()
    store = None
    try:
        store = join_workers(rank, size, timeout) if size > 1 else None
        report = examine()
    except WorkerLostError as error:
        report = Report([lost_worker(error)])
    if store is None or _may_print(store, rank):
        print("\n".join(report.lines()), flush=True)
        if json_file is not None:
            report.write_json(json_file)
        if store is not None:
            store.set("printed", "")
            _wait_for_others(store, size)
    if any(finding.subject == "lost worker" for finding in report.findings):
        sys.stdout.flush()
        os._exit(report.exit_status)  # the teardown of a process group that lost a worker may abort
    return report.exit_status


def launched_processes() -> tuple[int, int]:
    """Return rank and number of processes as the launcher set them; (0, 1) without a launcher.

    Raises:
        ValueError: RANK and WORLD_SIZE contradict each other.
    """
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    try:
        size, rank = int(found["WORLD_SIZE"] or 1), int(found["RANK"] or 0)
    except ValueError:
        size, rank = 0, 0
    if not 0 <= rank < size or (size > 1 and found["RANK"] is None):
        shown = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(f"RANK must be a number from 0 to WORLD_SIZE - 1; got {shown}. Use torchrun.")
    return rank, size


def join_workers(rank: int, size: int, timeout: float) -> Any:
    """Create the default process group and return its store.

    torch would only say that some worker is missing; here every worker signs in first, so that the missing ones can be
    named.

    Raises:
        WorkerLostError: a worker did not sign in within `timeout` seconds.
        ValueError: the launcher did not set MASTER_ADDR and MASTER_PORT.
    """
    import torch
    import torch.distributed as dist

    from dsgdac_accel import WorkerLostError
    from dsgdac_accel.doctor.report import named_workers

    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port or not port.isdigit():
        raise ValueError(
            f"MASTER_ADDR and MASTER_PORT must be set; got {host} and {port}. Use torchrun or accelerate launch."
        )
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(seconds=timeout)
    try:
        connected = dist.TCPStore(host, int(port), size, serves, patience, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        if serves:
            raise ValueError(f"worker 0 cannot serve at {host}:{port}: {error}. Choose another MASTER_PORT.") from error
        raise WorkerLostError(
            f"worker 0 did not answer within {timeout:g} s at {host}:{port}, where it serves the rendezvous store"
        ) from error
    # The agent of torchrun keeps its store over restarts.
    store = dist.PrefixStore(f"dsgdac_doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", connected)
    store.set(f"here/{rank}", "")
    deadline = time.monotonic() + timeout
    while missing := [other for other in range(size) if not store.check([f"here/{other}"])]:
        if time.monotonic() > deadline:
            raise WorkerLostError(f"{named_workers(missing)} did not answer within {timeout:g} s at the start")
        time.sleep(0.02)
    on_gpu = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true"
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=patience)
    return store


def _may_print(store: Any, rank: int) -> bool:
    """Let worker 0 print, or the first of the others if it is lost. The others wait until that is done."""
    with suppress(RuntimeError):  # the store is gone with worker 0
        if rank != 0:
            store.wait(["printed"], timedelta(seconds=GRACE_SECONDS))
            store.set(f"left/{rank}", "")
            return False
    with suppress(RuntimeError):
        return store.compare_set("printer", "", str(rank)).decode() == str(rank)
    return rank == 0


def _wait_for_others(store: Any, size: int) -> None:
    """Keep the store of worker 0 until the others have seen that the report is printed, or for a moment."""
    with suppress(RuntimeError):
        store.wait([f"left/{rank}" for rank in range(1, size)], timedelta(seconds=1))

"""`dsgdac doctor`: launched like the training, it reports what would make a run fail, wrong or slow."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
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
MOST_PARAMETERS = 1e12
GRACE_SECONDS = 3.0
"""Seconds that the others wait for worker 0 to report: launchers end all processes when the first one fails."""


def add_commands(commands: Any) -> None:
    """Add the parser of the command."""
    doctor = commands.add_parser(
        "doctor",
        help="examine a launch before training: workers, links, data, settings",
        description="Launched like the training, compare its workers (versions, configuration, model, random streams, "
        "data) and measure an exchange over each link. With --config the run of a task is built as in training, in a "
        "temporary folder, but not trained; further arguments are keys of the task. Exit status: 0 without errors, 1 "
        "with errors, 2 for a mistake in the command.",
        epilog=EXAMPLES,
    )
    add = doctor.add_argument
    add("--config", metavar="FILE", type=Path, help="configuration of the task whose run is examined")
    add("--topology", metavar="NAME", help="without --config: topology (default: one_peer_ring)")
    add("--parameters", metavar="N", type=amount, help="without --config: parameters of the model (default: 10M)")
    add("--timeout", metavar="S", type=float, default=30.0, help="seconds to wait for a silent worker (default: 30)")
    add("--json", metavar="FILE", type=Path, help="also write the report as JSON")
    doctor.set_defaults(run=_doctor, takes_rest=True, parser=doctor)


def _doctor(options: argparse.Namespace) -> int:
    from dsgdac_accel import WorkerLostError, join_slurm_step
    from dsgdac_accel.doctor import Finding, Report

    join_slurm_step()
    rank, size = launched_processes()
    try:
        _check(options)
        examine = _run_of_task(options) if options.config is not None else _links_alone(options, size)
        try:
            if size > 1:
                join_workers(rank, size, options.timeout)
            report = examine()
        except WorkerLostError as error:
            report = Report([Finding("error", "lost worker", str(error))])
    except (ValueError, OSError, ImportError) as error:
        if rank == 0:
            raise
        time.sleep(GRACE_SECONDS)  # if worker 0 has the same problem, it alone reports it
        raise type(error)(f"worker {rank}: {error}") from error
    is_lost = any(finding.name == "lost worker" for finding in report.findings)
    if rank != 0 and not is_lost:
        os._exit(0)  # worker 0 reports
    if rank != 0:
        time.sleep(GRACE_SECONDS)  # unless worker 0 is lost, it ends the launch by its report
    print("\n".join(report.lines()), flush=True)
    if options.json is not None:
        report.write_json(options.json)
    if size > 1:
        os._exit(report.exit_status)  # the teardown of a process group aborts now and then, with another status
    return report.exit_status


def launched_processes() -> tuple[int, int]:
    """Return rank and number of processes as the launcher set them; (0, 1) without a launcher.

    Raises:
        ValueError: RANK and WORLD_SIZE contradict each other.
    """
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    size = int(found["WORLD_SIZE"] or 1)
    rank = int(found["RANK"] or (0 if size == 1 else -1))
    if not 0 <= rank < size:
        shown = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(f"RANK must be a number from 0 to WORLD_SIZE - 1; got {shown}. Use torchrun.")
    return rank, size


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
    for name, key in (("topology", "--gossip.topology"), ("parameters", "a key of the model")):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} cannot be combined with --config, which sets it. Use {key}.")


def _run_of_task(options: argparse.Namespace) -> Callable[[], Report]:
    """Return the function that examines a task's run. Reads its settings now, so every process finds a mistake."""
    for plugin in entry_points(group="dsgdac.preflight"):
        words = ["--config", str(options.config), *(word for word in options.rest if word != "--")]
        return plugin.load()(options.config, words, options.timeout)
    raise FileNotFoundError(
        "--config needs the tasks of the repository: pip install -e '.[tasks]'. In your own script, call "
        "dsgdac_accel.doctor.examine."
    )


def _links_alone(options: argparse.Namespace, size: int) -> Callable[[], Report]:
    """Return the function that examines a launch without a task: there is no model, only its size counts."""
    from dsgdac_accel import GossipAccelerator, GossipConfig
    from dsgdac_accel.checks import check_number
    from dsgdac_accel.doctor import examine
    from dsgdac_accel.topology import build_topology

    name = options.topology or "one_peer_ring"
    config = GossipConfig(topology=name, timeout=options.timeout)
    build_topology(name, size)  # raises if they do not fit together
    size_of_model = 10e6 if options.parameters is None else options.parameters
    parameters = round(check_number("--parameters", size_of_model, minimum=1, maximum=MOST_PARAMETERS))
    return lambda: examine(GossipAccelerator(gossip=config), parameters=parameters, timeout=options.timeout)


def join_workers(rank: int, size: int, timeout: float) -> None:
    """Create the default process group.

    torch would only say that some worker is missing; here every worker signs in first, so that the missing ones can be
    named.

    Raises:
        WorkerLostError: a worker did not sign in within `timeout` seconds.
        ValueError: the launcher did not set MASTER_ADDR and MASTER_PORT.
    """
    import torch
    import torch.distributed as dist

    from dsgdac_accel import WorkerLostError
    from dsgdac_accel.devices import cpu_is_demanded
    from dsgdac_accel.doctor.report import named_workers

    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise ValueError(f"MASTER_ADDR and MASTER_PORT must be set; got {host} and {port}. Use torchrun.")
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(seconds=timeout)
    try:
        connected = dist.TCPStore(host, int(port), size, serves, patience, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"  # IPv6
        raise WorkerLostError(f"worker 0 does not serve the rendezvous at {place}: {error}") from error
    # The agent of torchrun keeps its store over restarts.
    store = dist.PrefixStore(f"dsgdac_doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", connected)
    store.set(f"here/{rank}", "")
    deadline = time.monotonic() + timeout
    while missing := [other for other in range(size) if not store.check([f"here/{other}"])]:
        if time.monotonic() > deadline:
            raise WorkerLostError(f"{named_workers(missing)} did not answer within {timeout:g} s at the start")
        time.sleep(0.02)
    on_gpu = torch.cuda.is_available() and not cpu_is_demanded(os.environ)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=patience)

"""The `dsgdac` command.

Exit status: 0 for success, 1 if runs failed or are missing or the doctor found errors, 2 for a mistake in the command,
130 when interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dsgdac_accel.checks import did_you_mean
from dsgdac_accel.version import __version__

if TYPE_CHECKING:
    from dsgdac_accel.doctor import Finding

EXAMPLES = """examples:
  dsgdac sweep configs/sweeps/digits_study.yaml --jobs 2
  dsgdac sweep configs/paper/table_cifar.yaml --smoke --jobs 2
  dsgdac report configs/sweeps/digits_study.yaml
  dsgdac plot runs/dsgd runs/dsgd_ac
  torchrun --nproc_per_node 4 -m dsgdac_accel doctor --topology one_peer_ring --parameters 10M
"""

DOCTOR_EXAMPLES = """examples:
  torchrun --nproc_per_node 4 -m dsgdac_accel doctor --topology one_peer_ring --parameters 10M
  accelerate launch --config_file configs/accelerate/cpu_4_workers.yaml -m dsgdac_accel doctor \\
    --config configs/digits.yaml
"""
MOST_PARAMETERS = 1e12
GRACE_SECONDS = 3.0
"""Seconds that the others wait for worker 0 to report: launchers end all processes when the first one fails."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_OTHER_NAMES = {"out": "--output", "output_dir": "--output"}
"""Names that other tools use, with the option to use instead."""

REMOVED = {
    "launch": "Use torchrun, whose --max-restarts=N starts a run again after a lost worker (docs/checkpoints.md).",
    "scaling": "tasks/benchmark.py measures a step on an emulated network.",
    "schedule": "In Python, AdaptiveConsensus(power=3, max_lr=0.1).gamma(step=0, lr=0.05) gives gamma.",
    "topology": "In Python, print(build_topology('one_peer_ring', 8).matrix(0)) shows a round.",
}
"""Commands that earlier versions had, with the way out."""

HAS_TASKS = Path(__file__).resolve().parents[1].joinpath("tasks", "studies", "commands.py").is_file()
"""Whether this file lies in a clone, beside the tasks. An installed wheel has none."""

TASK_COMMANDS = ("curvature", "plot", "report", "show", "sweep")
FROM_A_CLONE = "which only a clone of the repository has. Run it from a clone: pip install -e '.[tasks]'."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, by default that of this process, and return its exit status.

    Raises:
        SystemExit: for --help and --version, and with status 2 for words that are not understood.
    """
    parser, commands = build_parser()
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in REMOVED:
        parser.error(f"dsgdac {words[0]} was removed. {REMOVED[words[0]]}")
    if words and words[0] in TASK_COMMANDS and not HAS_TASKS:
        parser.error(f"dsgdac {words[0]} needs the tasks, {FROM_A_CLONE}")
    if words and not words[0].startswith("-") and words[0] not in commands:
        advice = did_you_mean(words[0], commands) or f" Commands: {', '.join(commands)}."
        parser.error(f"dsgdac has no command {words[0]!r}.{advice}")
    options, rest = parser.parse_known_args(words)
    if not hasattr(options, "run"):
        if rest:
            parser.refuse(rest)
        parser.print_help()
        return 2
    if rest and not getattr(options, "takes_rest", False):
        commands[options.chosen].refuse(rest)
    options.rest = rest
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # a reader that has seen enough (`| head`) is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except MemoryError as error:
        print(f"error: out of memory: {error}. Ask for less.", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def build_parser() -> tuple[StrictParser, dict[str, StrictParser]]:
    """Return the parser, and those of the commands by name. In a clone, the tasks add theirs.

    Building the parser imports nothing slow, so `dsgdac --help` answers at once.
    """
    parser = StrictParser(
        prog="dsgdac",
        description="Decentralized training with controlled disagreement: sweeps, reports, runs, checks of a launch."
        + f" A clone of the repository has {', '.join(TASK_COMMANDS)}, too." * (not HAS_TASKS),
        epilog=EXAMPLES if HAS_TASKS else DOCTOR_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"dsgdac_accel {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="chosen")
    _add_doctor(commands)
    if HAS_TASKS:
        for module in ("commands", "run_commands"):
            importlib.import_module(f"tasks.studies.{module}").add_commands(commands)
    return parser, commands.choices


# ---- the parser: options by their whole names, each once, and a hint for a wrong one


class StrictParser(argparse.ArgumentParser):
    """An argument parser that takes options by their whole names, each once. Subcommands get the same class."""

    def __init__(self, **options: Any) -> None:
        formatter = {"formatter_class": argparse.RawDescriptionHelpFormatter}  # keeps the lines of examples
        super().__init__(**formatter | options, allow_abbrev=False)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Exit with status 2: these words are not understood. Suggest the option that was probably meant."""
        self.error(f"unrecognized arguments: {' '.join(words)}{self._hint(words)}")

    def _hint(self, words: Sequence[str]) -> str:
        known = [option for option in self._option_string_actions if option.startswith("--") and option != "--help"]
        plain = {_plain(option): option for option in known}
        for word in words:
            name = _plain(word.partition("=")[0])
            other = _OTHER_NAMES.get(name)
            if word.startswith("--") and other in known:
                return f". Did you mean {other}?"
            if word.startswith("--") and (nearest := difflib.get_close_matches(name, plain, n=1)):
                return f". Did you mean {plain[nearest[0]]}?"
        return ""


class _StoreOnce(argparse.Action):
    """Store a value, and refuse an option that is given twice, of which argparse would drop the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = vars(namespace).setdefault("given", set())
        if option_string is not None and self.dest in given:
            parser.error(f"{option_string} is given twice. Keep one.")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_").lower()


def amount(text: str) -> float:
    """Read a number with an optional unit, in powers of ten.

    >>> amount("25M"), amount("1.5g"), amount("1e6"), amount("0.5T")
    (25000000.0, 1500000000.0, 1000000.0, 500000000000.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kmgbt]?)", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a number such as 25M or 1e6; got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


# ---- doctor


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="examine a launch before training: versions, settings, links",
        description="Launched like the training, compare its workers (versions, configuration) and measure an exchange "
        "over each link. With --config the run of a task is built as in training, in a temporary folder, but "
        "not trained; further arguments are keys of the task. Exit status: 0 without errors, 1 with errors, 2 for a "
        "mistake in the command.",
        epilog=DOCTOR_EXAMPLES,
    )
    add = doctor.add_argument
    add("--config", metavar="FILE", type=Path, help="configuration of the task whose run is examined")
    add("--topology", metavar="NAME", help="without --config: topology (default: one_peer_ring)")
    add("--parameters", metavar="N", type=amount, help="without --config: parameters of the model (default: 10M)")
    add("--timeout", metavar="S", type=float, default=30.0, help="seconds to wait for a silent worker (default: 30)")
    doctor.set_defaults(run=_doctor, takes_rest=True, parser=doctor)


def _doctor(options: argparse.Namespace) -> int:
    from dsgdac_accel import WorkerLostError, join_slurm_step
    from dsgdac_accel.doctor import Finding, errors_of

    join_slurm_step()
    rank, size = rank_and_world_size()
    try:
        _check_doctor(options)
        examine = _run_of_task(options) if options.config is not None else _links_alone(options, size)
        try:
            if size > 1:
                join_workers(rank, size, options.timeout)
            findings = examine()
        except WorkerLostError as error:
            findings = [Finding("error", "lost worker", str(error))]
    except (ValueError, OSError, ImportError) as error:
        if rank == 0:
            raise
        time.sleep(GRACE_SECONDS)  # if worker 0 has the same problem, it alone reports it
        raise type(error)(f"worker {rank}: {error}") from error
    errors = errors_of(findings)
    if rank != 0 and not any(finding.name == "lost worker" for finding in errors):
        os._exit(0)  # worker 0 reports
    if rank != 0:
        time.sleep(GRACE_SECONDS)  # unless worker 0 is lost, it ends the launch by its report
    levels = [finding.level for finding in findings]
    counts = [f"{level}s: {levels.count(level)}" for level in ("error", "warning") if level in levels]
    print("\n".join(finding.line() for finding in findings))
    print(f"doctor: {', '.join(counts) or 'no problems found'}", flush=True)
    status = int(bool(errors))
    if size > 1:
        os._exit(status)  # the teardown of a process group aborts now and then, with another status
    return status


def rank_and_world_size() -> tuple[int, int]:
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


def _check_doctor(options: argparse.Namespace) -> None:
    from dsgdac_accel.checks import LONGEST_TIMEOUT, check_number

    check_number("--timeout", options.timeout, above=0, maximum=LONGEST_TIMEOUT, advice="It is in seconds.")
    if options.config is None:
        if options.rest:
            options.parser.refuse(options.rest)
        return
    if not options.config.is_file():
        raise FileNotFoundError(f"--config must be the configuration of a task; {options.config} does not exist.")
    for name, key in (("topology", "--gossip.topology"), ("parameters", "a key of the model")):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} cannot be combined with --config, which sets it. Use {key}.")


def _run_of_task(options: argparse.Namespace) -> Callable[[], list[Finding]]:
    """Return the function that examines a task's run. Reads its settings now, so every process finds a mistake."""
    if not HAS_TASKS:
        raise FileNotFoundError(
            f"--config needs the tasks, {FROM_A_CLONE} In your own script, call dsgdac_accel.doctor.examine."
        )
    words = ["--config", str(options.config), *(word for word in options.rest if word != "--")]
    return importlib.import_module("tasks.common.preflight").examination_of(options.config, words, options.timeout)


def _links_alone(options: argparse.Namespace, size: int) -> Callable[[], list[Finding]]:
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
    return lambda: examine(GossipAccelerator(gossip=config), parameters, timeout=options.timeout)


def join_workers(rank: int, size: int, timeout: float) -> None:
    """Create the default process group.

    torch would only say that some worker is missing; here every worker signs in first, so that the missing ones can be
    named.

    Raises:
        WorkerLostError: a worker did not sign in within `timeout` seconds.
        ValueError: the launcher did not set MASTER_ADDR and MASTER_PORT.
    """
    import torch.distributed as dist

    from dsgdac_accel import WorkerLostError
    from dsgdac_accel.devices import default_device
    from dsgdac_accel.distributed.members import Members

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
            who = Members(rank, size).named(missing)
            raise WorkerLostError(f"{who} did not answer within {timeout:g} s at the start")
        time.sleep(0.02)
    on_gpu = default_device().type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=patience)

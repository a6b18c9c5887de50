"""`dsgdac doctor`: launched like the training, it says what would make the run fail, wrong or slow."""

from __future__ import annotations

import argparse
import os
import re
import time
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsgdac_accel.doctor import Report

EXAMPLES = """examples:
  torchrun --nproc_per_node 4 -m dsgdac_accel doctor --topology one_peer_ring --parameters 10M
  accelerate launch --config_file configs/accelerate/cpu_4_workers.yaml -m dsgdac_accel doctor \\
    --config configs/digits.yaml
"""
DEFAULT_PARAMETERS = 10_000_000
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_GRACE_SECONDS = 3.0  # in which the launcher ends the others, so that worker 0 alone says what is wrong


def add_commands(commands: Any) -> None:
    """Add the parser of the command."""
    doctor = commands.add_parser(
        "doctor",
        help="examine a launch before training: workers, links, data, settings",
        description="Launched like the training, examine its workers before it: versions, configuration, model, data, "
        "random streams, threads, and how long an exchange takes over each link. With --config the run of a task is "
        "built as in training, in a temporary folder, and not trained; further arguments are keys of the task. Exit "
        "status: 0 where all is well or there are warnings only, 1 where there are errors, 2 for a mistake in what was "
        "asked.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--config", metavar="FILE", type=Path, help="configuration of a task, whose run is examined")
    doctor.add_argument("--topology", metavar="NAME", help="without --config: who mixes (default: one_peer_ring)")
    doctor.add_argument(
        "--parameters", metavar="N", type=_count, help="without --config: size of the model, 10M or 1.5G (default: 10M)"
    )
    doctor.add_argument("--workers_per_process", metavar="M", type=int, help="without --config (default: 1)")
    doctor.add_argument("--output_dir", metavar="FOLDER", type=Path, help="where the run is going to write")
    doctor.add_argument("--timeout", metavar="S", type=float, default=30.0, help="seconds of patience (default: 30)")
    doctor.add_argument("--json", metavar="FILE", type=Path, help="write the report there as well")
    doctor.set_defaults(run=_doctor, takes_rest=True)


def _doctor(options: argparse.Namespace) -> int:
    try:
        _check(options)
        from dsgdac_accel.doctor.launched import run_examination

        return run_examination(_examination(options), lambda report: _say(report, options.json), options.timeout)
    except (ValueError, OSError, ImportError):
        if os.environ.get("RANK", "0") != "0":  # worker 0 says the same
            time.sleep(_GRACE_SECONDS)
        raise


def _check(options: argparse.Namespace) -> None:
    from dsgdac_accel.checks import LONGEST_TIMEOUT

    if not 0 < options.timeout <= LONGEST_TIMEOUT:
        raise ValueError(
            f"--timeout must be a number of seconds > 0 and <= {LONGEST_TIMEOUT:g}; got {options.timeout}."
        )
    if options.json is not None and options.json.is_dir():
        raise ValueError(f"--json must be a file; {options.json} is a folder.")
    if options.config is None:
        if options.rest:
            raise ValueError(
                f"unrecognized arguments: {' '.join(options.rest)}. Keys of a task need --config FILE; see --help."
            )
        return
    if not options.config.is_file():
        raise FileNotFoundError(f"--config must be the configuration of a task; {options.config} does not exist.")
    for name in ("topology", "parameters", "workers_per_process"):
        if getattr(options, name) is not None:
            key = f"--gossip.{name}" if name != "parameters" else "a key of the model"
            raise ValueError(f"--{name} is for use without --config, which says it; change it by {key}.")


def _examination(options: argparse.Namespace) -> Any:
    """What to do with an empty report; reads the settings now, so that a mistake in them is found by every process."""
    if options.config is not None:
        words = ["--config", str(options.config), *(word for word in options.rest if word != "--")]
        if options.output_dir is not None:
            words += ["--output_dir", str(options.output_dir)]
        return _task_examination()(options.config, words, options.timeout)
    from dsgdac_accel.config import GossipConfig
    from dsgdac_accel.doctor.meeting import launched
    from dsgdac_accel.topology import build_topology

    per_process = 1 if options.workers_per_process is None else options.workers_per_process
    name = options.topology or "one_peer_ring"
    config = GossipConfig(topology=name, workers_per_process=per_process)
    build_topology(name, launched()[1] * per_process)  # says what is wrong with it
    size = options.parameters or DEFAULT_PARAMETERS
    return lambda report: _examine_bare(report, config, size, options)


def _examine_bare(report: Report, config: Any, parameters: int, options: argparse.Namespace) -> None:
    """Without a task, a model of one layer stands in for the user's, and only its size counts."""
    import torch

    from dsgdac_accel import GossipAccelerator
    from dsgdac_accel.doctor import examine

    accelerator = GossipAccelerator(gossip=replace(config, timeout=options.timeout))
    accelerator.gossip_config = config  # the run's own patience is what is judged
    stand_in = torch.nn.Linear(1, 1)
    accelerator.prepare(stand_in, torch.optim.SGD(stand_in.parameters(), lr=0.1))
    examine(
        accelerator,
        parameters=parameters,
        settings={"parameters": parameters},
        output_dir=options.output_dir,
        timeout=options.timeout,
        report=report,
    )


def _task_examination() -> Any:
    """The function by which the installed tasks examine a run of theirs."""
    for plugin in entry_points(group="dsgdac.preflight"):
        return plugin.load()
    raise FileNotFoundError(
        "--config needs the tasks of the repository; install it with pip install -e '.[tasks]'. "
        "Or call dsgdac_accel.doctor.examine in your own script."
    )


def _say(report: Report, file: Path | None) -> None:
    print("\n".join(report.lines()), flush=True)
    if file is not None:
        report.write_json(file)


def _count(text: str) -> int:
    """A number such as 10M.

    >>> _count("10M"), _count("1.5g"), _count("7")
    (10000000, 1500000000, 7)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgb]?)", text.strip().lower())
    if found is None or float(found[1]) * _UNITS[found[2]] < 1:
        raise argparse.ArgumentTypeError(f"must be a number of parameters such as 10M; got {text!r}")
    return round(float(found[1]) * _UNITS[found[2]])

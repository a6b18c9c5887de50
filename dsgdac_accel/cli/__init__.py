"""The `dsgdac` command: sweeps and their reports, a look at runs, topologies and schedules, and at a launch.

Exit status: 0 for success, 1 where runs failed or are missing or the doctor found errors, 2 for a mistake in what was
asked, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from dsgdac_accel.cli import doctor, scaling, theory
from dsgdac_accel.version import __version__

EXAMPLES = """examples:
  dsgdac sweep configs/sweeps/digits_study.yaml --jobs 2
  dsgdac sweep configs/sweeps/cifar100_main.yaml --print-commands > commands.txt
  dsgdac report configs/sweeps/digits_study.yaml
  dsgdac topology one_peer_ring 8
  dsgdac schedule --power 0,1,2,3 --epochs 200 --warmup 10
  dsgdac plot runs/dsgd runs/dsgd_ac
  torchrun --nproc_per_node 4 -m dsgdac_accel doctor --topology one_peer_ring --parameters 10M
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (of this process by default) asks for; its exit status.

    Raises SystemExit for --help and --version, and with status 2 for words that are not understood.
    """
    parser = build_parser()
    options, rest = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    if rest and not getattr(options, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # a reader that has enough (`| head`) is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at the end has nowhere to go
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except MemoryError as error:
        print(f"error: this takes more memory than there is: {error}. Ask for less.", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


class _StoreOnce(argparse.Action):
    """Refuses an option that is given twice, of which argparse would drop the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = vars(namespace).setdefault("given", set())
        if option_string is not None and self.dest in given:
            parser.error(f"{option_string} is given twice. Keep one.")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class _StrictParser(argparse.ArgumentParser):
    """Takes options by their whole names, each once; so do the parsers of its commands, which are of this class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _StrictParser(
        prog="dsgdac",
        description="Decentralized training with controlled disagreement: sweeps, reports, runs, topologies, launches.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dsgdac_accel {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for module in (theory, scaling, doctor):
        module.add_commands(commands)
    for plugin in entry_points(group="dsgdac.commands"):  # elastic and the tasks add their own
        plugin.load()(commands)
    return parser

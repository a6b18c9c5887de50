"""The `dsgdac` command.

Exit status: 0 for success, 1 if runs failed or are missing or the doctor found errors, 2 for a mistake in the command,
130 when interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from dsgdac_accel.cli import doctor, scaling, theory
from dsgdac_accel.cli.parsing import StrictParser
from dsgdac_accel.version import __version__

EXAMPLES = """examples:
  dsgdac sweep configs/sweeps/digits_study.yaml --jobs 2
  dsgdac sweep configs/paper/table_cifar.yaml --smoke --jobs 2
  dsgdac report configs/sweeps/digits_study.yaml
  dsgdac topology one_peer_ring 8
  dsgdac schedule --power 0,1,2,3 --epochs 200 --warmup 10
  dsgdac plot runs/dsgd runs/dsgd_ac
  torchrun --nproc_per_node 4 -m dsgdac_accel doctor --topology one_peer_ring --parameters 10M
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, by default that of this process, and return its exit status.

    Raises:
        SystemExit: for --help and --version, and with status 2 for words that are not understood.
    """
    parser, commands = build_parser()
    options, rest = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
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
    """Return the parser, and those of the commands by name.

    Packages add commands through the entry point group `dsgdac.commands`. Building the parser imports nothing slow, so
    `dsgdac --help` answers at once.
    """
    parser = StrictParser(
        prog="dsgdac",
        description="Decentralized training with controlled disagreement: sweeps, reports, runs, topologies.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"dsgdac_accel {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="chosen")
    for module in (theory, scaling, doctor):
        module.add_commands(commands)
    for plugin in entry_points(group="dsgdac.commands"):
        plugin.load()(commands)
    return parser, commands.choices

"""Measure what training costs: steps, or one of the subcommands mixing and trainer.

torchrun --nproc_per_node 2 tasks/benchmark.py --config configs/benchmark/wrn.yaml
python tasks/benchmark.py --config configs/benchmark/network_100mbit.yaml
python tasks/benchmark.py mixing --config configs/benchmark/mixing.yaml
"""

from __future__ import annotations

import importlib
import sys

from dsgdac_accel import join_slurm_step
from tasks.common.cli_errors import starting_up

SUBCOMMANDS = ("mixing", "trainer")
"""Modules of `tasks.benchmarks`; without one of them, `steps` runs."""


def main() -> None:
    """Run the benchmark that the first argument names, or the one of steps."""
    with starting_up():
        join_slurm_step()
    named = sys.argv[1] if sys.argv[1:2] and sys.argv[1] in SUBCOMMANDS else None
    benchmark = importlib.import_module(f"tasks.benchmarks.{named or 'steps'}")  # each imports what others do not need
    benchmark.main(sys.argv[2 if named else 1 :])


if __name__ == "__main__":
    main()

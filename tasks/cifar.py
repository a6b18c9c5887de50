"""Train an image classifier by gossip or a baseline, or measure the curvature of a run.

accelerate launch tasks/cifar.py --config configs/digits.yaml
python tasks/cifar.py curvature runs/digits
"""

from __future__ import annotations

import sys

from tasks.common.cli_errors import starting_up
from tasks.common.diagnostics import measure_run
from tasks.common.runner import run_task
from tasks.images.config import CifarConfig
from tasks.images.curvature import to_measure
from tasks.images.run import ImageRun


def main() -> None:
    """Run the subcommand `curvature` if it is the first argument; train otherwise."""
    if sys.argv[1:2] == ["curvature"]:
        with starting_up():
            measure_run(sys.argv[2:], to_measure, "cifar.py curvature")
        return
    run_task(ImageRun, CifarConfig, "digits", ("digits*", "cifar*"), __doc__)


if __name__ == "__main__":
    main()

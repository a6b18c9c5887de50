"""Train a translator with adam, dadam or dadam_ac, or use one: translate, score, measure the curvature of a run.

accelerate launch tasks/wmt14.py --config configs/wmt14_demo.yaml
python tasks/wmt14.py translate --model runs/wmt14_demo/deployed < sentences.en
python tasks/wmt14.py score --hypotheses translated.de --references sentences.de
python tasks/wmt14.py curvature runs/wmt14_demo
"""

from __future__ import annotations

import sys

import datasets
import transformers

from tasks.common.cli_errors import quiet_ends, starting_up
from tasks.common.runner import run_task
from tasks.translation.commands import COMMANDS
from tasks.translation.config import TranslationConfig
from tasks.translation.run import TranslationRun


def main() -> None:
    """Run the subcommand that the first argument names; train otherwise."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        with starting_up(), quiet_ends():
            COMMANDS[sys.argv[1]](sys.argv[2:])
        return
    run_task(TranslationRun, TranslationConfig, "wmt14_demo", ("wmt14*", "multi30k*"), __doc__)


if __name__ == "__main__":
    main()

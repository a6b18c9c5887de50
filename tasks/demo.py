"""A task without a configuration runs its demo, and says which others there are."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def announce_demo(demo: Path, patterns: Sequence[str]) -> None:
    """Say, on the first worker, that `demo` is run because no --config was given, and name the task's other configs.

    Args:
        demo: the configuration that is used instead.
        patterns: names of the task's configurations, as globs below `configs/` without the ending.
    """
    asked = any(word.split("=")[0] in ("--config", "--help", "-h") for word in sys.argv[1:])
    if asked or os.environ.get("RANK", "0") != "0":
        return
    files = sorted(file for pattern in patterns for file in CONFIGS.glob(f"{pattern}.yaml") if file != demo)
    others = ", ".join(str(file.relative_to(CONFIGS.parent)) for file in files)
    shown = demo.relative_to(CONFIGS.parent)
    print(f"No --config given: running the embedded demo {shown}. Others: {others}.", flush=True)

"""Lines that tell a user what a run does, also where the script has not set up logging."""

from __future__ import annotations

import logging
import sys

_LIBRARY = logging.getLogger(__name__.partition(".")[0])


def announce(text: str) -> None:
    """Log a line at level INFO, or print it to stderr where the script has not chosen a level for this library."""
    if _LIBRARY.isEnabledFor(logging.INFO):
        _LIBRARY.info(text)
    elif _LIBRARY.level == logging.NOTSET:
        print(f"{_LIBRARY.name}: {text}", file=sys.stderr, flush=True)

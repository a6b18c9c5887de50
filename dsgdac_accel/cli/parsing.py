"""The command line parser: options by their whole names, each once, and a hint for a wrong one."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_OTHER_NAMES = {
    "lr": "--lr_scheduler_type",
    "rate": "--lr_scheduler_type",
    "scheduler": "--lr_scheduler_type",
    "max_rate": "--max_lr",
    "num_train_epochs": "--epochs",
    "warmup_epochs": "--warmup",
    "start_epoch": "--start",
    "num_workers": "--workers",
    "num_processes": "--workers",
    "out": "--output",
    "output_dir": "--output",
}
"""Old names, and names that other tools use, with the option to use instead."""


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

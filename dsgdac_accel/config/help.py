"""The text of --help: every key with its type, default and meaning."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from dsgdac_accel.config.conversion import describe
from dsgdac_accel.config.schema import Key

_WIDEST = 100
_EPILOGUE = """
Precedence: defaults, then the file, then the command line. Lists are written a,b and named values a=1,b=2 on the
command line. A relative path in a file starts from the folder of that file; on the command line, and in a default,
from the working directory; ~ is the home folder. null (or none) unsets what may be null.
"""


def help_text(
    cls: type, keys: Mapping[str, Key], prog: str, description: str | None = None, default_file: Path | None = None
) -> str:
    """The whole page, as wide as the terminal but no wider than 100 columns."""
    blocks = [f"usage: {prog} [--config FILE.yaml] [--key VALUE | --section.key=VALUE ...]"]
    about = description or _summary(cls)
    if about:
        blocks.append(_wrapped(about))
    config = "A YAML file with the keys below; a section is a heading with its keys indented under it."
    blocks.append(f"  --config FILE.yaml  (default: {default_file or 'no file'})\n{_wrapped(config, 6)}")
    blocks.extend(_entry(key) for key in _values_first(keys))
    blocks.append(_wrapped(_EPILOGUE))
    return "\n\n".join(blocks)


def _values_first(keys: Mapping[str, Key]) -> Iterable[Key]:
    """Top-level values, then section by section, so that no value seems to belong to the section above it."""
    yield from (key for key in keys.values() if key.section is None and "." not in key.path)
    for section in (key for key in keys.values() if key.section is not None):
        yield section
        yield from (key for key in keys.values() if key.section is None and key.path.rpartition(".")[0] == section.path)


def _entry(key: Key) -> str:
    if key.section is not None:
        off = " (null switches it off)" if key.may_be_none else ""
        return f"{key.path}:{off}\n{_wrapped(key.doc or _summary(key.section), 2)}".rstrip()
    default = "required" if key.default is MISSING else f"default: {show_value(key.default)}"
    head = textwrap.fill(
        f"--{key.path}  {describe(key.hint)} ({default})", _width(), initial_indent="  ", subsequent_indent=" " * 8
    )
    return f"{head}\n{_wrapped(key.doc, 6)}".rstrip()


def show_value(value: Any) -> str:
    """A value as the command line would spell it.

    >>> show_value(None), show_value(True), show_value((0.9, 0.98))
    ('null', 'true', '0.9,0.98')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(show_value, value)) or "empty list"
    if isinstance(value, dict):
        return ",".join(f"{name}={show_value(item)}" for name, item in value.items()) or "none given"
    return str(value) if str(value) else "''"


def _summary(cls: type) -> str:
    """The first paragraph of a class's own docstring; dataclasses write a signature where there is none."""
    doc = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    return "" if doc.startswith(f"{cls.__name__}(") else doc


def _wrapped(text: str, indent: int = 0) -> str:
    margin = " " * indent
    return textwrap.fill(" ".join(text.split()), _width(), initial_indent=margin, subsequent_indent=margin)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, _WIDEST)

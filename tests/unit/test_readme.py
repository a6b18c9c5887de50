"""What the README shows runs."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def test_python_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "{7: 0.5}" in printed
    assert "1.0 1.0 0.125" in printed


def test_files_and_modules_it_names_exist():
    root = Path(__file__).resolve().parents[2]
    for path in re.findall(r"`?((?:configs|tasks)/[\w/]+\.\w+)", README):
        assert (root / path).is_file(), path
    table = README.split("| module | holds |")[1].split("\n\n")[0]
    for module in re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:])):
        package = root / "dsgdac_accel"
        assert (package / f"{module}.py").is_file() or (package / module / "__init__.py").is_file(), module

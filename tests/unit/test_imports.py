"""Rules for imports that import-linter cannot express; its contracts are in setup.cfg."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("dsgdac_accel", "tasks") for path in (ROOT / folder).rglob("*.py"))
MATHS = ("base_graph", "schedule", "simulation", "theory", "topology")


def test_no_file_imports_a_private_name_of_another():
    found = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("dsgdac_accel", "tasks"))
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert not found


def test_the_maths_loads_no_other_part_of_the_library():
    imports = ", ".join(f"dsgdac_accel.{module}" for module in MATHS)
    program = f"import sys, {imports}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    parts = {name.split(".")[1] for name in loaded.stdout.split() if name.startswith("dsgdac_accel.")}
    assert parts == {*MATHS, "checks", "version"}
    assert "accelerate" not in loaded.stdout.split()


def test_the_maths_uses_no_process_group():
    library = ROOT / "dsgdac_accel"
    files = [path for path in FILES if path.with_suffix("").relative_to(library.parent).parts[1] in MATHS]
    assert len(files) == len(MATHS)
    assert not [path for path in files if "torch.distributed" in path.read_text(encoding="utf-8")]

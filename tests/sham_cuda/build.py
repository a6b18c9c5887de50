"""Compiles the device, once for each version of torch and of its source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

SOURCE = Path(__file__).with_name("device.cpp")


def library() -> Path:
    """Return the compiled device, to be preloaded before torch. Raises FileNotFoundError without a compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise FileNotFoundError("needs a C++ compiler: apt-get install g++")
    content = hashlib.sha256(f"{torch.__version__} {torch.__file__} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"dsgdac_sham_cuda_{os.getuid()}" / content / "sham_device.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(built.with_suffix(".lock")):  # several test processes want it at once
        if not built.exists():
            _compile(compiler, built)
    return built


def _compile(compiler: str, target: Path) -> None:
    from torch.utils import cpp_extension

    folders = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = cpp_extension.library_paths()[0]
    partial = target.with_suffix(".partial")
    subprocess.run(
        [
            compiler, "-O1", "-w", "-std=c++20", "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=sham_device", str(SOURCE),
            *(f"-I{folder}" for folder in folders), f"-L{libraries}", f"-Wl,-rpath,{libraries}",
            "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", "-o", str(partial),
        ],
        check=True,
    )  # fmt: skip
    partial.rename(target)

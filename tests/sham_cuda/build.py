"""Compiles the device, once for each version of torch and of its source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

SOURCE = Path(__file__).with_name("device.cpp")


class Unavailable(RuntimeError):
    """There is no sham device here; the message says why."""


def library() -> Path:
    """Return the compiled device, to be preloaded before torch.

    Raises Unavailable where there is no compiler, or torch is not one that the device is for.
    """
    if sys.platform != "linux":
        raise Unavailable("needs Linux, which preloads libraries")
    if torch.version.cuda or torch.version.hip:
        raise Unavailable(f"needs a torch without CUDA of its own; this is {torch.__version__}")
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise Unavailable("needs a C++ compiler: apt-get install g++")
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
    done = subprocess.run(
        [
            compiler, "-O1", "-w", "-std=c++20", "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=sham_device", str(SOURCE),
            *(f"-I{folder}" for folder in folders), f"-L{libraries}", f"-Wl,-rpath,{libraries}",
            "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", "-o", str(partial),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    if done.returncode:
        raise Unavailable(f"does not compile with torch {torch.__version__}: {done.stderr[-2000:]}")
    partial.rename(target)

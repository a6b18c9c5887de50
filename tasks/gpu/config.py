"""Options of the GPU check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsgdac_accel.checks import check_writable, did_you_mean
from tasks.gpu.catalog import CHECKS


@dataclass(frozen=True, kw_only=True)
class GpuCheckConfig:
    """Which checks run, and where."""

    part: Literal["1", "2", "all"] = "all"
    """1 needs one GPU, 2 needs two or more."""

    device: str | None = None
    """Where the checks run: cpu or cuda. null takes the GPUs if torch sees any, or else the CPU, with gloo
    in place of NCCL."""

    only: tuple[str, ...] = ()
    """Names of the checks to run; all of them if there are none."""

    json: Path | None = None
    """File for machine, figures and details (.json). null only prints."""

    def __post_init__(self) -> None:
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(
                f"device must be cpu or cuda; got {self.device!r}. cuda uses the GPUs of CUDA_VISIBLE_DEVICES."
            )
        names = [check.name for check in CHECKS]
        for name in self.only:
            if name not in names:
                hint = did_you_mean(name, names).strip() or f"The checks are {', '.join(names)}."
                raise ValueError(f"only must name checks; got {name!r}. {hint}")
            if not any(check.name == name and self.part in (check.part, "all") for check in CHECKS):
                raise ValueError(f"only must name checks of part {self.part}; got {name!r}. Leave part out.")
        if self.json is not None:
            if self.json.suffix != ".json":
                raise ValueError(f"json must be a file that ends in .json; got {self.json}.")
            check_writable("json", self.json)

"""Checks of a launch before it trains, made with its own workers.

`examine` is for your own script, after `prepare`; the command `dsgdac doctor` calls it. `quick_check` runs at the first
`prepare` of every training.
"""

from dsgdac_accel.doctor.comparison import quick_check
from dsgdac_accel.doctor.examination import examine
from dsgdac_accel.doctor.report import Finding, Report

__all__ = ["Finding", "Report", "examine", "quick_check"]

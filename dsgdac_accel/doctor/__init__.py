"""Before a run: what would make it fail, wrong or slow, found with its own workers.

`examine` is for a script of one's own, after `prepare`; `dsgdac doctor` calls it; `quick_check` is for the start of
every run.
"""

from dsgdac_accel.doctor.examination import examine, quick_check
from dsgdac_accel.doctor.report import Finding, Report

__all__ = ["Finding", "Report", "examine", "quick_check"]

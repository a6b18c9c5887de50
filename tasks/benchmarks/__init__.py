"""The parts of `tasks/benchmark.py`: models, variants, measurement, report, and networks emulated on one machine."""

import os
import signal

LAUNCHED = "BENCHMARK_LAUNCHED"
"""Variable of the environment of workers that the script has started itself."""

if LAUNCHED in os.environ:
    # Whoever started them says that they were interrupted, once for all. Here, since other imports take seconds.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

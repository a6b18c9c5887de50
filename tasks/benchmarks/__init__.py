"""The benchmarks of `tasks/benchmark.py`: models, variants, measurement, reports, and a relay to emulate a network."""

import os
import signal

LAUNCHED = "BENCHMARK_LAUNCHED"
"""Environment variable of workers that the script has started itself."""

if LAUNCHED in os.environ:
    # The launcher alone reports an interrupt. Set it here, before imports that take seconds.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

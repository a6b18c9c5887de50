"""The parts of `tasks/benchmark.py`: models, variants, measurement, report, and networks emulated on one machine."""

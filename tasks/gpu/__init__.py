"""Checks of the GPU path, each of which settles one suspicion, and what runs them; see `tasks/gpu_check.py`."""

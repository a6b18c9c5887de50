"""Image classification: the run of `tasks/cifar.py`, its data, models and settings."""

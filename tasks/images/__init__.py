"""Image classification: data, models and settings of `tasks/cifar.py`."""

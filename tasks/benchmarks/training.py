"""The trainings of benchmarks in one process: a model, an optimizer and a batch size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import Parameter

OPTIMIZERS = ("sgd", "adam")


def this_device() -> tuple[torch.device, str]:
    """The GPU if there is one, else the CPU, with a description for the report."""
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return torch.device("cpu"), f"{torch.get_num_threads()} thread(s)"
    return device, torch.cuda.get_device_name()


@dataclass(frozen=True)
class Training:
    """A training to measure."""

    model: str
    """Name of the model."""
    optimizer: str
    """sgd (with momentum and weight decay) or adam, both in torch's fused form."""
    batch_size: int
    """Samples per worker and step."""

    @classmethod
    def of(cls, text: str) -> Training:
        """Read "<model> <optimizer> <samples per worker>". Raises ValueError for other text.

        >>> Training.of("wrn-10-2 sgd 16")
        Training(model='wrn-10-2', optimizer='sgd', batch_size=16)
        """
        words = text.split()
        if len(words) != 3 or words[1] not in OPTIMIZERS or not words[2].isdecimal() or int(words[2]) == 0:
            raise ValueError(
                f"a case is '<model> <optimizer> <samples per worker>', the optimizer one of {', '.join(OPTIMIZERS)}; "
                f"got {text!r}. Use 'wrn-10-2 sgd 16', for example."
            )
        return cls(words[0], words[1], int(words[2]))

    def make_optimizer(self, parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer, with a learning rate small enough for random data."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=5e-4, fused=True)
        return torch.optim.Adam(parameters, lr=1e-5, fused=True)

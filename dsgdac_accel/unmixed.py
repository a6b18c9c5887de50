"""Parameters that no optimizer mixes but that differ between the workers, and their means.

Such are the target networks of BYOL, MoCo and mean teachers, which a script updates by itself, and averaged copies of a
model that were not prepared.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dsgdac_accel.distributed.group import WorkerGroup
from dsgdac_accel.distributed.shards import local_parameters
from dsgdac_accel.tensor_bytes import as_words, digest, on_host
from dsgdac_accel.virtual_workers import replicas_of


def unmixed_parameters(model: nn.Module, mixed: Collection[int], group: WorkerGroup) -> list[list[Tensor]]:
    """Return the parameters of a model that differ between the workers and are not mixed. Collective.

    Args:
        model: the model, or the `VirtualWorkers` around it.
        mixed: `id` of every parameter that some optimizer mixes.
        group: the workers.

    Returns:
        [parameter][replica of this process]; of sharded parameters their shards.

    Raises:
        ValueError: one of them is not a dense floating-point tensor and has no average.
    """
    replicas = map(local_parameters, replicas_of(model))
    by_replica = [[values for _, parameter, values in named if id(parameter) not in mixed] for named in replicas]
    places = [list(tensors) for tensors in zip(*by_replica, strict=True)]
    if not places or group.size * len(by_replica) == 1:
        return []
    compared = iter(_compared_by(list(chain.from_iterable(places))))
    sums = [[next(compared) for _ in tensors] for tensors in places]
    what = "comparing the parameters that are not mixed"
    everyone = group.all_gather_object(sums, what)
    found, refusal = [], None
    for number, tensors in enumerate(places):
        if len({value for worker in everyone for value in worker[number]}) > 1:
            tensor = tensors[0]
            if type(tensor.data) is not Tensor or not tensor.is_floating_point():
                name = next(name for name, _, values in local_parameters(model) if values is tensor)
                refusal = (
                    f"{name} ({tensor.dtype}) is not mixed, differs between the workers, and has no average. Give it "
                    f"equal values on all workers, or take it out of the model."
                )
            found.append(tensors)
    refusal = group.row.first(refusal, what)  # of a sharded worker, all processes raise what one has found
    if refusal is not None:
        raise ValueError(refusal)
    return found


def _compared_by(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the sums of the bits of tensors, which take less time than digests; of a quantized tensor its digest."""
    plain = [number for number, tensor in enumerate(tensors) if type(tensor.data) is Tensor]
    sums = []
    for words, rest in (as_words(tensors[number]) for number in plain):
        last = torch.nn.functional.pad(rest, (0, -len(rest) % 8)).view(torch.int64)
        sums.append(words.sum() + last.sum())  # modulo 2^64
    known = dict(zip(plain, on_host(sums), strict=True))
    return [known[number] if number in known else digest(tensor) for number, tensor in enumerate(tensors)]


@torch.no_grad()
def means_of(unmixed: Sequence[Sequence[Tensor]], group: WorkerGroup) -> list[tuple[Tensor, Tensor]]:
    """Return each of the tensors that `unmixed_parameters` returned with its mean over the workers. Collective."""
    pairs = []
    for tensors in unmixed:
        mean, *others = [tensor.detach().flatten().clone() for tensor in tensors]
        group.all_reduce_mean_(mean, "averaging parameters that are not mixed", others=others)
        pairs += [(tensor, mean.view(tensor.shape)) for tensor in tensors]
    return pairs

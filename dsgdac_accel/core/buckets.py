"""The owner of the buckets of parameters and of the receive buffers, in which updates are formed.

Memory beyond the parameters: one set of receive buffers per simultaneous neighbor, which is one parameter copy for the
one-peer topologies and for those that average whole groups. `Use` says what the receive buffers hold at present.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor
from torch.nn import Parameter

from dsgdac_accel.core.flat_parameters import Layout, laid_out


class Use(Enum):
    """Content of the receive buffers, which decides who may write them."""

    FREE = "unused"
    """Nothing; the next use may begin."""
    RECEIVING = "being filled by an exchange"
    """The exchange writes them: the transport, and the copy that an all-reduce sums. The parameters must not change."""
    RECEIVED = "holding the neighbors' parameters"
    """Nobody writes until the consensus update is formed in their place."""
    UPDATE = "holding a consensus update that was not added yet"
    """The consensus update is formed in place, once; then `Update` only reads them."""
    SCRATCH = "in use by a measurement of the consensus radius"
    """The measurement writes."""
    BACKUP = "holding the worker's own parameters"
    """Nobody writes until `restore`. The parameters are the average of the workers."""
    RELEASED = "freed"
    """There are no buffers any more."""


_NEXT = {
    # In a process of several workers, neighbors are read in place: an update needs no exchange before it.
    Use.FREE: (Use.FREE, Use.RECEIVING, Use.UPDATE, Use.SCRATCH, Use.BACKUP, Use.RELEASED),
    Use.RECEIVING: (Use.RECEIVED, Use.FREE),
    Use.RECEIVED: (Use.UPDATE, Use.FREE),
    Use.UPDATE: (Use.FREE,),
    Use.SCRATCH: (Use.FREE,),
    Use.BACKUP: (Use.FREE,),
    Use.RELEASED: (),
}
_REFUSALS = {
    Use.UPDATE: "the consensus update of this step is not added yet. Evaluate and save after the optimizer step.",
    Use.BACKUP: "the parameters are the deployed average now; train only after leaving `with deployed_model(...)`.",
    Use.RELEASED: "gossip has ended (`deploy` or `free_memory`); prepare model and optimizer again to train on.",
}


class Buckets:
    """Owns the buckets of the workers of this process and their receive buffers, which also hold updates.

    Between two exchanges, `SpareBuffers` lends the receive buffers. Outgoing messages and references of a compressed
    exchange belong to its `Compressor`.

    `received[worker][k]` is what the k-th neighbor in another process sent to a local worker, a tensor for each bucket.
    """

    def __init__(self) -> None:
        self.flats: list[Layout] = []
        """The parameters of each local worker."""
        self.received: list[list[list[Tensor]]] = []
        self.use = Use.FREE
        self.like_buckets = True
        """Whether a receive buffer is as large as its bucket."""

    @torch.inference_mode(False)  # what is made in an evaluation is trained on afterwards
    def lay_out(self, parameters: Sequence[Sequence[Parameter]]) -> None:
        """Move the parameters of each local worker into buckets. `reserve` must follow.

        Args:
            parameters: of each local worker.
        """
        assert self.use is Use.FREE, f"the receive buffers are {self.use.value}"
        self.flats = [laid_out(mine) for mine in parameters]

    @torch.inference_mode(False)
    def reserve(self, counts: Sequence[int], empty_message: Callable[[Tensor], Tensor] | None = None) -> None:
        """Make new receive buffers. A backup or an update that is in the old ones is kept there until it is done with.

        Args:
            counts: for each local worker, the number of neighbors that it receives from at once.
            empty_message: makes the buffer for a message about a bucket; by default it is as large as the bucket.
        """
        self.like_buckets = empty_message is None
        new = empty_message or torch.zeros_like
        self.received = [
            [[new(bucket.data) for bucket in flat.buckets] for _ in range(count)]
            for flat, count in zip(self.flats, counts, strict=True)
        ]
        if self.use in (Use.RECEIVING, Use.RECEIVED, Use.SCRATCH):
            self.use = Use.FREE

    def values(self, worker: int) -> list[Tensor]:
        """Return x of a local worker: the data of each of its buckets."""
        return [bucket.data for bucket in self.flats[worker].buckets]

    def read_in(self) -> None:
        """Copy into the buckets the parameters that are no views of them."""
        for flat in self.flats:
            flat.read_in()

    def write_back(self) -> None:
        """Copy the buckets into the parameters that are no views of them."""
        for flat in self.flats:
            flat.write_back()

    # ---- use of the receive buffers

    def claim(self, use: Use) -> None:
        """Begin another use of the receive buffers, or raise RuntimeError if the present one does not allow it."""
        if use not in _NEXT[self.use]:
            self.refuse(self.use)
            raise RuntimeError(f"the receive buffers cannot become {use.value}: they are {self.use.value}.")
        self.use = use

    def refuse(self, *uses: Use) -> None:
        """Raise RuntimeError, with the way out, in one of these uses."""
        if self.use in uses and self.use in _REFUSALS:
            raise RuntimeError(_REFUSALS[self.use])

    def drop(self) -> None:
        """Drop received parameters, or an update that was never added because the local step failed."""
        if self.use in (Use.RECEIVED, Use.UPDATE):
            self.use = Use.FREE

    def release(self) -> None:
        """Give the parameters memory of their own and free all buffers."""
        self.claim(Use.RELEASED)
        for flat in self.flats:
            flat.release()
        self.received = []

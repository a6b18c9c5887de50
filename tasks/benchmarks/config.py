"""Settings of the step benchmark."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dsgdac_accel import GossipConfig
from dsgdac_accel.checks import check_integer, check_number
from tasks.benchmarks.models import check_model_name
from tasks.benchmarks.names import SHARDED_KINDS, VariantName
from tasks.benchmarks.targets import Target


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """A slower network between the workers than this machine's own: each has one full-duplex link to a switch.

    The processes of a worker (`shards`) share its link, and reach each other without it.
    """

    rate_mbit: float = 100.0
    """Megabits (10^6 bits) per second that a worker can send, and can receive at the same time."""

    delay_ms: float = 10.0
    """One-way delay between two workers, in milliseconds."""

    queue_kb: float = 512.0
    """Largest queue of a link, in KiB (>= 64). Much more hides effects, since everything then waits in line."""

    def __post_init__(self) -> None:
        check_number("rate_mbit", self.rate_mbit, above=0, advice="Leave the network out for this machine's own.")
        check_number("delay_ms", self.delay_ms, minimum=0)
        check_number("queue_kb", self.queue_kb, minimum=64, advice="A piece of a message has up to 64 KiB.")

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second in each direction."""
        return self.rate_mbit * 1e6 / 8

    def described(self) -> str:
        """The network in words, for the report."""
        return f"{self.rate_mbit:g} Mb/s, {self.delay_ms:g} ms one way, {self.queue_kb:g} KiB queues"


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """A comparison of ways to take a step."""

    model: str = "wrn-16-4"
    """transformer-10m, transformer-40m, tiny-<tensors> (many small tensors, as tiny-400), or an image model of
    tasks/images/models.py."""

    image_size: int = 32
    """Height and width of the random images, in pixels."""

    batch_size: int = 32
    """Samples per process and step."""

    variants: tuple[str, ...] = ("local", "ddp", "decent_dp", "gossip", "gossip+no_overlap", "gossip+mix_first")
    """Ways to take the same step:
    local (no communication), local+bytes (gossip's messages without mixing, so what a transport costs that shares the
    processors with the workers), ddp, ddp+bf16 (gradients sent in bf16), decent_dp[:ring|:one-peer-exp|:complete] (the
    package decent-dp, in one bucket; left out if it is not installed), and
    gossip[:TOPOLOGY][+no_overlap][+mix_first][+bf16|+int8|+int4|+int2][+every_K].
    With `shards`, whose workers shard the model as one FSDP2 module: gossip, fsdp (workers without communication),
    fsdp+bytes, hsdp (FSDP2 averages the gradients of all workers)."""

    kernel: Literal["foreach", "fused"] = "foreach"
    """Implementation of torch's SGD, the same for all variants."""

    rounds: int = 9
    """Turns of each variant."""

    steps: int = 3
    """Steps per turn."""

    workers: int | None = None
    """Workers to start. null takes those of the launcher (torchrun), or one."""

    shards: int = 1
    """Processes per worker, which share its model by FSDP2."""

    network: NetworkConfig | None = None
    """A slower network between the workers. null is this machine's own."""

    targets: tuple[str, ...] = ()
    """Expected medians, judged in the report: 'gossip <= 0.53 of ddp', 'cpu gossip <= 1.0 of decent_dp', 'memory gossip
    <= 2.01' (parameter copies beyond model, gradients and optimizer)."""

    gossip: GossipConfig = field(default_factory=lambda: GossipConfig(log_every=0))
    """Settings of the gossip variants that their names do not give, such as topology and timeout."""

    output: Path | None = None
    """JSON file for the result (.json), with a plot beside it (.png). null only prints."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "rounds", "steps", "shards"):
            check_integer(name, getattr(self, name), minimum=1)
        check_integer("image_size", self.image_size, minimum=1, maximum=4096)
        object.__setattr__(self, "model", self.model.strip().lower())  # other modules compare the name
        check_model_name(self.model, self.image_size)
        if self.output is not None and self.output.suffix != ".json":
            raise ValueError(f"output must be a file that ends in .json; got {self.output}. The plot is put beside it.")
        self._check_workers()
        self._check_variants()

    @property
    def processes(self) -> int:
        """Processes of all workers that the script starts."""
        return (self.workers or 1) * self.shards

    def _check_workers(self) -> None:
        if self.workers is not None:
            check_integer("workers", self.workers, minimum=1)
        launched = os.environ.get("WORLD_SIZE")
        if launched is not None and self.workers is not None and int(launched) != self.processes:
            shares = f" of {self.shards} processes" if self.shards > 1 else ""
            raise ValueError(
                f"workers must be the number that was launched, {launched}; got {self.workers}{shares}. Start the "
                f"script with python alone, which launches them, or leave workers out."
            )
        if launched is not None and int(launched) % self.shards:
            raise ValueError(
                f"shards must divide the number of processes, {launched}; got {self.shards}. Launch a multiple of it."
            )
        if self.gossip.workers_per_process != 1:
            raise ValueError(
                f"workers_per_process must be 1 in this benchmark; got {self.gossip.workers_per_process}. Launch more "
                f"processes instead."
            )

    def _check_variants(self) -> None:
        if not self.variants:
            raise ValueError("variants must name at least one; got none. Use 'local', 'gossip' and 'ddp', say.")
        names = [VariantName.parse(variant) for variant in self.variants]
        for name, text in zip(names, self.variants, strict=True):
            if self.shards > 1 and name.kind not in SHARDED_KINDS:
                raise ValueError(
                    f"variants must be of kind {', '.join(SHARDED_KINDS)} where workers have several shards; got "
                    f"{text!r}. Leave it or shards out."
                )
            if self.shards == 1 and name.kind in ("fsdp", "hsdp"):
                raise ValueError(f"variants of kind {name.kind} need shards >= 2; got {text!r}. Set shards.")
        for text in self.variants:
            if self.variants.count(text) > 1:
                raise ValueError(f"variants must differ; got {text!r} twice. Keep one.")
        for name in names:
            name.settings(self.gossip)
        for text in self.targets:
            target = Target.parse(text)
            missing = [name for name in target.variants if name not in self.variants]
            if missing:
                raise ValueError(
                    f"targets must be about variants that are measured; got {missing[0]!r} in {text!r}. Add it to "
                    f"variants, or drop the target."
                )

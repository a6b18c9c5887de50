"""Predictions of the scaling model, to compare with the measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsgdac_accel.core.formats import FORMATS
from dsgdac_accel.scaling import Cluster, Step, complete_gossip, one_peer_gossip, ring_ddp
from tasks.benchmarks.config import BenchmarkConfig
from tasks.benchmarks.names import VariantName

_OF_TOPOLOGY = {
    "one_peer_ring": one_peer_gossip,
    "one_peer_exponential": one_peer_gossip,
    "complete": complete_gossip,
}


def predicted_seconds(
    config: BenchmarkConfig, table: Mapping[str, Mapping[str, Any]], parameters: int, workers: int
) -> dict[str, float]:
    """Predict seconds per step by `dsgdac_accel.scaling`, for the variants that it has a formula for.

    The measured step without communication between workers, local or fsdp, is taken as computation, so only
    communication is predicted. Nothing is predicted without an emulated network, such a step and a sleeping model
    (whose share of forward is known), nor with stalls, which the formulas do not cover.

    Args:
        config: settings of the benchmark.
        table: the measurements, as `measurement.summarize` returns them.
        parameters: number of parameters of the model.
        workers: number of workers.
    """
    stalls = config.stalls.probability and config.stalls.milliseconds
    alone = "local" if config.shards == 1 else "fsdp"
    if config.network is None or stalls or alone not in table or not config.model.startswith("sleeping"):
        return {}
    found = {}
    for text in table:
        name = VariantName.parse(text)
        scheme = _scheme(name, config)
        if scheme is None:
            continue
        settings = name.settings(config.gossip)
        bits = 32.0 if settings.comm_dtype == "full" else FORMATS[settings.comm_dtype].bits
        cluster = Cluster(
            parameters=parameters,
            compute_seconds=table[alone]["seconds"],
            bandwidth=config.network.bytes_per_second,
            latency=config.network.delay_ms / 1e3,
            bits=bits,
            gradient_bits=16.0 if "bf16" in name.options else 32.0,
            buckets=1 if name.kind == "hsdp" else None,  # the whole model is one FSDP module
            overlap=settings.overlap,
        )
        found[text] = scheme(cluster, workers).seconds
    return found


def _scheme(name: VariantName, config: BenchmarkConfig) -> Callable[[Cluster, int], Step] | None:
    if name.kind in ("ddp", "hsdp"):
        return ring_ddp
    settings = name.settings(config.gossip)
    if name.kind != "gossip" or settings.mix_every != 1:
        return None
    scheme = _OF_TOPOLOGY.get(settings.topology) if isinstance(settings.topology, str) else None
    return None if scheme is complete_gossip and settings.comm_dtype != "full" else scheme

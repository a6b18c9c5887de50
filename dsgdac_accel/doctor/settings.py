"""Settings under which a run would be slow, or would not do what its author means. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Sequence

from dsgdac_accel.config import GossipConfig
from dsgdac_accel.doctor.report import Finding
from dsgdac_accel.schedule import AdaptiveConsensus
from dsgdac_accel.topology import Topology

_NO_GAP = 1e-9
_SHORT_TIMEOUT = 30.0
_VANISHED = 1e-6
"""A gamma below it moves nothing that float32 parameters would notice."""


def check_topology(topology: Topology, total_steps: int | None = None) -> tuple[list[Finding], dict[str, float | int]]:
    """How fast the topology mixes, and its figures: period, spectral gap, steps to mix."""
    from dsgdac_accel.cli.theory import steps_to_mix  # here, so that a training does not import the command line

    workers, gap = topology.num_workers, topology.spectral_gap()
    values: dict[str, float | int] = {"period": topology.period, "spectral_gap": gap}
    shown = f"{topology.name} of {workers} workers, period {topology.period}, spectral gap {gap:.3g}"
    if workers == 1:
        return [], values
    if gap < _NO_GAP:
        advice = "Let each worker keep some of its own weight, or use base_graph"
        return [Finding("error", "topology", f"{shown}: disagreement never shrinks, even at gamma 1", advice)], values
    values["steps_to_mix"] = steps = steps_to_mix(topology, 1e-3)
    shown += f", {steps} steps at gamma 1 mix to 1e-3"
    if total_steps is not None and steps > total_steps:
        advice = "Use one_peer_exponential, base_graph or exponential, which mix in few steps"
        return [Finding("warning", "topology", f"{shown}, more than the run's {total_steps}", advice)], values
    return [Finding("ok", "topology", shown)], values


def check_gossip(
    config: GossipConfig, total_steps: int | None = None, lrs: Sequence[float] | None = None
) -> list[Finding]:
    """Whether gamma does what adaptive consensus is for, and what the policies cost.

    Args:
        config: the settings.
        total_steps: optimizer steps of the run, if known.
        rates: the rate of each of its steps, if known.
    """
    findings = [_gamma(config, total_steps, lrs)]
    if not config.overlap:
        findings.append(
            Finding(
                "warning",
                "overlap",
                "overlap = false: every step waits for its whole exchange",
                "Leave it at true, unless weights are changed between steps",
            )
        )
    if config.timeout < _SHORT_TIMEOUT:
        findings.append(
            Finding(
                "warning",
                "timeout",
                f"timeout = {config.timeout:g} s: an evaluation or a save that takes one worker longer ends the run",
                "Raise it, to 600 for example",
            )
        )
    return findings


def _gamma(config: GossipConfig, total_steps: int | None, lrs: Sequence[float] | None) -> Finding:
    total = len(lrs) if lrs else total_steps
    begins = config.start_step if config.start_step is not None else 0
    if config.constant is None and config.power == 0:
        return Finding("ok", "gamma", "power = 0: gamma is 1 throughout, which is plain DSGD")
    if total is not None and begins >= total:
        advice = "Lower start_step, or use power 0 for plain DSGD"
        message = f"adaptive consensus begins at step {begins}, and the run has {total}: gamma stays 1"
        return Finding("warning", "gamma", message, advice)
    if config.constant is not None:
        message = f"constant = {config.constant:g} from step {begins} on"
        if config.constant == 0:
            return Finding("warning", "gamma", f"{message}: the workers then never mix again", "Use a value above 0")
        return Finding("ok", "gamma", message)
    if config.start_epoch is not None:
        return Finding("ok", "gamma", f"1 before epoch {config.start_epoch}, then (rate / max_lr)^{config.power:g}")
    if not lrs:
        advice = "" if isinstance(config.max_lr, float) else "Give total_steps, so that it looks ahead"
        message = f"(rate / max_lr)^{config.power:g}; how the rate goes on is not known, so gamma is 1 until it falls"
        return Finding("ok", "gamma", message, advice)
    return _planned_gamma(config, lrs, begins)


def _planned_gamma(config: GossipConfig, lrs: Sequence[float], begins: int) -> Finding:
    consensus = AdaptiveConsensus(
        power=config.power,
        start_step=begins,
        max_lr=config.max_lr,
        floor=config.floor,
        planned_lrs=lrs,
    )
    gammas = [consensus.gamma(step, lr) for step, lr in enumerate(lrs)]
    active = gammas[begins:]
    smallest, largest, last = min(active), max(active), active[-1]
    shown = f"between {smallest:.3g} and {largest:.3g} from step {begins} on, {last:.3g} at the last of {len(lrs)}"
    if smallest == 1:
        if isinstance(config.max_lr, float):
            advice = f"The largest rate is {max(lrs):.3g}: leave max_lr out, or raise it"
        else:
            advice = "Use a scheduler that lowers the rate, or set a constant gamma"
        return Finding("warning", "gamma", "stays 1, since the rate never falls below max_lr: plain DSGD", advice)
    if largest < 0.1:
        message = f"at most {largest:.3g}: the workers hardly mix"
        advice = f"The largest rate is {max(lrs[begins:]):.3g}; max_lr = {config.max_lr} is far above it"
        return Finding("warning", "gamma", message, advice)
    vanished = sum(gamma < _VANISHED for gamma in active)
    if vanished > len(active) / 3:
        message = f"below 1e-6 in {vanished} of {len(active)} active steps: the workers train apart there"
        return Finding("warning", "gamma", message, "Lower power, set a floor, or start later than a long warm-up")
    return Finding("ok", "gamma", shown)

"""Findings from the facts of all processes: what should be equal is, what should differ does, and resources suffice.

Nothing here communicates: every function takes the facts of all processes, in order of rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from dsgdac_accel.doctor.facts import Facts
from dsgdac_accel.doctor.report import Finding, Level, named_workers, size_text

_MUST_AGREE = ("dsgdac_accel", "torch", "accelerate")
"""Versions that decide what is computed and sent; of the others, differences are worth a warning."""
_MOST_DIFFERENCES = 8
_ABSENT = "nothing"
_OWN_LAUNCHER = "dsgdac"
"""TORCHELASTIC_RUN_ID under `dsgdac launch`."""


def check_facts(facts: Sequence[Facts]) -> list[Finding]:
    """All findings that follow from facts alone."""
    return [
        *check_versions(facts),
        *check_settings(facts),
        *check_models(facts),
        *check_streams(facts),
        *check_devices(facts),
        *check_threads(facts),
        *check_launch(facts),
        *check_disks(facts),
    ]


def wrong_run(facts: Sequence[Facts]) -> list[Finding]:
    """Warnings and errors of the cheap subset, for the start of every run."""
    found = [*check_versions(facts), *check_settings(facts), *check_models(facts), *check_streams(facts)]
    return [finding for finding in found if finding.level != "ok"]


# ---- what must be equal


def check_versions(facts: Sequence[Facts]) -> list[Finding]:
    """The same packages everywhere."""
    findings = []
    for package, first in facts[0].versions.items():
        for version, ranks in _others(facts, lambda fact, name=package: fact.versions.get(name)):
            level: Level = "error" if package in _MUST_AGREE else "warning"
            findings.append(
                Finding(
                    level,
                    "versions",
                    f"{named_workers(ranks)}: {package} {version}, but worker 0: {package} {first}",
                    "Install the same versions for all workers",
                    ranks,
                )
            )
    if findings:
        return findings
    shown = ", ".join(f"{name} {version}" for name, version in facts[0].versions.items() if version != "not installed")
    return [Finding("ok", "versions", f"{shown}{_everywhere(facts)}")]


def check_settings(facts: Sequence[Facts]) -> list[Finding]:
    """The same configuration everywhere."""
    keys = list(dict.fromkeys(key for fact in facts for key in fact.settings))
    findings = []
    for key in keys:
        first = facts[0].settings.get(key, _ABSENT)
        for value, ranks in _others(facts, lambda fact, name=key: fact.settings.get(name, _ABSENT)):
            findings.append(
                Finding(
                    "error",
                    "configuration",
                    f"{named_workers(ranks)}: {key} = {value}, but worker 0: {key} = {first}",
                    "Start all workers with the same file and arguments",
                    ranks,
                )
            )
    if findings or not keys:
        return _shortened(findings)
    return [Finding("ok", "configuration", f"{len(keys)} settings{_everywhere(facts)}")]


def check_models(facts: Sequence[Facts]) -> list[Finding]:
    """The same parameters and buffers everywhere, and at the start the same values."""
    findings = []
    for model, ranks in _others(facts, lambda fact: fact.model):
        text = f"{named_workers(ranks)} and worker 0 have different models: "
        text += _first_difference(model, facts[0].model)
        findings.append(Finding("error", "model", text, "Build the same model on all workers", ranks))
    if findings or not facts[0].model:
        return findings
    for _, ranks in _others(facts, lambda fact: fact.start):
        findings.append(
            Finding(
                "error",
                "model",
                f"{named_workers(ranks)} and worker 0 start from different values",
                "Pass the model through `prepare`, and change nothing in it afterwards on some workers only",
                ranks,
            )
        )
    tensors = len(facts[0].model)
    equal = " and values" if facts[0].start is not None and len(facts) > 1 else ""
    return findings or [
        Finding("ok", "model", f"{tensors} parameters and buffers, the same names, shapes{equal}{_everywhere(facts)}")
    ]


def _first_difference(theirs: list[tuple], first: list[tuple]) -> str:
    for mine, other in zip(theirs, first, strict=False):
        if mine != other:
            return f"{_described(mine)} instead of {_described(other)}"
    return f"{len(theirs)} parameters and buffers instead of {len(first)}"


def _described(entry: tuple) -> str:
    name, shape, dtype, trained = entry
    return f"{name} {tuple(shape)} {dtype}{'' if trained else ', not trained'}"


# ---- what must differ


def check_streams(facts: Sequence[Facts]) -> list[Finding]:
    """Different random numbers for every worker, so that dropout and augmentation differ."""
    if not facts[0].streams:
        return []
    findings = []
    owners: dict[tuple[str, str], list[int]] = defaultdict(list)
    for fact in facts:
        for name, fingerprint in fact.streams.items():
            kind = "torch of its workers" if name.startswith("torch of") else name
            owners[kind, fingerprint].append(fact.rank)
    for (kind, _), ranks in owners.items():
        if len(ranks) > 1:
            findings.append(
                Finding(
                    "error" if kind.startswith("torch") else "warning",
                    "random streams",
                    f"{named_workers(sorted(set(ranks)))} draw the same random numbers ({kind}), so their dropout or "
                    f"augmentation is the same",
                    "Seed before `prepare`, alike on all workers; it then gives each a stream of its own",
                    tuple(sorted(set(ranks))),
                )
            )
    if findings or len(facts) == 1:
        return findings
    return [Finding("ok", "random streams", f"torch, NumPy and Python differ between all {len(facts)} processes")]


# ---- resources


def check_devices(facts: Sequence[Facts]) -> list[Finding]:
    """One GPU for each process, and no GPU left idle."""
    findings = []
    sharers: dict[str, list[int]] = defaultdict(list)
    for fact in facts:
        if fact.gpu is not None:
            sharers[fact.gpu].append(fact.rank)
    for gpu, ranks in sharers.items():
        if len(ranks) > 1:
            findings.append(
                Finding(
                    "error",
                    "GPU",
                    f"{named_workers(ranks)} share one GPU ({gpu}), which NCCL refuses",
                    "Launch one process per GPU and let it hold several workers: workers_per_process",
                    tuple(ranks),
                )
            )
    idle = tuple(fact.rank for fact in facts if fact.idle_gpu)
    if idle:
        findings.append(
            Finding(
                "warning",
                "GPU",
                f"{named_workers(idle)} compute on the CPU though a GPU is there",
                "Leave out cpu=True, ACCELERATE_USE_CPU and --cpu to use it",
                idle,
            )
        )
    kinds = {fact.device.split(":")[0] for fact in facts}
    if len(kinds) > 1:
        others = tuple(fact.rank for fact in facts if fact.device.split(":")[0] != facts[0].device.split(":")[0])
        findings.append(
            Finding(
                "error",
                "device",
                f"{named_workers(others)}: {facts[others[0]].device}, but worker 0: {facts[0].device}",
                "Train on the same kind of device everywhere",
                others,
            )
        )
    return findings


def check_threads(facts: Sequence[Facts]) -> list[Finding]:
    """Not more threads than cores on any machine."""
    findings = []
    for machine, here in _by_machine(facts).items():
        cores = min(len({core for fact in here for core in fact.cores}), max(fact.core_limit for fact in here))
        threads, each = sum(fact.threads for fact in here), here[0].threads
        ranks = tuple(fact.rank for fact in here)
        fitting = max(1, int(cores // len(here)))
        told = here[0].environment.get("OMP_NUM_THREADS")
        shown = f"{len(here)} process{'es' if len(here) > 1 else ''} of {each} thread{'s' if each > 1 else ''} on "
        shown += f"{cores:g} core{'s' if cores != 1 else ''} of {machine} (OMP_NUM_THREADS {told or 'not set'})"
        if threads > max(cores, len(here)):
            advice = f"Set OMP_NUM_THREADS={fitting}: threads that wait for each other's cores make every step slow"
            findings.append(Finding("warning", "threads", shown, advice, ranks))
        elif here[0].device == "cpu" and threads <= cores / 2:
            advice = f"OMP_NUM_THREADS={fitting} would use all cores"
            findings.append(Finding("warning", "threads", shown, advice, ranks))
        else:
            findings.append(Finding("ok", "threads", shown))
    return findings


def check_disks(facts: Sequence[Facts]) -> list[Finding]:
    """A folder that can be written, for every process; whether there is room is `check_room`'s."""
    findings = []
    for problem, ranks in _grouped(facts, lambda fact: fact.folder_problem):
        if problem is not None:
            text = f"{named_workers(ranks)}: {problem}"
            advice = "Choose another output folder, on a file system that all workers share"
            findings.append(Finding("error", "output folder", text, advice, ranks))
    return findings


def check_room(facts: Sequence[Facts], checkpoint_bytes: int) -> list[Finding]:
    """Room for the checkpoints of all workers: two that are kept and one that is being written."""
    measured = [fact for fact in facts if fact.free_bytes is not None]
    if not measured:
        return []
    least = min(measured, key=lambda fact: fact.free_bytes or 0)
    free = least.free_bytes or 0
    shown = f"{size_text(free)} free for the output folder; a checkpoint takes some {size_text(checkpoint_bytes)}"
    if free < 3 * checkpoint_bytes:
        advice = "Two that are kept and one being written need three times that: free some room or save elsewhere"
        return [Finding("warning", "disk", f"worker {least.rank}: {shown}", advice, (least.rank,))]
    return [Finding("ok", "disk", shown)]


# ---- the launch


def check_launch(facts: Sequence[Facts]) -> list[Finding]:
    """Whether the launcher's processes see each other, and what happens when one of them ends."""
    findings = []
    first = facts[0]
    announced = int(first.environment.get("WORLD_SIZE", "1"))
    if announced != len(facts):
        findings.append(
            Finding(
                "error",
                "launch",
                f"{announced} processes were launched (WORLD_SIZE) and {len(facts)} see each other, so each would "
                f"train alone",
                "On the CPU pass cpu=True or set ACCELERATE_USE_CPU=true, and launch with --multi_gpu (which starts "
                "CPU workers, too; --cpu starts one process) or with torchrun",
            )
        )
    if len(facts) == 1:
        return findings
    findings += [*_check_launcher(first), *_check_going_on(first)]
    if first.store == "TCPStore" and first.environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        findings.append(
            Finding(
                "warning",
                "rendezvous",
                "the store by which workers find each other lives in worker 0; if that is lost, nobody can say so",
                "Launch with torchrun or accelerate launch, whose agent keeps the store",
                (0,),
            )
        )
    return findings


def _check_launcher(first: Facts) -> list[Finding]:
    launcher = first.environment.get("TORCHELASTIC_RUN_ID")
    if launcher is None:
        return []
    if launcher == _OWN_LAUNCHER:
        text = "dsgdac launch: when a worker fails, the others are left alone; a run that failed is not started again"
        return [Finding("ok", "launcher", text)]
    restarts = first.environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    again = f"starts all again, up to {restarts} times" if restarts != "0" else "starts none again"
    advice = "" if restarts != "0" else "With --max_restarts and save_every a run goes on by itself"
    text = f"when a worker fails, the agent ends those of its machine (SIGTERM, after 30 s SIGKILL) and {again}"
    return [Finding("ok", "launcher", text, advice)]


def _check_going_on(first: Facts) -> list[Finding]:
    """`on_worker_loss: continue`, where it can keep its promise."""
    if first.settings.get("gossip.on_worker_loss") != "continue":
        return []
    text = "on_worker_loss = continue"
    if first.device.startswith("cuda"):
        advice = "Use stop, and go on from a checkpoint"
        return [Finding("error", "worker loss", f"{text} is for CPU workers (gloo), not for {first.device}", advice)]
    if first.environment.get("TORCHELASTIC_RUN_ID", _OWN_LAUNCHER) != _OWN_LAUNCHER:
        text += " has no effect here, because the agent ends the others of a machine when one fails"
        return [Finding("warning", "worker loss", text, "Launch with dsgdac launch -n N")]
    return [Finding("ok", "worker loss", f"{text}: the others go on without a lost one")]


def _by_machine(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    machines: dict[str, list[Facts]] = defaultdict(list)
    for fact in facts:
        machines[fact.machine].append(fact)
    return machines


def _everywhere(facts: Sequence[Facts]) -> str:
    return f" on all {len(facts)} processes" if len(facts) > 1 else ""


def _grouped(facts: Sequence[Facts], value_of: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Each distinct value with the ranks that have it, worker 0's first."""
    groups: list[tuple[Any, list[int]]] = []
    for fact in facts:
        value = value_of(fact)
        same = next((ranks for known, ranks in groups if known == value), None)
        if same is None:
            groups.append((value, [fact.rank]))
        else:
            same.append(fact.rank)
    return [(value, tuple(ranks)) for value, ranks in groups]


def _others(facts: Sequence[Facts], value_of: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """The values that are not worker 0's, with the ranks that have them."""
    return _grouped(facts, value_of)[1:]


def _shortened(findings: Iterable[Finding]) -> list[Finding]:
    listed = list(findings)
    if len(listed) <= _MOST_DIFFERENCES:
        return listed
    left = len(listed) - _MOST_DIFFERENCES
    return [*listed[:_MOST_DIFFERENCES], Finding("error", listed[0].subject, f".. and {left} more differences")]

"""Names of the variants of a benchmark, and the settings that they stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from dsgdac_accel import GossipConfig
from dsgdac_accel.checks import check_choice
from dsgdac_accel.core.formats import FORMATS

KINDS = ("local", "ddp", "decent_dp", "fsdp", "hsdp", "gossip")
SHARDED_KINDS = ("fsdp", "hsdp", "gossip")
"""The variants of workers of several processes; fsdp and hsdp are for nothing else."""
DECENT_TOPOLOGIES = ("ring", "one-peer-exp", "complete")
"""Topologies of the package decent-dp, by its own names."""
_COMM_DTYPES = tuple(FORMATS)
_EVERY = re.compile(r"every_([1-9]\d*)")
_OPTIONS = {
    "local": ("bytes",),
    "ddp": ("bf16",),
    "decent_dp": (),
    "fsdp": ("bytes",),
    "hsdp": (),
    "gossip": ("no_overlap", "mix_first", *_COMM_DTYPES, "every_<k>"),
}


@dataclass(frozen=True)
class VariantName:
    """KIND[:TOPOLOGY][+OPTION]...

    >>> VariantName.parse("gossip:complete+bf16")
    VariantName(kind='gossip', topology='complete', options=('bf16',))
    >>> VariantName.parse("gosip")
    Traceback (most recent call last):
    ValueError: variants must be one of local, ddp, decent_dp, fsdp, hsdp, gossip; got 'gosip'. Did you mean 'gossip'?
    """

    kind: str
    topology: str | None
    options: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> VariantName:
        """Read a name.

        Raises:
            ValueError: the kind, the topology or an option does not exist.
        """
        head, *options = text.split("+")
        kind, colon, topology = head.partition(":")
        check_choice("variants", kind, KINDS)
        if colon and kind == "decent_dp":
            check_choice(f"the topology of {text}", topology, DECENT_TOPOLOGIES)
        elif colon and kind == "gossip":
            GossipConfig(topology=topology)
        elif colon:
            raise ValueError(f"variants of kind {kind} have no topology; got {text!r}. Write {kind!r}.")
        for option in options:
            known = _OPTIONS[kind]
            if option not in known and not ("every_<k>" in known and _EVERY.fullmatch(option)):
                listed = ", ".join(known) or "none"
                raise ValueError(f"options of variants of kind {kind} are: {listed}; got {option!r} in {text!r}.")
        decided = [_decides(option) for option in options]
        if len(set(decided)) < len(decided):
            raise ValueError(f"options of a variant must not repeat or contradict each other; got {text!r}.")
        return cls(kind, topology if colon else None, tuple(options))

    def changes(self) -> dict[str, Any]:
        """The settings of `GossipConfig` that the name gives."""
        found: dict[str, Any] = {}
        if self.kind != "gossip":
            return found
        if self.topology is not None:
            found["topology"] = self.topology
        for option in self.options:
            if option == "no_overlap":
                found["overlap"] = False
            elif option == "mix_first":
                found["order"] = "mix_first"
            elif every := _EVERY.fullmatch(option):
                found["mix_every"] = int(every[1])
            elif option in _COMM_DTYPES:
                found["comm_dtype"] = option
        return found

    def settings(self, config: GossipConfig) -> GossipConfig:
        """`config` with the settings that the name gives."""
        return replace(config, **self.changes())


def _decides(option: str) -> str:
    """The setting that an option decides. A name has at most one option for each setting."""
    if option in _COMM_DTYPES:
        return "comm_dtype"
    return "mix_every" if _EVERY.fullmatch(option) else option

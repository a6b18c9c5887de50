"""Before the default process group exists: finding the other workers, after a restart too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from dsgdac_accel.distributed.launcher_protocol import RUN_ID, WAITING

_SCHEME = "dsgdac-restarted"


def announce_waiting() -> None:
    """Tell `dsgdac launch`, if it started this process, that this worker is about to wait for all others."""
    variables = os.environ
    if variables.get("TORCHELASTIC_RUN_ID") != RUN_ID or variables["WORLD_SIZE"] == "1":
        return
    with contextlib.suppress(RuntimeError):  # the process group, which needs the store, reports that it is gone
        address, port, patience = variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), timedelta(seconds=10)
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
        store.set(f"{WAITING}/{variables['RANK']}", "")


def init_method_after_restart() -> str | None:
    """The `init_method` with which restarted workers find each other; None where torch's default works.

    torchrun and `accelerate launch --max_restarts` keep the rendezvous store over restarts, with the addresses of the
    ended workers, to which the new ones would try to connect (seen in torch 2.13; pytorch issue 135712).

    Only on a single machine: launchers of several machines do not agree on the number of restarts.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1"
    if not kept or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    with contextlib.suppress(RuntimeError):  # registered already
        register_rendezvous_handler(_SCHEME, _rendezvous_under_prefix)
    return f"{_SCHEME}://"


def _rendezvous_under_prefix(url: str, **kwargs: Any) -> Iterator[tuple[PrefixStore, int, int]]:
    prefix = f"dsgdac_accel/restart/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    for store, rank, size in rendezvous(f"env{url.removeprefix(_SCHEME)}", **kwargs):
        yield PrefixStore(prefix, store), rank, size

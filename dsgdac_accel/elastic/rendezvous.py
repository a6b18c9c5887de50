"""Workers that a launcher has restarted meet again, and not those that were there before.

torchrun and `accelerate launch --max_restarts` keep the rendezvous store over restarts, with the addresses of the ended
workers in it, to which the new ones would try to connect (seen in torch 2.13; pytorch issue 135712).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

_SCHEME = "dsgdac-restarted"


def meeting_after_restart() -> str | None:
    """The `init_method` by which restarted workers meet; None where the usual one does.

    That of a single machine only: launchers of several machines do not agree on how often they have restarted.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1"
    if not kept or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    with contextlib.suppress(RuntimeError):  # registered already
        register_rendezvous_handler(_SCHEME, _meet)
    return f"{_SCHEME}://"


def _meet(url: str, **kwargs: Any) -> Iterator[tuple[PrefixStore, int, int]]:
    prefix = f"dsgdac_accel/restart/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    for store, rank, size in rendezvous(f"env{url.removeprefix(_SCHEME)}", **kwargs):
        yield PrefixStore(prefix, store), rank, size

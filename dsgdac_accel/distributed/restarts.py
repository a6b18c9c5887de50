"""Restarts by `torchrun --max-restarts`: how the workers that are started again find each other.

torchrun and `accelerate launch --max_restarts` may keep their rendezvous store over restarts, with the addresses of the
ended workers, to which the new ones would try to connect until a timeout (torch 2.13; pytorch issue 135712).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

logger = logging.getLogger(__name__)

_settled = False
"""Whether this process connects by `init_method_after_restart`, or was warned."""
_SCHEME = "dsgdac-restarted"
_WAY_OUT = (
    "workers that torchrun starts again would wait for the addresses of the ended ones. Start torchrun with "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone (on several machines --rdzv_backend=c10d), or without "
    "--max-restarts."
)


def init_method_after_restart() -> str | None:
    """Return the `init_method` with which restarted workers find each other; None where torch's default works.

    Raises:
        ValueError: restarted workers would not find each other. On several machines there is no such method, since
            their launchers do not agree on the number of restarts.
    """
    global _settled
    _settled = True
    if not _store_is_kept():
        return None
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        raise ValueError(_WAY_OUT)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    with contextlib.suppress(RuntimeError):  # registered already
        register_rendezvous_handler(_SCHEME, _rendezvous_under_prefix)
    return f"{_SCHEME}://"


def warn_of_restarts() -> None:
    """Warn once, on rank 0, if others have connected the processes, and restarted ones would not find each other.

    An error would only make torchrun restart them.
    """
    global _settled
    if _settled or not dist.is_initialized():
        return
    _settled = True
    if dist.get_rank() == 0 and _store_is_kept():
        logger.warning("%s", _WAY_OUT)


def _store_is_kept() -> bool:
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _rendezvous_under_prefix(url: str, **kwargs: Any) -> Iterator[tuple[PrefixStore, int, int]]:
    prefix = f"dsgdac_accel/restart/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    for store, rank, size in rendezvous(f"env{url.removeprefix(_SCHEME)}", **kwargs):
        yield PrefixStore(prefix, store), rank, size

"""The rendezvous store of a launch. The launcher of machine 0 keeps it, outside of the workers."""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import TCPStore

from dsgdac_accel.distributed.launcher_protocol import CONNECTED, DROPPED, WAITING
from dsgdac_accel.elastic.launch_plan import Launch, LaunchError

_LOST_EARLY = "dsgdac_launch/lost_early"  # a worker ended before all were connected, on whichever machine
_POLL_SECONDS = 0.05
_MACHINE_0_SECONDS = 300.0  # for the launcher of machine 0 to start
_SILENCE_SECONDS = 30.0  # a machine without a heartbeat for this long counts as lost


class LaunchStore:
    """What one launcher reads and writes in the store. Raises RuntimeError when the store is gone with machine 0.

    Args:
        plan: of the launch.
        interrupted: whether the launcher got a signal, which ends every wait here.

    Raises:
        LaunchError: the port is taken, machine 0 does not answer, or the machines were given different plans.
        KeyboardInterrupt: interrupted.
    """

    def __init__(self, plan: Launch, interrupted: Callable[[], bool]) -> None:
        self.plan = plan
        self._interrupted = interrupted
        self._lost_early_looks = 0  # looks in a row at which workers waited for one that has ended
        host, self.port = plan.host_and_port
        descriptor: int | None = None
        if plan.machine_index == 0:
            try:
                # Reachable from elsewhere only if there are other machines.
                server = socket.create_server(("" if plan.machines > 1 else host, self.port))
            except OSError as error:
                raise LaunchError(
                    f"port {self.port} cannot be used ({error.strerror}): give another address."
                ) from None
            self.port = server.getsockname()[1]
            descriptor = server.detach()
            host = "127.0.0.1" if plan.machines > 1 else host
        else:
            self._await_machine_0(host)
        self._store = TCPStore(
            host,
            self.port,
            is_master=descriptor is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=10),
            master_listen_fd=descriptor,
        )
        if plan.machines > 1:
            self._require_same_plan()

    def _await_machine_0(self, host: str) -> None:
        deadline = time.monotonic() + _MACHINE_0_SECONDS
        while not self._interrupted():
            try:
                socket.create_connection((host, self.port), timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"no launcher of machine 0 answered at {host}:{self.port} within {_MACHINE_0_SECONDS:g} s "
                        f"({error}). Start it, or correct the address."
                    ) from None
            time.sleep(1)
        raise KeyboardInterrupt

    def _require_same_plan(self) -> None:
        plan = self.plan
        mine, shape = uuid.uuid4().hex, f"{plan.machines} machines with {plan.workers} workers each"
        first = self._store.compare_set("dsgdac_launch/shape", "", shape).decode()
        if first != shape:
            raise LaunchError(f"machine {plan.machine_index} was given {shape}, and another one {first}.")
        if self._store.compare_set(f"dsgdac_launch/machine/{plan.machine_index}", "", mine).decode() != mine:
            raise LaunchError(f"machine index {plan.machine_index} is taken: give each machine its own.")

    def beat(self) -> None:
        """Show the launcher of machine 0 that this machine is there."""
        if self.plan.machines > 1:
            self._store.add(f"dsgdac_launch/beats/{self.plan.machine_index}", 1)

    def was_dropped(self, rank: int) -> bool:
        """Whether the other workers continue without this one."""
        return self._store.check([f"{DROPPED}/{rank}"])

    def lost_early(self, living: Sequence[int]) -> bool:
        """Whether a worker has ended before all were connected, and some of the `living` wait for it.

        Two looks in a row have to find it so, since the workers may just be connecting.
        """
        early = len(living) < self.plan.workers or self._store.check([_LOST_EARLY])
        waiting = early and any(self._store.check([f"{WAITING}/{rank}"]) for rank in living)
        if not waiting or self._store.check([CONNECTED]):
            self._lost_early_looks = 0
            return False
        self._lost_early_looks += 1
        if self._lost_early_looks < 2:
            return False
        self._store.set(_LOST_EARLY, "")
        return True

    def leave(self) -> None:
        """Say that this machine is done. Machine 0 keeps the store until the others are done or silent."""
        plan = self.plan
        if plan.machines == 1:
            return
        with contextlib.suppress(RuntimeError):
            if plan.machine_index:
                self._store.set(f"dsgdac_launch/done/{plan.machine_index}", "")
                return
            seen = {other: (-1, time.monotonic()) for other in range(1, plan.machines)}
            while seen and not self._interrupted():
                for other, (beats, since) in list(seen.items()):
                    now = self._store.add(f"dsgdac_launch/beats/{other}", 0)
                    if now != beats:
                        seen[other] = (now, time.monotonic())
                    done = self._store.check([f"dsgdac_launch/done/{other}"])
                    if done or time.monotonic() - since > _SILENCE_SECONDS:
                        del seen[other]
                time.sleep(_POLL_SECONDS)

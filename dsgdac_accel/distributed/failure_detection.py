"""Recognizes a lost worker in an error of the transport, and finds out which worker it is."""

from __future__ import annotations

import dis
import re
from dataclasses import dataclass

import torch.distributed as dist

from dsgdac_accel.distributed.failure_reports import FailureReports
from dsgdac_accel.distributed.members import Members

_PLACES_IN_GLOO = re.compile(r"gloo/(transport|rendezvous)/\S+:\d+\]|monitoredBarrier")
_OWN_MISTAKES = re.compile(
    r"\bnccl(InvalidUsage|InvalidArgument|UnhandledCudaError)\b"
    r"|Unable to find (address|interface)"  # gloo, with a wrong GLOO_SOCKET_IFNAME
)
_RAISE = dis.opmap["RAISE_VARARGS"]
_MOST_CHARACTERS = 500  # of a cause


class WorkerLostError(RuntimeError):
    """Another worker did not answer: it was killed, raised an error, hangs, or ran out of data."""


@dataclass(frozen=True)
class Failure:
    """A communication that failed because of another worker."""

    what: str
    """The communication and its step, as in "the exchange of step 4"."""
    cause: str
    """The transport's own words."""
    peer: int | None = None
    """Rank of the only other worker in it, if there is only one."""

    @property
    def is_silence(self) -> bool:
        """Whether the other worker did not answer in time, as opposed to a broken connection."""
        return "timed out" in self.cause.lower() or "failed to pass" in self.cause


class FailureDetector:
    """Turns transport errors into a `WorkerLostError` that names the worker and the step.

    Args:
        members: all workers; only read here.
        timeout: seconds after which a silent worker counts as lost.
    """

    def __init__(self, members: Members, timeout: float) -> None:
        self.members = members
        self.timeout = timeout
        self.reports = FailureReports(members)

    def failure_in(self, error: RuntimeError, what: str, step: int, peer: int | None = None) -> Failure | None:
        """The failure that an error shows; None if it is not the transport's, or blames this very process.

        Arguments as in `WorkerGroup.guarded`. `step`, the optimizer steps taken so far, is added to `what` unless it
        names one.
        """
        if not _is_of_transport(error):
            return None
        # Whose fault it is stands in the text alone: torch has one type for all errors of NCCL.
        if _OWN_MISTAKES.search(str(error)):
            self.reports.write(f"{self.members.me} failed in {what}: {short_cause(error)}")
            return None
        return Failure(at_step(what, step), short_cause(error), peer)

    def worker_lost(self, failure: Failure) -> WorkerLostError:
        """The error for this worker. Takes a few seconds where the lost worker has to be found by a roll call."""
        blamed, silent_only = self._blamed(failure)
        silent = failure.is_silence and not any(self.reports.is_alive(worker) is False for worker in blamed)
        lost = "were lost" if len(blamed) > 1 else "was lost"
        happened = f"did not answer within {self.timeout:g} s" if silent else lost
        who = self.members.named(blamed) if blamed else f"a {self.members.noun}"
        if silent_only and not blamed:  # the others may just not have noticed the loss yet
            one_of, do = ("one of ", "do") if len(silent_only) > 1 else ("", "does")
            who = f"{one_of}{self.members.named(silent_only)}, which {do} not answer,"
        me, seen, peer = self.members.me, f"{who} {happened} in {failure.what}", failure.peer
        mine = f"{seen}, as {me} saw it"
        first = self.reports.write(mine)
        news = "" if first == mine else f" First report of this run: {first}."
        if peer is not None and not first.endswith(f"as {self.members.named([peer])} saw it"):
            # The peer may itself have waited in vain for another worker, which is then to blame.
            reported = self.reports.of(peer)
            news += (
                f" {self.members.named([peer]).capitalize()} reports: {reported}."
                if reported not in (None, first)
                else ""
            )
        return WorkerLostError(f"{me}: {seen} ({failure.cause}).{news} {_advice(failure, silent)}")

    def _blamed(self, failure: Failure) -> tuple[list[int], list[int]]:
        """Ranks of the workers that are to blame, and of those that only do not answer and may be alive."""
        named = re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", failure.cause)
        if named:
            return [int(rank) for rank in re.findall(r"[0-9]+", named[1])], []
        if failure.peer is not None:
            return [failure.peer], []
        if self.reports.first():
            return [], []
        gone, silent = self.reports.missing()
        return (sorted(gone + silent), []) if failure.is_silence else (gone, silent)


def _advice(failure: Failure, silent: bool) -> str:
    if silent and "checkpoint" in failure.what:
        return (
            "Call `save_state` and `load_state` on all workers, not on rank 0 alone. If all of them do, look at that "
            "worker's own output, and raise `timeout` if it was only slow."
        )
    advice = "Look at that worker's own output for its error"
    if "checkpoint" in failure.what:
        advice += "; without one, it ended early: call `save_state` and `load_state` on all workers"
    if failure.what.startswith(("averaging the workers", "gathering the whole model")):
        advice += ", and enter `deployed_model`, `save_model` and evaluation on all workers, `get_state_dict` included"
    if silent:
        advice += (
            "; if it was slow, raise `timeout`, if it ran out of data, pass its loader through `prepare` or "
            "`equal_steps`, and if it left out an `optimizer.step()`, let it take every step"
        )
    return f"{advice}."


def _is_of_transport(error: BaseException) -> bool:
    """Return whether torch's type says so, or where it was raised: in the C++ of gloo, whose errors have no type."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    # C++ raises in a call. Python raises in a `raise`, also with gloo's words: a DataLoader does for its workers.
    in_cpp = traceback is not None and traceback.tb_frame.f_code.co_code[traceback.tb_lasti] != _RAISE
    return isinstance(error, dist.DistError) or (in_cpp and _PLACES_IN_GLOO.search(str(error)) is not None)


def at_step(what: str, step: int) -> str:
    """Return `what`, the name of a communication, with the optimizer steps taken so far unless it names a step."""
    return what if re.search(r"step \d", what) else f"{what} at step {step}"


def short_cause(error: BaseException) -> str:
    """The first sentence of a transport error, without the place in its source, and NCCL's last error."""
    first, *others = str(error).split("\n")
    cause = re.sub(r"^\[\S+\] ", "", first).split(". This is typically")[0]
    lines = [line.strip() for line in others]
    if "Last error:" in lines:  # what happened stands below it; above it is only the kind of error
        last = " ".join(filter(None, lines[lines.index("Last error:") + 1 :]))
        cause = f"{cause}: {last}" if last else cause
    return cause if len(cause) <= _MOST_CHARACTERS else f"{cause[:_MOST_CHARACTERS]}..."

"""What a worker does that the others have given up, and what becomes of an estimate in flight, without workers."""

from concurrent.futures import Future

import pytest
import torch

from dsgdac_accel import WorkerGroup
from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.core.sketch import RadiusEstimate
from dsgdac_accel.distributed.failure_detection import Failure, WorkerLostError
from dsgdac_accel.elastic import recovery
from dsgdac_accel.elastic.heartbeat import Heartbeat


@pytest.fixture
def group():
    return WorkerGroup(torch.device("cpu"), 3.0)


def test_a_worker_that_the_others_dropped_ends_by_an_error(group, monkeypatch):
    monkeypatch.setattr(recovery, "agree", lambda *_: None)
    policy = recovery.ContinueWithSurvivors(group)
    with pytest.raises(WorkerLostError, match=r"the others continue without this worker.*raise `timeout`"):
        policy._agree(Failure("the exchange of step 3", "a timeout", 1), {}, [], Heartbeat(None, 0))


def test_a_sketch_that_does_not_arrive_is_no_estimate(group):
    estimate = RadiusEstimate(group, 8)

    def fail(*_):
        raise RuntimeError("Connection closed by peer")

    estimate._gather = fail
    assert estimate._estimate(object(), HostCopy(torch.ones(1, 4)), 3) is None


def test_estimates_in_flight_end_with_the_connections(group):
    estimate = RadiusEstimate(group, 8)
    given_up: Future = Future()
    given_up.cancel()
    estimate._under_way.append(given_up)
    estimate.abandon()
    assert estimate.latest is None

"""What a worker does that the others have given up, without workers."""

import pytest
import torch

from dsgdac_accel import WorkerGroup
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

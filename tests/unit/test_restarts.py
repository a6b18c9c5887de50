"""How restarted workers find each other, by the variables that torchrun sets."""

import pytest
import torch.distributed as dist

from dsgdac_accel import GossipAccelerator
from dsgdac_accel.distributed.restarts import init_method_after_restart, warn_of_restarts

RESTARTED = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GROUP_WORLD_SIZE": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


@pytest.fixture
def restarted(monkeypatch):
    for name, value in RESTARTED.items():
        monkeypatch.setenv(name, value)
    return monkeypatch.setenv


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "dsgdac-restarted://"),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, None),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, None),  # by TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
        ({"TORCHELASTIC_MAX_RESTARTS": "0", "GROUP_WORLD_SIZE": "2"}, None),
    ],
)
def test_restarted_workers_of_one_machine_use_a_prefix_of_their_own(restarted, changes, expected):
    for name, value in changes.items():
        restarted(name, value)
    assert init_method_after_restart() == expected


def test_machines_that_would_not_meet_again_are_refused_before_they_connect(restarted):
    restarted("GROUP_WORLD_SIZE", "2")  # machines do not agree on how often they have restarted
    with pytest.raises(ValueError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        GossipAccelerator(cpu=True)


@pytest.mark.parametrize(("rank", "kept"), [(0, "True"), (1, "True"), (0, "False")])
def test_the_first_of_connected_processes_warns(restarted, monkeypatch, caplog, rank, kept):
    restarted("TORCHELASTIC_USE_AGENT_STORE", kept)
    warn_of_restarts()  # not connected
    assert not caplog.records
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    warn_of_restarts()
    assert ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in record.message for record in caplog.records] == (
        [True] if (rank, kept) == (0, "True") else []
    )


def test_auto_needs_automatic_names():
    with pytest.raises(ValueError, match=r"'auto'.*automatic_checkpoint_naming=True"):
        GossipAccelerator(cpu=True).load_state("auto")

"""How restarted workers find each other, by the variables that torchrun sets."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration

from dsgdac_accel import CheckpointError, GossipAccelerator
from dsgdac_accel.checkpoint.serialization import FORMAT
from dsgdac_accel.distributed import restarts
from dsgdac_accel.distributed.restarts import init_method_after_restart, warn_of_restarts

RESTARTED = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GROUP_WORLD_SIZE": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


@pytest.fixture
def restarted(monkeypatch):
    monkeypatch.setattr(restarts, "_settled", False)
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


def test_a_timeout_of_the_scripts_own_changes_nothing(restarted, monkeypatch):
    seen = []
    monkeypatch.setattr(PartialState, "__init__", lambda self, *args, **options: seen.append(options) or 1 / 0)
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=9))
    with pytest.raises(ZeroDivisionError):
        GossipAccelerator(cpu=True, kwargs_handlers=[handler])
    assert seen[0]["init_method"] == "dsgdac-restarted://"
    assert seen[0]["timeout"] == timedelta(seconds=9)


def test_processes_that_the_script_has_connected_by_itself_are_warned_of_and_not_refused(
    restarted, monkeypatch, caplog
):
    PartialState(cpu=True)
    restarted("GROUP_WORLD_SIZE", "2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        GossipAccelerator(cpu=True)
        GossipAccelerator(cpu=True)
    finally:
        dist.destroy_process_group()
    warned = [record for record in caplog.records if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in record.message]
    assert len(warned) == 1


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


def test_auto_does_not_take_unreadable_checkpoints_for_none(tmp_path):
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
    accelerator = GossipAccelerator(cpu=True, project_config=project)
    assert accelerator.load_state("auto") is None
    folder = accelerator.save_state()
    manifest = folder / "gossip.json"
    manifest.write_text(manifest.read_text().replace(f'"format": {FORMAT}', '"format": 5'))
    with pytest.raises(CheckpointError, match="has format 5"):
        GossipAccelerator(cpu=True, project_config=project).load_state("auto")

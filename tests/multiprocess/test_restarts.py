"""`torchrun --max-restarts` after a killed worker: the run resumes by itself, and ends as the unbroken one does."""

import random

import numpy
import pytest
import torch

from dsgdac_accel.checkpoint import load_worker, newest_checkpoint
from tests.launching import ROOT, finish, free_port, start, torchrun
from tests.multiprocess.test_engines import file_of, in_this_python

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(600)]

KILLER = """
import os, runpy, signal, sys
from dsgdac_accel.core.mixer import Mixer
really = Mixer.add
def add(self, updates):
    really(self, updates)
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first and self.step == int(os.environ["KILL_AT"]) and os.environ["RANK"] == os.environ["VICTIM"]:
        open("killed", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
Mixer.add = add
script, sys.argv = sys.argv[1], sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""

KILLER_OF_A_NODE = """
import os, runpy, signal, sys
from pathlib import Path
import torch
from dsgdac_accel import GossipAccelerator
from dsgdac_accel.checkpoint import load_worker, read_manifest
from dsgdac_accel.core.mixer import Mixer
really, load = Mixer.add, GossipAccelerator.load_state
def add(self, updates):
    really(self, updates)
    if self.step == int(os.environ.get("KILL_AT", -1)) and os.environ["LOCAL_RANK"] == "0":
        agent = os.getppid()
        workers = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        for process in [agent, *map(int, workers)]:
            os.kill(process, signal.SIGKILL)
def load_state(self, *args):
    folder = load(self, *args)
    if folder is not None:
        states = [load_worker(folder, rank)["models"][0]["parameters"] for rank in range(read_manifest(folder).workers)]
        for name, parameter in self.unwrap_model(self._models[0]).named_parameters():
            mean = torch.stack([state[name].double() for state in states]).mean(0)
            assert (parameter - mean).abs().max() < 1e-7, name
            assert not any(torch.equal(state[name], states[0][name]) for state in states[1:]), name  # they were apart
        print(f"worker {self.process_index} of {self.num_workers} starts at the average of {len(states)}", flush=True)
    return folder
Mixer.add, GossipAccelerator.load_state = add, load_state
script, sys.argv = sys.argv[1], sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""

TRAINER = """
import sys
import torch
from transformers import Trainer, TrainingArguments
from dsgdac_accel import GossipCallback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))

    def forward(self, x, labels):
        scores = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}

torch.manual_seed(0)
rows = [{"x": torch.randn(8), "labels": number % 4} for number in range(128)]
arguments = TrainingArguments(
    sys.argv[1], num_train_epochs=5, per_device_train_batch_size=4, learning_rate=0.1, optim="sgd",
    save_steps=16, save_total_limit=2, report_to=[], use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(Model(), arguments, train_dataset=rows, callbacks=[GossipCallback()])
trainer.train(resume_from_checkpoint="auto")
"""

TASK = """
gossip: {log_every: 3, start_epoch: 1, timeout: 30}
data: {train_limit: 400}
model: mlp
dropout: 0
num_train_epochs: 8
global_batch_size: 40
warmup_epochs: 1
save_steps: 10
report_to: []
"""

STEPS = 80  # of each of the three runs, about
RUNS = {
    "script": ("train.py {} 3", "checkpoints"),
    "trainer": ("trainer.py {}", "."),
    "task": (f"{ROOT}/tasks/cifar.py --config settings.yaml --output_dir {{}}", "checkpoints"),
}


KEPT = ("models", "optimizers", "schedulers", "gossip", "random")


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return numpy.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "killer.py").write_text(KILLER)
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "train.py").write_text(file_of("train.py"))
    (tmp_path / "settings.yaml").write_text(TASK)
    return tmp_path


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_that_torchrun_restarts_after_a_killed_worker_ends_as_the_unbroken_one(folder, kind):
    chance = random.SystemRandom()
    step, victim = chance.randrange(1, STEPS), chance.randrange(2)
    command, checkpoints = RUNS[kind]
    variables = in_this_python(KILL_AT=str(step), VICTIM=str(victim))
    documented = file_of("restarts.sh")
    ends = []
    for name, script in (("whole", ""), ("broken", "killer.py ")):
        line = documented.replace("train.py runs/safe 3", script + command.format(name))
        assert line != documented
        status, out, err = finish(start(["bash", "-c", line], folder, **variables), 200)
        assert status == 0, f"worker {victim} was killed after step {step}\n{out}\n{err}"
        ends.append(newest_checkpoint(folder / name / checkpoints))
    told = f"worker {victim} was killed after step {step}\n{out}\n{err}"
    assert (folder / "killed").exists(), told  # the launcher names the first that it sees end: either worker
    assert ends[0].name == ends[1].name, told
    for rank in range(2):
        one, other = (load_worker(end, rank) for end in ends)
        assert [key for key in KEPT if not same(one[key], other[key])] == [], told


def test_a_run_that_loses_a_node_goes_on_from_the_average_with_the_workers_that_are_left(folder):
    (folder / "killer.py").write_text(KILLER_OF_A_NODE)
    script = folder / "train.py"
    script.write_text(script.read_text().replace("power=3", "power=3, on_other_worker_count='deployed', timeout=30"))
    step = random.SystemRandom().randrange(30, 80)  # after the first of four passes of 15 steps
    variables = in_this_python(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    endpoint = f"localhost:{free_port()}"

    def node(is_host, **more):
        launcher = [
            *torchrun(2)[:-3], "--nnodes=1:2", "--nproc_per_node=2", "--max-restarts=2", "--rdzv_backend=c10d",
            f"--rdzv_endpoint={endpoint}", f"--rdzv_conf=is_host={is_host},last_call_timeout=20",
        ]  # fmt: skip
        return start([*launcher, "killer.py", "train.py", "run", "6"], folder, **variables, **more)

    stays, dies = node(1), node(0, KILL_AT=str(step))
    status, out, err = finish(stays, 300)
    told = f"killed after step {step}\n{out}\n{err}\n{finish(dies, 30)}"
    assert status == 0, told
    for rank in range(2):
        assert f"worker {rank} of 2 starts at the average of 4" in out, told
    assert "2 workers: accuracy" in out, told

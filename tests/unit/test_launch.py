"""`dsgdac launch` with real launchers, and workers that mostly do not import torch."""

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from dsgdac_accel.cli import main
from dsgdac_accel.distributed.launcher_protocol import CONNECTED, DROPPED, EXIT_STOPPED, WAITING
from dsgdac_accel.distributed.rendezvous import init_method_after_restart
from dsgdac_accel.elastic import launch as launcher
from dsgdac_accel.elastic.worker_process import Worker
from tests.workers import fork

BEGIN = """
import glob, os, signal, sys, time

rank = int(os.environ["RANK"])

def say(*words):  # in one piece; `print` writes word by word
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def sign(number=rank, process=os.getpid()):
    with open(f"here{number}", "w") as file:
        file.write(str(process))

def await_end(other):  # of a worker that has signed, as the launcher sees it
    while not (os.path.exists(f"here{other}") and (process := open(f"here{other}").read())):
        time.sleep(0.01)
    while os.path.exists(f"/proc/{process}"):
        time.sleep(0.01)

def await_death(other):  # of a worker that has signed, whether or not the launcher has seen it
    while not (os.path.exists(f"here{other}") and (process := open(f"here{other}").read())):
        time.sleep(0.01)
    while os.path.exists(f"/proc/{process}") and " Z " not in open(f"/proc/{process}/stat").read():
        time.sleep(0.01)

"""
HANG = "signal.signal(signal.SIGTERM, signal.SIG_IGN); sign(); time.sleep(60)"
AWAIT_OTHERS = "while len(glob.glob('here*')) < {}: time.sleep(0.01)"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


class Command:
    """`dsgdac launch WORDS`, or `launch(**plan)`, in a forked process."""

    def __init__(self, folder, *words, script=None, plan=None, **variables):
        self.output = folder / f"output{time.monotonic_ns()}"
        self.folder = folder
        if script is not None:
            (folder / "script.py").write_text(BEGIN + textwrap.dedent(script))
        self.process = fork(_launch, ["launch", *map(str, words)], str(folder), str(self.output), variables, plan)

    def end(self, seconds=30):
        """Its exit status and everything that was printed."""
        self.process.join(seconds)
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
            pytest.fail(f"still running after {seconds} s\n{self.output.read_text()}")
        return self.process.exitcode, self.output.read_text()

    def await_output(self, words):
        """Wait until this has been printed."""
        deadline = time.monotonic() + 20
        while not (self.output.exists() and words in self.output.read_text()):
            assert time.monotonic() < deadline, f"{words!r} was not printed"
            time.sleep(0.01)

    def await_workers(self, *ranks):
        """Wait until these workers have signed, and return their process ids."""
        return [int(appeared(self.folder / f"here{rank}")) for rank in ranks]


def _launch(words, folder, output, variables, plan):
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for name in ("OMP_NUM_THREADS", "ACCELERATE_USE_CPU"):
        os.environ.pop(name, None)
    launcher.STOP_SECONDS = float(variables.pop("STOP_SECONDS", launcher.STOP_SECONDS))
    launcher._POLL_SECONDS = float(variables.pop("POLL_SECONDS", launcher._POLL_SECONDS))
    launcher._GRACE_SECONDS = float(variables.pop("GRACE_SECONDS", launcher._GRACE_SECONDS))
    os.environ.update(variables)
    try:
        status = launcher.launch(**plan) if plan else main(words)
    except SystemExit as end:
        status = end.code
    sys.stdout.flush()
    os._exit(status)


def run(folder, *words, **options):
    return Command(folder, *words, **options).end()


def appeared(file, seconds=20):
    deadline = time.monotonic() + seconds
    while not (file.exists() and (text := file.read_text())):
        assert time.monotonic() < deadline, f"{file.name} did not appear"
        time.sleep(0.01)
    return text


def is_gone(process, seconds=5):
    """Whether this process has ended; a zombie has."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


# ---- the environment of workers


NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS",
)  # fmt: skip
SHOW = f"say(*[os.environ[name] for name in {NAMES}], *sys.argv[1:])"


def test_workers_get_their_ranks_and_the_arguments_after_the_script(tmp_path):
    stale = {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "7"}  # of an outer launch
    status, out = run(tmp_path, "-n", 2, "script.py", "--n", "3", "-m", script=SHOW, **stale)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    expected = [f"{rank} {rank} 2 2 127.0.0.1 True 0 {threads} --n 3 -m" for rank in (0, 1)]
    assert (status, sorted(out.splitlines())) == (0, expected)


def test_a_number_of_threads_that_is_set_stays(tmp_path):
    status, out = run(tmp_path, "-n", 1, "script.py", script=SHOW, OMP_NUM_THREADS="3")
    assert (status, out) == (0, "0 0 1 1 127.0.0.1 True 0 3\n")


def test_a_module_is_launched_by_name(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__package__, *sys.argv[1:])")
    assert run(tmp_path, "-n", 1, "-m", "package.train", "--epochs", 2) == (0, "package --epochs 2\n")


# ---- failures


def test_the_others_continue_when_a_worker_is_lost(tmp_path):
    script = f"""
        if rank == 0:
            {KILLED}
        while not os.path.exists("go"):
            time.sleep(0.01)
        say("finished", rank)
        """
    command = Command(tmp_path, "-n", 3, "script.py", script=script)
    command.await_output("2 of 3 still run")
    (tmp_path / "go").write_text("")
    status, out = command.end()
    assert status == 0
    assert {"finished 1", "finished 2"} < set(out.splitlines())
    assert "worker 0 was ended by SIGKILL; 2 of 3 still run" in out
    assert out.endswith("finished without worker 0\n")


@pytest.mark.parametrize(("first", "status"), [("sys.exit(5)", 5), (KILLED, 128 + 9), ("sys.exit(75)", 75)])
def test_the_exit_status_is_that_of_the_first_failure_if_the_last_worker_fails_too(tmp_path, first, status):
    script = f"""
        if rank == 1:
            sign()
            {first}
        await_end(1)
        sys.exit(6)
        """
    assert run(tmp_path, "-n", 2, "script.py", script=script)[0] == status


@pytest.mark.parametrize(
    ("first", "last", "status"),
    [
        (KILLED, 6, 128 + 9),
        pytest.param("sys.exit(5)", 0, 0, marks=pytest.mark.slow),
        pytest.param("sys.exit(5)", EXIT_STOPPED, EXIT_STOPPED, marks=pytest.mark.slow),
    ],
)
def test_of_workers_found_ended_at_once_a_killed_one_is_the_cause_and_the_best_one_counts(
    tmp_path, first, last, status
):
    script = f"""
        if rank == 1:
            sign()
            {first}
        await_death(1)
        sys.exit({last})
        """
    assert run(tmp_path, "-n", 2, "script.py", script=script, POLL_SECONDS="1")[0] == status


def test_the_exit_status_shows_that_survivors_were_stopped_by_a_signal(tmp_path):
    script = f"""
        if rank == 1:
            sign()
            {KILLED}
        await_end(1)
        sys.exit({EXIT_STOPPED})
        """
    assert run(tmp_path, "-n", 3, "script.py", script=script)[0] == EXIT_STOPPED


def test_a_worker_that_fails_last_makes_the_run_fail(tmp_path):
    script = "sign() if rank == 0 else await_end(0); sys.exit(3 * rank)"
    status, out = run(tmp_path, "-n", 2, "script.py", script=script)
    assert (status, "worker 1 ended with status 3" in out) == (3, True)
    assert "finished without" not in out


def test_stop_on_failure_ends_the_others_even_if_they_ignore_sigterm(tmp_path):
    script = f"""
        if rank != 1:
            {HANG}
        {AWAIT_OTHERS.format(2)}
        sys.exit(5)
        """
    plan = {"command": ["script.py"], "workers": 3, "stop_on_failure": True}
    command = Command(tmp_path, script=script, plan=plan, GRACE_SECONDS="0.3")
    assert command.end()[0] == 5
    assert all(is_gone(process) for process in command.await_workers(0, 2))


def test_status_2_of_one_worker_ends_all_with_one_report(tmp_path):
    script = """
        with open("starts", "a") as starts:
            starts.write("x")
        if rank == 1:
            while len(open("starts").read()) < 2:
                time.sleep(0.01)
            sys.exit(2)
        time.sleep(60)
        """
    status, out = run(tmp_path, "-n", 2, "script.py", script=script)
    assert (status, out) == (2, "dsgdac launch: worker 1 ended with status 2\n")
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_hanging_worker_that_the_others_dropped_is_killed(tmp_path):
    script = f"""
        if rank == 1:
            {HANG}
        {AWAIT_OTHERS.format(1)}
        open("port", "w").write(os.environ["MASTER_PORT"])
        while not os.path.exists("dropped"):
            time.sleep(0.01)
        """
    command = Command(tmp_path, "-n", 2, "script.py", script=script)
    store = TCPStore("127.0.0.1", int(appeared(tmp_path / "port")), is_master=False)
    store.set(f"{DROPPED}/1", "")
    assert is_gone(*command.await_workers(1))
    (tmp_path / "dropped").write_text("")
    status, out = command.end()
    assert (status, "worker 1 was ended by SIGKILL" in out, "finished without worker 1" in out) == (0, True, True)


@pytest.mark.parametrize("connected", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_worker_that_ends_before_all_are_connected_ends_those_that_wait_for_it(tmp_path, connected):
    script = """
        if rank == 0:
            open("port", "w").write(os.environ["MASTER_PORT"])
        while not os.path.exists("go"):
            time.sleep(0.01)
        if rank == 1:
            sys.exit(3)
        time.sleep(60 if sys.argv[1] == "False" else 3)
        """
    command = Command(tmp_path, "-n", 3, "script.py", connected, script=script)
    store = TCPStore("127.0.0.1", int(appeared(tmp_path / "port")), is_master=False)
    store.set(f"{WAITING}/2", "")
    if connected:
        store.set(CONNECTED, "")
    (tmp_path / "go").write_text("")
    status, out = command.end()
    assert (status, "ended before all were connected" in out, "finished without worker 1" in out) == (
        0 if connected else 3,
        not connected,
        connected,
    )


@pytest.mark.slow
def test_accelerators_do_not_wait_for_a_worker_that_failed_to_start(tmp_path):
    script = """
        if rank == 1:
            sys.exit(3)
        from dsgdac_accel import GossipAccelerator
        GossipAccelerator()
        """
    status, out = run(tmp_path, "-n", 2, "script.py", script=script)
    assert (status, "worker 1 ended with status 3" in out, "ended before all were connected" in out) == (3, True, True)


# ---- signals, and processes left behind


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_reaches_all_workers(tmp_path, name):
    script = f"""
        signal.signal(signal.{name}, lambda *_: sys.exit({EXIT_STOPPED}))
        sign()
        time.sleep(60)
        """
    command = Command(tmp_path, "-n", 2, "script.py", script=script)
    command.await_workers(0, 1)
    os.kill(command.process.pid, signal.Signals[name])
    status, out = command.end()
    assert status == EXIT_STOPPED == 75
    assert f"{name} goes to all workers" in out
    assert out.count("was stopped by a signal and has saved (status 75)") == 2


def test_a_second_interrupt_kills_workers_that_ignore_it(tmp_path):
    script = f"signal.signal(signal.SIGINT, signal.SIG_IGN); {HANG}"
    command = Command(tmp_path, "-n", 2, "script.py", script=script)
    processes = command.await_workers(0, 1)
    os.kill(command.process.pid, signal.SIGINT)
    command.await_output("SIGINT goes to all workers")
    assert not any(is_gone(process, seconds=0.2) for process in processes)
    os.kill(command.process.pid, signal.SIGINT)
    assert command.end()[0] == 128 + 9
    assert all(is_gone(process) for process in processes)


def test_workers_that_do_not_end_in_time_after_sigterm_are_killed(tmp_path):
    command = Command(tmp_path, "-n", 2, "script.py", script=HANG, STOP_SECONDS="1")
    processes = command.await_workers(0, 1)
    os.kill(command.process.pid, signal.SIGTERM)
    assert command.end()[0] == 128 + 9
    assert all(is_gone(process) for process in processes)


def test_workers_and_their_processes_end_when_the_launcher_is_killed(tmp_path):
    script = f"""
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        sign(2 + rank, child.pid)
        {HANG}
        """
    command = Command(tmp_path, "-n", 2, "script.py", script=script)
    processes = command.await_workers(0, 1, 2, 3)
    os.kill(command.process.pid, signal.SIGKILL)
    assert all(is_gone(process) for process in processes)


def test_processes_that_a_worker_started_end_with_it(tmp_path):
    script = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        sign(0, child.pid)
        """
    command = Command(tmp_path, "-n", 1, "script.py", script=script)
    assert command.end()[0] == 0
    assert is_gone(*command.await_workers(0))


# ---- restarts, by other launchers


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "dsgdac-restarted://"),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, None),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, None),
        ({"GROUP_WORLD_SIZE": "2"}, None),  # machines do not agree on how often they have restarted
    ],
)
def test_restarted_workers_of_one_machine_use_a_prefix_of_their_own(monkeypatch, changes, expected):
    launched = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
    for name, value in (launched | changes).items():
        monkeypatch.setenv(name, value)
    assert init_method_after_restart() == expected


# ---- mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", 0, "script.py"], "workers must be in 1..1024, since each is a process here; got 0"),
        (["-n", 99999999, "script.py"], "got 99999999. For more, let each process hold several: gossip."),
        (["-n", 1], "name the script"),
        (["-n", 1, "nothing.py"], "there is no script nothing.py in"),
        (["-n", 1, "."], "there is no script . in"),
        (["-n", 1, "-m", "nothing.here"], "there is no module nothing.here"),
    ],
)
def test_mistakes_are_reported_in_one_line(tmp_path, monkeypatch, capsys, words, message):
    (tmp_path / "script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert (error.count("\n"), error.startswith("error: ")) == (1, True)


# ---- with torch


@pytest.mark.slow
def test_survivors_of_worker_0_still_have_the_store(tmp_path):
    script = f"""
        import torch
        import torch.distributed as dist
        from datetime import timedelta

        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        total = torch.tensor([10.0 ** rank])
        dist.all_reduce(total)
        if rank == 0:
            {KILLED}
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
            left = dist.ProcessGroupGloo(store, rank - 1, 2, timedelta(seconds=20))
            again = torch.tensor([10.0 ** rank])
            left.allreduce([again]).wait()
            say("sums", total.item(), again.item())
            os._exit(0)
        """
    status, out = run(tmp_path, "-n", 3, "script.py", script=script, OMP_NUM_THREADS="1")
    assert status == 0, out
    assert out.count("sums 111.0 110.0") == 2
    assert "finished without worker 0" in out


def test_a_launcher_that_is_to_end_while_it_starts_workers_starts_no_more(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("import time; time.sleep(60)")
    run = launcher.Run(HashStore())
    started = []

    def start_and_interrupt(*args):
        started.append(Worker(*args))
        if len(started) == 2:
            run.received.append(signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(launcher, "Worker", start_and_interrupt)
    assert run.run([str(tmp_path / "script.py")], dict(os.environ), workers=50) == 128 + signal.SIGTERM
    assert [worker.status for worker in started] == [-signal.SIGTERM] * 2

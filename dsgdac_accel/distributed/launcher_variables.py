"""Environment variables by which launchers tell a process its rank: torchrun's, and those of others in their place."""

from __future__ import annotations

import os
import re

_SLURM = "SLURM_STEP_NUM_TASKS"
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_SIZES = ("WORLD_SIZE", _SLURM, *_MPI, "PET_NNODES")
_SINGLE = "To train each alone, set WORLD_SIZE=1."


def launched_processes() -> tuple[int, str]:
    """Return how many processes a launcher started together, and the variable that says so; 1 without a launcher.

    WORLD_SIZE goes before those of Slurm and MPI: torchrun may run inside their tasks. The largest of the others
    counts. PET_NNODES, which Kubeflow sets to the number of pods, is only read by torchrun.
    """
    sizes = {name: int(os.environ[name]) for name in _SIZES if os.environ.get(name, "").isdigit()}
    name = _SIZES[0] if _SIZES[0] in sizes else max(sizes, key=sizes.__getitem__, default=_SIZES[0])
    return sizes.get(name, 1), name


def how_to_join(variable: str) -> str:
    """Return the way out for processes that were launched together, as `variable` says, but do not know each other."""
    if variable == _SIZES[0]:
        return "On CPU set ACCELERATE_USE_CPU=true (cpu=True, use_cpu=True), and launch with --multi_gpu."
    if variable == _SLURM:
        return f"Call dsgdac_accel.join_slurm_step() before everything else. {_SINGLE}"
    return f"Launch with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. {_SINGLE}"


def join_slurm_step() -> None:
    """Set torchrun's variables in a task of `srun`, so that all tasks of the step train together.

    Does nothing outside of a step of several tasks, where MPI says another number (Slurm has started its daemons), and
    where WORLD_SIZE is set: by torchrun or `accelerate launch` inside a task, or to 1 for tasks that train alone. RANK,
    WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE follow from Slurm's variables. Unless they are set, MASTER_ADDR is the
    step's first node (127.0.0.1 where it is the only one), and MASTER_PORT, from 20000 to 31999, follows from job and
    step.

    `GossipAccelerator` and the tasks call it by themselves. Call it before `TrainingArguments`, which builds
    Accelerate's state, and before `init_process_group`.

    Raises:
        ValueError: the step is interactive (`srun --pty`) or of a heterogeneous job, or Slurm's variables contradict
            each other.
    """
    variables = os.environ
    size = int(variables.get(_SLURM) or 1)
    if size == 1 or variables.get("WORLD_SIZE") or any(variables.get(name) not in (None, str(size)) for name in _MPI):
        return
    # A step that is started from an interactive one inherits the variable, but not the terminal.
    interactive, parts = "SLURM_PTY_PORT" in variables and os.isatty(0), int(variables.get("SLURM_HET_SIZE") or 1)
    if interactive or parts > 1:
        kind = "an interactive step (srun --pty)" if interactive else f"a heterogeneous job of {parts} components"
        raise ValueError(
            f"the {size} tasks of {kind} cannot find each other by themselves. Launch with torchrun inside one task "
            f"per node. {_SINGLE}"
        )
    try:
        rank, local, node = (int(variables[f"SLURM_{name}"]) for name in ("PROCID", "LOCALID", "NODEID"))
        local_size = _tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"])[node]
        job, step = (int(variables[f"SLURM_{name}"]) for name in ("JOB_ID", "STEP_ID"))
        master = _first_node(variables["SLURM_STEP_NODELIST"]) if local_size < size else "127.0.0.1"
        if not (0 <= rank < size and 0 <= local < local_size):
            raise ValueError(f"task {rank} of {size}, {local} of {local_size} on its node")
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(
            f"the variables of a Slurm step must tell the rank of each of its {size} tasks; got {error}. Launch with "
            f"torchrun inside one task per node. {_SINGLE}"
        ) from error
    variables |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": variables.get("MASTER_ADDR") or master,
        "MASTER_PORT": variables.get("MASTER_PORT") or str(20000 + (101 * job + step) % 12000),
    }


def lone_launchers() -> int:
    """Return the number of tasks of a Slurm step that each run a launcher of its own, with one node; 0 if none do."""
    tasks = int(os.environ.get(_SLURM) or 1)
    interactive = "SLURM_PTY_PORT" in os.environ  # a shell in one of the tasks
    return tasks if tasks > 1 and os.environ.get("GROUP_WORLD_SIZE") == "1" and not interactive else 0


def _tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's list of counts.

    >>> _tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, nodes in counts for _ in range(int(nodes or 1))]


def _first_node(text: str) -> str:
    """Return the first name of Slurm's list of nodes.

    >>> _first_node("gpu-a[003-007,9]-ib,login"), _first_node("rack[1,3]n[08-10]"), _first_node("one,two")
    ('gpu-a003-ib', 'rack1n08', 'one')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", text)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST={text!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])

"""Find out which rank this process is, and how many threads it gets.

Ranks are started in four ways, tried in this order:

    local     local.start_local, which starts ranks on this host
    torchrun  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    srun      a Slurm step of more than one task: SLURM_STEP_*, SLURM_PROCID, SLURM_LOCALID
    alone     none of these: rank 0 of 1
"""

import hashlib
import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vigpipe.errors import InputError
from vigpipe.files.names import escaped

FOLDER_VARIABLE = "VIGPIPE_LOCAL_FOLDER"  # set by start_local: the folder where its ranks meet
LAUNCHER_VARIABLE = "VIGPIPE_LOCAL_LAUNCHER"  # set by start_local: its process id
TOKEN_VARIABLE = "VIGPIPE_TOKEN"  # set by the batch script: a secret shared by the ranks of a job
# How long ranks wait for ranks that start late, because all import from one shared file system, and
# for a rank that works alone.
LONG_WAIT_SECONDS = 600.0
MOST_RANKS = 1 << 20  # more than any cluster has; a larger number would only fill the memory
# More threads make torch slower by minutes, and with far more OpenMP ends Python. A variable for
# large nodes may also be set on the small one that jobs are sent from.
THREADS_A_CORE, THREADS_ANYWHERE = 16, 512


@dataclass(frozen=True)
class Launch:
    """One rank's place in the world."""

    rank: int
    world_size: int
    local_rank: int  # among the ranks of this host
    local_world_size: int
    launcher: Literal["alone", "local", "torchrun", "srun"]
    init_method: str | None  # URL where the ranks meet; None for a rank that is alone
    run_id: str  # a name that no other world has; ranks of another world are recognised by it

    @property
    def is_local(self) -> bool:
        """Whether every rank runs on this host."""
        return self.local_world_size == self.world_size


def from_environment(env: Mapping[str, str]) -> Launch:
    """Read this rank's place from the environment variables of its launcher."""
    if FOLDER_VARIABLE in env:
        folder = Path(env[FOLDER_VARIABLE])
        return _from_agent(env, "local", (folder / "ranks").as_uri(), folder.name)
    if "TORCHELASTIC_RUN_ID" in env or ("RANK" in env and "WORLD_SIZE" in env):
        _text(env, "MASTER_ADDR", "the address torchrun sets")
        _count(env, "MASTER_PORT", least=1, below=65536)
        # Each agent has a count of restarts of its own, which says nothing of the others'.
        run_id = env.get("TORCHELASTIC_RUN_ID") or "by-hand"
        return _from_agent(env, "torchrun", "env://", run_id)
    # A batch script sees SLURM_NTASKS and SLURM_PROCID as well; only a step has SLURM_STEP_*.
    if "SLURM_STEP_NUM_TASKS" in env and _count(env, "SLURM_STEP_NUM_TASKS", least=1) > 1:
        return _from_srun(env)
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if env.get(name):
            raise _bad(
                name, env[name], f"{other} beside it, as torchrun sets both; or unset {name}"
            )
    return Launch(0, 1, 0, 1, "alone", None, f"alone-{os.getpid()}")


def _from_agent(
    env: Mapping[str, str], launcher: Literal["local", "torchrun"], init_method: str, run_id: str
) -> Launch:
    world_size = _count(env, "WORLD_SIZE", least=1, below=MOST_RANKS + 1)
    local_world_size = _count(env, "LOCAL_WORLD_SIZE", least=1, below=world_size + 1)
    rank = _count(env, "RANK", below=world_size)
    local_rank = _count(env, "LOCAL_RANK", below=local_world_size)
    return Launch(rank, world_size, local_rank, local_world_size, launcher, init_method, run_id)


def _from_srun(env: Mapping[str, str]) -> Launch:
    world_size = _count(env, "SLURM_STEP_NUM_TASKS", least=1, below=MOST_RANKS + 1)
    rank = _count(env, "SLURM_PROCID", below=world_size)
    nodelist = _text(env, "SLURM_STEP_NODELIST", "node names such as node[1-2]")
    tasks_text = _text(env, "SLURM_STEP_TASKS_PER_NODE", "tasks per node such as 2(x2)")
    # Every node of a step has a task of it.
    nodes, tasks = expand_nodes(nodelist, world_size), expand_tasks(tasks_text, world_size)
    if len(tasks) != len(nodes) or sum(tasks) != world_size:
        raise InputError(
            f"SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']}: expected "
            f"{len(nodes)} nodes (SLURM_STEP_NODELIST={env['SLURM_STEP_NODELIST']}) with "
            f"{world_size} tasks in all (SLURM_STEP_NUM_TASKS), got {len(tasks)} nodes with "
            f"{sum(tasks)} tasks; start the ranks with srun and leave its variables alone"
        )
    node_index = _count(env, "SLURM_NODEID", below=len(nodes))
    # srun may place 3 + 1 tasks on two nodes, so the local rank is read, never computed.
    local_world_size = tasks[node_index]
    local_rank = _count(env, "SLURM_LOCALID", below=local_world_size)
    if rank == 0 and node_index > 0 and not env.get("MASTER_ADDR"):
        raise InputError(
            f"SLURM_NODEID={node_index}: expected rank 0 on the first node of "
            f"{env['SLURM_STEP_NODELIST']}, where the ranks meet; set MASTER_ADDR to rank 0's node"
        )
    job_id, step = _count(env, "SLURM_JOB_ID"), _count(env, "SLURM_STEP_ID")
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if len(nodes) == 1 else nodes[0])
    # Below 32768, from where on Linux assigns ports by itself.
    port = 20000 + (job_id * 101 + step) % 10000
    if env.get("MASTER_PORT"):
        port = _count(env, "MASTER_PORT", least=1, below=65536)
    # Keys of the store begin with the run_id, so nobody without the token can name one.
    secret = f".{digest(env[TOKEN_VARIABLE])}" if env.get(TOKEN_VARIABLE) else ""
    restart = env.get("SLURM_RESTART_COUNT", 0)  # unset on the first run
    run_id = f"slurm-{job_id}.{step}.{restart}{secret}"
    url = f"tcp://{address}:{port}"
    return Launch(rank, world_size, local_rank, local_world_size, "srun", url, run_id)


def expand_nodes(text: str, most: int = MOST_RANKS) -> list[str]:
    """Expand Slurm's node lists: "node[1-2,09],gpu1" is node1, node2, node09, gpu1."""
    names: list[str] = []
    if not re.fullmatch(r"(?:[^][,\s]|\[[^][\s]+\])+(?:,(?:[^][,\s]|\[[^][\s]+\])+)*", text):
        raise _bad("SLURM_STEP_NODELIST", text, "node names such as node[1-3,07-09],gpu1")
    for item in re.findall(r"(?:[^][,]|\[[^][]+\])+", text):
        choices = [
            _expand_ranges(section[1:-1], text, most) if section.startswith("[") else [section]
            for section in re.findall(r"\[[^][]+\]|[^][]+", item)
        ]
        if len(names) + math.prod(map(len, choices)) > most:
            raise _too_many("SLURM_STEP_NODELIST", text, most)
        names += ["".join(sections) for sections in itertools.product(*choices)]
    return names


def _expand_ranges(ranges: str, text: str, most: int) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise _bad("SLURM_STEP_NODELIST", text, f"{item!r} to be a range such as 1-3 or 07-09")
        if len(numbers) + int(last) - int(first) >= most:
            raise _too_many("SLURM_STEP_NODELIST", text, most)
        numbers += [f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks(text: str, most: int = MOST_RANKS) -> list[int]:
    """Expand Slurm's task counts: "2(x2),1" is 2, 2, 1; at most those of `most` nodes."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,17})(?:\(x([1-9][0-9]{0,17})\))?", item)
        if not match:
            raise _bad("SLURM_STEP_TASKS_PER_NODE", text, "tasks per node such as 2(x2) or 3,1")
        if len(counts) + int(match[2] or 1) > most:
            raise _too_many("SLURM_STEP_TASKS_PER_NODE", text, most)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _text(env: Mapping[str, str], name: str, expected: str) -> str:
    if not env.get(name):
        raise InputError(
            f"{name} is not set: expected {expected}, because other variables say that this is a "
            "rank of torchrun or srun; start it with one of them, or unset RANK and WORLD_SIZE"
        )
    return env[name]


def _count(env: Mapping[str, str], name: str, least: int = 0, below: int | None = None) -> int:
    limit = f"from {least} to {below - 1}" if below is not None else f"of at least {least}"
    text = _text(env, name, f"a whole number {limit}")
    value = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else -1
    if value < least or (below is not None and value >= below):
        raise _bad(name, text, f"a whole number {limit}")
    return value


def _bad(name: str, value: str, expected: str) -> InputError:
    return InputError(f"{name}={escaped(value)}: expected {expected}")


def _too_many(name: str, text: str, most: int) -> InputError:
    return _bad(name, text, f"at most {most} nodes, one for every task of the step")


def tells_for_all(env: Mapping[str, str]) -> bool:
    """Whether this process tells what all ranks of a run know: one that has started ranks does."""
    rank = env.get("RANK") or env.get("SLURM_PROCID") or "0"
    return FOLDER_VARIABLE not in env and rank == "0"


def threads_per_rank(requested: int | None, ranks: Launch | int, env: Mapping[str, str]) -> int:
    """Choose a rank's CPU threads: --threads, else OMP_NUM_THREADS, else its share of the cores.

    `ranks` is this rank's launch, or the number of ranks that will share this host.
    """
    most = max(THREADS_ANYWHERE, THREADS_A_CORE * (os.cpu_count() or 1))
    if requested is not None:
        if not 1 <= requested <= most:
            raise InputError(f"--threads {requested}: expected a whole number from 1 to {most}")
        return requested
    # OpenMP allows a list with a count for each nesting level; torch uses the first level.
    if env.get("OMP_NUM_THREADS"):
        first = env["OMP_NUM_THREADS"].split(",")[0].strip()
        return _count({"OMP_NUM_THREADS": first}, "OMP_NUM_THREADS", least=1, below=most + 1)
    if isinstance(ranks, Launch):
        if ranks.launcher == "srun" and "SLURM_CPUS_PER_TASK" in env:
            return _count(env, "SLURM_CPUS_PER_TASK", least=1, below=most + 1)
        ranks = ranks.local_world_size
    return max(1, num_cores() // ranks)


def num_cores() -> int:
    """Return how many cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def digest(text: str) -> str:
    """Shorten a text to the first 32 hexadecimal digits of its SHA-256, which do not reveal it."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]

"""Runs that lose the store where the ranks have met: it is in rank 0's process under srun."""

import contextlib
import os
import signal
import socket
import sys
from collections import Counter

import pytest

from tests.faults.test_deaths import (
    GOSSIP,
    GRADIENTS,
    NUM_STEPS,
    OPTIONS,
    SERVER,
    events,
    is_done_again,
)
from tests.faults.test_faults import ENV, FAULTY, line, rows
from tests.launch.test_environment import ONE_NODE, SRUN
from tests.world import GUARD, run_command, start_command
from vigpipe.errors import PEER_LOST, SAVED

pytestmark = pytest.mark.multiprocess


def codes_with(fault, layout, num_ranks, options, folder):
    """Start ranks as srun does on one node, and wait for all but a frozen one: their exit codes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {**SRUN, **ONE_NODE, **ENV, "MASTER_PORT": str(port), "VIGPIPE_TOKEN": folder.name}
    env |= {"SLURM_STEP_NUM_TASKS": str(num_ranks), "SLURM_STEP_TASKS_PER_NODE": str(num_ranks)}
    env |= {"FAULT_DONE": str(folder.with_name("done"))}
    command = ["train", *options, *layout, "--out", str(folder)]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(num_ranks):
            own = {**env, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            start = start_command(line(FAULTY, fault, "srun", *command), own)
            ranks.append(stack.enter_context(start))
        done = [command.popen.wait(GUARD) for command in ranks[1:]]
        told = [(command.folder / "stderr").read_text() for command in ranks[1:]]
        if fault.endswith("freeze"):
            os.kill(ranks[0].popen.pid, signal.SIGKILL)
        ranks[0].popen.wait(GUARD)
    return done, told


def goes_on(folder, num_replicas, options):
    """The next start finds what was saved, does what is left, and takes no item twice."""
    given = [*options, "--dp", num_replicas, "--resume", "auto", "--out", str(folder)]
    done = run_command([sys.executable, "-m", "vigpipe", "train", *given], ENV)
    assert done.returncode == 0, done.stderr
    assert (folder / "summary.json").exists()
    return done.stdout


@pytest.mark.parametrize(
    ("what", "size", "options"),
    [
        ("kill", 1, GOSSIP),
        pytest.param("freeze", 2, [*GRADIENTS, "--timeout", "10"], marks=pytest.mark.heavy),
    ],
)
def test_replicas_that_lose_it_save_what_they_have(what, size, options, folder):
    layout, num_ranks = ["--dp", "3", "--stages", str(size)], 3 * size
    options = [*(word if word != "4" else "1000" for word in OPTIONS), *options]
    assert options[options.index("--checkpoint-every") + 1] == "1000"  # there is none before
    codes, told = codes_with(f"step:5:0:{what}", layout, num_ranks, options, folder)
    assert codes == [PEER_LOST] * (size - 1) + [SAVED] * (num_ranks - size), told
    assert "replica 2 has saved what it has; go on with --out " in told[-1]
    assert not any("Traceback" in text for text in told), told
    log = goes_on(folder, "3", options)
    assert "going on after step" in log
    taken = Counter((e["replica"], e["item"]) for e in events(folder) if "item" in e)
    again = {e["replica"] for e in events(folder) if "again" in e}
    assert again == {0}
    of_others = Counter(item for replica, item in taken if replica > 0)
    assert max(of_others.values()) == 1
    items = {row["item"] for row in rows(folder) if "item" in row}
    assert items == set(range(3 * NUM_STEPS))


def test_a_server_that_loses_it_saves_what_it_has_and_the_run_can_be_repeated(folder):
    options = [*OPTIONS, *SERVER]
    codes, told = codes_with("step:6:0:kill", ["--dp", "2"], 3, options, folder)
    assert codes == [PEER_LOST, SAVED], told
    assert "the server has saved what it has; go on with --out " in told[-1]
    goes_on(folder, "2", options)
    taken = Counter(e["item"] for e in events(folder) if "item" in e and "did" not in e)
    assert taken == dict.fromkeys(range(2 * NUM_STEPS), 1)
    is_done_again(folder, "2x1", SERVER)

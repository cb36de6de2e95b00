"""A run goes on without replicas that are lost, and ends with its last one or another failure."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.world import start_command, wait_until
from vigpipe.launch.failures import declare_lost, note_met, record_file
from vigpipe.launch.processes import RankProcesses
from vigpipe.launch.supervisor import Supervisor
from vigpipe.launch.watchdog import has_ended

pytestmark = pytest.mark.multiprocess

# The argument of each rank says what it does; others follow when it has begun.
SCRIPT = """
import json, os, signal, sys, threading, time
from pathlib import Path
from vigpipe.errors import InputError
from vigpipe.launch import environment, failures, local, supervisor, watchdog

def wait_until(condition):
    while not condition():
        time.sleep(0.01)

def work(me, folder, behaviours):
    private = Path(os.environ[environment.FOLDER_VARIABLE])
    what, *number = behaviours[me.rank].split("-")
    if what == "early":
        os.kill(os.getpid(), signal.SIGKILL)
    failures.note_met(private, me.rank)
    (folder / f"rank-{me.rank}").write_text(str(os.getpid()))
    wait_until(lambda: len(list(folder.glob("rank-*"))) == me.world_size)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "wrong":
        raise InputError("the flag is wrong")
    if what == "bereft":  # of the peer of this number, which ends
        wait_until(lambda: watchdog.ended(private, [int(number[0])]))
        raise RuntimeError("Connection closed by peer")
    if what == "declares":  # the replica of this number, of one rank that stops
        stat = Path("/proc", (folder / f"rank-{number[0]}").read_text(), "stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        failures.declare_lost(private, int(number[0]))
        wait_until(lambda: watchdog.ended(private, [int(number[0])]))
        failures.declare_lost(private, int(number[0]))
    if what == "ends":
        return 0
    if what == "endless":
        threading.Event().wait()
    wait_until((folder / "go").exists)
    return 75 if what == "saves" else 0

def rank(arguments):
    folder, *behaviours = arguments
    me = environment.from_environment(os.environ)
    return failures.run_rank(lambda: work(me, Path(folder), behaviours), me)

if __name__ == "__main__":
    supervisor.LEAVE_SECONDS = 0.2
    folder, replicas, *behaviours = sys.argv[1:]
    arguments = [folder, *behaviours]
    size = len(behaviours)
    sys.exit(local.start_local(size, "__main__:rank", arguments, 1, json.loads(replicas)))
"""
APART = [[0], [1], [2]]
PAIRS = [[0, 1], [2, 3]]
KILLED = "was ended by SIGKILL; out of memory?"
FROZEN = "answered no more, and was killed; was it stopped?"


@pytest.fixture
def start(tmp_path):
    """Start a run of ranks that behave as told; `work` goes on as soon as the run tells a loss."""

    def start(replicas, behaviours: str) -> tuple[int, list[str]]:
        (tmp_path / "toy.py").write_text(SCRIPT)
        (tmp_path / "tmp").mkdir()
        line = [sys.executable, str(tmp_path / "toy.py"), str(tmp_path), json.dumps(replicas)]
        env = {"TMPDIR": str(tmp_path / "tmp")}
        with start_command([*line, *behaviours.split()], env) as command:
            told = command.folder / "stderr"
            wait_until(lambda: told.read_text().endswith("\n"), "it tells", running=command)
            (tmp_path / "go").touch()
            done = command.wait()
        assert list((tmp_path / "tmp").iterdir()) == []
        return done.returncode, done.stderr.splitlines()

    return start


@pytest.mark.parametrize(
    ("replicas", "behaviours", "code", "lost", "cause"),
    [
        (PAIRS, "works works killed bereft-2", 0, 1, f"rank 2 {KILLED}"),
        (PAIRS, "frozen killed works works", 0, 0, f"rank 1 {KILLED}"),
        (APART, "declares-1 frozen works", 0, 1, f"rank 1 {FROZEN}"),
        # Its other rank does not hold up the end of the run.
        (PAIRS, "ends ends killed endless", 0, 1, f"rank 2 {KILLED}"),
        (APART, "killed saves saves", 75, 0, f"rank 0 {KILLED}"),
    ],
)
def test_a_run_goes_on_without_a_lost_replica(replicas, behaviours, code, lost, cause, start):
    left = f"{len(replicas) - 1} of {len(replicas)} replicas"
    told = f"vigpipe: replica {lost} is lost, and the run goes on with {left}: {cause}"
    assert start(replicas, behaviours) == (code, [told])


@pytest.mark.parametrize(
    ("replicas", "behaviours", "code", "told"),
    [
        ([[0], [1]], "endless endless killed", 137, f"rank 2 {KILLED}"),  # of no replica
        (APART, "works early works", 137, f"rank 1 {KILLED}"),  # the others would wait for it
        (APART, "wrong endless endless", 2, "the flag is wrong"),  # which would come again
    ],
)
def test_a_failure_that_is_not_the_loss_of_a_replica_ends_the_run(
    replicas, behaviours, code, told, start
):
    assert start(replicas, behaviours) == (code, [f"vigpipe: {told}"])


def test_a_run_that_loses_all_replicas_ends(start):
    code, told = start(PAIRS, "killed endless endless killed")
    assert code == 137
    assert f"vigpipe: rank 0 {KILLED}" in told or f"vigpipe: rank 3 {KILLED}" in told
    assert len(told) <= 2


@pytest.mark.parametrize(
    ("exit_codes", "records", "code", "told"),
    [
        ({0: 0, 1: 75, 2: -6, 3: 70}, {3: "lost peer"}, 75, "rank 2 was ended by SIGABRT"),
        ({0: -6, 1: 70, 2: 70, 3: 70}, {}, 134, "rank 0 was ended by SIGABRT"),
        # A process that reads images for rank 1 is gone, of which rank 1 has told.
        ({1: 70, 0: 70, 2: 0, 3: 0}, {1: "own", 0: "lost peer"}, 0, "with 1 of 2 replicas"),
        # Rank 3, which was seen to end last, is the cause.
        ({1: 70, 0: 70, 2: 70, 3: 76}, {3: "own 76", 2: "lost peer"}, 76, ""),
        ({0: 70, 1: -9, 2: 0, 3: 1}, {}, 1, ""),
        # Nobody knows what ended replica 1, but replica 0 may have been the cause.
        ({2: 70, 3: 70, 1: -9, 0: 70}, {2: "lost peer"}, 137, "rank 1 was ended by SIGKILL"),
        ({0: -15, 1: 0, 2: 0, 3: 0}, {}, 143, "rank 0 was ended by SIGTERM"),
        ({0: 130, 1: 0, 2: 0, 3: 0}, {}, 130, ""),
        ({0: 255, 1: 255, 2: 255, 3: 255}, {}, 70, "the process that ranks are forked from"),
    ],
)
def test_outcome(exit_codes, records, code, told, tmp_path, capsys):
    for rank, kind in records.items():
        kind, _, own_code = kind.partition(" ") if kind.startswith("own") else (kind, "", "")
        record = {"rank": rank, "kind": kind, "code": int(own_code or 70), "message": "closed"}
        record |= {"job": tmp_path.name, "host": "here", "time": 1.0}
        record_file(tmp_path, rank).write_text(json.dumps(record))
    for rank in range(4):
        note_met(tmp_path, rank)
    ranks = RankProcesses()
    ranks.exit_codes = exit_codes
    supervisor = Supervisor(ranks, tmp_path, PAIRS)
    supervisor.wait()
    assert supervisor.exit_code() == code
    lines = capsys.readouterr().err.splitlines()
    assert told in (lines.pop() if told else "")
    assert lines == []


def test_a_rank_that_has_ended_a_moment_ago_is_not_frozen():
    """Another replica may give one up that has just left with all its work done."""
    ranks: Any = RankProcesses()
    with subprocess.Popen(["true"]) as process:
        wait_until(lambda: has_ended(process.pid), "it has ended")
        ranks._processes = {1: process}
        assert not ranks.kill_frozen([1])
        assert ranks.frozen == set()


def test_a_replica_that_has_ended_well_is_not_lost(tmp_path, capsys):
    ranks = RankProcesses()
    ranks.exit_codes = {0: 0, 1: 0}
    declare_lost(tmp_path, 1)
    supervisor = Supervisor(ranks, tmp_path, [[0], [1]])
    supervisor.wait()
    assert (supervisor.exit_code(), capsys.readouterr().err) == (0, "")

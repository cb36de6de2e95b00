"""A run goes on without replicas that are lost, and ends with its last one or another failure."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.world import run_command, start_command, wait_until
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


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "toy.py").write_text(SCRIPT)
        (folder / "tmp").mkdir()
        self.env = {"TMPDIR": str(folder / "tmp")}

    def line(self, replicas, behaviours: str) -> list[str]:
        script = [sys.executable, str(self.folder / "toy.py")]
        return [*script, str(self.folder), json.dumps(replicas), *behaviours.split()]

    def ends(self, replicas, behaviours: str) -> tuple[int, list[str]]:
        """The exit code of a run that ends by itself, and what it told."""
        done = run_command(self.line(replicas, behaviours), self.env)
        assert list((self.folder / "tmp").iterdir()) == []
        return done.returncode, done.stderr.splitlines()

    def goes_on(self, replicas, behaviours: str) -> tuple[int, list[str]]:
        """The same for a run whose ranks wait until it has told of a loss."""
        with start_command(self.line(replicas, behaviours), self.env) as command:
            told = command.folder / "stderr"
            wait_until(lambda: told.read_text().endswith("\n"), "it tells", running=command)
            (self.folder / "go").touch()
            done = command.wait()
        assert list((self.folder / "tmp").iterdir()) == []
        return done.returncode, done.stderr.splitlines()


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def lost(replica: int, left: str, cause: str) -> list[str]:
    return [f"vigpipe: replica {replica} is lost, and the run goes on with {left}: {cause}"]


def test_replicas_go_on_without_a_rank_that_was_killed(run):
    told = lost(1, "2 of 3 replicas", f"rank 1 {KILLED}")
    assert run.goes_on(APART, "works killed works") == (0, told)


def test_a_rank_that_loses_its_peer_is_lost_with_it(run):
    told = lost(1, "1 of 2 replicas", f"rank 2 {KILLED}")
    assert run.goes_on(PAIRS, "works works killed bereft-2") == (0, told)


def test_a_frozen_rank_that_loses_its_peer_is_killed(run):
    told = lost(0, "1 of 2 replicas", f"rank 1 {KILLED}")
    assert run.goes_on(PAIRS, "frozen killed works works") == (0, told)


def test_a_frozen_rank_whose_replica_is_declared_lost_is_killed(run):
    told = lost(1, "2 of 3 replicas", f"rank 1 {FROZEN}")
    assert run.goes_on(APART, "declares-1 frozen works") == (0, told)


def test_the_remains_of_a_lost_replica_do_not_hold_up_the_end(run):
    """The survivors end before what is left of the replica has had its time to leave."""
    (run.folder / "go").touch()
    told = lost(1, "1 of 2 replicas", f"rank 2 {KILLED}")
    assert run.ends(PAIRS, "works works killed endless") == (0, told)


def test_survivors_that_save_their_state(run):
    told = lost(0, "2 of 3 replicas", f"rank 0 {KILLED}")
    assert run.goes_on(APART, "killed saves saves") == (75, told)


def test_a_run_that_loses_all_replicas_ends(run):
    code, told = run.ends(PAIRS, "killed endless endless killed")
    assert code == 137
    assert f"vigpipe: rank 0 {KILLED}" in told or f"vigpipe: rank 3 {KILLED}" in told
    assert len(told) <= 2


def test_a_rank_of_no_replica_ends_the_run(run):
    told = [f"vigpipe: rank 2 {KILLED}"]
    assert run.ends([[0], [1]], "endless endless killed") == (137, told)


def test_a_rank_that_is_killed_before_all_have_met_ends_the_run(run):
    """The others would wait for it, for ten minutes."""
    assert run.ends(APART, "works early works") == (137, [f"vigpipe: rank 1 {KILLED}"])


def test_a_failure_that_would_come_again_ends_the_run(run):
    assert run.ends(APART, "wrong endless endless") == (2, ["vigpipe: the flag is wrong"])


@pytest.mark.parametrize(
    ("exit_codes", "records", "code", "told"),
    [
        ({0: 0, 1: 0, 2: 0, 3: 0}, {}, 0, ""),
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
        record |= {"job": tmp_path.name, "time": 1.0}
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

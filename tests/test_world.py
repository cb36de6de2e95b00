"""run_ranks and run_command keep their promises, above all when something goes wrong."""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests import world
from tests.conftest import asks_for_gpus
from tests.world import (
    PROMPT,
    ROOT,
    RankFailed,
    run_command,
    run_each,
    run_ranks,
    start_command,
    wait_until,
)

pytestmark = pytest.mark.multiprocess


def add_up(rank: int, world_size: int, factor: torch.Tensor) -> torch.Tensor:
    total = torch.tensor([float(rank), world_size])
    dist.all_reduce(total)
    return total * factor


def raise_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("nope")
    dist.barrier()


def die_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        time.sleep(1000)
    return os.getpid()


def test_results_come_back_by_rank():
    for result in run_ranks(add_up, 3, torch.tensor(2.0)):
        assert result.tolist() == [6.0, 18.0]


def test_a_failing_rank_raises_its_own_traceback():
    with pytest.raises(RankFailed, match="rank 1: KeyError: 'nope'") as caught:
        run_ranks(raise_on_rank_1, 3)
    assert "in raise_on_rank_1" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_killed_rank_is_named():
    with pytest.raises(RankFailed, match="rank 1: ended without a word"):
        run_ranks(die_on_rank_1, 3)


def test_a_hanging_rank_is_named():
    # On a busy machine the other one may be late as well.
    with pytest.raises(TimeoutError, match=r"ranks \[(0, )?1\] of 2 still ran after 1 s"):
        run_ranks(hang_on_rank_1, 2, timeout=1)


def raise_in_second_call(rank: int, world_size: int, call: int) -> int:
    return {1: rank}[call]


def test_calls_in_turn_have_names_of_their_own():
    ones = torch.ones(2)
    (first, _), (_, second) = run_each(add_up, 2, [ones, 2 * ones])
    assert (first.tolist(), second.tolist()) == ([1.0, 4.0], [2.0, 8.0])
    with pytest.raises(RankFailed, match=r"KeyError: 2[^$]*with 2"):
        run_each(raise_in_second_call, 2, [1, 2])


def test_calls_in_turn_have_guards_of_their_own(monkeypatch):
    ticks = itertools.count(0, 0.2)  # a guard is over after five looks at the clock
    monkeypatch.setattr(world, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    for (_, theirs), num_results in zip(pipes, (9, 8), strict=True):
        for result in range(num_results):
            theirs.send_bytes(pickle.dumps(("result", result)))
    ranks = {ours: rank for rank, (ours, _) in enumerate(pipes)}
    results, failures = world._collect(ranks, num_calls=9, timeout=1)
    assert (results, failures) == ({0: [*range(9)], 1: [*range(8)]}, {})
    said = world._still_running(results, 9, 1)
    assert said == "ranks [1] of 2 still ran after 1 s, in call 8 of 9"


WHO = """
import multiprocessing, os, signal, sys, threading
print(sys.argv, os.getcwd(), os.environ["WHAT"], "WHERE" in os.environ, repr(sys.stdin.read()))
print(os.getpid() == os.getpgid(0), __name__, sys.modules["__main__"].__dict__ is globals())
handlers = [signal.getsignal(number) for number in range(1, 32)]
print(*handlers, signal.pthread_sigmask(signal.SIG_BLOCK, ()), sep="\\n")
print(multiprocessing.current_process(), multiprocessing.parent_process())
print(os.listdir("/proc/self/fd"))
print("to the errors", file=sys.stderr)
threading.Thread(target=print, args=("a thread",)).start()
"""
ENDS = {
    "pass": 0,
    "sys.exit(3)": 3,
    "sys.exit('told')": 1,
    "raise ValueError('no')": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "os._exit(4)": 4,
}


@pytest.mark.parametrize("ignored", [False, True])
def test_a_fork_finds_and_does_what_a_fresh_interpreter_does(ignored, tmp_path, monkeypatch):
    """Also where these tests run under nohup, or in the background of a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERE", "here")
    monkeypatch.delenv("WHERE")
    (tmp_path / "who.py").write_text(WHO)
    path = {"WHAT": "it", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        for words in (["-c", WHO], ["-m", "who"], [str(tmp_path / "who.py")]):
            line = [sys.executable, *words, "two words", "$HOME"]
            fork, fresh = (run_command(line, path, fresh=fresh) for fresh in (False, True))
            assert fork.returncode == fresh.returncode == 0
            assert fork.stdout.splitlines() == fresh.stdout.splitlines()
            assert fork.stderr == fresh.stderr == "to the errors\n"
            assert "default_int_handler" in fork.stdout
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_ends_with_its_own_code_or_signal():
    with contextlib.ExitStack() as stack:
        begun = {}
        for end in ENDS:
            line = [sys.executable, "-c", f"import atexit, os, signal, sys; "
                    f"atexit.register(print, 'at exit'); print('out'); {end}"]  # fmt: skip
            begun[end] = stack.enter_context(start_command(line))
        done = {end: command.wait(60) for end, command in begun.items()}
    assert {end: ended.returncode for end, ended in done.items()} == ENDS
    for end in list(ENDS)[:5]:
        assert done[end].stdout == "out\nat exit\n"
    assert done["sys.exit('told')"].stderr == "told\n"
    assert done["raise ValueError('no')"].stderr.endswith("ValueError: no\n")


def test_a_fork_has_the_threads_that_its_environment_says():
    # Symptom: timm's own tests took two threads and more time. OpenMP reads that when it is loaded.
    code = "import torch; print(torch.get_num_threads())"
    done = run_command([sys.executable, "-c", code], {"OMP_NUM_THREADS": "1"})
    assert (done.stdout, done.stderr) == ("1\n", "")


STARTER = """
import sys, time
from multiprocessing import forkserver
from tests import warm, world
if __name__ == "__main__":
    real = forkserver.set_forkserver_preload
    forkserver.set_forkserver_preload = lambda modules: real(["tests.warm"])
    with world.start_command([sys.executable, "-c", "import time; time.sleep(1000)"]) as command:
        server = int(open(f"/proc/{command.popen.pid}/stat").read().rpartition(")")[2].split()[1])
        print(server, command.popen.pid, flush=True)
        time.sleep(1000)
"""


def test_the_server_and_its_commands_end_when_the_tests_are_killed():
    with start_command([sys.executable, "-c", STARTER], fresh=True) as command:
        told = command.folder / "stdout"
        wait_until(lambda: told.read_text().endswith("\n"), "a server with a command runs")
        others = [Path("/proc", pid) for pid in told.read_text().split()]
        assert all(path.exists() for path in others)
        command.popen.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(path.exists() for path in others), "they are gone", PROMPT)


def test_run_command_notices_what_is_left_behind(monkeypatch):
    monkeypatch.setattr("tests.world.PROMPT", 1.0)
    code = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    with start_command([sys.executable, "-c", code]) as command:
        with pytest.raises(AssertionError, match="no process of the command is left"):
            command.wait(10)
        assert len(command.processes()) == 1
    assert command.processes() == []


def test_waiting_for_a_command_that_has_ended_tells_what_it_printed():
    line = [sys.executable, "-c", "import sys; sys.exit('it broke')"]
    message = "ended with 1, before: step 3\nit broke"
    with start_command(line) as command, pytest.raises(AssertionError, match=message):
        wait_until(lambda: False, "step 3", running=command)


def visible_gpus(rank: int = 0, world_size: int = 1) -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_no_test_sees_a_gpu_and_neither_does_what_it_starts():
    code = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert [visible_gpus(), *run_ranks(visible_gpus, 2)] == [""] * 3
    assert run_command([sys.executable, "-c", code]).stdout == "''\n"
    assert run_command([sys.executable, "-c", code], fresh=True).stdout == "''\n"


@pytest.mark.parametrize(
    ("marks", "asks"),
    [("", False), ("gpu", True), ("gpu and not heavy", True), ("not gpu", False), ("heavy", False)],
)
def test_gpus_are_seen_by_a_run_of_the_tests_that_need_one(marks, asks):
    assert asks_for_gpus(marks) == asks

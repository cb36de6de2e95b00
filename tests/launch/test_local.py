"""Real ranks, started by start_local and by torchrun, end together and leave nothing behind."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.world import PROMPT, ROOT, run_command, start_command, wait_until

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import os, signal, sys, threading
from pathlib import Path
from vigpipe.errors import InputError
from vigpipe.launch import environment, failures, local, rendezvous
from vigpipe.files.atomic import write_atomically

def work(me, mode, folder, more):
    if mode == "early":
        raise InputError("the flag is wrong")
    import torch, torch.distributed as dist
    rendezvous.init_process_group(me, "gloo", 120)
    ones = torch.ones(4)
    dist.all_reduce(ones)
    write_atomically(folder / f"met-{me.rank}", str(os.getpid()))
    if mode == "ok":
        print(f"rank {me.rank} of {int(ones[0])}, {os.environ.get('OMP_NUM_THREADS')} threads\\n"
              f"{more}\\n", end="")
        dist.barrier()
        return 0
    if me.rank == 1:
        # A thread that is not a daemon holds up Python's own exit.
        threading.Thread(target=threading.Event().wait).start()
        if mode == "error":
            raise RuntimeError("rank 1 broke")
        if mode == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "stuck":
            import ctypes
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            libc.pthread_mutex_lock(mutex)
            (folder / "stuck").touch()
            libc.pthread_mutex_lock(mutex)
        if mode == "hang":
            threading.Event().wait()
    dist.all_reduce(ones)
    return 0

def rank(arguments):
    mode, folder, *more = arguments
    me = environment.from_environment(os.environ)
    return failures.run_rank(lambda: work(me, mode, Path(folder), more), me, [Path(folder, "out")])

def main():
    if sys.argv[1] == "start":
        local.SAME_SECONDS = 0.0
        try:
            return local.start_local(2, "__main__:rank", sys.argv[2:], threads=3)
        except KeyboardInterrupt as interrupt:
            return failures.tell_interrupted(interrupt)
    return rank(sys.argv[1:])

if __name__ == "__main__":
    sys.exit(main())
"""


# What a launcher says of a signal that came before anything could be saved.
TOLD = {signal.SIGINT: "vigpipe: stopped by Ctrl-C, with nothing to save\n", signal.SIGTERM: ""}


class Toy:
    def __init__(self, folder: Path, temporary: str = "tmp") -> None:
        self.folder, self.launcher = folder, "local"
        self.script = folder / "toy.py"
        self.script.write_text(SCRIPT)
        self.temporary = folder / temporary
        self.env = {"TMPDIR": str(self.temporary)}
        self.temporary.mkdir()

    def line(self, mode: str, *more: str) -> list[str]:
        start = [str(self.script), "start"]
        if self.launcher == "torchrun":
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            start.append(str(self.script))
        return [sys.executable, *start, mode, str(self.folder), *more]

    def met(self, rank: int) -> int | None:
        """The rank's process id, once it has met the others."""
        path = self.folder / f"met-{rank}"
        return int(path.read_text()) if path.exists() else None

    def met_at(self) -> float:
        return max((self.folder / f"met-{rank}").stat().st_mtime for rank in (0, 1))


@pytest.fixture
def toy(tmp_path):
    """Of its temporary files none may be left, unless torchrun's own."""
    toy = Toy(tmp_path)
    yield toy
    assert toy.launcher == "torchrun" or not list(toy.temporary.iterdir())


def test_start_local_runs_every_rank_with_its_arguments_as_they_are(toy):
    done = run_command(toy.line("ok", "$HOME", "$$", "two words", "${local_rank}"), toy.env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "rank 0 of 2, 3 threads" in done.stdout
    assert "rank 1 of 2, 3 threads" in done.stdout
    assert done.stdout.count("['$HOME', '$$', 'two words', '${local_rank}']") == 2


@pytest.mark.parametrize(
    ("mode", "message", "code"),
    [
        ("early", "the flag is wrong", 2),
        ("error", "rank 1: RuntimeError: rank 1 broke", 1),
        ("killed", "rank 1 was ended by SIGKILL; out of memory?", 137),
    ],
)
def test_one_failing_rank_ends_all_and_is_told_once(toy, mode, message, code):
    done = run_command(toy.line(mode), toy.env)
    if mode != "early":
        assert time.time() - toy.met_at() < PROMPT
    assert done.returncode == code
    assert "lost a peer" not in done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1] == f"vigpipe: {message}"
    assert len(lines) == 1 or lines[0].startswith("Traceback")


@pytest.mark.parametrize(
    ("mode", "message"),
    [("early", "the flag is wrong"), ("error", "rank 1: RuntimeError: rank 1 broke")],
)
def test_one_failing_rank_of_torchrun_is_told_once(toy, mode, message):
    toy.launcher = "torchrun"
    done = run_command(toy.line(mode), toy.env)
    assert done.returncode == 1  # torchrun's own, after its own table
    assert "lost a peer" not in done.stderr
    assert done.stderr.splitlines().count(f"vigpipe: {message}") == 1


@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [
        ("local", signal.SIGINT, 130),
        ("local", signal.SIGTERM, 143),
        # It hands SIGINT on, which Python would not see in gloo.
        pytest.param("torchrun", signal.SIGINT, 1, marks=pytest.mark.heavy),
    ],
)
def test_a_signal_to_the_launcher_ends_ranks_blocked_in_a_collective(toy, launcher, number, code):
    toy.launcher = launcher
    with start_command(toy.line("hang"), toy.env) as command:
        wait_until(lambda: toy.met(0) and toy.met(1), "the ranks meet")
        wait_until(lambda: is_blocked(toy), "rank 0 waits in its all-reduce")
        os.kill(command.popen.pid, number)
        done = command.wait(PROMPT)
    assert done.returncode == code
    assert "KeyboardInterrupt" not in done.stderr
    if launcher == "local":
        assert done.stderr == TOLD[number]


def test_a_killed_rank_is_told_of_by_a_launcher_that_is_asked_to_stop_before_it_has_seen_it(toy):
    with start_command(toy.line("hang"), toy.env) as command:
        wait_until(lambda: toy.met(0) and toy.met(1), "the ranks meet")
        launcher = command.popen.pid
        rank = toy.met(1)
        assert rank is not None
        for pid, number in (
            (launcher, signal.SIGSTOP),
            (rank, signal.SIGKILL),
            (launcher, signal.SIGTERM),
            (launcher, signal.SIGCONT),
        ):
            os.kill(pid, number)
        done = command.wait(PROMPT)
    told = "vigpipe: rank 1 was ended by SIGKILL; out of memory?\n"
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, told)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_kills_ranks_that_are_stuck(toy, number, code):
    """The launcher waits for half a minute, and the second signal was ignored."""
    with start_command(toy.line("stuck"), toy.env) as command:
        wait_until((toy.folder / "stuck").exists, "rank 1 is stuck")
        wait_until(lambda: toy.met(0), "rank 0 has told its process id")
        os.kill(command.popen.pid, number)
        wait_until(lambda: state(toy.met(0)) in ("", "Z"), "rank 0 has ended, as it was asked")
        os.kill(command.popen.pid, signal.SIGINT)
        done = command.wait(PROMPT)
    assert (done.returncode, done.stderr) == (code, TOLD[number])


def test_a_signal_while_the_launcher_is_still_importing_torch(toy):
    with start_command(toy.line("hang"), toy.env, fresh=True) as command:
        wait_until(lambda: catches(command.popen.pid, signal.SIGHUP), "start_local has begun")
        os.killpg(command.popen.pid, signal.SIGINT)  # with what imports torch, as a terminal does
        done = command.wait(PROMPT)
    assert (done.returncode, done.stderr) == (130, TOLD[signal.SIGINT])


def test_a_signal_while_the_folder_is_being_made_leaves_none(toy):
    code = """
import signal, sys, tempfile
from vigpipe.launch import local

def made(*args, make=tempfile.mkdtemp, **options):
    path = make(*args, **options)
    if "/vigpipe-" in path:
        signal.raise_signal(signal.SIGTERM)
    return path

tempfile.mkdtemp = made
sys.exit(local.start_local(2, "builtins:print", [], 1))
"""
    done = run_command([sys.executable, "-c", code], toy.env)
    assert (done.returncode, done.stderr) == (143, "")


def test_a_killed_import_server_ends_the_run_with_a_sentence(toy):
    """It ended with code 255, and nobody said why."""
    with start_command(toy.line("hang"), toy.env) as command:
        wait_until(lambda: toy.met(0) and toy.met(1), "the ranks meet")
        stat = Path(f"/proc/{toy.met(0)}/stat").read_text().rpartition(")")[2].split()
        assert int(stat[1]) in command.processes()
        os.kill(int(stat[1]), signal.SIGKILL)
        assert_tells_of_the_server(command.wait())


def test_a_server_that_is_killed_amid_its_imports_ends_the_run_with_the_same_sentence(
    toy, tmp_path
):
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "with open(os.environ['PID'], 'w') as file: print(os.getpid(), file=file)\n"
        "time.sleep(60)\n"
    )
    start = """
from vigpipe.launch.local import preload, start_local
if __name__ == "__main__":
    preload("slow:main")
    raise SystemExit(start_local(2, "builtins:print", [], 1))
"""
    pid = tmp_path / "pid"
    env = {**toy.env, "PYTHONPATH": f"{ROOT}:{tmp_path}", "PID": str(pid)}
    with start_command([sys.executable, "-c", start], env, fresh=True) as command:
        wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"), "the server imports")
        wait_until(lambda: state(command.popen.pid) == "S", "the launcher waits for it")
        os.kill(int(pid.read_text()), signal.SIGKILL)
        assert_tells_of_the_server(command.wait())


def test_a_long_temporary_folder_is_no_obstacle(tmp_path):
    toy = Toy(tmp_path, "long" * 30)  # longer than the path of a Unix socket may be
    done = run_command(toy.line("ok"), toy.env)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_process_that_ranks_are_forked_from_ends_amid_its_imports(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    start = "from vigpipe.launch.local import preload; preload('slow:main')"
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    assert run_command([sys.executable, "-c", start], environment, fresh=True).returncode == 0


def assert_tells_of_the_server(done):
    assert done.returncode == 70
    (line,) = done.stderr.splitlines()
    assert line.startswith("vigpipe: the process that ranks are forked from has ended")


def is_blocked(toy: Toy) -> bool:
    """Whether the ranks' main threads sleep in gloo's wait: they have run out of Python to do."""
    return state(toy.met(0)) == state(toy.met(1)) == "S"


def state(pid: int | None) -> str:
    """A process's state as in ps(1); empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_the_process_that_ranks_are_forked_from_leaves_cuda_alone():
    """Forks of a process that has counted GPUs through CUDA cannot use them."""
    code = "import torch, vigpipe.training; assert not torch._C._cuda_isInBadFork()"
    assert run_command([sys.executable, "-c", code]).returncode == 0

"""The table of faults in docs/faults.md, row by row: what is told, the exit code, and how soon.

Every run is a real one with real ranks. After the fault the same command line goes on with --resume
auto, and its weights are those of a run that nothing has happened to.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.full_disk import files_of_at_most
from tests.small_digits import SMALL_DIGITS
from tests.world import GUARD, PROMPT, run_command, start_command, wait_until
from vigpipe.checkpoint.manifest import list_checkpoints, read_manifest
from vigpipe.cli import main
from vigpipe.run.record import RunRecord
from vigpipe.run.stop_and_save import ANSWER

pytestmark = pytest.mark.multiprocess

FAULTY, PARENT = (str(Path(__file__).with_name(f"{name}.py")) for name in ("faulty", "parent"))
TRAIN = ["-m", "vigpipe", "train"]
# The same with a limit on the size of files, which stands for a full disk: it needs no privileges.
ON_A_FULL_DISK = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
runpy.run_module("vigpipe", run_name="__main__", alter_sys=True)
"""
SMALL = [*SMALL_DIGITS, "--batch-size", "24", "--threads", "1"]
OPTIONS = ["--steps", "6", *SMALL, "--checkpoint-every", "2"]
# The test ends it. Nothing is evaluated: a step comes after the other.
ENDLESS = ["--steps", "50000", *SMALL, "--evaluate-every", "50000"]
STAGES = ["--stages", "2", "--microbatches", "2"]
REPLICAS = ["--dp", "2"]
BOTH = ["--stages", "2", "--dp", "2"]
ALONE = ["--microbatches", "2"]  # one rank, which is no launcher's
ENV = {"CUDA_VISIBLE_DEVICES": ""}


def line(*arguments):
    return [sys.executable, *arguments]


def faulty(fault, layout, folder, *more):
    given = ["train", *OPTIONS, *layout, "--out", str(folder), *more]
    num_ranks = {str(BOTH): "4", str(ALONE): "srun"}.get(str(layout), "2")
    return line(FAULTY, fault, num_ranks, *given)


def run_faulty(fault, layout, folder, *more, **env):
    """Run with a fault to the end; a file beside the folder tells when it happened."""
    env = {**ENV, "FAULT_DONE": str(folder.with_name("done")), **env}
    return run_command(faulty(fault, layout, folder, *more), env)


def happened(folder):
    """When the fault did."""
    return float(folder.with_name("done").read_text().split()[1])


def rows(folder):
    """The whole lines: a run may be writing another one."""
    whole, _, _ = (folder / "metrics.jsonl").read_text().rpartition("\n")
    return [json.loads(text) for text in whole.splitlines()]


def losses(folder):
    return {
        row["step"]: row["loss"] for row in rows(folder) if "event" not in row and "step" in row
    }


def run_here(folder, *more):
    """In this process, on the micro-batches that STAGES and REPLICAS make."""
    torch.set_num_threads(1)
    given = [*OPTIONS, "--microbatches", "2", "--out", str(folder), *more]
    assert main(["train", *given]) == 0
    return folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run that nothing happens to."""
    return run_here(tmp_path_factory.mktemp("unbroken") / "run")


def goes_on_as_if_nothing_had_been(folder, unbroken):
    """One process goes on with what two ranks have left: a layout is no part of a checkpoint."""
    run_here(folder, "--resume", "auto")
    is_the_same(folder, unbroken)


def is_the_same(folder, unbroken):
    assert losses(folder) == losses(unbroken)
    has_the_same_weights(folder, unbroken)


def has_the_same_weights(folder, unbroken):
    weights = [(run / "model.safetensors").read_bytes() for run in (folder, unbroken)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("place", "layout"),
    [("backward", STAGES), ("all-reduce", REPLICAS), ("checkpoint", STAGES), ("forward", BOTH)],
)
def test_a_rank_killed_in(place, layout, unbroken, folder):
    step, before = (4, 2) if place == "checkpoint" else (5, 4)
    newest = folder / "checkpoints" / f"step-{before:08d}"
    done = run_faulty(f"{place}:{step}:1:kill", layout, folder, FAULT_AFTER=str(newest))
    ended = time.time() - happened(folder)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.splitlines() == ["vigpipe: rank 1 was ended by SIGKILL; out of memory?"]
    assert ended < PROMPT  # to the end of the last process; the peer itself notices much earlier
    peer = json.loads((folder / "failed-rank0.json").read_text())
    assert (peer["kind"], peer["code"]) == ("lost peer", 70)
    seconds = peer["time"] - happened(folder)
    print(f"FIGURE killed in {place}: a peer noticed after {seconds:.2f} s, all ended {ended:.2f}")
    assert seconds < 10  # by default it would wait for 60
    assert list_checkpoints(folder)[0] == newest  # at most one interval is lost
    rescued = len(list(folder.glob("checkpoints/.rescue-00000004-*/*.json")))
    assert rescued == {str(BOTH): 3, str(REPLICAS): 1}.get(str(layout), 0)  # what the others had
    goes_on_as_if_nothing_had_been(folder, unbroken)


def test_sigterm_when_all_steps_are_done_costs_no_result(unbroken, folder):
    """A launcher sends it when a peer is lost: a rank must still say so, and save what it has."""
    done = run_faulty("weights:1:0:term", STAGES, folder)
    assert (done.returncode, done.stderr) == (0, "")
    is_the_same(folder, unbroken)


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.heavy)])
def test_a_rank_killed_beside_one_that_runs_ahead(killed, unbroken, folder):
    """The other replica knows the outcome of the step before only then, and saves its state.

    Rank 0 keeps the record: if it is the one that is killed, the row of that step is lost.
    """
    env = {"FAULT_AFTER": str(folder / "checkpoints" / "step-00000004"), "FAULT_AHEAD": "1"}
    done = run_faulty(f"all-reduce:6:{killed}:kill", REPLICAS, folder, **env)
    assert done.returncode == 128 + signal.SIGKILL
    assert len(list(folder.glob("checkpoints/.rescue-00000005-*/*.json"))) == 1
    run_here(folder, "--resume", "auto")
    lost = {5} if killed == 0 else set()
    assert losses(folder).keys() == losses(unbroken).keys() - lost
    assert losses(folder).items() <= losses(unbroken).items()
    has_the_same_weights(folder, unbroken)


def test_a_frozen_rank_is_noticed_at_the_timeout(unbroken, folder):
    done = run_faulty("backward:5:1:freeze", BOTH, folder, "--timeout", "10")
    assert done.returncode == 70
    assert "rank 1 answered no more, and was killed; was it stopped?" in done.stderr
    # The timeout counts from when a peer began to wait, which may be before the rank froze.
    records = [json.loads(path.read_text()) for path in folder.glob("failed-rank*.json")]
    earliest = min(records, key=lambda record: record["time"])
    assert "Timed out waiting 10000ms" in earliest["message"]
    seconds = earliest["time"] - happened(folder)
    print(f"FIGURE frozen: noticed after {seconds:.2f} s with --timeout 10")
    assert seconds < 30  # by default it would be 60
    goes_on_as_if_nothing_had_been(folder, unbroken)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", "rank 1: RuntimeError: the fault of the test"),
        ("memory", "rank 1 ran out of memory"),
    ],
)
def test_an_exception_on_one_rank(what, message, unbroken, folder):
    done = run_faulty(f"backward:3:1:{what}", STAGES, folder)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == (what == "raise")
    assert "lost a peer" not in done.stderr
    # To the end of the last process; who waited for a silent peer would wait for a minute.
    assert time.time() - happened(folder) < PROMPT
    record = json.loads((folder / "failed-rank1.json").read_text())
    assert (record["kind"], record["rank"], record["code"]) == ("own", 1, 1)
    if what == "raise":
        goes_on_as_if_nothing_had_been(folder, unbroken)


KILLED_TWICE = """
import os, signal, sys
from pathlib import Path
from vigpipe import training
from vigpipe.cli import main
from vigpipe.launch.environment import from_environment

def killed(rank_state, batch, wishes):
    mark = folder / f"{rank_state.step + 1}"
    if rank_state.step + 1 in (4, 6) and from_environment(os.environ).rank == 0:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return train_step(rank_state, batch, wishes)

folder, train_step = Path(sys.argv[1]), training.train_step
training.train_step = killed
sys.exit(main(sys.argv[2:]))
"""


def test_restarts_need_no_hand(unbroken, folder, tmp_path):
    given = ["train", *OPTIONS, *STAGES, "--out", str(folder), "--max-restarts", "2"]
    done = run_command(line("-c", KILLED_TWICE, str(tmp_path), *given), ENV)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 2, from step-0000000" in done.stderr
    is_the_same(folder, unbroken)


def at_step(folder, step):
    path = folder / "metrics.jsonl"
    return path.exists() and f'"step": {step},' in path.read_text()


def is_listening(port):
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


def rank_0(folder):
    return int((folder / ".lock").read_text().split()[1])


@pytest.mark.parametrize("which", ["launcher", "rank"])
def test_sigterm_saves_and_asks_to_be_started_again(which, folder):
    command = line(*TRAIN, *ENDLESS, *STAGES, "--out", str(folder), "--checkpoint-every", "never")
    with start_command(command, ENV) as running:
        wait_until(lambda: at_step(folder, 3), "step 3")
        victim = running.popen.pid if which == "launcher" else rank_0(folder)
        began = time.monotonic()
        os.kill(victim, signal.SIGTERM)
        done = running.wait(PROMPT)
    seconds = time.monotonic() - began
    print(f"FIGURE SIGTERM to a {which}: saved and ended in {seconds:.2f} s")
    assert (done.returncode, done.stderr) == (75, "")
    assert "got SIGTERM) with a checkpoint in" in done.stdout
    saved = int(list_checkpoints(folder)[0].name[-8:])
    assert saved == max(losses(folder))  # not a step is lost


POOL = [*REPLICAS, "--strategy", "periodic", "--average-every", "3", "--items", "pool"]


def test_replicas_that_take_steps_of_their_own_stop_together_and_go_on(folder):
    command = line(*TRAIN, *ENDLESS, *POOL, "--out", str(folder), "--checkpoint-every", "2")
    with start_command(command, ENV) as running:
        # With a pool, no step is sure to be one of replica 0, whose rows these are.
        wait_until(lambda: bool(list_checkpoints(folder)) and len(rows(folder)) > 4, "five rows")
        os.kill(running.popen.pid, signal.SIGTERM)
        done = running.wait()
    assert (done.returncode, done.stderr) == (75, "")
    checkpoint = list_checkpoints(folder)[0]
    saved = read_manifest(checkpoint)
    progress = saved.replicas["progress"]
    assert (
        sum(progress["taken"]) + sum(item >= 0 for item in progress["leases"])
        == (progress["drawn"])
    )
    # Rows after the checkpoint would be taken twice.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "epoch": 1, "loss": 1.0, "replica": 0, "item": 1}\n')
    options = [*TRAIN, *ENDLESS, *POOL, "--out", str(folder), "--resume", "auto"]
    options[options.index("--steps") + 1] = str(saved.step + 3)
    done = run_command(line(*options), ENV)
    assert (done.returncode, done.stderr) == (0, "")
    items = [row["item"] for row in rows(folder) if "item" in row]
    assert len(items) == len(set(items))
    assert max(items) < 2 * (saved.step + 3)
    each = json.loads((folder / "summary.json").read_text())["replicas"]["each"]
    given_back = sum(item >= 0 for item in progress["leases"])
    new_items = 2 * (saved.step + 3) - progress["drawn"] + given_back
    assert sum(replica["items"] for replica in each) == new_items


def test_a_killed_launcher_takes_along_stopped_ranks_and_its_folders(folder, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    options = [*ENDLESS, *STAGES, "--out", str(folder)]
    command = line(PARENT, *line(*TRAIN, *options))
    with start_command(command, {**ENV, "TMPDIR": str(temporary)}, fresh=True) as running:
        wait_until(lambda: at_step(folder, 3), "step 3", running=running)
        launcher = int((running.folder / "stdout").read_text().split()[0])
        began = time.monotonic()
        forks = [pid for pid in running.processes() if is_fork_of_a_server(pid)]
        assert len(forks) == 3  # the server and its ranks
        for pid in forks:
            os.kill(pid, signal.SIGSTOP)
        os.kill(launcher, signal.SIGKILL)
        done = running.wait(PROMPT)  # fails if something is left
    print(f"FIGURE launcher killed: all ended in {time.monotonic() - began:.2f} s")
    # Python's own helper clears the launcher's semaphores away, and said so.
    assert (done.returncode, done.stderr) == (128 + signal.SIGKILL, "")
    assert not list(temporary.iterdir())


def is_fork_of_a_server(pid):
    """Whether it is one or the server itself, but for the process that removes folders."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"multiprocessing.forkserver" in words and os.getsid(pid) == os.getsid(0)


STUCK = """
import ctypes, sys
from pathlib import Path
from vigpipe import training
from vigpipe.cli import main

def stuck(*_):
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    Path(sys.argv[1]).touch()
    libc.pthread_mutex_lock(mutex)

training.train_step = stuck
sys.exit(main(sys.argv[2:]))
"""


def test_a_run_that_is_stuck_does_not_outlive_sigterm_by_more_than_the_timeout(tmp_path):
    command = line("-c", STUCK, str(tmp_path / "stuck"), "train", *ENDLESS, "--timeout", "1")
    with start_command([*command, "--out", str(tmp_path / "run")], ENV) as running:
        wait_until((tmp_path / "stuck").exists, "the run is stuck in C code")
        os.kill(running.popen.pid, signal.SIGTERM)
        done = running.wait()
    assert done.returncode == 143
    (told,) = done.stderr.splitlines()
    assert told.endswith("got SIGTERM, and no step has ended for 1 s: it was ended")


def test_ctrl_c_saves_and_says_how_to_go_on(folder):
    """A terminal sends it to everybody: the launcher, ranks, readers, and what they come from."""
    given = [*ENDLESS, *STAGES, "--workers", "1", "--out", str(folder)]
    with start_command(line(*TRAIN, *given), ENV) as running:
        wait_until(lambda: at_step(folder, 2), "step 2")
        os.killpg(running.popen.pid, signal.SIGINT)
        done = running.wait()
    assert (done.returncode, done.stderr) == (130, f"vigpipe: {ANSWER}\n")
    assert f"(Ctrl-C) with a checkpoint in {folder}" in done.stdout
    assert f"go on with --out {folder} --resume auto" in done.stdout
    assert int(list_checkpoints(folder)[0].name[-8:]) == max(losses(folder))


def test_ctrl_c_and_one_rank_alone_costs_no_step(unbroken, folder):
    done = run_faulty("step:3:0:ctrl-c", ALONE, folder)
    assert (done.returncode, done.stderr) == (130, f"vigpipe: {ANSWER}\n")
    assert "stopped after step 3 of 6 (Ctrl-C) with a checkpoint in " in done.stdout
    goes_on_as_if_nothing_had_been(folder, unbroken)


def test_an_error_that_ctrl_c_brings_about_before_a_step_is_none(folder, monkeypatch, capfd):
    """It also ends the compilers that the first step waits for."""

    def killed(*_):
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("the compiler was ended by SIGINT")

    monkeypatch.setattr("vigpipe.training.train_step", killed)
    assert main(["train", *OPTIONS, "--out", str(folder)]) == 130
    assert "vigpipe: stopped by Ctrl-C, with nothing to save\n" in capfd.readouterr().err


# Where Ctrl-C comes, with one rank and with four, the step after which the run has stopped (0: with
# nothing to save), and whether it has been done all the same. Of these some in every heavy run, as
# each takes three starts of ranks, and all with VIGPIPE_MOMENTS=all.
OFTEN = "meeting", "evaluation", "checkpoint", "end"
MOMENTS = [
    ("start", "start:0", "start:0", 0),
    ("data", "data:0", "data:0", 0),
    ("meeting", "meeting:0", "meeting:0", 0),
    ("building", "building:0", "building:0", 0),
    ("first step", "step:1", "forward:1", 1),
    ("later step", "step:4", "all-reduce:4", 4),
    ("evaluation", "evaluation:3", "evaluation:3", 4),
    ("checkpoint", "checkpoint:2", "checkpoint:2", None),  # a thread writes it meanwhile
    ("last step", "step:6", "backward:6", 6),
    ("end", "weights:0", "weights:0", 6),
]


@pytest.mark.heavy
@pytest.mark.parametrize("layout", [ALONE, BOTH], ids=["one rank", "four ranks"])
def test_ctrl_c_at_any_moment_costs_nothing(layout, tmp_path, monkeypatch):
    """Nothing is left running, and the run goes on to the same weights, bit for bit."""
    three_steps_an_epoch = [option.replace("24", "48") for option in OPTIONS]
    monkeypatch.setitem(globals(), "OPTIONS", three_steps_an_epoch)
    unbroken = run_here(tmp_path / "unbroken")
    wrong = []
    for name, alone, together, step in MOMENTS:
        if name not in OFTEN and os.environ.get("VIGPIPE_MOMENTS") != "all":
            continue
        folder = tmp_path / name.replace(" ", "-") / "run"
        folder.parent.mkdir()
        place = f"{alone}:0" if layout == ALONE else f"{together}:1"
        done = run_faulty(f"{place}:ctrl-c", layout, folder)
        code = 0 if name == "end" else 130
        said = f"{ANSWER}\n" if step != 0 else "stopped by Ctrl-C, with nothing to save\n"
        (told,) = [text for text in done.stdout.splitlines() if "(Ctrl-C)" in text] or [""]
        saved = f"stopped after step {'' if step is None else f'{step} of 6 (Ctrl-C)'}"
        is_told = told.startswith(saved) and told.endswith(f"--out {folder} --resume auto")
        is_told = is_told if code and step != 0 else not told
        print(f"MOMENT {name}: {done.returncode}; {done.stderr.strip()}; {told}")
        if (done.returncode, done.stderr) != (code, f"vigpipe: {said}") or not is_told:
            wrong.append((name, done.returncode, done.stderr, done.stdout))
        if code:
            run_here(folder, "--resume", "auto")
        is_the_same(folder, unbroken)
    assert not wrong


def test_a_loss_that_is_no_number_stops_and_names_step_and_block(folder):
    done = run_faulty("loss:3:1:nan", REPLICAS, folder)
    assert done.returncode == 76
    (told,) = done.stderr.splitlines()
    assert told.startswith("vigpipe: step 3: the loss or a gradient is NaN or infinite; block 0: ")
    assert list_checkpoints(folder)[0].name == "step-00000002"
    assert max(losses(folder)) == 2


def test_such_a_step_can_be_skipped(folder):
    done = run_faulty("loss:3:0:nan", STAGES, folder, "--on-nan", "skip")
    assert done.returncode == 0, done.stderr
    (event,) = [row for row in rows(folder) if "event" in row]
    assert (event["event"], event["step"]) == ("skipped", 3)
    assert "block 0: " in event["message"]
    assert event["message"] in done.stdout.replace("\n", " ")
    assert sorted(losses(folder)) == [1, 2, 4, 5, 6]


def test_ranks_of_different_options_are_told_apart(folder):
    done = run_faulty("options:0:1:--lr=0.2", STAGES, folder, "--lr=0.1")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "vigpipe: ranks differ in their options: lr is 0.2 on rank 1, but 0.1 on rank 0; start all "
        "of them with the same command line, software and data"
    ]


def test_a_second_run_in_the_same_folder_is_refused_and_disturbs_nothing(folder):
    command = line(*TRAIN, *ENDLESS, "--out", str(folder))
    with start_command(command, ENV) as first:
        wait_until(lambda: at_step(folder, 2), "step 2")
        plain = run_command(command, ENV)
        resumed = run_command([*command, "--resume", "auto"], ENV)
        steps = max(losses(folder))
        wait_until(lambda: max(losses(folder)) > steps, "the first run goes on")
        assert first.popen.poll() is None
    assert (plain.returncode, resumed.returncode) == (2, 2)
    assert "holds config.toml already" in plain.stderr
    assert f"another run is writing to it (process {first.popen.pid} on " in resumed.stderr


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    done = run_command(line(*TRAIN, *OPTIONS, *STAGES, "--out", str(tmp_path / "file" / "a")), ENV)
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_disk_that_is_full_of_checkpoints_leaves_the_run_going(folder, unbroken):
    train = ["train", *OPTIONS, "--microbatches", "2", "--out", str(folder)]
    # A checkpoint has the weights three times.
    limit = (unbroken / "model.safetensors").stat().st_size * 3 // 2
    done = run_command(line("-c", ON_A_FULL_DISK, str(limit), *train))
    assert done.returncode == 0, done.stderr
    assert "checkpoint of step 2: could not be written to" in done.stdout
    assert list_checkpoints(folder) == []
    is_the_same(folder, unbroken)


def test_a_disk_that_is_full_of_rows_keeps_them_until_there_is_room(tmp_path):
    told: list[str] = []
    record = RunRecord(tmp_path, {}, log=told.append)
    record.add(step=1, loss=0.5)
    with files_of_at_most(60):
        for step in (2, 3, 4):
            record.add(step=step, loss=0.5)
    assert len(told) == 1
    assert "metrics.jsonl: cannot be written (File too large); the run goes on" in told[0]
    record.add(step=5, loss=0.5)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]
    record.finish({})


def test_weights_that_find_no_room_are_one_sentence(folder):
    train = ["train", "--steps", "1", *SMALL, "--out", str(folder)]
    done = run_command(line("-c", ON_A_FULL_DISK, "30000", *train))
    assert done.returncode == 2
    assert "model.safetensors: cannot be written (" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_straggler_is_named(folder):
    """One of two replicas is stopped most of the time: far longer than any load slows the other.

    A busy machine may make a straggler of either before. That a noisy one raises no alarm, and how
    many steps an alarm takes, is shown on numbers, in tests/run/test_stragglers.py.
    """
    command = line(*TRAIN, *ENDLESS, *REPLICAS, "--out", str(folder))
    named = "rank 0 (stage 0) is a straggler: its work takes "

    def events():
        return [row for row in rows(folder) if "event" in row]

    with start_command(command, ENV):
        wait_until(lambda: at_step(folder, 25), "step 25")
        began = max(losses(folder))
        victim = rank_0(folder)
        deadline = time.monotonic() + GUARD
        while not (of_rank_0 := [e for e in events() if e["message"].startswith(named)]):
            assert time.monotonic() < deadline
            os.kill(victim, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(victim, signal.SIGCONT)
            time.sleep(0.03)
    assert {e["event"] for e in events()} == {"straggler"}
    step = of_rank_0[0]["step"]
    assert all(e["message"].startswith(named) for e in events() if e["step"] == step)
    print(f"FIGURE straggler: named {step - began} steps after it began")


def test_clocks_that_jump_change_nothing(folder, unbroken):
    done = run_faulty("clock:0:1:jump", STAGES, folder)
    assert (done.returncode, done.stderr) == (0, "")
    is_the_same(folder, unbroken)


def test_elastic_goes_on_with_the_ranks_that_there_are(folder, unbroken):
    """Two replicas were; one rank, which something else has started, does the work of both."""
    assert run_faulty("step:3:1:term", REPLICAS, folder).returncode == 75
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    one |= {"TORCHELASTIC_RUN_ID": "one", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    given = [*OPTIONS, *REPLICAS, "--elastic", "--resume", "auto", "--out", str(folder)]
    done = run_command(line(*TRAIN, *given), {**ENV, **one})
    assert done.returncode == 0, done.stderr
    says_that_there_was_another_replica(folder, done.stdout)
    is_the_same(folder, unbroken)


def says_that_there_was_another_replica(folder, stdout):
    *_, resumed = (row for row in rows(folder) if row.get("event") == "resumed")
    assert resumed["message"] == "from a checkpoint of 2 replicas × 1 stage, 1 micro-batch, gpipe"
    assert resumed["replicas_before"] == 2
    assert "\n2 micro-batches, on cpu; " in stdout


@pytest.mark.heavy
def test_elastic_goes_on_with_the_replicas_that_are_left(folder):
    """Two agents of torchrun stand for two nodes; one of them dies with its rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    conf = "last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=3"
    agent = line("-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1")
    agent += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    agent += ["--rdzv-id=elastic", f"--rdzv-conf={conf}", "--local-addr=127.0.0.1"]
    agent += ["-m", "vigpipe.train", "--steps", "40", *ENDLESS[2:], *REPLICAS, "--out", str(folder)]
    agent += ["--elastic", "--resume", "auto", "--checkpoint-every", "2", "--timeout", "10"]
    with start_command(agent, ENV) as first:
        wait_until(lambda: is_listening(port), "the first agent listens")
        with start_command(agent, ENV):
            wait_until(lambda: at_step(folder, 4), "step 4")
        # Leaving the block has killed the second agent and its rank.
        done = first.wait()
    assert done.returncode == 0, done.stderr[-3000:]
    says_that_there_was_another_replica(folder, done.stdout)
    assert sorted(losses(folder)) == list(range(1, 41))

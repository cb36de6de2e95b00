"""Which failure is told, by whom, and with which exit code."""

import json
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from tests.world import run_ranks
from vigpipe import errors
from vigpipe.errors import INTERRUPTED, InputError, PeerLostError, TooLarge, UnreadableImage
from vigpipe.launch import failures
from vigpipe.launch.environment import Launch

ALONE = Launch(0, 1, 0, 1, "alone", None, "job")
RANK_1 = Launch(1, 2, 1, 2, "torchrun", "env://", "job")
HOST = socket.gethostname()
LOST = "[/src/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:9"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(failures, "CAUSE_SECONDS", 0.2)


def run(error, launch=ALONE, folders=()):
    def work():
        raise error

    return failures.run_rank(work, launch, folders, lambda: failures.Advice("cut it", "skip it"))


def record(folder, **facts):
    of_any = {"rank": 0, "host": "here", "job": "job", "time": time.time(), "message": "it broke"}
    facts = {**of_any, "kind": "own", "code": 1, **facts}
    (folder / f"failed-rank{facts['rank']}.json").write_text(json.dumps(facts))


def test_the_record_of_an_earlier_run_goes(tmp_path):
    record(tmp_path)
    assert failures.run_rank(lambda: 0, ALONE, [tmp_path]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("found_by", "rank", "local_rank", "told"),
    [
        *((who, 0, 0, "vigpipe: no data\n") for who in ("rank", "host", "job")),
        ("job", 2, 0, ""),
        ("host", 2, 0, f"vigpipe: {HOST}: no data\n"),
        ("host", 3, 1, ""),
        ("rank", 3, 1, f"vigpipe: {HOST}: no data\n"),
        ("memory", 3, 1, f"vigpipe: {HOST}: no data\n"),
    ],
)
def test_wrong_input_is_told_by_rank_0_and_where_it_may_differ(
    found_by, rank, local_rank, told, capfd
):
    """Symptom: 512 ranks of srun said the same sentence."""
    error = TooLarge("no data") if found_by == "memory" else InputError("no data")
    if found_by != "rank":
        with pytest.raises(InputError), errors.found_by("job" if found_by == "job" else "host"):
            raise error
    assert run(error, Launch(rank, 4, local_rank, 2, "torchrun", "env://", "job")) == 2
    assert capfd.readouterr().err == told


NO_ROOM = (
    "vigpipe: there is no room for a library, a thread or a file (failed to map segment); raise "
    "ulimit -v or -u, or leave memory free\n"
)
OLD_NEWS = ({"kind": "lost peer"}, {"job": "another"}, {"time": 0.0})
OWN_NEWS = "vigpipe: rank 1 lost a peer: RuntimeError: Connection closed by peer [127.0.0.1]:9\n"


@pytest.mark.parametrize(
    ("error", "launch", "other", "code", "told"),
    [
        (InputError("no such plan"), ALONE, {}, 2, "vigpipe: no such plan\n"),
        # Python's own MemoryError has no words; it ended in a traceback of IndexError.
        (MemoryError(), ALONE, {}, 1, "vigpipe: rank 0 ran out of memory (MemoryError); cut it\n"),
        (UnreadableImage("x.png: bad"), ALONE, {}, 2, "vigpipe: x.png: bad, or skip it\n"),
        (ImportError("x.so: failed to map segment from shared object"), ALONE, {}, 1, NO_ROOM),
        # A mistake of all ranks is told by rank 0, and one of a single rank by that rank.
        (InputError("no such plan"), RANK_1, {"message": "no such plan"}, 2, ""),
        (InputError("no data"), RANK_1, {"message": "another"}, 2, f"vigpipe: {HOST}: no data\n"),
        # Who loses a peer is silent if the cause is known.
        (RuntimeError(LOST), RANK_1, {"message": "KeyError: 'x'"}, 70, ""),
        *((RuntimeError(LOST), RANK_1, {"message": "x", **o}, 70, OWN_NEWS) for o in OLD_NEWS),
    ],
)
def test_a_failure_is_told_once(error, launch, other, code, told, tmp_path, capfd):
    if other:
        record(tmp_path, **other)
    assert run(error, launch, [tmp_path]) == code
    assert capfd.readouterr().err == told


@pytest.mark.parametrize(
    ("saved", "env", "told"),
    [
        ((), {}, "vigpipe: stopped by Ctrl-C, with nothing to save\n"),
        (("and the newest is x",), {}, "vigpipe: stopped by Ctrl-C, and the newest is x\n"),
        ((), {"RANK": "1"}, ""),  # of torchrun
        ((), {"SLURM_PROCID": "1"}, ""),
        ((), {"RANK": "0", "VIGPIPE_LOCAL_FOLDER": "x"}, ""),  # its launcher tells
    ],
)
def test_ctrl_c_is_told_once_with_what_is_saved(saved, env, told, monkeypatch, capfd):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyboardInterrupt) as raised:
        run(KeyboardInterrupt(*saved))
    assert failures.tell_interrupted(raised.value) == INTERRUPTED
    assert capfd.readouterr().err == told


def test_an_unexpected_error_has_its_traceback_rank_and_record(tmp_path, capfd):
    folder = tmp_path / "made on demand"
    assert run(KeyError("x"), RANK_1, [folder]) == 1
    text = capfd.readouterr().err
    assert text.startswith("Traceback")
    assert text.endswith("\nvigpipe: rank 1: KeyError: 'x'\n")
    (written,) = failures.read_failures(folder, "job")
    assert (written["rank"], written["code"], written["kind"]) == (1, 1, "own")
    assert written["message"] == "KeyError: 'x'"
    assert written["host"]
    assert [path.name for path in folder.iterdir()] == ["failed-rank1.json"]


def test_a_folder_that_cannot_be_written_does_not_hide_the_failure(tmp_path, capfd):
    (tmp_path / "file").touch()
    assert run(InputError("no"), ALONE, [tmp_path / "file"]) == 2
    assert capfd.readouterr().err == "vigpipe: no\n"


def test_records_that_are_not_ours_are_passed_over(tmp_path):
    (tmp_path / "failed-rank0.json").write_text("{half of")
    (tmp_path / "failed-rank1.json").write_text("[]")
    (tmp_path / "failed-rank4.json").write_text(100_000 * "[")
    os.mkfifo(tmp_path / "failed-rank5.json")
    record(tmp_path, rank=3, time=2.0)
    record(tmp_path, rank=2, time=1.0)
    assert [r["rank"] for r in failures.read_failures(tmp_path, "job")] == [2, 3]
    assert failures.read_failures(tmp_path / "missing", "job") == []
    before = set(os.listdir(tmp_path))
    failures.remove_records(tmp_path, 0)
    assert set(os.listdir(tmp_path)) == before - {"failed-rank2.json", "failed-rank3.json"}
    assert run(InputError("no"), RANK_1, [tmp_path]) == 2
    assert (tmp_path / "failed-rank1.json").read_text() == "[]"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(LOST), True),
        (RuntimeError("[x.cc:545] Read error [::1]:1: Connection reset by peer. GLHF!"), True),
        (RuntimeError("[x.cc:78] Timed out waiting 5000ms for recv operation to complete"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistStoreError("wait timeout after 5000ms, keys: /job/0//cpu//0/1"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        # What the NCCL of torch 2.15 says.
        (RuntimeError("NCCL communicator was aborted after a previous error"), True),
        (RuntimeError("Operation timed out after 60000 ms"), True),
        (RuntimeError("timeout - collective operation timed out"), True),
        (RuntimeError("nccl hit async error on rank 1: unhandled system error"), True),
        (PeerLostError("a process of replica 2 has ended"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # a data set on the network
        (InputError("Broken pipe"), False),
    ],
)
def test_is_lost_peer(error, lost):
    assert failures.is_lost_peer(error) is lost
    wrapped = RuntimeError("stage 1 failed")
    wrapped.__cause__ = error
    assert failures.is_lost_peer(wrapped) is lost


def lose_rank_1(rank: int, world_size: int) -> bool:
    if rank == 1:
        dist.destroy_process_group()
        return True
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        return failures.is_lost_peer(error)
    return False


@pytest.mark.multiprocess
def test_is_lost_peer_knows_what_this_torch_says():
    assert run_ranks(lose_rank_1, 2) == [True, True]

"""How ranks end together: the cause is told once, and nobody is left waiting.

A rank that fails writes failed-rank<R>.json and leaves at once, so its peers see closed sockets. A
peer that only lost somebody looks for such a record before it speaks, so that the user reads the
cause once and not once per rank.
"""

import contextlib
import json
import multiprocessing
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vigpipe.errors import INTERRUPTED, NOT_FINITE, PEER_LOST, SAVED, WRONG_INPUT, InputError
from vigpipe.files.atomic import write_whole
from vigpipe.launch.environment import FOLDER_VARIABLE, LAUNCHER_VARIABLE, Launch

SAVED_FILE = "saved"  # in start_local's folder: its ranks have stopped with a checkpoint
UNEXPECTED = 1  # Python's own code for an exception nobody caught
CAUSE_SECONDS = 2.0  # how long a rank waits for another one to tell the cause

# What gloo, NCCL and the stores say when the other side is gone or silent (torch 2.11 to 2.15).
LOST_PEER = re.compile(
    r"(closed|reset) by peer|Broken pipe|(Read|Write) error \[|Connection refused"
    r"|Timed out waiting \d+ms|Application timeout caused pair closure|monitoredBarrier"
    r"|wait timeout after \d+ms|Timed out after \d+ seconds waiting for clients"
    r"|Connection was likely closed|failed to recv, got 0 bytes|socket has timed out"
    r"|NCCL (communicator|operation).*(abort|timed? ?out)|ncclRemoteError"
    r"|[Ww]atchdog caught collective|remote process (exited|has terminated)",
    re.DOTALL,
)

OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|out of memory")


def run_rank(work: Callable[[], int], launch: Launch, failures: Sequence[Path] = ()) -> int:
    """Do one rank's work and return its exit code; end every rank when one fails.

    A rank that fails while a process group is up does not come back from here: it leaves through
    os._exit, because half-open collectives and their threads can hold up Python's own exit, and
    its peers wait for its sockets to close.

    Args:
        work: returns the exit code of a run that came to its end. It ends with a barrier if the
            code is not 0, because launchers end the other ranks as soon as one returns that.
        launch: this rank's place.
        failures: folders for failed-rank<R>.json, common to all ranks; `work` may add some.
    """
    began = time.time()
    private = []
    if launch.launcher == "local":
        private.append(Path(os.environ[FOLDER_VARIABLE]))
        write_whole(pid_file(private[0], launch.rank), str(os.getpid()))
        die_with(int(os.environ[LAUNCHER_VARIABLE]))
    for folder in (*failures, *private):
        with contextlib.suppress(OSError):
            record_file(folder, launch.rank).unlink()  # of an earlier run
    try:
        code = work()
        if code == SAVED:
            for folder in private:
                (folder / SAVED_FILE).touch()  # the launcher may have been asked to stop, too
            if launch.world_size > 1:
                # A launcher sends SIGTERM to the others once one rank has returned that. It would
                # hide the code of a rank that takes longer to leave: srun tells the largest.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        code = _report(error, launch, [*failures, *private], began)
        if _has_process_group():
            _leave(code)
        return code
    if _has_process_group():
        import torch.distributed as dist

        dist.destroy_process_group()
    return code


def record_file(folder: Path, rank: int) -> Path:
    """Why a rank failed."""
    return folder / f"failed-rank{rank}.json"


def remove_records(folder: Path, first_rank: int) -> None:
    """Remove the failures that ranks of an earlier run have left in the folder of this one.

    Args:
        folder: of the run.
        first_rank: records of lower ranks stay. Give the number of ranks: each of them removes its
            own record when it starts, and may have failed again since.
    """
    for path in folder.glob("failed-rank*.json"):
        rank = re.fullmatch(r"failed-rank([0-9]+)\.json", path.name)
        if rank and int(rank[1]) >= first_rank:
            with contextlib.suppress(OSError):
                path.unlink()


def pid_file(folder: Path, rank: int) -> Path:
    """In start_local's folder: the process of a rank."""
    return folder / f"rank{rank}.pid"


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or silent."""
    if isinstance(error, RuntimeError) and LOST_PEER.search(str(error)):
        return True
    return error.__cause__ is not None and is_lost_peer(error.__cause__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be had, on the host or on a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))


def read_failures(folder: Path, run_id: str, since: float = 0.0) -> list[dict[str, Any]]:
    """Read the records of one run's failures, earliest first."""
    records = []
    for path in folder.glob("failed-rank*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads(path.read_text())
            if isinstance(record, dict) and record["job"] == run_id and record["time"] >= since:
                records.append(record)
    return sorted(records, key=lambda record: record["time"])


def _report(error: Exception, launch: Launch, folders: Sequence[Path], began: float) -> int:
    """Record the failure, tell the user unless another rank does, and return the exit code."""
    message = f"{type(error).__name__}: {error}"
    kind, code = "own", UNEXPECTED
    has_met = _has_process_group()
    alike = not has_met  # every rank has read the same flags and files so far
    if isinstance(error, InputError):
        message, alike = str(error), True
        code, text = WRONG_INPUT, f"{message}\n"
    elif isinstance(error, FloatingPointError):  # every rank of a last stage has the same loss
        message, alike = str(error), True
        code, text = NOT_FINITE, f"{message}\n"
    elif is_out_of_memory(error):
        message = (
            f"rank {launch.rank} ran out of memory ({str(error).splitlines()[0]}); take more "
            "--microbatches, --recompute except-last, a smaller --batch-size, or more memory"
        )
        text = f"{message}\n"
    elif launch.world_size > 1 and is_lost_peer(error):
        # Gloo adds its source file in front and advice behind.
        message = re.sub(r"\[\S*:\d+\] ", "", message, count=1).split(". This is typically")[0]
        kind, code, text = "lost peer", PEER_LOST, f"rank {launch.rank} lost a peer: {message}\n"
    else:
        text = "".join(traceback.format_exception(error))
        text += f"rank {launch.rank}: {message}\n" if launch.world_size > 1 else ""
    with _undisturbed():
        _record(launch, folders, code=code, kind=kind, message=message)

    def told_by(other: dict[str, Any]) -> bool:
        if kind == "lost peer":
            return other["kind"] == "own" and other["rank"] != launch.rank
        # What ranks find wrong before they have met has one cause, whatever each of them sees.
        same = other["message"] == message or (not has_met and other["code"] == code == WRONG_INPUT)
        return other["rank"] < launch.rank and same

    wait = kind == "lost peer" or (alike and launch.rank > 0)
    if kind == "lost peer" and launch.launcher == "local":
        return code  # start_local sees who was killed or has frozen, and tells
    if not wait or not _appears(told_by, launch, folders, began):
        sys.stderr.write(text)  # one call, so that ranks do not mix their lines
    return code


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold off the SIGTERM by which launchers end the peers of a rank that is gone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _record(launch: Launch, folders: Sequence[Path], **facts: Any) -> None:  # noqa: ANN401
    record = {"rank": launch.rank, "host": socket.gethostname(), "job": launch.run_id, **facts}
    for folder in folders:
        with contextlib.suppress(OSError):  # a full disk must not hide the failure itself
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**record, "time": time.time()}, indent=1)
            write_whole(record_file(folder, launch.rank), text)


def _appears(
    wanted: Callable[[dict[str, Any]], bool],
    launch: Launch,
    folders: Sequence[Path],
    began: float,
) -> bool:
    """Wait for a record of this run.

    Without a folder this waits all the same: under torchrun and srun --kill-on-bad-exit the other
    rank's exit ends this one meanwhile, and only a rank that fails for itself gets to speak.
    """
    deadline = time.monotonic() + CAUSE_SECONDS
    while time.monotonic() < deadline:
        for folder in folders:
            # An earlier run may have left its records; clocks of two hosts may differ a little.
            if any(map(wanted, read_failures(folder, launch.run_id, since=began - 5.0))):
                return True
        time.sleep(0.05)
    return False


def _has_process_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _leave(code: int) -> NoReturn:
    for child in multiprocessing.active_children():
        child.kill()  # forked data loaders hold copies of this rank's sockets
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with(launcher: int) -> None:
    """End this process when its launcher ends, however that happens (Linux only).

    The launcher is not this process's parent, so a thread waits for it; threads run during gloo's
    waits.
    """
    if not hasattr(os, "pidfd_open"):
        return

    def wait() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            select.select([os.pidfd_open(launcher)], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()

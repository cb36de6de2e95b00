"""End all ranks when one fails: the user reads the cause once, and no rank is left waiting.

A rank that fails writes failed-rank<R>.json and exits at once, so its peers see closed sockets. A
peer that only lost another rank looks for such a record before it prints anything.
"""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vigpipe.errors import (
    INTERRUPTED,
    NOT_FINITE,
    PEER_LOST,
    SAVED,
    WRONG_INPUT,
    InputError,
    PeerLostError,
    StrangerError,
    TooLarge,
    UnreachableError,
    UnreadableImage,
    WorkerError,
)
from vigpipe.files.atomic import write_atomically
from vigpipe.files.names import escaped
from vigpipe.files.untrusted import read_json
from vigpipe.launch.environment import (
    FOLDER_VARIABLE,
    Launch,
    from_environment,
    tells_for_all,
)
from vigpipe.launch.ports import why_not_bound
from vigpipe.launch.reach import silent_hosts
from vigpipe.launch.signals import handled_signals
from vigpipe.messages import line, tell

# Ranks that have stopped with a checkpoint leave this file in start_local's folder.
SAVED_FILE = "saved"
_RECORD_KEYS = {"rank", "host", "job", "code", "kind", "message", "time"}
_MOST_RECORD_BYTES = 1 << 20
UNEXPECTED = 1  # Python's own code for an exception nobody caught
CAUSE_SECONDS = 2.0  # how long a rank waits for another rank to record the cause

# What gloo, NCCL and the stores say when the other side is gone or silent (torch 2.11 to 2.15).
LOST_PEER = re.compile(
    r"(closed|reset) by peer|Broken pipe|(Read|Write) error \[|Connection refused"
    r"|Timed out waiting \d+ms|Application timeout caused pair closure|monitoredBarrier"
    r"|wait timeout after \d+ms|Timed out after \d+ seconds waiting for clients"
    r"|Connection was likely closed|failed to recv, got 0 bytes|socket has timed out"
    r"|NCCL (communicator|operation).*(abort|timed? ?out)|ncclRemoteError"
    r"|Operation timed out after|Work timed out|collective operation timed out"
    r"|nccl hit async error"
    r"|[Ww]atchdog caught collective|remote process (exited|has terminated)",
    re.DOTALL,
)

OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|out of memory")
# What the loader, Python and mmap say where less may be addressed (ulimit -v) than imports take.
NO_ROOM = re.compile(r"failed to map segment|[Cc]annot allocate memory|can't start new thread")


class Advice(NamedTuple):
    """What the options of a command can do about what goes wrong."""

    out_of_memory: str = "take more memory"
    unreadable_image: str | None = None


def run_rank(
    work: Callable[[], int],
    launch: Launch,
    failures: Sequence[Path] = (),
    advice: Callable[[], Advice] = Advice,
) -> int:
    """Do one rank's work, and return its exit code, or the one that fits its exception.

    A rank that fails while a process group exists ends here with os._exit: collectives and their
    threads can block Python's own exit, while the other ranks wait for its sockets to close. Work
    whose code is not 0 must end with a barrier, because launchers end the other ranks as soon as
    one returns such a code. `failures` are folders for the records; `work` may add some.

    Raises:
        KeyboardInterrupt: Ctrl-C came when there was nothing to save.
    """
    began = time.time()
    private = []
    if launch.launcher == "local":
        private.append(Path(os.environ[FOLDER_VARIABLE]))
        write_atomically(pid_file(private[0], launch.rank), str(os.getpid()))
    for folder in (*failures, *private):
        _remove_record(record_file(folder, launch.rank))  # an earlier run may have left it
    try:
        code = work()
        if code in (SAVED, INTERRUPTED):
            for folder in private:
                (folder / SAVED_FILE).touch()  # tells a launcher that was asked to stop, too
            if launch.world_size > 1:
                # A launcher sends SIGTERM to the other ranks once one rank has returned this code.
                # That would hide the code of a rank that exits later: srun reports the largest.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except KeyboardInterrupt as interrupt:
        if _has_process_group():
            _leave(tell_interrupted(interrupt))
        raise
    except Exception as error:
        code = _report(error, launch, [*failures, *private], began, advice())
        if _has_process_group():
            _leave(code)
        return code
    if _has_process_group():
        import torch.distributed as dist

        dist.destroy_process_group()
    return code


def tell_interrupted(interrupt: KeyboardInterrupt) -> int:
    """Tell, once for all ranks, that Ctrl-C has ended a command; return its exit code.

    The exception may say what had been saved before.
    """
    if tells_for_all(os.environ):
        tell(f"stopped by Ctrl-C, {interrupt if interrupt.args else 'with nothing to save'}")
    return INTERRUPTED


def record_file(folder: Path, rank: int) -> Path:
    """Return the path of the record in which a rank says why it failed."""
    return folder / f"failed-rank{rank}.json"


def remove_records(folder: Path, first_rank: int) -> None:
    """Remove an earlier run's records from `first_rank` on; those before remove their own."""
    for path in folder.glob("failed-rank*.json"):
        rank = re.fullmatch(r"failed-rank([0-9]+)\.json", path.name)
        if rank and int(rank[1]) >= first_rank:
            _remove_record(path)


def _remove_record(path: Path) -> None:
    """Remove a record of a run, and nothing else of this name."""
    if _read_record(path) is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _read_record(path: Path) -> dict[str, Any] | None:
    """Return a record; None if it is damaged, or somebody else's file."""
    try:
        record = read_json(path, _MOST_RECORD_BYTES)
    except InputError:
        return None
    if path.is_symlink() or not isinstance(record, dict) or not record.keys() >= _RECORD_KEYS:
        return None
    return record if isinstance(record["time"], float) else None


def pid_file(folder: Path, rank: int) -> Path:
    """Return the path of the file, in start_local's folder, that holds a rank's process id."""
    return folder / f"rank{rank}.pid"


def note_met(folder: Path, rank: int) -> None:
    """Tell the launcher, in start_local's folder, that this rank has met the others."""
    (folder / f"met-rank{rank}").touch()


def have_met(folder: Path, ranks: Iterable[int]) -> bool:
    """Whether all these ranks have noted in start_local's folder that they have met."""
    return all((folder / f"met-rank{rank}").exists() for rank in ranks)


def declare_lost(folder: Path, replica: int) -> None:
    """Ask the launcher to go on without the replica at this position in those it was given."""
    (folder / f"lost-replica{replica}").touch()


def declared_lost(folder: Path) -> set[int]:
    """Return the replicas that ranks have declared lost in start_local's folder."""
    return {int(path.name.removeprefix("lost-replica")) for path in folder.glob("lost-replica*")}


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or silent."""
    if isinstance(error, PeerLostError):
        return True
    if isinstance(error, RuntimeError) and LOST_PEER.search(str(error)):
        return True
    return error.__cause__ is not None and is_lost_peer(error.__cause__)


def sentence_of(message: str) -> str:
    """Return what gloo or a store says, without what they put around it.

    Gloo puts its source file in front of it and advice behind it, the stores the frames of their
    C++ code.
    """
    message = re.sub(r"\[\S*:\d+\] ", "", message, count=1)
    return message.split(". This is typically")[0].partition("\n")[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise TooLarge, which says what is read in this context, if memory runs out."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TooLarge(
            f"{what}: memory ran out while it was read ({_first_line(error)}); see whether it is "
            "as large as it should be, and if so take a machine with more memory"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def has_no_room(error: BaseException) -> bool:
    """Whether a library, a thread or a file could not be put into what a process may address."""
    kinds = ImportError, OSError, RuntimeError
    return isinstance(error, kinds) and bool(NO_ROOM.search(str(error)))


def no_room(error: BaseException) -> str:
    """Say what to do about such an error."""
    why = NO_ROOM.search(str(error))
    return (
        f"there is no room for a library, a thread or a file ({why and why[0]}); raise ulimit -v "
        "or -u, or leave memory free"
    )


def read_failures(folder: Path, run_id: str, since: float = 0.0) -> list[dict[str, Any]]:
    """Read the failures of one run since a time, earliest first; damaged ones are left out."""
    found = map(_read_record, folder.glob("failed-rank*.json"))
    records = [r for r in found if r and r["job"] == run_id and r["time"] >= since]
    return sorted(records, key=lambda record: record["time"])


def _report(
    error: Exception, launch: Launch, folders: Sequence[Path], began: float, advice: Advice
) -> int:
    """Record the failure, print it unless another rank does, and return the exit code."""
    error = (isinstance(error, RuntimeError) and why_not_bound()) or error
    message = f"{type(error).__name__}: {error}"
    kind, code = "own", UNEXPECTED
    has_met = _has_process_group()
    is_common = not has_met  # every rank has read the same flags and files so far
    if isinstance(error, InputError | FloatingPointError):  # which every rank of a last stage has
        message, is_common = str(error), True
        if isinstance(error, UnreadableImage) and advice.unreadable_image:
            message += f", or {advice.unreadable_image}"
        code = WRONG_INPUT if isinstance(error, InputError) else NOT_FINITE
        text = line(message)
    elif isinstance(error, WorkerError | StrangerError):
        message = str(error)
        code, text = PEER_LOST, line(f"rank {launch.rank}: {message}")
    elif isinstance(error, UnreachableError):
        message, code, is_common = str(error), PEER_LOST, True
        text = line(message)
    elif is_out_of_memory(error):
        message = (
            f"rank {launch.rank} ran out of memory ({_first_line(error)}); {advice.out_of_memory}"
        )
        text = line(message)
    elif has_no_room(error):
        message = no_room(error)
        text = line(f"rank {launch.rank}: {message}" if launch.world_size > 1 else message)
    elif launch.world_size > 1 and is_lost_peer(error):
        message = sentence_of(message)
        kind, code = "lost peer", PEER_LOST
        text = line(f"rank {launch.rank} lost a peer: {message}")
    else:
        rows = "".join(traceback.format_exception(error)).splitlines()
        text = "".join(f"{escaped(row, most=1000)}\n" for row in rows)
        text += line(f"rank {launch.rank}: {message}") if launch.world_size > 1 else ""

    def is_explained_by(other: dict[str, Any]) -> bool:
        if kind == "lost peer":
            return other["kind"] == "own" and other["rank"] != launch.rank
        # Errors of several ranks before they have met have one cause, whatever each of them says.
        same = other["message"] == message or (not has_met and other["code"] == code == WRONG_INPUT)
        return other["rank"] < launch.rank and same

    # Launchers end the peers of a lost rank with SIGTERM, which must not disturb this.
    with handled_signals((signal.SIGTERM,), signal.SIG_IGN):
        _record(launch, folders, code=code, kind=kind, message=message)
        may_be_explained = kind == "lost peer" or (is_common and launch.rank > 0)
        if kind == "lost peer" and launch.launcher == "local":
            return code  # start_local sees which rank was killed or is frozen, and prints that
        if may_be_explained and _appears(is_explained_by, launch, folders, began):
            return code
        if isinstance(error, UnreachableError) and launch.local_rank > 0:
            return code  # the first rank of its host says so
        if kind == "lost peer" and (silent := silent_hosts()):
            message = f"{message}; {silent}"
            text = line(f"rank {launch.rank} lost a peer: {message}")
            _record(launch, folders, code=code, kind=kind, message=message)
        if isinstance(error, InputError) and (not has_met or error.found_by == "job"):
            text = _wrong_input(error, message, launch)
        sys.stderr.write(text)  # one call, so that ranks do not mix their lines
        sys.stderr.flush()
    return code


def tell_wrong_input(error: InputError) -> None:
    """Tell the user what is wrong with a command, once if a launcher has started it many times."""
    try:
        launch = from_environment(os.environ)
    except InputError:
        launch = from_environment({})
    if launch.rank > 0:
        time.sleep(CAUSE_SECONDS)  # launchers end rank 0 too once this rank has ended
    sys.stderr.write(_wrong_input(error, str(error), launch))
    sys.stderr.flush()


def _wrong_input(error: InputError, message: str, launch: Launch) -> str:
    """Return the line with which this rank speaks; empty where another rank says the same."""
    if launch.rank == 0 or launch.launcher == "local":
        return line(message)
    if error.found_by == "job" or (error.found_by == "host" and launch.local_rank > 0):
        return ""
    return line(f"{socket.gethostname()}: {message}")


def _record(launch: Launch, folders: Sequence[Path], **facts: Any) -> None:
    record = {"rank": launch.rank, "host": socket.gethostname(), "job": launch.run_id, **facts}
    for folder in folders:
        with contextlib.suppress(OSError):  # a full disk must not hide the failure itself
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**record, "time": time.time()}, indent=1)
            path = record_file(folder, launch.rank)
            if not os.path.lexists(path) or _read_record(path) is not None:
                write_atomically(path, text)


def _appears(
    matches: Callable[[dict[str, Any]], bool],
    launch: Launch,
    folders: Sequence[Path],
    began: float,
) -> bool:
    """Wait until a matching record of this run appears; return whether it has.

    Without a folder this waits all the same: under torchrun and srun --kill-on-bad-exit, the exit
    of the rank that failed by itself ends this rank meanwhile, before it prints anything.
    """
    deadline = time.monotonic() + CAUSE_SECONDS
    while time.monotonic() < deadline:
        for folder in folders:
            # An earlier run may have left records; the clocks of two hosts may differ a little.
            if any(map(matches, read_failures(folder, launch.run_id, since=began - 5.0))):
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

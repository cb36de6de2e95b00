"""Start the ranks of this host as forks of one server, see each of them end, and end them all."""

import contextlib
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, ForkServerProcess

from vigpipe.errors import INTERRUPTED, SAVED
from vigpipe.launch.watchdog import Watchdog, has_ended

SERVER_GONE = 255  # multiprocessing's exit code of processes whose fork server has ended
GRACE_SECONDS = 30.0  # the time ranks have to end when they are asked to
POLL_SECONDS = 0.05


class RankProcesses:
    """The processes of the ranks of this host."""

    def __init__(self) -> None:
        # Of the ranks that have been seen to end, in that order: -n for signal n, and SERVER_GONE
        # if the server has ended, although the rank may still run.
        self.exit_codes: dict[int, int] = {}
        self.frozen: set[int] = set()  # ranks that were killed: they neither worked nor ended
        self._processes: dict[int, ForkServerProcess] = {}
        self._sent: set[tuple[int, int]] = set()  # ranks with the signals they got from here

    @property
    def running(self) -> dict[int, int]:
        """The process ids of the ranks that have been started and not been seen to end."""
        return {
            rank: process.pid
            for rank, process in self._processes.items()
            if rank not in self.exit_codes and process.pid is not None
        }

    @property
    def failures(self) -> dict[int, int]:
        """The exit codes other than 0, without those of ranks that a signal from here ended."""
        return {
            rank: code
            for rank, code in self.exit_codes.items()
            if code and (rank, -code) not in self._sent
        }

    def start(
        self,
        server: ForkServerContext,
        function: Callable[..., None],
        arguments: Sequence[tuple[object, ...]],
    ) -> None:
        """Let every rank call `function(*arguments[rank])` in a fork of the server."""
        for rank, given in enumerate(arguments):
            # It is no daemon: those may not start data loaders.
            # If a signal raises an exception now, `end` must know of the process.
            process = self._processes[rank] = server.Process(target=function, args=given)
            try:
                process.start()
            except (EOFError, ConnectionError):  # the server has ended, perhaps amid its imports
                self.exit_codes[rank] = SERVER_GONE
                return

    def wait(self, seconds: float | None = None) -> None:
        """Wait until a rank ends, but for no more than `seconds`; note all that have ended."""
        sentinels = {rank: self._processes[rank].sentinel for rank in self.running}
        ready = connection.wait(list(sentinels.values()), seconds)
        ended = [rank for rank, sentinel in sentinels.items() if sentinel in ready]
        codes = [(self._processes[rank].exitcode or 0, rank) for rank in ended]
        # Of several ranks, one that was killed (-n) is the cause of the others' ends.
        self.exit_codes |= {rank: code for code, rank in sorted(codes)}

    def kill(self) -> None:
        self._send(signal.SIGKILL, self.running)

    def kill_frozen(self, ranks: Iterable[int]) -> bool:
        """Kill ranks that neither work nor end, if they still run; say whether one was killed."""
        running = self.running
        left = {r for r in running.keys() & set(ranks) if not has_ended(running[r])}
        self.frozen |= left
        self._send(signal.SIGKILL, left)
        return bool(left)

    def end(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Ask ranks to end; kill them after GRACE_SECONDS, frozen ones once a rank has failed.

        Ctrl-C is handed on instead, and then ranks have all the time they take: a person sees them.
        """
        is_interrupt = signum == signal.SIGINT
        wanted = signal.SIGINT if is_interrupt else signal.SIGTERM
        asked = {rank for rank, number in tuple(self._sent) if number == wanted}
        self._send(wanted, self.running.keys() - asked)
        watchdog = Watchdog()
        deadline = math.inf if is_interrupt else time.monotonic() + GRACE_SECONDS
        while self.running and time.monotonic() < deadline:
            self.wait(POLL_SECONDS)
            if not set(self.failures.values()) <= {SAVED, INTERRUPTED}:
                self.kill_frozen(watchdog.find_frozen(self.running))
        self.kill()
        while self.running:
            self.wait()
        while self._processes:  # a signal may come meanwhile, and look at those that are here
            rank, process = self._processes.popitem()
            if self.exit_codes.get(rank) == SERVER_GONE and process.pid is not None:
                _end_orphan(process.pid)
            process.close()

    def _send(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        pids = self.running
        for rank in ranks:
            self._sent.add((rank, number))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], number)


def _end_orphan(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [])
        os.close(process)

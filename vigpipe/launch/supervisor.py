"""Wait for the ranks of a run, which goes on without lost replicas as long as one is whole."""

import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from vigpipe.errors import DONE, PEER_LOST, SAVED
from vigpipe.launch.causes import Cause, find_cause
from vigpipe.launch.failures import declared_lost, have_met, read_failures
from vigpipe.launch.processes import POLL_SECONDS, RankProcesses
from vigpipe.launch.signals import STOPPING
from vigpipe.messages import tell

LEAVE_SECONDS = 5.0  # the time that the other ranks of a lost replica have to notice and to end


class Supervisor:
    """Decides which ends of ranks a run survives.

    Until all ranks have met, every failure ends the run: the others would wait for the lost one.
    From then on, a replica is lost if a signal ends one of its ranks, if one of them loses a peer
    or a process that works for it, or if another replica declares it lost. Every other failure ends
    the run.

    `replicas` are the ranks of each replica that may be lost; a rank in none of them may not.
    """

    def __init__(
        self, ranks: RankProcesses, folder: Path, replicas: Sequence[Sequence[int]]
    ) -> None:
        self._ranks, self._folder, self._replicas = ranks, folder, replicas
        self._replica_of = {r: index for index, group in enumerate(replicas) for r in group}
        self._leave_until: dict[int, float] = {}  # when what is left of a lost replica is killed
        self._told: set[int] = set()  # lost replicas that the user knows of

    def wait(self) -> None:
        """Wait until the ranks outside of lost replicas have ended, or the run cannot go on."""
        while self._goes_on():
            self._end_lost_replicas()
            if not any(self._is_kept(rank) for rank in self._ranks.running):
                self._ranks.kill()
                return
            self._ranks.wait(POLL_SECONDS if self._replicas else None)

    def is_done(self, world_size: int) -> bool:
        """Whether all ranks outside of lost replicas have ended with DONE."""
        kept = filter(self._is_kept, range(world_size))
        codes = [self._ranks.exit_codes.get(rank) for rank in kept]
        return bool(codes) and set(codes) == {DONE}

    def exit_code(self) -> int:
        """Tell what no rank could, and return the run's exit code; all ranks must have ended."""
        failures = self._ranks.failures
        codes = {code for rank, code in failures.items() if self._is_kept(rank)}
        if codes <= {SAVED} and not self._all_lost():
            self._end_lost_replicas()
            return SAVED if codes else DONE
        ended = self._ranks.exit_codes.keys()
        if codes <= {SAVED, PEER_LOST}:
            # The cause is in a replica that the user does not know to be lost.
            to_blame = ended - {r for replica in self._told for r in self._replicas[replica]}
        else:
            to_blame = set(filter(self._is_kept, ended))
        cause = self._cause_among(to_blame)
        if cause.sentence:
            tell(cause.sentence)
        return cause.code

    def tell_of_killed(self) -> None:
        """Tell of ranks outside of lost replicas that were ended by a signal from elsewhere."""
        failures = self._ranks.failures.items()
        killed = {rank for rank, code in failures if code < 0 and self._is_kept(rank)}
        if killed:
            tell(self._cause_among(killed).sentence)

    def _is_kept(self, rank: int) -> bool:
        return self._replica_of.get(rank) not in self._leave_until

    def _all_lost(self) -> bool:
        return bool(self._replicas) and len(self._leave_until) == len(self._replicas)

    def _goes_on(self) -> bool:
        """Note which replicas are lost, and return whether the run can do without them."""
        now = time.monotonic()
        for rank, code in self._ranks.failures.items():
            # Replicas that have saved their state end one after the other.
            if self._is_kept(rank) and not (code == SAVED and self._replicas):
                if rank not in self._replica_of or not self._is_survivable(code):
                    return False
                self._leave_until[self._replica_of[rank]] = now + LEAVE_SECONDS
        for replica in declared_lost(self._folder) if self._replicas else ():
            # Of one whose ranks have ended by themselves, the exit codes tell whether it is lost.
            if self._ranks.kill_frozen(self._replicas[replica]):
                self._leave_until[replica] = now
        return not self._all_lost()

    def _is_survivable(self, code: int) -> bool:
        if not have_met(self._folder, self._replica_of):
            return False
        if code < 0:
            return -code not in STOPPING  # somebody ends the whole run with these
        # A rank that loses a peer may be seen to end before the peer, which has failed by itself.
        return code == PEER_LOST and not any(
            record["kind"] == "own" and record["code"] != PEER_LOST
            for record in self._records()
            if self._is_kept(record["rank"])
        )

    def _end_lost_replicas(self) -> None:
        """Kill what is left of lost replicas after a while, and tell of those that have ended."""
        for replica, time_limit in self._leave_until.items():
            left = self._ranks.running.keys() & set(self._replicas[replica])
            if left and time.monotonic() >= time_limit:
                self._ranks.kill_frozen(left)
            if not left and replica not in self._told:  # only now is the cause known for sure
                self._told.add(replica)
                num_left = len(self._replicas) - len(self._leave_until)
                cause = self._cause_among(self._replicas[replica]).sentence
                tell(
                    f"replica {replica} is lost, and the run goes on with {num_left} of "
                    f"{len(self._replicas)} replicas{': ' if cause else ''}{cause}"
                )

    def _cause_among(self, members: Container[int]) -> Cause:
        return find_cause(
            {rank: code for rank, code in self._ranks.failures.items() if rank in members},
            [record for record in self._records() if record["rank"] in members],
            {rank for rank in self._ranks.frozen if rank in members},
        )

    def _records(self) -> list[dict[str, Any]]:
        return read_failures(self._folder, self._folder.name)

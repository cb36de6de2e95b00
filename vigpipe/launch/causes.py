"""Find out why the ranks of a run have ended, and word what none of them could say."""

import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from vigpipe.errors import PEER_LOST
from vigpipe.launch.processes import SERVER_GONE


class Cause(NamedTuple):
    """Why ranks have ended: an exit code, and a sentence, empty if a rank has printed it."""

    code: int
    sentence: str = ""


def find_cause(
    exit_codes: Mapping[int, int], records: Sequence[Mapping[str, Any]], frozen: Collection[int]
) -> Cause:
    """Find why ranks ended: by `RankProcesses.failures`, records, earliest first, and who froze."""
    for record in records:
        if record["kind"] == "own":
            return Cause(record["code"])
    if SERVER_GONE in exit_codes.values():
        return Cause(
            PEER_LOST,
            "the process that ranks are forked from has ended, and so have they; out of memory?",
        )
    for rank, code in exit_codes.items():
        if code < 0:
            hint = "; out of memory?" if code == -signal.SIGKILL else ""
            name = signal.Signals(-code).name
            return Cause(128 - code, f"rank {rank} was ended by {name}{hint}")
    if frozen:
        names = " and ".join(f"rank {rank}" for rank in sorted(frozen))
        were, they = ("was", "it") if len(frozen) == 1 else ("were", "they")
        return Cause(
            PEER_LOST, f"{names} answered no more, and {were} killed; {were} {they} stopped?"
        )
    for record in records:  # nobody can see which rank was lost
        message = f"rank {record['rank']} lost a peer: {record['message']}"
        return Cause(record["code"], message)
    return Cause(next(iter(exit_codes.values())))

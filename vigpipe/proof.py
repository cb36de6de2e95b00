"""Prove that the ranks of a run know its secret: to one another, and in what they read of a store.

Any user of a host may connect to a rank before its peer does, and list and write the store where
ranks meet. A stranger who takes the place of a rank, or writes what ranks read there, is noticed.
"""

import hmac
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vigpipe.errors import StrangerError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

NUM_BYTES = 32  # of a secret, a number, a proof and a signature
_secret: bytes | None = None  # of the run that this process is a rank of


def use_secret(secret: bytes | None) -> None:
    """Prove with this secret from now on; with None, nothing is proved."""
    global _secret
    _secret = secret


def mac(secret: bytes, *parts: str | bytes) -> bytes:
    """Return the HMAC-SHA256 of some parts (RFC 2104), which no other parts share."""
    code = hmac.new(secret, digestmod="sha256")
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        code.update(len(content).to_bytes(8, "big") + content)
    return code.digest()


def prove_group(group: "ProcessGroup | None" = None) -> None:
    """Let each two ranks of a group, or of the run, prove who they are; all of them call this."""
    import torch.distributed as dist

    def exchange(own: "Tensor") -> "Tensor":
        received = own.new_empty(len(own))
        dist.all_to_all_single(received, own, group=group)
        return received

    prove(exchange, dist.get_rank(), dist.get_process_group_ranks(group))


def prove(exchange: Callable[["Tensor"], "Tensor"], rank: int, ranks: Sequence[int]) -> None:
    """Let each two ranks prove to one another who they are; all of them call this.

    Each sends every other a number that it has just drawn, and answers those that it gets with a
    MAC of them and of both ranks. All of it goes over the connections of that pair.

    Args:
        exchange: sends each rank a block of a tensor, and returns the blocks that it gets from
            them: `all_to_all_single`.
        rank: this rank.
        ranks: all of them, in the order of the blocks.

    Raises:
        StrangerError: a process that does not know the secret has the place of a rank.
    """
    import torch

    if _secret is None or len(ranks) == 1:
        return
    secret = _secret

    def exchanged(own: list[bytes]) -> list[bytes]:
        sent = torch.frombuffer(bytearray(b"".join(own)), dtype=torch.uint8)
        content = exchange(sent).numpy().tobytes()
        return [content[i : i + NUM_BYTES] for i in range(0, len(content), NUM_BYTES)]

    def proof(by: int, to: int, number: bytes) -> bytes:
        return mac(secret, str(list(ranks)), f"{by} to {to}", number)

    drawn = [os.urandom(NUM_BYTES) for _ in ranks]
    asked = exchanged(drawn)
    proofs = exchanged([proof(rank, to, number) for to, number in zip(ranks, asked, strict=True)])
    for by, number, found in zip(ranks, drawn, proofs, strict=True):
        if by != rank and not hmac.compare_digest(found, proof(by, rank, number)):
            raise StrangerError(
                f"a process that does not know the secret of the run has the place of rank {by}; "
                "see who else uses these hosts, and start the run again"
            )


def signed(key: str, value: str | bytes) -> bytes:
    """Return a value to be stored under a key, behind a signature if the run has a secret."""
    content = value.encode() if isinstance(value, str) else value
    return content if _secret is None else mac(_secret, key, content) + content


def verified(key: str, stored: bytes) -> bytes:
    """Return the value that `signed` made what was found under a key from.

    Raises:
        StrangerError: somebody else has written it.
    """
    if _secret is None:
        return stored
    signature, content = stored[:NUM_BYTES], stored[NUM_BYTES:]
    if not hmac.compare_digest(signature, mac(_secret, key, content)):
        raise StrangerError(
            f"a process that does not know the secret of the run has written {key} where the ranks "
            "meet; see who else uses these hosts, and start the run again"
        )
    return content

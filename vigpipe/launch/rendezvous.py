"""Bring the ranks of a run together, and keep processes of other runs out."""

import json
import os
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from vigpipe.errors import InputError, PeerLostError
from vigpipe.launch.environment import LONG_WAIT_SECONDS, Launch, digest
from vigpipe.launch.failures import is_lost_peer, sentence_of
from vigpipe.launch.interface import check_chosen, use_loopback, use_route
from vigpipe.launch.ports import check_ports, why_not_bound
from vigpipe.launch.reach import (
    await_meeting_place,
    check_hosts,
    check_name,
    check_own,
    meet_all,
)
from vigpipe.launch.secret import agree_on_secret
from vigpipe.launch.signals import leave_ignored
from vigpipe.proof import prove_group, use_secret

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

OWNER_KEY = "vigpipe/owner"  # key of the store that holds the digest of its run_id
_TOGETHER_SECONDS = 60.0  # for which ranks that have met wait for what another does, at least
LOOPBACK = ("127.0.0.1", "localhost")


def meet(launch: Launch, timeout_seconds: float, meeting_seconds: float | None = None) -> "Store":
    """Bring the ranks together at a store that only they can use; every rank calls this.

    For `meeting_seconds` ranks of srun and torchrun wait for others that start late; by default for
    LONG_WAIT_SECONDS, or `timeout_seconds` if that is longer. A launcher on this host notices a
    rank that does not come, so there the default holds always.
    """
    check_chosen()
    if launch.is_local:
        use_loopback()
    # The store waits for ranks that start late; collectives have a timeout of their own.
    if meeting_seconds is None or launch.launcher not in ("srun", "torchrun"):
        meeting_seconds = max(timeout_seconds, LONG_WAIT_SECONDS)
    limit = timedelta(seconds=meeting_seconds)
    store = _make_store(launch, limit)
    store.set_timeout(limit)
    if launch.world_size > 1:
        # Python runs signal handlers between bytecodes, so never while a store or gloo waits.
        for number in (signal.SIGINT, signal.SIGTERM):
            leave_ignored(number, signal.SIG_DFL)
    return _joined(store, launch, meeting_seconds)


def decide_together(
    store: "Store", launch: Launch, what: str, fact: Any, decide: Callable[[list[Any]], Any]
) -> Any:
    """Return what rank 0 decides from a fact of each rank, in order; every rank calls this.

    Facts and the decision are JSON, and `what` names the question in the store.
    """
    from vigpipe.launch.signed_store import SignedStore

    ours = SignedStore(store)
    ours.set(f"{what}/{launch.rank}", json.dumps(fact))
    if launch.rank == 0:
        of_all = [json.loads(ours.get(f"{what}/{rank}")) for rank in range(launch.world_size)]
        ours.set(what, json.dumps(decide(of_all)))
    return json.loads(ours.get(what))


def init_process_group(
    launch: Launch, backend: str, timeout_seconds: float, store: "Store | None" = None
) -> None:
    """Make the process group, with NCCL after `take_device`; without a store the ranks meet now."""
    import torch
    import torch.distributed as dist

    from vigpipe.launch.signed_store import SignedStore

    arguments: dict[str, Any] = {"backend": backend, "timeout": timedelta(seconds=timeout_seconds)}
    if "cuda:" in backend:
        # CleanUpOnly of ProcessGroupNCCL: when a peer is lost, end what waits for it, not the rank.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    if "nccl" in backend:
        arguments["device_id"] = torch.device("cuda", torch.cuda.current_device())
    if store is None:
        store = meet(launch, timeout_seconds)
    if backend == "gloo":  # what NCCL does with a store of Python has not been seen
        store = SignedStore(store)
    place = {"store": store, "rank": launch.rank, "world_size": launch.world_size}
    try:
        dist.init_process_group(**place, **arguments)
    except RuntimeError as error:
        if launch.is_local or why_not_bound() or not is_lost_peer(error):
            raise
        raise PeerLostError(
            f"gloo cannot connect the ranks ({sentence_of(str(error))}); if firewalls between the "
            "hosts let only some ports through, give --ports"
        ) from error
    if not launch.is_local:
        check_ports(_meeting_place(launch)[1])
    prove_group()


def _make_store(launch: Launch, timeout: timedelta) -> Any:
    import torch.distributed as dist

    if launch.init_method is None:
        return dist.HashStore()
    if launch.init_method.startswith("file://"):
        return dist.FileStore(launch.init_method.removeprefix("file://"), launch.world_size)
    host, port = _meeting_place(launch)
    check_name(launch, host, port)
    # torchrun's agent has made one already.
    has_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    is_given = launch.launcher == "torchrun" and has_agents
    arguments: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    if launch.rank == 0 and not is_given:
        arguments |= {"is_master": True, "master_listen_fd": _listen(launch, host, port)}
        check_own(host, port)
    else:
        await_meeting_place(launch, host, port, timeout.total_seconds())
    return dist.TCPStore(host, port, launch.world_size, **arguments)


def _meeting_place(launch: Launch) -> tuple[str, int]:
    """Return the host and port where ranks of srun or torchrun meet."""
    if launch.launcher == "torchrun":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    assert launch.init_method is not None
    host, _, port = launch.init_method.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _joined(store: Any, launch: Launch, seconds: float) -> Any:
    """Return the section of the store that only this run can use, once all its ranks are there."""
    import torch.distributed as dist

    from vigpipe.launch.signed_store import SignedStore

    if launch.launcher != "torchrun":  # its store is its own, and the same one after a restart
        run_digest = digest(launch.run_id)
        if launch.rank == 0:
            store.set(OWNER_KEY, run_digest)
        elif (owner := store.get(OWNER_KEY).decode("utf-8", "replace")) != run_digest:
            raise InputError(
                f"rank {launch.rank} of {launch.run_id} found another run ({owner[:16]}) at "
                f"{launch.init_method}: set MASTER_PORT to a port of its own for every run"
            )
    run_store = dist.PrefixStore(launch.run_id, store)
    if launch.launcher in ("srun", "torchrun"):
        name = meet_all(run_store, launch, *_meeting_place(launch), seconds)
        run_store = dist.PrefixStore(name, run_store)
        # All are here, but one may look for another host or a file for a while.
        store.set_timeout(timedelta(seconds=max(seconds, _TOGETHER_SECONDS)))
    else:  # a launcher on this host looks after them
        run_store.set(f"here/{launch.rank}", "")
        run_store.wait([f"here/{rank}" for rank in range(launch.world_size)])
    use_secret(agree_on_secret(run_store, launch))
    if not launch.is_local:
        use_route(SignedStore(run_store), launch, _meeting_place(launch)[0])
        check_hosts(launch, partial(decide_together, run_store, launch))
    return run_store


def _listen(launch: Launch, host: str, port: int) -> int:
    """Open the socket of rank 0's store; TCPStore's own socket would listen on every interface."""
    is_loopback = launch.is_local or host in LOOPBACK
    is_dual = not is_loopback and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        listener = socket.create_server(
            (host if is_loopback else "", port), family=family, backlog=1024, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise InputError(
            f"rank 0 cannot listen on port {port} of {socket.gethostname()} ({error.strerror}): "
            "set MASTER_PORT to a free port, the same for every rank"
        ) from None
    return listener.detach()

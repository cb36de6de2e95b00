"""Bring the ranks together, each on a device of its own: one GPU for each, or the CPU for all."""

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from vigpipe.config.choices import Device
from vigpipe.errors import InputError
from vigpipe.launch.environment import Launch, from_environment
from vigpipe.messages import plural, tell

if TYPE_CHECKING:
    import torch

ADVICE = "start at most one rank a GPU (fewer --stages or --dp, more hosts), or choose --device cpu"


@dataclass(frozen=True)
class Offer:
    """What one rank could compute on."""

    requested: Device
    host: str
    num_ranks: int  # on its host
    num_gpus: int  # that it sees
    gpu: str  # UUID of the one that it would take; empty if there is none for it


def choose_gpu(requested: Device, launch: Launch, num_gpus: int) -> int | None:
    """Choose the GPU, by its number on this host, that a rank would take; None for the CPU."""
    if requested == "cpu" or (requested == "auto" and num_gpus == 0):
        return None
    if num_gpus == 0:
        raise InputError(
            "--device cuda: torch sees no GPU here; choose --device cpu, or a host that has one"
        )
    if launch.local_world_size <= num_gpus:
        return launch.local_rank
    # srun --gpus-per-task=1 shows every rank its own GPU only, as number 0; ranks that see a shared
    # one find out when they compare what they see (why_not_on_gpus).
    if num_gpus == 1 and launch.launcher in ("srun", "torchrun"):
        return 0
    if requested == "auto":
        return None
    raise InputError(  # NCCL refuses two ranks on one
        f"{launch.local_world_size} ranks on this host, but {plural(num_gpus, 'GPU')}; {ADVICE}"
    )


def device_alone(requested: Device) -> "torch.device":
    """Take the device of a process that computes alone, whatever started it."""
    from vigpipe.launch.device import count_gpus, take_device

    num_gpus = count_gpus(requested, can_compute=True)
    return take_device(choose_gpu(requested, from_environment({}), num_gpus))


def why_not_on_gpus(offers: Sequence[Offer]) -> str | None:
    """Say why not all ranks take the GPUs they offer; empty without GPUs, None if all ranks do."""
    first, gpus = offers[0], Counter(offer.gpu for offer in offers)
    for rank, offer in enumerate(offers):
        if offer.requested != first.requested:
            return (
                f"ranks differ in their options: device is {offer.requested!r} on rank {rank}, but "
                f"{first.requested!r} on rank 0"
            )
    if not any(offer.num_gpus for offer in offers):
        return ""
    for offer in offers:
        if gpus[offer.gpu] > 1 or not offer.gpu:
            ranks, has = f"{offer.num_ranks} ranks on {offer.host}", plural(offer.num_gpus, "GPU")
            if offer.num_ranks > offer.num_gpus:
                return f"{ranks}, but {has}"
            return f"{gpus[offer.gpu]} of {ranks} have the same GPU ({offer.gpu})"
    return None


def join(
    requested: Device,
    gpu: int | None,
    launch: Launch,
    timeout_seconds: float,
    meeting_seconds: float | None = None,
    *,
    on_one_gpu: str,
) -> "torch.device":
    """Bring the ranks together and make the process group; every rank calls this.

    `gpu` is what `choose_gpu` has chosen; `rendezvous.meet` takes the two times. `on_one_gpu` are
    the options with which one rank on one GPU does the same work, as advice where `--device auto`
    must give CPUs. Returned is this rank's device, of the same type on every rank.
    """
    from vigpipe.launch.device import backend, count_gpus, gpu_uuid, take_device
    from vigpipe.launch.rendezvous import decide_together, init_process_group, meet

    if launch.world_size == 1:
        return take_device(gpu)
    store = meet(launch, timeout_seconds, meeting_seconds)
    offer = Offer(
        requested,
        socket.gethostname(),
        launch.local_world_size,
        count_gpus(requested, can_compute=True),
        "" if gpu is None else gpu_uuid(gpu),
    )
    reason: str | None = decide_together(
        store,
        launch,
        "device",
        asdict(offer),
        lambda offers: why_not_on_gpus([Offer(**o) for o in offers]),
    )
    if reason is not None:
        gpu = None
        if requested == "cuda":
            raise InputError(f"--device cuda: {reason}; {ADVICE}")
        if requested == "auto" and reason and launch.rank == 0:
            tell(
                f"{reason}: all ranks compute on CPUs; one GPU does the same work with one "
                f"rank, {on_one_gpu}"
            )
    device = take_device(gpu)
    init_process_group(launch, backend(device), timeout_seconds, store)
    return device

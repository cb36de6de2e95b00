"""The machine that `vigpipe plan` plans for, and the ranks that measure on this one."""

import math
import os
import re

from vigpipe.config.options import flag
from vigpipe.config.verbs import PlanConfig
from vigpipe.errors import InputError
from vigpipe.launch.environment import from_environment, threads_per_rank

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_DECIMAL = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_BYTES = {**_DECIMAL, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_BITS_A_SECOND = {f"{unit}/s": factor for unit, factor in _DECIMAL.items()}
# The units of an option's quantity, and an example.
_QUANTITIES = {
    "memory_limit": (_BYTES, "16GB"),
    "bandwidth": (_BITS_A_SECOND, "10Gb/s"),
    "latency": (_SECONDS, "20us"),
}
FREE_MESSAGES = (
    "messages between ranks count as free, because one rank alone cannot measure them; give their "
    "--bandwidth and --latency"
)
_MOST = 1e18  # no quantity is larger, so that sums and products stay finite


def check_cluster(config: PlanConfig) -> None:
    """Raise InputError for a cluster that cannot be, before ranks are started to measure."""
    for name in _QUANTITIES:
        quantity(config, name)
    if quantity(config, "bandwidth") == 0:
        raise InputError(f"--bandwidth {config.bandwidth}: must be more than 0")
    if config.ranks_per_host is not None and config.ranks_per_host < 1:
        raise InputError(f"--ranks-per-host {config.ranks_per_host}: must be at least 1")


def quantity(config: PlanConfig, name: str) -> float | None:
    """Return the bytes, bits a second or seconds of an option; None if it is not given."""
    text, (units, example) = getattr(config, name), _QUANTITIES[name]
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-zµ/]+)", text.strip(), re.IGNORECASE)
    value = float(match[1]) * units.get(match[2].lower(), math.inf) if match else math.inf
    if value > _MOST:
        raise InputError(
            f"{flag(name)} {text}: must be a number with one of the units {', '.join(units)}, such "
            f"as {example}"
        )
    return value


def network(config: PlanConfig) -> tuple[float | None, float | None]:
    """Return the latency in seconds and the bytes a second that the options give, None for none."""
    bits = quantity(config, "bandwidth")
    return quantity(config, "latency"), None if bits is None else bits / 8


def ranks_to_measure(config: PlanConfig, num_ranks: int) -> int:
    """Return how many ranks measure: as many as there is room for here, or one with a profile."""
    launch = from_environment(os.environ)
    if launch.launcher != "alone" or config.profile is not None or num_ranks == 1:
        return launch.world_size
    from vigpipe.launch.device import count_gpus  # imports torch

    if num_gpus := count_gpus(config.device):
        return min(num_ranks, num_gpus)
    cores = threads_per_rank(None, 1, {})
    return max(2, min(num_ranks, cores // (config.threads or 1)))

"""Parse a list of ways to sample a graph, such as `full@120,metis:400+10@20`."""

import re
from typing import NamedTuple

from vigpipe.config.choices import PARTITIONS, SAMPLERS
from vigpipe.config.options import TrainConfig, flag, of_sampler
from vigpipe.errors import InputError

FORM = (
    "full, another sampler or a partition, perhaps with @EPOCHS, and a partition with :PARTS and "
    "+MERGE, such as metis:400+10@20"
)
_CHOSEN = ("sampler", "partition", "parts", "merge")  # by a way
_SIZES: dict[str, list[str]] = {s: of_sampler(s) for s in SAMPLERS if s != "parts"}
# Options of `vigpipe train` that not all runs share.
OF_WAYS = (*_CHOSEN, *dict.fromkeys(name for names in _SIZES.values() for name in names))


class SamplingWay(NamedTuple):
    """One way to sample the graph."""

    name: str  # as the user gave it
    options: dict[str, str]  # of `vigpipe train`


def parse_ways(name: str, options: TrainConfig) -> list[SamplingWay]:
    """Parse a list of ways, and give each the options of its own sampler.

    Args:
        name: of the option that has the list.
        options: of the benchmark.

    Raises:
        InputError: a word has not the form that it must have, or an option says in another way what
            the list is for.
    """
    for chosen in _CHOSEN:
        if getattr(options, chosen) is not None:
            raise InputError(
                f"{flag(chosen)} {getattr(options, chosen)}: is what {flag(name)} is for"
            )
    words = getattr(options, name)
    ways = [parse_way(word.strip(), f"{flag(name)} {words}") for word in words.split(",")]
    return [way._replace(options={**way.options, **_sizes_of(way, options)}) for way in ways]


def _sizes_of(way: SamplingWay, options: TrainConfig) -> dict[str, str]:
    """Return the options of a way's own sampler, as the user gave them."""
    values = {name: getattr(options, name) for name in _SIZES.get(way.options["sampler"], ())}
    return {name: str(value) for name, value in values.items() if value is not None}


def parse_way(word: str, given: str) -> SamplingWay:
    """Parse one way to sample the graph.

    Args:
        word: its name.
        given: the whole option, for the message.

    Raises:
        InputError: the word has not the form that it must have.
    """
    samplers = [sampler for sampler in SAMPLERS if sampler != "parts"]
    methods = "|".join((*samplers, *PARTITIONS))
    match = re.fullmatch(
        rf"({methods})(?::([0-9]{{1,9}}))?(?:\+([0-9]{{1,9}}))?(?:@([0-9]{{1,6}}))?", word
    )
    if match is None or (match[1] in samplers and (match[2] or match[3])):
        raise InputError(f"{given}: {word!r} is not {FORM}")
    method, parts, merge, epochs = match.groups()
    options = {"sampler": method if method in samplers else "parts"}
    chosen = {"partition": None if method in samplers else method, "parts": parts, "merge": merge}
    for name, value in {**chosen, "epochs": epochs}.items():
        if value is not None:
            options[name] = value
    return SamplingWay(word, options)

"""Measured costs of all ways in which ranks can train on one graph, kept as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vigpipe.errors import InputError
from vigpipe.files.atomic import write_atomically
from vigpipe.files.outputs import told_if_unwritable
from vigpipe.planning.profile import (
    Amounts,
    Profile,
    check_fields,
    is_amount,
    profile_of,
    read_costs,
)

WAYS_MARK = '"agreement_seconds": '  # text in every such file
_LEAST_SECONDS = 1e-9  # least seconds of a step

Curve = tuple[tuple[float, float], ...]  # pairs of bytes and what belongs to them, bytes ascending


@dataclass(frozen=True)
class Links:
    """What ranks take to tell one another something, beyond what each does for it by itself."""

    num_ranks: int  # those that measured; 1 if there was nobody to talk to, and all is free
    exchanges: Curve  # bytes that a rank gives to all others, and the seconds of this
    sums: Curve  # bytes of a tensor, and the seconds of adding it up over all ranks
    agreement_seconds: float  # in which the ranks agree that a step is taken
    latency_seconds: float  # of a small message between two ranks
    bandwidth: float  # bytes per second of a large one


@dataclass(frozen=True)
class Layers:
    """What the planner of pipelines needs to predict one; the mean micro-batch is `typical`."""

    profile: Profile
    stages: tuple[tuple[int, ...], ...]
    num_microbatches: int
    rows: float
    others: tuple[float, ...]
    padded_rows: float

    @property
    def typical(self) -> Amounts:
        return Amounts(self.rows, self.others, self.padded_rows)


@dataclass(frozen=True)
class MeasuredWay:
    """One way to use the ranks, and what its steps cost."""

    name: str
    options: str  # what to type for it, behind what all ways share
    is_same: bool  # whether a step is one rank's, up to rounding
    num_ranks: int
    steps_per_epoch: int  # those that take every sub-graph once
    why_not: str = ""  # why it is not there or was not measured
    seconds: tuple[float, ...] = ()  # of a step while 1, 2, ... ranks compute, without messages
    exchanges: Curve = ()  # bytes that a rank gives in an exchange, and how many a step has
    sums: Curve = ()  # bytes of a tensor that is added up over ranks, and how many a step has
    exchanged_bytes: int = 0  # what all ranks give in a step, without gradients of weights
    gradient_bytes: int = 0  # of the tensor in which these are added up
    peak_bytes: int = 0  # memory of the fullest rank, that without a model included
    sources: float = 1.0  # most rows that a rank sums over, halo included, over its own
    layers: Layers | None = None  # what a pipeline is predicted from instead of all these

    @property
    def reduced_bytes(self) -> int:
        """What all ranks send at least to add up the gradients of the weights once."""
        return 2 * (self.num_ranks - 1) * self.gradient_bytes


@dataclass(frozen=True)
class Measured:
    """The costs of all ways in which m = num_ranks ranks can train a model on a graph."""

    model: str
    options: Mapping[str, str]  # what else the costs depend on
    num_ranks: int
    ways: tuple[MeasuredWay, ...]  # the single rank first
    links: Links
    facts: Mapping[str, Any]  # hardware, threads per rank, versions, commit, date


def write_measured(measured: Measured, path: Path) -> None:
    """Write measured costs as a JSON file; raises InputError if it cannot be written."""
    text = json.dumps(asdict(measured), indent=1, ensure_ascii=False) + "\n"
    with told_if_unwritable(f"--out {path}", "choose another file"):
        write_atomically(path, text)


def read_measured(path: Path) -> Measured:
    """Read measured costs; raises InputError if they cannot be read or hold impossible numbers."""
    if_wrong = "does not hold the costs of ways to use ranks"
    hint = "vigpipe plan --ranks without --profile makes one"
    return read_costs(path, _measured, if_wrong, hint)


def check_options(
    profile: Profile | Measured, where: str, model: str, options: Mapping[str, str]
) -> None:
    """Raise InputError unless a profile, which `where` names, has a run's model and options."""
    if profile.model != model:
        raise InputError(
            f"{where}: is a profile of {profile.model!r}, but --model is {model!r}; leave "
            "--profile out to measure this model"
        )
    for name in sorted({*profile.options, *options}):
        was, now = profile.options.get(name), options.get(name)
        if was != now:
            raise InputError(
                f"{where}: was measured with {name} = {was}, but this run has {name} = {now}; "
                "leave --profile out to measure anew"
            )


def _measured(table: Any) -> Measured:
    values = _values(Measured, table)
    links = _values(Links, values["links"])
    for name in ("exchanges", "sums"):
        links[name] = _curve(links[name], name)
    for name in ("agreement_seconds", "latency_seconds", "bandwidth"):
        _check_amount(links[name], name)
    num_ranks = _count(values["num_ranks"], "num_ranks")
    ways = tuple(_way(way, num_ranks) for way in values["ways"])
    if not ways or ways[0].num_ranks != 1:
        raise ValueError("the first way is not that of a single rank")
    if links["bandwidth"] < 1 or not links["exchanges"] or not links["sums"]:
        raise ValueError("links are amiss")
    _count(links["num_ranks"], "num_ranks")
    is_text = isinstance(values["model"], str) and isinstance(values["facts"], dict)
    if not is_text or not isinstance(values["options"], dict):
        raise ValueError("model, options or facts are amiss")
    return Measured(**values | {"ways": ways, "links": Links(**links)})


def _way(table: Any, num_ranks: int) -> MeasuredWay:
    values = _values(MeasuredWay, table)
    for name in ("name", "options", "why_not"):
        text = values[name]
        if not isinstance(text, str) or not text.isprintable() or len(text) >= 500:
            raise ValueError(f"{name} of a way is {text!r}")
    if type(values["is_same"]) is not bool:
        raise ValueError(f"is_same is {values['is_same']!r}")
    if _count(values["num_ranks"], "num_ranks") not in (1, num_ranks):
        raise ValueError(f"num_ranks of a way is {values['num_ranks']!r}")
    _count(values["steps_per_epoch"], "steps_per_epoch")
    values["seconds"] = tuple(values["seconds"])
    for value in values["seconds"]:
        if type(value) not in (int, float) or not _LEAST_SECONDS <= value <= 1 / _LEAST_SECONDS:
            raise ValueError(f"seconds holds {value!r}")
    for name in ("exchanges", "sums"):
        values[name] = _curve(values[name], name)
    for name in ("exchanged_bytes", "gradient_bytes", "peak_bytes"):
        if type(values[name]) is not int:
            raise ValueError(f"{name} is {values[name]!r}")
        _check_amount(values[name], name)
    _check_amount(values["sources"], "sources")
    if values["layers"] is not None:
        values["layers"] = _layers(values["layers"], num_ranks)
    elif not values["why_not"] and not values["seconds"]:
        raise ValueError(f"way {values['name']!r} has no seconds")
    return MeasuredWay(**values)


def _layers(table: Any, num_ranks: int) -> Layers:
    values = _values(Layers, table)
    profile = profile_of(values["profile"])
    stages = tuple(tuple(stage) for stage in values["stages"])
    blocks = [block for stage in stages for block in stage]
    if blocks != list(range(len(profile.blocks))) or len(stages) != num_ranks or () in stages:
        raise ValueError(f"stages are {stages}")
    _count(values["num_microbatches"], "num_microbatches")
    others = tuple(values["others"])
    for value in values["rows"], values["padded_rows"], *others:
        _check_amount(value, "rows")
    if len(others) != len(profile.amounts) - 1:
        raise ValueError(f"others are {others}")
    return Layers(**values | {"profile": profile, "stages": stages, "others": others})


def _values(kind: type[Any], table: Any) -> dict[str, Any]:
    """Return the fields of a dataclass from a table that has exactly these."""
    if not isinstance(table, dict):
        raise ValueError(f"a table was expected, not {type(table).__name__}")
    check_fields(kind, table)
    return dict(table)


def _curve(pairs: Any, name: str) -> Curve:
    curve = tuple((x, y) for x, y in pairs)
    for pair in curve:
        for value in pair:
            _check_amount(value, name)
    if [x for x, _ in curve] != sorted({x for x, _ in curve}):
        raise ValueError(f"{name} are not ascending")
    return curve


def _check_amount(value: Any, name: str) -> None:
    if not is_amount(value):
        raise ValueError(f"{name} holds {value!r}")


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise ValueError(f"{name} is {value!r}")
    return value

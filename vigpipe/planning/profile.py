"""The profile of a model: the measured costs of its pieces on one machine, kept as JSON."""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vigpipe.errors import InputError
from vigpipe.files.atomic import write_atomically
from vigpipe.files.untrusted import no_duplicates, read_text

Costs = TypeVar("Costs")
PROFILE_MARK = '"latency_seconds": '  # text in every file of a profile
_PIECE_COSTS = ("forward", "backward", "activation_bytes", "boundary_bytes")
# The largest number of seconds, bytes or samples: all sums and products of such numbers are finite.
_MOST = 1e18


class Amounts(NamedTuple):
    """The size of a micro-batch whose costs follow from more than its number of rows."""

    rows: float  # those that are computed
    others: tuple[float, ...]  # amounts of all else that costs something
    padded_rows: float  # those that are sent from stage to stage, padding included


Size = float | Amounts  # the samples of a micro-batch, or several amounts


@dataclass(frozen=True)
class Piece:
    """Costs of one micro-batch on a piece: the stem, a block, or the readout with the loss.

    There is one value for each micro-batch size in Profile.rows. Where costs follow from several
    amounts, the values say instead what one of each adds to a cost, and what a micro-batch adds.
    """

    name: str  # `stem`, `block 3`, `readout`
    forward: tuple[float, ...]  # seconds
    backward: tuple[float, ...]  # seconds, recomputation included
    activation_bytes: tuple[float, ...]  # kept from the forward to the backward
    boundary_bytes: tuple[float, ...]  # of what the next piece is given, and of its gradient
    parameter_bytes: int
    trained_bytes: int | None = None  # of these, those that are trained; None for all

    @property
    def num_trained_bytes(self) -> int:
        return self.parameter_bytes if self.trained_bytes is None else self.trained_bytes


@dataclass(frozen=True)
class Profile:
    """Costs of a model on a machine, with one rank alone on it unless said otherwise.

    The pieces were timed with micro-batches of `rows` samples, ascending; there are none where
    costs follow from several `amounts`, that of the rows first. Slowdown is how many times longer a
    micro-batch takes while 1, 2, ... ranks of a host compute at the same time. Rounds are the same
    each time that it was measured, relative to the median step of one rank alone, so that they also
    say how steady the machine was.
    """

    model: str
    options: Mapping[str, str]  # what else the costs depend on, such as dtype and image size
    rows: tuple[int, ...]
    stem: Piece  # zero where the model has none
    blocks: tuple[Piece, ...]
    readout: Piece
    slowdown: tuple[float, ...]
    dispatch_seconds: float  # of every forward or backward that no piece accounts for
    latency_seconds: float  # of a small message between neighbouring ranks
    bandwidth: float  # bytes per second of a large message between them
    update_seconds: float  # of all that is done once a step, with the whole model on one rank
    fixed_seconds: float  # part of it that does not shrink when the model is cut
    optimizer_bytes: float  # of gradients and optimizer state, per byte of trained weights
    base_bytes: int  # memory of a rank before it has a model
    facts: Mapping[str, Any]  # hardware, kind of device, threads per rank, versions, ...
    amounts: tuple[str, ...] = ()
    rounds: tuple[tuple[float, ...], ...] = ()

    @property
    def device(self) -> str:
        return self.facts.get("device", "cpu")

    def boundary_bytes(self, piece: Piece, size: Size) -> float:
        """Return the bytes that a piece hands to the next one, padding included."""
        if isinstance(size, Amounts):
            size = Amounts(size.padded_rows, (0,) * len(size.others), size.padded_rows)
        return self.at(piece.boundary_bytes, size)

    def at(self, values: Sequence[float], microbatch_size: Size) -> float:
        """Return the cost of a micro-batch, from its values at every size in `rows`.

        It is interpolated linearly between measured sizes, and in proportion to the size beyond
        them. Of several amounts, it is the sum of what each of them and the micro-batch add.
        """
        if isinstance(microbatch_size, Amounts):
            *per_amount, once = values
            amounts = microbatch_size.rows, *microbatch_size.others
            return sum(map(mul, per_amount, amounts)) + once
        if microbatch_size <= self.rows[0]:
            return values[0] * microbatch_size / self.rows[0]
        if microbatch_size >= self.rows[-1]:
            return values[-1] * microbatch_size / self.rows[-1]
        i = bisect_left(self.rows, microbatch_size)
        share = (microbatch_size - self.rows[i - 1]) / (self.rows[i] - self.rows[i - 1])
        return values[i - 1] * (1 - share) + values[i] * share

    @property
    def trained_bytes(self) -> int:
        return sum(piece.num_trained_bytes for piece in (self.stem, *self.blocks, self.readout))

    @property
    def num_leading(self) -> int:
        """Number of first blocks that no backward reaches, because they and the stem are frozen."""
        costs = [max(piece.backward, default=0.0) for piece in (self.stem, *self.blocks)]
        return max(0, next((i for i, cost in enumerate(costs) if cost), len(costs)) - 1)


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as a JSON file, which `read_profile` reads."""
    text = json.dumps(asdict(profile), indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, text)


def read_profile(path: Path) -> Profile:
    """Read a profile; raises InputError if it cannot be read or holds impossible numbers."""
    hint = "vigpipe plan without --profile makes one"
    return read_costs(path, profile_of, "is not a profile", hint)


def read_costs(path: Path, parse: Callable[[Any], Costs], if_wrong: str, hint: str) -> Costs:
    """Read the measured costs in the JSON file of --profile.

    `parse` makes the costs from what JSON has, and raises TypeError, ValueError, KeyError or
    AttributeError if it is something else. Then an InputError says `if_wrong` of the file, and
    `hint` says what makes a right one.
    """
    try:
        table = json.loads(read_text(path), object_pairs_hook=no_duplicates)
    except InputError as error:
        raise InputError(f"--profile {error}; {hint}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--profile {path}: not a JSON file ({error}); {hint}") from error
    try:
        return parse(table)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        reason = str(error)[:200]
        raise InputError(f"--profile {path}: {if_wrong} ({reason}); {hint}") from error


def check_fields(kind: type[Any], table: Mapping[str, Any], where: str = "") -> None:
    """Raise ValueError unless a table has exactly the fields of a dataclass."""
    if wrong := set(table) ^ {f.name for f in fields(kind)}:
        raise ValueError(f"{min(wrong)!r}{where} is amiss")


def profile_of(table: Any) -> Profile:
    """Return the profile that a table from JSON holds; raises as `parse` of `read_costs` does."""
    if not isinstance(table, dict):
        raise ValueError("'an object' is amiss")
    values: dict[str, Any] = {"amounts": [], "rounds": [], **table}  # older profiles know none
    check_fields(Profile, values)
    values |= {
        **{name: tuple(values[name]) for name in ("rows", "slowdown", "amounts")},
        "rounds": tuple(map(tuple, values["rounds"])),
        "stem": _piece(values["stem"]),
        "blocks": tuple(map(_piece, values["blocks"])),
        "readout": _piece(values["readout"]),
    }
    profile = Profile(**values)
    _check(profile)
    return profile


def with_network(
    profile: Profile, latency_seconds: float | None, bandwidth: float | None
) -> Profile:
    """Replace the profile's latency and bytes a second by others, where there are any."""
    given: dict[str, Any] = {"latency_seconds": latency_seconds, "bandwidth": bandwidth}
    return replace(profile, **{name: n for name, n in given.items() if n is not None})


def is_amount(value: Any) -> bool:
    """Tell whether a value from JSON can be a number of seconds, bytes, samples or the like."""
    return type(value) in (int, float) and 0 <= value <= _MOST  # NaN fails too


def _are_factors(values: Sequence[float], least: float) -> bool:
    return bool(values) and all(is_amount(n) and least <= n < 1e3 for n in values)


def _piece(table: Mapping[str, Any]) -> Piece:
    table = {"trained_bytes": None} | dict(table)  # older profiles know of no frozen pieces
    check_fields(Piece, table, " of a piece")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    piece = Piece(**values)
    if not isinstance(piece.name, str) or not piece.name.isprintable():
        raise ValueError(f"{piece.name!r} is not a name for a piece")
    for name in _PIECE_COSTS:
        for value in getattr(piece, name):
            if not is_amount(value):
                raise ValueError(f"{piece.name}: {name} holds {value!r}")
    for name in ("parameter_bytes", "num_trained_bytes"):
        num_bytes = getattr(piece, name)
        if type(num_bytes) is not int or not 0 <= num_bytes <= min(_MOST, piece.parameter_bytes):
            raise ValueError(f"{piece.name}: {name.removeprefix('num_')} is {num_bytes!r}")
    return piece


def _check(profile: Profile) -> None:
    rows, amounts = profile.rows, profile.amounts
    are_counts = all(type(n) is int and 1 <= n <= _MOST for n in rows)
    if not all(isinstance(name, str) and name.isidentifier() for name in amounts):
        raise ValueError(f"amounts are {list(amounts)}")
    if bool(rows) == bool(amounts) or not are_counts or list(rows) != sorted({*rows}):
        raise ValueError(f"rows are {list(rows)}")
    num_values = len(rows) or len(amounts) + 1
    if not isinstance(profile.model, str):
        raise ValueError(f"model is {profile.model!r}")
    if not profile.blocks:
        raise ValueError("it has no blocks")
    for piece in (profile.stem, *profile.blocks, profile.readout):
        for name in _PIECE_COSTS:
            if len(getattr(piece, name)) != num_values:
                what = f"one value for each of {rows}" if rows else f"{num_values} values"
                raise ValueError(f"{piece.name}: {name} has not {what}")
    if not _are_factors(profile.slowdown, least=0.5):
        raise ValueError(f"slowdown is {list(profile.slowdown)}")
    if not all(_are_factors(of_round, least=1e-3) for of_round in profile.rounds):
        raise ValueError(f"rounds are {list(profile.rounds)}")
    for name in [field.name for field in fields(Profile) if field.type in (int, float)]:
        value = getattr(profile, name)
        if not is_amount(value):
            raise ValueError(f"{name} is {value!r}")
    if profile.bandwidth < 1:
        raise ValueError(f"bandwidth is {profile.bandwidth}")
    for name in ("options", "facts"):
        if not isinstance(getattr(profile, name), dict):
            raise ValueError(f"{name} is not a table")
    if not isinstance(profile.facts.get("versions", {}), dict):
        raise ValueError("versions is not a table")

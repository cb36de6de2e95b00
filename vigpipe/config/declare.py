"""What is known of an option besides its type and its meaning, declared in its one place."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vigpipe.config.choices import JobName

# Whether a later run may have another value: never; if it goes on from a checkpoint; or also if it
# does again, bit for bit, what an earlier one did (--replay).
Differs = Literal["never", "resumed", "always"]


@dataclass(frozen=True)
class When:
    """What another option, declared before, must say so that an option counts."""

    option: str
    values: Collection[Any]  # what it must be one of
    why: str = ""  # what it is like then, such as "where replicas meet in pairs"
    named: str = ""  # the values in words; by default they are listed

    def __str__(self) -> str:
        return self.named or listed(self.values)


@dataclass(frozen=True)
class Facts:
    """What is known of an option."""

    group: str  # of options, in `--help`
    short: bool = False  # whether `--help` shows it without `--help-all`
    bounds: tuple[float, float] | None = None  # the least and the largest number that it may be
    job: JobName | None = None  # the kind of models that it is for; None for all
    differs: Differs = "never"
    in_weights: bool = False  # whether a file of trained weights says what it was
    when: tuple[When, ...] = ()  # so that it counts; otherwise it must keep its default
    # What it is where it counts and is left open; or that by the value of the last `when`'s option.
    filled: Any = None

    def filled_for(self, options: object) -> Any:
        """Return what it is under these options, where the user leaves it open."""
        if isinstance(self.filled, Mapping):
            return self.filled[getattr(options, self.when[-1].option)]
        return self.filled


def option(group: str, default: Any, **facts: Any) -> Any:
    """Declare a field of options: its default, and the `Facts` about it."""
    return field(default=default, metadata={"facts": Facts(group, **facts)})


def facts_of(options: type[Any]) -> dict[str, Facts]:
    """Return the facts about every field that was declared so, in their order."""
    return {f.name: f.metadata["facts"] for f in fields(options) if "facts" in f.metadata}


def listed(words: Collection[Any]) -> str:
    """Return words as a choice: a, b or c."""
    *first, last = map(str, words)
    return f"{', '.join(first)} or {last}" if first else last

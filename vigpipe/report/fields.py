"""Read JSON objects from a run's files and check the type of every value that is read."""

import json
from typing import Any, TypeVar

from vigpipe.errors import InputError

LARGEST_WHOLE = 1 << 53  # charts have them as floating-point numbers
LARGEST = 1e300  # arithmetic with larger numbers could overflow
Value = TypeVar("Value")


def parse_object(text: str, where: str) -> "Fields":
    """Parse a JSON object; an InputError names the file and line that it comes from, `where`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: is not JSON ({str(error)[:80]}); name a folder that vigpipe train wrote"
        ) from error
    return Fields(values, where)


class Fields:
    """A JSON object; an InputError names its file, if a value is missing or of another type."""

    def __init__(self, values: object, where: str) -> None:
        self.where = where
        if not isinstance(values, dict):
            raise InputError(f"{where}: must be a JSON object, is {_kind(values)}")
        self._values: dict[str, Any] = values

    def __contains__(self, name: str) -> bool:
        """Return whether there is a value of this name other than null."""
        return self._values.get(name) is not None

    def names(self) -> list[str]:
        return list(self._values)

    def number(self, name: str) -> float:
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        if not -LARGEST < value < LARGEST:  # false of NaN too
            raise self.wrong(name, "a finite number")
        return float(value)

    def whole(self, name: str) -> int:
        """Return a whole number that is at least 0."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(name, "a whole number from 0")
        if value > LARGEST_WHOLE:
            raise self.wrong(name, f"at most {LARGEST_WHOLE}")
        return value

    def numbers(self, name: str) -> list[float]:
        return [Fields({name: v}, self.where).number(name) for v in self.items(name)]

    def text(self, name: str) -> str:
        return self._of(str, name, "a string")

    def items(self, name: str) -> list[Any]:
        return self._of(list, name, "a list")

    def object(self, name: str) -> "Fields":
        return Fields(self._of(dict, name, "an object"), f"{self.where}, {name}")

    def _of(self, kind: type[Value], name: str, wanted: str) -> Value:
        value = self._values.get(name)
        if not isinstance(value, kind):
            raise self.wrong(name, wanted)
        return value

    def wrong(self, name: str, wanted: str) -> InputError:
        actual = _kind(self._values.get(name))
        return InputError(f"{self.where}: {name} must be {wanted}, is {actual}")


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}…"

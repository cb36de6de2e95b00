"""Read objects out of a run's files and check every value where it is taken."""

import json
from typing import Any

from vigpipe.errors import InputError

LARGEST = 1e300  # beyond it arithmetic would overflow


def parse_object(text: str, where: str) -> "Fields":
    """One JSON object; `where` names the file, and the line if it has several."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: is not JSON ({str(error)[:80]}); name a folder that vigpipe train wrote"
        ) from error
    return Fields(values, where)


class Fields:
    """A JSON object.

    Args:
        values: what was parsed.
        where: the file, for errors.

    Raises:
        InputError: by the constructor and by every method, for what is missing or of another type.
    """

    def __init__(self, values: object, where: str) -> None:
        self.where = where
        if not isinstance(values, dict):
            raise InputError(f"{where}: must be a JSON object, is {_kind(values)}")
        self._values: dict[str, Any] = values

    def __contains__(self, name: str) -> bool:
        """Whether there is a value other than null."""
        return self._values.get(name) is not None

    def names(self) -> list[str]:
        """The keys, in their order."""
        return list(self._values)

    def number(self, name: str) -> float:
        """A finite number."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        if not -LARGEST < value < LARGEST:  # false of NaN too
            raise self.wrong(name, "a finite number")
        return float(value)

    def whole(self, name: str) -> int:
        """A whole number from 0."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(name, "a whole number from 0")
        return value

    def numbers(self, name: str) -> list[float]:
        """A list of finite numbers."""
        return [Fields({name: v}, self.where).number(name) for v in self.items(name)]

    def text(self, name: str) -> str:
        """A string."""
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def items(self, name: str) -> list[Any]:
        """A list of anything."""
        value = self._values.get(name)
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def object(self, name: str) -> "Fields":
        """An object within this one."""
        value = self._values.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.where}, {name}")

    def wrong(self, name: str, wanted: str) -> InputError:
        """The error that `name` is something else."""
        found = _kind(self._values.get(name))
        return InputError(f"{self.where}: {name} must be {wanted}, is {found}")


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}…"

"""Arrow and parquet files are read with pyarrow, an extra."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.untrusted import NOT_THE_FILES_FAULT


def need_pyarrow(path: Path) -> None:
    """Raise InputError if pyarrow is not installed; it is not imported."""
    if find_spec("pyarrow") is None:
        raise InputError(
            f"{path}: Arrow and parquet files are read with pyarrow, which is not installed; "
            "install it: pip install pyarrow, or vigpipe with its extra, vigpipe[arrow]"
        )


@contextmanager
def reading_arrow(path: Path, advice: str) -> Iterator[None]:
    """Turn what pyarrow raises for a bad file, of whatever type, into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if getattr(error, "errno", None) in NOT_THE_FILES_FAULT:
            raise
        raise InputError(f"{path}: cannot be read ({escaped(str(error))}); {advice}") from error

"""Draw pictures as matplotlib does by default, whatever a matplotlibrc says."""

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


@contextlib.contextmanager
def matplotlib_defaults() -> Iterator[None]:
    """Import matplotlib and draw without the settings of this folder and user; also a decorator.

    A file in a strange folder could stop the import, be echoed by its warnings, or ask for LaTeX.
    """
    if "matplotlib" not in sys.modules:
        _import_matplotlib()
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def _import_matplotlib() -> None:
    """Import it in the folder of its own matplotlibrc: it takes the working folder's first."""
    spec = find_spec("matplotlib")
    if spec is None or spec.origin is None:
        return  # the import that follows says what is missing
    here = os.open(".", os.O_PATH | os.O_DIRECTORY)  # it may not be readable
    try:
        os.chdir(Path(spec.origin).parent / "mpl-data")
        import matplotlib  # noqa: F401
    finally:
        os.fchdir(here)
        os.close(here)

"""Bars of commands that take a while."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


def bar(*columns: "str | ProgressColumn") -> "Progress":
    """Make a bar on stderr, which goes when its context ends; it is shown on a terminal only."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

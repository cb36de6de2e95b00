"""The progress bar of a run, on a terminal only."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def make_progress(console: Console) -> Progress:
    """Make a bar that counts optimizer steps and disappears at the end.

    Args:
        console: where it is drawn; nothing is drawn where that is no terminal.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )

"""Show the progress of a run on a terminal."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def make_progress(console: Console) -> Progress:
    """Make a progress bar that counts optimizer steps and disappears at the end.

    Args:
        console: where the bar is drawn; nothing is drawn if this is not a terminal.
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

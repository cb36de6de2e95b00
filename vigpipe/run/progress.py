"""Tell the user how far a run is: a bar on a terminal, else a line every half minute."""

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vigpipe.config.interval import Interval, parse_interval

_HALF_A_MINUTE = Interval(seconds=30)


class RunProgress:
    """The progress of a run; use it as a context around the steps.

    The loss is the mean since the line before, or since the epoch began; throughput counts steps
    and the waiting for their data, but no evaluations. By default (--log-every) there is a line
    every 30 s, but never on a terminal.
    """

    def __init__(
        self,
        console: Console,
        num_steps: int,
        steps_done: int,
        log_every: int | str | None,
        unit: str = "images",
        num_epochs: int = 1,
    ) -> None:
        self._console, self._num_steps, self._unit = console, num_steps, unit
        self._num_epochs = num_epochs
        if log_every is None:
            self._interval, self._has_lines = _HALF_A_MINUTE, not console.is_terminal
        else:
            interval = parse_interval("--log-every", log_every)
            self._has_lines = interval != Interval()
            self._interval = interval if self._has_lines else _HALF_A_MINUTE
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=num_steps, completed=steps_done)
        self._started = self._begun = self._resumed = time.monotonic()
        self._last_step = steps_done
        self._first_step: int | None = None  # The steps after it tell how long the rest takes.
        self._num_rows, self._seconds = 0, 0.0
        self._epoch, self._num_losses, self._loss_sum = 0, 0, 0.0

    def __enter__(self) -> "RunProgress":
        self._bar.start()
        self.resume()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._bar.disable:  # rich 13 would print an empty line
            self._bar.stop()

    def resume(self) -> None:
        """Leave the time since the last step, which something else took, out of the throughput."""
        self._resumed = time.monotonic()

    def add(
        self, step: int, epoch: int, loss: float, lr: float, num_samples: int, num_rows: int
    ) -> None:
        """Note an optimizer step, counted from 1 as epochs are, and tell the user if it is time.

        The loss is the mean of `num_samples`, perhaps 0; the step took `num_rows` images or nodes.
        """
        now = time.monotonic()
        if epoch != self._epoch:
            self._epoch, self._num_losses, self._loss_sum = epoch, 0, 0.0
        self._num_losses += num_samples
        self._loss_sum += loss * num_samples
        self._num_rows += num_rows
        self._seconds += now - self._resumed
        self._resumed = now
        if self._first_step is None:  # the first step of a process also compiles and allocates
            self._first_step, self._started = step, now
        rate = self._num_rows / self._seconds if self._seconds else 0.0
        facts = f"lr {lr:.3g}, {rate:.3g} {self._unit}/s"
        if self._num_losses:
            facts = f"loss {self._loss_sum / self._num_losses:.4f}, {facts}"
        of_all = f"{self.of_epochs(epoch)}: {facts}"
        self._bar.update(self._task, completed=step, description=of_all)
        is_new, self._last_step = step > self._last_step, step
        if is_new and self._interval.is_over(step, now - self._begun):
            if self._has_lines:
                left = f", {self._left(step, now)} left" if step > self._first_step else ""
                line = f"step {step:,} of {self._num_steps:,}, {of_all}{left}"
                self._console.print(line, markup=False)
            self._begun = now
            self._num_rows, self._seconds = 0, 0.0
            self._num_losses, self._loss_sum = 0, 0.0

    def tell_of_test(self, batch: int) -> None:
        """Show how far an evaluation is."""
        description = f"{self.of_epochs(max(1, self._epoch))}: testing, batch {batch:,}"
        self._bar.update(self._task, description=description)

    def of_epochs(self, epoch: int) -> str:
        return f"epoch {epoch:,} of {self._num_epochs:,}"

    def _left(self, step: int, now: float) -> timedelta:
        assert self._first_step is not None
        seconds = (now - self._started) / (step - self._first_step) * (self._num_steps - step)
        return timedelta(seconds=round(seconds))

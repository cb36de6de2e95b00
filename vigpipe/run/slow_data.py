"""Notice that the ranks wait for their data, so that the data set the pace of the run."""

from collections import deque
from statistics import median

WINDOW = 20  # steps in a median: the first steps, and single slow reads, do not count
LARGEST_SHARE = 0.2  # A smaller share of a step, its waiting included, is not worth a sentence.
LEAST_SECONDS = 0.005  # Waiting for less cannot be told apart from noise.


class SlowData:
    """Watches how long a run waits for its data, and says so once if it is long."""

    def __init__(self, num_workers: int, *, runs_ahead: bool, unit: str = "images") -> None:
        self._num_workers, self._runs_ahead, self._unit = num_workers, runs_ahead, unit
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._is_told = False

    def add(self, data_seconds: float, step_seconds: float) -> str | None:
        """Take a step's times; return a sentence, once, when the waiting for data is long."""
        # A rank that runs ahead reads while its device is still busy with the step before.
        hidden = step_seconds if self._runs_ahead else 0.0
        self._recent.append((max(0.0, data_seconds - hidden), step_seconds))
        if self._is_told or len(self._recent) < WINDOW:
            return None
        waited, step = (median(seconds) for seconds in zip(*self._recent, strict=True))
        if waited < LEAST_SECONDS or waited < LARGEST_SHARE * (waited + step):
            return None
        self._is_told = True
        if self._unit != "images":
            advice = "leave each rank a core for the thread that makes the next ones"
        elif self._num_workers:
            advice = f"choose more than --workers {self._num_workers} if there are idle cores"
        else:
            advice = "let processes read them ahead, with --workers 2"
        return (
            f"a step waits {1e3 * waited:.0f} ms for its {self._unit}, and then takes "
            f"{1e3 * step:.0f} ms; {advice}"
        )

"""Average all replicas in the background while they go on (--overlap).

A replica gives a copy of its weights. A thread of each of its ranks waits until the table says that
all replicas have given theirs, and then exchanges them with the ranks that hold the same stages.
If the mean is there when the replica needs it, nobody has waited.
"""

import threading
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from vigpipe.replication.averages import Averages
from vigpipe.replication.table import TableStore, read_table

_LOOK_SECONDS = 2e-3  # the thread reads the table this often


class Travel:
    """The average that is under way, if there is one.

    The tensors, which are averaged, have one dtype. Nothing else may use `averages` while an
    average is under way.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], averages: Averages, store: TableStore
    ) -> None:
        self._tensors, self._averages, self._store = tensors, averages, store
        self._given = {name: torch.zeros_like(t) for name, t in tensors.items()}
        self._means = {name: torch.zeros_like(t) for name, t in tensors.items()}
        device = next(iter(self._given.values())).device
        # On a GPU, the thread's work must not be queued with that of the next steps.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._number = 0  # counts averages from 1; 0 if none is under way
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._stops = threading.Event()

    @property
    def is_under_way(self) -> bool:
        """Whether weights were given for an average that was not applied yet."""
        return self._number > 0

    @torch.no_grad()
    def begin(self, number: int, num_samples: int) -> None:
        """Give a copy of the tensors, on which `num_samples` were trained, for an average."""
        for name, tensor in self._tensors.items():
            self._given[name].copy_(tensor)
        self.go_on(number, num_samples, has_come=False)

    def go_on(self, number: int, num_samples: int, *, has_come: bool) -> None:
        """Go on with an average of the given tensors; if `has_come`, the means are here already."""
        self._number = number
        if has_come:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        work = partial(self._work, number, num_samples)
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def end(self) -> tuple[list[Tensor], list[Tensor]]:
        """Wait for the average; return the given tensors and their means, or raise its error."""
        self._wait()
        self._number = 0
        return list(self._given.values()), list(self._means.values())

    def pause(self, stop: bool) -> None:
        """Leave nothing under way between the ranks; all of them call this while they rest.

        If all have given, this waits for the means. Otherwise the given tensors are kept, and the
        thread ends if the run does.
        """
        if not self.is_under_way:
            return
        if min(read_table(self._store).joined) >= self._number:
            self._wait()
        elif stop:
            self._stops.set()
            self._wait()

    def tensors(self) -> dict[str, Tensor]:
        given = {f"given/{name}": tensor for name, tensor in self._given.items()}
        return given | {f"given_mean/{name}": tensor for name, tensor in self._means.items()}

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @torch.no_grad()
    def _work(self, number: int, num_samples: int) -> None:
        try:
            while min(read_table(self._store).joined) < number:
                if self._stops.wait(_LOOK_SECONDS):
                    return
            with torch.cuda.stream(self._stream):
                given = list(self._given.values())
                weight = given[0].new_tensor(num_samples, dtype=torch.float64)
                means, _ = self._averages.mean(given, weight)
                for own, mean in zip(self._means.values(), means, strict=True):
                    own.copy_(mean)
        except Exception as error:
            self._error = error

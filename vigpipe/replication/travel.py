"""An average of all replicas that is computed while they go on (--overlap).

A replica gives a copy of its weights. A thread of each of its ranks waits until the table says that
all replicas have given theirs, and then exchanges them with the ranks that hold the same stages.
The replica takes the mean when it needs it; if it is there by then, nobody has waited.
"""

import threading
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from vigpipe.replication.averages import Averages
from vigpipe.replication.table import Store, read_table

_LOOK_SECONDS = 2e-3  # between two looks at the table


class Travel:
    """The average that is under way, if there is one.

    Args:
        tensors: what is averaged, by name; of one dtype.
        averages: averages them with the ranks that hold the same stages; nobody else uses it
            meanwhile.
        store: that of the table.
    """

    def __init__(self, tensors: Mapping[str, Tensor], averages: Averages, store: Store) -> None:
        self._tensors, self._averages, self._store = tensors, averages, store
        self._given = {name: torch.zeros_like(t) for name, t in tensors.items()}
        self._means = {name: torch.zeros_like(t) for name, t in tensors.items()}
        device = next(iter(self._given.values())).device
        # On a GPU, the thread's work must not be queued with that of the next steps.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._number = 0  # of the average that is under way; 0 for none
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._stops = threading.Event()

    @property
    def is_under_way(self) -> bool:
        """Whether weights were given for an average that was not taken yet."""
        return self._number > 0

    @torch.no_grad()
    def begin(self, number: int, num_samples: int) -> None:
        """Give a copy of the tensors for an average.

        Args:
            number: of the average, counted from 1.
            num_samples: samples that stand behind the tensors.
        """
        for name, tensor in self._tensors.items():
            self._given[name].copy_(tensor)
        self.go_on(number, num_samples, has_come=False)

    def go_on(self, number: int, num_samples: int, *, has_come: bool) -> None:
        """Go on with an average, with the tensors that were given for it.

        Args:
            number: of the average.
            num_samples: samples that stand behind the given tensors.
            has_come: whether its means are there already.
        """
        self._number = number
        if has_come:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        work = partial(self._work, number, num_samples)
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def end(self) -> tuple[list[Tensor], list[Tensor]]:
        """Wait for the average that is under way, once all have given.

        Returns:
            The tensors as they were given, and their means over all replicas.

        Raises:
            RuntimeError: a replica was lost.
        """
        self._wait()
        self._number = 0
        return list(self._given.values()), list(self._means.values())

    def pause(self, stop: bool) -> None:
        """Leave nothing under way between the ranks; all of them call this while they rest.

        If all have given, the means are computed now. Otherwise the given tensors are kept.

        Args:
            stop: whether the run ends.
        """
        if not self.is_under_way:
            return
        if min(read_table(self._store).joined) >= self._number:
            self._wait()
        elif stop:
            self._stops.set()
            self._wait()

    def tensors(self) -> dict[str, Tensor]:
        """Return its state by name: what a later run needs to go on."""
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

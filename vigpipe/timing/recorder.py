"""Record what a rank does in a step: spans without gaps, and regions of the model inside them.

    spans     [wait input][forward 0        ][send][wait input][forward 1        ] ...
    regions               [block 4  ][block 5]                 [block 4  ][block 5]
                           [grapher][ffn]

A stamp ends one span and begins the next, so the spans of a step add up to the step. The model's
regions are followed through a backward by hooks on tensors: a region's backward begins when the
gradient of its result has been computed, and ends when that of its inputs has.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from vigpipe.spans import Span, SpanKind
from vigpipe.timing.clock import Clock

Phase = Literal["train", "test"]
PHASES: tuple[Phase, ...] = get_args(Phase)
NUM_CLOSE_STEPS = 3  # the last steps of a phase, whose regions are kept one by one for a trace


@dataclass(frozen=True, slots=True)
class Row:
    """The total time of one name in one step of one rank: a row of timing.csv.

    A batch is made of samples, images or sub-graphs, which are counted over all replicas; both
    counts are 0 if they are not known, as in older files.
    """

    phase: Phase
    step: int  # or the test batch, each of which counts as a step
    rank: int
    replica: int
    stage: int  # -1 where the row is not about a single stage
    name: str  # `step`, `between steps`, a kind of span, or a region of the model
    direction: str  # forward, backward, recompute (a forward in the backward), or empty
    count: int  # how often the name occurred in the step
    seconds: float  # in total
    samples: int = 0
    full_batch: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the step had a full batch, or may have had one."""
        return self.samples >= self.full_batch


class Event(NamedTuple):
    """One pass through a region of the model, in seconds on this host's clock."""

    name: str  # the region's path, such as `block 3/grapher`
    direction: str  # forward, backward or recompute
    stage: int
    microbatch: int
    start: float
    end: float


class RecordedStep(NamedTuple):
    """A recorded step of one rank, on this host's clock."""

    phase: Phase
    step: int
    spans: list[Span]  # without gaps
    # Kept for the last NUM_CLOSE_STEPS steps of a phase with full batches, and of those with
    # partial ones; empty for the others.
    events: list[Event]
    is_full: bool = True


_Pass = tuple[str, int, int]  # a region's path, stage and micro-batch


class Recorder:
    """Records the steps of one rank.

    `enter`, `leave`, `resume` and `region` do nothing outside a step that is recorded. The first
    num_warmup steps of each phase are left out. Then num_steps with full batches are recorded, and
    those with partial batches that come in between, at most as many.
    """

    def __init__(
        self, clock: Clock, rank: int, replica: int, num_warmup: int, num_steps: int
    ) -> None:
        self.clock, self.rank, self.replica = clock, rank, replica
        self.num_warmup, self.num_steps = num_warmup, num_steps
        self._num_seen: Counter[Phase] = Counter()
        self._num_recorded: Counter[tuple[Phase, bool]] = Counter()  # by whether batches are full
        self.rows: list[Row] = []  # those since `take_rows` was last called
        self.steps: dict[Phase, list[RecordedStep]] = {"train": [], "test": []}
        # Stamps of the last training step, with a full batch if there was one; the cost of timing
        # is in proportion to them.
        self.num_stamps = 0
        self._phase: Phase | None = None
        self._last: tuple[Phase, int, float] | None = None  # the previous step, and when it ended
        self._spans: list[tuple[SpanKind, int, int, Any, Any]] = []
        self._open: tuple[SpanKind | None, int, int, Any] = (None, -1, -1, None)
        self._path: list[str] = []
        self._events: list[tuple[_Pass, str, Any, Any]] = []  # direction, start and end of a pass
        self._begun: dict[_Pass, Any] = {}  # passes whose backward has begun
        # The last result, weakly, and the passes that it is the result of.
        self._watched: tuple[Any, list[_Pass]] = (None, [])

    # ---- a step ------------------------------------------------------------------------------

    @contextmanager
    def step(
        self, phase: Phase, number: int, samples: int = 0, full_batch: int = 0
    ) -> Iterator[None]:
        """Record what happens inside, if this is one of the steps to be recorded.

        The number is that of the training step; test batches are counted here instead, from one
        evaluation on to the next. For `samples` and `full_batch` see `Row`.
        """
        is_full = samples >= full_batch
        self._num_seen[phase] += 1
        most_recorded = max(self._num_recorded[phase, True], self._num_recorded[phase, is_full])
        if self._num_seen[phase] <= self.num_warmup or most_recorded >= self.num_steps:
            yield
            return
        self._num_recorded[phase, is_full] += 1
        self._samples, self._full_batch = samples, full_batch  # as in the step's rows
        start = time.perf_counter()
        self._phase, self._step = phase, number if phase == "train" else self._num_seen[phase]
        self.clock.begin()
        self._open = ("other", -1, -1, self.clock.stamp())
        yield
        self.clock.finish()
        self._end(time.perf_counter() - start)

    def _end(self, seconds: float) -> None:
        assert self._phase is not None
        self.enter("other")
        step, phase = self._step, self._phase
        self._phase = None
        at = self.clock.seconds
        spans = [
            Span(self.rank, kind, at(start), at(end), stage, microbatch)
            for kind, stage, microbatch, start, end in self._spans
        ]
        events = [
            Event(path, direction, stage, microbatch, at(start), at(end))
            for (path, stage, microbatch), direction, start, end in self._events
        ]
        self._spans, self._events, self._begun = [], [], {}
        steps, is_full = self.steps[phase], self._samples >= self._full_batch
        recorded = RecordedStep(phase, step, spans, events, is_full)
        steps.append(recorded)
        alike = (i for i in reversed(range(len(steps))) if steps[i].is_full == is_full)
        far = next(islice(alike, NUM_CLOSE_STEPS, None), None)
        if far is not None:
            steps[far] = steps[far]._replace(events=[])
        if phase == "train" and (is_full or not self._num_recorded["train", True]):
            self.num_stamps = len(spans) + 2 * len(events)
        self._add_rows(recorded, seconds)

    def _add_rows(self, recorded: RecordedStep, seconds: float) -> None:
        phase, step, spans, events, _ = recorded
        totals: dict[tuple[int, str, str], list[float]] = {}

        def add(stage: int, name: str, direction: str, seconds: float) -> None:
            total = totals.setdefault((stage, name, direction), [0, 0.0])
            total[0] += 1
            total[1] += seconds

        add(-1, "step", "", seconds)
        if self._last is not None and self._last[:2] == (phase, step - 1):
            add(-1, "between steps", "", spans[0].start - self._last[2])
        self._last = (phase, step, spans[-1].end)
        for span in spans:
            add(span.stage, span.kind, "", span.seconds)
        for event in events:
            add(event.stage, event.name, event.direction, event.end - event.start)
        self.rows += [
            Row(
                *(phase, step, self.rank, self.replica, stage, name, direction),
                *(int(count), total, self._samples, self._full_batch),
            )
            for (stage, name, direction), (count, total) in totals.items()
        ]

    def take_rows(self) -> list[Row]:
        """Return the rows that have been added since the last call, and forget them."""
        rows, self.rows = self.rows, []
        return rows

    # ---- spans -------------------------------------------------------------------------------

    def enter(
        self, kind: SpanKind, stage: int = -1, microbatch: int = -1, gap: SpanKind | None = None
    ) -> None:
        """End the current span, and begin another one.

        Stage and micro-batch are -1 for none. If the rank has called `leave` or begun to send
        before, `gap` is the kind of the span that ends.
        """
        if self._phase is None:
            return
        now = self.clock.stamp()
        if kind == "all-reduce":  # DDP does this inside its backward, which has nothing else left
            self._close_backward(now)
        ended, its_stage, its_microbatch, start = self._open
        if gap is not None and ended in (None, "send"):
            ended = gap
            if gap in ("wait input", "wait gradient"):
                its_stage, its_microbatch = stage, microbatch
        self._spans.append((ended or "other", its_stage, its_microbatch, start, now))
        self._open = (kind, stage, microbatch, now)
        if kind == "forward":
            self._path.clear()

    def leave(self) -> None:
        """End the current span; the next `enter` says what the time until then was spent on."""
        if self._phase is None:
            return
        now = self.clock.stamp()
        self._close_backward(now)
        self._spans.append((self._open[0] or "other", *self._open[1:], now))
        self._open = (None, -1, -1, now)

    def resume(self) -> None:
        """Continue the span that was left last, as if there had been no gap."""
        if self._phase is None or self._open[0] is not None:
            return
        kind, stage, microbatch, start, _ = self._spans.pop()
        self._open = (kind, stage, microbatch, start)

    # ---- regions -----------------------------------------------------------------------------

    def region(self, name: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """Run a region of the model and record it; this is a Listener of vigpipe.model.regions."""
        if self._phase is None:
            return function(*inputs)
        kind, stage, microbatch, _ = self._open
        path = f"{self._path[-1]}/{name}" if self._path else name
        this = (path, stage, microbatch)
        is_repeated = kind == "backward"
        aliases = inputs if is_repeated else tuple(map(_alias, inputs))
        start = self.clock.stamp()
        self._path.append(path)
        try:
            result = function(*aliases)
        finally:  # a recomputation ends with an exception once it has all that the backward needs
            self._path.pop()
            direction = "recompute" if is_repeated else "forward"
            self._events.append((this, direction, start, self.clock.stamp()))
        if not is_repeated:
            self._watch_backward(this, aliases, result)
        return result

    def _watch_backward(self, forward: _Pass, aliases: tuple[Any, ...], result: Any) -> None:
        outputs = result if isinstance(result, tuple) else (result,)
        last = next((y for y in outputs if isinstance(y, Tensor) and y.requires_grad), None)
        if last is None:
            return
        watched, passes = self._watched
        if watched is not None and watched() is last:
            # It is also the result of a region inside, whose backward begins at the same time.
            passes.append(forward)
        else:
            passes = [forward]
            self._watched = (weakref.ref(last), passes)
            last.register_hook(partial(self._begin_backward, passes))
        first = next((x for x in aliases if isinstance(x, Tensor) and x.requires_grad), None)
        if first is not None:
            first.register_hook(partial(self._end_backward, forward))

    def _begin_backward(self, passes: list[_Pass], gradient: Tensor) -> None:
        if self._phase is not None:
            now = self.clock.stamp()
            for forward in passes:
                self._begun.setdefault(forward, now)

    def _end_backward(self, forward: _Pass, gradient: Tensor) -> None:
        start = self._begun.pop(forward, None)
        if start is not None:
            self._events.append((forward, "backward", start, self.clock.stamp()))

    def _close_backward(self, now: Any) -> None:
        """End the regions whose inputs carry no gradient together with the stage's backward."""
        for forward, start in self._begun.items():
            self._events.append((forward, "backward", start, now))
        self._begun.clear()


def _alias(x: Any) -> Any:
    """Return `x` as a separate tensor, whose gradient is complete when the region's backward ends.

    `view_as` would give dimensions of size 1 other strides, forward and backward, and layers choose
    the order in which they sum by strides.
    """
    return x.expand_as(x) if isinstance(x, Tensor) and x.requires_grad else x

"""How do step time, bubble and synchronisation grow with S, M and D? Emulate a cluster.

The computing of a stage is replaced by sleeping for its profiled time, which needs no core. The
schedule, tensors, transfers and all-reduce are those of a training run. So 32 ranks run on a
laptop, and the time of a step beyond the profiled times is the overhead of running a pipeline.

All layouts share one world; one that needs fewer ranks runs on the first of them:

    rank           0  1  2  3  4  5  6  7
    4 stages × 2   a replica   another one
    2 stages × 1   one         (wait at the barrier)
"""

import gc
import math
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.emulated import PICTURE, write_page
from benchmarks.options import FILES, EmulateBench
from benchmarks.overhead import Case, TimedStep, make_case
from benchmarks.ranks import run_bench_ranks, start_bench_ranks
from benchmarks.sleeping import SleepingModel, sleep_until
from vigpipe.data.loss import Loss
from vigpipe.errors import DONE, InputError
from vigpipe.launch.device import peak_bytes
from vigpipe.launch.environment import Launch
from vigpipe.launch.rendezvous import init_process_group
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.gradients import GradientReducer, gather_vectors
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import even_plan
from vigpipe.parallel.schedule import Pipeline
from vigpipe.parallel.split import StageModule, cut_stages
from vigpipe.planning.profile import Profile, read_profile
from vigpipe.run.folder import make_output_folder

IMAGE_SHAPE = (1,)  # of a sample; the stem sleeps, and images cross no boundary
NUM_SLEEPS = 50  # sleeps of a lone rank, to see how exact they are
DEVICE = torch.device("cpu")
LONGEST_SECONDS = 1e5  # longest step that is accepted
SILENCE_SECONDS = 300.0  # beyond the sleep itself, until a silent peer counts as lost


def run_emulation(options: EmulateBench, arguments: Sequence[str]) -> int:
    """Run the command `python -m benchmarks emulate`; its ranks are started as for training.

    Under srun and torchrun there must be at least as many ranks as the largest layout has.

    Args:
        options: options of the benchmark.
        arguments: the command line, for the ranks that are started here.

    Returns:
        The exit code.
    """

    def start(launch: Launch) -> int:
        return _start(options, arguments, launch)

    return run_bench_ranks("benchmarks.emulate", options.out, start)


def _start(options: EmulateBench, arguments: Sequence[str], launch: Launch) -> int:
    profile = read_profile(options.profile)
    cases = list_cases(options, profile)
    needed = max(case.layout.world_size for case in cases)
    if launch.launcher == "alone" and needed > 1:
        return start_bench_ranks(needed, options.out, [*FILES, PICTURE], arguments)
    if launch.world_size < needed:
        raise InputError(
            f"{launch.world_size} ranks were started, but the largest of --stages "
            f"{options.stages} x --dp {options.dp} needs {needed}; start {needed} ranks or ask for "
            "smaller layouts"
        )
    folder = make_output_folder(options.out, [*FILES, PICTURE]) if launch.rank == 0 else Path()
    torch.set_num_threads(1)
    longest = max(case.ideal_seconds for case in cases)
    timeout = (
        SILENCE_SECONDS + 4 * longest
    )  # a rank waits for the warm-up and the timed step of others
    init_process_group(launch, "gloo", timeout)
    if launch.rank == 0:
        sleep = sum(case.ideal_seconds for case in cases) * 2 * options.repeats
        print(f"{len(cases)} layouts, {launch.world_size} ranks, {sleep:.0f} s of sleep or more")
        sys.stdout.flush()
    alone = (
        _measure_late_sleeps(min(case.shortest_sleep for case in cases)) if launch.rank == 0 else []
    )
    steps = emulate(cases, options, profile, timeout)
    if launch.rank == 0:
        write_page(folder, options, profile, steps, alone)
    return DONE


def list_cases(options: EmulateBench, profile: Profile) -> list[Case]:
    """Check the options and list all combinations of stages, micro-batches and replicas.

    Raises:
        InputError: a number is out of range, or a layout does not fit the model or the batch.
    """
    for flag, value in (("--repeats", options.repeats), ("--batch-size", options.batch_size)):
        if value is not None and value < 1:
            raise InputError(f"{flag} {value}: must be at least 1")
    if not 0 < options.scale < math.inf:
        raise InputError(f"--scale {options.scale}: must be a number above 0")
    cases = []
    for d in _counts("--dp", options.dp):
        for s in _counts("--stages", options.stages):
            for m in _counts("--microbatches", options.microbatches):
                layout = Layout(s, m, d, options.schedule)
                batch_size = options.batch_size or profile.rows[-1] * m * d
                if batch_size % (m * d):
                    raise InputError(
                        f"--batch-size {batch_size}: {d} replicas x {m} micro-batches do not share "
                        f"it evenly; choose a multiple of every M x D, such as {m * d}"
                    )
                plan = even_plan(len(profile.blocks), s)
                microbatch_size = batch_size // (m * d)
                cases.append(make_case(layout, plan, profile, microbatch_size, options.scale))
                if not 0 < cases[-1].ideal_seconds <= LONGEST_SECONDS:
                    raise InputError(
                        f"--profile {options.profile}: a step of {layout} would sleep "
                        f"{cases[-1].ideal_seconds:g} s, expected more than 0 and at most "
                        f"{LONGEST_SECONDS:g} s; choose another --scale or another profile"
                    )
    return cases


def _counts(flag: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise InputError(f"{flag} {text}: must be whole numbers above 0, such as 1,2,4")
    return sorted({int(word) for word in words})


def emulate(
    cases: Sequence[Case], options: EmulateBench, profile: Profile, timeout: float
) -> list[TimedStep]:
    """Run all layouts once, then all of them again, and so on; every rank of the world calls this.

    A rank holds one layout at a time, so that it needs only the memory of the largest. An untimed
    step goes before every timed one.

    Args:
        cases: layouts to emulate.
        options: its sync, scale and repeats are used.
        profile: costs of the model's pieces.
        timeout: seconds until a collective among some of the ranks gives up.

    Returns:
        The timed steps of the layouts that this rank is in; on rank 0 these are all.
    """
    gc.freeze()  # or every collection would copy the pages that are shared with the fork server
    groups = make_groups(cases, timeout)
    steps: list[TimedStep] = []
    for repeat in range(options.repeats):
        for case in cases:
            if dist.get_rank() < case.layout.world_size:
                emulated = _EmulatedRank(case, options, profile, groups)
                emulated.step()
                steps.append(emulated.timed_step(repeat))
                del emulated
                gc.collect()  # schedules and stages refer to one another
            dist.barrier()  # ranks that the layout does not need wait here
    return steps


Groups = dict[
    tuple[int, ...], dist.ProcessGroup
]  # process groups by their ranks; a single rank needs none


def make_groups(cases: Sequence[Case], timeout: float) -> Groups:
    """Make the process groups that this rank is in; every rank of the world calls this.

    Args:
        cases: layouts to emulate.
        timeout: seconds until a collective of a group gives up.
    """
    wanted: dict[tuple[int, ...], None] = {}  # used as a set with the same order on all ranks
    for case in cases:
        for rank in range(case.layout.world_size):
            wanted |= dict.fromkeys(map(tuple, _group_ranks(case.layout, rank)))
    groups: Groups = {}
    for ranks in wanted:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout))
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                groups[ranks] = group
    return groups


def _group_ranks(layout: Layout, rank: int) -> tuple[range, range, range]:
    """List all ranks of a layout, those of one rank's pipeline, and those with the same stage."""
    stages, world_size = layout.pipeline_size, layout.world_size
    first = layout.replica_index(rank) * stages
    return (
        range(world_size),
        range(first, first + stages),
        range(layout.pipeline_rank(rank), world_size, stages),
    )


class _EmulatedRank:
    """The stages, schedule and batch that this rank has in one emulated layout."""

    def __init__(self, case: Case, options: EmulateBench, profile: Profile, groups: Groups) -> None:
        self.case, layout, rank = case, case.layout, dist.get_rank()
        self.world_group, pipeline_group, replica_group = (
            groups.get(tuple(ranks)) for ranks in _group_ranks(layout, rank)
        )
        stage_indices = layout.stages_of(rank)
        self.models = cut_stages(
            lambda: SleepingModel(profile, case.microbatch_size, options.scale),
            case.plan,
            stage_indices,
        )
        stage_modules = [
            StageModule(m, case.microbatch_size, IMAGE_SHAPE, torch.float32) for m in self.models
        ]
        num_microbatches = layout.num_microbatches
        self.reducer = GradientReducer(stage_modules, replica_group, num_microbatches, options.sync)
        self.pipeline = Pipeline(
            stage_modules,
            self.reducer.modules,
            stage_indices,
            layout,
            DEVICE,
            pipeline_group,
            Loss(),
            send=lambda tensor: tensor,
        )
        num_samples = num_microbatches * case.microbatch_size
        self.batch = ReplicaBatch(
            step=0,
            num_samples=num_samples * layout.num_replicas,
            sizes=(case.microbatch_size,) * layout.num_microbatches,
            keys=torch.zeros(num_samples, dtype=torch.int64),
            inputs=torch.zeros(num_samples, *IMAGE_SHAPE) if self.pipeline.has_first else None,
            labels=torch.zeros(num_samples, dtype=torch.int64) if self.pipeline.has_last else None,
        )
        num_weights = sum(
            p.numel() for stage_module in stage_modules for p in stage_module.parameters()
        )
        self.sync_bytes = num_weights * (8 if options.sync == "double" else 4)

    def step(self) -> tuple[float, float]:
        """Run a step without the optimizer.

        Returns:
            Seconds of the schedule, and seconds of adding up gradients.
        """
        start = time.perf_counter()
        self.pipeline.train_step(self.batch)
        drained = time.perf_counter()
        self.reducer.gradients.reduce()
        return drained - start, time.perf_counter() - drained

    def timed_step(self, repeat: int) -> TimedStep:
        """Run a step and gather the times of all its ranks."""
        for model in self.models:
            model.late_seconds.clear()
        self.reducer.gradients.clear()
        if self.world_group is not None:
            dist.barrier(self.world_group)
        cpu_before = time.process_time()
        schedule_seconds, sync_seconds = self.step()
        cpu_seconds = time.process_time() - cpu_before
        late = [seconds for model in self.models for seconds in model.late_seconds]
        times = schedule_seconds, sync_seconds, cpu_seconds, sum(late), len(late)
        values = torch.tensor((*times, self.sync_bytes, _memory_bytes()), dtype=torch.float64)
        ranks = gather_vectors(values, self.world_group)
        schedules, syncs, cpus, lates, sleeps, sizes, memories = ranks.unbind(1)
        return TimedStep(
            case=self.case,
            repeat=repeat,
            seconds=float((schedules + syncs).max()),
            schedule_seconds=float(schedules.max()),
            sync_seconds=float(syncs.max()),
            late_seconds=float(lates.sum() / sleeps.sum()),
            cpu_seconds=float(cpus.sum()),
            sync_bytes=int(sizes.max()),
            memory_bytes=int(memories.sum()),
        )


def _measure_late_sleeps(seconds: float) -> list[float]:
    """Return by how many seconds sleeps of a length end late while the other ranks wait."""
    return [sleep_until(time.perf_counter() + seconds) for _ in range(NUM_SLEEPS)]


def _memory_bytes() -> int:
    """Return this rank's resident bytes; a page that n processes share counts as 1/n (Linux)."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return peak_bytes(DEVICE)
    return 1024 * int(
        next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1]
    )

"""The command line of the benchmarks: `python -m benchmarks NAME`, in a checkout."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, NamedTuple

from cyclopts import App, Parameter

from benchmarks.options import (
    FILES,
    AccuracyBench,
    CheckpointBench,
    CutsBench,
    EmulateBench,
    FeedBench,
    GnnBench,
    HalosBench,
    IntervalsBench,
    LearningBench,
    MicrobatchesBench,
    OpsBench,
    PipelineBench,
    PlanGraphBench,
    PredictBench,
    SamplersBench,
    SoakBench,
    SplitBench,
    StrategiesBench,
    SubnetworksBench,
    SyncBench,
    VigBench,
    VigStudyBench,
    WidthsBench,
)
from benchmarks.ranks import MAIN
from benchmarks.study.options import StudyConfig
from vigpipe.commands.program import run_program
from vigpipe.config.options import TrainConfig
from vigpipe.errors import InputError
from vigpipe.start import run_on_ranks


class Benchmark(NamedTuple):
    """A benchmark.

    Attributes:
        work: what does it, as "module:function".
        options: a dataclass.
        summary: what it measures.
        kind: what the work is. A function that is alone is called with the options, and a starter
            of processes like this one with the command line too. A rank's is what each rank of a
            run does (`start.run_on_ranks`). A question is answered by runs of `vigpipe train`
            (`trained.Question`).
    """

    work: str
    options: type[Any]
    summary: str
    kind: Literal["alone", "starter", "rank", "question"] = "alone"


BENCHMARKS = {
    "pipeline": Benchmark(
        "benchmarks.pipeline:bench_pipeline",
        PipelineBench,
        "Time the stages of a pipeline against the same micro-batches on one stage.",
        kind="rank",
    ),
    "sync": Benchmark(
        "benchmarks.sync:bench_sync",
        SyncBench,
        "Time the ways to add gradients up over replicas: --sync ddp, drain and double.",
        kind="rank",
    ),
    "emulate": Benchmark(
        "benchmarks.emulate:run_emulation",
        EmulateBench,
        "Run many layouts on few cores: ranks sleep for profiled times, the rest is real.",
        kind="starter",
    ),
    "strategies": Benchmark(
        "benchmarks.strategies:run_strategies",
        StrategiesBench,
        "Compare ways in which replicas agree: replicas sleep, averages are real.",
        kind="starter",
    ),
    "learning": Benchmark(
        "benchmarks.learning:QUESTION",
        LearningBench,
        "Compare what the ways in which replicas agree learn, over several seeds.",
        kind="question",
    ),
    "samplers": Benchmark(
        "benchmarks.samplers:QUESTION",
        SamplersBench,
        "Compare what the ways to sample a graph keep, learn and cost, over several seeds.",
        kind="question",
    ),
    "intervals": Benchmark(
        "benchmarks.intervals:QUESTION",
        IntervalsBench,
        "Compare all-reduce and gossip on the parts of a graph, with averages now and then.",
        kind="question",
    ),
    "subnetworks": Benchmark(
        "benchmarks.subnetworks:QUESTION",
        SubnetworksBench,
        "Compare independent sub-networks with a model that is trained as a whole.",
        kind="question",
    ),
    "widths": Benchmark(
        "benchmarks.widths:QUESTION",
        WidthsBench,
        "Measure memory and steps of sub-networks by the width of the model they make up.",
        kind="question",
    ),
    "halos": Benchmark(
        "benchmarks.halos:QUESTION",
        HalosBench,
        "Compare what ranks learn whose halos are exact, late, or sampled.",
        kind="question",
    ),
    "split": Benchmark(
        "benchmarks.split:bench_split",
        SplitBench,
        "Count what ranks that share a graph send and hold, by their number.",
    ),
    "plan-graph": Benchmark(
        "benchmarks.plan_graph:run_plan_graph",
        PlanGraphBench,
        "Predict and measure all ways to use ranks on one graph, and judge the choice.",
        kind="starter",
    ),
    "microbatches": Benchmark(
        "benchmarks.microbatches:bench_microbatches",
        MicrobatchesBench,
        "Cut a batch into more and more micro-batches, and account for what each costs.",
        kind="rank",
    ),
    "predict": Benchmark(
        "benchmarks.predict:bench_predict",
        PredictBench,
        "Compare predicted steps with measured ones, over layouts of one and two ranks.",
        kind="rank",
    ),
    "cuts": Benchmark(
        "benchmarks.cuts:bench_cuts",
        CutsBench,
        "Try every cut in two stages, and see how good the planner's is.",
        kind="rank",
    ),
    "ops": Benchmark(
        "benchmarks.operators:bench_ops",
        OpsBench,
        "Time kNN and max-relative aggregation against the formulation everyone uses.",
    ),
    "gnn": Benchmark(
        "benchmarks.gnn:bench_gnn",
        GnnBench,
        "Time epochs on a whole graph against torch-geometric and torch.sparse.",
    ),
    "vig-study": Benchmark(
        "benchmarks.vig_study:bench_vig_study",
        VigStudyBench,
        "Time training steps of vig_study against torch-geometric's formulation.",
    ),
    "vig": Benchmark(
        "benchmarks.throughput:bench_vig",
        VigBench,
        "Time training and inference of ViGs against the formulation everyone uses.",
    ),
    "feed": Benchmark(
        "benchmarks.feed:bench_feed",
        FeedBench,
        "Time the way from JPEG files to batches on the device against timm's loader.",
    ),
    "checkpoint": Benchmark(
        "benchmarks.saving:bench_checkpoint",
        CheckpointBench,
        "Time steps with and without a checkpoint that is written beside them.",
        kind="rank",
    ),
    "soak": Benchmark(
        "benchmarks.soak:bench_soak",
        SoakBench,
        "Kill, freeze and stop the ranks of a long run, and compare it with one left alone.",
    ),
    "accuracy": Benchmark(
        "benchmarks.accuracy:bench_accuracy",
        AccuracyBench,
        "Show how well a run's model does, beside classifiers on raw pixels.",
    ),
    "study": Benchmark(
        "benchmarks.study.runs:run_study",
        StudyConfig,
        "Run the study's experiment again, beside its published figures and two baselines.",
        kind="starter",
    ),
}
CONFIGURED = [name for name, one in BENCHMARKS.items() if issubclass(one.options, TrainConfig)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark and return its exit code; wrong use is one sentence and code 2.

    Args:
        arguments: the command line without the program; by default that of this process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return run_program(make_app, CONFIGURED, words)


def make_app(arguments: list[str]) -> App:
    """Make the parser, with every benchmark and its options.

    Args:
        arguments: the command line without the program, for the ranks that a benchmark starts.
    """
    app = App(
        name="python -m benchmarks",
        help="Measure ratios side by side in one run.",
        help_format="plaintext",
    )
    for name, benchmark in BENCHMARKS.items():
        app.command(_command(benchmark, arguments), name=name)
    return app


def _command(benchmark: Benchmark, arguments: list[str]) -> Callable[..., int | None]:
    """Return the function of a benchmark's command, with the signature that the parser reads."""

    def command(*, config: Any) -> int | None:
        if benchmark.kind == "rank":
            return _run_on_ranks(benchmark, config, arguments)
        work = resolve_name(benchmark.work)
        if benchmark.kind == "question":
            from benchmarks.trained import ask

            return ask(work, config)
        return work(config) if benchmark.kind == "alone" else work(config, arguments)

    options = benchmark.options
    command.__doc__ = benchmark.summary
    command.__annotations__["config"] = Annotated[options, Parameter(name="*")]
    if not any(f.default is f.default_factory is MISSING for f in fields(options)):
        command.__kwdefaults__ = {"config": options()}
    return command


def _run_on_ranks(benchmark: Benchmark, config: PipelineBench, arguments: list[str]) -> int:
    """Run what each rank does, which is given the benchmark's own options."""
    if config.repeats < 1:
        raise InputError(f"--repeats {config.repeats}: must be at least 1")
    own = {field.name for field in fields(config)} - {field.name for field in fields(TrainConfig)}
    options = {name: getattr(config, name) for name in own - {"repeats"}}
    options["num_repeats"] = config.repeats
    return run_on_ranks(config, arguments, benchmark.work, FILES, options, main=MAIN)

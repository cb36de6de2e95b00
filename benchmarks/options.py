"""Options of the benchmarks; this module does without torch, so that `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vigpipe.config.choices import Average, Device, Features, Model, VigModel
from vigpipe.config.options import TrainConfig
from vigpipe.config.recipes import MODEL_DEFAULTS

FILES = ("README.md", "rows.csv", "profile.json", "checkpoints")  # what the benchmarks write


@dataclass(frozen=True, kw_only=True)
class PipelineBench(TrainConfig):
    """Options of `pipeline`: those of train, with other defaults.

    Attributes:
        batch_size: B, images of one optimizer step over all replicas; by default 20.
        repeats: timed steps of every contender.
    """

    model: Model = "vig_ti_224"
    data: str = "fake"
    stages: int | Literal["auto"] | Path = 2
    microbatches: int = 5
    threads: int | None = 1
    repeats: int = 9

    def __post_init__(self) -> None:
        if self.batch_size is None and MODEL_DEFAULTS[self.model].job == "images":
            object.__setattr__(self, "batch_size", 20)


@dataclass(frozen=True, kw_only=True)
class SyncBench(PipelineBench):
    """Options of `sync`: those of `pipeline`, with two replicas."""

    dp: int = 2


@dataclass(frozen=True, kw_only=True)
class CheckpointBench(PipelineBench):
    """Options of `checkpoint`: those of train, for the run that is saved."""

    repeats: int = 5


@dataclass(frozen=True, kw_only=True)
class PredictBench(PipelineBench):
    """Options of `predict`: those of train; the benchmark chooses the layouts."""

    model: VigModel = "vig_ti_224"


@dataclass(frozen=True, kw_only=True)
class MicrobatchesBench(PipelineBench):
    """Options of `microbatches`: those of train, on one rank.

    Attributes:
        numbers: M,M,... micro-batches that the batch is cut into, which divide it; 1, the whole,
            is always among them.
    """

    model: VigModel = "vig_ti_224"
    stages: int | Literal["auto"] | Path = 1
    microbatches: int = 1
    numbers: str = "1,2,5,10,20"


@dataclass(frozen=True, kw_only=True)
class CutsBench(PipelineBench):
    """Options of `cuts`: those of train, with a pyramid, whose blocks are unequal."""

    model: VigModel = "pvig_cifar_ti"
    batch_size: int | None = 40


@dataclass(frozen=True, kw_only=True)
class EmulateBench:
    """Options of `emulate`: every combination of stages, micro-batches and replicas.

    Attributes:
        profile: file with the costs of the model's pieces, as `vigpipe plan` writes it.
        stages: S,S,... ranks of one pipeline.
        microbatches: M,M,... micro-batches each replica cuts its share of a batch into.
        dp: D,D,... data-parallel replicas.
        schedule: order of forwards and backwards; those whose ideal step has a closed formula.
        sync: how gradients are added up after the pipeline has drained, in twice their precision
            (double) or their own (drain).
        batch_size: B, samples of one optimizer step over all replicas, a multiple of every M × D;
            by default every micro-batch has as many as the largest that was profiled.
        repeats: timed steps of every layout.
        scale: factor that profiled times are multiplied by, so that a slow host can stand for
            a fast cluster.
        out: output folder; by default runs/<time>.
    """

    profile: Path
    stages: str = "1,2,4,8"
    microbatches: str = "4,8,16"
    dp: str = "1,2,4"
    schedule: Literal["gpipe", "1f1b"] = "gpipe"
    sync: Literal["double", "drain"] = "double"
    batch_size: int | None = None
    repeats: int = 5
    scale: float = 1.0
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class LearningBench(TrainConfig):
    """Options of `learning`: those of train, which all runs share.

    Attributes:
        seeds: number of seeds, from 0; each way to agree is run with all of them.
        ways: WORD,WORD,... run only the ways whose names have one of these words, and synchronous;
            by default all.
        sleep: seconds that each replica sleeps before an item, as if the item took that long.
        slow: times as long that the last replica sleeps.
    """

    dp: int = 4
    threads: int | None = 1
    seeds: int = 3
    ways: str = ""
    sleep: float = 0.0
    slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SamplersBench(TrainConfig):
    """Options of `samplers`: those of train, which all runs share.

    Attributes:
        seeds: number of seeds, from 0; each way to sample the graph is run with all of them.
        ways: WAY,WAY,... each is full, another sampler or a partition, perhaps with @EPOCHS, and a
            partition with :PARTS and +MERGE, such as metis:400+10@20.
    """

    model: Model = "sage"
    seeds: int = 3
    ways: str = (
        "full@120,metis:40@20,random:40@20,walks:40@20,"
        "saint-node@40,saint-edge@40,saint-walk@40,fastgcn@10,neighbour@20"
    )


@dataclass(frozen=True, kw_only=True)
class IntervalsBench(TrainConfig):
    """Options of `intervals`: those of train, which all runs share.

    Attributes:
        epochs: passes over all parts.
        dropout: dropout rate, before every layer.
        average: what is averaged.
        partitions: METHOD,METHOD,... how the graph is cut.
        replicas: D,D,... numbers of replicas.
        intervals: TAU,TAU,... steps of a replica from one average to the next.
        seeds: number of seeds, from 0.
    """

    model: Model = "sage"
    epochs: int | None = 30
    dropout: float = 0.2
    average: Average | None = "gradients"
    partitions: str = "random,metis"
    replicas: str = "2,4"
    intervals: str = "1,20,100"
    seeds: int = 1


@dataclass(frozen=True, kw_only=True)
class SubnetworksBench(TrainConfig):
    """Options of `subnetworks`: those of train, which all runs share.

    Attributes:
        depths: L,L,... numbers of layers of a graph model; by default 2,3,4.
        samplers: WAY,WAY,... ways to sample a graph, as for samplers; by default
            full@400,metis:40@40,neighbour@40.
        replicas: M,M,... numbers of sub-networks; 1, a model that is trained as a whole, is always
            among them.
        variants: V,V,... ways to divide the model, each of them plain, or options with + between
            them: carry-moments, partition-input, inner, tied, branch-rescale. By default plain, or
            for models of images inner,tied.
        intervals: STEPS,STEPS,... steps of a round; the first table has the first of these.
        seeds: number of seeds, from 0.
    """

    model: Model = "sage"
    threads: int | None = 1
    depths: str | None = None
    samplers: str | None = None
    replicas: str = "1,2,4,8"
    variants: str | None = None
    intervals: str = "10,50"
    seeds: int = 3

    def __post_init__(self) -> None:
        variants = "inner,tied"
        if MODEL_DEFAULTS[self.model].job == "graph":
            variants = "plain"
            object.__setattr__(self, "depths", self.depths or "2,3,4")
            ways = self.samplers or "full@400,metis:40@40,neighbour@40"
            object.__setattr__(self, "samplers", ways)
        object.__setattr__(self, "variants", self.variants or variants)


@dataclass(frozen=True, kw_only=True)
class SplitBench(TrainConfig):
    """Options of `split`: those of train, which say what a step is.

    Attributes:
        layers: number of layers; by default 3 for a model of a graph.
        numbers: M,M,... numbers of ranks that share the graph, or every image.
    """

    model: Model = "gcn"
    threads: int | None = 1
    numbers: str = "2,3,4,6,8,12,16"


@dataclass(frozen=True, kw_only=True)
class PlanGraphBench(TrainConfig):
    """Options of `plan-graph`: those of train, which all cases share.

    Attributes:
        data: the graph of cases that name none.
        ranks: ranks that every case is planned for, and measured with.
        cases: CASE;CASE;... each a model, its width and layers, as MODEL:WIDTHxLAYERS, and perhaps
            a sampler with micro-batches, +SAMPLER*MICROBATCHES, and a graph, @DATA.
        repeats: timed rounds of every case.
    """

    model: Model = "gcn"
    data: str = "sbm:2000"
    threads: int | None = 1
    ranks: int = 2
    cases: str = (
        "gcn:16x3@sbm:20000,20,64,10;gcn:64x3@sbm:20000,20,64,10;gcn:256x3@sbm:20000,20,64,10;"
        "gcn:256x3@sbm:20000,1,64,10;gcn:1024x3@sbm:4000,8,64,10;sage:256x3@sbm:8000,16,64,60;"
        "gat:64x3@sbm:10000,20,64,10;sage:256x4+parts*4@sbm:20000,20,64,10"
    )
    repeats: int = 7


@dataclass(frozen=True, kw_only=True)
class HalosBench(TrainConfig):
    """Options of `halos`: those of train, which all runs share.

    Attributes:
        epochs: steps, each on the whole graph.
        dropout: dropout rate, before every layer.
        shards: number of ranks, each with a part of the graph.
        seeds: number of seeds, from 0; each halo is run with all of them.
        halos: HALO,HALO,... values of --halo to compare.
    """

    model: Model = "sage"
    epochs: int | None = 120
    dropout: float = 0.5
    shards: int = 4
    threads: int | None = 1
    seeds: int = 3
    halos: str = "exact,stale,sampled:0.5,sampled:0.1"


@dataclass(frozen=True, kw_only=True)
class WidthsBench(TrainConfig):
    """Options of `widths`: those of train, which all runs share.

    Attributes:
        layers: number of layers.
        steps: optimizer steps of every run.
        average_every: steps of a round.
        widths: W,W,... channels between two layers.
        replicas: M,M,... numbers of sub-networks; 1 is a model that is trained as a whole.
        alone_width: width of the model whose steps, and those of one of its sub-models, are timed
            in one process with one thread; 0 leaves that out.
        repeats: timed steps of each of these.
    """

    model: Model = "sage"
    layers: int | None = 3
    steps: int | None = 10
    average_every: int | None = 5
    threads: int | None = 1
    widths: str = "1024,2048,4096,8192,16384,32768"
    replicas: str = "1,2,4,8"
    alone_width: int = 4096
    repeats: int = 5


@dataclass(frozen=True, kw_only=True)
class StrategiesBench:
    """Options of `strategies`.

    Attributes:
        dp: D, replicas; each is a process that sleeps.
        items: items that they do together, a multiple of D.
        seconds: seconds that an item takes a replica that is not slow.
        numbers: float32 numbers that are averaged; by default the parameters of vig_study.
        average_every: TAU,TAU,... steps from one average to the next.
        average: what is averaged.
        repeats: rounds over all cases.
        out: output folder; by default runs/<time>.
    """

    dp: int = 4
    items: int = 400
    seconds: float = 0.02
    numbers: int = 1_120_410
    average_every: str = "1,5,20,100"
    average: Literal["gradients", "weights"] = "weights"
    repeats: int = 3
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class OpsBench:
    """Options of `ops`.

    Attributes:
        repeats: timed repeats of every contender.
        threads: threads of the process.
        device: where to run; auto takes CUDA if there is a GPU.
        out: output folder; by default runs/<time>.
    """

    repeats: int = 15
    threads: int = 1
    device: Device = "auto"
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class GnnBench(OpsBench):
    """Options of `gnn`.

    Attributes:
        repeats: timed epochs of every contender.
        model: sage or gat.
        data: graph file, name of a data set, or sbm:NODES,CLASSES for a random graph.
        features: how features are scaled.
        width: channels between the two layers.
        heads: heads of the first layer of gat.
        dropout: dropout rate between the layers.
    """

    repeats: int = 9
    model: Literal["sage", "gat"] = "sage"
    data: str = "sbm:20000,20"
    features: Features = "tfidf"
    width: int = 128
    heads: int = 8
    dropout: float = 0.5


@dataclass(frozen=True, kw_only=True)
class VigStudyBench(OpsBench):
    """Options of `vig-study`.

    Attributes:
        repeats: timed steps of every contender.
        batch_sizes: B,B,... images of a mini-batch.
        most_reference: largest batch on which formulations other than fused are run.
        compared: number of images on which results and gradients are compared.
    """

    repeats: int = 3
    batch_sizes: str = "100,1000"
    most_reference: int = 100
    compared: int = 20


@dataclass(frozen=True, kw_only=True)
class VigBench(OpsBench):
    """Options of `vig`.

    Attributes:
        repeats: turns of a way to run a model.
        threads: threads of a process.
        models: names of models, in a comma list.
        modes: training, inference or both, in a comma list.
        dtypes: float32, bfloat16 (autocast) or both, in a comma list.
        batch_size: images of a step.
        compiled: also run everything through torch.compile, in each of its modes that fits.
    """

    repeats: int = 15
    threads: int = 2
    models: str = "vig_ti_224"
    modes: str = "training,inference"
    dtypes: str = "float32,bfloat16"
    batch_size: int = 8
    compiled: bool = True


@dataclass(frozen=True, kw_only=True)
class SoakBench:
    """Options of `soak`: a long run, and what happens to it.

    Attributes:
        model: the model.
        data: data set, as for train.
        stages: ranks of one pipeline.
        dp: data-parallel replicas.
        microbatches: micro-batches each replica cuts its share of a batch into.
        batch_size: B, samples of one optimizer step over all replicas.
        steps: optimizer steps.
        checkpoint_every: steps between checkpoints.
        faults_every: about how many steps lie between faults; 0 makes only the run that is left
            alone.
        timeout: seconds after which a rank that waits for a silent peer gives up.
        unbroken: folder of the run that is left alone; it is run if the folder does not exist.
        seed: seed of the random choice of faults.
        out: output folder; by default runs/<time>.
    """

    model: VigModel = "vig_digits"
    data: str = "digits"
    stages: int = 2
    dp: int = 2
    microbatches: int = 2
    batch_size: int = 360
    steps: int = 2000
    checkpoint_every: int = 50
    faults_every: int = 100
    timeout: float = 3.0
    unbroken: Path | None = None
    seed: int = 0
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class FeedBench(OpsBench):
    """Options of `feed`.

    Attributes:
        repeats: timed rounds of every contender.
        threads: threads of this process; each worker has one.
        pictures: folder of images, train/<class>/<image>, to read; if it does not exist, it is made
            from scikit-learn's photographs.
        images: number of images that every contender reads, in all rounds together.
        batch_size: images of a batch.
        workers: processes that read ahead, for each contender.
        model: the model whose steps hide the reading; by default vig_ti_224 on a GPU and
            vig_cifar_ti on a CPU.
    """

    repeats: int = 9
    pictures: Path = Path("runs/photographs")
    images: int = 5000
    batch_size: int = 50
    workers: int = 1
    model: VigModel | None = None


@dataclass(frozen=True, kw_only=True)
class AccuracyBench:
    """Options of `accuracy`.

    Attributes:
        run: folder of a finished run of train.
        out: folder to write README.md, curve.png and rows.csv to; by default runs/<time>.
    """

    run: Path
    out: Path | None = None

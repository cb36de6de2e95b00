"""Options of the commands that do not train a model; does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vigpipe.config.choices import Device, Dtype, Features, ImageModel, Model, Partition
from vigpipe.config.options import TrainConfig
from vigpipe.schedules import Schedule

Format = Literal["text", "json", "csv"]
Split = Literal["all", "train", "validation", "test"]

PICTURES = (".png", ".pdf", ".svg")  # endings of the pictures of graph and explain
MADE_BY_GRAPH = "vigpipe graph"  # the mark of its pictures
MADE_BY_EXPLAIN = "vigpipe explain"
MADE_BY_EVALUATE = '<meta name="generator" content="vigpipe evaluate">'  # and of its pages


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Options of `vigpipe graph`.

    Attributes:
        image: image file to draw the graph on.
        model: the model; needed only if the weights file does not name it.
        weights: safetensors or torch file of weights; by default the weights are random.
        node: X,Y, the column and row of a pixel in the drawn image; the patch that contains it is
            the node whose neighbours are drawn. By default the centre of the image.
        block: I,J,... indices of the blocks to draw; by default the first, the middle and the last.
        graph: graph policy of every block, or a comma-separated list that is repeated over the
            blocks; by default the model's own.
        image_size: SIDE or HEIGHTxWIDTH in pixels that the image is resized and cropped to; by
            default the model's own.
        out: picture file to write, ending in .png, .pdf or .svg.
    """

    image: Path
    model: ImageModel | None = None
    weights: Path | None = None
    node: str | None = None
    block: str | None = None
    graph: str | None = None
    image_size: str | None = None
    out: Path = Path("graph.png")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Options of `vigpipe dataset prepare`.

    Attributes:
        data_dir: folder of the data sets that have a name.
        download: fetch the data set if it is not in the data folder.
        features: how the features are scaled: raw leaves them as they are; row divides each node's
            by their sum; tfidf gives rare ones more weight.
        symmetric: use every edge in both directions.
        multi_label: read the zeros and ones of a graph file as several classes a node, even if each
            node has one.
        partition: how the graph is cut into parts: metis cuts few edges; metis-train does so, too,
            and gives each part its share of the training nodes; random draws each node's part;
            spectral and walks look for clusters.
        parts: number of parts.
        seed: seed of the partition, and of a random graph.
    """

    data_dir: Path = Path("data")
    download: bool = False
    features: Features | None = None
    symmetric: bool | None = None
    multi_label: bool = False
    partition: Partition = "metis"
    parts: int = 40
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Options of `vigpipe dataset import`.

    Attributes:
        nodes: table with a row for each node: .csv, .tsv, these compressed (.gz), or .parquet.
        edges: table with a row for each edge, or a scipy sparse matrix (.npz), whose rows are the
            sources.
        features: the features of the nodes, in their order, instead of columns of --nodes: an array
            of NumPy (.npy), or a scipy sparse matrix (.npz).
        data: a whole graph instead of tables: torch-geometric's Data, saved with torch.save (.pt),
            a graph file (.npz), or a folder laid out as those of the Open Graph Benchmark or of
            GraphSAINT.
        like: weights (.safetensors) or a graph file (.npz), whose choices for the columns of nodes
            are made again; by default they are made for these nodes.
        id: the column of nodes that edges name them by.
        label: the column of nodes with their class; or several, with commas between them, of 1 and
            0 and empty cells, if a node may have several classes.
        split: the column of nodes that says train, validation, test or nothing.
        source: the column of edges with the node that each comes from.
        target: the column of edges with the node that each goes to.
        weight: the column of edges with their weights.
        numbers: columns of nodes that are read as numbers, with commas between them; by default,
            those with numbers only.
        categories: columns of nodes that are read as categories; by default, those with other
            texts.
        drop: columns of nodes that are left out.
        test: share of the nodes with a class that is drawn for the test, where there is no split.
        validation: share of the others that is drawn for the validation.
        stratified: draw these shares of every class.
        seed: seed of the draw.
    """

    nodes: Path | None = None
    edges: Path | None = None
    features: Path | None = None
    data: Path | None = None
    like: Path | None = None
    id: str = "id"
    label: str = "label"
    split: str = "split"
    source: str = "source"
    target: str = "target"
    weight: str = "weight"
    numbers: str | None = None
    categories: str | None = None
    drop: str | None = None
    test: float = 0.0
    validation: float = 0.0
    stratified: bool = True
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Options of the commands that use trained weights, on ranks as in training.

    Attributes:
        weights: safetensors or torch file of weights.
        model: the model; needed only if the weights file does not name it.
        data_dir: folder of the data sets that have a name.
        download: fetch the data set if it is not in the data folder.
        seed: seed of a random graph.
        image_size: SIDE or HEIGHTxWIDTH in pixels that images are resized and cropped to; by
            default the size the model was trained with.
        skip_bad_images: leave out images that cannot be read, and report how many and which.
        batch_size: number of images that run at once, over all replicas.
        stages: number of ranks in one pipeline, or a plan: a file, or the name of one of vigpipe's.
        microbatches: micro-batches into which each replica cuts its share of a batch.
        dp: number of data-parallel replicas.
        schedule: order of the forwards.
        virtual_stages: stages per rank, for interleaved1f1b and loopedbfs.
        device: where to run; auto uses CUDA if every rank has a GPU of its own, and CPUs otherwise.
        dtype: type of weights and features; bfloat16 and float16 keep float32 weights and compute
            matrix products in that type.
        tf32: let GPUs round the factors of float32 matrix products and convolutions to 10 bits,
            which is faster.
        threads: threads per rank; by default OMP_NUM_THREADS, else the host's cores divided by its
            ranks.
        timeout: seconds after which a rank stops waiting for a silent peer.
        ports: TCP ports, FIRST-LAST, at which ranks listen for those of other hosts, besides the
            one where they meet: for firewalls between the hosts. By default any port.
    """

    weights: Path
    model: ImageModel | None = None
    data_dir: Path = Path("data")
    download: bool = False
    seed: int = 0
    image_size: str | None = None
    skip_bad_images: bool = False
    batch_size: int = 32
    stages: int | Path = 1
    microbatches: int = 1
    dp: int = 1
    schedule: Schedule = "gpipe"
    virtual_stages: int = 1
    device: Device = "auto"
    dtype: Dtype = "float32"
    tf32: bool = False
    threads: int | None = None
    timeout: float = 300.0
    ports: str | None = None


@dataclass(frozen=True, kw_only=True)
class PredictConfig(InferenceConfig):
    """Options of `vigpipe predict`.

    Attributes:
        data: the graph whose nodes are predicted, if the weights are of a graph model: a graph file
            (.npz), a prepared folder, the name of a data set, or sbm:NODES,CLASSES.
        split: which nodes of the graph are told: those of a split, or all.
        nodes: the nodes that are told, and computed: their names or numbers, with commas between
            them, or a .txt file with one a line.
        format: output format: text, json with one object per line, or csv.
        logits: .npz file to write the logits of all classes to, with what they are of.
        embeddings: .npz file to write the features to that the last layers classify: of an image
            the pooled features of its nodes, of a node what the last layer takes.
    """

    data: str | None = None
    split: Split = "all"
    nodes: str | None = None
    format: Format = "text"
    logits: Path | None = None
    embeddings: Path | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(InferenceConfig):
    """Options of `vigpipe evaluate`.

    Attributes:
        data: labelled images, in any format that train takes, or a folder with a folder of images
            for each class; or the graph, as predict takes it, if the weights are of a graph model.
        split: what is scored: train, validation or test images, as far as the data have them; of
            nodes also all.
        test: share of the images of each class that the training held out by its --test and --seed;
            by default, all images of data without test images are scored.
        seed: seed of a random graph, or of the images of --test.
        format: output format: text; json, one object; or csv, a row for each class.
        page: .html file to write the result to as well, with the worst mistakes.
    """

    data: str
    split: Split = "test"
    test: float = 0.0
    format: Format = "text"
    page: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ExplainConfig:
    """Options of `vigpipe explain`.

    Attributes:
        weights: safetensors or torch file of weights.
        model: the model; needed only if the weights file does not name it.
        image: image file whose prediction is explained.
        image_size: SIDE or HEIGHTxWIDTH in pixels that the image is resized and cropped to; by
            default the size the model was trained with.
        data: the graph with the node whose prediction is explained, if the weights are of a graph
            model: a graph file (.npz), a prepared folder, the name of a data set, or
            sbm:NODES,CLASSES.
        data_dir: folder of the data sets that have a name.
        download: fetch the data set if it is not in the data folder.
        seed: seed of a random graph.
        node: the node of the graph: its name, or its number.
        target: the class whose logit is explained: its name, or its label; by default the
            likeliest.
        most: edges of each block, and nodes of a graph, that are left out one at a time: those with
            the largest gradient × input.
        block: I,J,... indices of the blocks, or layers, whose edges are drawn; by default the
            first, the middle and the last.
        out: picture file to write, ending in .png, .pdf or .svg.
        arrays: .npz file to write all numbers to.
    """

    weights: Path
    model: Model | None = None
    image: Path | None = None
    image_size: str | None = None
    data: str | None = None
    data_dir: Path = Path("data")
    download: bool = False
    seed: int = 0
    node: str | None = None
    target: str | None = None
    most: int = 32
    block: str | None = None
    out: Path = Path("explain.png")
    arrays: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PlanConfig(TrainConfig):
    """Options of `vigpipe plan`: those of train, and those that describe the cluster to plan for.

    Attributes:
        ranks: ranks that train on one graph: predict all ways to use so many, with and without
            shards, stages and replicas, and say which to take.
        stages: number of ranks in one pipeline.
        microbatches: micro-batches of each replica; auto tries all sensible numbers, and with
            --ranks is one.
        schedule: order of forwards and backwards; auto tries all schedules.
        memory_limit: memory that one rank may use at most, such as 16GB.
        bandwidth: bandwidth between neighbouring ranks, such as 10Gb/s; by default it is measured
            on this host.
        latency: latency of a message between neighbouring ranks, such as 20us; by default it is
            measured on this host.
        ranks_per_host: number of ranks on each host, in rank order; by default all ranks are on one
            host.
        profile: file with the measured costs of the blocks, or with --ranks of the ways, written by
            an earlier call; by default they are measured now.
        explain: say which stage limits the step and which change would help most.
        out: plan file to write; by default stages/<model>-<stages>.toml. With --ranks the .json
            file of the measured costs; by default stages/<model>-<ranks>.json.
    """

    model: Model = "vig_ti_224"
    data: str = "fake"
    ranks: int | None = None
    stages: int = 2
    microbatches: int | Literal["auto"] = "auto"  # pyrefly: ignore[bad-override]
    schedule: Literal[Schedule, "auto"] = "auto"  # pyrefly: ignore[bad-override]
    memory_limit: str | None = None
    bandwidth: str | None = None
    latency: str | None = None
    ranks_per_host: int | None = None
    profile: Path | None = None
    explain: bool = False


@dataclass(frozen=True, kw_only=True)
class TimeConfig(TrainConfig):
    """Options of `vigpipe time`: those of train; every second step after the warm-up is timed.

    Attributes:
        steps: number of optimizer steps, including the warm-up; after that, partial batches are
            taken in addition.
        test_batches: number of batches to evaluate, including the warm-up.
    """

    steps: int | None = 23
    test_batches: int = 8
    timing: bool = True
    trace: bool = True


@dataclass(frozen=True, kw_only=True)
class SelftestConfig:
    """Options of `vigpipe selftest`.

    Attributes:
        out: folder to write page.html and result.json to; by default runs/<time>.
        budget: time that all of it may take (s, m, h); what no longer fits is skipped.
        parts: parts to run, in a comma list.
        device: what to test; auto takes the GPUs if there are any.
    """

    out: Path | None = None
    budget: str = "10m"
    parts: str = "operators,check,links,faults,profile,speed"
    device: Device = "auto"

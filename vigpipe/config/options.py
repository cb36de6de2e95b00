"""The options of a training run: their meanings, defaults and limits."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vigpipe.config import choices
from vigpipe.config.auto_augment import check_auto_augment
from vigpipe.config.compress import parse_compress
from vigpipe.config.declare import When, facts_of, option
from vigpipe.config.halo import parse_halo
from vigpipe.config.interval import parse_interval
from vigpipe.config.prepared import OF_FOLDER, is_prepared
from vigpipe.config.recipes import MODEL_DEFAULTS, NO_RECIPE, RECIPES
from vigpipe.errors import InputError
from vigpipe.schedules import Schedule

SMALL_IMAGE = 32  # pixels; test images up to this side are not cropped: every pixel counts
_LARGEST_SIDE = 1 << 14
PLACES = ("data", "resume", "class_weights")  # options that are text, and may name a file or folder
MOST_EMA = 0.999999  # with 1 the average would be the random weights of the first step for ever
_AUGMENTATION = ("random_crop", "auto_augment", "color_jitter", "erasing")

_GROUPS = ("Model", "Data", "Training", "Layout", "Replicas", "Checkpoints", "Timing")
_model, _data, _training, _layout, _replicas, _checkpoints, _timing = (
    partial(option, group) for group in _GROUPS
)


def _sampled(*samplers: choices.Sampler, **facts: Any) -> Any:
    """Declare an option that counts with some samplers, and is left open by default."""
    return _data(None, job="graph", when=(When("sampler", samplers),), **facts)


_SHARED = When("shards", range(2, 1 << 20), "where ranks share a graph", named="2 or more")
_MIXED = When("split", ("mixed",), "where ranks share the channels of all nodes")
_BY_COLUMNS = (_SHARED, _MIXED)
_HALO = When("split", ("halo",), "where each rank has a part of a graph")
_SUMMED = When("strategy", ("synchronous",), "where all replicas take every step together")
_OWN_STEPS = When(
    "strategy", ("periodic", "gossip", "server"), "where replicas take steps of their own"
)
_AVERAGED = When("strategy", ("periodic", "gossip"), "where replicas that differ are averaged")
_MEET = When(
    "strategy",
    ("periodic", "gossip", "subnetworks"),
    "where replicas take steps of their own and meet now and then",
)
_TOGETHER = When("strategy", ("periodic",), "where all replicas are averaged at once")
_IN_PAIRS = When("strategy", ("gossip",), "where replicas meet in pairs")
_SERVED = When("strategy", ("server",), "where gradients come late")
_DIVIDED = When("strategy", ("subnetworks",), "where each replica has some of the channels")
_OUTER = When("average", ("outer",), "which has an optimizer of its own")
_WEIGHTS = When("average", ("weights", "outer"), "which travel while each replica goes on")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of a training run.

    An option left at `None` takes the value of the recipe or, if the recipe sets none, the model's.
    One that counts only where others say something, as those of a sampler do, has a default there.

    Attributes:
        model: the model to train; with weights of a run, that of the file.
        weights: file of initial weights, from a vigpipe run or from the reference code. What the
            file of a run says of its model, the run follows.
        new_classifier: load all initial weights except the last layer's, to train on other classes.
        graph: how the blocks find neighbours: knn, grid, window, pattern, reuse or lookahead, or a
            comma-separated list of these, which is repeated over the blocks; by default knn.
        aggregator: how a node combines its neighbours: max, edge, sage, gin or maxmean, or a
            comma-separated list of these, which is repeated over the blocks. Of graph models, sage
            has mean, the default, max and pool, and gat has v1, the default, and v2.
        stochastic_dilation: probability that, in training, a block draws a sample's k neighbours at
            random from its k times dilation nearest.
        stem_stride: side, in pixels, of the patch that becomes a node; by default the model's own.
        norm: normalisation layer; with layer and group, the result does not depend on how a batch
            is cut into micro-batches.
        drop_path: drop-path rate of the last block; the rate rises linearly from 0 in the first.
        dropout: dropout rate in the readout; of graph models, before or between their layers.
        compat: reference keeps the quirks of the published code, for weights trained with it.
        dist_head: give a model without kNN its second head, which learns from a teacher; without
            one it gets the loss of the labels, too. By default on.
        impl: fused uses the fused operators where they exist (vigpipe doctor lists them), plain
            uses plain torch everywhere; both take the same weights and give the same numbers up to
            rounding.
        compile: run every block through torch.compile; this pays off on GPUs, where it fuses what
            vigpipe has no operator for, and not on CPUs. Later runs find what has been compiled.
        cuda_graph: record the forwards and backwards of a step as one CUDA graph, which starts all
            their kernels at once; for one stage on a GPU. By default on where one rank trains on
            images on a GPU in float32 or bfloat16, neither compiled nor timed.
        layers: number of layers of a graph model.
        width: channels between two layers of a graph model.
        heads: attention heads of gat, which share the width; by default 8.
        dtype: type of weights and features; bfloat16 and float16 keep float32 weights and compute
            matrix products in that type. With float16, for GPUs without bfloat16, the loss is
            scaled, and a step whose gradients overflow is skipped.
        tf32: let GPUs round the factors of float32 matrix products and convolutions to 10 bits,
            which is faster.
        data: digits, cifar10, fake, or a folder with train/<class>/<image> and
            test/<class>/<image>, perhaps val/<class>/<image>, or only <class>/<image>; a .csv file
            of images and classes; or tar files, MNIST's files, a .npz file, or a folder of Hugging
            Face's save_to_disk or of parquet files. For graph models: a graph file (.npz), a folder
            of `vigpipe dataset prepare`, the name of a data set, such as Cora or Reddit, or
            sbm:NODES,CLASSES for a random graph.
        data_dir: folder of the CIFAR-10 files, or of the data sets of graphs that have a name.
        download: fetch CIFAR-10, or the data set, if it is not in the data folder.
        image_size: side in pixels of the square that images are resized to, or HEIGHTxWIDTH; none
            leaves them as they are, if all have one size.
        crop_pct: fraction of the side of a resized test image that is kept.
        augment: crop and mirror training images at random.
        random_crop: how training images are cropped: box takes a box of random size, shift moves
            the image by up to an eighth of its side.
        auto_augment: name of a random augmentation of timm, such as rand-m9-mstd0.5-inc1; none
            turns it off.
        color_jitter: largest random change of brightness, contrast and saturation; it has no effect
            together with auto_augment.
        erasing: probability that a box of a training image is replaced by noise.
        mixup: alpha of mixup; 0 turns it off.
        cutmix: alpha of CutMix; 0 turns it off.
        smoothing: label smoothing: probability that is spread evenly over all classes.
        repeated_augment: number of times an image appears in a batch, each time augmented anew; 1
            turns it off.
        workers: processes per rank that read and augment images ahead of time; with 0 the rank
            reads them itself.
        skip_bad_images: leave out images that cannot be read, and report how many and which.
        validation: share of the training images of each class, such as 0.1, that the seed draws,
            and that is held out of training and scored in every evaluation, to choose weights by.
        test: share of the images of each class, such as 0.2, that the seed draws, and that is held
            out as test images, of data without any of their own.
        exif: turn images as the EXIF of their files says.
        features: how the features of a graph's nodes are scaled: raw leaves them as they are; row
            divides each node's by their sum; tfidf gives rare ones more weight.
        symmetric: use every edge of a graph in both directions.
        multi_label: read the zeros and ones of a graph file as several classes a node, even if each
            node has one.
        sampler: what sub-graph of a graph a micro-batch is: full is the graph itself; parts takes
            the parts of --partition; saint-node, saint-edge and saint-walk draw nodes (GraphSAINT);
            fastgcn and neighbour take some training nodes, and sample edges for every layer
            (FastGCN, GraphSAGE).
        partition: how a graph is cut into parts: metis cuts few edges; metis-train does so, too,
            and gives each part its share of the training nodes; random draws each node's part;
            spectral and walks look for clusters.
        parts: number of parts.
        repartition_every: epochs after which a graph is cut anew: random parts are drawn again, and
            others are balanced by the time that nodes and edges have taken; by default never.
        merge: number of parts that are joined in a micro-batch, with the edges between them
            (Cluster-GCN).
        sample_nodes: with saint-node, nodes that a sub-graph draws, with replacement.
        sample_edges: with saint-edge, edges that a sub-graph draws the ends of.
        roots: with saint-walk, random walks of a sub-graph.
        walk_length: with saint-walk, steps of a walk.
        coverage: with saint-node, saint-edge and saint-walk, how often each node is drawn before
            the training, on average, to know how often it comes.
        batch_nodes: with fastgcn and neighbour, training nodes of a micro-batch.
        layer_nodes: with fastgcn, nodes that are drawn for each layer.
        fanout: with neighbour, how many neighbours of a node are taken, at most, or -1 for all: one
            number for all layers, or numbers from the last layer back to the first, such as 25,10.
        config: TOML file of options, such as the one that every run writes; flags override it.
        out: output folder; by default runs/<time>.
        recipe: complete training recipe with augmentation and learning-rate schedule: imagenet is
            the published one, cifar is meant for small images, finetune for --weights.
        epochs: passes over the training images.
        steps: number of optimizer steps; it overrides epochs.
        batch_size: B, samples of one optimizer step over all replicas.
        opt: optimizer; sgd has a momentum of 0.9, Nesterov's.
        lr: learning rate.
        weight_decay: weight decay; it is not applied to biases, norms and positional tables.
        decay: which layers of a graph model decay: all, or the first, as published for gcn.
        layer_decay: factor by which the learning rate falls from each layer to the one before it;
            every layer warms up to its own rate.
        lr_schedule: course of the learning rate after the warm-up.
        min_lr: learning rate at the end of the cosine schedule.
        warmup_epochs: epochs of linear warm-up.
        warmup_lr: learning rate at the start of the warm-up.
        freeze: pieces of the model that are not trained, such as stem,0-7,readout: the stem, blocks
            by their numbers, and the readout. Their norms keep their running statistics.
        class_weights: weights of the classes in the training loss: balanced gives every class the
            same, however many samples it has; or a .csv file with a class and its weight a line.
            They are scaled to a mean of 1 over the training samples. Where a node may have several
            classes, they are the weights of the nodes that have a class, against 1 of those that
            lack it: balanced makes both weigh the same together.
        clip: largest allowed norm of the gradient over all stages; longer gradients are scaled
            down.
        ema: decay per step of the moving average of the weights, which is evaluated too; 0 turns it
            off.
        seed: seed of the weights, the order of the data, the random masks, and the images of
            --validation and --test.
        evaluate_every: epochs between evaluations; the last epoch always ends with one.
        log_every: how often to print a line of progress: a number of steps (50), a time (30s) or
            never; by default 30s where the output is no terminal, which shows a bar.
        track: also give the rows of metrics.jsonl to TensorBoard, Weights & Biases or MLflow, whose
            package must be installed, or write them as metrics.csv.
        on_nan: what to do at a step whose loss or gradients are NaN or infinite: stop, or skip the
            step.
        detect_anomaly: stop at the first block whose features are NaN or infinite.
        stages: number of ranks in one pipeline, or a plan: a file, or the name of one of vigpipe's
            such as vig-ti-2; or auto, which uses all the ranks there are, or all that this host has
            room for, and cuts the model by measured cost.
        microbatches: micro-batches into which each replica cuts its share of a batch.
        schedule: order of forwards and backwards.
        virtual_stages: stages per rank, for interleaved1f1b and loopedbfs.
        boundary: precision of what one stage sends to the next: full is that of the weights;
            bfloat16 halves the traffic, but then the result depends on the number of stages.
        recompute: which micro-batches discard their features after the forward and compute them
            again in the backward, to save memory.
        shards: number of ranks that share each sub-graph, or each image, of a replica, where its
            features do not fit one rank: dp times as many ranks are started. Only with one stage,
            and with images only for a ViG.
        split: how they share a sub-graph: mixed, the default, where each has the features of some
            nodes, and while neighbours are summed some channels of all nodes (MixGCN); or halo,
            where each has a part that METIS cuts, and gets the features of its nodes' neighbours in
            others.
        adjacency: with mixed, the edges that a rank keeps: whole, all of them; or split, those of
            its own nodes, which then travel round the ranks whenever neighbours are summed.
        chunks: with mixed, the number of chunks of nodes in which features leave for other ranks
            while more are summed, where ranks send; those of one machine's CPUs write into each
            other's memory instead. The result does not depend on it.
        halo: with halo, which features of neighbours in other parts a rank gets: exact, the
            default, those of the same step; stale, those of the step before, which travel meanwhile
            (PipeGCN); or sampled:P, each with probability P, counted 1 / P times (BNS-GCN).
        device: where to run; auto uses CUDA if every rank has a GPU of its own, and CPUs otherwise.
        threads: threads per rank; by default OMP_NUM_THREADS, else the host's cores divided by its
            ranks.
        sparse_threads: threads of each rank, besides its own, that sum what the edges of a graph
            bring, while its own multiply: chunks of nodes go from one to the other (MixGCN). With
            gcn, gin, and the mean of sage; also beside a GPU, which then multiplies only. 0, the
            default, for none.
        timeout: seconds after which a rank stops waiting for a silent peer; by default 60, and 600
            where one rank works while others wait (check, plan, time, or with --compile), or start
            late.
        ports: TCP ports, FIRST-LAST, at which ranks listen for those of other hosts, besides the
            one where they meet: for firewalls between the hosts. By default any port.
        dp: number of data-parallel replicas.
        strategy: how the replicas agree: synchronous adds their gradients up in every step;
            periodic lets them take steps of their own, and averages all of them now and then;
            gossip averages two at a time; server is a parameter server of as many ranks as there
            are stages, started besides, and applies each replica's gradients as they come;
            subnetworks lets each replica train some of the channels of a wide model, others in each
            round, on all the data (GIST).
        sync: how gradients are added up over the replicas: after the pipeline has drained, in twice
            their precision (double) or in their own (drain), or by DDP during the last backward
            (ddp); by default double on CPUs, and on GPUs ddp with one stage and drain with several.
        elastic: use as many replicas as there are ranks for, and another number of stages if the
            ranks are not a multiple of --stages; the micro-batches of each replica change so that
            the batch is cut as before.
        average_every: steps between two averages, or of a round with subnetworks.
        average: what is averaged: gradients; or weights; or outer, where the mean of the weights
            drives an optimizer of its own (DiLoCo).
        outer_lr: learning rate of that optimizer, SGD with Nesterov momentum.
        outer_momentum: its momentum; 0.9 is for thousands of averages.
        overlap: with periodic, own steps after which a replica applies an average, which travels
            meanwhile; with 0 it waits.
        pairs: with gossip, whom a replica may draw as its partner: any that has none; or sets,
            where even replicas draw odd ones.
        answer: with gossip, when a replica comes that was drawn: after its next item, or when its
            own interval is over, as published.
        gossip_between: with gossip, what the pairs are made of: replicas; or hosts, where all
            replicas of a host take every step together, with the sum of their gradients.
        staleness: with server, by how many items a replica may be ahead of the slowest before it
            waits; with none it never does.
        carry_moments: with subnetworks, store and exchange what the optimizer keeps of each weight
            as the weights are, instead of a new optimizer in each round.
        partition_input: with subnetworks of a graph, divide the features of the nodes too; each
            replica sees its own ones only.
        divided: with subnetworks of images, which widths are divided: inner, the default, those
            inside Grapher and FFN; or tied, those of the trunk between them too, with one draw for
            all blocks that an addition ties together.
        branch_rescale: with subnetworks of images, multiply each residual branch of a sub-network
            by their number, so that their branches add up to one of the same size.
        compress: how gradients and outer differences are compressed before they travel between
            replicas: bfloat16; top-k:RATIO, that share of the numbers of each tensor, the largest;
            or powersgd:RANK, matrices of that rank. What is left out is added the next time. With
            bfloat16 also weights.
        items: which replica computes which share of a step: fixed, or drawn from a pool when it is
            free; or, for a graph, own, where each replica has parts that no other one takes
            (federated averaging).
        final: which weights are kept at the end, when the replicas differ: their mean, or the best,
            which the images of --validation choose.
        replay: folder of an earlier run with these options, whose replicas are to take the same
            items in the same order, and to be averaged at the same points, or whose parts of a
            graph were balanced by time: the weights are then the same, bit for bit, with any number
            of stages.
        checkpoint_every: how often to save a checkpoint: a number of steps (50), a time (10m, 2h)
            or never; the last step always saves one, and so does a run that is asked to stop by
            Ctrl-C, SIGTERM or SIGUSR1.
        keep: number of checkpoints to keep; the oldest is deleted once a newer one is complete.
        keep_best: also keep the checkpoint whose evaluation has the highest top1 or the lowest
            loss, of the moving average where there is one; the validation images choose it, or the
            test images without --validation. For a graph: the highest accuracy, micro_f1 or
            macro_f1, or the lowest loss.
        resume: checkpoint to continue from, or a run's folder, whose newest complete checkpoint is
            taken; auto looks in --out, and starts anew if no run is there. A finished run goes on
            if --epochs or --steps is larger now.
        max_restarts: how often ranks that vigpipe started on this host are restarted automatically,
            from the newest checkpoint, after one of them has died.
        stop_before: save and stop this long before Slurm's time limit (5m), or at a given time
            (2026-11-22T06:00); the exit code is then 75.
        timing: time the steps, the stages and the regions inside blocks, and account for the
            pipeline bubble.
        timing_warmup: number of first steps, and of first test batches, that are not timed.
        timing_steps: number of steps with full batches, and of full test batches, that are timed
            after the warm-up; partial ones between them are timed apart.
        trace: also write a trace of the last timed steps for Perfetto, and draw a timeline.
    """

    model: choices.Model = _model("vig_digits", short=True)
    weights: Path | None = _model(None, short=True, differs="always")
    new_classifier: bool = _model(False, differs="always")
    graph: str | None = _model(None, job="images", in_weights=True)
    aggregator: str | None = _model(None, in_weights=True)
    stochastic_dilation: float = _model(0.0, bounds=(0, 1), job="images")
    stem_stride: int | None = _model(None, bounds=(1, 1 << 10), job="images", in_weights=True)
    norm: choices.Norm | choices.GraphNorm | None = _model(None, in_weights=True)
    drop_path: float | None = _model(None, bounds=(0, 0.99), job="images")
    dropout: float = _model(0.0, short=True, bounds=(0, 0.99))
    compat: choices.Compat | None = _model(None, job="images", in_weights=True)
    dist_head: bool | None = _model(None, job="images", in_weights=True)
    impl: choices.Impl = _model("fused", differs="resumed")
    compile: bool = _model(False, job="images", differs="resumed")
    cuda_graph: bool | None = _model(None, job="images", differs="resumed")
    layers: int | None = _model(None, short=True, bounds=(1, 1 << 12), job="graph", in_weights=True)
    width: int | None = _model(None, short=True, bounds=(1, 1 << 20), job="graph", in_weights=True)
    heads: int | None = _model(None, bounds=(1, 1 << 12), job="graph", in_weights=True)
    dtype: choices.Dtype = _model("float32")
    tf32: bool = _model(False, differs="resumed")
    data: str = _data("digits", short=True, differs="always")
    data_dir: Path = _data(Path("data"), differs="always")
    download: bool = _data(False, differs="always")
    image_size: int | str | None = _data(None, short=True, job="images")
    crop_pct: float | None = _data(None, bounds=(0.1, 1), job="images")
    augment: bool | None = _data(None, job="images")
    random_crop: choices.RandomCrop | None = _data(None, job="images")
    auto_augment: str | None = _data(None, job="images")
    color_jitter: float | None = _data(None, bounds=(0, 1), job="images")
    erasing: float | None = _data(None, bounds=(0, 1), job="images")
    mixup: float | None = _data(None, bounds=(0, 100), job="images")
    cutmix: float | None = _data(None, bounds=(0, 100), job="images")
    smoothing: float | None = _data(None, bounds=(0, 0.99), job="images")
    repeated_augment: int | None = _data(None, bounds=(1, 64), job="images")
    workers: int = _data(0, short=True, bounds=(0, 256), job="images", differs="always")
    skip_bad_images: bool = _data(False, job="images", differs="always")
    validation: float = _data(0.0, short=True, job="images")
    test: float = _data(0.0, short=True, job="images")
    exif: bool | None = _data(None, job="images", in_weights=True)
    features: choices.Features | None = _data(None, job="graph", in_weights=True)
    symmetric: bool | None = _data(None, job="graph", in_weights=True)
    multi_label: bool = _data(False, job="graph", differs="always")
    sampler: choices.Sampler | None = _data(None, short=True, job="graph")
    partition: choices.Partition | None = _sampled("parts", short=True, filled="metis")
    parts: int | None = _sampled("parts", short=True, bounds=(1, 1 << 30), filled=40)
    repartition_every: int | None = _sampled("parts", bounds=(1, 1 << 30))
    merge: int | None = _sampled("parts", bounds=(1, 1 << 30), filled=1)
    # The sizes of saint-node, saint-edge and saint-walk are those of GraphSAINT on Reddit
    # (arXiv:1907.04931).
    sample_nodes: int | None = _sampled("saint-node", bounds=(1, 1 << 30), filled=8000)
    sample_edges: int | None = _sampled("saint-edge", bounds=(1, 1 << 30), filled=6000)
    roots: int | None = _sampled("saint-walk", bounds=(1, 1 << 30), filled=2000)
    walk_length: int | None = _sampled("saint-walk", bounds=(1, 1 << 10), filled=4)
    coverage: int | None = _sampled(
        "saint-node", "saint-edge", "saint-walk", bounds=(1, 1 << 20), filled=50
    )
    batch_nodes: int | None = _sampled(
        "fastgcn", "neighbour", bounds=(1, 1 << 30), filled={"fastgcn": 256, "neighbour": 1024}
    )
    layer_nodes: int | None = _sampled("fastgcn", bounds=(1, 1 << 30), filled=400)
    fanout: str | None = _sampled("neighbour", filled="10")
    config: Path | None = _training(None, short=True, differs="always")
    out: Path | None = _training(None, short=True, differs="always")
    recipe: choices.Recipe | None = _training(None, short=True, job="images")
    epochs: int | None = _training(None, short=True, bounds=(1, 1e6), differs="resumed")
    steps: int | None = _training(None, bounds=(1, 1e9), differs="resumed")
    batch_size: int | None = _training(None, short=True, bounds=(1, 1 << 24), job="images")
    opt: choices.Optimizer | None = _training(None)
    lr: float | None = _training(None, short=True, bounds=(0, 1e6))
    weight_decay: float | None = _training(None, bounds=(0, 1e6))
    decay: choices.Decay | None = _training(None, job="graph")
    layer_decay: float | None = _training(None, bounds=(1e-3, 1))
    lr_schedule: choices.LrSchedule | None = _training(None)
    min_lr: float | None = _training(None, bounds=(0, 1e6))
    warmup_epochs: int | None = _training(None, bounds=(0, 1e6))
    warmup_lr: float = _training(1e-6, bounds=(0, 1e6))
    freeze: str | None = _training(None)
    class_weights: str | None = _training(None)
    clip: float | None = _training(None, bounds=(1e-12, 1e12))
    ema: float | None = _training(None, bounds=(0, MOST_EMA))
    seed: int = _training(0, bounds=(0, (1 << 63) - 1))
    evaluate_every: int = _training(1, bounds=(1, 1e6), differs="always")
    log_every: int | str | None = _training(None, differs="always")
    track: choices.Track | None = _training(None, short=True, differs="always")
    on_nan: choices.OnNan = _training("stop", differs="always")
    detect_anomaly: bool = _training(False, differs="always")
    stages: int | Literal["auto"] | Path = _layout(1, short=True, differs="always")
    microbatches: int = _layout(1, short=True, differs="resumed")
    schedule: Schedule = _layout("gpipe", short=True, differs="always")
    virtual_stages: int = _layout(1, differs="always")
    boundary: choices.Boundary = _layout("full", differs="resumed")
    recompute: choices.Recompute = _layout("never", differs="resumed")
    shards: int = _layout(1, bounds=(1, 1 << 16), differs="resumed")
    split: choices.Split | None = _layout(None, job="graph", differs="resumed")
    adjacency: choices.Edging = _layout("whole", job="graph", differs="resumed", when=_BY_COLUMNS)
    chunks: int = _layout(1, bounds=(1, 1 << 10), job="graph", differs="resumed", when=_BY_COLUMNS)
    halo: str | None = _layout(None, job="graph", when=(_HALO,))
    device: choices.Device = _layout("auto", short=True, differs="resumed")
    threads: int | None = _layout(None, bounds=(1, 1 << 12), differs="always")
    sparse_threads: int = _layout(0, bounds=(0, 1 << 9), job="graph", differs="resumed")
    timeout: float | None = _layout(None, bounds=(1, 1e6), differs="always")
    ports: str | None = _layout(None, differs="always")
    dp: int = _replicas(1, short=True, differs="resumed")
    strategy: choices.Strategy = _replicas("synchronous")
    sync: choices.Sync | None = _replicas(None, differs="always", when=(_SUMMED,))
    elastic: bool = _replicas(False, differs="always", when=(_SUMMED,))
    average_every: int | None = _replicas(None, bounds=(1, 1e9), when=(_MEET,), filled=20)
    average: choices.Average | None = _replicas(None, when=(_AVERAGED,), filled="weights")
    outer_lr: float | None = _replicas(None, bounds=(0, 1e6), when=(_OUTER,), filled=1.0)
    outer_momentum: float | None = _replicas(None, bounds=(0, 0.999999), when=(_OUTER,), filled=0.5)
    overlap: int | None = _replicas(None, bounds=(0, 1e9), when=(_TOGETHER, _WEIGHTS), filled=0)
    pairs: choices.Pairs | None = _replicas(None, when=(_IN_PAIRS,), filled="any")
    answer: choices.Answer | None = _replicas(None, when=(_IN_PAIRS,), filled="item")
    gossip_between: choices.Between | None = _replicas(None, when=(_IN_PAIRS,), filled="replicas")
    staleness: int | Literal["none"] | None = _replicas(
        None, bounds=(0, 1e9), when=(_SERVED,), filled="none"
    )
    carry_moments: bool = _replicas(False, when=(_DIVIDED,))
    partition_input: bool = _replicas(False, job="graph", when=(_DIVIDED,))
    divided: choices.Divided | None = _replicas(None, job="images", when=(_DIVIDED,))
    branch_rescale: bool = _replicas(False, job="images", when=(_DIVIDED,))
    compress: str = _replicas("none")
    items: choices.Items | None = _replicas(None, when=(_OWN_STEPS,), filled="fixed")
    final: choices.Final | None = _replicas(
        None, differs="always", when=(_AVERAGED,), filled="mean"
    )
    replay: Path | None = _replicas(None)
    checkpoint_every: int | str = _checkpoints("10m", short=True, differs="always")
    keep: int = _checkpoints(2, bounds=(1, 1e6), differs="always")
    keep_best: choices.KeepBest | None = _checkpoints(None, short=True, differs="always")
    resume: str | None = _checkpoints(None, short=True, differs="always")
    max_restarts: int = _checkpoints(0, bounds=(0, 1e6), differs="always")
    stop_before: str | None = _checkpoints(None, differs="always")
    timing: bool = _timing(False, short=True, differs="always", when=(_SUMMED,))
    timing_warmup: int = _timing(3, bounds=(0, 1e6), differs="always")
    timing_steps: int = _timing(100, bounds=(1, 1e6), differs="always")
    trace: bool = _timing(False, differs="always", when=(_SUMMED,))


OPTIONS = facts_of(TrainConfig)


def given(
    config: object, names: Iterable[str] = OPTIONS, defaults: type = TrainConfig
) -> dict[str, Any]:
    """Return those of the options that have another value than in `defaults`."""
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


def of_sampler(sampler: str | None = None) -> list[str]:
    """Return the names of the options that a sampler has; by default of all of them."""
    return [
        name
        for name, facts in OPTIONS.items()
        for when in facts.when
        if when.option == "sampler" and (sampler is None or sampler in when.values)
    ]


def with_model_defaults(config: TrainConfig) -> TrainConfig:
    """Fill in options left at `None`: from the recipe first, then from the model.

    Learning rate and EMA decay are scaled to the batch size of this run. An option that is still
    `None` afterwards is off, or is decided later: by the job, of a graph in a prepared folder.
    """
    model = MODEL_DEFAULTS[config.model]
    recipe: dict[str, Any] = RECIPES[config.recipe] if config.recipe else {}
    defaults = asdict(model) | NO_RECIPE | recipe
    asked_for = [name for name in _AUGMENTATION if _is_on(config, name)]
    if config.augment is False:
        if asked_for:
            raise InputError(
                f"{flag(asked_for[0])} {getattr(config, asked_for[0])}: is an augmentation, but "
                "--no-augment turns all of them off; leave one of the two out"
            )
        defaults |= {name: NO_RECIPE[name] for name in _AUGMENTATION}
    elif asked_for:
        defaults["augment"] = True

    batch_size: int = config.batch_size or defaults["batch_size"] or 1
    if defaults["lr_images"] is not None:
        defaults["lr"] *= batch_size / defaults["lr_images"]
    defaults["ema"] = min(MOST_EMA, defaults["ema"] ** (batch_size / defaults["ema_images"]))
    size = parse_image_size(config.image_size or defaults["image_size"])
    if size is not None and max(size) <= SMALL_IMAGE:
        defaults["crop_pct"] = 1.0
    if model.job == "graph":
        of_images = [name for name, facts in OPTIONS.items() if facts.job == "images"]
        settled = (*of_images, *(OF_FOLDER if is_prepared(config.data) else ()))
        defaults = {name: value for name, value in defaults.items() if name not in settled}
    missing = {
        f.name: defaults[f.name]
        for f in fields(config)
        if getattr(config, f.name) is None and defaults.get(f.name) is not None
    }
    return replace(config, **missing)


def uses_timm(config: TrainConfig) -> bool:
    """Whether timm augments the training images, and not vigpipe by its own crop and mirroring."""
    has_timm_option = any(_is_on(config, name) for name in _AUGMENTATION)
    return bool(config.augment) and (config.recipe is not None or has_timm_option)


def _is_on(config: TrainConfig, name: str) -> bool:
    return getattr(config, name) not in (None, NO_RECIPE[name])


def parse_image_size(value: int | str | None) -> tuple[int, int] | None:
    """Parse SIDE or HEIGHTxWIDTH into (H, W) in pixels, None as None; or raise InputError."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6})(?:x([0-9]{1,6}))?", str(value).strip())
    size = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not all(1 <= side <= _LARGEST_SIDE for side in size):
        raise InputError(
            f"--image-size {value}: must be a side or HEIGHTxWIDTH in pixels, each from 1 to "
            f"{_LARGEST_SIDE}, such as 224 or 224x160"
        )
    return size


def parse_fanout(value: str | None) -> tuple[int, ...]:
    """Parse how many neighbours each layer takes, -1 for all, or None as no numbers.

    Raises:
        InputError: the text is something else.
    """
    if value is None:
        return ()
    words = str(value).split(",")
    if not all(re.fullmatch("-1|0*[1-9][0-9]{0,8}", word) for word in words):
        raise InputError(
            f"--fanout {value}: must be numbers of neighbours, 1 or more, such as 10 or 25,10, or "
            "-1 for all"
        )
    return tuple(int(word) for word in words)


def check_numbers(config: TrainConfig) -> None:
    """Raise InputError if an option is outside its range or cannot be parsed."""
    parse_image_size(config.image_size)
    parse_interval("--checkpoint-every", config.checkpoint_every)
    if config.log_every is not None:
        parse_interval("--log-every", config.log_every)
    for name, facts in OPTIONS.items():
        if facts.bounds is None:
            continue
        least, most = facts.bounds
        value = getattr(config, name)
        if value not in (None, "none") and not least <= value <= most:  # NaN fails too
            why = "; with 1 the average would never leave the first weights" * (name == "ema")
            raise InputError(
                f"{flag(name)} {value}: must be a number from {_plain(least)} to "
                f"{_plain(most)}{why}"
            )
    for name in ("validation", "test"):
        share = getattr(config, name)
        if not 0 <= share < 1:  # NaN fails too
            raise InputError(
                f"{flag(name)} {share}: must be a share of the images of each class, from 0 to "
                "less than 1, such as 0.1"
            )
    parse_compress(config.compress)
    parse_halo(config.halo)
    parse_fanout(config.fanout)
    if config.auto_augment is not None:
        check_auto_augment(config.auto_augment)
    if config.new_classifier and config.weights is None:
        raise InputError(
            "--new-classifier: is for weights that are loaded, and without --weights all weights "
            "are new; leave it out, or name a file of --weights"
        )
    if config.timing or config.trace:
        check_timed_steps(config)


def check_timed_steps(config: TrainConfig) -> None:
    """Raise InputError if all steps belong to the warm-up."""
    if config.steps is not None and config.steps <= config.timing_warmup:
        raise InputError(
            f"--steps {config.steps}: no step is left to be timed after --timing-warmup "
            f"{config.timing_warmup}; take more steps or a shorter warm-up"
        )


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def as_given(name: str, value: object) -> str:
    """Return an option as it stands on a command line."""
    if value is True:
        return flag(name)
    return flag(f"no_{name}") if value is False else f"{flag(name)} {value}"


def flag(name: str) -> str:
    """Return the command-line flag of a field of TrainConfig."""
    return "--" + name.replace("_", "-")

"""A run that trains on one large graph (`vigpipe.job.job.Job`)."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from vigpipe.config.choices import OF_LAYERS, GnnModel, GraphNorm
from vigpipe.config.halo import parse_halo
from vigpipe.config.of_weights import options_in_weights
from vigpipe.config.options import TrainConfig, of_sampler
from vigpipe.errors import InputError
from vigpipe.files.names import escaped, first_few
from vigpipe.files.weights_metadata import metadata_if_any
from vigpipe.graphs.choices import COLUMNS
from vigpipe.graphs.features import WEIGHTS, are_sparse, as_text, kept_weights
from vigpipe.graphs.feed import GraphFeed
from vigpipe.graphs.graph import TRAIN, VALIDATION, Graph
from vigpipe.graphs.items import fill, num_nodes, per_step, steps_per_epoch
from vigpipe.graphs.loss import NodeLoss
from vigpipe.graphs.merged import MergedGraphModel
from vigpipe.graphs.partitions.partition import Partition
from vigpipe.graphs.pool.unsharded import UnshardedWithPool
from vigpipe.graphs.prepared.graph import PreparedGraph
from vigpipe.graphs.repartition import Repartition
from vigpipe.graphs.samplers.make import make_rank_parts, make_sampler
from vigpipe.graphs.samplers.parts import Parts
from vigpipe.graphs.samplers.sampler import Sampler
from vigpipe.graphs.score import NodeTally
from vigpipe.graphs.sources import open_graph
from vigpipe.graphs.split.sharding import ShardedByParts, ShardedByRows, Sharding, Unsharded
from vigpipe.job.class_weights import class_weights, digest_of_weights, positive_weights
from vigpipe.job.feed import Needs
from vigpipe.job.job import TrialStep
from vigpipe.job.rows import Fill, partial_batch
from vigpipe.messages import plural
from vigpipe.model.gnn.by_columns import ByColumns
from vigpipe.model.gnn.columns import WideShare
from vigpipe.model.gnn.create import create_graph_model
from vigpipe.model.gnn.layer import GraphLayer
from vigpipe.model.gnn.model import GraphModel
from vigpipe.model.slicing import Slicing
from vigpipe.model.staged import StagedModel
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import Plan
from vigpipe.parallel.schedule import Pipeline
from vigpipe.parallel.shards import Shards
from vigpipe.planning.profile import Amounts


@dataclass(frozen=True)
class GraphJob:
    """One large graph, how it is cut into sub-graphs, and the model that is trained on them."""

    unit: ClassVar[str] = "nodes"
    merges_whole: ClassVar[bool] = False

    config: TrainConfig  # with the defaults of the model
    graph: Graph
    sampler: Sampler
    sampler_seconds: float  # how long this process took to make the sampler

    @property
    def name(self) -> str:
        return self.graph.name

    def with_options(self, config: TrainConfig) -> "GraphJob":
        return replace(self, config=config)

    def resampled(self, config: TrainConfig) -> "GraphJob":
        """Return a job on the same graph with other options; InputError if it cannot be cut so."""
        return make_graph_job(config, self.graph)

    @property
    def partition(self) -> Partition | None:
        """The parts that sub-graphs are made of at first; None if these are not made of parts."""
        return self.sampler.generations.partition(1) if isinstance(self.sampler, Parts) else None

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.graph.class_names

    @property
    def passes(self) -> tuple[tuple[str, ...], ...]:
        has_validation = len(self.graph.nodes_of(VALIDATION)) > 0
        return (("validation", "test") if has_validation else ("test",),)

    @property
    def description(self) -> str:
        graph = self.graph
        numbers = (
            plural(graph.num_nodes, "node"),
            plural(graph.num_edges, "directed edge")
            + " with weights" * (graph.edge_weights is not None),
            plural(graph.num_features, "feature"),
            plural(graph.num_classes, "class"),
        )
        return f"{', '.join(numbers)} ({first_few(graph.class_names)})"

    @property
    def notes(self) -> tuple[str, ...]:
        shared = str(self.rank_parts) if self._has_halos else ""
        return (*self.graph.notes, *filter(None, (self.sampler.describe(), shared)))

    @property
    def _has_halos(self) -> bool:
        """Whether each rank of a replica has a part of the graph, and the halo of that part."""
        return self.config.shards > 1 and self.config.split == "halo"

    @cached_property
    def rank_parts(self) -> Partition:
        return make_rank_parts(self.config, self.graph, self.config.shards)

    @property
    def row_shape(self) -> tuple[int]:
        return (0 if are_sparse(self.graph.features) else self.graph.num_features,)

    def make_model(self, num_parts: int = 1) -> StagedModel:
        config, graph = self.config, self.graph
        assert config.layers is not None
        assert config.width is not None
        model = create_graph_model(
            cast(GnnModel, config.model),
            in_channels=graph.num_features // (num_parts if config.partition_input else 1),
            num_classes=graph.num_classes,
            num_layers=config.layers,
            width=config.width // num_parts,
            heads=config.heads or 1,
            dropout=config.dropout,
            aggregator=config.aggregator,
            norm=cast(GraphNorm, config.norm),
        )
        model.set_impl(config.impl)
        model.decays = config.decay or "all"
        return model

    def check(self, layout: Layout, model: StagedModel, plan: Plan) -> None:
        if self.graph.num_classes == 1 and not self.graph.is_multi_label:
            raise InputError(
                f"--data {self.name}: all its nodes with a class are of one, "
                f"'{escaped(self.graph.class_names[0])}', and there is nothing to tell apart; name "
                "a graph of two classes or more"
            )
        _ = self._class_weights  # it raises
        if self.graph.edge_weights is not None and self.config.aggregator in ("max", "pool"):
            raise InputError(
                f"--aggregator {self.config.aggregator}: takes a maximum, in which the weights of "
                f"edges that {self.name} has would not count; choose mean, or leave the weights out"
            )
        self._check_shards(layout)
        self._check_sparse_threads(cast(GraphModel, model))
        wanted, most = per_step(self.sampler, layout), min(self.sampler.num_sub_graphs)
        if wanted <= most:
            return
        what = f"--microbatches {layout.num_microbatches}"
        of, has = f"--sampler {self.config.sampler}", f"has {most} an epoch"
        advice = "take both as 1, or choose --sampler parts"
        if not self.sampler.takes_all:
            advice = "choose smaller sub-graphs, or fewer micro-batches or replicas"
        if self.partition is not None:
            of += f" with --parts {self.partition.num_parts} and --merge {self.config.merge}"
            advice = "choose more parts, or fewer micro-batches or replicas"
        if len(self.sampler.num_sub_graphs) > 1:
            step = f"a step of a replica takes {wanted}"
            has = f"and --dp {layout.num_replicas} has {most} of its own an epoch"
        else:
            what += f" x --dp {layout.num_replicas}"
            step = f"a step takes {wanted}"
        raise InputError(f"{what}: {step} sub-graphs, but {of} {has}; {advice}")

    def _check_shards(self, layout: Layout) -> None:
        num_shards, sampler = layout.num_shards, self.config.sampler
        if num_shards == 1:
            return
        if sampler in OF_LAYERS:
            raise InputError(
                f"--shards {num_shards}: the ranks of a replica share the nodes of a sub-graph, "
                f"and with --sampler {sampler} every layer has nodes of its own; choose full, "
                "parts or a saint sampler, or leave --shards out"
            )
        if self.config.split == "halo" and sampler != "full":
            raise InputError(
                f"--split halo: gives each rank a part of the whole graph, and --sampler is "
                f"{sampler}; choose full, or --split mixed"
            )
        if self.config.adjacency == "split":
            self._check_travelling()
        if self.sampler.most_nodes < num_shards:
            raise InputError(
                f"--shards {num_shards}: a sub-graph has {self.sampler.most_nodes} nodes at most; "
                "take fewer shards"
            )

    def _check_sparse_threads(self, model: GraphModel) -> None:
        number = self.config.sparse_threads
        if number and not any(cast(GraphLayer, layer).joins for layer in model.convs.values()):
            aggregator = self.config.aggregator
            of = "" if aggregator is None else f" with --aggregator {aggregator}"
            raise InputError(
                f"--sparse-threads {number}: sums beside the products of gcn, gin, or the mean of "
                f"sage, and --model is {self.config.model}{of}; leave it out"
            )

    def _check_travelling(self) -> None:
        """Raise InputError where edges that travel would save no memory, or not suffice."""
        what, config = "--adjacency split", self.config
        if config.sampler != "full":
            raise InputError(
                f"{what}: divides the edges of the whole graph, and with --sampler "
                f"{config.sampler} every rank draws those of a sub-graph; leave it out, or choose "
                "--sampler full"
            )
        if config.model == "gat":
            raise InputError(
                f"{what}: gat has learned weights of all edges on every rank, which take as much "
                "room as the edges; leave it out"
            )

    def batch_size(self, layout: Layout) -> int:
        return layout.num_replicas * layout.num_microbatches * self.sampler.most_nodes

    def microbatch_size(self, layout: Layout) -> int:
        return -(-self.sampler.most_nodes // layout.num_shards)

    def rows_before(self, layout: Layout, block: int) -> int:
        return -(-self.sampler.most_rows(block) // layout.num_shards)

    def most_microbatches(self, layout: Layout) -> int:
        return sum(self.sampler.num_sub_graphs)

    def trials(self, microbatch_sizes: Sequence[int], most: int) -> list[TrialStep]:
        # The costs of nodes and of edges can be told apart best where their numbers differ most.
        sizes = self._sizes
        by_nodes, by_edges = (sorted(sizes, key=lambda n: sizes[n][i]) for i in (0, 1))
        chosen = by_nodes[0], by_nodes[-1], by_edges[0], by_edges[-1], by_nodes[len(sizes) // 2]
        return [
            TrialStep(self.config, 1, n, dict(zip(("nodes", "edges"), sizes[n], strict=True)))
            for n in dict.fromkeys(chosen)
        ]

    @property
    def typical_microbatch(self) -> Amounts:
        nodes, edges = (fmean(sizes) for sizes in zip(*self._sizes.values(), strict=True))
        return Amounts(nodes, (edges,), self.sampler.most_nodes)

    @cached_property
    def _sizes(self) -> dict[int, tuple[int, int]]:
        """Nodes and edges of each sub-graph that one process takes in its first epoch."""
        numbers, sampler = range(self.sampler.num_sub_graphs[0]), self.sampler
        return {n: (sampler.num_nodes(1, n), sampler.num_edges(1, n)) for n in numbers}

    def describe_step(self, layout: Layout) -> str:
        number = layout.num_replicas * layout.num_microbatches
        what = "the whole graph" if self.config.sampler == "full" else "a sub-graph"
        return what if number == 1 else plural(number, "sub-graph")

    def steps_per_epoch(self, layout: Layout) -> int:
        return steps_per_epoch(self.sampler, layout)

    def fill(self, layout: Layout, item: int) -> Fill:
        return fill(item, self.sampler, layout)

    def fill_of_test(self, layout: Layout, num_pipelines: int, num_samples: int) -> Fill:
        return Fill(num_samples, num_samples)

    def why_not_recorded(self, layout: Layout) -> str | None:
        return "its micro-batches have one size, and sub-graphs have different edges"

    def loss(self, factor: Tensor | None) -> NodeLoss:
        return NodeLoss(factor, self._class_weights)

    @cached_property
    def _class_weights(self) -> Tensor | None:
        option, graph = self.config.class_weights, self.graph
        if option is None:
            return None
        labels = graph.labels[graph.nodes_of(TRAIN)]
        if graph.is_multi_label:
            counts = ((labels == has).sum(0) for has in (1, 0))
            return positive_weights(option, self.class_names, *counts)
        counts = np.bincount(labels, minlength=graph.num_classes)
        return class_weights(option, self.class_names, counts)

    def feed(self, needs: Needs) -> GraphFeed:
        layout, repartition, sampler = needs.layout, None, self.sampler
        if isinstance(sampler, Parts) and sampler.generations.are_measured:
            num_steps = self.config.steps
            if num_steps is None:
                num_steps = (self.config.epochs or 0) * self.steps_per_epoch(layout)
            repartition = Repartition(sampler, layout, num_steps)
        return GraphFeed(
            self.graph,
            sampler,
            self.config.seed,
            needs,
            repartition=repartition,
            sharding=None if needs.shards is None else self._sharding(needs.shards),
        )

    def share_models(self, models: Sequence[StagedModel], shards: Shards) -> None:
        """Do nothing: the edges of a batch say which nodes are the rank's."""

    def _sharding(self, shards: Shards) -> Sharding:
        config, fused = self.config, self.config.impl == "fused"
        if shards.size == 1:
            number = config.sparse_threads
            return UnshardedWithPool(number, fused=fused) if number else Unsharded()
        if self._has_halos:
            owners, kind = self.rank_parts.parts, parse_halo(config.halo)
            return ShardedByParts(shards, owners, kind, config.seed, fused=fused)
        travels = config.adjacency == "split"
        return ShardedByRows(shards, chunks=config.chunks, travels=travels, fused=fused)

    def merged(
        self, stages: Sequence[StagedModel], share: WideShare, pipeline: Pipeline
    ) -> MergedGraphModel:
        shares = [ByColumns(cast(GraphModel, stage), share) for stage in stages]
        return MergedGraphModel(shares, share, pipeline)

    def slicing(self, model: StagedModel) -> Slicing:
        return model.slicing(self.config.partition_input)

    def tally(self, splits: Sequence[str], device: torch.device) -> NodeTally:
        return NodeTally(self.graph, splits, device)

    def num_rows(self, layout: Layout, item: int, num_samples: int) -> int:
        return num_nodes(item, self.sampler, layout)

    def rates(
        self, layout: Layout, item: int, num_samples: int, seconds: float
    ) -> dict[str, float]:
        rate = self.num_rows(layout, item, num_samples) / seconds
        of_batch = partial_batch(self.fill(layout, item))
        return {"nodes_per_second": rate, "training_nodes": num_samples, **of_batch}

    @property
    def fingerprint(self) -> dict[str, object]:
        graph = self.graph
        numbers: dict[str, object] = {
            "nodes": graph.num_nodes,
            "edges": graph.num_edges,
            "SHA-256 of edges and labels": graph.sha256,
            "SHA-256 of the features": graph.features_sha256,
        }
        if self.partition is not None:
            numbers["SHA-256 of the parts"] = self.partition.sha256
        return numbers | digest_of_weights(self._class_weights)

    def cost_options(self) -> dict[str, str]:
        names = "layers", "width", "heads", "sampler", "partition", "parts", "merge"
        options = {name: str(getattr(self.config, name)) for name in names}
        sizes = [name for name in of_sampler() if name not in options]
        for name in sizes:  # older profiles lack those of samplers that came later
            if getattr(self.config, name) is not None:
                options[name] = str(getattr(self.config, name))
        return {**options, "graph": self.graph.sha256}

    def weights_metadata(self) -> dict[str, object]:
        graph = self.graph
        return {
            "num_classes": graph.num_classes,
            "num_features": graph.num_features,
            "multi_label": graph.is_multi_label,
            "edge_weights": graph.edge_weights is not None,
            "class_names": json.dumps(graph.class_names, ensure_ascii=False),
            **options_in_weights(self.config),
            WEIGHTS: as_text(graph.feature_weights),
            COLUMNS: None if graph.choices is None else graph.choices.as_text(),
        }

    def summary(self) -> dict[str, object]:
        return {
            "graph": {
                "nodes": self.graph.num_nodes,
                "edges": self.graph.num_edges,
                "sampler_seconds": self.sampler_seconds,
                **self.sampler.as_table(),
            }
        }


def open_graph_job(config: TrainConfig) -> GraphJob:
    """Open the graph that the options name; InputError if there is none, or it cannot be cut so."""
    path, weights = config.weights, None
    if path is not None:
        weights = kept_weights(metadata_if_any(path), path)
    graph = open_graph(
        config.data,
        data_dir=config.data_dir,
        download=config.download,
        features=config.features,
        symmetric=config.symmetric,
        seed=config.seed,
        feature_weights=weights,
        multi_label=config.multi_label,
    )
    return make_graph_job(config, graph)


def make_graph_job(config: TrainConfig, graph: Graph) -> GraphJob:
    """Make the job of training on a graph that is open; InputError if it cannot be cut so."""
    if isinstance(graph, PreparedGraph):
        config = _as_prepared(config, graph)
    began = time.perf_counter()
    sampler = make_sampler(config, graph)
    return GraphJob(config, graph, sampler, time.perf_counter() - began)


def _as_prepared(config: TrainConfig, graph: PreparedGraph) -> TrainConfig:
    """Fill in the options that a prepared folder decides, as far as they are not given."""
    has = graph.manifest
    config = replace(config, features=has.scaling, symmetric=has.symmetric)
    if config.sampler != "parts":
        return config
    method, number = config.partition or has.partition, config.parts or has.num_parts
    return replace(config, partition=method, parts=number)

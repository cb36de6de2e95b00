"""A pool sums beside the rank's threads: the same results, its own errors, and nothing left."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice, product
from typing import Any, cast

import pytest
import torch
from scipy.sparse import csr_array

from benchmarks.pipeline import bench_pipeline
from tests.graphs.split.test_halo import random_graph
from tests.graphs.split.test_runs import BASE as SHARED
from tests.refusals import check_refusals
from vigpipe.commands.check import compare_steps, trace
from vigpipe.commands.start_plan import run_plan
from vigpipe.config.check_job import check_job
from vigpipe.config.choices import GRAPH_MODELS
from vigpipe.config.verbs import PlanConfig
from vigpipe.errors import InputError
from vigpipe.graphs.chunks import Chunks
from vigpipe.graphs.features import for_model
from vigpipe.graphs.feed import GraphFeed
from vigpipe.graphs.pool import sums, unsharded
from vigpipe.graphs.pool.edges import PooledEdges
from vigpipe.graphs.pool.pool import Pool
from vigpipe.graphs.pool.unsharded import UnshardedWithPool
from vigpipe.graphs.split import sums as split_sums
from vigpipe.graphs.split.sums import WholeSums
from vigpipe.model.gnn.create import create_graph_model
from vigpipe.model.gnn.edges import Edges
from vigpipe.ops.adjacency import Adjacency
from vigpipe.ops.call import num_threads
from vigpipe.run.batches import batches
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state
from vigpipe.run.step import complete_step, train_step
from vigpipe.timing.clock import make_clock
from vigpipe.timing.recorder import Recorder

CPU = torch.device("cpu")
NODES, EDGE_COUNT = 61, 300


def pooled_edges(graph, pool, num_chunks):
    return PooledEdges(graph, pool, Chunks(num_chunks, [slice(0, graph.num_targets)]))


def test_the_pool_has_threads_of_its_own_and_leaves_the_others_as_they_are():
    before, numbers = torch.get_num_threads(), []
    pool = Pool(before + 1)
    pool.start(lambda: numbers.append(num_threads(1 << 40))).result()  # as a kernel chooses it
    later = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
    later.start()
    later.join()
    pool.close()
    assert numbers == [before + 1, before]
    assert torch.get_num_threads() == before


def test_rows_of_a_gpu_are_copied_before_they_are_summed_and_sums_before_they_are_multiplied(
    monkeypatch,
):
    record, graph = [], random_graph(NODES, EDGE_COUNT)
    write = WholeSums.write

    def recorded(of, x, rows, out, added):
        record.append(("sum", rows[0].start))
        write(of, x, rows, out, added)

    def mark(device):
        number = sum(what == "mark" for what, _ in record)
        record.append(("mark", number))
        return lambda: record.append(("arrived", number))

    monkeypatch.setattr(sums, "is_on_host", lambda x: False)
    monkeypatch.setattr(sums, "_mark", mark)
    monkeypatch.setattr(WholeSums, "write", recorded)
    pool, x = AtOnce([]), torch.randn(NODES, 3, requires_grad=True)
    edges = pooled_edges(graph, pool, 2)
    y = edges.sums(x, "ones", x)
    half = NODES // 2
    # One mark for what is added, and one for each chunk; a sum over all rows waits for the last.
    marks = [("mark", number) for number in range(3)]
    assert record == [*marks, ("arrived", 2), ("sum", 0), ("arrived", 2), ("sum", half)]
    wanted = Edges(graph).sums(x, "ones", x)
    torch.testing.assert_close(y, wanted)
    grads = [torch.autograd.grad(one.sin().sum(), x) for one in (y, wanted)]
    torch.testing.assert_close(*grads)
    pool.close()


class AtOnce(Pool):
    """Does each task where it is given, and keeps a record."""

    def __init__(self, record):
        super().__init__(1)
        self.record = record

    def start(self, task):
        self.record.append("sum")
        future = Future()
        future.set_result(task())
        return future


def test_a_chunk_leaves_as_soon_as_it_is_multiplied(monkeypatch):
    """Nodes 0 to 5 are a path, so a chunk of it needs no later one."""
    record, mm = [], torch.mm

    def recorded(*arguments, **ways):
        record.append("product")
        return mm(*arguments, **ways)

    monkeypatch.setattr(torch, "mm", recorded)
    indptr, sources = torch.tensor([0, 0, 1, 2, 3, 4, 5]), torch.tensor([0, 1, 2, 3, 4])
    path = Adjacency(indptr, sources)
    pool, x = AtOnce(record), torch.randn(6, 3).requires_grad_()
    edges, weight = pooled_edges(path, pool, 3), torch.ones(2, 3)
    y = edges.product_then_sums(x, weight, "ones")
    assert record == ["product", "sum"] * 3
    torch.testing.assert_close(y, Edges(path).product_then_sums(x, weight, "ones"))

    # Backwards the edges are turned round, so chunk 0 needs chunk 1, and chunk 1 needs chunk 2.
    ours, wanted = (of.sums_then_product(x, "ones", weight) for of in (edges, Edges(path)))
    record.clear()
    (grad,) = torch.autograd.grad(ours.sin().sum(), x)
    assert record == ["product", "product", "sum", "product", "sum", "sum"]
    torch.testing.assert_close(grad, torch.autograd.grad(wanted.sin().sum(), x)[0])
    pool.close()


def test_what_a_sum_raises_is_raised_where_the_layer_asked_for_it(monkeypatch):
    def broken(*arguments, **ways):
        raise MemoryError("no room for a sum")

    pool, x = Pool(1), torch.ones(NODES, 3, requires_grad=True)
    edges = pooled_edges(random_graph(NODES, EDGE_COUNT), pool, 3)
    y = edges.sums_then_product(x, "ones", torch.ones(2, 3))
    monkeypatch.setattr(split_sums, "write_sums", broken)
    with pytest.raises(MemoryError, match="no room for a sum"):
        y.sum().backward()
    with pytest.raises(MemoryError, match="no room for a sum"):
        edges.product_then_sums(x, torch.ones(2, 3), "ones")
    pool.close()


BASE = replace(SHARED, model="gcn", ema=0.0, sparse_threads=1)
CONFIGS = {
    "gcn, wider": replace(BASE, width=20),
    "gcn, narrower": BASE,
    "sage": replace(BASE, model="sage", width=20),
    "gin": replace(BASE, model="gin", width=20, norm="none", impl="plain"),
    "gin, narrower": replace(BASE, model="gin", sparse_threads=2),
    "parts": replace(BASE, sampler="parts", parts=6, merge=2),
    "sampled": replace(BASE, model="sage", sampler="saint-node", sample_nodes=80, coverage=2),
}


@pytest.fixture
def few_rows(monkeypatch):
    """Let graphs of a test have several chunks."""
    monkeypatch.setattr(unsharded, "LEAST_ROWS", 20)


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_training_is_that_of_threads_that_do_all_work(config, is_on_host, few_rows, monkeypatch):
    """Where they are not on the host, rows are copied as from a GPU."""
    monkeypatch.setattr(sums, "is_on_host", lambda x: is_on_host)
    summed, write_sums = [], split_sums.write_sums

    def counted(*arguments, **ways):
        summed.append(arguments[3])
        write_sums(*arguments, **ways)

    monkeypatch.setattr(split_sums, "write_sums", counted)
    compared = compare_steps(prepare(config, torch.float64), 0, CPU, 3)
    assert len(set(map(str, summed))) > 2  # chunks
    assert compared is not None
    assert not compared.exact
    assert all(row.within(torch.float64) for row in compared.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_gpu_multiplies_what_the_pool_sums(config, few_rows):
    compared = compare_steps(prepare(config, torch.float64), 0, torch.device("cuda", 0), 3)
    assert compared is not None
    assert all(row.within(torch.float64) for row in compared.rows)


def test_timing_changes_no_bit_and_has_sum_and_product_in_one_region(few_rows):
    run = prepare(CONFIGS["gin, narrower"], torch.float64)
    recorder = Recorder(make_clock(CPU), 0, 0, num_warmup=0, num_steps=2)
    found = []
    for of_run in (None, recorder):
        state = make_rank_state(run, 0, CPU, of_run)
        for number, batch in enumerate(islice(batches(state), 2)):
            with state.timed("train", number):
                train_step(state, batch)
            complete_step(state)
        state.feed.close()
        found.append(state.trained.state())
    for tensor, other in zip(found[0].values(), found[1].values(), strict=True):
        assert torch.equal(tensor, other)
    timed = {(row.name, row.direction) for row in recorder.take_rows()}
    for part in ("aggregation", "update"):
        assert (f"block 1/{part}", "forward") in timed
        assert (f"block 1/{part}", "backward") in timed


def test_it_is_timed_against_the_same_threads_for_all_work(few_rows, tmp_path):
    bench_pipeline(prepare(BASE, torch.float64), 0, CPU, tmp_path, 1)
    page = (tmp_path / "README.md").read_text()
    for contender in ("1 thread for all work", "2 threads for all", "1 that multiplies, 1 for sum"):
        assert contender in page
    with pytest.raises(InputError, match=r"with one rank; choose .* or --sparse-threads"):
        bench_pipeline(prepare(replace(BASE, sparse_threads=0), torch.float64), 0, CPU, tmp_path, 1)


def test_the_pool_ends_with_the_feed():
    state = make_rank_state(prepare(BASE, torch.float64), 0, CPU)
    trace(state, 1)
    assert isinstance(state.feed, GraphFeed)
    sharding, threads = state.feed._sharding, []
    assert isinstance(sharding, UnshardedWithPool)
    sharding._pool.start(lambda: threads.append(threading.current_thread())).result()
    state.feed.close()
    assert not threads[0].is_alive()


def test_options_that_do_not_go_together_are_refused():
    rows = [
        ({"shards": 2}, "sums on threads of a rank .* --shards 2 ranks share"),
        ({"sampler": "neighbour", "fanout": "3"}, "--sampler neighbour each"),
        ({"dtype": "bfloat16"}, "--dtype is bfloat16; leave it out, or"),
        ({"model": "vig_digits", "layers": None, "width": None}, "is for a g"),
    ]
    check_refusals(rows, lambda o: check_job(replace(BASE, **o)), where="--sparse-threads 1: ")
    rows = [
        ({"model": "gat", "heads": 2}, "sums beside .* and --model is gat"),
        ({"model": "gcn2"}, "and --model is gcn2; leave it out"),
        ({"model": "sage", "aggregator": "max"}, "--model is sage with --aggregator max; lea"),
    ]
    plain = replace(BASE, norm="none")
    check_refusals(
        rows, lambda o: prepare(replace(plain, **o), torch.float64), where="--sparse-threads 1: "
    )
    config = PlanConfig(model="gcn", data="sbm:300", sparse_threads=2)
    rows = [(config, "--sparse-threads 2: vigpipe plan measures .*; leave it")]
    check_refusals(rows, lambda config: run_plan(config, []))


def test_a_layer_that_joins_makes_the_same_as_one_that_does_not():
    graph, pool = random_graph(NODES, EDGE_COUNT), Pool(2)
    x = torch.randn(NODES, 7, generator=torch.Generator().manual_seed(2))
    pooled, models = pooled_edges(graph, pool, 3), cast(Any, GRAPH_MODELS)
    for features in (x, for_model(csr_array(x.relu().numpy()), is_sparse=True)):
        for name, width in product(models, (5, 11)):
            sizes: dict[str, Any] = {"in_channels": 7, "num_classes": 3, "num_layers": 2}
            model = create_graph_model(name, **sizes, width=width)
            y = model(features, None, pooled)
            torch.testing.assert_close(y, model(features, None, graph))
    pool.close()

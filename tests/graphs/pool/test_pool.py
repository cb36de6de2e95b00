"""A pool sums beside the rank's threads: the same results, its own errors, and nothing left."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice, pairwise, product
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from scipy.sparse import csr_array

from tests.graphs.split.test_halo import random_graph
from tests.refusals import check_refusals
from vigpipe.bench.pipeline import bench_pipeline
from vigpipe.commands.check import compare_steps, trace
from vigpipe.commands.plan import run_plan
from vigpipe.config.check_job import check_job
from vigpipe.config.choices import GRAPH_MODELS
from vigpipe.config.options import TrainConfig
from vigpipe.config.verbs import PlanConfig
from vigpipe.errors import DONE, InputError
from vigpipe.graphs.chunks import Chunks
from vigpipe.graphs.features import for_model
from vigpipe.graphs.feed import GraphFeed
from vigpipe.graphs.pool import chunks as of_pool
from vigpipe.graphs.pool import sums
from vigpipe.graphs.pool.chunks import LEAST_ROWS, MOST_CHUNKS, chunks_that_pay, turns
from vigpipe.graphs.pool.edges import PooledEdges
from vigpipe.graphs.pool.pool import Pool
from vigpipe.graphs.pool.share import AloneWithPool
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
from vigpipe.training import train

CPU = torch.device("cpu")
NODES, EDGE_COUNT = 61, 300
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def pooled_edges(graph, pool, num_chunks, **options):
    return PooledEdges(graph, pool, Chunks(num_chunks, [slice(0, graph.num_targets)]), **options)


def test_the_pool_has_threads_of_its_own_and_leaves_the_others_as_they_are():
    before, numbers = torch.get_num_threads(), []
    pool = Pool(before + 1)
    threads = []
    pool.start(lambda: numbers.append(num_threads(1 << 40))).result()  # as a kernel chooses it
    pool.start(lambda: threads.append(threading.current_thread())).result()
    later = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert numbers == [before + 1, before]
    assert torch.get_num_threads() == before
    assert threads[0].is_alive()
    pool.close()
    assert not threads[0].is_alive()


def test_chunks_cover_all_nodes_and_none_is_small_unless_it_is_asked_for():
    assert len(chunks_that_pay(LEAST_ROWS - 1).rows) == len(chunks_that_pay(0).rows) == 1
    assert len(chunks_that_pay(3 * LEAST_ROWS).rows) == 3
    assert len(chunks_that_pay(1000 * LEAST_ROWS).rows) == MOST_CHUNKS
    rows = [rows for (rows,) in Chunks(7, [slice(0, NODES)]).rows]
    assert (rows[0].start, rows[-1].stop) == (0, NODES)
    assert all(left.stop == right.start for left, right in pairwise(rows))


def test_a_chunk_is_summed_as_soon_as_the_last_one_that_it_needs_is_there():
    # 0 -> 1 -> ... -> 11 in a row, and 11 -> 0; node 6 has no edges.
    sources = [11, *range(5), *range(6, 11)]
    indptr = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11])
    ring = Adjacency(indptr, torch.tensor(sources))
    chunks = Chunks(3, [slice(0, 12)])
    assert turns(chunks, ring) == [[], [1], [0, 2]]
    nothing = Adjacency(torch.zeros(13, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert turns(chunks, nothing) == [[0, 1, 2], [], []]


def ways(edges, x, weights):
    """All that layers ask for, with everything that can be added."""
    narrow, wide, bias, own = weights
    yield edges.sums(x, "ones", x.sin())
    yield edges.sums_then_product(x, "mean", wide)
    yield edges.sums_then_product(x, "ones", wide, bias, added=x.cos(), beside=(x, own))
    yield edges.with_loops().sums_then_product(x, "gcn", wide, bias)
    yield edges.product_then_sums(x, narrow, "ones", itself=bias.new_tensor([2.0]))
    yield edges.with_loops().product_then_sums(x, wide, "gcn", bias, beside=(x, own))
    yield edges.product_then_sums(x, wide, "mean", x @ own.T)


def everything(edges, dtype):
    """Results of all ways, and the gradients of what goes in."""
    generator = torch.Generator().manual_seed(1)
    shapes = (NODES, 9), (4, 9), (13, 9), (13,), (13, 9)
    tensors = [torch.randn(s, dtype=dtype, generator=generator) / 3 for s in shapes]
    x, *weights = (tensor.requires_grad_() for tensor in tensors)
    found = []
    for y in ways(edges, x, weights):
        grads = torch.autograd.grad(y.sin().sum(), (x, *weights), allow_unused=True)
        found += [y.detach(), *(grad for grad in grads if grad is not None)]
    return found


@pytest.mark.parametrize(
    ("num_chunks", "threads", "dtype", "fused", "is_on_host"),
    [
        (1, 1, torch.float64, True, True),
        (1, 2, torch.float32, False, False),
        (2, 1, torch.float32, False, True),
        (2, 2, torch.float64, True, False),
        (5, 2, torch.float64, False, True),
        (5, 1, torch.float32, True, False),
        (NODES, 1, torch.float64, False, False),
        (NODES, 2, torch.float32, True, True),
    ],
)
def test_results_and_gradients_are_those_of_one_thing_after_another(
    num_chunks, threads, dtype, fused, is_on_host, monkeypatch
):
    """Every two values of two options meet; not on the host, rows are copied as from a GPU."""
    monkeypatch.setattr(sums, "is_on_host", lambda x: is_on_host)
    graph, pool = random_graph(NODES, EDGE_COUNT), Pool(threads)
    pooled = pooled_edges(graph, pool, num_chunks, fused=fused)
    ours, wanted = (everything(edges, dtype) for edges in (pooled, Edges(graph, fused=fused)))
    pool.close()
    assert len(ours) == len(wanted)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_rows_of_a_gpu_are_copied_before_they_are_summed_and_sums_before_they_are_multiplied(
    monkeypatch,
):
    record, graph = [], random_graph(NODES, EDGE_COUNT)
    write = sums.PooledSums.write

    def recorded(of, x, rows, out, added):
        record.append(("sum", rows.start))
        write(of, x, rows, out, added)

    def mark(device):
        number = sum(what == "mark" for what, _ in record)
        record.append(("mark", number))
        return lambda: record.append(("arrived", number))

    monkeypatch.setattr(sums, "is_on_host", lambda x: False)
    monkeypatch.setattr(sums, "_mark", mark)
    monkeypatch.setattr(sums.PooledSums, "write", recorded)
    pool, x = AtOnce([]), torch.randn(NODES, 3)
    edges = pooled_edges(graph, pool, 2)
    y = edges.sums(x, "ones", x)
    half = NODES // 2
    # One mark for what is added, and one for each chunk; a sum over all rows waits for the last.
    marks = [("mark", number) for number in range(3)]
    assert record == [*marks, ("arrived", 2), ("sum", 0), ("arrived", 2), ("sum", half)]
    torch.testing.assert_close(y, Edges(graph).sums(x, "ones", x))
    pool.close()


def test_sums_have_the_same_bits_for_all_chunks_and_threads():
    graph = random_graph(NODES, EDGE_COUNT)
    x = torch.randn(NODES, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = []
    for threads, num_chunks in ((1, 1), (1, 4), (2, 7), (3, NODES)):
        pool = Pool(threads)
        y = pooled_edges(graph, pool, num_chunks).sums(x, "mean")
        (grad,) = torch.autograd.grad(y.sin().sum(), x)
        found.append((y, grad))
        pool.close()
    for y, grad in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(grad, found[0][1])


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
    monkeypatch.setattr(sums, "write_sums", broken)
    with pytest.raises(MemoryError, match="no room for a sum"):
        y.sum().backward()
    with pytest.raises(MemoryError, match="no room for a sum"):
        edges.product_then_sums(x, torch.ones(2, 3), "ones")
    pool.close()


BASE = TrainConfig(
    model="gcn",
    data="sbm:300,4,12,6",
    layers=3,
    width=10,
    dropout=0.3,
    norm="batch",
    opt="sgd",
    lr=0.05,
    epochs=6,
    dtype="float64",
    seed=3,
    sparse_threads=1,
)
CONFIGS = {
    "gcn, wider": replace(BASE, width=20),
    "gcn, narrower": BASE,
    "sage": replace(BASE, model="sage", width=20),
    "gin": replace(BASE, model="gin", width=20, norm="none"),
    "gin, narrower": replace(BASE, model="gin"),
    "parts": replace(BASE, sampler="parts", parts=6, merge=2),
    "sampled": replace(BASE, model="sage", sampler="saint-node", sample_nodes=80, coverage=2),
}


@pytest.fixture
def few_rows(monkeypatch):
    """Let graphs of a test have several chunks."""
    monkeypatch.setattr(of_pool, "LEAST_ROWS", 20)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_training_is_that_of_threads_that_do_all_work(config, few_rows, monkeypatch):
    summed, write_sums = [], sums.write_sums

    def counted(*arguments, **ways):
        summed.append(arguments[3])
        write_sums(*arguments, **ways)

    monkeypatch.setattr(sums, "write_sums", counted)
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


def test_a_run_with_evaluations_ends_with_the_same_weights(few_rows, tmp_path):
    found = []
    for number in (0, 1):
        config, folder = replace(BASE, sparse_threads=number), tmp_path / str(number)
        folder.mkdir()
        assert train(prepare(config, torch.float64), 0, CPU, folder) == DONE
        found.append(load_file(folder / "model.safetensors"))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["gcn, wider", "gin, narrower"])
def test_timing_changes_no_bit_and_has_sum_and_product_in_one_region(name, few_rows):
    run = prepare(CONFIGS[name], torch.float64)
    recorder = Recorder(make_clock(CPU), 0, 0, num_warmup=0, num_steps=2)
    found = []
    for of_run in (None, recorder):
        state = make_rank_state(run, 0, CPU, of_run)
        for number, batch in enumerate(islice(batches(state), 2)):
            with state.timed("train", number):
                train_step(state, batch)
            complete_step(state)
        state.feed.close()
        found.append(state.state())
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
    sharing, threads = state.feed._sharing, []
    assert isinstance(sharing, AloneWithPool)
    pool = sharing._pool
    pool.start(lambda: threads.append(threading.current_thread())).result()
    assert threads[0].is_alive()
    state.feed.close()
    assert not threads[0].is_alive()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.start(lambda: None)


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

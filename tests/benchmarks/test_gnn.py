"""`python -m benchmarks gnn`: its contenders compute the same, and its page has a row for each."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import gnn
from benchmarks.options import GnnBench
from vigpipe.commands.dataset import prepare_dataset
from vigpipe.config.verbs import PrepareConfig
from vigpipe.graphs.graph import TEST, TRAIN

pytestmark = pytest.mark.heavy

CPU = torch.device("cpu")
EAGER = [name for name in gnn.CONTENDERS if not name.endswith("compiled")]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Of a graph whose nodes have some of 30 words."""
    path, draws = tmp_path_factory.mktemp("graph") / "words.npz", np.random.default_rng(0)
    np.savez(
        path,
        edge_src=draws.integers(200, size=600),
        edge_dst=draws.integers(200, size=600),
        x_indptr=np.arange(201) * 3,
        x_indices=np.sort([draws.choice(30, 3, replace=False) for _ in range(200)]).ravel(),
        num_features=np.array(30),
        y=draws.integers(5, size=200),
        split=draws.choice([TRAIN, TEST], p=[0.8, 0.2], size=200),
    )
    return GnnBench(data=str(path), width=16, heads=4, dropout=0.0, repeats=1)


@pytest.mark.parametrize(
    ("model", "is_prepared"), [("sage", False), ("gat", False), ("sage", True)]
)
def test_all_contenders_compute_the_same(model, is_prepared, options, tmp_path):
    """Weights of the same size get the same numbers, as their order differs."""
    if is_prepared:
        prepare_dataset(options.data, tmp_path / "f", PrepareConfig(features="tfidf", parts=3))
        options = replace(options, data=str(tmp_path / "f"))
    options = replace(options, model=model)
    graph, logits = gnn._open(options), {}
    for name in EAGER:
        if name.startswith(model):
            made, forward = gnn.CONTENDERS[name](graph, options, CPU)
            for parameter in made.parameters():
                generator = torch.Generator().manual_seed(parameter.numel())
                torch.nn.init.normal_(parameter, std=0.3, generator=generator)
            logits[name] = forward().detach()
    assert len(logits) == {"sage": 6, "gat": 3}[model]
    first, *others = logits.values()
    assert first.std() > 0.01
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-5)


def test_the_page_has_every_contender(options, tmp_path, monkeypatch, capsys):
    sage = {name: gnn.CONTENDERS[name] for name in EAGER if name.startswith("sage")}
    monkeypatch.setattr(gnn, "CONTENDERS", sage)
    monkeypatch.setattr(gnn, "peaks", lambda *arguments, **settings: (2e9, 1e9))
    gnn.bench_gnn(replace(options, out=tmp_path / "out"))
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert all(f"| {name} " in text for name in sage)
    assert text.count("1,000 MB") == len(sage)

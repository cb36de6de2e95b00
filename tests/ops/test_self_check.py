"""The comparison of the Triton operators with plain torch before they serve on a kind of GPU.

`python tests/ops/test_self_check.py run` compares the kernels in Triton's interpreter, on the CPU,
as they are and with a fault planted in each, and prints what was found.
"""

import importlib.util
import json

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.ops.called import Called
from tests.ops.programs import run_program
from vigpipe import ops
from vigpipe.ops import self_check

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")
CPU = torch.device("cpu")


def first_two_swapped(graph):
    return graph[..., [1, 0, *range(2, graph.shape[-1])]]


def raises(*_):
    raise RuntimeError("ptxas ended with\nan error")


FAULTS = {
    "none in knn": {"knn": lambda made: made},
    "none in aggregate": {"aggregate": lambda made: made},
    "ties in another order": {"knn": lambda made: lambda *a: first_two_swapped(made(*a))},
    "a bias that is not added": {"knn": lambda made: lambda x, y, _, *a: made(x, y, None, *a)},
    "half precision is not read": {
        "knn": lambda made: lambda x, *a: made(x if x.itemsize == 4 else 0 * x, *a)
    },
    "no graph": {"knn": lambda made: raises},
    "outputs a little off": {
        "aggregate": lambda made: lambda *a: (made(*a)[0] * 1.02, made(*a)[1])
    },
    "the last winner of a tie": {"aggregate": lambda made: lambda *a: last_winner(made, *a)},
    "no gradient of the nodes": {
        "aggregate_backward": lambda made: lambda *a: (0 * a[0], *made(*a)[1:])
    },
    "no gradient of the weights": {
        "aggregate_backward": lambda made: lambda *a: (*made(*a)[:2], a[6])
    },
    "none in csr": {"row_sums": lambda made: made},
    "a sum a little off": {"row_sums": lambda made: lambda *a: made(*a) * 1.001},
    "another winner": {"maxima": lambda made: lambda *a: (made(*a)[0], made(*a)[1] + 1)},
    "no slope": {"pair_scores": lambda made: lambda *a: made(*a[:-1], 1.0)},
    "no gradient of the shares": {
        "attention_backward": lambda made: lambda *a: (0 * a[1], made(*a)[1])
    },
    "no backward": {"aggregate_backward": lambda made: raises},
}


def last_winner(made, x, y, graph, *rest):
    """Aggregate over the neighbours in the reverse order, and rename the winners."""
    out, winners = made(x, y, graph.flip(-1), *rest)
    return out, graph.shape[-1] - 1 - winners


def run():
    from tests.ops.test_gpu import mend_interpreter
    from vigpipe.ops import gpu
    from vigpipe.ops.csr import gpu as csr

    mend_interpreter()
    results = {}
    of_csr = ("row_sums", "maxima", "pair_scores", "attention_backward")
    modules = {name: csr for name in of_csr}
    modules |= {name: gpu for name in ("knn", "aggregate", "aggregate_backward")}
    intact = {name: getattr(module, name) for name, module in modules.items()}
    for fault, changes in FAULTS.items():
        self_check._problems.clear()
        for name, function in intact.items():
            setattr(modules[name], name, changes[name](function) if name in changes else function)
        with torch.inference_mode(), torch.autocast("cpu"):  # which must not reach the comparison
            (changed,) = changes
            name = "csr" if changed in of_csr else changed.removesuffix("_backward")
            results[fault] = self_check.problem(name, CPU)
    print(json.dumps(results))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_program(__file__, "run", tmp_path_factory.mktemp("triton"), TRITON_INTERPRET="1")


@pytest.mark.triton
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(found, fault):
    assert bool(found[fault]) == (not fault.startswith("none"))


@pytest.mark.triton
def test_the_sentence_says_what_differs(found):
    assert found["a bias that is not added"] == (
        "the Triton operator knn differs from plain torch (float32 with a bias) on cpu (cpu)"
    )
    assert found["no backward"] == (
        r"the Triton operator aggregate fails with RuntimeError: ptxas ended with\nan error on cpu "
        "(cpu)"
    )


@pytest.fixture
def calls(monkeypatch):
    """Pretend that there are GPUs; the comparisons made on them."""
    made = []

    def check(device):
        made.append(device)
        return "a case" if device.index == 1 else ""

    monkeypatch.setattr(ops, "_versions", {})
    monkeypatch.setattr(self_check, "_problems", {})
    monkeypatch.setattr(self_check, "_check_knn", check)
    monkeypatch.setattr(ops, "_can_compute", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: "H2" if device.index == 1 else "H1"
    )
    return made


def serving(index, is_fake=False):
    return ops._version("cuda", index, "knn", is_fake)


def test_each_kind_of_gpu_is_compared_once_and_has_its_own_version(calls, capsys):
    assert [serving(index) for index in (0, 0, 2, 1, 1)] == ["Triton", "Triton", "Triton", "", ""]
    assert calls == [torch.device("cuda", 0), torch.device("cuda", 1)]
    sentence = "the Triton operator knn differs from plain torch (a case) on cuda:1 (H2, sm_90)"
    assert capsys.readouterr().err == (
        f"vigpipe: {sentence}; the plain operators serve, which are slower\n"
    )


def test_the_doctor_says_what_was_found(calls):
    assert ops.versions("cuda:0")["knn"] == "Triton (equal to plain torch on H1, sm_90)"
    assert ops.versions("cuda:1")["knn"] == (
        "plain torch (the Triton operator knn differs from plain torch (a case) on cuda:1 (H2, "
        "sm_90))"
    )


def test_for_fake_tensors_the_comparison_is_put_off(calls):
    assert serving(1, is_fake=True) == "Triton"
    assert not calls
    assert serving(1) == ""


def test_nothing_is_computed_under_fake_tensors_or_while_a_cuda_graph_is_captured(monkeypatch):
    assert not ops._can_compute()  # no GPU
    is_capturing = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(is_capturing))
    mode = FakeTensorMode()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ops._can_compute()
    with mode:  # torch.export hides a fake tensor in another
        assert not ops._can_compute()
    is_capturing.append(True)
    assert not ops._can_compute()


def test_a_traced_call_takes_what_the_comparison_found(calls):
    served = []

    def traced(x):
        served.append(serving(1))
        return x + 1

    torch.compile(traced, backend="eager", fullgraph=True)(torch.zeros(1))
    assert served == [""]


def test_fake_cuda_tensors_run_the_fused_operators():
    with FakeTensorMode(), Called() as called:
        x = torch.empty(2, 12, 16, device="cuda", requires_grad=True)
        graph, found = ops.neighbours(x, None, None, 4, 2)
    assert graph.device.type == found.device.type == "cuda"
    assert {"vigpipe::knn", "vigpipe::aggregate"} <= set(called.names)


if __name__ == "__main__":
    run()

"""The variants in figures, against the published ones."""

import sys

import pytest

from tests.model.test_mobile import COUNTS
from tests.model.test_parity import PARAMETERS
from tests.world import run_command
from vigpipe.errors import InputError
from vigpipe.model.shapes import MOBILE_SHAPES, SHAPES
from vigpipe.model.table import figures, main


# Multiply-adds from the paper's tables 1 and 2 (arXiv:2206.00272), where they are called FLOPs and
# rounded to a tenth.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("vig_ti_224", 1.3),
        ("pvig_ti_224", 1.7),
        pytest.param("vig_s_224", 4.5, marks=pytest.mark.heavy),
        pytest.param("vig_b_224", 17.7, marks=pytest.mark.heavy),
        pytest.param("pvig_s_224", 4.6, marks=pytest.mark.heavy),
        pytest.param("pvig_m_224", 8.9, marks=pytest.mark.heavy),
        pytest.param("pvig_b_224", 16.8, marks=pytest.mark.heavy),
        # GMAC of the published code.
        ("mobilevig_ti", 0.662),
        ("mobilevigv2_s", 0.912),
        ("greedyvig_m", 3.114),
        ("adaptvig_b", 3.802),
    ],
)
def test_published_figures(name, billions):
    found = figures(name)
    of_mobile = name in MOBILE_SHAPES
    expected = COUNTS[name][0] if of_mobile else PARAMETERS[name]
    assert found.num_parameters == expected
    assert found.num_macs / 1e9 == pytest.approx(billions, abs=6e-4 if of_mobile else 0.1)


def test_figures_of_a_model_that_is_counted_by_hand():
    found = figures("vig_digits")
    assert (found.img_size, found.grid) == ((8, 8), (8, 8))
    assert (found.blocks, found.channels) == ((4,), (48,))
    n, c = 64, 48
    stem = n * 9 * (1 * 24 + 24 * 48)
    grapher = n * (c * c + 2 * c * 2 * c // 4 + 2 * c * c) + n * n * c
    ffn = n * 2 * c * 4 * c
    assert found.num_macs == stem + 4 * (grapher + ffn) + c * 1024 + 1024 * 10
    norms = [24, 48] + 4 * [c, 2 * c, c, 4 * c, c] + [1024]
    assert found.num_buffers == 2 * sum(norms) + len(norms)


def test_the_table_has_a_row_for_each_variant(capsys):
    main(["vig_digits", "pvig_cifar_ti", "greedyvig_s"])
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.split("|")[1].strip() == "variant"
    assert set(rule) <= set("|-:")
    assert [row.split("|")[1].strip() for row in rows] == [
        "`vig_digits`",
        "`pvig_cifar_ti`",
        "`greedyvig_s`",
    ]
    assert "192,122" in rows[0]
    assert "2+2, 2+2, 6+2, 2+2" in rows[2]


def test_an_unknown_variant_is_refused_in_one_sentence():
    with pytest.raises(InputError, match=f"vig_xl: .* {', '.join(SHAPES)}"):
        figures("vig_xl")
    done = run_command([sys.executable, "-m", "vigpipe.model.table", "vig_xl"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("vigpipe: vig_xl: no such variant")

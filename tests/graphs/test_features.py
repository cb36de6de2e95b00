from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.feature_extraction.text import TfidfTransformer

from tests.refusals import check_refusals
from vigpipe.graphs.features import WEIGHTS, as_text, fitted_weights, kept_weights, scaled

GENERATOR = np.random.default_rng(0)
DENSE = (GENERATOR.random((50, 7)) * (GENERATOR.random((50, 7)) < 0.4)).astype(np.float32)
DENSE[3] = 0
DENSE[:, 5] = 0
GIVEN = DENSE.copy()
SCALINGS: Any = "row", "tfidf"
BOTH = pytest.mark.parametrize("features", [DENSE, csr_array(DENSE)], ids=["dense", "sparse"])


def as_dense(features, like):
    assert type(features) is type(like)
    assert features.dtype == np.float32
    return features if isinstance(features, np.ndarray) else features.toarray()


@BOTH
def test_rows_are_divided_by_their_sums_and_rows_of_zeros_stay(features):
    expected = GIVEN / np.maximum(GIVEN.sum(axis=1, keepdims=True), 1e-9)
    found = as_dense(scaled(features, "row", "x"), features)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert not found[3].any()
    np.testing.assert_array_equal(as_dense(features, features), GIVEN)  # it is left alone
    assert scaled(features, "raw", "x") is features


@BOTH
def test_tfidf_is_scikit_learn_s(features):
    expected = TfidfTransformer().fit_transform(csr_array(DENSE.astype(np.float64))).toarray()  # pyrefly: ignore[missing-attribute]
    weights = fitted_weights(features, "x")
    found = as_dense(scaled(features, "tfidf", "x", weights), features)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@BOTH
def test_features_below_0_cannot_be_scaled(features):
    rows = [(way, f"^x: has features below 0 .* --features {way} cannot") for way in SCALINGS]
    check_refusals(rows, lambda scaling: scaled(features * np.float32(-1), scaling, "x"))


def test_the_weights_of_features_are_kept_to_the_bit_and_others_are_refused():
    weights, where = fitted_weights(DENSE, "x"), Path("w")
    text = as_text(weights)
    assert text is not None
    kept = kept_weights({"features": "tfidf", WEIGHTS: text}, where)
    assert kept is not None
    np.testing.assert_array_equal(kept, weights)
    assert kept_weights({"features": "row"}, where) is None
    assert as_text(None) is None
    rows: list[tuple[dict[str, str], str]] = [
        ({}, "^w: was trained with --features tfidf and does not keep the weights"),
        ({WEIGHTS: "?"}, "give feature_weights as \\?, expected numbers of 0 or more"),
        ({WEIGHTS: ""}, "give feature_weights as nothing"),
        ({WEIGHTS: text[:-3]}, "feature_weights"),
        ({WEIGHTS: as_text(weights * np.float32(np.nan)) or ""}, "feature_weights"),
    ]
    check_refusals(rows, lambda row: kept_weights({"features": "tfidf", **row}, where))
    broad = csr_array((1, (1 << 21) + 1), dtype=np.float32)
    words = "has 2,097,153 features, .*take --features row"
    check_refusals([(lambda: fitted_weights(broad, "x"), words)])

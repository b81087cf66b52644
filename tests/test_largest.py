"""The search for a row's largest numbers in C, held to a plain sort."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtplx import kernels
from mtplx.shaping import _largest

LIBRARY = kernels.find()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the kernels are not built")


def expected(row, k):
    """The k largest with all that tie, without -inf: columns in their order, by a plain sort."""
    k = min(max(k, 1), len(row))
    least = np.sort(row)[-k]
    return [i for i, x in enumerate(row) if x >= least and x > -np.inf]


def assert_found(rows, ks):
    values, columns = _largest(
        torch.tensor(rows, dtype=torch.float32), torch.tensor(ks)[:, None], max(ks), LIBRARY
    )
    wanted = [expected(np.float32(row), k) for row, k in zip(rows, ks, strict=True)]
    room = min(max(ks), len(rows[0]))
    assert values.shape == columns.shape == (len(rows), max(room, *map(len, wanted)))
    for row, own, got, at in zip(rows, wanted, values.tolist(), columns.tolist(), strict=True):
        beyond = len(got) - len(own)
        assert at == own + [len(row)] * beyond
        assert got == [np.float32(row[i]) for i in own] + [-np.inf] * beyond


values = st.sampled_from([-np.inf, -3.0, -0.0, 0.0, 1e-40, 1.0, 7.5, 3e38])


@pytest.mark.slow
@given(st.data(), st.integers(1, 300), st.integers(1, 3))
def test_the_largest_are_those_of_a_sort(data, width, count):
    """Few values, so that ties meet the last place; and widths that leave a part of a block."""
    row = st.lists(values, min_size=width, max_size=width)
    rows = data.draw(st.lists(row, min_size=count, max_size=count))
    ks = data.draw(st.lists(st.integers(1, 310), min_size=count, max_size=count))
    assert_found(rows, ks)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 128, 1000, 49_152])
@pytest.mark.parametrize("k", [1, 2, 20, 100])
def test_they_are_found_wherever_they_lie(width, k):
    rng = np.random.default_rng(width + k)
    rows = rng.normal(size=(4, width))
    rows[1].sort()
    rows[2] = np.sort(rows[2])[::-1]
    rows[3] = rows[3].round(1)
    assert_found(rows.tolist(), [k, k, 1, k])


def test_many_rows_are_searched_side_by_side():
    rng = np.random.default_rng(0)
    ks = rng.integers(0, 40, size=50).tolist()
    assert_found(rng.normal(size=(50, 777)).round(2).tolist(), ks)


def test_a_row_with_what_is_no_number_has_nothing_to_find():
    rows = np.random.default_rng(1).normal(size=(3, 100))
    for row, column in ((0, 99), (2, 3)):
        rows[row, column] = np.nan
    values, columns = _largest(
        torch.tensor(rows).float(), torch.tensor([[2], [3], [5]]), 5, LIBRARY
    )
    assert columns[[0, 2]].tolist() == [[100] * 5] * 2
    assert columns[1, :3].tolist() == expected(rows[1], 3)
    assert not values.isnan().any()


@given(st.data(), st.integers(1, 200))
def test_torch_finds_the_same(data, width):
    row = data.draw(st.lists(values, min_size=width, max_size=width))
    k = data.draw(st.integers(1, 210))
    got, columns = _largest(torch.tensor([row]).float(), torch.tensor([[k]]), k, None)
    found = columns[got > -torch.inf]
    assert found.tolist() == expected(np.float32(row), k)

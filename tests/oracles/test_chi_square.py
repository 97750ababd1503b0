"""The chi-square test that other tests rely on, against tables and by hand."""

import math

import pytest

from tests.oracles.chi_square import chi_square, chi_square_bound


def test_the_bound_is_that_of_the_tables():
    for freedom, p, value in ((1, 1e-3, 10.828), (10, 1e-3, 29.588), (100, 1e-3, 149.449), (30, 1e-6, 82.3)):
        assert chi_square_bound(freedom, p) == pytest.approx(value, rel=0.04)
    assert chi_square_bound(10, 0.01) == pytest.approx(23.209, rel=0.002)
    assert chi_square_bound(100, 0.01) == pytest.approx(135.807, rel=0.002)


def test_the_statistic_is_the_sum_worked_by_hand():
    statistic, bound = chi_square(dict(a=60, b=40), dict(a=0.5, b=0.5))
    assert statistic == pytest.approx(4.0) and bound == chi_square_bound(1)
    # 2 and 4 expected: pooled to 6, of which 9 came.
    statistic, bound = chi_square(dict(a=91, b=5, c=4), dict(a=0.94, b=0.04, c=0.02))
    assert statistic == pytest.approx(9 / 94 + 9 / 6) and bound == chi_square_bound(1)
    assert chi_square(dict(a=99, x=1), dict(a=1.0))[0] == math.inf

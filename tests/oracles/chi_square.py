"""The chi-square test: do counts follow given probabilities?"""

import math
from statistics import NormalDist

import numpy as np

P_FALSE_ALARM = 1e-6  # of each test; the seeds are fixed, so a test that passes once always does


def chi_square_bound(freedom, p=P_FALSE_ALARM):
    """The value that a chi-square variable exceeds with probability p (Wilson and Hilferty 1931)."""
    z = NormalDist().inv_cdf(1 - p)
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts, expected):
    """(statistic, bound) of counts against expected probabilities, both mappings from outcomes.

    Cells in which fewer than 5 are expected are pooled, with the next larger one if that is still too few.
    """
    n = sum(counts.values())
    if any(expected.get(outcome, 0) == 0 for outcome, count in counts.items() if count):
        return math.inf, 0.0  # what cannot happen has happened
    cells = sorted((n * p, counts.get(outcome, 0)) for outcome, p in expected.items() if p > 0)
    while len(cells) > 1 and cells[0][0] < 5:
        (e0, c0), (e1, c1), *rest = cells
        cells = sorted([(e0 + e1, c0 + c1), *rest])
    if len(cells) == 1:
        return 0.0, 1.0
    return sum((c - e) ** 2 / e for e, c in cells), chi_square_bound(len(cells) - 1)


def assert_follows(counts, expected):
    """Assert that counts, a mapping from outcomes, do not differ from these probabilities by more than chance."""
    statistic, bound = chi_square(counts, expected)
    assert statistic < bound, (statistic, bound)


def assert_frequencies(draws, p):
    """The same for draws, whole numbers from 0 on, and the probability p of each."""
    assert_follows(dict(enumerate(np.bincount(draws, minlength=len(p)).tolist())), dict(enumerate(p)))

"""How options are checked: one sentence that names the option, its value and what is allowed."""

import math

import numpy as np


def require(ok, name, value, allowed):
    """Raise ValueError unless `ok`: "<name> is <value>; it must be <allowed>"."""
    if not ok:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


def is_int(value, least=-math.inf):
    """Whether `value` is a whole number, Python's or NumPy's but not a bool, of at least `least`."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= least


def is_number(value):
    """Whether `value` is a finite real number, but not a bool."""
    return (
        isinstance(value, int | float | np.integer | np.floating)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )

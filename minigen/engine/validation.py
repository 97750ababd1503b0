"""Input validation: one sentence that names the value, and what is allowed."""

import math

import numpy as np


def shorten(text):
    """A text for a message: on one line; a long text is cut to its beginning and its end."""
    text = " ".join(text.splitlines())
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"


def short_repr(value):
    """`repr` of a value for a message."""
    return shorten(repr(value))


def require(ok, name, value, allowed):
    """Raise ValueError unless `ok`: "<name> is <value>; it must be <allowed>"."""
    if not ok:
        raise ValueError(f"{name} is {short_repr(value)}; it must be {allowed}")


def is_int(value, min_value=-math.inf):
    """Whether `value` is a whole number of at least `min_value`: Python's or NumPy's, but not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= min_value


def is_number(value):
    """Whether `value` is a finite real number that fits a float, but not a bool."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False

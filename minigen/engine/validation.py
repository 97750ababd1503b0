"""How options are checked: one sentence that names the option, its value and what is allowed."""

import math
from dataclasses import fields

import numpy as np


def shorten(text):
    """A text for a sentence: on one line, and of a long one the two ends."""
    text = " ".join(text.splitlines())
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"


def short_repr(value):
    """`repr` of a value for a sentence."""
    return shorten(repr(value))


def require(ok, name, value, allowed):
    """Raise ValueError unless `ok`: "<name> is <value>; it must be <allowed>"."""
    if not ok:
        raise ValueError(f"{name} is {short_repr(value)}; it must be {allowed}")


def is_int(value, least=-math.inf):
    """Whether `value` is a whole number, Python's or NumPy's but not a bool, of at least `least`."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= least


def is_number(value):
    """Whether `value` is a finite real number that a float can hold, but not a bool."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of more than 308 digits
        return False


def to_python_numbers(config):
    """Make Python numbers of the NumPy scalars in a frozen dataclass: they do not overflow where a uint8 would."""
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, np.integer | np.floating):
            object.__setattr__(config, field.name, value.item())

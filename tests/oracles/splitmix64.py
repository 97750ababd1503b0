"""The published SplitMix64 generator in Python's whole numbers, and the numbers that the sampler takes from it."""

import numpy as np

MASK = 2**64 - 1
SHIFTS, FACTORS = (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 1)


def splitmix64(state, n):
    """The first n outputs."""
    outputs = []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        for shift, factor in zip(SHIFTS, FACTORS, strict=True):
            z = (z ^ (z >> shift)) * factor & MASK
        outputs.append(z)
    return outputs


def uniforms(n, *place):
    """Numbers between 0 and 1 of tokens 0 to n - 1; place: seed, number of the row, position, stream."""
    (state,) = np.random.SeedSequence(place).generate_state(1, np.uint64)
    return [((output >> 12) + 0.5) / 2**52 for output in splitmix64(int(state), n)]

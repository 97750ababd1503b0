"""minigen: GPT-2 inference from scratch in NumPy."""

import os

# OpenBLAS's threads spin for 2**26 ticks of the clock after each product, a tenth of a second in which the next layer
# needs their cores; with this, they sleep after 2**4. OpenBLAS looks when NumPy is imported, which should therefore not
# come before minigen: the 124M shape then takes 690 ms for a prompt of 512 tokens instead of 930, and 30 ms for each of
# the first tokens after it instead of 55.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

__version__ = "0.1.0"
__all__ = [
    "GPT2",
    "BeamConfig",
    "Completion",
    "DecodingConfig",
    "GPT2Config",
    "History",
    "KVCache",
    "PrefixCache",
    "SamplingConfig",
    "Score",
    "Session",
    "SpeculationConfig",
    "Step",
    "Tokenizer",
    "draw",
    "generate",
    "load",
    "next_token_probs",
    "probs",
    "sample_token",
    "score",
    "stream",
    "trace",
]


def __getattr__(name):
    """Imports all public names when the first is asked for: `__main__` has its say on Ctrl-C before NumPy's import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from minigen.api import generate, load, stream
    from minigen.engine.cache import KVCache
    from minigen.engine.decode import PrefixCache
    from minigen.engine.model import GPT2, GPT2Config
    from minigen.engine.sampler import History, next_token_probs, sample_token
    from minigen.options import BeamConfig, DecodingConfig, SamplingConfig, SpeculationConfig
    from minigen.results import Completion, Step
    from minigen.scoring import Score, score
    from minigen.session import Session
    from minigen.text.tokenizer import Tokenizer
    from minigen.tracing.recorder import trace

    probs, draw = next_token_probs, sample_token  # their earlier names
    globals().update({key: value for key, value in locals().items() if key in __all__})
    return globals()[name]


def __dir__():
    return sorted({*globals(), *__all__})

"""minigen: GPT-2 inference from scratch in NumPy."""

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
    "probs",
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
    from minigen.engine.decode import Completion, PrefixCache, Step
    from minigen.engine.model import GPT2, GPT2Config
    from minigen.engine.sampler import History, draw, probs
    from minigen.options import BeamConfig, DecodingConfig, SamplingConfig, SpeculationConfig
    from minigen.scoring import Score, score
    from minigen.session import Session
    from minigen.text.tokenizer import Tokenizer
    from minigen.tracing.recorder import trace

    globals().update({key: value for key, value in locals().items() if key in __all__})
    return globals()[name]


def __dir__():
    return sorted({*globals(), *__all__})

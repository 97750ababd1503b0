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
    "Noise",
    "PrefixCache",
    "SamplingConfig",
    "Session",
    "SpeculationConfig",
    "Step",
    "TextScore",
    "Tokenizer",
    "generate",
    "load",
    "next_token_probs",
    "sample_token",
    "score",
    "stream",
    "trace",
]
# Earlier names, which users may have written down.
ALIASES = {"Score": "TextScore", "probs": "next_token_probs", "draw": "sample_token"}

TYPE_CHECKING = False  # importing it from typing would take 9 ms, in which Ctrl-C prints a traceback
if TYPE_CHECKING:  # for editors and type checkers; at run time `__getattr__` imports them
    from minigen.api import generate, load, stream
    from minigen.engine.cache import KVCache
    from minigen.engine.decode import PrefixCache
    from minigen.engine.model import GPT2, GPT2Config
    from minigen.engine.sampler import History, Noise, next_token_probs, sample_token
    from minigen.options import BeamConfig, DecodingConfig, SamplingConfig, SpeculationConfig
    from minigen.results import Completion, Step
    from minigen.scoring import TextScore, score
    from minigen.session import Session
    from minigen.text.tokenizer import Tokenizer
    from minigen.tracing.page import trace

_MODULES = (
    "api engine.cache engine.decode engine.model engine.sampler options results scoring session text.tokenizer "
    "tracing.page"
).split()


def __getattr__(name):
    """Import all public names when the first one is used, so that `__main__` can handle Ctrl-C before NumPy loads."""
    from importlib import import_module

    if name not in __all__ and name not in ALIASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in map(import_module, (f"minigen.{module}" for module in _MODULES)):
        globals().update({public: value for public, value in vars(module).items() if public in __all__})
    globals().update({alias: globals()[public] for alias, public in ALIASES.items()})
    return globals()[name]


def __dir__():
    return sorted({*globals(), *__all__, *ALIASES})

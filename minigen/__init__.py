"""minigen: GPT-2 inference from scratch in NumPy."""

from minigen.api import generate, load, stream
from minigen.cache import KVCache
from minigen.decode import Completion, DecodingConfig, Step
from minigen.model import GPT2, GPT2Config
from minigen.sampler import SamplingConfig
from minigen.tokenizer import Tokenizer

__version__ = "0.1.0"
__all__ = [
    "GPT2",
    "Completion",
    "DecodingConfig",
    "GPT2Config",
    "KVCache",
    "SamplingConfig",
    "Step",
    "Tokenizer",
    "generate",
    "load",
    "stream",
]

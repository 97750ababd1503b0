"""minigen: GPT-2 inference from scratch in NumPy."""

from minigen.api import generate, load, stream
from minigen.beam import BeamConfig
from minigen.cache import KVCache
from minigen.decode import Completion, DecodingConfig, Step
from minigen.model import GPT2, GPT2Config
from minigen.sampler import History, SamplingConfig, draw, probs
from minigen.speculative import SpeculationConfig
from minigen.tokenizer import Tokenizer

__version__ = "0.1.0"
__all__ = [
    "GPT2",
    "BeamConfig",
    "Completion",
    "DecodingConfig",
    "GPT2Config",
    "History",
    "KVCache",
    "SamplingConfig",
    "SpeculationConfig",
    "Step",
    "Tokenizer",
    "draw",
    "generate",
    "load",
    "probs",
    "stream",
]

"""Each fault that users of such engines have reported has a test that names it.

The tests are where their subject is; the docstring of each begins with the number of its fault, or several:
"L07: ...", "L13, L14: ...".
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FAULTS = {
    "L01": "names with or without the prefix `transformer.`",
    "L02": "mask buffers in the file",
    "L03": "no lm_head.weight",
    "L05": "an untied head ignored, or a tied one taken from the wrong place",
    "L06": "matrices stored the other way round",
    "L07": "bfloat16, float16 and other dtypes",
    "L09": "files cut off, or with bytes behind their end",
    "L10": "offsets that lie",
    "L12": "missing tensors, and other architectures",
    "L13": "activation functions",
    "L14": "flags that scale attention",
    "L16": "float16 and the constants of masks",
    "T01": "half characters in a stream",
    "T03": "<|endoftext|> in the prompt",
    "T04": "bytes that are not UTF-8, lone surrogates",
    "T07": "decoding that is not the inverse of encoding",
    "T08": "the space at the end of a prompt",
    "T09": "vocab.json and merges.txt read almost right",
    "T11": "stop strings across the borders of tokens",
    "T12": "end of text printed, ignored, or the wrong id",
    "S01": "temperature 0",
    "S03": "the token that crosses top_p",
    "S04": "top_k out of range",
    "S06": "a repetition penalty on negative logits",
    "S08": "the order of temperature and truncation",
    "S09": "min_p measured on the wrong thing",
    "S10": "random numbers that repeat, or do not",
    "S12": "no new tokens, or too few",
    "K01": "positions of cached steps",
    "K03": "the wrong row of the logits",
    "K05": "sliding past the limit of learned positions",
    "K06": "the border of the ring",
    "K07": "garbage in slots that were never written",
    "K08": "a prompt longer than the context",
    "B01": "the prompt's length in the length penalty",
    "B02": "what a length penalty means",
    "B04": "all beams the same, end of text within a beam",
    "B05": "a cache that is not reordered",
    "X01": "a draw from p instead of the residual",
    "X02": "a draft that is scored by another distribution than it was drawn from",
    "X04": "caches rolled back by the wrong amount",
    "X07": "vocabularies that differ",
    "C01": "offline with a good cache",
    "C03": "no symbolic links",
    "C04": "an expired token",
    "C05": "a tokenizer that needs the network",
    "C07": "line breaks, byte order marks and CRLF in prompts",
    "C08": "closed pipes, Ctrl-C, weights that are not safetensors",
    "F01": "a special token spelled as a vocabulary byte",
    "F02": "added tokens that one file alone knows",
    "F03": "settings of tokenizer.json and tokenizer_config.json",
    "F04": "begin- and end-of-text ids outside the vocabulary",
    "F05": "generation_config.json's begin-of-text id",
    "F06": "names of sizes in other architectures",
    "F07": "prefixes of wrappers",
    "F08": "an index and shards that disagree",
    "F09": "no merges next to a whole vocabulary",
    "F10": "huge token ids",
    "F11": "output that is lost with exit code 0",
    "F12": "files in UTF-16",
    "F13": "a pipe that does not block",
    "F14": "a prompt cache that trusts edited matrices",
    "F16": "infinity in JSON",
    "F17": "sentences that name the wrong thing",
    "F18": "rare command lines, streams and files",
    "F19": "a caller's objects that are shared",
    "F20": "NumPy scalars as options",
    "F21": "ties in log-probabilities",
    "F22": "top_p close to 1",
    "F23": "numbers at the edges of the sampler",
    "F24": "trace pages that throw",
    "F25": "an incomplete download that is trusted",
    "F26": "a Git LFS pointer in place of weights",
    "F27": "a draft that equals the model, cold and warm",
    "F28": "a damaged download that keeps its name",
}


def named_faults(source):
    """The numbers at the beginning of the docstrings of a file's tests."""
    tests = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    found = set()
    for test in tests:
        match = re.match(
            r"((?:[A-Z]\d\d, )*[A-Z]\d\d): \S", (test.name[:5] == "test_" and ast.get_docstring(test)) or ""
        )
        found |= set(match[1].split(", ")) if match else set()
    return found


NAMED = set().union(*(named_faults(path.read_text(encoding="utf-8")) for path in TESTS.glob("*/test_*.py")))


@pytest.mark.parametrize("number", FAULTS)
def test_each_fault_has_a_test(number):
    assert number in NAMED, FAULTS[number]


def test_no_test_names_a_fault_that_is_not_listed():
    assert NAMED <= set(FAULTS)


def test_what_counts_as_naming():
    source = (
        'def test_a():\n    """L07, L09: b."""\ndef helper():\n    """L01: b."""\ndef test_b():\n    """On L02: b."""\n'
    )
    assert named_faults(source) == {"L07", "L09"}

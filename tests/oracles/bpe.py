"""Byte-level BPE by its definition, slow and plain, and small vocabularies. Nothing here imports minigen."""

import itertools
import re
import unicodedata
from collections import Counter

from tests.golden import nasty_strings

END = "<|endoftext|>"


def byte_symbols():
    """byte -> the character that stands for it: itself on 33-126, 161-172 and 174-255, the other 68 from U+0100 on."""
    symbols, spare = {}, 0x100
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            symbols[byte] = chr(byte)
        else:
            symbols[byte] = chr(spare)
            spare += 1
    assert spare == 0x100 + 68
    return symbols


SYMBOLS = byte_symbols()


def bytes_vocab():
    """A vocabulary of the 256 bytes, each with its value as its id, and end-of-text: 257 ids."""
    return {symbol: byte for byte, symbol in SYMBOLS.items()} | {END: 256}


def slow_pieces(text):
    """GPT-2's pieces of a text: contractions, words, numbers, signs (a space before them included), white space."""
    contraction = re.compile("'(s|t|re|ve|m|ll|d)")
    piece = re.compile("_?L+|_?N+|_?o+|[_s]+(?![LNo])|[_s]+")  # over one letter for the kind of each character

    def kind(c):
        if c in nasty_strings.WHITE_SPACE:
            return "_" if c == " " else "s"
        category = unicodedata.category(c)[0]
        return category if category in "LN" else "o"

    kinds = "".join(map(kind, text))
    pieces, start = [], 0
    while start < len(text):
        match = contraction.match(text, start) or piece.match(kinds, start)
        pieces.append(text[start : match.end()])
        start = match.end()
    return pieces


def slow_encode(text, vocab, merges):
    """Ids by the definition: in every piece, merge the pair that stands first in merges.txt until none is left."""
    order = {tuple(line.split(" ")): rank for rank, line in enumerate(merges)}
    ids = []
    for piece in slow_pieces(text):
        parts = [SYMBOLS[byte] for byte in piece.encode("utf-8")]
        while True:
            ranked = [(order[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in order]
            if not ranked:
                break
            i = min(ranked)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [vocab[part] for part in parts]
    return ids


def train_merges(texts, count):
    """`count` merges learned the usual way, the most frequent pair first, as lines of merges.txt."""
    words = [[SYMBOLS[byte] for byte in piece.encode()] for text in texts for piece in slow_pieces(text)]
    merges = []
    for _ in range(count):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(" ".join(best))
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [word[i] + word[i + 1]]
                i += 1
    return merges


def tokenizer_json(vocab, merges, added=()):
    """What transformers writes, in its order, less what says nothing."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "added_tokens": [{"id": number, "content": name} | flags for name, number in added],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": merges},
    }

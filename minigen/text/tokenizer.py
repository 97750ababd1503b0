"""Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019): text to ids and back.

The BPE merges are done by tiktoken, configured from the checkpoint's own files, which `tokenizer_files` reads. Those
spell each byte as a printable character: `BYTE_TO_CHAR`.
"""

import re
import unicodedata
import warnings
from operator import itemgetter

import numpy as np
import tiktoken

from minigen.engine.validation import short_repr
from minigen.files.tokenizer_files import errors_name, read_tokenizer

# GPT-2's pre-tokenization; merges stay within its pieces: contractions, words, numbers, symbols, white space. A space
# belongs to the word after it.
SPLIT_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Texts that it leaves in one piece.
ONE_PIECE = re.compile(r" ?(?:[^\W\d_]+|\d+|[^\w\s]+)|\s+")
# Unicode's white space; Python's own definition has four more.
WHITE_SPACE = set("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000").union(map(chr, range(0x2000, 0x200B)))


def bytes_to_unicode():
    """byte -> character: printable Latin-1 stands for itself, the other 68 bytes for U+0100, U+0101 ... in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_TO_CHAR = bytes_to_unicode()
BYTE_CHARS = set(BYTE_TO_CHAR.values())
_BYTE_OF_UTF16 = np.full(2**16, -1, np.int16)
_BYTE_OF_UTF16[[ord(char) for char in BYTE_TO_CHAR.values()]] = list(BYTE_TO_CHAR)


def _to_bytes(tokens):
    """The bytes that each token spells; for all tokens at once, without a Python loop over their characters."""
    if not tokens:
        return []
    joined = "\n".join(tokens)  # a line break spells no byte
    values = _BYTE_OF_UTF16[np.frombuffer(joined.encode("utf-16-le", "surrogatepass"), np.uint16)]
    breaks = np.flatnonzero(values < 0)
    if len(breaks) != len(tokens) - 1 or joined.count("\n") != len(breaks):
        wrong = next(token for token in tokens if not BYTE_CHARS.issuperset(token))
        raise ValueError(f"the token {short_repr(wrong)} has a character that stands for no byte")
    data, ends = values.astype(np.uint8).tobytes(), [*breaks.tolist(), len(values)]
    return [data[start:end] for start, end in zip([0, *(breaks + 1).tolist()], ends, strict=True)]


def _check_merges(pairs, tokens):
    """Raise ValueError for merges that tiktoken would apply differently from BPE.

    pairs: int [n, 2]; merge i joins the tokens pairs[i] into token 256 + i; tokens 0 to 255 are the bytes. BPE merges
    the listed pairs, tiktoken any two tokens whose bytes together are a token. BPE and tiktoken agree if BPE makes each
    token from its own bytes. That holds for all merges that training writes, but not, for example, for two lists put
    together.
    """

    def refuse(merge, why):
        left, right = (short_repr(tokens[token]) for token in pairs[merge])
        raise ValueError(f"the merge of {left} and {right} {why}")

    n = len(tokens)
    for merge in np.flatnonzero((pairs >= np.arange(256, n)[:, None]).any(1)):
        refuse(merge, "comes before the merges that create them")
    # Does an earlier merge join the end of the left token to the beginning of the right one? Follow the border down
    # both tokens, always into the one that was made later; all merges at once.
    lefts, rights = (np.concatenate([np.arange(256), side]) for side in pairs.T)
    keys = pairs[:, 0] * n + pairs[:, 1]
    order = np.argsort(keys)
    keys = keys[order]
    merge, (a, b) = np.arange(len(pairs)), pairs.T
    while True:
        into_a = (a > b) & (a > 255)
        into_b = ~into_a & (b > 255)
        # If a and b are the same token, the merge that made it can also join parts of both, so it counts as well.
        limit = np.where(into_a, a, b + 1)
        a, b = np.where(into_a, rights[a], a), np.where(into_b, lefts[b], b)
        merge, limit, a, b = (array[into_a | into_b] for array in (merge, limit, a, b))
        if not len(merge):
            return
        found = np.searchsorted(keys, a * n + b) % len(keys)
        for wrong in merge[(keys[found] == a * n + b) & (256 + order[found] < limit)]:
            refuse(wrong, "is never reached: an earlier merge splits them")


def _rank_tokens(vocab, merges):
    """(tokens, their ids): the bytes and the products of the merges, in the order in which BPE prefers them."""
    lines = merges.split("\n") if merges else []
    characters = np.frombuffer(merges.encode("utf-8", "surrogatepass"), np.uint8)
    separators = characters[(characters == ord(" ")) | (characters == ord("\n"))]
    if not np.array_equal(separators, np.resize([ord(" "), ord("\n")], max(2 * len(lines) - 1, 0))):
        wrong = next(line for line in lines if line.count(" ") != 1)
        raise ValueError(f"the merge {short_repr(wrong)} is not two tokens with a space between them")
    if not vocab.keys() >= BYTE_CHARS:
        raise ValueError(f"the vocabulary has only {len(BYTE_CHARS & vocab.keys())} of the 256 bytes")
    tokens = [*BYTE_TO_CHAR.values(), *(merges.replace(" ", "").split("\n") if merges else ())]
    ranks = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ranks) < len(tokens):
        twice = next(token for rank, token in enumerate(tokens) if ranks[token] != rank)
        raise ValueError(f"two merges make the token {short_repr(twice)}")
    try:
        ids = itemgetter(*tokens)(vocab)
        parts = merges.replace("\n", " ").split(" ") if merges else []
        pairs = np.fromiter(map(ranks.__getitem__, parts), np.int64, len(parts))
    except KeyError as error:
        raise ValueError(f"a merge has or makes {short_repr(error.args[0])}, which is not a token") from error
    _check_merges(pairs.reshape(-1, 2), tokens)
    return tokens, ids


def _is_word(character):
    r"""Whether the character is part of a word, \w as Unicode defines it; false for an empty string."""
    category = unicodedata.category(character) if character else ""
    return category[:1] in ("L", "M") or category in ("Nd", "Nl", "Pc") or character in ("\u200c", "\u200d")


class Tokenizer:
    """Encodes and decodes with one checkpoint's vocabulary.

    vocab: token -> id, as vocab.json spells it; merges: the lines of merges.txt as one text; added: `AddedToken`s;
    vocab_size: the number of ids that the model has, some of which may have no token; add_prefix_space: whether a text
    gets a space before it if it has none; ids_before: ids that begin every text.
    """

    def __init__(self, vocab, merges, added=(), vocab_size=None, add_prefix_space=False, ids_before=()):
        tokens, self._id_of_rank = _rank_tokens(vocab, merges)
        if len(set(vocab.values())) < len(vocab):
            token_of = {}
            a, b = next((token_of[i], token) for token, i in vocab.items() if token_of.setdefault(i, token) != token)
            raise ValueError(f"the tokens {short_repr(a)} and {short_repr(b)} have the same id, {vocab[a]}")
        self.added = {token.content: token for token in added}
        self.add_prefix_space, self.ids_before = add_prefix_space, list(ids_before)

        # tiktoken merges by rank and calls the ranks ids. A checkpoint may number its tokens in another order than that
        # of its merges, so its ids are looked up by rank.
        spelled = _to_bytes(tokens)
        ranks = dict(zip(spelled, range(len(spelled)), strict=True))
        self._encoding = tiktoken.Encoding(
            "checkpoint", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )

        self.bytes_of = dict(zip(self._id_of_rank, spelled, strict=True))
        unmade = [token for token, id in vocab.items() if id not in self.bytes_of and token not in self.added]
        self.bytes_of.update(zip([vocab[token] for token in unmade], _to_bytes(unmade), strict=True))
        for content, token in self.added.items():
            spells_bytes = content in vocab and BYTE_CHARS.issuperset(content)
            self.bytes_of[token.id] = _to_bytes([content])[0] if spells_bytes else content.encode()
        self.n_vocab = max(vocab_size or 0, max(self.bytes_of) + 1)
        # A token that lies within one piece of a text can only come from merges.
        lost = [token for token in unmade if ONE_PIECE.fullmatch(self.bytes_of[vocab[token]].decode(errors="replace"))]
        if lost:
            what = f"no merge makes {len(lost)} tokens of the vocabulary, {short_repr(lost[0])} for example"
            if len(lost) > len(tokens) - 256:
                raise ValueError(f"{what}: the merges are incomplete")
            warnings.warn(f"{what}: no text is encoded to them", stacklevel=2)

        # Of added tokens that begin at the same place the longest is found, as in the tokenizers library.
        longest_first = sorted(added, key=lambda token: -len(token.content))
        groups = [[t.content for t in longest_first if t.normalized == later] for later in (False, True)]
        self._patterns = [re.compile("|".join(map(re.escape, contents))) for contents in groups if contents]

    @classmethod
    def from_folder(cls, folder, vocab_size=None):
        """Read the tokenizer of a checkpoint's folder. Raises OSError or ValueError, naming the file."""
        files, arguments = read_tokenizer(folder)
        with errors_name(files):
            return cls(**arguments, vocab_size=vocab_size)

    def __repr__(self):
        special = ", ".join(f"{token.content!r}: {token.id}" for token in self.added.values())
        return f"Tokenizer({self.n_vocab} ids, {len(self._id_of_rank) - 256} merges, special tokens {{{special}}})"

    @property
    def special_ids(self):
        """token -> id of the tokens that a text is searched for before BPE."""
        return {token.content: token.id for token in self.added.values()}

    def first_difference(self, other):
        """The smallest id that stands for different bytes in the two tokenizers; None if there is none."""
        if self.bytes_of == other.bytes_of:
            return None
        both = self.bytes_of.keys() & other.bytes_of.keys()
        return min((id for id in both if self.bytes_of[id] != other.bytes_of[id]), default=None)

    def _split_by(self, pattern, text):
        """The ids of the added tokens that the pattern finds, and the texts between them, in order."""
        parts, start = [], 0
        for match in pattern.finditer(text):
            token, (begin, end) = self.added[match[0]], match.span()
            if token.single_word and (_is_word(text[begin - 1 : begin]) or _is_word(text[end : end + 1])):
                continue
            while token.lstrip and begin > start and text[begin - 1] in WHITE_SPACE:
                begin -= 1
            while token.rstrip and end < len(text) and text[end] in WHITE_SPACE:
                end += 1
            parts += [text[start:begin], token.id]
            start = end
        return [*parts, text[start:]]

    def encode(self, text, add_special_tokens=True):
        """Text -> list of ids. Special tokens spelled out in the text, such as <|endoftext|>, become their ids.

        add_special_tokens: false leaves out the ids that begin every text; most tokenizers have none.
        Raises ValueError if a run of white space is too long for the splitting pattern (a million characters).
        """
        # Two surrogates that are a pair become their character; one that stands alone becomes U+FFFD.
        parts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")]
        for pattern in self._patterns:
            split = [self._split_by(pattern, part) if isinstance(part, str) else [part] for part in parts]
            parts = [part for whole in split for part in whole]
        ids = self.ids_before.copy() if add_special_tokens else []
        for part in parts:
            if not isinstance(part, str):
                ids.append(part)
            elif part:
                space = " " if self.add_prefix_space and part[0] != " " else ""
                ids += [self._id_of_rank[rank] for rank in self._encoding.encode(space + part, disallowed_special=())]
        return ids

    def token_bytes(self, id):
        """The bytes of one token; none for an id that pads the model's vocabulary. Raises ValueError for others."""
        if not 0 <= id < self.n_vocab:
            raise ValueError(f"token id {id} is outside the vocabulary, 0 to {self.n_vocab - 1}")
        return self.bytes_of.get(id, b"")

    def decode(self, ids):
        """Ids -> text. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

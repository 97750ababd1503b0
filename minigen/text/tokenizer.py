"""Text to ids and back: byte-level BPE (Sennrich et al. 2016; Radford et al. 2019), and the two ends of a stream.

tiktoken does the merging, from the checkpoint's own files. vocab.json and merges.txt spell each byte as a printable
character, `_to_bytes` undoes that. A token need not be whole characters: `IncrementalUtf8Decoder` turns a stream of
tokens' bytes into text without ever showing half a character, and `StopMatcher` finds stop strings across
the tokens' borders.
"""

import re
from contextlib import contextmanager
from pathlib import Path

import tiktoken

from minigen.engine.validation import is_int, short_repr
from minigen.files.checkpoint import read_json

# How GPT-2 cuts text into the pieces within which it merges: contractions, words, numbers, signs, white space; a
# space belongs to the word after it.
SPLIT_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END_OF_TEXT = "<|endoftext|>"


def bytes_to_unicode():
    """byte -> character: printable Latin-1 stands for itself, the other 68 bytes for U+0100, U+0101 ... in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_TO_CHAR = bytes_to_unicode()
# For str.translate, character -> Latin-1 character of the byte; Latin-1 that spells no byte must not pass for one.
_CHAR_TO_BYTE = {byte: "\uffff" for byte in range(256)} | {
    ord(spelling): byte for byte, spelling in BYTE_TO_CHAR.items()
}


def _to_bytes(token):
    """The bytes that vocab.json or merges.txt spell as `token`. Raises ValueError for any other character."""
    return token.translate(_CHAR_TO_BYTE).encode("latin-1")


# ---------------------------------------------------------------------------------------- reading the files


@contextmanager
def _errors_name(path):
    """Turns whatever a malformed file causes into one ValueError that names the file."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if str(path) in str(error):
            raise
        what = error if isinstance(error, ValueError) else short_repr(error)  # a KeyError's text is but the key
        raise ValueError(f"{path} is not a usable part of a GPT-2 tokenizer: {what}") from error


def _validate_ids(ids):
    """A mapping token -> id, after a look at its ids."""
    for token, id in ids.items():
        if not token or not is_int(id, 0):
            raise ValueError(f"token {short_repr(token)} has the id {short_repr(id)}")
    return ids


def _validate_merges(pairs, vocab):
    """Pairs of tokens from pairs or from "left right" lines, after a look at what they make.

    BPE merges pairs, tiktoken whatever two tokens together are the product of a merge. These are the same where each
    product can be made of its own bytes, as all can that training writes: when the turn of its merge comes, its bytes
    are then the two tokens of the pair, and no other two. So that is checked.
    """
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in pairs]
    # Bytes and products are numbered in the order in which they come to be, which makes later a matter of `<`.
    number = {spelling: byte for byte, spelling in BYTE_TO_CHAR.items()}
    parts, made = [(byte, byte) for byte in range(256)], {}
    for left, right in merges:
        product = left + right
        if product not in vocab:
            raise ValueError(f"a merge makes {short_repr(product)}, which is no token of the vocabulary")
        if product in number:
            raise ValueError(f"two merges make the token {short_repr(product)}")
        if left not in number or right not in number:
            raise ValueError(
                f"the merge of {short_repr(left)} and {short_repr(right)} comes before those that make them"
            )
        a, b, limit = number[left], number[right], len(parts)
        number[product] = limit
        parts.append((a, b))
        made[a, b] = limit
        # Does an earlier merge join the end of `left` to the beginning of `right`? Take apart what was made later.
        while made.get((a, b), limit) >= limit:
            if a > b and a > 255:
                a, limit = parts[a][1], a
            elif b > 255:
                b, limit = parts[b][0], b + 1  # where both are equal, the left one may be made of parts of both
            else:
                break
        else:
            raise ValueError(
                f"the merge of {short_repr(left)} and {short_repr(right)} is never made: an earlier one splits them"
            )
    return merges


def _read_bpe(folder):
    """(file, vocabulary, merges, added tokens) from vocab.json and merges.txt or else from tokenizer.json."""
    vocab_path, merges_path, added_path, tokenizer_path = (
        folder / name for name in ("vocab.json", "merges.txt", "added_tokens.json", "tokenizer.json")
    )
    if vocab_path.is_file() and merges_path.is_file():
        with _errors_name(vocab_path):
            vocab = _validate_ids(read_json(vocab_path))
        with _errors_name(merges_path):
            lines = merges_path.read_text(encoding="utf-8-sig").split("\n")  # read_text has made every line end a "\n"
            if lines[0].startswith("#version"):  # only that line: "# #" and "## ##" are merges
                lines = lines[1:]
            merges = _validate_merges(filter(None, lines), vocab)
        with _errors_name(added_path):
            added = _validate_ids(read_json(added_path)) if added_path.is_file() else {}
        return vocab_path, vocab, merges, added
    if not tokenizer_path.is_file():
        raise OSError(f"{folder} has no tokenizer: neither vocab.json with merges.txt nor tokenizer.json")
    with _errors_name(tokenizer_path):
        parsed = read_json(tokenizer_path)
        model = parsed["model"]
        if model.get("type", "BPE") != "BPE" or "ByteLevel" not in str(parsed.get("pre_tokenizer")):
            raise ValueError("it does not describe a byte-level BPE, the only kind GPT-2 has")
        vocab = _validate_ids(model["vocab"])
        added = _validate_ids({token["content"]: token["id"] for token in parsed.get("added_tokens", [])})
        return tokenizer_path, vocab, _validate_merges(model["merges"], vocab), added


def _special_tokens(folder, vocab, added):
    """token -> id of the tokens that text is searched for before it is split: end-of-text and all added ones."""
    names = [END_OF_TEXT]
    path = folder / "special_tokens_map.json"
    if path.is_file():
        with _errors_name(path):
            for entry in read_json(path).values():
                for token in entry if isinstance(entry, list) else [entry]:
                    name = token["content"] if isinstance(token, dict) else token
                    if not isinstance(name, str | type(None)):
                        raise ValueError(f"{short_repr(name)} is no token")
                    names.append(name)
    return {name: vocab[name] for name in names if name in vocab} | added


# ---------------------------------------------------------------------------------------- the tokenizer


class Tokenizer:
    """Encodes and decodes with one checkpoint's vocabulary.

    vocab: token -> id, merges: pairs of tokens in order of precedence, both in the spelling of vocab.json; special:
    token -> id, in plain text; vocab_size: the number of ids the model has, some of which may have no token.
    """

    def __init__(self, vocab, merges, special, vocab_size=None):
        if len(set(vocab.values())) < len(vocab):
            raise ValueError("two tokens have the same id")
        self.special_ids = special
        self.bytes_of = {id: name.encode() for name, id in special.items()}
        for token, id in vocab.items():
            if id not in self.bytes_of:
                self.bytes_of[id] = _to_bytes(token)
        self.n_vocab = max(vocab_size or 0, max(self.bytes_of) + 1)

        # tiktoken merges by rank and calls the ranks ids. Files need not number their tokens in the order of their
        # merges, so ranks are handed out here, in that order, and `_id_of_rank` turns them into ids.
        tokens = [symbol for symbol in BYTE_TO_CHAR.values() if symbol in vocab] + [a + b for a, b in merges]
        if len(tokens) - len(merges) < 256:
            raise ValueError(f"the vocabulary has only {len(tokens) - len(merges)} of the 256 bytes")
        self._id_of_rank = [vocab[token] for token in tokens]
        ranks = {self.bytes_of[id]: rank for rank, id in enumerate(self._id_of_rank)}
        if len(ranks) < len(tokens):
            twice = next(token for rank, token in enumerate(tokens) if ranks[_to_bytes(token)] != rank)
            raise ValueError(f"two merges make the token {twice!r}")
        self._encoding = tiktoken.Encoding(
            "checkpoint", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        # Of several special tokens that begin alike the longest is meant; tiktoken would take any of them.
        longest_first = sorted(special, key=len, reverse=True)
        self._special_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if special else "((?!))")

    @classmethod
    def from_folder(cls, folder, vocab_size=None):
        """Read vocab.json and merges.txt, or else tokenizer.json. Raises OSError or ValueError, naming the file."""
        folder = Path(folder)
        path, vocab, merges, added = _read_bpe(folder)
        special = _special_tokens(folder, vocab, added)
        with _errors_name(path):
            return cls(vocab, merges, special, vocab_size)

    def encode(self, text):
        """Text -> list of ids. Special tokens spelled out in the text, such as <|endoftext|>, become their ids.

        Raises ValueError where a run of white space is too long for the splitting pattern (a million characters).
        """
        # Two surrogates that are a pair become their character; one that stands alone becomes U+FFFD.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = []
        for index, part in enumerate(self._special_pattern.split(text)):  # plain, special, plain, special ... plain
            if index % 2:
                ids.append(self.special_ids[part])
            else:
                ids += [self._id_of_rank[rank] for rank in self._encoding.encode(part, disallowed_special=())]
        return ids

    def token_bytes(self, id):
        """The bytes of one token; none for an id that pads the model's vocabulary. Raises ValueError for others."""
        if not 0 <= id < self.n_vocab:
            raise ValueError(f"token id {id} is outside the vocabulary, 0 to {self.n_vocab - 1}")
        return self.bytes_of.get(id, b"")

    def decode(self, ids):
        """Ids -> text. Bytes that are not UTF-8 come out as U+FFFD; decode(encode(text)) == text."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

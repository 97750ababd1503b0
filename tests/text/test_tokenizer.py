"""Text to ids and back, half characters and stop strings.

The expectations come from three places, none of them the package: ids that transformers made from the same files
(golden/tokenizer.npz, see golden/make_tokenizer.py), ids written down from OpenAI's vocabulary, and slow oracles, in
oracles/bpe.py and here, that follow the definitions.
"""

import hashlib
import itertools
import json
import random
import re
import socket
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minigen.files.tokenizer_files import AddedToken
from minigen.text.stream import IncrementalUtf8Decoder, StopMatcher
from minigen.text.tokenizer import Tokenizer
from tests.golden import nasty_strings, tokenizer_folders
from tests.oracles.bpe import END, SYMBOLS, bytes_vocab, slow_encode, tokenizer_json, train_merges

ROOT = Path(__file__).parents[2]
GPT2 = ROOT / "tests" / "data" / "gpt2-bpe"
FAIRYTALE = ROOT / "weights" / "fairytale"
GOLDEN = ROOT / "tests" / "golden" / "tokenizer.npz"
END_ID = 50256

STRINGS = nasty_strings.strings()
LONG = nasty_strings.long_strings()
many = settings(max_examples=150, deadline=None, derandomize=True, database=None)


# ---------------------------------------------------------------------------------------- fixtures and small helpers


@pytest.fixture(scope="module")
def gpt2():
    return Tokenizer.from_folder(GPT2)


@pytest.fixture(scope="module")
def golden():
    """{"gpt2": ids of every string, "fairytale": ids of every fifth, "long": {name: (number of ids, SHA-256)}}."""
    with np.load(GOLDEN) as file:
        assert str(file["strings_sha256"]) == nasty_strings.digest(STRINGS), "other strings than those the ids are for"
        out = {}
        for name in ("gpt2", "fairytale"):
            ends = np.cumsum(file[f"{name}_lengths"].astype(int))
            out[name] = [ids.tolist() for ids in np.split(file[f"{name}_ids"], ends[:-1])]
        names, lengths = file["long_names"].tolist(), file["long_lengths"].tolist()
        hashes = [row.tobytes() for row in file["long_sha256"]]
        out["long"] = {name: (n, value) for name, n, value in zip(names, lengths, hashes, strict=True)}
    assert len(out["gpt2"]) == 10_000 and len(out["fairytale"]) == 2_000
    return out


def vocab_and_merges(folder):
    """(vocab.json as a dict, the merge lines of merges.txt)."""
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    return vocab, (folder / "merges.txt").read_text(encoding="utf-8").split("\n")[1:-1]


def write_bpe(folder, vocab, merges, *, first="#version: 0.2\n", newline="\n", last="", **others):
    """A checkpoint folder's vocab.json, merges.txt and `others` (name without .json -> content)."""
    (folder / "vocab.json").write_bytes(json.dumps(vocab, ensure_ascii=False).encode())
    text = first + "".join(line + "\n" for line in merges) + last
    (folder / "merges.txt").write_bytes(text.replace("\n", newline).encode())
    for name, content in others.items():
        (folder / f"{name}.json").write_bytes(json.dumps(content).encode())
    return folder


def stream_text(tokenizer, ids, stops=()):
    """([text shown after each id ..., at the end], the stop that matched): the two ends of a stream put together."""
    utf8, matcher, shown = IncrementalUtf8Decoder(), StopMatcher(list(stops)), []
    for token in ids:
        shown.append(matcher.push(utf8.push(tokenizer.token_bytes(token))))
        if matcher.matched is not None:
            return shown, matcher.matched
    shown.append(matcher.push(utf8.flush()))
    if matcher.matched is None:
        shown[-1] += matcher.flush()
    return shown, matcher.matched


# ---------------------------------------------------------------------------------------- ids


@pytest.mark.slow
def test_the_slow_oracle_gives_the_golden_ids(golden):
    vocab, merges = vocab_and_merges(FAIRYTALE)
    for text, ids in list(zip(STRINGS[::5], golden["fairytale"], strict=True))[::16]:
        if END not in text:
            assert slow_encode(text, vocab, merges) == ids, repr(text)


@pytest.mark.slow
def test_ids_are_those_of_transformers(gpt2, golden):
    for text, ids in zip(STRINGS, golden["gpt2"], strict=True):
        assert gpt2.encode(text) == ids, repr(text)


def test_ids_with_the_bundled_vocabulary(golden):
    tokenizer = Tokenizer.from_folder(FAIRYTALE)
    for text, ids in zip(STRINGS[::5], golden["fairytale"], strict=True):
        assert tokenizer.encode(text) == ids, repr(text)
        assert tokenizer.decode(ids) == text


def test_decoding_undoes_encoding(gpt2, golden):
    """T07: a decoder that tidies up."""
    for text, ids in zip(STRINGS, golden["gpt2"], strict=True):
        assert gpt2.decode(ids) == text
        assert b"".join(gpt2.token_bytes(token) for token in ids) == text.encode("utf-8")


@pytest.mark.parametrize(
    "text, ids",
    [
        # spaces before signs, quotes and carriage returns survive: nothing is "cleaned up"
        ("y is ?", [88, 318, 5633]),
        (" ?", [5633]),
        ("their 'studio'", [24571, 705, 19149, 952, 6]),
        ("a\r\nb", [64, 201, 198, 65]),
        # a space at the end is kept, as an id of its own
        ("import tensorflow as", [11748, 11192, 273, 11125, 355]),
        ("import tensorflow as ", [11748, 11192, 273, 11125, 355, 220]),
        # merges that begin with a hash are not comments
        ("##", [2235]),
        ("####", [4242]),
        ("\u00e9", [2634]),
        # backslash and n are two characters, a newline is one, a byte order mark is text
        ("a\\nb", [64, 59, 46803]),
        ("a\nb", [64, 198, 65]),
        ("\ufeff", [171, 119, 123]),
        # half a surrogate pair has no UTF-8 form and counts as U+FFFD; a whole pair is the character it stands for
        ("\udbc0", [4210]),
        ("caf\udce9", [66, 1878, 4210]),
        ("\ud83d\udc4d", [41840, 235]),
        ("\U0001f44d", [41840, 235]),
        # end-of-text spelled out is end-of-text, as in transformers; anything less is text
        (f"A{END}B", [32, END_ID, 33]),
        (END, [END_ID]),
        (END * 2, [END_ID, END_ID]),
        (f"\udbc0{END}\udbc0", [4210, END_ID, 4210]),
        ("<|endoftext|", [27, 91, 437, 1659, 5239, 91]),
        ("", []),
    ],
)
def test_known_ids(gpt2, text, ids):
    """T03, T04, T07, T08: end-of-text, surrogates, punctuation and trailing spaces have known ids."""
    found = gpt2.encode(text)
    assert found == ids
    assert isinstance(found, list) and all(type(token) is int for token in found)
    # decoding gives the text back, with U+FFFD for half a surrogate pair
    assert gpt2.decode(ids) == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_all_byte_values(tmp_path):
    """T07, T09: each of the 256 bytes."""
    tokenizer = Tokenizer.from_folder(write_bpe(tmp_path, bytes_vocab(), []))
    text = "".join(map(chr, range(0x100))) + "\u4f60\U0001f600"
    assert tokenizer.encode(text) == list(text.encode("utf-8"))
    for data in (*(bytes([byte]) for byte in range(256)), bytes(range(256)) * 2, text.encode("utf-8")):
        assert tokenizer.decode(list(data)) == data.decode("utf-8", "replace")


def test_every_token_stands_for_the_bytes_that_its_symbols_spell(gpt2):
    """T09: the map of bytes and characters approximated."""
    vocab, _ = vocab_and_merges(GPT2)
    byte_of = {symbol: byte for byte, symbol in SYMBOLS.items()}
    for token, number in vocab.items():
        wanted = END.encode() if token == END else bytes(byte_of[symbol] for symbol in token)
        assert gpt2.token_bytes(number) == wanted
    assert gpt2.special_ids == {END: END_ID}
    assert gpt2.n_vocab == 50257


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_long_strings(gpt2, golden, name):
    """The regular expression and the merging do not crash; in quadratic time this test would run for hours."""
    text = LONG[name]
    try:
        ids = gpt2.encode(text)
    except ValueError:
        # The one thing that may be refused: a million spaces in a row are more than the regular expression can count.
        assert name.startswith("spaces") and len(text) >= 1_000_000
        return
    assert (len(ids), hashlib.sha256(np.array(ids, "<u2").tobytes()).digest()) == golden["long"][name]
    assert gpt2.decode(ids) == text


# ---------------------------------------------------------------------------------------- padded and unknown ids


def test_a_padded_vocabulary_has_ids_without_text(golden):
    tokenizer = Tokenizer.from_folder(FAIRYTALE, vocab_size=4200)
    assert tokenizer.n_vocab == 4200
    assert tokenizer.token_bytes(4095) == END.encode()
    assert [tokenizer.token_bytes(token) for token in (4096, 4199)] == [b"", b""]
    text, ids = STRINGS[500], golden["fairytale"][100]
    assert tokenizer.decode([4096, *ids, 4199]) == text and tokenizer.encode(text) == ids


@pytest.mark.parametrize("token", [-1, 50257, 10**9])
def test_an_id_outside_the_vocabulary_is_refused(gpt2, token):
    with pytest.raises(ValueError, match=rf" {token} .* 0 to 50256$"):
        gpt2.token_bytes(token)
    with pytest.raises(ValueError, match=str(token)):
        gpt2.decode([32, token])


def test_ids_may_be_numpy_integers(gpt2):
    ids = np.array([66, 1878, 2634, END_ID], dtype=np.int64)
    assert gpt2.decode(ids) == "caf\u00e9" + END
    assert gpt2.token_bytes(ids[2]) == "\u00e9".encode()


# ---------------------------------------------------------------------------------------- files in other forms


@pytest.mark.parametrize(
    "form",
    [
        {"newline": "\r\n"},
        {"newline": "\r\n", "last": "\n"},
        {"first": ""},
        {"first": "", "newline": "\r\n"},
        {"last": "\n"},
        {"last": "\n\n"},
        {"first": "#version: 0.2 - Trained by `huggingface/tokenizers`\n"},
    ],
    ids=str,
)
def test_forms_of_merges_txt(tmp_path, golden, form):
    """T09: merges.txt without version line, with CRLF, with an empty line at the end."""
    vocab, merges = vocab_and_merges(FAIRYTALE)
    tokenizer = Tokenizer.from_folder(write_bpe(tmp_path, vocab, merges, **form))
    for text, ids in list(zip(STRINGS[::5], golden["fairytale"], strict=True))[::10]:
        assert tokenizer.encode(text) == ids


@pytest.mark.parametrize("form", [{"first": ""}, {}, {"newline": "\r\n"}], ids=str)
def test_a_first_merge_with_a_hash_is_no_version_line(tmp_path, form):
    """T09: the first line dropped blindly."""
    merges = ["# #", "## ##", "# $", "#$ #$", "a b"]
    vocab = bytes_vocab() | {line.replace(" ", ""): 257 + i for i, line in enumerate(merges)}
    tokenizer = Tokenizer.from_folder(write_bpe(tmp_path, vocab, merges, **form))
    assert tokenizer.encode("##") == [257]
    assert tokenizer.encode("#####") == [258, ord("#")]
    assert tokenizer.encode("#$#$") == [260]
    assert tokenizer.encode("#version") == list(b"#version")
    assert tokenizer.encode("ab") == [261]  # the last symbol of the last line came without a carriage return


def test_all_hash_merges_of_gpt2_are_in_use(gpt2):
    """T09: merges of # taken for comments."""
    vocab, merges = vocab_and_merges(GPT2)
    hashes = [line for line in merges if line.startswith("#")]
    assert len(hashes) == 8
    for line in hashes:
        token = line.replace(" ", "")
        assert gpt2.encode(token) == [vocab[token]]


def test_ids_in_any_order_and_with_gaps(tmp_path, golden):
    """T09: Only the order of the lines in merges.txt counts; what numbers vocab.json gives is another matter."""
    vocab, merges = vocab_and_merges(FAIRYTALE)
    new = random.Random(1).sample(range(3 * len(vocab)), len(vocab))
    folder = write_bpe(tmp_path, {token: new[number] for token, number in vocab.items()}, merges)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.n_vocab == max(new) + 1
    assert tokenizer.special_ids == {END: new[4095]}
    for text, ids in zip(STRINGS[::5], golden["fairytale"], strict=True):
        assert tokenizer.encode(text) == [new[number] for number in ids], repr(text)
        assert tokenizer.decode([new[number] for number in ids]) == text
    gap = min(set(range(3 * len(vocab))) - set(new))
    assert tokenizer.token_bytes(gap) == b""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_small_vocabularies_against_the_slow_oracle(tmp_path, seed):
    rng = random.Random(seed)

    def some_text():
        return "".join(rng.choice("aab bc\u00e9'1\n") for _ in range(rng.randrange(1, 25)))

    merges = train_merges([some_text() for _ in range(40)], rng.randrange(1, 60))
    tokens = [*SYMBOLS.values(), *(line.replace(" ", "") for line in merges), END]
    if seed % 2:
        rng.shuffle(tokens)
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer.from_folder(write_bpe(tmp_path, vocab, merges))
    for text in [some_text() for _ in range(100)]:
        assert tokenizer.encode(text) == slow_encode(text, vocab, merges), repr(text)


def test_a_token_that_no_merge_makes_is_never_encoded_but_decodes(tmp_path):
    vocab = bytes_vocab() | {"lo": 257, "hello": 258}
    with pytest.warns(UserWarning, match="'hello'"):
        tokenizer = Tokenizer.from_folder(write_bpe(tmp_path, vocab, ["l o"]))
    assert tokenizer.encode("hello") == [*b"hel", 257]
    assert tokenizer.decode([258]) == "hello"


# ---------------------------------------------------------------------------------------- added tokens


def added_folder(folder, *, added=None, special=None):
    vocab, merges = vocab_and_merges(FAIRYTALE)
    others = {} if added is None else {"added_tokens": added}
    return write_bpe(folder, vocab, merges, **others, **({} if special is None else {"special_tokens_map": special}))


def test_added_tokens_are_found_in_the_text(tmp_path):
    added = {"<|pad|>": 4096, "<user name>": 4097, "\u00fcn\u00ef\uff5c": 4098, "    ": 4099}
    tokenizer = Tokenizer.from_folder(added_folder(tmp_path, added=added))
    assert tokenizer.n_vocab == 4100
    assert tokenizer.special_ids == added | {END: 4095}
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    for token, number in added.items():
        assert tokenizer.encode(token) == [number]
        assert tokenizer.encode(f"a{token}b") == [a, number, b]
        assert tokenizer.encode(f"{token}{token}{END}") == [number, number, 4095]
        assert tokenizer.decode([a, number, b]) == f"a{token}b"
        assert tokenizer.token_bytes(number) == token.encode("utf-8")
    assert tokenizer.encode("  ") == Tokenizer.from_folder(FAIRYTALE).encode("  ")


def test_of_several_added_tokens_the_longest_is_taken(tmp_path):
    """As in transformers, and for every order of the file: runs of spaces are added to vocabularies for code."""
    names = ["  ", "   ", "    ", "<a>", "<a><b>", "<a>b"]
    for turn in range(len(names)):
        order = names[turn:] + names[:turn]
        folder = tmp_path / str(turn)
        folder.mkdir()
        tokenizer = Tokenizer.from_folder(added_folder(folder, added={name: 4096 + i for i, name in enumerate(order)}))
        a = tokenizer.encode("a")[0]
        for text, pieces in {
            "a     a": ["a", "    ", " a"],
            "a   a": ["a", "   ", "a"],
            "<a>": ["<a>"],
            "<a><b>a": ["<a><b>", "a"],
            "<a><a>b<a>": ["<a>", "<a>b", "<a>"],
        }.items():
            one = {"a": [a], " a": tokenizer.encode(" a")}
            wanted = [number for piece in pieces for number in one.get(piece) or [tokenizer.special_ids[piece]]]
            assert tokenizer.encode(text) == wanted, (order, text)


@pytest.mark.parametrize(
    "special",
    [
        {"bos_token": END, "pad_token": "<0x>"},
        {"pad_token": {"content": "<0x>", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}},
        {"additional_special_tokens": ["<0x>", END]},
        {"additional_special_tokens": [{"content": "<0x>"}]},
    ],
)
def test_special_tokens_map_names_tokens_of_the_vocabulary(tmp_path, special):
    vocab = bytes_vocab() | {"<0x>": 257}
    write_bpe(tmp_path, vocab, [])
    assert Tokenizer.from_folder(tmp_path).encode("a<0x>") == list(b"a<0x>")
    write_bpe(tmp_path, vocab, [], special_tokens_map=special)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(f"a<0x>b{END}") == [97, 257, 98, 256]
    assert tokenizer.special_ids == {END: 256, "<0x>": 257}
    assert tokenizer.decode([97, 257]) == "a<0x>"


def test_special_tokens_need_not_be_spelled_in_byte_symbols(tmp_path):
    """A vocabulary may hold a special token as plain text; `\uff5c` is no symbol of a byte, and a space neither."""
    names = ["<\uff5cuser\uff5c>", "<a b>"]
    vocab = bytes_vocab() | {name: 257 + i for i, name in enumerate(names)}
    write_bpe(tmp_path, vocab, [], special_tokens_map={"additional_special_tokens": names})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(f"{names[0]}a{names[1]}") == [257, 97, 258]
    assert tokenizer.decode([258, 97, 257]) == f"{names[1]}a{names[0]}"


def test_a_special_token_that_has_no_id_is_plain_text(tmp_path):
    with pytest.warns(UserWarning, match="<|pad|>"):
        tokenizer = Tokenizer.from_folder(added_folder(tmp_path, special={"pad_token": "<|pad|>", "sep_token": None}))
    assert tokenizer.special_ids == {END: 4095}
    assert tokenizer.decode(tokenizer.encode("<|pad|>")) == "<|pad|>"


def test_a_vocabulary_without_end_of_text(tmp_path):
    vocab = bytes_vocab()
    del vocab[END]
    tokenizer = Tokenizer.from_folder(write_bpe(tmp_path, vocab, []))
    assert tokenizer.special_ids == {} and tokenizer.n_vocab == 256
    assert tokenizer.encode(END) == list(END.encode())


# ---------------------------------------------------------------------------------------- six files


FOLDERS = tokenizer_folders.folders()


def check_folder(folder, path, wanted):
    """The folder is refused by name if it has to be; otherwise its texts have the wanted ids."""
    for name, content in folder.files.items():
        (path / name).write_text(content, encoding="utf-8")
    if folder.refused:
        with pytest.raises(ValueError, match="|".join(map(re.escape, folder.refused))) as caught:
            Tokenizer.from_folder(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    else:
        tokenizer = Tokenizer.from_folder(path)
        assert [tokenizer.encode(text) for text in tokenizer_folders.TEXTS] == wanted, folder.files


@pytest.mark.slow
def test_300_folders_have_the_ids_of_the_tokenizers_library_or_are_refused_by_name(tmp_path):
    """F02, F03: added tokens that one file alone knows, settings that change ids, files that contradict each other."""
    with np.load(GOLDEN.with_name("tokenizer_folders.npz")) as file:
        assert str(file["digest"]) == tokenizer_folders.digest(), "other folders than those the ids are for"
        rows = iter([ids.tolist() for ids in np.split(file["ids"], np.cumsum(file["lengths"])[:-1])])
    for number, folder in enumerate(FOLDERS):
        (tmp_path / str(number)).mkdir()
        wanted = [] if folder.refused else [next(rows) for _ in tokenizer_folders.TEXTS]
        check_folder(folder, tmp_path / str(number), wanted)
    assert next(rows, None) is None
    assert sum(bool(folder.refused) for folder in FOLDERS) < 200


@pytest.mark.parity
def test_300_folders_have_the_ids_of_the_installed_tokenizers_library(tmp_path):
    """F02, F03: as above, and the ids are not those of a file but computed now."""
    pytest.importorskip("tokenizers")
    for number, folder in enumerate(FOLDERS):
        (tmp_path / str(number)).mkdir()
        check_folder(folder, tmp_path / str(number), [] if folder.refused else tokenizer_folders.library_ids(folder))


def test_ids_before_the_text_can_be_left_out(tmp_path):
    tokenizer = Tokenizer.from_folder(write_bpe(tmp_path, bytes_vocab(), [], tokenizer_config={"add_bos_token": True}))
    assert tokenizer.encode("a") == [256, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_a_special_token_that_is_spelled_like_bytes_of_the_vocabulary_keeps_their_bytes(tmp_path):
    """F01: the line break is token \u010a of vocab.json, and " the" is \u0120the."""
    special = {"pad_token": "\u010a", "sep_token": "\u0120the"}
    tokenizer = Tokenizer.from_folder(added_folder(tmp_path, special=special))
    assert tokenizer.encode("He saw the king") == [873, 533, 259, 727]
    text = "He saw\nthe king\n\n"
    assert tokenizer.encode(text) == Tokenizer.from_folder(FAIRYTALE).encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("\u010a")) == "\n"  # as in transformers


@pytest.mark.parametrize("token, id", [("<x>", 65), ("<x>", 4095), ("\u0120the", 4096), ("a", 4096)])
def test_an_added_token_that_clashes_with_the_vocabulary_is_refused(tmp_path, token, id):
    """F01: an id that another token of vocab.json has, or another id for a token that vocab.json has."""
    with pytest.raises(ValueError, match=rf"added_tokens\.json.*{token}.*{id}"):
        Tokenizer.from_folder(added_folder(tmp_path, added={token: id}))


@pytest.mark.parametrize("merges", ["", "#version: 0.2\n", "\n\n"])
def test_a_vocabulary_without_its_merges_is_refused(tmp_path, merges):
    """F09: an empty merges.txt next to a whole vocab.json."""
    (tmp_path / "vocab.json").symlink_to(FAIRYTALE / "vocab.json")
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(ValueError, match=r"merges\.txt.*no merge makes \d{4} tokens"):
        Tokenizer.from_folder(tmp_path)


def test_a_vocabulary_with_part_of_its_merges_is_warned_of(tmp_path):
    """F09: a merges.txt that was cut at the end of a line."""
    vocab, merges = vocab_and_merges(FAIRYTALE)
    with pytest.warns(UserWarning, match=r"no merge makes \d+ tokens"):
        Tokenizer.from_folder(write_bpe(tmp_path, vocab, merges[:3000]))


def test_a_huge_id_costs_no_time(tmp_path):
    """F10: a vocabulary with the id 10**12."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    start = time.process_time()
    one = Tokenizer.from_folder(added_folder(tmp_path / "a", added={"<x>": 10**12, "<y>": 4096}))
    other = Tokenizer.from_folder(added_folder(tmp_path / "b", added={"<x>": 10**12, "<z>": 4096}))
    assert one.encode("a<x>")[1:] == [10**12] and one.token_bytes(5 * 10**11) == b""
    assert (one.first_difference(one), one.first_difference(other)) == (None, 4096)
    assert one.first_difference(Tokenizer.from_folder(FAIRYTALE)) is None
    assert time.process_time() - start < 2


def test_its_repr_says_what_a_tokenizer_has(gpt2):
    assert repr(gpt2) == "Tokenizer(50257 ids, 50000 merges, special tokens {'<|endoftext|>': 50256})"


# ---------------------------------------------------------------------------------------- tokenizer.json, no network


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    (tmp_path / "empty cache").mkdir()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.parametrize("spelling", ["a b", ["a", "b"]], ids=["string", "pair"])
def test_tokenizer_json_alone(tmp_path, golden, no_network, spelling):
    """C05: a folder with tokenizer.json only."""
    vocab, merges = vocab_and_merges(FAIRYTALE)
    if isinstance(spelling, list):
        merges = [line.split(" ") for line in merges]
    added = [(END, 4095), ("<|pad|>", 4096)]
    content = tokenizer_json(vocab, merges, added)
    (tmp_path / "tokenizer.json").write_bytes(json.dumps(content, ensure_ascii=False).encode())
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_ids == dict(added) and tokenizer.n_vocab == 4097
    for text, ids in list(zip(STRINGS[::5], golden["fairytale"], strict=True))[::10]:
        assert tokenizer.encode(text) == ids, repr(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|pad|>") == [4096]


def test_tokenizer_json_need_not_say_what_is_usual(tmp_path):
    content = tokenizer_json(bytes_vocab() | {"ab": 257}, ["a b"])
    del content["model"]["type"], content["added_tokens"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.from_folder(tmp_path).encode("ab" + END) == [257, 256]


@pytest.mark.parametrize("left", ["vocab.json", "merges.txt"])
def test_tokenizer_json_beside_one_of_the_two_other_files(tmp_path, left):
    vocab = bytes_vocab() | {"ab": 257}
    write_bpe(tmp_path, vocab, ["a b"])
    for name in {"vocab.json", "merges.txt"} - {left}:
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(vocab, ["a b"])))
    assert Tokenizer.from_folder(tmp_path).encode("abba") == [257, 98, 97]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(bytes_vocab() | {"ba": 257}, ["b a"])))
    with pytest.raises(ValueError, match=rf"{left}.*tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


# ---------------------------------------------------------------------------------------- broken files


@pytest.mark.slow
def test_any_merges_are_followed_or_refused(tmp_path):
    """Also those that training never writes: two pairs that make one token, or one that an earlier line splits."""
    rng, outcomes = random.Random(1), Counter()
    for _ in range(100):
        tokens, merges = ["a", "b"], []
        for _ in range(rng.randrange(1, 6)):
            left, right = rng.choice(tokens), rng.choice(tokens)
            merges.append(f"{left} {right}")
            tokens.append(left + right)
        if rng.random() < 0.2:
            rng.shuffle(merges)
        vocab = bytes_vocab() | {token: 257 + i for i, token in enumerate(dict.fromkeys(tokens[2:]))}
        write_bpe(tmp_path, vocab, merges)
        try:
            tokenizer = Tokenizer.from_folder(tmp_path)
        except ValueError as error:
            assert "merge" in str(error)
            outcomes["refused"] += 1
            continue
        outcomes["followed"] += 1
        for text in map("".join, itertools.chain(*(itertools.product("ab", repeat=n) for n in range(1, 6)))):
            assert tokenizer.encode(text) == slow_encode(text, vocab, merges), (merges, text)
    assert min(outcomes.values()) > 10


BYTES_TEXT = json.dumps(bytes_vocab())


def bytes_with(token):
    """BYTES_TEXT with something else for the entry of "a"."""
    return BYTES_TEXT.replace('"a": 97', token).encode()


BROKEN = {
    "vocab.json": {
        "empty": b"",
        "cut off": BYTES_TEXT[:-9].encode(),
        "nested": b"[" * 100_000,
        "null": b"null",
        "no token": b"{}",
        "a list": b'["a", "b"]',
        "not UTF-8": b'{"\xe9": 1}',
        "text for an id": bytes_with('"a": "97"'),
        "null for an id": bytes_with('"a": null'),
        "a fraction for an id": bytes_with('"a": 97.5'),
        "a negative id": bytes_with('"a": -97'),
        "one id for two": bytes_with('"a": 98'),
        "a character that spells no byte": bytes_with('"a": 97, "\\u00ad": 257'),
        "a space, which spells no byte": bytes_with('"a": 97, " b": 257'),
        "a byte is missing": bytes_with('"aa": 97'),
    },
    "merges.txt": {
        "one symbol": b"#version: 0.2\nab\n",
        "three symbols": b"#version: 0.2\na b c\n",
        "the product is no token": b"#version: 0.2\na b\n",
        "no symbol of a byte": "#version: 0.2\na \u4f60\n".encode(),
        "not UTF-8": b"#version: 0.2\n\xff\xfe\n",
    },
    "added_tokens.json": {
        "cut off": b"{",
        "a list": b'["<x>"]',
        "text for an id": b'{"<x>": "257"}',
        "a negative id": b'{"<x>": -1}',
        "an empty token": b'{"": 257}',
    },
    "special_tokens_map.json": {
        "cut off": b"{",
        "a list": b"[]",
        "a number for a token": b'{"pad_token": 3}',
        "a token without text": b'{"pad_token": {"text": "<x>"}}',
    },
}


SAID = {  # fault -> what the message has to say of it
    ("vocab.json", "text for an id"): ["'a'", "'97'"],
    ("vocab.json", "null for an id"): ["'a'", "None"],
    ("vocab.json", "a fraction for an id"): ["'a'", "97.5"],
    ("vocab.json", "a negative id"): ["'a'", "-97"],
    ("vocab.json", "one id for two"): [" id"],
    ("vocab.json", "a byte is missing"): [" 255 ", " 256 "],
    ("merges.txt", "the product is no token"): ["'ab'"],
    ("added_tokens.json", "text for an id"): ["'<x>'", "'257'"],
    ("added_tokens.json", "a negative id"): ["'<x>'", "-1"],
    ("added_tokens.json", "an empty token"): ["''", "257"],
}


@pytest.mark.parametrize("name, fault", [(name, fault) for name, faults in BROKEN.items() for fault in faults])
def test_a_broken_file_is_named(tmp_path, name, fault):
    write_bpe(tmp_path, bytes_vocab(), [])
    (tmp_path / name).write_bytes(BROKEN[name][fault])
    with pytest.raises((ValueError, OSError)) as caught:
        Tokenizer.from_folder(tmp_path)
    message = str(caught.value)
    assert name in message and "\n" not in message
    fact = message.split(name, 1)[1]  # the folder's name could have anything in it
    assert all(part in fact for part in SAID.get((name, fault), [])), message


def test_only_the_symbols_of_bytes_count_as_bytes():
    next_char = chr(256 + 68)  # what a 257th byte would be spelled as
    vocab = bytes_vocab() | {"bc": 257, next_char: 258}
    assert Tokenizer(vocab, "b c", [AddedToken(next_char, 258)]).encode("abc") == [97, 257]
    del vocab["a"]
    with pytest.raises(ValueError, match=" 255 of the 256 bytes"):
        Tokenizer(vocab, "b c", [AddedToken(next_char, 258)])


def changed_model(without=None, **changes):
    """A tokenizer.json with changes to its model."""
    content = tokenizer_json(bytes_vocab(), [])
    content["model"] |= changes
    content["model"].pop(without, None)
    return content


OTHER_TOKENIZERS = {
    "a list": [],
    "empty": {},
    "null": None,
    "no model": {"model": None},
    "empty model": {"model": {}},
    "WordPiece": changed_model(type="WordPiece"),
    "Unigram": changed_model(type="Unigram", vocab=[["a", -1.5]]),
    "vocab null": changed_model(vocab=None),
    "vocab a list": changed_model(vocab=["a"]),
    "no vocab": changed_model(without="vocab"),
    "merges null": changed_model(merges=None),
    "one symbol": changed_model(merges=["ab"]),
    "three symbols": changed_model(merges=[["a", "b", "c"]]),
    "unknown product": changed_model(merges=["a b"]),
    "a number for a merge": changed_model(merges=[3]),
    "no merges": changed_model(without="merges"),
    "not byte-level": changed_model() | {"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581"}},
    "not split": changed_model() | {"pre_tokenizer": None},
    "a number for an added token": changed_model() | {"added_tokens": [3]},
    "added token without id": changed_model() | {"added_tokens": [{"content": "<x>"}]},
}


@pytest.mark.parametrize("kind", OTHER_TOKENIZERS)
def test_a_tokenizer_json_of_another_kind_is_named(tmp_path, kind):
    (tmp_path / "tokenizer.json").write_text(json.dumps(OTHER_TOKENIZERS[kind]))
    with pytest.raises((ValueError, OSError)) as caught:
        Tokenizer.from_folder(tmp_path)
    message = str(caught.value)
    assert "tokenizer.json" in message and "\n" not in message
    if kind in ("WordPiece", "Unigram", "not byte-level", "not split"):
        assert "byte-level BPE" in message


def test_missing_files_are_named(tmp_path):
    with pytest.raises(OSError, match=r"vocab\.json"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(OSError, match="nowhere"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    write_bpe(tmp_path, bytes_vocab(), [])
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(OSError, match=r"merges\.txt"):
        Tokenizer.from_folder(tmp_path)


# ---------------------------------------------------------------------------------------- characters out of bytes


def _beginnings(points):
    """All beginnings of the UTF-8 forms of these code points that lack at least the last byte."""
    forms = (chr(point).encode("utf-8", "surrogatepass") for point in points)
    return {form[:n] for form in forms for n in range(1, len(form))}


# One code point in 64 is enough: the last six bits are the last byte.
UNFINISHED = _beginnings([*range(0x80, 0xD800, 64), *range(0xE000, 0x110000, 64)])
UNFINISHED_OR_SURROGATE = UNFINISHED | _beginnings(range(0xD800, 0xE000, 64))


def _without_end(data, beginnings):
    """`data` less its longest end that is in `beginnings`."""
    return next((data[:-n] for n in (3, 2, 1) if data[-n:] in beginnings), data)


def check_utf8_stream(chunks):
    """What has been shown after each push, against decoding all bytes so far at once."""
    stream, shown, seen = IncrementalUtf8Decoder(), "", b""
    for chunk in chunks:
        piece = stream.push(chunk)
        assert isinstance(piece, str)
        shown, seen = shown + piece, seen + chunk
        # Every character that is complete is out, and what may still become one is not. (The first two bytes of a
        # surrogate can no longer become a character, but may wait for the next byte like those that can.)
        at_most = _without_end(seen, UNFINISHED).decode("utf-8", "replace")
        at_least = _without_end(seen, UNFINISHED_OR_SURROGATE).decode("utf-8", "replace")
        assert at_most.startswith(shown) and shown.startswith(at_least), (chunks, seen, shown)
    shown += stream.flush()
    assert shown == b"".join(chunks).decode("utf-8", "replace")
    assert stream.flush() == ""


characters = st.sampled_from("a \u00e9\u0416\u4f60\ufffd\uffff\U0001f600\U0010ffff\u200d\x00\x7f\x80").map(str.encode)
broken = st.sampled_from("80 bf c0 c1 c3 e0 e080 ed eda0 f0 f080 f09f f09f98 f490 f5 ff e4bd c328".split()).map(
    bytes.fromhex
)
nasty_bytes = st.lists(st.one_of(characters, broken, st.binary(max_size=3)), max_size=8).map(b"".join)


def shorten(data, places):
    """`data` (bytes or str) cut at `places`, numbers that need not be sorted, distinct or inside."""
    edges = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


places = st.lists(st.integers(0, 24), max_size=12)


@pytest.mark.slow
@many
@given(nasty_bytes, places)
@example(b"\xed\xa0\x80a", [1, 2, 3])
@example("\U0001f600\U0001f600".encode(), range(8))
@example(b"\xf0\x9f\x98\xf0\x9f\x98\x80", range(7))
def test_any_bytes_in_any_pieces(data, where):
    """T01: characters broken between tokens."""
    check_utf8_stream(shorten(data, where))


def test_every_way_to_cut_a_few_characters():
    data = "\u00e9\u4f60\U0001f600".encode() + b"\xf0\x9f"
    for cuts in itertools.product([False, True], repeat=len(data) - 1):
        check_utf8_stream(shorten(data, [i + 1 for i, here in enumerate(cuts) if here]))


def test_a_character_of_several_tokens_comes_whole_and_at_once(gpt2):
    """T01: a finished character that waits for the next one."""
    # the grinning face is F0 9F 98 | 80, and each of the two Chinese characters is two tokens
    assert stream_text(gpt2, [47249, 222])[0] == ["", "\U0001f600", ""]
    assert stream_text(gpt2, [19526, 254, 25001, 121])[0] == ["", "\u4f60", "", "\u597d", ""]
    assert stream_text(gpt2, [47249, 222, 47249, 222])[0] == ["", "\U0001f600", "", "\U0001f600", ""]
    assert stream_text(gpt2, [47249, 32])[0] == ["", "\ufffdA", ""]  # broken off: the error and the letter
    assert stream_text(gpt2, [47249])[0] == ["", "\ufffd"]


def test_streams_of_nasty_strings(gpt2, golden, tmp_path):
    by_byte = Tokenizer.from_folder(write_bpe(tmp_path, bytes_vocab(), []))
    for text, ids in list(zip(STRINGS, golden["gpt2"], strict=True))[::14]:
        shown, _ = stream_text(gpt2, ids)
        assert "".join(shown) == text and shown[-1] == ""
        # byte by byte every character comes with its last byte
        shown, _ = stream_text(by_byte, text.encode("utf-8"))
        assert [piece for piece in shown if piece] == list(text)


# ---------------------------------------------------------------------------------------- stop strings


def slow_stop(text, stops):
    """(what may be shown of `text`, the stop that matched or None), by the definition and without a memory."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:  # the first to be complete; of several the longest
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    # hold back from the first place on where a stop may have begun
    start = next(i for i in range(len(text) + 1) if any(stop.startswith(text[i:]) for stop in [*stops, ""]))
    return text[:start], None


def check_stops(stops, chunks):
    """What is shown in the end, after comparing what is shown and held back at every push with the oracle."""
    matcher, shown, seen = StopMatcher(stops), "", ""
    assert matcher.matched is None
    for chunk in chunks:
        seen += chunk
        shown += matcher.push(chunk)
        assert (shown, matcher.matched) == slow_stop(seen, stops), (stops, chunks, seen)
        if matcher.matched is not None:
            break
    shown += matcher.flush()
    text, stop = slow_stop(seen, stops)
    assert matcher.matched == stop
    assert shown == (seen if stop is None else text), (stops, chunks)
    assert matcher.flush() == ""
    return shown


STOP_INPUTS = [
    (["ab"], "aab", "a"),
    (["aab"], "aaab", "a"),
    (["aab"], "aaaaab c", "aaa"),
    (["DEFGHIJ"], " DEFGHIJ tail", " "),
    (["DEFGHIJ"], " DEFGHI", " DEFGHI"),
    (["\nUser:"], "Hello\nUse\nUser: x", "Hello\nUse"),
    (["abc", "ab"], "xabc", "x"),  # a prefix of the other is always complete first
    (["ab", "abc"], "xabc", "x"),
    (["abc", "bc"], "xabc", "x"),  # both end at the same character: the longer one
    (["bc", "abc"], "xabc", "x"),
    (["bc", "abd"], "abcd", "a"),
    (["abcd", "c"], "abcd", "ab"),  # the one that starts later is complete first
    (["aba"], "ababa", ""),
    (["abab"], "aabaabab", "aaba"),
    (["\U0001f600"], "a\U0001f600b", "a"),
    (["\u200d\u2642"], "\U0001f9d9\u200d\u2642\ufe0f", "\U0001f9d9"),
    (["e\u0301"], "e e\u0301", "e "),
    (["\ufffd"], "ab", "ab"),
    (["x"], "", ""),
    (["no"], "never", "never"),
    ([], "text", "text"),
    (["\n"], "\n", ""),
    (["aaa"], "aa", "aa"),
    (["a"], "aaaa", ""),
]


@pytest.mark.parametrize("stops, text, wanted", STOP_INPUTS)
def test_stop_strings_at_every_cut(stops, text, wanted):
    """T11: stop strings across the borders of pieces."""
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert check_stops(stops, [text[:first], text[first:second], text[second:]]) == wanted
    assert check_stops(stops, list(text)) == wanted


def test_all_short_texts_and_stops():
    """Every text of six letters out of two, with every one or two stops of up to three letters, letter by letter."""
    words = ["".join(letters) for n in (1, 2, 3) for letters in itertools.product("ab", repeat=n)]
    texts = ["".join(letters) for letters in itertools.product("ab", repeat=6)]
    for stops in [[word] for word in words] + [list(pair) for pair in itertools.combinations(words, 2)]:
        expected = {text[:n]: slow_stop(text[:n], stops) for text in texts for n in range(7)}
        for text in texts:
            matcher, shown = StopMatcher(stops), ""
            for n, letter in enumerate(text, start=1):
                shown += matcher.push(letter)
                assert (shown, matcher.matched) == expected[text[:n]], (stops, text[:n])
                if matcher.matched is not None:
                    break
            matcher = StopMatcher(stops)
            assert (matcher.push(text), matcher.matched) == expected[text], (stops, text)


letters = st.text("aab\u00e9\U0001f600", max_size=20)


@pytest.mark.slow
@many
@given(st.data(), letters.filter(bool), places)
def test_stops_that_do_occur(data, text, where):
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, len(text)))]
    relatives = [stop + "a", stop[:-1] + "b", stop[1:] or "a", stop[:1], "b" + stop]
    others = data.draw(st.lists(st.sampled_from(relatives), max_size=2))
    check_stops([stop, *others], shorten(text, where))


def test_nothing_is_shown_after_a_stop():
    matcher = StopMatcher(["stop"])
    assert matcher.push("a stop b") == "a " and matcher.matched == "stop"
    assert [matcher.push("more"), matcher.push(" stop"), matcher.flush()] == ["", "", ""]
    assert matcher.matched == "stop"


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_an_empty_stop_is_refused(stops):
    """T11: an empty stop string."""
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(stops)


def test_stops_across_the_borders_of_tokens(gpt2):
    """T11: a stop string of several tokens."""
    vocab, _ = vocab_and_merges(GPT2)
    ids = [vocab[token] for token in ("\u0120DEF", "GH", "IJ")]
    assert stream_text(gpt2, ids, ["DEFGHIJ"]) == ([" ", "", ""], "DEFGHIJ")
    assert stream_text(gpt2, ids, ["DEFGHIJK"]) == ([" ", "", "", "DEFGHIJ"], None)
    assert stream_text(gpt2, ids, ["FG"]) == ([" DE", ""], "FG")  # what follows in the same token is not shown either
    # three tokens: newline, User, colon
    ids = gpt2.encode("Hi\nUser: no")
    assert stream_text(gpt2, ids, ["\nUser:"]) == (["Hi", "", "", ""], "\nUser:")
    # a stop is text: half of a character never matches, not even the sign that would stand for it
    face = [47249, 222]
    assert stream_text(gpt2, face, ["\ufffd", "\u00f0", "\x98"]) == (["", "\U0001f600", ""], None)
    assert stream_text(gpt2, [32, *face, 33], ["\U0001f600"]) == (["A", "", ""], "\U0001f600")
    assert stream_text(gpt2, [32, 47249], ["\ufffd"]) == (["A", "", ""], "\ufffd")


def test_streamed_stops_are_the_stops_of_the_whole_text(gpt2, golden):
    """T11: streamed and whole texts that stop elsewhere."""
    rng = random.Random(2)
    for text, ids in list(zip(STRINGS, golden["gpt2"], strict=True))[300::9]:
        start = rng.randrange(len(text))
        stops = [text[start : start + rng.randrange(1, 6)], "the", "\u00e9\u4e2d"]
        shown, matched = stream_text(gpt2, ids, stops)
        wanted, stop = slow_stop(text, stops)
        assert ("".join(shown), matched) == (wanted, stop), (text, stops)

"""What the files of a checkpoint say about its tokenizer.

Up to six files describe a tokenizer: vocab.json, merges.txt, tokenizer.json, added_tokens.json, special_tokens_map.json
and tokenizer_config.json. `read_tokenizer` reads all that exist. Its errors name files that contradict each other, and
settings that would change ids and that GPT-2's tokenizers do not have: a text is encoded exactly as the files say, or
not at all. `_agreed` compares what several files say.
"""

import re
import warnings
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from minigen.engine.validation import is_int, short_repr
from minigen.files.checkpoint import is_file, read_json, read_text

END_OF_TEXT = "<|endoftext|>"
JSON_FILES = ("vocab.json", "tokenizer.json", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
# Keys of special_tokens_map.json and tokenizer_config.json that name one token, and those that name several.
TOKEN_KEYS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
TOKENS_KEYS = ["additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"]
# Classes of tokenizer_config.json that are GPT-2's tokenizer or only follow tokenizer.json.
TOKENIZER_CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")


class AddedToken(NamedTuple):
    """A token that the text is searched for before BPE; the flags mean what they mean in the tokenizers library."""

    content: str
    id: int
    lstrip: bool = False  # takes the white space before it
    rstrip: bool = False  # takes the white space after it
    single_word: bool = False  # not next to a word character
    normalized: bool = False  # searched for only after the tokens that are not normalized


@contextmanager
def errors_name(path):
    """Context manager: re-raise any parsing error as a ValueError that names the file."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        if str(path) in str(error):
            raise
        what = error if isinstance(error, ValueError) else short_repr(error)  # the text of a KeyError is only its key
        raise ValueError(f"{path} is not a usable part of a GPT-2 tokenizer: {what}") from error


def _agreed(what, stated, default=None):
    """The value on which {file: value} agree; the default if it is empty. Raises ValueError if two files differ."""
    (first, value), *others = stated.items() or [(None, default)]
    for path, other in others:
        if other != value:
            values = f"{short_repr(value)} in the first, {short_repr(other)} in the second"
            raise ValueError(f"{first} and {path} contradict each other: {what} is {values}")
    return value


def _refuse(what):
    raise ValueError(f"it has {what}; only GPT-2's byte-level BPE is supported")


# ---------------------------------------------------------------------------------------- vocabulary and merges


def _validate_ids(ids):
    """The mapping token -> id, unchanged. Raises ValueError for a key that is no token, or a value that is no id."""
    if not set(map(type, ids.values())) <= {int} or min(ids.values(), default=0) < 0 or "" in ids:
        token, id = next((token, id) for token, id in ids.items() if not token or not is_int(id, 0))
        raise ValueError(f"the token {short_repr(token)} has the id {short_repr(id)}")
    return ids


def _merges_of_text(text):
    """The lines of merges.txt without the version line and empty lines, as one text."""
    if text.startswith("#version"):  # other lines that begin with # are merges, such as "# #" and "## ##"
        text = text.partition("\n")[2]
    return re.sub("\n{2,}", "\n", text.strip("\n"))


def _merges_of_json(merges):
    """The merges of tokenizer.json, pairs or "left right", in the form of merges.txt."""
    text = "\n".join(merge if isinstance(merge, str) else " ".join(merge) for merge in merges)
    if text.count("\n") != max(len(merges) - 1, 0):
        raise ValueError("a merge has a line break")
    return text


def _merge_vocabularies(vocabs):
    """The union of the vocabularies, {file: vocabulary}."""
    vocab = {}
    for ids in vocabs.values():
        if vocab and ids != vocab:
            for token in ids:
                _agreed(f"the id of {short_repr(token)}", {p: v[token] for p, v in vocabs.items() if token in v})
        vocab = {**vocab, **ids} if vocab else ids
    return vocab


# ---------------------------------------------------------------------------------------- tokenizer.json's pipeline


def _components(part):
    """The components of one section of tokenizer.json; a Sequence has several."""
    if part is None or part["type"] != "Sequence":
        return [] if part is None else [part]
    return [leaf for key, parts in part.items() if key != "type" for each in parts for leaf in _components(each)]


def _read_pipeline(parsed):
    """(add_prefix_space, ids before the text) of a tokenizer.json; refuses what GPT-2's tokenizers do not have.

    Truncation and padding are settings of a call, not of the tokenizer, and are ignored, as in transformers.
    """
    model = parsed["model"]
    if model.get("type", "BPE") != "BPE":
        _refuse(f"a model of type {short_repr(model['type'])}")
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(setting):
            _refuse(f"{setting} {short_repr(model[setting])}")
    supported = {"normalizer": [], "pre_tokenizer": ["ByteLevel"], "decoder": ["ByteLevel"]}
    supported["post_processor"] = ["ByteLevel", "TemplateProcessing"]  # ByteLevel changes offsets there, not ids
    parts = {section: _components(parsed.get(section)) for section in supported}
    before = []
    for section, types in supported.items():
        for part in parts[section]:
            if part["type"] not in types:
                _refuse(f"the {section} {short_repr(part['type'])}")
            if part["type"] == "TemplateProcessing":
                *tokens, text = part["single"]
                if "Sequence" not in text or not all("SpecialToken" in token for token in tokens):
                    _refuse("a post_processor TemplateProcessing that does more than put tokens before the text")
                names = [token["SpecialToken"]["id"] for token in tokens]
                before += [id for name in names for id in part["special_tokens"][name]["ids"]]
    splitters = parts["pre_tokenizer"]
    if len(splitters) != 1 or not splitters[0].get("use_regex", True):
        _refuse("a pre_tokenizer that is not one ByteLevel with use_regex")
    return bool(splitters[0].get("add_prefix_space")), before


# ---------------------------------------------------------------------------------------- added tokens


def _stated_tokens(name, parsed):
    """What one file says about added tokens: a list of (content, id or None, flags or None)."""

    def flags(token, special):
        return tuple(bool(token.get(flag, flag == "normalized" and not special)) for flag in AddedToken._fields[2:])

    if name == "added_tokens.json":
        return [(content, id, None) for content, id in parsed.items()]
    if name == "tokenizer.json":
        numbered, named = [(token["id"], token) for token in parsed.get("added_tokens") or []], []
    else:
        numbered = [(int(id), token) for id, token in (parsed.get("added_tokens_decoder") or {}).items()]
        lists = [parsed.get(key) or [] for key in TOKENS_KEYS]
        named = [parsed[key] for key in TOKEN_KEYS if parsed.get(key) is not None]
        named += [token for tokens in lists for token in (tokens.values() if isinstance(tokens, dict) else tokens)]
    stated = [(token["content"], id, flags(token, token.get("special"))) for id, token in numbered]
    for token in named:
        stated.append((token["content"], None, flags(token, True)) if isinstance(token, dict) else (token, None, None))
    return stated


def _merge_added_tokens(vocab, stated):
    """The `AddedToken`s that the files state, {file: what `_stated_tokens` returns}."""
    ids, flags, special, path_of = {END_OF_TEXT: {}}, {}, {END_OF_TEXT}, {}
    for path, tokens in stated.items():
        for content, id, own_flags in tokens:
            if not isinstance(content, str) or not content or not (id is None or is_int(id, 0)):
                raise ValueError(f"{path}: the token {short_repr(content)} has the id {short_repr(id)}")
            path_of[content] = path
            ids.setdefault(content, {}).update({} if id is None else {path: id})
            special.update([content] if id is None else [])
            if own_flags is not None:
                flags.setdefault((content, id is None), {})[path] = own_flags
    token_of, added = dict(zip(vocab.values(), vocab, strict=True)), []
    for content, by_path in ids.items():
        in_vocab = {"the vocabulary": vocab[content]} if content in vocab else {}
        id = _agreed(f"the id of {short_repr(content)}", in_vocab | by_path)
        if id is None and content in path_of:
            text = f"{path_of[content]} names the token {short_repr(content)}, but no file gives it an id"
            warnings.warn(f"{text}: it is encoded as ordinary text", stacklevel=4)
        if id is None:
            continue
        if token_of.setdefault(id, content) != content:
            text = f"{path_of[content]}: {short_repr(content)} has the id {id}"
            raise ValueError(f"{text}, which is the id of {short_repr(token_of[id])}")
        # Flags from a file that gives the token its id count more than those from a file that only names the token.
        own_flags = flags.get((content, False)) or flags.get((content, True)) or {}
        names = f"{', '.join(AddedToken._fields[2:])} of {short_repr(content)}"
        default = (False, False, False, content not in special)
        added.append(AddedToken(content, id, *_agreed(names, own_flags, default)))
    return added


# ---------------------------------------------------------------------------------------- all of it


def read_tokenizer(folder):
    """(names of the files with vocabulary and merges, keyword arguments of `Tokenizer`) from a checkpoint's folder.

    Raises OSError for files that cannot be read, and ValueError for those that the head of this module says are
    refused. Warns of special tokens that have no id.
    """
    folder = Path(folder)
    vocabs, merges, spaces, before, stated = {}, {}, {}, {}, {}
    special_map, config = {}, {}
    if is_file(folder / "merges.txt"):
        merges[folder / "merges.txt"] = _merges_of_text(read_text(folder / "merges.txt"))
    for path in filter(is_file, map(folder.joinpath, JSON_FILES)):
        parsed = read_json(path)
        with errors_name(path):
            if not isinstance(parsed, dict):
                raise ValueError("it is not an object of keys and values")
            if path.name == "vocab.json":
                vocabs[path] = _validate_ids(parsed)
                continue
            stated[path] = _stated_tokens(path.name, parsed)
            if path.name == "special_tokens_map.json":
                special_map = parsed
            if path.name == "tokenizer_config.json":
                config = parsed
                for setting in ("add_eos_token", "split_special_tokens"):
                    if config.get(setting):
                        _refuse(f"{setting} {short_repr(config[setting])}")
                if config.get("tokenizer_class") not in TOKENIZER_CLASSES:
                    _refuse(f"the tokenizer_class {short_repr(config['tokenizer_class'])}")
                if "add_prefix_space" in config:
                    spaces[path] = bool(config["add_prefix_space"])
            if path.name == "tokenizer.json":
                spaces[path], before[path] = _read_pipeline(parsed)
                vocabs[path] = _validate_ids(parsed["model"]["vocab"])
                merges[path] = _merges_of_json(parsed["model"]["merges"])
    if not vocabs or not merges:
        raise OSError(f"{folder} has no tokenizer: neither vocab.json with merges.txt nor tokenizer.json")

    vocab = _merge_vocabularies(vocabs)
    if len(set(merges.values())) > 1:
        for lines in zip_longest(*(text.split("\n") for text in merges.values())):
            _agreed("a merge", dict(zip(merges, lines, strict=True)))
    added = _merge_added_tokens(vocab, stated)
    if "add_bos_token" in config:
        path = folder / "tokenizer_config.json"
        bos = config.get("bos_token") or special_map.get("bos_token") or END_OF_TEXT
        bos = bos["content"] if isinstance(bos, dict) else bos
        before[path] = [token.id for token in added if token.content == bos and config["add_bos_token"]]
        if config["add_bos_token"] and not before[path]:
            raise ValueError(f"{path} has add_bos_token true, but no file gives {short_repr(bos)} an id")
    return " with ".join(map(str, dict.fromkeys([*vocabs, *merges]))), {
        "vocab": vocab,
        "merges": next(iter(merges.values())),
        "added": added,
        "add_prefix_space": _agreed("add_prefix_space", spaces, default=False),
        "ids_before": _agreed("the list of ids before the text", before, default=[]),
    }

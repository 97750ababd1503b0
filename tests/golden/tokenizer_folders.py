"""300 tokenizer folders in all the forms that a checkpoint's six files can have, and what they mean.

Each says in which of the files its vocabulary, its added tokens and its settings are, which may contradict each other
or be unsupported. golden/make_tokenizer.py computes the ids of `TEXTS` with the tokenizers library (`library_ids`);
nothing here imports minigen.
"""

import hashlib
import json
import random
from typing import NamedTuple

END = "<|endoftext|>"
MERGES = """h e | Ġ t | a t | Ġt he | Ġ c | Ġc at | Ġ h | Ã © | 2 4 | Ġthe r | Ġther e | Ġh at | Ġ ä | Ġä ½ | Ġä½ ł
Ġ a | Ġa n | Ġan d | l l | i n | 0 24 | Ġä½ł å | Ġä½łå ¥ | Ġä½łå¥ ½ | Ġthe n | Ġt h | Ġth at | Ġh a | Ġha ll | Ġcat s
Ġ Ã© | ĠÃ© t | ĠÃ©t Ã© | Ġ s | Ġs at | Ġ n | Ġ k | Ġk in | Ġkin g | Ġ in | Ġ he | Ġhe ll | Ġhell o | Ġ T | ĠT he | Ġ 24
Ġ 2 | Ġ2 024 | Ġ 1 | Ġ1 024 | t he | f Ã© | c a | ca fÃ© | ' s | Ġ Ġ"""
MERGES = [line.strip() for line in MERGES.replace("\n", "|").split("|")]
MERGES = list(dict.fromkeys(MERGES))
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
SYMBOLS = [chr(byte) for byte in PRINTABLE] + [chr(256 + n) for n in range(256 - len(PRINTABLE))]
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
TOKENS = {  # added tokens: which flags are set, and whether the token is special
    "<|user|>": ((), True),
    "<mask>": (("lstrip",), True),
    "<r>": (("rstrip",), True),
    "<b>": (("lstrip", "rstrip", "normalized"), True),
    "cat": (("single_word", "normalized"), False),
    "\u4f60": (("single_word",), False),
    "<mask><r>": (("normalized",), False),
    "  ": ((), False),
    "k>": ((), False),
    "he hall": (("lstrip", "normalized"), False),
}
TEXTS = [
    "Hello",
    " Hello",
    "",
    " ",
    "the cat and the hat in 2024",
    "<|user|>hi<|bot|>",
    f"{END}The king's cats: 1024{END}",
    "a <mask> b",
    "a  \u00a0\n<mask>\t<r> \u2003 b",
    "<r>  <r>   <mask>  <mask>",
    "a <b> <b>b",
    "cats cat",
    "cat,cat cat2 _cat cat\u0301 \u00e9cat cat\u200d cat\x1c",
    "\u4f60\u597d \u4f60 \u4f60.\u4f60",
    "x<mask><r>y <mask> <r>",
    "cafe\u0301 caf\u00e9 na\u00efve",
    "in the  hall;   there",
    "<r>    x<mask> ",
    "that cat then sat there, hello there!\n\n",
    "HELLO The \u00c9t\u00e9 \u4f60\u597d",
]


class Folder(NamedTuple):
    files: dict[str, str]  # name -> content
    tokens: dict[str, tuple]  # added token -> (id, flags that are set, special)
    add_prefix_space: bool
    ids_before: list[int]
    refused: list[str]  # if the folder must be refused: what the sentence may name


def flags_dict(content):
    flags, special = TOKENS.get(content, ((), True))
    return {"content": content, **{flag: flag in flags for flag in FLAGS}, "special": special}


def byte_level(**changes):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True} | changes


def template(*names, before=True):
    tokens = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*tokens, text] if before else [tokens[0], text, *tokens[1:]]
    ids = {name: {"id": name, "ids": [len(SYMBOLS)], "tokens": [name]} for name in names}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": ids}


def sequence(kind, *parts):
    return {"type": "Sequence", kind: list(parts)}


DIGITS = {"type": "Digits", "individual_digits": True}
SPLIT = {"type": "Split", "pattern": {"Regex": r"\d"}, "behavior": "Isolated", "invert": False}
ROBERTA = {"type": "RobertaProcessing", "sep": [END, 256], "cls": [END, 256], "trim_offsets": True}
# Changes of tokenizer.json: (section, value), and what is refused of them.
PIPELINES = [
    (None, None, None),
    ("pre_tokenizer", byte_level(add_prefix_space=True), None),
    ("post_processor", template(END), None),
    ("post_processor", sequence("processors", byte_level(), template(END)), None),
    ("post_processor", None, None),
    ("post_processor", template(), None),
    ("normalizer", sequence("normalizers"), None),
    ("pre_tokenizer", sequence("pretokenizers", byte_level()), None),
    ("truncation", {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}, None),
    ("normalizer", {"type": "NFC"}, "NFC"),
    ("normalizer", {"type": "Lowercase"}, "Lowercase"),
    ("normalizer", sequence("normalizers", {"type": "NFC"}, {"type": "Lowercase"}), "NFC"),
    ("pre_tokenizer", sequence("pretokenizers", DIGITS, byte_level()), "Digits"),
    ("pre_tokenizer", sequence("pretokenizers", SPLIT, byte_level(use_regex=False)), "Split"),
    ("pre_tokenizer", byte_level(use_regex=False), "use_regex"),
    ("pre_tokenizer", {"type": "Whitespace"}, "Whitespace"),
    ("pre_tokenizer", None, "pre_tokenizer"),
    ("model.ignore_merges", True, "ignore_merges"),
    ("model.dropout", 0.1, "dropout"),
    ("model.end_of_word_suffix", "</w>", "end_of_word_suffix"),
    ("model.continuing_subword_prefix", "##", "continuing_subword_prefix"),
    ("post_processor", template(END, END, before=False), "TemplateProcessing"),
    ("post_processor", ROBERTA, "RobertaProcessing"),
]
CONFIGS = [
    (None, None),
    ({}, None),
    ({"model_max_length": 1024, "tokenizer_class": "GPT2Tokenizer", "errors": "replace", "unk_token": END}, None),
    ({"add_prefix_space": False, "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": None}, None),
    ({"add_prefix_space": True}, None),
    ({"add_bos_token": False}, None),
    ({"add_bos_token": True, "bos_token": {"__type": "AddedToken", **flags_dict(END)}}, None),
    ({"add_eos_token": True}, "add_eos_token"),
    ({"split_special_tokens": True}, "split_special_tokens"),
    ({"tokenizer_class": "RobertaTokenizer"}, "RobertaTokenizer"),
]


def make_folder(number):
    """The folder of a number; the same one at each call."""
    rng = random.Random(number)
    form = ("two", "json", "all")[number % 3]  # vocab.json with merges.txt, tokenizer.json, or all three
    ids = [*SYMBOLS, END, *(merge.replace(" ", "") for merge in MERGES)]
    vocab = {token: id for id, token in enumerate(ids)}
    refused, space, before = [], False, []
    pipelines = [row for row in PIPELINES if bool(row[-1]) == (number % 4 == 0)]
    configs = [row for row in CONFIGS if bool(row[-1]) == (number % 10 == 1)]
    section, value, unsupported = pipelines[number // 3 % len(pipelines)]
    config, unsupported_config = configs[number // 2 % len(configs)]
    config = None if config is None else dict(config)
    refused += [unsupported_config] * bool(unsupported_config)

    # Which file knows which added token; tokenizer_config.json and tokenizer.json know the flags as well.
    alone = form == "two" and config is None
    homes = ["added"] * (alone or rng.random() < 0.6) + ["json"] * (form != "two") + ["config"] * (config is not None)
    chosen = [token for token in TOKENS if rng.random() < 0.5]
    added, special_map, decoder, json_added, tokens = {}, {}, {}, [], {END: (len(SYMBOLS), (), True)}
    for content in chosen:
        id = len(vocab) + len(tokens) - 1
        flags, special = TOKENS[content]
        here = [home for home in homes if rng.random() < 0.5] or [rng.choice(homes)]
        if here == ["added"]:
            if special and rng.random() < 0.5:
                special_map.setdefault("additional_special_tokens", []).append(flags_dict(content))
            else:  # no file says anything about flags: an ordinary added token, or a special one that is only named
                flags, special = ((), True) if special else (("normalized",), False)
                if special:
                    special_map.setdefault("additional_special_tokens", []).append(content)
        added |= {content: id} if "added" in here else {}
        decoder |= {str(id): flags_dict(content)} if "config" in here else {}
        json_added += [{"id": id, **flags_dict(content)}] if "json" in here else []
        tokens[content] = (id, flags, special)
    if rng.random() < 0.5:
        special_map["eos_token"] = END
    if decoder:
        config["added_tokens_decoder"] = decoder

    files = {}
    if form != "json":
        files["vocab.json"] = json.dumps(vocab, ensure_ascii=rng.random() < 0.5)
        files["merges.txt"] = "#version: 0.2\n" * (rng.random() < 0.8) + "\n".join(MERGES) + "\n"
    if form != "two":
        pairs = rng.random() < 0.5
        model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "fuse_unk": False}
        model |= {"vocab": vocab, "merges": [merge.split(" ") if pairs else merge for merge in MERGES]}
        end = {"id": len(SYMBOLS), **flags_dict(END)}
        parsed = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end, *json_added]}
        parsed |= {"normalizer": None, "pre_tokenizer": byte_level(), "post_processor": byte_level()}
        parsed |= {"decoder": byte_level(), "model": model}
        if section:
            where = model if section.startswith("model.") else parsed
            where[section.removeprefix("model.")] = value
        refused += [unsupported] * bool(unsupported)
        space = (parsed["pre_tokenizer"] or {}).get("add_prefix_space", False)
        post = parsed["post_processor"]
        before = [len(SYMBOLS)] if post and post != byte_level() and post != template() else []
        if not unsupported:
            if config and config.get("add_prefix_space", space) != space:
                refused.append("add_prefix_space")
            if config and config.get("add_bos_token", bool(before)) != bool(before):
                refused.append("ids before the text")
        files["tokenizer.json"] = json.dumps(parsed, ensure_ascii=rng.random() < 0.5)
    elif config:
        space = config.get("add_prefix_space", False)
        before = [len(SYMBOLS)] if config.get("add_bos_token") else []
    if added or rng.random() < 0.2:
        # One file says something else, if any other one speaks of it.
        lie = rng.randrange(12) if not refused else None
        elsewhere = [token["content"] for token in [*decoder.values(), *json_added] if token["content"] in added]
        if lie in (0, 1, 2, 3) and elsewhere:
            added[elsewhere[0]] += 1000
            refused.append(elsewhere[0])
        elif lie == 4:
            added["<x>"] = rng.choice([65, len(SYMBOLS), len(SYMBOLS) + 3])  # an id of the vocabulary
            refused.append("<x>")
        elif lie == 5:
            added["he"] = len(vocab) + 50  # a token of the vocabulary
            refused.append("he")
        files["added_tokens.json"] = json.dumps(added, ensure_ascii=rng.random() < 0.5)
    if special_map:
        files["special_tokens_map.json"] = json.dumps(special_map)
    if config is not None:
        files["tokenizer_config.json"] = json.dumps(config)
    if form == "all" and not refused and number % 4 == 1:
        kind = rng.randrange(3)
        parsed = json.loads(files["tokenizer.json"])
        if kind == 0:
            files["merges.txt"] = files["merges.txt"].replace("\n' s\n", "\n")
            refused.append("merge")
        elif kind == 1:
            files["vocab.json"] = json.dumps(vocab | {"he": vocab["at"], "at": vocab["he"]})
            refused.append("'he'")
        elif decoder and json_added and str(json_added[0]["id"]) in decoder:
            decoder[str(json_added[0]["id"])]["lstrip"] ^= True
            files["tokenizer_config.json"] = json.dumps(config)
            refused.append("lstrip")
    return Folder(files, tokens, space, before, refused)


def folders():
    return [make_folder(number) for number in range(300)]


def digest():
    """SHA-256 of all folders and texts: which ones the golden ids are for."""
    return hashlib.sha256(repr((folders(), TEXTS)).encode()).hexdigest()


def library_ids(folder):
    """The ids that the tokenizers library gives to each of TEXTS, with the tokens that all of a folder's files name."""
    import tokenizers

    added = []
    for content, (id, flags, special) in folder.tokens.items():
        added.append({"id": id, "content": content, **{flag: flag in flags for flag in FLAGS}, "special": special})
    if "tokenizer.json" in folder.files:
        parsed = json.loads(folder.files["tokenizer.json"]) | {"added_tokens": added, "truncation": None}
    else:
        vocab = json.loads(folder.files["vocab.json"])
        parsed = {"added_tokens": added, "pre_tokenizer": byte_level(add_prefix_space=folder.add_prefix_space)}
        parsed["post_processor"] = template(END) if folder.ids_before else None
        parsed["model"] = {"type": "BPE", "vocab": vocab, "merges": MERGES}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    assert all(tokenizer.token_to_id(content) == id for content, (id, _, _) in folder.tokens.items())
    return [tokenizer.encode(text).ids for text in TEXTS]

"""The kinds of input: each makes one from a `random.Random`, gives it to minigen and checks what comes of it.

A kind is made once in a worker process, in a folder of its own: it writes each input below `self.input`, so that it is
on disk when the process dies of it. `run(rng)` returns a word for what came of the input, and raises `Fault` (or
anything else) where that is wrong. Nothing here knows how minigen reads a file: what is right comes from judge.py, from
the float64 reference, from the slow BPE of oracles/bpe.py, or from Python's own decoder.
"""

import contextlib
import itertools
import json
import os
import re
import warnings

import numpy as np

import minigen
from minigen import GPT2, Tokenizer
from minigen.command.arguments import build_parser
from minigen.files.checkpoint import load_config, load_weights
from tests.fuzz.common import SLACK, Kind, Run, check_logits, check_sentence, content, measured, require, size_of, write
from tests.fuzz.judge import Wrong, parameters, read_safetensors
from tests.fuzz.mutate import ODD_VALUES, mutate_bytes, mutate_json, mutate_safetensors
from tests.fuzz.options import Options
from tests.fuzz.streams import Streams
from tests.golden import tokenizer_folders
from tests.oracles.bpe import END, bytes_vocab, slow_encode, tokenizer_json, train_merges
from tests.oracles.tiny import tiny_config, tiny_params, write_byte_vocab, write_checkpoint, write_safetensors

# ---- checkpoints -------------------------------------------------------------------------------------------------


class Checkpoint(Kind):
    """Damaged safetensors files, shards, indices and links."""

    def __init__(self, folder):
        super().__init__(folder)
        config = tiny_config(vocab_size=7, n_positions=4, n_embd=4)
        params = tiny_params(config)
        untied = config | {"tie_word_embeddings": False}
        masks = {"h.0.attn.bias": np.ones((1, 1, 4, 4), bool), "h.1.attn.masked_bias": np.float32(-1e4)}
        forms = [
            (config, {}),
            (config, {"dtype": "BF16", "prefix": "transformer."}),
            (config, {"dtype": {"wte.weight": "F16", "wpe.weight": "F64"}, "extra": masks}),
            (config, {"shards": 3}),
            (untied, {"shards": 2, "prefix": "transformer."}),
        ]
        self.forms = []
        for index, (form, options) in enumerate(forms):
            values = params if form is config else tiny_params(form)
            self.forms.append((form, content(write_checkpoint(folder / f"form {index}", form, values, **options))))
        # Each shard has stale copies of the next one's tensors as well: only the index says which are meant.
        files = content(write_checkpoint(folder / "stale", config, params, shards=3))
        shards = sorted(name for name in files if name.endswith(".safetensors"))
        tensors = {name: read_safetensors(files[name])[0] for name in shards}
        for name, other in zip(shards, shards[1:] + shards[:1], strict=True):
            stale = {key: (dtype, shape, bytes(len(data))) for key, (dtype, shape, data) in tensors[other].items()}
            write_safetensors(folder / "stale" / name, tensors[name] | stale)
        self.forms.append((config, content(folder / "stale")))
        # A right checkpoint outside: whoever follows a path to it gets a model instead of a refusal.
        write_checkpoint(self.outside, config, tiny_params(config, seed=1))

    def mutate(self, files, rng):
        weights = [name for name in files if name.endswith(".safetensors")]
        index = "model.safetensors.index.json"
        name, other = rng.choice(weights), rng.choice(sorted(files))
        decoy = self.outside / "model.safetensors"
        change = rng.randrange(12 if index in files else 9)
        if change == 0:
            files[name], files[other] = files[other], files[name]
        elif change == 1:
            (self.input.parent / "blob").write_bytes(files[name])  # as in the hub's cache: the file is elsewhere
            targets = [self.input.parent / "blob", name, "missing", ".", "/dev/zero", "/dev/full", "x" * 200, "/proc"]
            files[name] = rng.choice(targets)
        elif change == 2:
            del files[other]
        elif change >= 9:
            parsed = json.loads(files[index])
            paths = ["../outside/model.safetensors", str(decoy), "/dev/zero", "/etc/passwd", "\0", "", ".", "..", 3]
            paths += ["../input/" + name, "./" + name, name + "\0", name + "/", "sub/../" + name]
            paths += ["\ud800", "a\n", "*", "a" * 300]
            if change < 11:
                parsed["weight_map"][rng.choice(list(parsed["weight_map"]))] = rng.choice([*paths, *weights])
                files[index] = json.dumps(parsed).encode()
            else:
                files[index] = mutate_json(parsed, rng)
        else:
            files[name] = mutate_safetensors(files[name], rng)

    def run(self, rng):
        config, files = rng.choice(self.forms)
        files = dict(files)
        for _ in range(rng.choice([1, 1, 1, 2])):
            with contextlib.suppress(
                LookupError, TypeError, ValueError, RecursionError
            ):  # what a second change cannot be made on
                self.mutate(files, rng)
        if not isinstance(files.get("config.json"), bytes) or json_or_none(files["config.json"]) != config:
            files["config.json"] = json.dumps(config).encode()  # the next kind's business
        write(self.input, files)
        try:
            wanted, unclear = parameters(self.input, config)
        except Wrong:
            wanted, unclear = None, False
        self.opened.clear()
        try:
            with measured(size_of(self.input) + SLACK):
                loaded = load_config(self.input)
                params = dict(load_weights(self.input, loaded))
                logits = GPT2(loaded, params).forward([[0, 1]], last_only=False)[0]
        except (ValueError, OSError) as error:
            check_sentence(error, self.input)
            self.check_opened()
            require(wanted is None or unclear, f"a right checkpoint was refused: {error}")
            return "refused"
        self.check_opened()
        require(wanted is not None, "a wrong checkpoint was loaded")
        same = params.keys() == wanted.keys() and all(params[n].tobytes() == wanted[n].tobytes() for n in wanted)
        require(same, "the values are not those of the file")
        check_logits(logits, config, wanted)
        return "loaded"


def json_or_none(data):
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None


# ---- configurations ----------------------------------------------------------------------------------------------


class Config(Kind):
    """Damaged config.json and generation_config.json."""

    def __init__(self, folder):
        super().__init__(folder)
        flags = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False}
        config = tiny_config(vocab_size=257, n_positions=4, n_embd=4, n_inner=8, tie_word_embeddings=True) | flags
        self.config, self.params = config, tiny_params(config)
        self.generation = {"bos_token_id": 256, "eos_token_id": [256, 0], "_from_model_config": True}
        write_byte_vocab(write_checkpoint(folder / "form", config, self.params))
        self.files = content(folder / "form")

    def run(self, rng):
        files = {**self.files, "generation_config.json": json.dumps(self.generation).encode()}
        names = ["config.json", "generation_config.json"]
        for name in rng.choice([names[:1], names[:1], names[1:], names]):
            original = self.config if name == "config.json" else self.generation
            files[name] = mutate_json(original, rng, [*ODD_VALUES, "relu", "tanh", "gelu_new", [256], [0, 300]])
        write(self.input, files)
        config, generation = (json_or_none(files[name]) for name in names)
        try:
            with measured(size_of(self.input) + SLACK):
                model, tokenizer = minigen.load(self.input)
                logits = model.forward([[0, 1]], last_only=False)[0]
                require(tokenizer.decode(tokenizer.encode("Ab\u00e9")) == "Ab\u00e9", "a text is lost")
        except (ValueError, OSError) as error:
            check_sentence(error, self.input)
            plain = all(
                isinstance(parsed, dict) and all(parsed.get(key) == value for key, value in original.items())
                for parsed, original in ((config, self.config), (generation, self.generation))
            )
            # True == 1 and 4.0 == 4 for Python, and only keys that no one reads may then stop the loading.
            plain = plain and repr({key: config[key] for key in self.config}) == repr(self.config)
            plain = (
                plain and "add_cross_attention" not in config and repr(generation)[:60] == repr(self.generation)[:60]
            )
            require(not plain, f"a right configuration was refused: {error}")
            return "refused"
        require(isinstance(config, dict) and isinstance(generation, dict), "loaded without a configuration")
        check_logits(logits, config, self.params)
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        eos = tuple(id for id in eos if 0 <= id < self.config["vocab_size"])
        require(model.config.eos_ids == eos, f"ends at {model.config.eos_ids}, the files say {eos}")
        return "loaded"


class TokenIds(Kind):
    """Configurations as transformers writes them: any vocab_size, and ids that need not be in the vocabulary."""

    def run(self, rng):
        size = rng.choice([257, 258, 300, 1000])
        ids = [0, 65, 256, 257, size - 1, size, 50256, -1, 2**31, 10**30, None]
        config = tiny_config(vocab_size=size, n_positions=4, n_embd=4, n_layer=1)
        more = {"use_cache": True, "transformers_version": "5.24.0", "pad_token_id": rng.choice(ids)}
        more |= {"dtype": "float32"}
        config |= {name: value for name, value in more.items() if rng.random() < 0.5}
        stated = {"bos_token_id": size - 1, "eos_token_id": size - 1}
        for file in (config, generation := {"_from_model_config": True}):
            for name in stated:
                if rng.random() < 0.6:
                    listed = name[0] == "e" and rng.random() < 0.3
                    file[name] = rng.choices(ids[:-1], k=rng.randrange(4)) if listed else rng.choice(ids)
        write(self.input, {})
        files = content(write_byte_vocab(write_checkpoint(self.input, config, tiny_params(config))))
        if rng.random() < 0.7:
            files["generation_config.json"] = json.dumps(generation).encode()
            stated |= config | generation
        else:
            stated |= config
        write(self.input, files)
        eos = stated["eos_token_id"]
        eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
        known = tuple(id for id in eos if 0 <= id < size)
        bos = stated["bos_token_id"]
        with measured(size_of(self.input) + SLACK), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, tokenizer = minigen.load(self.input)
        require(model.config.eos_ids == known, f"ends at {model.config.eos_ids} instead of {known}")
        usable = bos is not None and 0 <= bos < size
        require(model.config.bos_token_id == (bos if usable else None), f"begins with {model.config.bos_token_id}")
        named = [str(warning.message) for warning in caught]
        outside = [
            name for name, bad in (("eos", len(known) < len(eos)), ("bos", bos is not None and not usable)) if bad
        ]
        require(len(named) == len(outside), f"{named} for {outside}")
        try:
            minigen.generate(model, tokenizer, "", max_tokens=1)
        except ValueError as error:
            require("begin-of-text" in str(error) and not usable, f"an empty prompt: {error}")
            return "no begin"
        require(usable, "an empty prompt began with nothing")
        return "begins"


# ---- tokenizers --------------------------------------------------------------------------------------------------


class BPE(Kind):
    """Damaged vocab.json, merges.txt, tokenizer.json, added_tokens.json, special_tokens_map.json."""

    def __init__(self, folder):
        super().__init__(folder)
        merges = train_merges(["the cat and the hat", "that then, there; the end \u00e9\u00e9 11 111"] * 2, 25)
        self.merges = merges
        self.right = merges, ["#version: 0.2", *merges]
        self.vocab = bytes_vocab() | {line.replace(" ", ""): 257 + i for i, line in enumerate(merges)}
        self.added = {"<pad>": 290}
        self.special = {"bos_token": END, "pad_token": {"content": "<pad>", "lstrip": False}}
        self.text = "the cat\u00e9\u4f60 that  then 11\n<pad>x"

    def run(self, rng):
        merges, vocab = ["#version: 0.2", *self.merges, ""], dict(self.vocab)
        only_json = rng.random() < 0.3
        if rng.random() < 0.4:
            a, b = rng.randrange(1, len(merges)), rng.randrange(1, len(merges))
            change = rng.randrange(8)
            if change == 0:
                merges[a], merges[b] = merges[b], merges[a]
            elif change == 1:
                del merges[a]
            elif change == 2:
                merges.insert(
                    a, rng.choice([merges[b], "t h", "h e", "a b", " ", "a", "# #", "a  b", "\u4f60 a", "\r"])
                )
            elif change == 3:  # the same token from another pair
                token = merges[a].replace(" ", "")
                cuts = [token[:cut] + " " + token[cut:] for cut in range(len(token) + 1)]
                known = [pair for pair in cuts if pair != merges[a] and set(pair.split(" ")) <= self.vocab.keys()]
                merges[a] = rng.choice(known or cuts)
            elif change < 6:
                merges = merges[change % 2 :]
            else:  # a token that no training makes: its parts meet where an earlier merge joins them otherwise
                pairs = (line.split(" ") for line in self.merges)
                ends = [(left, b) for a, b in pairs for left in self.vocab if left.endswith(a) and left != a]
                left, right = rng.choice(ends)
                merges.insert(-1, f"{left} {right}")
                vocab[left + right] = 299
        files = {"special_tokens_map.json": json.dumps(self.special).encode()}
        if only_json:
            parsed = tokenizer_json(vocab, merges[1:-1], added=self.added.items())
            files["tokenizer.json"] = mutate_json(parsed, rng) if rng.random() < 0.7 else json.dumps(parsed).encode()
        else:
            text = rng.choice(["\n", "\n", "\r\n"]).join(merges).encode()
            files["vocab.json"] = json.dumps(vocab, ensure_ascii=False).encode()
            files["merges.txt"] = mutate_bytes(text, rng) if rng.random() < 0.3 else text
            files["added_tokens.json"] = json.dumps(self.added).encode()
        name = rng.choice(sorted(files))
        if name.endswith(".json") and name != "tokenizer.json" and rng.random() < 0.6:
            original = {"vocab.json": vocab, "added_tokens.json": self.added}.get(name, self.special)
            files[name] = mutate_json(original, rng)
        write(self.input, files)
        try:
            with measured(size_of(self.input) * 20 + SLACK):  # a table of tokens is many times its text
                tokenizer = Tokenizer.from_folder(self.input, 300)
                ids = tokenizer.encode(self.text)
                decoded = tokenizer.decode(ids)
        except (ValueError, OSError) as error:
            check_sentence(error, *(self.input / name for name in files), f"{self.input} has no tokenizer")
            untouched = not only_json and [*filter(None, merges)][-len(self.merges) - 1 :] in self.right
            originals = {"vocab": self.vocab, "added_tokens": self.added, "special_tokens_map": self.special}
            untouched &= all(json_or_none(files.get(f"{name}.json", b"")) == v for name, v in originals.items())
            untouched &= files.get("merges.txt", b"").replace(b"\r\n", b"\n") == "\n".join(merges).encode()
            require(not untouched, f"right files were refused: {error}")
            return "refused"
        require(decoded == self.text, f"{self.text!r} came back as {decoded!r}")
        self.compare(tokenizer, files)
        return "loaded"

    def compare(self, tokenizer, files):
        """The ids must be those of the definition of BPE with what the files say."""
        if "tokenizer.json" in files:
            model = json.loads(files["tokenizer.json"])["model"]
            vocab, pairs = model["vocab"], model["merges"]
            merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
        else:
            vocab = json.loads(files["vocab.json"])
            lines = re.split("\r\n|\r|\n", files["merges.txt"].decode("utf-8"))
            merges = [line for line in lines[lines[0].startswith("#version") :] if line]
        products = [merge.replace(" ", "").replace("\u0120", " ") for merge in merges]
        for text in ["the cat that then there", "thethat hethe \u00e9 1111", "".join(products), *products]:
            parts = [
                part for part in re.split("(" + "|".join(map(re.escape, tokenizer.special_ids)) + ")", text) if part
            ]
            if parts != [text] or "\ufffd" in text:
                continue  # a damaged file may make a special token of an ordinary word
            wanted = slow_encode(text, vocab, merges)
            require(tokenizer.encode(text) == wanted, f"{text!r} is {tokenizer.encode(text)}, by definition {wanted}")


class Folders(Kind):
    """Tokenizers in up to six files, which may contradict each other or have settings that are not supported."""

    def run(self, rng):
        folder = tokenizer_folders.make_folder(rng.randrange(300, 10**9))
        files = {name: text.encode() for name, text in folder.files.items()}
        small = [name for name in files if name not in ("vocab.json", "merges.txt", "tokenizer.json")]
        mutated = small and rng.random() < 0.3
        if mutated:
            name = rng.choice(small)
            files[name] = mutate_json(json.loads(files[name]), rng)
        write(self.input, files)
        try:
            with measured(size_of(self.input) * 20 + SLACK):
                tokenizer = Tokenizer.from_folder(self.input)
                found = [tokenizer.encode(text) for text in tokenizer_folders.TEXTS]
                b"".join(map(tokenizer.token_bytes, itertools.chain(*found)))
        except (ValueError, OSError) as error:
            check_sentence(error, *(self.input / name for name in files))
            right = any(word in str(error) for word in folder.refused)
            require(mutated or right, f"refused for another reason than {folder.refused}: {error}")
            return "refused"
        if mutated:
            return "loaded"
        require(not folder.refused, f"loaded in spite of {folder.refused}")
        with contextlib.suppress(ImportError):
            wanted = tokenizer_folders.library_ids(folder)
            require(found == wanted, f"{found} instead of {wanted}")
        return "loaded"


# ---- command lines -----------------------------------------------------------------------------------------------


TEXTS = [
    "a",
    "The fox",
    "",
    " ",
    "\u00e9\u4f60",
    "x" * 70,
    "\udce9",
    "a\nb",
    END,
    "-",
    "--",
    "-n",
    "0",
    "*",
    "a" * 5000,
]
NUMBERS = (
    "0 1 2 3 5 -1 0.0 0.5 1.0 1.5 64 65 100 1e3 1e-40 1e400 nan inf -inf abc ten 1_0 0x1 +1 -0 true never auto 1,2"
)
NUMBERS = [*NUMBERS.split(), "", " ", " 1", "1\n2", "9" * 25, "-" + "9" * 25, "1" * 5000, "\u0663", "\udcff"]
BIASES = ["1+1", "256-inf", "a=5", "ab=5", "999+1", "1+nan", "=1", "a=", "-1+1", "\u00e9=1", "1+1e400", "x" * 3000]
PATHS = "stdin missing . /dev/null kv /proc/self/mem a/b \udcff ~nobody/x - gpt2 owner/name fairytale/..".split()
PATHS += ["", "x" * 300]


class CommandLine(Run):
    """Random options with random values."""

    def __init__(self, folder):
        super().__init__(folder)
        self.options = [action for action in build_parser()._actions if action.option_strings]

    def value(self, action, rng):
        if action.dest in ("file", "prompts_file", "prompt_cache", "model", "draft_model"):
            return rng.choice([*PATHS, str(self.model)])
        pool = [*NUMBERS, *(TEXTS if rng.random() < 0.2 or action.dest == "stop" else [])]
        if action.dest == "logit_bias":
            pool = BIASES
        return rng.choice(pool if rng.random() < 0.5 else ["1", "2", "0.5"])

    def run(self, rng):
        argv = ["--model", str(self.model)]
        for action in rng.choices(self.options, k=rng.choice([0, 1, 1, 2, 2, 3, 4, 6, 10])):
            argv.append(rng.choice(action.option_strings))
            if action.nargs != 0:
                value = self.value(action, rng)
                argv[-1:] = (
                    [argv[-1] + "=" + value] if rng.random() < 0.5 and argv[-1][:2] == "--" else [argv[-1], value]
                )
        if rng.random() < 0.1:
            argv[rng.randrange(len(argv)) :] = []
        if rng.random() < 0.5:
            argv += ["--no-stream"] if rng.random() < 0.1 else ["-n", rng.choice(["0", "1", "4"])]
        if "--context-shift" in argv:
            argv += ["-n", "70"]  # or it goes on as long as it was asked to
        texts = rng.choices(TEXTS[: 3 if rng.random() < 0.7 else None], k=rng.choice([0, 1, 1, 1, 2]))
        argv += ["--", *texts] if rng.random() < 0.3 else texts
        code, out, err = self.main(argv, rng.choice([b"", b"The fox\n", b"\xff\xfe\0", rng.randbytes(40)]))
        self.check(code, out, err, argv)
        return f"exit {code}"


PIECES = [b"\n", b"\r\n", b"\r", b"\xef\xbb\xbf", b"\xff", b"\xf0\x9f\x98\x80", b"\xf0\x9f", b"\xed\xa0\x80"]
PIECES += [b" ", b"-", b"\\n", b"--help", END.encode(), b"\xc2\x85", b"\xe2\x80\xa8", b"\x0b", b"\x0c", b"\x1c", b"\0"]
PIECES += [b"a", b"The"]


class Prompt(Run):
    """Random bytes as prompts, by every way that a prompt can come: they must come out again, each character."""

    def run(self, rng):
        def some_bytes():
            pieces = [rng.choice(PIECES) if rng.random() < 0.7 else rng.randbytes(3) for _ in range(rng.randrange(12))]
            return b"".join(pieces)

        way = rng.choice(["argument", "file", "lines", "stdin"])
        data = some_bytes()
        argv = ["--model", str(self.model), "-q", "-n", "0"]
        if way == "argument":
            given = [
                piece.replace(b"\0", b"") for piece in [data, *(some_bytes() for _ in range(rng.choice([0, 0, 2])))]
            ]
            given = [piece if piece != b"-" else b"- " for piece in given]  # which alone stands for stdin
            prompts = [piece.decode("utf-8", "replace") for piece in given]
            argv += ["--", *map(os.fsdecode, given)]
        else:
            text = data[3:] if data.startswith(b"\xef\xbb\xbf") else data
            text = text[:-1] if text.endswith(b"\n") else text
            text = text[:-1] if text.endswith(b"\r") else text
            prompts = [text.decode("utf-8", "replace")]
            if way == "lines":
                prompts = prompts[0].replace("\r\n", "\n").split("\n")
            argv += {"file": ["-f", "stdin"], "lines": ["--prompts-file", "stdin"], "stdin": rng.choice([[], ["-"]])}[
                way
            ]
        code, out, err = self.main(["--json", *argv], data)
        self.check(code, out, err, argv)
        lengths = [len(slow_ids(prompt)) for prompt in prompts]
        if max(lengths) > 64 or (way == "lines" and not data.removeprefix(b"\xef\xbb\xbf")):
            require(code == 2, f"{max(lengths)} tokens were taken")
            return "refused"
        require(code == 0, f"refused: {err}")
        found = [json.loads(line)["prompt"] for line in out.decode("utf-8").split("\n")[:-1]]
        require(found == prompts, f"{prompts} became {found}")
        for prompt in prompts:
            ids = self.tokenizer.encode(prompt)
            require(len(ids) == len(slow_ids(prompt)), f"{prompt!r} has {len(ids)} tokens")
            require(self.tokenizer.decode(ids) == prompt, f"{prompt!r} became {self.tokenizer.decode(ids)!r}")
        code, out, err = self.main(argv, data)
        wanted = "\n".join(prompt if prompt.endswith("\n") or not prompt else prompt + "\n" for prompt in prompts)
        require(out.decode("utf-8") == wanted, f"shown was {out}, wanted {wanted!r}")
        return "taken"


def slow_ids(text):
    """A text's tokens where every byte is one, and end-of-text."""
    return list(
        itertools.chain(*([part] if part == END else part.encode() for part in re.split(f"({re.escape(END)})", text)))
    )


# ---- prompt caches -----------------------------------------------------------------------------------------------


class PromptCache(Run):
    """Damaged files of `--prompt-cache`: the run goes as without one, or refuses the file and leaves it alone."""

    def __init__(self, folder):
        super().__init__(folder)
        self.loaded = minigen.load(self.model)
        self.path = self.input / "prompt.kv"
        text = "Once upon a time"
        minigen.generate(*self.loaded, text, max_tokens=1, seed=0, cache=self.path)
        self.good = self.path.read_bytes()
        self.texts = [text, text + " there", text[:7], "Once more", "else"]
        self.options = {"max_tokens": 4, "temperature": 0, "logprobs": 0}
        self.cold = [minigen.generate(*self.loaded, text, **self.options)[0] for text in self.texts]

    def run(self, rng):
        data = mutate_safetensors(self.good, rng)
        write(self.input, {"prompt.kv": data})
        text = rng.randrange(len(self.texts))
        try:
            with measured(4 * len(data) + SLACK):
                (done,) = minigen.generate(*self.loaded, self.texts[text], cache=self.path, **self.options)
        except (ValueError, OSError) as error:
            check_sentence(error, self.path)
            require(self.path.read_bytes() == data, "a file that was refused was changed")
            return "refused"
        cold = self.cold[text]
        found, wanted = ([entry.logprob for entry in completion.logprobs] for completion in (done, cold))
        same = done.token_ids == cold.token_ids and np.allclose(found, wanted, rtol=0, atol=1e-4)
        require(same, f"{done.token_ids}, {found} instead of {cold.token_ids}, {wanted}")
        return "taken"


KINDS = {
    "checkpoint": Checkpoint,
    "config": Config,
    "token-ids": TokenIds,
    "tokenizer": BPE,
    "tokenizer-files": Folders,
    "cli": CommandLine,
    "prompt": Prompt,
    "prompt-cache": PromptCache,
    "streams": Streams,
    "options": Options,
}

"""The engines that `peers` compares, each behind the same three methods and in a process of its own.

    logits(ids)             float32 [V] after a text; to compare what the engines compute
    prefill(ids)            seconds for a text of ids up to its next token
    decode(prompts, steps)  (tokens [B, steps], seconds a step) for prompts of one length, each continued greedily

Every engine is called in the quickest way its public interface has, computes and caches in float32, and chooses the
most probable token itself; the time of a step includes that. `CONVERT` writes the files that an engine reads in place
of the checkpoint, from the same weights.
"""

import importlib.metadata
import json
import multiprocessing
import os
import time

import numpy as np
from safetensors.numpy import load_file

import minigen
from benchmarks.harness import config_of

# Name in the table -> the packages, by the names they are installed under.
PACKAGES = {
    "minigen": [],
    "transformers": ["transformers", "torch"],
    "CTranslate2": ["ctranslate2"],
    "llama.cpp": ["llama-cpp-python", "gguf"],
}


def missing(name):
    """The packages that an engine needs and that are not installed."""
    installed = {distribution.metadata["Name"].replace("_", "-") for distribution in importlib.metadata.distributions()}
    return [package for package in PACKAGES[name] if package not in installed]


def versions(name):
    """The engine's name with what is installed of it."""
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES[name])


# ---------------------------------------------------------------------------------------- files


def parameters_of(folder, config):
    """All weights of a checkpoint's folder, float32 by name."""
    stored = {}
    for path in folder.glob("model*.safetensors"):
        stored |= {name.removeprefix("transformer."): array for name, array in load_file(path).items()}
    return {name: stored[name].astype(np.float32, copy=False) for name in config.parameter_shapes()}


def vocabulary_of(folder, config):
    """(the spelling of each id's token, the lines of merges.txt) of a checkpoint's folder."""
    if (folder / "vocab.json").is_file():
        vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        merges = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
        merges = [merge for merge in merges if merge and not merge.startswith("#version")]
    else:
        parsed = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = parsed["model"]["vocab"] | {token["content"]: token["id"] for token in parsed["added_tokens"]}
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in parsed["model"]["merges"]]
    spelling_of = {id: token for token, id in vocab.items()}
    return [spelling_of.get(id, f"[PAD{id}]") for id in range(config.vocab_size)], merges


# Names in a GPT-2 checkpoint -> in a GGUF file and in CTranslate2's specification of a decoder layer.
LAYER_NAMES = {
    "ln_1": ("attn_norm", "self_attention.layer_norm"),
    "attn.c_attn": ("attn_qkv", "self_attention.linear.0"),
    "attn.c_proj": ("attn_output", "self_attention.linear.1"),
    "ln_2": ("ffn_norm", "ffn.layer_norm"),
    "mlp.c_fc": ("ffn_up", "ffn.linear_0"),
    "mlp.c_proj": ("ffn_down", "ffn.linear_1"),
}


def write_gguf(folder, path):
    """llama.cpp's file: all weights in float32 and the tokenizer."""
    import gguf

    config = config_of(folder)
    tokens, merges = vocabulary_of(folder, config)
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    end = config.eos_ids[0] if config.eos_ids else len(tokens) - 1
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    kinds[end] = gguf.TokenType.CONTROL
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)

    top = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"}
    for name, array in parameters_of(folder, config).items():
        if name.startswith("h."):
            _, layer, rest = name.split(".", 2)
            part, _, kind = rest.rpartition(".")
            # GPT-2's files hold linear layers as [in, out], all others [out, in].
            array = np.ascontiguousarray(array.T) if array.ndim == 2 else array
            writer.add_tensor(f"blk.{layer}.{LAYER_NAMES[part][0]}.{kind}", array)
        else:
            part, _, kind = name.rpartition(".")
            writer.add_tensor(f"{top[part]}.{kind}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_ctranslate2(folder, path):
    """CTranslate2's folder, by its own specification of a decoder; needs neither torch nor transformers."""
    from ctranslate2.specs import Activation, TransformerDecoderModelSpec

    config = config_of(folder)
    parameters = parameters_of(folder, config)
    tokens, _ = vocabulary_of(folder, config)
    gelu = Activation.GELU if config.activation_function in ("gelu", "gelu_python") else Activation.GELUTanh
    spec = TransformerDecoderModelSpec.from_config(config.n_layer, config.n_head, pre_norm=True, activation=gelu)
    spec.config.bos_token = spec.config.eos_token = tokens[config.eos_ids[0] if config.eos_ids else -1]
    spec.config.unk_token = spec.config.eos_token
    spec.config.layer_norm_epsilon = config.layer_norm_epsilon
    spec.register_vocabulary(tokens)

    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = parameters["wte.weight"]
    decoder.position_encodings.encodings = parameters["wpe.weight"]
    decoder.projection.weight = parameters.get("lm_head.weight", parameters["wte.weight"])
    decoder.layer_norm.gamma, decoder.layer_norm.beta = parameters["ln_f.weight"], parameters["ln_f.bias"]
    for number, layer in enumerate(decoder.layer):
        for name, (_, place) in LAYER_NAMES.items():
            target = layer
            for step in place.split("."):
                target = target[int(step)] if step.isdigit() else getattr(target, step)
            weight, bias = (parameters[f"h.{number}.{name}.{kind}"] for kind in ("weight", "bias"))
            if name.startswith("ln"):
                target.gamma, target.beta = weight, bias
            else:
                target.weight, target.bias = np.ascontiguousarray(weight.T), bias  # [in, out] -> [out, in]
    spec.validate()
    path.mkdir()
    spec.save(str(path))


CONVERT = {"llama.cpp": write_gguf, "CTranslate2": write_ctranslate2}


# ---------------------------------------------------------------------------------------- engines


def greedy(first, step, steps):
    """What `decode` returns: `steps` tokens a row, after the untimed `first` ones.

    first: logits [B, V] after the prompts; step: tokens [B] -> the next logits [B, V].
    """
    tokens = first.argmax(-1)
    chosen = [tokens]
    start = time.perf_counter()
    for _ in range(steps):
        tokens = step(tokens).argmax(-1)
        chosen.append(tokens)
    seconds = (time.perf_counter() - start) / steps
    return np.stack(chosen[:-1], axis=1).tolist(), seconds


def timed(call, ids):
    start = time.perf_counter()
    call(ids)
    return time.perf_counter() - start


class Minigen:
    """The forward pass with a cache of the size that `generate` would make."""

    def __init__(self, path, threads):
        self.model, _ = minigen.load(path)

    def logits(self, ids):
        return self.model.forward([ids])[0]

    def prefill(self, ids):
        return timed(self.logits, ids)

    def decode(self, prompts, steps):
        cache = self.model.new_cache(len(prompts), len(prompts[0]) + steps)
        first = self.model.forward(prompts, cache)
        return greedy(first, lambda tokens: self.model.forward(tokens[:, None], cache), steps)


class Transformers:
    """The forward pass with its default cache; less work a step than `generate`."""

    def __init__(self, path, threads):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def _forward(self, ids, past=None):
        with self.torch.inference_mode():
            ids = self.torch.tensor(ids)
            return self.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)

    def logits(self, ids):
        return self._forward([ids]).logits[0, -1].numpy()

    def prefill(self, ids):
        return timed(self.logits, ids)

    def decode(self, prompts, steps):
        output = self._forward(prompts)
        cache = output.past_key_values

        def step(tokens):
            return self._forward(tokens[:, None], cache).logits[:, -1].numpy()

        return greedy(output.logits[:, -1].numpy(), step, steps)


class CTranslate2:
    """Its loop is written in C++ and gives out tokens only, so its steps are timed between the calls of its callback.

    Its prefill runs all but the last token of the prompt at once and the last one as a step; there is no way to ask
    for the last position's logits alone.
    """

    def __init__(self, path, threads):
        import ctranslate2

        self.ctranslate2 = ctranslate2
        self.generator = ctranslate2.Generator(str(path), compute_type="float32", intra_threads=threads)
        self.spellings = json.loads((path / "vocabulary.json").read_text(encoding="utf-8"))

    def logits(self, ids):
        every = self.generator.forward_batch([ids])
        return np.array(every)[0, -1]

    def _generate(self, prompts, n_tokens, callback=None):
        spelled = [[self.spellings[id] for id in ids] for ids in prompts]
        # No token ends the text: all engines are to run the same number of steps.
        return self.generator.generate_batch(
            spelled, max_length=n_tokens, include_prompt_in_result=False, end_token=[], callback=callback
        )

    def prefill(self, ids):
        return timed(lambda ids: self._generate([ids], 1), ids)

    def decode(self, prompts, steps):
        times = {}

        def note(result):
            times.setdefault(result.step, time.perf_counter())
            return False

        results = self._generate(prompts, steps + 1, note)
        seconds = (times[steps] - times[0]) / steps
        return [result.sequences_ids[0][:steps] for result in results], seconds


class LlamaCpp:
    """The C interface, as ctypes has it: a batch of (token, position, row), and the logits of those that ask for them.

    The default context would keep keys and values in float16; here they are float32, as in the others. It is the only
    engine that still rounds to less on the way, in its table of GELU and in its attention: logits of the bundled model
    differ from minigen's by 1.2e-3, the others' by 1e-5.
    """

    def __init__(self, path, threads):
        import llama_cpp

        self.api = llama_cpp
        # Kept on the object: C calls it for as long as the model lives.
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, None)
        llama_cpp.llama_backend_init()
        self.threads = threads
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.n_positions = llama_cpp.llama_model_n_ctx_train(self.model)
        self.contexts = {}

    def _context(self, rows):
        """An emptied context for this many rows, made once; a row's slots are its share of n_ctx."""
        if rows not in self.contexts:
            options = self.api.llama_context_default_params()
            options.n_ctx = self.n_positions * rows
            options.n_batch = options.n_ubatch = 512
            options.n_seq_max = rows
            options.n_threads = options.n_threads_batch = self.threads
            options.type_k = options.type_v = self.api.GGML_TYPE_F32
            context = self.api.llama_init_from_model(self.model, options)
            self.contexts[rows] = context, self.api.llama_batch_init(512, 0, 1)
        context, batch = self.contexts[rows]
        self.api.llama_memory_clear(self.api.llama_get_memory(context), False)
        return context, batch

    def _run(self, context, batch, rows, start):
        """The logits [B, V] after rows of ids that continue at position `start`."""
        batch.n_tokens = 0
        for row, ids in enumerate(rows):
            for position, id in enumerate(ids):
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = int(id), start + position
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = position == len(ids) - 1
                batch.n_tokens += 1
        if self.api.llama_decode(context, batch):
            raise RuntimeError("llama_decode fails")
        last = np.cumsum([len(ids) for ids in rows]) - 1
        return np.stack(
            [np.ctypeslib.as_array(self.api.llama_get_logits_ith(context, int(at)), (self.n_vocab,)) for at in last]
        )

    def logits(self, ids):
        return self._run(*self._context(1), [ids], 0)[0]

    def prefill(self, ids):
        return timed(self.logits, ids)

    def decode(self, prompts, steps):
        context, batch = self._context(len(prompts))
        first = self._run(context, batch, prompts, 0)
        position = iter(range(len(prompts[0]), self.n_positions))
        return greedy(first, lambda tokens: self._run(context, batch, tokens[:, None], next(position)), steps)


CLASSES = {"minigen": Minigen, "transformers": Transformers, "CTranslate2": CTranslate2, "llama.cpp": LlamaCpp}


# ---------------------------------------------------------------------------------------- processes


def serve(connection, name, path, threads):
    """What a worker process does: answer (method, arguments) with a result or an exception, until told None."""
    # Libraries greet and warn on stderr; what goes wrong is answered.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        engine = CLASSES[name](path, threads)
        connection.send(None)
        while command := connection.recv():
            method, *arguments = command
            connection.send(getattr(engine, method)(*arguments))
    except Exception as error:
        connection.send(error)


class Worker:
    """An engine in a process of its own, which sleeps unless it is asked something.

    Raises RuntimeError where the engine fails.
    """

    def __init__(self, name, path, threads):
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, name, path, threads), daemon=True)
        self.process.start()
        other.close()
        self._answer()

    def _answer(self):
        try:
            answer = self.connection.recv()
        except EOFError:
            answer = RuntimeError("its process died")
        if isinstance(answer, Exception):
            raise RuntimeError(f"{self.name} fails: {answer}")
        return answer

    def call(self, method, *arguments):
        """The result of one of the engine's methods."""
        self.connection.send((method, *arguments))
        return self._answer()

    def close(self):
        self.connection.send(None)
        self.process.join()


# A whole program for each engine, which prints the first token that follows a text; started with the engine's files,
# the text and the number of threads. CTranslate2 has no tokenizer: its text is the tokens' spellings, between spaces.
FIRST_TOKEN = {
    "minigen": """
import sys
import minigen
path, text, threads = sys.argv[1:]
model, tokenizer = minigen.load(path)
print(next(minigen.stream(model, tokenizer, text, temperature=0, max_tokens=1)).token, flush=True)
""",
    "transformers": """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
path, text, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
ids = tokenizer(text, return_tensors="pt")
print(int(model.generate(**ids, do_sample=False, max_new_tokens=1)[0, -1]), flush=True)
""",
    "CTranslate2": """
import sys
import ctranslate2
path, text, threads = sys.argv[1:]
generator = ctranslate2.Generator(path, compute_type="float32", intra_threads=int(threads))
result = generator.generate_batch([text.split(" ")], max_length=1, include_prompt_in_result=False)
print(result[0].sequences_ids[0][0], flush=True)
""",
    "llama.cpp": """
import sys
from llama_cpp import Llama
path, text, threads = sys.argv[1:]
model = Llama(path, n_ctx=0, n_threads=int(threads), n_threads_batch=int(threads), verbose=False)
print(next(model.generate(model.tokenize(text.encode(), add_bos=False), temp=0)), flush=True)
""",
}

"""minigen next to transformers, CTranslate2 and llama.cpp, all in float32 with the same weights and threads.

    python -m benchmarks.peers --shape gpt2

    ppN             a prompt of N tokens, up to the next token
    tg16 @ d128     a step of greedy decoding, mean of 16, after a prompt of 128 tokens
    batch of 4      the same for four prompts in one batch
    start           from process start to the first token, with the checkpoint in the system's file cache

"ratio" is minigen's time as a multiple of the engine's: below 1 minigen is faster. "same tokens" counts the tokens that
are those of minigen. Each engine has a process of its own and is called in the fastest way that its public interface
has. Engines that are not installed are left out. No package has llama.cpp's converter: gguf gives names and vocabulary.
"""

import json
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import minigen
from benchmarks.harness import Report, checkpoint_of, config_of, count, model_of, name_of, parser, random_ids, ratio
from benchmarks.startup import FIRST_TOKEN, PROMPT, run_script

SECONDS = {"quick": 40, "full": 430}
PAUSE = 0.2  # seconds between engines: the threads of some BLAS libraries keep spinning for 0.12 s after their work


class Minigen:
    """An engine: its files, its start as a script, and its loop. The others override what they do differently."""

    packages = ()
    start_script = FIRST_TOKEN
    convert = None  # (checkpoint's folder, path) writes the files that the engine reads instead

    def __init__(self, path, threads):
        self.model, _ = minigen.load(path)

    def begin(self, prompts, steps):
        """(logits [B, V] after the prompts, a function from tokens [B] to the next logits [B, V])."""
        cache = self.model.new_cache(len(prompts), len(prompts[0]) + steps)
        return self.model.forward(prompts, cache), lambda tokens: self.model.forward(tokens[:, None], cache)

    def run(self, prompts, steps):
        """Greedy decoding: (tokens [B, 1 + steps], seconds for the prompts, seconds per step)."""
        start = time.perf_counter()
        logits, step = self.begin(prompts, steps)
        tokens = [logits.argmax(-1)]
        middle = time.perf_counter()
        for _ in range(steps):
            tokens.append(step(tokens[-1]).argmax(-1))
        return np.stack(tokens, axis=1), middle - start, (time.perf_counter() - middle) / max(steps, 1)


class Transformers(Minigen):
    """The forward pass with its default cache, which is less work per step than `generate`."""

    packages = ("transformers", "torch")
    start_script = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
path, text, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
ids = tokenizer(text, return_tensors="pt")
print(int(model.generate(**ids, do_sample=False, max_new_tokens=1)[0, -1]), flush=True)
"""

    def __init__(self, path, threads):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.tensor = torch.tensor
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def begin(self, prompts, steps):
        cache = None

        def step(ids):
            nonlocal cache
            output = self.model(self.tensor(ids), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            return output.logits[:, -1].numpy()

        return step(prompts), lambda tokens: step(tokens[:, None])


class CTranslate2(Minigen):
    """Its loop gives out tokens only, and is timed by its callback. It has no tokenizer."""

    packages = ("ctranslate2", "transformers", "torch")
    start_script = """
import sys, ctranslate2
path, text, threads = sys.argv[1:]
generator = ctranslate2.Generator(path, compute_type="float32", intra_threads=int(threads))
tokens = text.replace(" ", " \u0120").split(" ")  # each word of this text is a token
result = generator.generate_batch([tokens], max_length=1, include_prompt_in_result=False)
print(result[0].sequences_ids[0][0], flush=True)
"""

    @staticmethod
    def convert(folder, path):
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(folder)).convert(str(path))

    def __init__(self, path, threads):
        import ctranslate2

        self.generator = ctranslate2.Generator(str(path), compute_type="float32", intra_threads=threads)
        self.spellings = json.loads((path / "vocabulary.json").read_text(encoding="utf-8"))

    def run(self, prompts, steps):
        marks = {}
        start = time.perf_counter()
        results = self.generator.generate_batch(
            [[self.spellings[token] for token in ids] for ids in prompts],
            max_length=steps + 1,
            end_token=[],  # no token ends the text: all engines run the same number of steps
            include_prompt_in_result=False,
            callback=lambda result: marks.setdefault(result.step, time.perf_counter()) < 0,  # never stops it
        )
        tokens = np.array([result.sequences_ids[0] for result in results])
        return tokens, marks[0] - start, (marks[steps] - marks[0]) / max(steps, 1)


class LlamaCpp(Minigen):
    """The C interface. Keys and values are float32, as in the others; it rounds in its GELU and its attention."""

    packages = ("llama-cpp-python", "gguf", "transformers", "torch")
    start_script = """
import sys
from llama_cpp import Llama
path, text, threads = sys.argv[1:]
model = Llama(path, n_ctx=0, n_threads=int(threads), n_threads_batch=int(threads), verbose=False)
print(next(model.generate(model.tokenize(text.encode(), add_bos=False), temp=0)), flush=True)
"""

    @staticmethod
    def convert(folder, path):
        import gguf
        from transformers import AutoModelForCausalLM, AutoTokenizer

        config, writer = config_of(folder), gguf.GGUFWriter(path, "gpt2")
        writer.add_context_length(config.n_positions)
        writer.add_embedding_length(config.n_embd)
        writer.add_block_count(config.n_layer)
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_head_count(config.n_head)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        vocab = sorted(AutoTokenizer.from_pretrained(folder).get_vocab().items(), key=lambda item: item[1])
        writer.add_token_list([token for token, _ in vocab])
        writer.add_token_types([3 if token in config.eos_ids else 1 for _, token in vocab])  # control, normal
        gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
        for name, tensor in AutoModelForCausalLM.from_pretrained(folder, dtype="float32").state_dict().items():
            if name != "lm_head.weight" or not config.tie_word_embeddings:
                # GPT-2's files hold linear layers as [in, out], all others as [out, in].
                array = tensor.numpy().T if ".h." in name and tensor.ndim == 2 else tensor.numpy()
                writer.add_tensor(names.get_name(name, (".weight", ".bias")), np.ascontiguousarray(array))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def __init__(self, path, threads):
        import llama_cpp

        self.api = api = llama_cpp
        model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        options = api.llama_context_default_params()
        options.n_seq_max = 4
        options.n_ctx = 4 * api.llama_model_n_ctx_train(model)  # each of the four rows has its share
        options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = api.GGML_TYPE_F32
        self.context = api.llama_init_from_model(model, options)
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self.batch = api.llama_batch_init(512, 0, 1)

    def begin(self, prompts, steps):
        api, context, batch, n_done = self.api, self.context, self.batch, 0
        api.llama_memory_clear(api.llama_get_memory(context), False)

        def run(rows):
            nonlocal n_done
            length = len(rows[0])
            batch.n_tokens = len(rows) * length
            for at in range(batch.n_tokens):
                row, column = divmod(at, length)
                batch.token[at], batch.pos[at] = int(rows[row][column]), n_done + column
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = column == length - 1
            n_done += length
            if api.llama_decode(context, batch):
                raise RuntimeError("llama_decode fails")
            last = [api.llama_get_logits_ith(context, length * row + length - 1) for row in range(len(rows))]
            return np.stack([np.ctypeslib.as_array(logits, (self.n_vocab,)) for logits in last])

        return run(prompts), lambda tokens: run(tokens[:, None])


ENGINES = {"minigen": Minigen, "transformers": Transformers, "CTranslate2": CTranslate2, "llama.cpp": LlamaCpp}


def new_worker():
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=silence)


def silence():
    """Discard what libraries print in a worker process."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def load(name, path, threads):
    global engine
    engine = ENGINES[name](path, threads)


def run(prompts, steps):
    return engine.run(prompts, steps)


def start_worker(name, checkpoint, path, threads):
    """(a worker process in which an engine is loaded, the path of the files it reads)."""
    if ENGINES[name].convert:
        with new_worker() as converter:  # a process of its own, because it loads other libraries
            converter.submit(ENGINES[name].convert, checkpoint, path).result()
        checkpoint = path
    worker = new_worker()
    worker.submit(load, name, checkpoint, threads).result()
    return worker, checkpoint


def compare(report, case, names, call):
    """A table with a row per engine. call: name -> (tokens, seconds)."""
    tokens = {}

    def seconds(name):
        tokens[name], seconds = call(name)
        return seconds

    def extra(name, timings):
        same = np.count_nonzero(np.equal(tokens[name], tokens["minigen"]))
        return {"ratio": ratio(timings, "minigen", name), "same tokens": f"{same} of {np.size(tokens[name])}"}

    def shows(timings):
        ratios = [f"{ratio(timings, 'minigen', name):.2f} times that of {name}" for name in names]
        return f"minigen's time is {', '.join(ratios[1:]) or 'compared with no other'}."

    report.table(case, {name: lambda name=name: seconds(name) for name in names}, shows, extra)


def main(arguments=None):
    options = parser(__doc__, repetitions=10)
    options.add_argument("--threads", type=count, default=os.cpu_count(), metavar="N", help="threads and cores of each")
    arguments = options.parse_args(arguments)
    threads = arguments.threads
    # The libraries read these when a process starts.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    report = Report(f"{name_of(model_of(arguments))}, float32, {threads} threads", arguments, SECONDS)

    with tempfile.TemporaryDirectory() as folder:
        (made := Path(folder, "checkpoint")).mkdir()
        checkpoint = checkpoint_of(model_of(arguments), made)
        workers, paths = {}, {}
        for name in ENGINES:
            try:
                report.note(", ".join([name, *(f"{x} {version(x)}" for x in ENGINES[name].packages)]))
                workers[name], paths[name] = start_worker(name, checkpoint, Path(folder, name), threads)
            except Exception as error:  # it is not installed, or does not run this model
                report.note(f"{name} is left out: {error}")
        config, steps = config_of(checkpoint), 4 if report.quick else 16
        prompts = random_ids(config, 4, min(512, config.n_positions)).tolist()
        depth = min(128, config.n_positions - steps - 1)
        cases = {f"pp{length}": ([prompts[0][:length]], 0) for length in (128, len(prompts[0]))}
        cases[f"tg{steps} @ d{depth}"] = [prompts[0][:depth]], steps
        cases[f"tg{steps} @ d{depth}, batch of 4"] = [ids[:depth] for ids in prompts], steps

        def generate(name, case):
            time.sleep(0 if report.quick else PAUSE)
            tokens, prompt_seconds, step_seconds = workers[name].submit(run, *cases[case]).result()
            return tokens, step_seconds if "tg" in case else prompt_seconds

        def start(name):
            (token, *_), seconds = run_script(ENGINES[name].start_script, paths[name], PROMPT, threads)
            return int(token), seconds

        for case in cases:
            compare(report, case, workers, lambda name, case=case: generate(name, case))
        for worker in workers.values():
            worker.shutdown()
        compare(report, "start", workers, start)


if __name__ == "__main__":
    main()

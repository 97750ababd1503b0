"""minigen next to transformers, CTranslate2 and llama.cpp, all in float32 with the same weights and threads.

    python -m benchmarks.peers --shape gpt2

    ppN             a prompt of N tokens, up to the next token
    tg16 @ d128     a step of greedy decoding, mean of 16, after a prompt of 128 tokens
    batch of 4      the same for four prompts in one batch
    start           from process start to the first token, with the checkpoint in the system's file cache

"ratio" is minigen's time as a multiple of the engine's: below 1 minigen is faster. "same tokens" says how many of the
chosen tokens are those of minigen. Each engine runs in a process of its own, through the fastest calls of its public
interface. Their files are made by their own packages; llama.cpp's converter is not in a package, so its file is written
with the names and the vocabulary reader of the gguf package. Engines that are not installed are left out.
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
from benchmarks.harness import Report, checkpoint_of, config_of, count, name_of, parser, random_ids, ratio
from benchmarks.startup import FIRST_TOKEN, PROMPT, run_script

SECONDS = {"quick": 60, "full": 240}
PAUSE = 0.2  # seconds between engines: the threads of some BLAS libraries keep spinning for 0.12 s after their work

# ---------------------------------------------------------------------------------------- engines


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
        output = self.model(self.tensor(prompts), use_cache=True, logits_to_keep=1)
        cache = output.past_key_values

        def step(tokens):
            output = self.model(self.tensor(tokens[:, None]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            return output.logits[:, -1].numpy()

        return output.logits[:, -1].numpy(), step


class CTranslate2(Minigen):
    """Its loop gives out tokens only, and is timed by its callback. It has no tokenizer: its script gets tokens."""

    packages = ("ctranslate2", "transformers", "torch")
    start_script = """
import sys, ctranslate2
path, text, threads = sys.argv[1:]
generator = ctranslate2.Generator(path, compute_type="float32", intra_threads=int(threads))
result = generator.generate_batch([text.split(" ")], max_length=1, include_prompt_in_result=False)
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
        for name, value in {
            "context_length": config.n_positions,
            "embedding_length": config.n_embd,
            "block_count": config.n_layer,
            "feed_forward_length": config.n_inner or 4 * config.n_embd,
            "head_count": config.n_head,
            "layer_norm_eps": config.layer_norm_epsilon,
            "file_type": gguf.LlamaFileType.ALL_F32,
            "tokenizer_model": "gpt2",
            "tokenizer_pre": "gpt-2",
        }.items():
            getattr(writer, f"add_{name}")(value)
        vocab = sorted(AutoTokenizer.from_pretrained(folder).get_vocab().items(), key=lambda item: item[1])
        writer.add_token_list([token for token, _ in vocab])
        kinds = gguf.TokenType
        writer.add_token_types([kinds.CONTROL if id in config.eos_ids else kinds.NORMAL for _, id in vocab])
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
        api.llama_backend_init()
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


def silence():
    """Discard what libraries print in a worker process."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def prepare(name, checkpoint, path, threads):
    """Load an engine in its worker process, and convert the checkpoint for it if it needs that; its path."""
    global engine
    if ENGINES[name].convert:
        ENGINES[name].convert(checkpoint, path)
        checkpoint = path
    engine = ENGINES[name](checkpoint, threads)
    return checkpoint


def run(prompts, steps):
    return engine.run(prompts, steps)


# ---------------------------------------------------------------------------------------- tables


def compare(report, case, calls):
    """A table with a row per engine. calls: engine -> callable: (tokens, seconds)."""
    tokens = {}

    def call(name):
        tokens[name], seconds = calls[name]()
        return seconds

    def extra(name, timings):
        same = np.count_nonzero(np.equal(tokens[name], tokens["minigen"]))
        return {"ratio": ratio(timings, "minigen", name), "same tokens": f"{same} of {np.size(tokens[name])}"}

    def shows(timings):
        ratios = [f"{ratio(timings, 'minigen', name):.2f} of {name}'s" for name in calls]
        return f"minigen's time is {', '.join(ratios[1:]) or 'compared with none'}."

    report.table(case, {name: lambda name=name: call(name) for name in calls}, shows, extra)


def measure_calls(report, pools, config):
    steps = 4 if report.quick else 16
    prompts = random_ids(config, 4, min(512, config.n_positions)).tolist()
    depth = min(128, config.n_positions - steps - 1)

    def call(pool, prompts, steps):
        time.sleep(0 if report.quick else PAUSE)
        tokens, *seconds = pool.submit(run, prompts, steps).result()
        return tokens, seconds[steps > 0]

    cases = {f"pp{length}": ([prompts[0][:length]], 0) for length in (128, len(prompts[0]))}
    for batch, label in ((1, ""), (4, ", batch of 4")):
        cases[f"tg{steps} @ d{depth}{label}"] = [ids[:depth] for ids in prompts[:batch]], steps
    for case, asked in cases.items():
        compare(report, case, {name: lambda pool=pool: call(pool, *asked) for name, pool in pools.items()})  # noqa: B023


def measure_starts(report, paths, checkpoint, threads):
    tokenizer = minigen.Tokenizer.from_folder(checkpoint, config_of(checkpoint).vocab_size)

    def start(name):
        text = PROMPT
        if name == "CTranslate2":
            spellings = json.loads((paths[name] / "vocabulary.json").read_text(encoding="utf-8"))
            text = " ".join(spellings[token] for token in tokenizer.encode(PROMPT))
        (token, *_), seconds = run_script(ENGINES[name].start_script, paths[name], text, threads)
        return token, seconds

    compare(report, "start", {name: lambda name=name: start(name) for name in paths})


def main(arguments=None):
    options = parser(__doc__, repetitions=10)
    options.add_argument("--threads", type=count, default=os.cpu_count(), metavar="N", help="threads and cores of each")
    arguments = options.parse_args(arguments)
    threads = arguments.threads
    # The libraries read these when a process starts.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])

    notes, pools, paths = [f"{threads} threads"], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "minigen").mkdir()
        checkpoint = checkpoint_of(arguments, folder / "minigen")
        for name in ENGINES:
            pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=silence)
            try:
                notes += [f"{package} {version(package)}" for package in ENGINES[name].packages]
                paths[name] = pool.submit(prepare, name, checkpoint, folder / name, threads).result()
                pools[name] = pool
            except Exception as error:  # it is not installed, or does not run this model
                if name == "minigen":
                    raise
                notes.append(f"{name} is left out: {error}")
        title = f"{name_of(arguments)}, float32, {threads} threads"
        report = Report(title, arguments, SECONDS, [", ".join(dict.fromkeys(notes))])
        measure_calls(report, pools, config_of(checkpoint))
        for pool in pools.values():
            pool.shutdown()
        measure_starts(report, paths, checkpoint, threads)


if __name__ == "__main__":
    main()

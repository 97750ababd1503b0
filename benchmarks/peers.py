"""minigen beside transformers, CTranslate2 and llama.cpp, all in float32 on the same weights and threads.

    python -m benchmarks.peers --shape gpt2 --plot peers.png

    ppN             a prompt of N tokens, up to the logits of the next one
    tgN @ d128      a step of greedy decoding, mean of N, after a prompt of 128 tokens
    4 rows          the same for four prompts side by side, all four in one step
    first token     from starting a process to the first token it prints, the checkpoint in the system's file cache

"ratio" is minigen's time as a multiple of the engine's: below 1 minigen is faster. "agreement" is what the engine
computed in that very case beside what minigen did: the largest difference of two logits, or the tokens that are the
same. What an engine is asked to do, and where it cannot do quite the same, stands in engines.py.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.engines import CONVERT, FIRST_TOKEN, Worker, missing, versions, vocabulary_of
from benchmarks.harness import PAUSE, checkpoint_of, columns, config_of, measure, name_of, parser, plot, report
from minigen import Tokenizer

TEXT = "Once upon a time, there was a"


def rested(pause, worker, method, *arguments):
    """A case for `measure`: the seconds that the engine reports, once all others have come to rest.

    Each engine has a process of its own, and so a thread pool with its own settings. OpenBLAS's threads are the last to
    come to rest; those of the others do within 0.01 s.
    """

    def call():
        time.sleep(pause)
        result = worker.call(method, *arguments)
        return result if method == "prefill" else result[1]

    return call


def first_token(name, path, text, threads):
    """(seconds from starting the engine's program to the token it prints, the token)."""
    start = time.perf_counter()
    command = [sys.executable, "-c", FIRST_TOKEN[name], str(path), text, str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        token = process.stdout.readline()
        seconds = time.perf_counter() - start
        errors = process.communicate()[1]
    if process.returncode or not token:
        raise RuntimeError(f"{name} fails: {errors.strip().splitlines()[-1:]}")
    return seconds, int(token)


def same_tokens(ours, theirs):
    ours, theirs = np.ravel(ours), np.ravel(theirs)
    return f"{np.count_nonzero(ours == theirs)} of {len(ours)} tokens"


def rows_of(case, timings, agreement):
    """A row of the table for each engine."""
    ours = timings["minigen"].median
    return [
        {
            "case": case,
            "engine": name,
            **columns(timing),
            "ratio": ours / timing.median,
            "agreement": "-" if name == "minigen" else agreement[name],
        }
        for name, timing in timings.items()
    ]


def measure_calls(workers, config, quick, repetitions):
    """Rows for prefill and decode: prompts of random ids, the same for all engines."""
    steps, warm_up, pause = (4, 0, 0) if quick else (16, 1, PAUSE)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab_size, (4, min(512, config.n_positions))).tolist()
    depth = min(128, config.n_positions - steps - 1)

    rows = []
    for length in sorted({min(length, config.n_positions) for length in (128, 512)}):
        logits = {name: worker.call("logits", prompts[0][:length]) for name, worker in workers.items()}
        agreement = {name: f"{np.abs(x - logits['minigen']).max():.1e} in logits" for name, x in logits.items()}
        cases = {name: rested(pause, worker, "prefill", prompts[0][:length]) for name, worker in workers.items()}
        rows += rows_of(f"pp{length}", measure(cases, repetitions, warm_up), agreement)
    for batch, label in ((1, ""), (4, ", 4 rows")):
        asked = [prompt[:depth] for prompt in prompts[:batch]], steps
        tokens = {name: worker.call("decode", *asked)[0] for name, worker in workers.items()}
        agreement = {name: same_tokens(tokens["minigen"], x) for name, x in tokens.items()}
        cases = {name: rested(pause, worker, "decode", *asked) for name, worker in workers.items()}
        rows += rows_of(f"tg{steps} @ d{depth}{label}", measure(cases, repetitions, warm_up), agreement)
    return rows


def measure_first_tokens(paths, checkpoint, quick, repetitions, threads):
    """Rows for the time from process start to first token."""
    config = config_of(checkpoint)
    tokenizer = Tokenizer.from_folder(checkpoint, config.vocab_size)
    spellings, _ = vocabulary_of(checkpoint, config)
    spelled = " ".join(spellings[id] for id in tokenizer.encode(TEXT))
    tokens = {}

    def call(name):
        text = spelled if name == "CTranslate2" else TEXT
        seconds, tokens[name] = first_token(name, paths[name], text, threads)
        return seconds

    # The first start of each warms the disk.
    cases = {name: lambda name=name: call(name) for name in paths}
    timings = measure(cases, repetitions, warm_up=0 if quick else 1)
    return rows_of("first token", timings, {name: same_tokens(tokens["minigen"], x) for name, x in tokens.items()})


def draw(rows, file, title):
    """One panel a case, one bar an engine, from 0."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    with plot(file, title, len(cases)) as panels:
        for axes, case in zip(panels, cases, strict=True):
            shown = [row for row in rows if row["case"] == case]
            colours = ["C0" if row["engine"] == "minigen" else "0.7" for row in shown]
            bars = axes.bar([row["engine"] for row in shown], [row["ms median"] for row in shown], color=colours)
            axes.bar_label(bars, fmt="%.4g")
            axes.margins(y=0.1)  # room for the numbers above the bars
            axes.set_title(case)
            axes.tick_params(axis="x", rotation=45)
        panels[0].set_ylabel("milliseconds, less is better")


def main():
    options = parser(__doc__.splitlines()[0], repetitions=10, model=True, plot=True)
    options.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="threads, and cores, of each")
    options.add_argument("--engines", nargs="+", metavar="NAME", choices=FIRST_TOKEN, help="only these and minigen")
    arguments = options.parse_args()
    repetitions = 2 if arguments.quick else arguments.repetitions

    # Read by the libraries when a process starts, so set here for all that are started.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(arguments.threads))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])

    wanted = [name for name in FIRST_TOKEN if name == "minigen" or name in (arguments.engines or FIRST_TOKEN)]
    lacking = {name: missing(name) for name in wanted}
    present = [name for name in wanted if not lacking[name]]
    notes = [f"not measured: {name}, for want of {', '.join(lacking[name])}" for name in wanted if lacking[name]]
    notes += [f"{arguments.threads} threads", *filter(None, map(versions, present))]

    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "checkpoint")
        made.mkdir()
        checkpoint = checkpoint_of(arguments, made)
        paths, workers = {}, {}
        for name in present:
            paths[name] = Path(folder, name) if name in CONVERT else checkpoint
            try:
                if name in CONVERT:
                    CONVERT[name](checkpoint, paths[name])
                workers[name] = Worker(name, paths[name], arguments.threads)
            except Exception as error:  # an engine that cannot run this model, or is installed but broken
                if name == "minigen":
                    raise
                notes.append(f"not measured: {name}, {error}")
                del paths[name]
        rows = measure_calls(workers, config_of(checkpoint), arguments.quick, repetitions)
        for worker in workers.values():
            worker.close()
        starts = max(1, repetitions // 2)  # they vary less, and take seconds
        rows += measure_first_tokens(paths, checkpoint, arguments.quick, starts, arguments.threads)

    title = f"{name_of(arguments)}, float32, milliseconds"
    report(title, rows, arguments, notes)
    if arguments.plot:
        draw(rows, arguments.plot, f"{title}, {arguments.threads} threads")


if __name__ == "__main__":
    main()

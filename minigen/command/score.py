"""Score mode (--score): print the log-probability and perplexity of a text instead of generating one."""

import json
import math
import time

from minigen.api import load
from minigen.command.arguments import drop_newline, read_file
from minigen.command.output import model_line, print_stderr, write
from minigen.files.hub import DEFAULT_MODEL, resolve_checkpoint
from minigen.options import require
from minigen.scoring import score


def run_score(args, options):
    """Score the text of a file, and print the result; return the exit code."""
    with_logprobs = "logprobs" in options
    if with_logprobs:
        allowed = "0 with {score}, which lists the text's own tokens"
        require(options["logprobs"] == 0, "logprobs", options["logprobs"], allowed)
    text = drop_newline(read_file(args.score))
    name = DEFAULT_MODEL if args.model is None else args.model
    folder = resolve_checkpoint(args.model)
    model, tokenizer = load(folder)
    if not args.quiet:
        print_stderr(model_line(name, folder, model))
    start = time.perf_counter()
    scored = score(model, tokenizer.encode(text), args.stride)
    seconds = time.perf_counter() - start

    tokens = [
        {"token": token, "text": tokenizer.decode([token]), "logprob": logprob}
        for token, logprob in zip(scored.token_ids, scored.logprobs, strict=True)
    ]
    bits_per_byte = scored.bits_per_byte(tokenizer)
    if args.json:
        figures = {
            "perplexity": scored.perplexity if math.isfinite(scored.perplexity) else None,  # JSON has no infinity
            "bits_per_byte": bits_per_byte,
            "nll": scored.nll,
            "n_tokens": scored.n_tokens,
            "stride": scored.stride,
            "logprobs": tokens if with_logprobs else None,
            "model": name,
        }
        lines = [json.dumps(figures, ensure_ascii=False)]
    else:
        lines = []
        for entry in tokens if with_logprobs else ():
            logprob = "-" if entry["logprob"] is None else f"{entry['logprob']:.4f}"
            lines.append(f"{logprob:>9}  {entry['text']!r}")
        lines.append(
            f"perplexity {scored.perplexity:.4f} · {bits_per_byte:.4f} bits a byte · "
            f"{scored.n_tokens} of {len(tokens)} tokens scored"
        )
    write("".join(f"{line}\n" for line in lines))
    if not args.quiet:
        print_stderr(f"stride {scored.stride} · {seconds:.2f} s ({scored.n_tokens / seconds:.1f} tokens/s)")
    return 0

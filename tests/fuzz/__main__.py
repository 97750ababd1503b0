"""python -m tests.fuzz --minutes N, or --count N for so many inputs of a kind; exit code 1 where faults were found."""

import argparse
import random
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.fuzz.runner import run_batch

NAMES = ("checkpoint config token-ids tokenizer tokenizer-files cli prompt prompt-cache streams options").split()
# Inputs of one kind, after which the time is looked at and the next kind has its turn.
BATCH = 100


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--count", type=int, default=10**9, help="stop after this many inputs of each kind")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="default random")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--only", choices=NAMES, help="one kind of input")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "minigen-faults", help="for inputs")
    args = parser.parse_args(argv)
    if args.minutes == float("inf") and args.count == 10**9:
        args.minutes = 1

    kinds = [args.only] if args.only else NAMES
    start, seconds = time.monotonic(), defaultdict(float)
    words, faults = defaultdict(Counter), []
    first, end = args.first, args.first + args.count
    while first < end and time.monotonic() - start < args.minutes * 60:
        count = min(BATCH, end - first)
        for kind in kinds:
            began = time.monotonic()
            counted, found = run_batch(kind, args.seed, first, count, args.keep)
            seconds[kind] += time.monotonic() - began
            words[kind] += counted
            faults += found
            for fault in found[:5]:
                print(fault, flush=True)
            if time.monotonic() - start >= args.minutes * 60:
                break
        first += count
    for kind in kinds:
        counted = words[kind]
        if not counted:
            print(f"{kind}: not tried, for the time was up")
            continue
        outcomes = ", ".join(f"{number} {word}" for word, number in sorted(counted.items()))
        print(f"{kind}: {counted.total()} inputs in {seconds[kind]:.0f} s: {outcomes}")
    print(f"seed {args.seed}, {len(faults)} faults" + (f", inputs in {args.keep}" if faults else ""))
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())

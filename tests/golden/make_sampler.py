"""Make golden/sampler.npz: what transformers' own logits processors and warpers do to the inputs of sampler_cases.py.

    python -m tests.golden.make_sampler [out_folder]

Needs torch and transformers; the tests need neither. Each case runs twice, in float32 (as transformers generates) and
in float64 (for probabilities without rounding noise). A case whose outcome hangs on rounding is not stored and the
next seed takes its place: when the two runs keep different tokens, when a cumulated mass lands within MARGIN of the
border, or when the last token kept and the first one removed differ by less than GAP without being equal.

Equal values at the border of top_k, top_p or typical_p are the one place where minigen differs on purpose (it keeps
the lowest ids; transformers keeps all of them or any). Such a case is stored with the filter's name in `tie` if no
later filter works on its outcome; otherwise the next seed takes its place.

Contents (n cases):
  cases     int32 [n, 4]: vocabulary, option (index into OPTIONS, -1 for a combination), seed, tie (index into WARPERS
            or -1)
  bits      uint8: kept tokens, np.packbits per case, in order of falling input logit, where they form long runs
  few       float32: probabilities of the kept tokens in that order, for cases that keep at most COLUMNS tokens
  columns   float32 [m, COLUMNS]: for the m others, the probabilities at columns(vocab) ...
  moments   float64 [m, 3]: ... and moments(p)
"""

import sys
from pathlib import Path

import numpy as np

from tests.golden.sampler_cases import COLUMNS, OPTIONS, VOCABULARIES, WARPERS, columns, make_case, moments

MARGIN = 2e-6
GAP = 1e-5
N_SINGLE = {7: 24, 1000: 16, 50257: 6}  # cases per option
N_COMBINED = {7: 400, 1000: 300, 50257: 120}


class Unfit(Exception):
    """This case's outcome hangs on rounding, or on ties that a later filter would see."""


def presence_frequency(logits, output, presence, frequency):
    """vLLM's rule, which transformers does not have: output tokens only, a fixed price and a price per occurrence."""
    import torch

    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(logits)).to(logits.dtype)
    logits = logits - frequency * counts
    return logits - presence * (counts > 0).to(logits.dtype)


def steps(case, dtype):
    """The chain in minigen's order: yields (name, logits before, logits after), torch [V] of dtype."""
    import torch
    import transformers.generation.logits_process as hf

    logits = torch.from_numpy(case.logits).to(dtype)
    ids = torch.tensor([case.ids], dtype=torch.int64)
    on = case.options

    def apply(processor):
        # [V] -> [V]: processors work on batches, here of one row
        return processor(ids, logits[None].clone())[0]

    if "repetition_penalty" in on and case.ids:
        logits = apply(hf.RepetitionPenaltyLogitsProcessor(on["repetition_penalty"]))
    logits = presence_frequency(
        logits, case.ids[case.n_prompt :], on.get("presence_penalty", 0.0), on.get("frequency_penalty", 0.0)
    )
    if "no_repeat_ngram_size" in on:
        logits = apply(hf.NoRepeatNGramLogitsProcessor(on["no_repeat_ngram_size"]))
    if "logit_bias" in on:
        bias = [[[token], float(value)] for token, value in on["logit_bias"].items()]
        logits = apply(hf.SequenceBiasLogitsProcessor(bias))
    if not torch.isfinite(logits).any():
        raise Unfit("everything is banned")
    warpers = {
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
        "typical_p": hf.TypicalLogitsWarper,
    }
    yield "penalties", logits, logits
    for name, warper in warpers.items():
        if name in on:
            before = logits
            logits = apply(warper(on[name]))
            yield name, before, logits


def check_gap(inside, outside):
    """inside, outside: the sorted quantity at the last kept and the first removed token. True if they tie."""
    if inside != outside and abs(inside - outside) < GAP:
        raise Unfit("nearly equal values at the border")
    return inside == outside


def check_mass(mass, n, p):
    """mass: cumulated probabilities in the filter's order, of which the filter needs the first n."""
    if abs(mass[n - 1] - p) < MARGIN or (n > 1 and abs(mass[n - 2] - p) < MARGIN):
        raise Unfit("mass at the border")


def border(name, value, before, after):
    """True if the filter's outcome depends on how it breaks ties. before, after: float64 [V]. Raises Unfit."""
    kept = np.isfinite(after)
    finite = int(np.isfinite(before).sum())
    logp = before - before.max()
    logp = logp - np.log(np.exp(logp).sum())
    if name == "top_k":
        falling = np.sort(before)[::-1]
        return value < finite and check_gap(falling[value - 1], falling[value])
    if name == "top_p":
        falling = np.sort(logp)[::-1]
        n = int(kept.sum())
        check_mass(np.exp(falling).cumsum(), n, value)
        return n < finite and check_gap(falling[n - 1], falling[n])
    if name == "min_p":
        distance = np.abs(before - (before.max() + np.log(value)))
        if np.any(distance[before < before.max()] < GAP):
            raise Unfit("probability at the border")
    if name == "typical_p":
        p = np.exp(logp)
        entropy = -np.sum(p[p > 0] * logp[p > 0])
        surprise = np.abs(-logp - entropy)
        order = np.argsort(surprise, kind="stable")
        mass = p[order].cumsum()
        n = min(int((mass < value).sum()) + 1, finite)
        check_mass(mass, n, value)
        if n == finite:
            return False
        last, first = order[n - 1], order[n]
        # Equal logits tie. Different logits may lie equally far from the entropy, one on each side: that is rounding.
        if before[last] != before[first] and surprise[first] - surprise[last] < GAP:
            raise Unfit("nearly equal distances at the border")
        return before[last] == before[first]
    return False


def outcome(case):
    """-> (kept bool [V], probabilities float64 [V], name of the filter that broke a tie or None). Raises Unfit."""
    import torch

    tie = None
    for name, before, after in steps(case, torch.float64):
        if tie and name != "temperature":
            raise Unfit("a tie that a later filter sees")
        if border(name, case.options.get(name), before.numpy(), after.numpy()):
            tie = name
    kept = torch.isfinite(after)
    *_, (_, _, single) = steps(case, torch.float32)
    if not torch.equal(kept, torch.isfinite(single)):
        raise Unfit("float32 and float64 keep different tokens")
    if tie and kept.sum() > COLUMNS:
        raise Unfit("a tie among more tokens than are stored one by one")
    return kept.numpy(), torch.softmax(after, dim=-1).numpy(), tie


def main(out_folder):
    cases, bits, few, wide_columns, wide_moments = [], [], [], [], []
    for vocab in VOCABULARIES:
        wanted = [(name, N_SINGLE[vocab]) for name in OPTIONS] + [(None, N_COMBINED[vocab])]
        for only, number in wanted:
            found, seed = 0, -1
            while found < number:
                seed += 1
                case = make_case(vocab, seed, only)
                try:
                    kept, p, tie = outcome(case)
                except Unfit:
                    continue
                found += 1
                order = np.argsort(-case.logits, kind="stable")
                option = -1 if only is None else OPTIONS.index(only)
                broken = -1 if tie is None else WARPERS.index(tie)
                cases.append((vocab, option, seed, broken))
                bits.append(np.packbits(kept[order]))
                if kept.sum() <= COLUMNS:
                    few.append(p[order][kept[order]].astype(np.float32))
                else:
                    wide_columns.append(p[columns(vocab)].astype(np.float32))
                    wide_moments.append(moments(p))
    path = Path(out_folder) / "sampler.npz"
    np.savez_compressed(
        path,
        cases=np.array(cases, dtype=np.int32),
        bits=np.concatenate(bits),
        few=np.concatenate(few),
        columns=np.array(wide_columns),
        moments=np.array(wide_moments),
    )
    print(f"{path}: {len(cases)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)

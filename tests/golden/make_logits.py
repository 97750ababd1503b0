"""Golden logits and greedy ids by transformers' GPT2LMHeadModel: float32, CPU, eager attention.

logits.json: per case its config, the seed and spread of its weights (null: the bundled model of that name), the
smallest gap between the two best logits of the greedy run, and how far transformers is from the float64 reference.
logits.npz: per case
  <case>/ids        int64 [200]        the prompt
  <case>/columns    int64 [64]         the vocabulary columns that are kept
  <case>/logits     float32 [200, 64]  logits of those columns at every position
  <case>/logsumexp  float32 [200]      over the whole vocabulary
  <case>/argmax     int64 [200]
  <case>/greedy     int64 [100]        greedy continuation of the first 20 ids of the prompt
  <case>/margins    float32 [100]      best logit minus second best at each of those steps
Random weights are not stored: tests.oracles.tiny.random_params makes them from the seed; `fingerprint` checks it.
"""

import json
from pathlib import Path

import numpy as np

from tests.oracles.reference import ACT, reference_logits
from tests.oracles.tiny import random_params

N_PROMPT, N_COLUMNS, N_START, N_GREEDY = 200, 64, 20, 100
# A greedy run is a fair test of rounding only where the two best logits are further apart than rounding moves them.
MIN_MARGIN = 1e-3

SMALL = {
    "model_type": "gpt2",
    "vocab_size": 97,
    "n_positions": 256,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "bos_token_id": 96,
    "eos_token_id": 96,
}
SHAPE_124M = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12}
FLAGS = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")


def random_cases() -> dict[str, tuple[dict, float]]:
    """case -> (config, standard deviation of its weights)."""
    cases = {"default": {}}  # every key that has a default is left out, so the defaults are tested too
    cases |= {f"act-{name}": {"activation_function": name} for name in ACT}
    for bits in range(8):
        values = [bool(bits & 1), bool(bits & 2), bool(bits & 4)]
        cases[f"flags-{bits}"] = dict(zip(FLAGS, values, strict=True))
    cases["n_inner"] = {"n_inner": 40}
    cases["epsilon"] = {"layer_norm_epsilon": 0.1}
    cases["untied"] = {"tie_word_embeddings": False}
    return {name: (SMALL | extra, 0.3) for name, extra in cases.items()} | {"gpt2-124m": (SHAPE_124M, 0.06)}


def fingerprint(params: dict[str, np.ndarray]) -> float:
    """A number that changes if the weights do: the sum of every 1,009th value of each tensor."""
    return float(sum(p.ravel()[::1009].astype(np.float64).sum() for p in params.values()))


def stored_params(folder: Path) -> dict[str, np.ndarray]:
    """A checkpoint's tensors as float32, without the prefix `transformer.`."""
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix("transformer."): value.astype(np.float32) for name, value in tensors.items()}


def golden_params(name: str, note: dict) -> dict[str, np.ndarray]:
    """The weights of a golden model, drawn again or read from weights/; the note is its entry in a golden file."""
    if note["seed"] is None:
        params = stored_params(Path(__file__).parents[2] / "weights" / name)
    else:
        params = random_params(note["config"], note["seed"], note["std"])
    if not np.isclose(fingerprint(params), note["fingerprint"], rtol=1e-9, atol=1e-6):
        raise ValueError(f"{name}: these are not the weights that the golden file was made with: make the files anew")
    return params


def torch_model(config: dict, params: dict[str, np.ndarray]):
    """transformers' model with these weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):  # no random weights to be thrown away
        model = GPT2LMHeadModel._from_config(GPT2Config(**config), attn_implementation="eager")
    state = {("" if name == "lm_head.weight" else "transformer.") + name: p for name, p in params.items()}
    state = {name: torch.from_numpy(p) for name, p in state.items()}
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def bundled_model(folder: Path):
    import torch
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(model, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Greedy ids [100] and margins [100] after ids; end-of-text does not stop it."""
    import torch

    model.generation_config.eos_token_id = None
    prompt = torch.from_numpy(ids[None])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=N_GREEDY,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best, second = torch.stack(out.logits)[:, 0].topk(2).values.T
    return out.sequences[0, len(ids) :].numpy(), (best - second).numpy()


def sampled_text(model, seed: int) -> np.ndarray:
    """A tale by the model itself [200]: sampled after end-of-text at temperature 0.8."""
    import torch

    torch.manual_seed(seed)
    start = torch.tensor([[model.config.eos_token_id]])
    out = model.generate(
        start,
        attention_mask=torch.ones_like(start),
        do_sample=True,
        temperature=0.8,
        top_k=0,
        min_new_tokens=N_PROMPT - 1,
        max_new_tokens=N_PROMPT - 1,
        pad_token_id=0,
    )
    return out[0].numpy()


def golden(model, ids: np.ndarray, columns: np.ndarray) -> dict[str, np.ndarray]:
    import torch

    logits = model(torch.from_numpy(ids[None])).logits[0]
    return {
        "ids": ids,
        "columns": columns,
        "logits": logits[:, columns].numpy(),
        "logsumexp": logits.logsumexp(-1).numpy(),
        "argmax": logits.argmax(-1).numpy(),
    }, logits.numpy()


def main(out_folder: Path) -> None:
    import torch

    notes, arrays = {}, {}

    def add(name, config, params, seed, std, found, all_logits, greedy_ids, margins):
        error = np.abs(all_logits - reference_logits(config, params, found["ids"])).max()
        spread = all_logits.std(-1).mean()
        print(f"{name:24s} seed {seed}  spread {spread:6.2f}  margin {margins.min():.4f}  off float64 by {error:.1e}")
        assert error < 1e-4, f"{name}: transformers and the float64 reference differ by {error}"
        assert margins.min() > MIN_MARGIN, f"{name}: no seed gives a greedy run with clear margins"
        found = found | {"greedy": greedy_ids, "margins": margins}
        arrays.update({f"{name}/{key}": value for key, value in found.items()})
        notes[name] = {
            "config": config,
            "seed": None if std is None else seed,
            "std": std,
            "fingerprint": fingerprint(params),
            "min_margin": float(f"{margins.min():.4g}"),
            "max_error": float(f"{error:.2g}"),
        }

    with torch.inference_mode():
        for name, (config, std) in random_cases().items():
            draw = np.random.default_rng(7)
            ids = draw.integers(config["vocab_size"], size=N_PROMPT)
            columns = np.sort(draw.choice(config["vocab_size"], N_COLUMNS, replace=False))
            for seed in range(20):
                params = random_params(config, seed, std)
                model = torch_model(config, params)
                greedy_ids, margins = greedy(model, ids[:N_START])
                if margins.min() > MIN_MARGIN:
                    break
            add(name, config, params, seed, std, *golden(model, ids, columns), greedy_ids, margins)
            del model, params
        for name in ("fairytale", "distilfairytale"):
            folder = Path("weights") / name
            config = json.loads((folder / "config.json").read_text())
            model = bundled_model(folder)
            columns = np.sort(np.random.default_rng(7).choice(config["vocab_size"], N_COLUMNS, replace=False))
            for seed in range(20):
                ids = sampled_text(model, seed)
                greedy_ids, margins = greedy(model, ids[:N_START])
                if margins.min() > MIN_MARGIN:
                    break
            params = stored_params(folder)
            add(name, config, params, seed, None, *golden(model, ids, columns), greedy_ids, margins)

    (out_folder / "logits.json").write_text(json.dumps(notes, indent=1) + "\n")
    np.savez_compressed(out_folder / "logits.npz", **arrays)
    print(f"logits.npz: {(out_folder / 'logits.npz').stat().st_size / 1e6:.2f} MB")

"""Finding a checkpoint's folder by name: a local folder, a bundled model, or a repository of the Hugging Face hub."""

import os
import re
import sys
import warnings
from pathlib import Path

from minigen.engine.validation import short_repr
from minigen.files.checkpoint import is_file, weight_files
from minigen.files.tokenizer_files import JSON_FILES

DEFAULT_MODEL = "fairytale"
# The bundled models: inside the package in an installed wheel, beside it in a checkout.
WEIGHTS_FOLDERS = [folder / "weights" for folder in Path(__file__).resolve().parents[1:3]]
# The files to download from a hub repository, which may hold the same weights in five other formats. The weights come
# last: if they are in the cache, so are all other files.
SMALL_FILES = ["config.json", "generation_config.json", "model.safetensors.index.json", "merges.txt", *JSON_FILES]
WEIGHTS = ["model*.safetensors"]


def _bundled_names():
    return ", ".join(
        sorted({path.parent.name for weights in WEIGHTS_FOLDERS for path in weights.glob("*/config.json")})
    )


def _missing_files(folder):
    """A message naming the missing checkpoint files, or None if all are present (validity is not checked)."""
    try:
        weight_files(folder)
    except OSError as error:
        return str(error)
    except ValueError:
        pass  # `load_weights` reports an index that cannot be used
    if not is_file(folder / "config.json"):
        return f"{folder} has no config.json"
    if is_file(folder / "tokenizer.json") or all(is_file(folder / name) for name in ("vocab.json", "merges.txt")):
        return None
    return f"{folder} has neither vocab.json with merges.txt nor tokenizer.json"


def _download(repo_id):
    """Download the needed files of a hub repository into the local cache. Returns the snapshot folder.

    If the hub rejects the user's token, the download is tried without it, because a public repository needs none.
    Raises OSError with one sentence that says what to do and never shows a token.
    """
    # Imported here because it takes longer than all other imports together, and most runs need no hub.
    from huggingface_hub import HfApi, constants, errors, get_token, snapshot_download, utils

    utils.logging.set_verbosity_error()  # its warnings only say that it tries again
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    token, advice = None, ""

    def ask():
        # snapshot_download makes the same request first, but without a timeout.
        HfApi().model_info(repo_id, token=token, timeout=constants.HF_HUB_ETAG_TIMEOUT)

    try:
        try:
            ask()
        except errors.HfHubHTTPError as error:
            if error.response.status_code != 401 or not get_token():
                raise
            token = False
            refused = "the hub refused your token: renew it with `hf auth login`, or unset HF_TOKEN"
            advice = f"; {refused}"
            ask()
            warnings.warn(f"{refused}; {repo_id} is public and is downloaded without it", stacklevel=4)
        folder = Path(snapshot_download(repo_id, allow_patterns=SMALL_FILES, token=token))
        snapshot_download(repo_id, revision=folder.name, allow_patterns=WEIGHTS, token=token)
        return folder
    except errors.GatedRepoError as error:
        sentence = f"{repo_id} requires its users to accept terms: do so on its page, then `hf auth login`"
        raise OSError(sentence + advice) from error
    except errors.RepositoryNotFoundError as error:
        sentence = f"the hub has no model {repo_id!r}: check the name, or run `hf auth login` if it is private"
        raise OSError(sentence + advice) from error
    except Exception as error:  # a broken connection raises exceptions of the HTTP client, which varies
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            sentence = (
                f"the hub does not let you read {repo_id}: ask for access on its page, or log in as another user with "
                "`hf auth login`"
            )
            raise OSError(sentence + advice) from error
        if isinstance(error, OSError) and error.strerror:  # a full or read-only disk
            raise OSError(
                f"cannot write {repo_id} to the local cache ({constants.HF_HUB_CACHE}): {error.strerror}; make room "
                "there, or set HF_HOME to another folder"
            ) from error
        problem = str(error).strip().partition("\n")[0] or type(error).__name__
        problem = re.sub(r"Bearer .*|hf_\w+", "your token", problem)  # an invalid header is quoted in full
        raise OSError(
            f"{repo_id} is not complete in the local cache ({constants.HF_HUB_CACHE}) and cannot be downloaded "
            f"({problem}); try again later, or give the folder of a checkpoint"
        ) from error


def _from_hub(repo_id):
    """The snapshot folder of a hub repository; downloaded unless it is complete in the local cache."""
    from huggingface_hub import constants

    # The library's own search of its cache demands every file of the repository; only some are needed here.
    cached = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"
    main = cached / "refs" / "main"
    snapshots = [cached / "snapshots" / main.read_text().strip()] if main.is_file() else cached.glob("snapshots/*")
    for folder in snapshots:
        if not _missing_files(folder):
            return folder
    if constants.HF_HUB_OFFLINE:
        raise OSError(
            f"{repo_id} is not complete in the local cache ({constants.HF_HUB_CACHE}) and HF_HUB_OFFLINE is set: unset "
            "it and go online once, or give the folder of a checkpoint"
        )
    folder = _download(repo_id)
    if problem := _missing_files(folder):
        raise OSError(f"{repo_id} is not a usable checkpoint: {problem}; choose another, or convert it yourself")
    return folder


def resolve_checkpoint(name=None):
    """The folder of a checkpoint.

    name: an existing folder; else the name of a model under weights/; else a hub id, for which `gpt2`, `gpt2-medium`
    ... and `distilgpt2` are short; None for the bundled default. A model from the hub is downloaded once, and then used
    from the local cache without network access. Raises OSError if there is no such checkpoint.
    """
    path = Path(os.path.expanduser(DEFAULT_MODEL if name is None else name))
    if name and os.path.isdir(path):  # os.path returns False for invalid names; Path raises
        return path
    if name and os.path.isfile(path):
        raise OSError(f"{path} is a file; give the folder that holds config.json and model.safetensors")
    for weights in WEIGHTS_FOLDERS:
        if path.name and os.path.isfile(weights / path / "config.json"):
            return weights / path
    repo_id = str(name)
    if repo_id == "distilgpt2":
        repo_id = "distilbert/distilgpt2"
    elif re.fullmatch(r"gpt2(-\w+)?", repo_id):
        repo_id = f"openai-community/{repo_id}"
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo_id, re.ASCII):
        raise OSError(
            f"there is no checkpoint {short_repr(str(name))}: give an existing folder, one of {_bundled_names()}, "
            "gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2, or a hub id such as owner/name"
        )
    return _from_hub(repo_id)


def default_draft(name=None):
    """The name of the default draft model of a model. Raises ValueError if there is none."""
    if name in (None, DEFAULT_MODEL):
        return "distilfairytale"
    if re.fullmatch(r"(openai-community/)?gpt2(-\w+)?", name):
        return "distilgpt2"
    raise ValueError(f"no default draft model for {name}; choose one with the same vocabulary with --draft-model NAME")

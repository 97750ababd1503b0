"""Downloads: the hub's client, as it is, against a small server on this machine that plays the hub.

One process asks for all repositories, side by side, as several of its answers take seconds of waiting. What is in the
cache already, and a network that is not there, is for test_checkpoint.py.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from minigen.files.hub import resolve_checkpoint
from tests.oracles.reference import reference_logits
from tests.oracles.tiny import tiny_config, tiny_params, write_byte_vocab, write_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_ThisTokenIsNotToBeShown"
CONFIG = tiny_config(vocab_size=257)
# Repositories with two files more, one of which cannot be downloaded at first.
SMALL = {"generation_config.json": b'{"eos_token_id": [256, 66]}', "added_tokens.json": b'{"<pad>": 300}'}
HALVES = {"half_config": "generation_config.json", "half_tokens": "added_tokens.json"}
SCRIPT = """
import json, os, sys, warnings
from concurrent.futures import ThreadPoolExecutor
import minigen

def no_links(*args, **kwargs):
    raise OSError(1314, "a required privilege is not held by the client")

if os.environ.get("WITHOUT_LINKS"):
    os.symlink = no_links

warned = []
warnings.showwarning = lambda message, *_, **__: warned.append(str(message))
warnings.simplefilter("always")

def load(name):
    try:
        model, tokenizer = minigen.load(name)
        logits = model.forward([[1, 2, 3]])[0].tolist()
        return {"logits": logits, "eos": model.config.eos_ids, "ids": tokenizer.encode("!<pad>")}
    except Exception as error:
        return {"error": str(error), "is_oserror": isinstance(error, OSError)}

names = sys.argv[1:]
with ThreadPoolExecutor(len(names)) as pool:
    print(json.dumps(dict(zip(names, pool.map(load, names)))))
print(json.dumps(warned))
"""


class Hub(ThreadingHTTPServer):
    """Serves one checkpoint under every name; the name says what goes wrong."""

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.requests = []  # (method, repository, file or None, whether there was a token)
        self.working = False  # whether what was dropped is served now
        self.closing = threading.Event()
        self.waiting = threading.Event()  # somebody is

    def handle_error(self, request, client_address):
        """A client that was stopped has closed its connection."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """stderr is the test's."""

    def send(self, code, body=b"", length=None, **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0]
        found = re.fullmatch(r"/(?:api/models/)?(\w+/\w+)(?:/(tree|resolve|revision)/\w+)?(?:/(.+))?", path)
        if not found:
            return self.send(404)
        repo, kind, file = found.groups()
        token = "Authorization" in self.headers
        hub.requests.append((self.command, repo, file, token))
        name = repo.partition("/")[2]

        if token and name in ("public", "missing_with_token"):
            return self.send(401, X_Error_Message="Invalid credentials in Authorization header")
        if name.startswith("missing"):
            return self.send(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        if name == "gated" and kind == "resolve":
            return self.send(401, X_Error_Code="GatedRepo", X_Error_Message="Access to model is restricted")
        if name == "forbidden":
            return self.send(403, X_Error_Message="not in the list")
        if name == "broken":
            return self.send(500)
        weights = file == "model.safetensors" and self.command == "GET"
        before = self.command, repo, file, token
        again = weights and hub.requests.count(before) > 1
        if name in ("hangs_in_file", "dropped") and again and not hub.working:
            return self.send(500)  # the client tries to go on where it was
        if file and HALVES.get(name) == file and not hub.working:
            return self.send(403)  # 500 would do the same, after half a minute of the client's retries
        if name == "hangs" or (name.startswith("hangs_in_file") and weights):
            if file:
                self.send(200, b"12345", length=99999, ETag='"x"', X_Repo_Commit=COMMIT)
            hub.waiting.set()
            hub.closing.wait(60)
            self.close_connection = True
            return None
        files = {name: data for name, data in hub.files.items() if name != "model.safetensors" or repo != "some/pickle"}
        files |= SMALL if name in HALVES else {}
        if kind == "tree":
            listed = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in files.items()
            ]
            return self.send(200, json.dumps(listed).encode(), Content_Type="application/json")
        if not file:
            content = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}
            return self.send(200, json.dumps(content).encode(), Content_Type="application/json")
        data = files[file]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X_Repo_Commit": COMMIT}
        if name == "dropped" and weights and not hub.working:
            self.send(200, data[: len(data) // 2], length=len(data), **headers)
            self.close_connection = True
            return None
        return self.send(200, data, **headers)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = write_byte_vocab(write_checkpoint(tmp_path_factory.mktemp("repo"), CONFIG, tiny_params(CONFIG)))
    server = Hub({path.name: path.read_bytes() for path in folder.iterdir()})
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


def environment(hub, home, **more):
    ours = re.compile(r"HF_.*|HUGGING.*|XDG_.*|.*_PROXY", re.IGNORECASE)
    env = {key: value for key, value in os.environ.items() if not ours.fullmatch(key)}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HOME": str(home), "PYTHONPATH": str(ROOT)}
    return env | {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_OFFLINE": "0"} | more


def load_all(env, *names):
    """What `load` gave for each name, and the warnings; nothing else may have come to stderr, and no token at all."""
    command = [sys.executable, "-c", SCRIPT, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert done.stderr == ""
    results, warned = map(json.loads, done.stdout.splitlines())
    for name in names:
        if "error" in results[name]:
            assert results[name]["is_oserror"]
            assert "\n" not in results[name]["error"]
            assert name in results[name]["error"]
    return results, warned


def assert_loaded(result):
    expected = reference_logits(CONFIG, tiny_params(CONFIG), [1, 2, 3])[-1]
    assert np.abs(np.array(result["logits"]) - expected).max() < 1e-5


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hömë with spaces")


ANONYMOUS = ["good", "missing", "gated", "forbidden", "broken", "hangs", "hangs_in_file", "dropped", "pickle", *HALVES]


@pytest.fixture(scope="module")
def anonymous(hub, home):
    results, warned = load_all(environment(hub, home), *(f"some/{name}" for name in ANONYMOUS))
    assert warned == []
    return results


def test_a_download_and_then_the_cache(hub, home, anonymous, monkeypatch):
    """C03, C04, F25: a rejected token is not needed for a public or cached model; an interrupted download is completed.

    There are no symbolic links this time: files are then copied or moved into the cache, and are found there.
    """
    assert_loaded(anonymous["some/good"])
    asked = len(hub.requests)
    hub.working = True
    # With the token that the hub refuses, and a model that needs none because it is there; and the second try of what
    # was interrupted.
    public, halves = ["some/public", "some/dropped"], ["some/half_config", "some/half_tokens"]
    env = environment(hub, home, HF_TOKEN=TOKEN + "\n", WITHOUT_LINKS="1", HF_HUB_DISABLE_SYMLINKS_WARNING="1")
    results, warned = load_all(env, "some/good", "some/missing_with_token", *public, *halves)
    for name in ("some/good", *public, *halves):
        assert_loaded(results[name])
    for name in halves:
        assert (results[name]["eos"], results[name]["ids"]) == ([256, 66], [0, 300])
    assert not any(repo == "some/good" for _, repo, *_ in hub.requests[asked:])
    assert any(token for _, repo, _, token in hub.requests if repo == "some/public")
    (warning,) = warned
    assert "refused your token" in warning and "hf auth login" in warning
    error = results["some/missing_with_token"]["error"]
    assert "no model" in error and "refused your token" in error and "HF_TOKEN" in error
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))  # this process is offline
    folder = resolve_checkpoint("some/public")
    assert home in folder.parents and not any(path.is_symlink() for path in folder.iterdir())
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@pytest.mark.parametrize(
    "name, words",
    [
        ("missing", ["no model", "check the name", "hf auth login"]),
        ("gated", ["accept", "hf auth login"]),
        ("forbidden", ["access", "hf auth login"]),
        ("broken", ["500", "again"]),
        ("hangs", ["timed out", "again"]),
        ("hangs_in_file", ["500", "again"]),
        ("dropped", ["500", "again"]),
        ("half_config", ["again"]),
        ("half_tokens", ["again"]),
        ("pickle", [r"model\.safetensors", "convert"]),
    ],
)
def test_what_goes_wrong_is_told_in_one_sentence(anonymous, name, words):
    for word in words:
        assert re.search(word, anonymous[f"some/{name}"]["error"]), anonymous[f"some/{name}"]


@pytest.mark.skipif(os.name != "posix", reason="limits and signals as POSIX has them")
def test_a_disk_that_takes_no_more(hub, tmp_path):
    """A limit on the size of files stands in for a full disk: the same failing write, with another number."""
    import resource

    command = [sys.executable, "-m", "minigen", "--model", "some/good", "hi"]
    limit = len(hub.files["model.safetensors"]) // 2
    done = subprocess.run(
        command,
        env=environment(hub, tmp_path, HF_TOKEN=TOKEN),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    for word in ("some/good", str(tmp_path), "make room", "HF_HOME"):
        assert word in line
    assert TOKEN not in line


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_ends_a_download_at_once(hub, tmp_path):
    hub.waiting.clear()
    with subprocess.Popen(
        [sys.executable, "-m", "minigen", "--model", "some/hangs_in_file_for_long", "hi"],
        env=environment(hub, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="50"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert hub.waiting.wait(60)
        process.send_signal(signal.SIGINT)
        try:
            assert process.communicate(timeout=20) == (b"", b"")  # the library's own limit is at 50
        finally:
            process.kill()
    assert process.returncode == 130

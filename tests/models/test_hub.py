"""Downloading, from a hub that runs here: HF_ENDPOINT and HF_HUB_OFFLINE are the user's own settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights",
    "original/consolidated.00.safetensors": b"the same weights",
    "pytorch_model.bin": b"the same weights",
    "tokenizer.json": b"{}",
    "modeling_chatglm.py": b"raise SystemExit",
    "run.py": b"raise SystemExit",
    "README.md": b"words",
}
OLD = {name: content for name, content in FILES.items() if not name.endswith(".safetensors")}
REPOSITORIES = {"lab/model": FILES, "lab/old": OLD}
REFUSED = {"lab/gated": (403, "GatedRepo"), "lab/none": (404, "RepoNotFound"), "lab/broken": (500, "")}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a download needs."""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/models").strip("/")
        name = "/".join(path.split("/")[:2])
        if name in REFUSED:
            code, word = REFUSED[name]
            self._send(code, b"", {"X-Error-Code": word, "X-Error-Message": word}, body=body)
        elif "/resolve/" in path:
            content = REPOSITORIES[name][path.partition(f"/resolve/{COMMIT}/")[2]]
            self._send(200, content, {"ETag": f'"{len(content)}"', "X-Repo-Commit": COMMIT}, body=body)
        elif "/tree/" in path:
            files = REPOSITORIES[name].items()
            found = [
                {"type": "file", "path": file, "size": len(data), "oid": "0" * 40} for file, data in files
            ]
            self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, body=body)
        else:
            siblings = [{"rfilename": file} for file in REPOSITORIES[name]]
            found = {"id": name, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, body=body)

    def _send(self, code: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


SCRIPT = """
import sys
from dsrun.errors import DsrunError
from dsrun.models.hub import download
try:
    folder = download(sys.argv[1], "our-model")
except DsrunError as error:
    print(error.problems[0].what, error.problems[0].hint, sep="\\n")
    sys.exit(1)
print(*sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
"""


def download(repository: str, home: Path, **environ: str) -> tuple[int, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))
    }
    env = {**kept, "HF_HOME": str(home), "NO_PROXY": "*", "no_proxy": "*", "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, repository],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_from_a_mirror_and_then_offline(hub, tmp_path):
    code, said = download("lab/model", tmp_path, HF_ENDPOINT=hub)
    assert (code, said.split()) == (
        0, ["config.json", "model.safetensors", "modeling_chatglm.py", "tokenizer.json"]
    )  # fmt: skip
    assert download("lab/model", tmp_path, HF_HUB_OFFLINE="1") == (code, said)


def test_weights_of_an_old_repository(hub, tmp_path):
    code, said = download("lab/old", tmp_path, HF_ENDPOINT=hub)
    assert code == 0
    assert "pytorch_model.bin" in said.split()


@pytest.mark.parametrize(
    ("repository", "what", "hint"),
    [
        ("lab/gated", "lab/gated is gated", "hf auth login"),
        ("lab/none", "there is no repository lab/none", "--model-path DIR"),
        ("lab/broken", "lab/broken can't be downloaded", "HF_ENDPOINT answer: http://127.0.0.1"),
    ],
)
def test_what_to_do_where_it_is_refused(hub, tmp_path, repository, what, hint):
    code, said = download(repository, tmp_path, HF_ENDPOINT=hub)
    assert code == 1
    assert what in said
    assert hint in said
    assert "dsrun finetune our-model --model-path DIR" in said


def test_a_mirror_that_does_not_answer(tmp_path):
    code, said = download("lab/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert code == 1
    assert "HF_ENDPOINT answer: http://127.0.0.1:9" in said


def test_offline_without_the_model_says_so(tmp_path):
    code, said = download("lab/model", tmp_path, HF_HUB_OFFLINE="1")
    assert code == 1
    assert "lab/model can't be downloaded" in said

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
from needed import needs

needs("huggingface_hub")

from dsrun.errors import DsrunError
from dsrun.models import resolve
from dsrun.models.hub import Repository, parse

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
AWQ = {
    **FILES,
    "config.json": b'{"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}',
}
REPOSITORIES = {"lab/model": FILES, "lab/old": OLD, "lab/awq": AWQ, "lab/gguf": {"model.gguf": b"GGUF"}}
REFUSED = {"lab/gated": (403, "GatedRepo"), "lab/none": (404, "RepoNotFound"), "lab/broken": (500, "")}


asked: list[str] = []
"""The files that were asked for."""


class Hub(BaseHTTPRequestHandler):
    """Part of the hub's protocol that a download needs."""

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
            asked.append(path)
            file = path.partition("/resolve/")[2].partition("/")[2]
            if file not in REPOSITORIES[name]:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body=body)
                return
            content = REPOSITORIES[name][file]
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
from dsrun.models import hub, resolve
try:
    if sys.argv[2] == "config":
        spec, _ = resolve.resolve(sys.argv[1], None)
        print(spec.source, spec.location, resolve.architecture(spec)["model_type"])
    else:
        folder = hub.download(hub.parse(sys.argv[1]))
        print(*sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
except DsrunError as error:
    print(error.problems[0].what, error.problems[0].hint, sep="\\n")
    sys.exit(1)
"""


def ask(what: str, repository: str, home: Path, **environ: str) -> tuple[int, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))
    }
    env = {**kept, "HF_HOME": str(home), "NO_PROXY": "*", "no_proxy": "*", "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, repository, what],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def download(repository: str, home: Path, **environ: str) -> tuple[int, str]:
    return ask("weights", repository, home, **environ)


def test_from_a_mirror_and_then_offline(hub, tmp_path):
    code, said = download("lab/model", tmp_path, HF_ENDPOINT=hub)
    assert (code, said.split()) == (
        0, ["config.json", "model.safetensors", "modeling_chatglm.py", "tokenizer.json"]
    )  # fmt: skip
    assert download("lab/model", tmp_path, HF_HUB_OFFLINE="1") == (code, said)
    # No answer is as good as none allowed.
    assert download("lab/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9") == (code, said)


def test_weights_of_an_old_repository(hub, tmp_path):
    code, said = download("lab/old", tmp_path, HF_ENDPOINT=hub)
    assert code == 0
    assert "pytorch_model.bin" in said.split()


GATED = ("lab/gated", "lab/gated is gated", "hf auth login")
NONE = ("lab/none", "there is no repository lab/none", "hf auth login")
BROKEN = ("lab/broken", "lab/broken can't be downloaded", "HF_ENDPOINT answer: http://127.0.0.1")


@pytest.mark.parametrize(
    ("part", "repository", "what", "hint"),
    [
        *(("config", *case) for case in (GATED, NONE)),
        *(("weights", *case) for case in (GATED, NONE, BROKEN)),
        # The hub's library asks again and again, for 24 seconds.
        pytest.param("config", *BROKEN, marks=pytest.mark.full),
    ],
)
def test_what_to_do_where_it_is_refused(hub, tmp_path, part, repository, what, hint):
    code, said = ask(part, repository, tmp_path, HF_ENDPOINT=hub)
    assert code == 1
    assert what in said
    assert hint in said
    assert "pass the folder that holds it" in said


def test_a_mirror_that_does_not_answer(tmp_path):
    code, said = download("lab/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert code == 1
    assert "HF_ENDPOINT answer: http://127.0.0.1:9" in said


def test_offline_without_the_model_says_so(tmp_path):
    code, said = download("lab/model", tmp_path, HF_HUB_OFFLINE="1")
    assert code == 1
    assert "lab/model can't be downloaded" in said
    assert "Unset HF_HUB_OFFLINE" in said
    code, said = ask("config", "lab/model", tmp_path, HF_HUB_OFFLINE="1")
    assert code == 1
    assert "not in the cache" in said


def test_of_a_repository_only_the_config_is_asked_for_first(hub, tmp_path):
    asked.clear()
    code, said = ask("config", "lab/model", tmp_path, HF_ENDPOINT=hub)
    assert (code, said.split()) == (0, ["hub", "lab/model", "llama"])
    assert {path.rpartition("/")[2] for path in asked} == {"config.json"}
    code, said = download("lab/model", tmp_path, HF_HUB_OFFLINE="1")
    assert code == 1
    assert "without its weights" in said


def test_what_can_not_be_trained_is_not_downloaded(hub, tmp_path):
    asked.clear()
    code, said = ask("config", "lab/awq", tmp_path, HF_ENDPOINT=hub)
    assert code == 1
    assert "AWQ, 4 bits" in said
    assert not any(path.endswith(".safetensors") for path in asked)


def test_a_repository_without_a_config(hub, tmp_path):
    code, said = ask("config", "lab/gguf", tmp_path, HF_ENDPOINT=hub)
    assert code == 1
    assert "holds no config.json" in said
    assert "GGUF" in said


def test_a_revision(hub, tmp_path):
    code, said = ask("config", f"lab/model@{COMMIT}", tmp_path, HF_ENDPOINT=hub)
    assert (code, said.split()) == (0, ["hub", f"lab/model@{COMMIT}", "llama"])


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("Qwen/Qwen3-4B", Repository("Qwen/Qwen3-4B")),
        ("hf:Qwen/Qwen3-4B@refs/pr/1", Repository("Qwen/Qwen3-4B", revision="refs/pr/1")),
        ("modelscope:Qwen/Qwen3-4B", Repository("Qwen/Qwen3-4B", "modelscope:")),
        ("./Qwen3-4B", None), ("models/a/b", None), ("/models/a", None), ("llama-tiny", None), ("~/a", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_repositorys_name(text, parsed):
    assert parse(text) == parsed
    assert parsed is None or parse(str(parsed)) == parsed


def test_a_folder_is_nearer_than_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab" / "model").mkdir(parents=True)
    assert parse("lab/model") is None
    assert parse("hf:lab/model") == Repository("lab/model")


@pytest.mark.parametrize("text", ["hf:", "hf:llama", "modelscope:a/b/c", "hf:../x"])
def test_a_hub_and_no_repository(text):
    with pytest.raises(DsrunError, match="names no repository"):
        parse(text)


def test_modelscope_by_its_own_package(tmp_path, monkeypatch):
    """A package with the two functions that are used, as modelscope 1.x has them."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for name, content in OLD.items():
        (folder / Path(name).name).write_bytes(content)
    package = tmp_path / "packages" / "modelscope"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        f"FOLDER = {str(folder)!r}\n"
        "def model_file_download(model_id, file_path, revision=None):\n"
        "    return f'{FOLDER}/{file_path}'\n"
        "def snapshot_download(model_id, revision=None, allow_patterns=None, ignore_patterns=None):\n"
        "    return FOLDER\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "modelscope", raising=False)
    spec, _ = resolve.resolve("modelscope:lab/model@v2", None)
    assert (spec.source, spec.location) == ("hub", "modelscope:lab/model@v2")
    assert resolve.downloaded(spec).location == str(folder)
    sys.modules.pop("modelscope", None)


def test_modelscope_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(DsrunError) as caught:
        resolve.resolve("modelscope:lab/model", None)
    assert "pip install modelscope" in caught.value.problems[0].hint

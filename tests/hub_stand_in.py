"""A stand-in for the Hugging Face Hub: a server of this machine with the few calls that a push makes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_very-secret"
NAME, COMMIT = "my-lab/model", "a" * 40


class Hub:
    """State of the stand-in, and the calls that it got."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict] = {}
        self.commits: list[dict] = []
        self.created: list[str] = []
        self.seen: set[str | None] = set()
        self.refuses = 0
        self.address = ""

    @property
    def environ(self) -> dict[str, str]:
        """The variables of a user who has a token for it."""
        return {"HF_ENDPOINT": self.address, "HF_TOKEN": TOKEN}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        path = path.partition("?")[0]
        if method == "POST" and self.refuses:
            return self.refuses, {"error": "no"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.created.append(name)
            self.repositories[name] = {
                "private": asked.get("private", asked.get("visibility") == "private"),
                "files": [],
            }
            return 200, {"url": f"{self.address}/{name}"}
        name = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        found = self.repositories[name]
        if path.endswith("/preupload/main"):
            paths = [one["path"] for one in json.loads(body)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": one, **plain} for one in paths]}
        if path.endswith("/commit/main"):
            lines = [json.loads(line) for line in body.splitlines()]
            self.commits.append({"header": lines[0]["value"], "lines": lines[1:]})
            address = f"{self.address}/{name}/commit/{COMMIT}"
            return 200, {"commitUrl": address, "commitOid": COMMIT, "success": True}
        siblings = [{"rfilename": one} for one in found["files"]]
        return 200, {"id": name, "private": found["private"], "sha": "b" * 40, "siblings": siblings}


@contextmanager
def stand_in() -> Iterator[Hub]:
    """A Hub of this machine, as long as the body lasts. `environ` of it says where it is, with a token."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.seen.add(self.headers.get("Authorization"))
            code, value = hub.answer(self.command, self.path, body)
            text = json.dumps(value).encode()
            self.send_response(code)
            if code == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = _reply  # noqa: N815  (http.server asks for these names)
        do_POST = _reply  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()

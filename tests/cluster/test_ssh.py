"""Hosts are asked through ssh: what each answer means, and that no name and no host gets further than it should."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from dsrun.cluster import probe, ssh

ANSWER = json.dumps({"probe": probe.VERSION, "clock": {"time": 1.0}})
STUB = """#!{python}
import os, signal, subprocess, sys, time
with open({log!r}, "a") as file:
    file.write(repr(sys.argv[1:]) + "\\n")
host = sys.argv[sys.argv.index("--") + 1]
kind = host.partition("-")[0]
ANSWER = {answer!r}
if kind == "real":
    os.execv({python!r}, [{python!r}, "-I", "-"])
script = sys.stdin.read()
assert "OPTIONS = " in script
if kind == "good":
    print(ANSWER)
elif kind == "banner":
    print("Welcome to the cluster!\\n{{}} {{\\"probe\\": no}}\\n" + ANSWER + "\\nlogout")
elif kind == "glued":
    print("no end of line: " + ANSWER + " bye")
elif kind == "hang":
    child = subprocess.Popen(["sleep", "987"])
    open({log!r} + ".pids", "a").write(f"{{os.getpid()}} {{child.pid}}\\n")
    signal.pause()
elif kind == "lingering":
    subprocess.Popen(["sleep", "3"])
    print(ANSWER)
elif kind == "garbage":
    print("\\x1b[31mno JSON\\x07 here")
elif kind == "flood":
    while True:
        print("x" * 100000)
elif kind == "other":
    print('{{"probe": 99}}')
elif kind == "silent":
    pass
else:
    words, code = {said!r}[kind]
    print(words, file=sys.stderr)
    sys.exit(code)
"""
SAID = {
    "denied": ("a@b: Permission denied (publickey,password).", 255),
    "key": ("No ED25519 host key is known for key and you have requested strict checking.\r\n"
            "Host key verification failed.", 255),
    "changed": ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\r\nHost key verification failed.", 255),
    "nobody": ("ssh: Could not resolve hostname nobody: Name or service not known", 255),
    "route": ("ssh: connect to host x port 22: No route to host", 255),
    "refused": ("ssh: connect to host x port 22: Connection refused", 255),
    "timeout": ("ssh: connect to host x port 22: Connection timed out", 255),
    "closed": ("kex_exchange_identification: read: Connection reset by peer", 255),
    "nopython": ("bash: line 1: python3: command not found", 127),
    "dash": ("sh: 1: python3: not found", 127),
    "old": ('  File "<stdin>", line 11\nSyntaxError: future feature annotations is not defined', 1),
    "older": ("ModuleNotFoundError: No module named 'importlib.metadata'", 1),
    "strange": ("something \x1b[2Jelse", 3),
}  # fmt: skip
FIXES = {
    "denied": "ssh-copy-id denied-1",
    "key": "ssh key-1",
    "changed": "ssh-keygen -R changed-1",
    "nobody": "DNS",
    "route": "ping route-1",
    "refused": "systemctl start ssh",
    "timeout": "ping timeout-1",
    "closed": "MaxStartups",
    "nopython": "PATH",
    "dash": "PATH",
    "old": "newer",
    "older": "newer",
    "strange": "ssh strange-1 true",
    "garbage": "~/.bashrc",
    "other": "~/.bashrc",
    "silent": "~/.bashrc",
}
"""Kind of answer -> what its fix names."""


@pytest.fixture
def stub(tmp_path, monkeypatch) -> Path:
    """An ssh that does what the host's name says; its calls are in `log`. Its folder's name is a hostile one."""
    folder = tmp_path / "it's a 程序 folder"
    folder.mkdir()
    path = folder / "ssh stub"
    path.write_text(
        STUB.format(python=sys.executable, log=str(tmp_path / "log"), answer=ANSWER, said=SAID),
        encoding="utf-8",
    )
    path.chmod(0o755)
    monkeypatch.setenv("DSRUN_SSH", str(path))
    return tmp_path


def calls(stub) -> list[list[str]]:
    log = stub / "log"
    import ast

    return [ast.literal_eval(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("kind", ["good", "banner", "glued", "lingering"])
def test_answers(stub, kind):
    begun = time.time()
    (answer,) = ssh.ask([f"{kind}-1"], {}, 60)
    assert answer.facts == json.loads(ANSWER)
    assert not answer.fault
    assert begun <= answer.asked_at <= answer.answered_at <= time.time()


def test_a_real_probe_through_a_pipe(stub):
    (answer,) = ssh.ask(["real-1"], {"port": 12345, "data": "/a b'c"}, 60)
    assert answer.facts["hostname"]["name"] == socket.gethostname()
    assert answer.facts["port"]["port"] == 12345
    assert answer.facts["data"] == {"path": "/a b'c", "exists": False}


@pytest.mark.parametrize("kind", FIXES)
def test_reasons(stub, kind):
    (answer,) = ssh.ask([f"{kind}-1"], {}, 60)
    assert answer.facts is None
    assert answer.fault and answer.fault.isprintable()
    assert FIXES[kind] in answer.fix


def test_every_reason_has_a_case():
    said = " ".join(text for text, _ in SAID.values())
    assert all(re.search(reason.words, said) for reason in (*ssh.SSH_REASONS, *ssh.PYTHON_REASONS))


@pytest.mark.slow
def test_hosts_that_hang_are_left_and_ended(stub):
    (hanging,) = ssh.ask(["hang-1"], {}, 5)
    assert hanging.facts is None and "no answer within 5 s" in hanging.fault
    assert "--timeout" in hanging.fix
    for pid in (stub / "log.pids").read_text().split():
        assert not alive(int(pid))


def alive(pid: int) -> bool:
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True


def test_a_host_that_never_stops_talking(stub):
    (answer,) = ssh.ask(["flood-1"], {}, 60)
    assert answer.facts is None and answer.fault


def test_a_stop_ends_what_runs(stub):
    calls = ssh._Calls(stub / "script", 60, os.environ["DSRUN_SSH"])
    (stub / "script").write_text(probe.script({}))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(calls.ask("hang-1")))
    thread.start()
    while not (stub / "log.pids").exists():
        time.sleep(0.05)
    calls.end()
    thread.join(30)
    assert not thread.is_alive()
    assert answers[0].facts is None
    assert calls.ask("good-1").fault == "was not asked"


def test_the_order_is_that_of_the_hosts(stub):
    hosts = [f"{kind}-{number}" for number in range(8) for kind in ("good", "denied")]
    assert [answer.host for answer in ssh.ask(hosts, {}, 60)] == hosts


def test_a_call_holds_no_text_of_the_users_but_the_host(stub):
    ssh.ask(["good-1"], {"data": "$(touch x); `id`"}, 60)
    (call,) = calls(stub)
    assert call[call.index("--") :] == ["--", "good-1", "python3 -I -"]
    assert "BatchMode=yes" in call
    assert not any("StrictHostKeyChecking" in word or "touch" in word for word in call)


HOSTILE = [
    "-oProxyCommand=touch pwned",
    "--",
    "-l",
    "good-1;rm -rf x",
    "good-1 ; touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "good-1'x",
    'good-1"x',
    "good-1|cat",
    "good-1&",
    "a\nb",
    "a\x00b",
    "a/b",
    "\x1b[31m",
    "",
    " ",
    "x" * 300,
]


@pytest.mark.parametrize("host", HOSTILE)
def test_hostile_names_reach_nobody(stub, host, monkeypatch):
    monkeypatch.chdir(stub)
    (answer,) = ssh.ask([host], {}, 60)
    assert answer.facts is None
    assert answer.fault and answer.fix
    assert answer.fault.isprintable()
    assert calls(stub) == []
    assert not (stub / "pwned").exists()


@pytest.mark.parametrize(
    "host", ["good-1", "user@good-1", "good-1.example.org", "10.255.255.254", "[fe80::1]", "节点"]
)
def test_names_that_are_names(host):
    assert ssh.NAME.fullmatch(host)


def test_this_machine_is_asked_without_ssh(stub):
    names = [
        "localhost",
        socket.gethostname(),
        "127.0.0.1",
        *(["::1"] if ssh.is_here("::1") else []),
    ]  # or no IPv6
    answers = ssh.ask(names, {}, 60)
    assert all(
        answer.facts and answer.facts["hostname"]["name"] == socket.gethostname() for answer in answers
    )
    assert calls(stub) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "224.0.0.1", "203.0.113.7", "2001:db8::7", "gpu01", "", "::"])
def test_what_is_not_this_machine(host):
    assert not ssh.is_here(host)


@pytest.mark.parametrize(
    ("name", "said"), [("/no/such/ssh", "DSRUN_SSH=/no/such/ssh"), ("", "openssh-client")]
)
def test_no_ssh(monkeypatch, tmp_path, name, said):
    monkeypatch.setenv("DSRUN_SSH", name)
    monkeypatch.setenv("PATH", str(tmp_path))
    (other, here) = ssh.ask(["gpu01", "localhost"], {}, 60)
    assert other.facts is None and "no ssh" in other.fault and said in other.fix
    assert here.facts


def test_a_program_that_can_not_be_started(monkeypatch, tmp_path):
    path = tmp_path / "ssh"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    monkeypatch.setenv("DSRUN_SSH", str(path))
    (answer,) = ssh.ask(["gpu01"], {}, 60)
    assert answer.facts is None and "can't be started" in answer.fault and answer.fix


def test_many_hosts_at_once(stub, tmp_path, monkeypatch):
    path = tmp_path / "quick"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{ANSWER}\nEND\n")
    path.chmod(0o755)
    monkeypatch.setenv("DSRUN_SSH", str(path))
    answers = ssh.ask([f"node{number:04}" for number in range(200)], {}, 60)
    assert sum(answer.facts is not None for answer in answers) == 200


def test_nothing_is_left(stub, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    ssh.ask(["good-1", "denied-1"], {}, 60)
    assert not list(tmp_path.glob("dsrun-probe-*"))


def test_no_hosts(stub):
    assert ssh.ask([], {}, 60) == []

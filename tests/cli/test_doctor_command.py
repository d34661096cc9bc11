"""`dsrun doctor`: this machine, and several behind a stub of ssh that runs the real probe."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

import pytest

STUB = """#!/bin/sh
for word in "$@"; do
  case "$word" in
  denied*) echo 'Permission denied (publickey).' >&2; exit 255 ;;
  rude*) printf '\\033[2Jhello\\n'; exit 0 ;;
  canned*) cat '{answer}'; exit 0 ;;
  esac
done
echo 'Welcome!'
exec '{python}' -I -
"""


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Path:
    """A working folder with a hostile name, an ssh that stays on this machine, and a cache with one stale lock."""
    folder = tmp_path / "a lab's 实验室"
    folder.mkdir()
    stub = tmp_path / "ssh"
    stub.write_text(STUB.format(python=sys.executable, answer=tmp_path / "answer"))
    stub.chmod(0o755)
    monkeypatch.setenv("DSRUN_SSH", str(stub))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "operators"))
    monkeypatch.chdir(folder)
    return folder


SECRETS = {
    "HF_ENDPOINT": "https://user:{}@host/", "WANDB_COOKIE": "{}", "HF_TOKEN": "{}", "WANDB_API_KEY": "{}",
    "HUGGING_FACE_HUB_TOKEN": "{}", "HF_PASSPHRASE": "{}", "DSRUN_PASS": "{}", "NCCL_AUTH": "{}", "DS_CREDS": "{}",
    "TORCH_SECRET": "{}", "CUDA_PAT": "{}", "WANDB_BASE_URL": "https://{}@host", "HF_HUB_URL": "https://h/x?sig={}",
    "DSRUN_X": "postgresql://me:{}@h/db", "DSRUN_HEADER": "Authorization: Bearer {}", "WANDB_KEY": "{}",
    "HF_X": "AWS_SECRET_ACCESS_KEY={}", "DS_Y": '{"password": "{}"}', "DLTS_DSN": "{}", "TORCH_BEARER": "{}",
    "PYTORCH_Z": "--api-key {}",
}  # fmt: skip


def test_no_secret_of_a_variable_is_printed(lab, dsrun, monkeypatch):
    for number, (name, text) in enumerate(SECRETS.items()):
        monkeypatch.setenv(name, text.replace("{}", f"hunter3x{number:02}"))
    said = dsrun("doctor", "--json", "--timeout", 120)
    shown = json.loads(said.out)
    assert "hunter3x" not in said.out + said.err
    assert set(SECRETS) <= set(json.dumps(shown).replace('"', " ").split())


def stale_lock(tmp_path) -> Path:
    path = tmp_path / "operators" / "cpu_adam" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_this_machine(lab, dsrun):
    said = dsrun("doctor", "--timeout", 120)
    lines = said.out.splitlines()
    assert lines[0] == socket.gethostname()
    assert re.search(r"^  ok +python +Python 3[.]", said.out, re.MULTILINE)
    assert re.search(r"^  ok +reachable", said.out, re.MULTILINE)
    assert said.code == int("1 host; 0 red" not in said.err)
    assert not re.search(r"\x1b", said.out)


def test_a_stale_lock_is_red_and_the_fix_is_a_command(lab, dsrun, tmp_path):
    lock = stale_lock(tmp_path)
    said = dsrun("doctor", "--timeout", 120)
    assert said.code == 1
    found = re.search(r"\nbad  locks: .*cpu_adam.*\n  (.*)", said.out)
    assert found and found[1] == f"rm {lock}"
    lock.unlink()
    assert "bad  locks" not in dsrun("doctor", "--timeout", 120).out


def test_several_hosts(lab, dsrun, tmp_path):
    stale_lock(tmp_path)
    said = dsrun("doctor", "--hosts", "node[1-2]:1,denied1:1", "--timeout", 120)
    assert said.code == 1
    table = said.out.splitlines()
    assert table[0].split() == [
        "host",
        "reach",
        "packages",
        "GPUs",
        "health",
        "memory",
        "limits",
        "disk",
        "build",
        "network",
        "NCCL",
        "data",
    ]
    assert [line.split()[0] for line in table[1:4]] == ["node1", "node2", "denied1"]
    assert table[3].split()[1:] == ["bad"] + ["-"] * (len(table[0].split()) - 2)
    assert "bad  reachable: denied1: no login without a password\n  ssh-copy-id denied1\n" in said.out
    assert "bad  locks: node1, node2: a killed build" in said.out
    assert "3 hosts, 1 without an answer; " in said.err


def test_a_hostfile(lab, dsrun):
    Path("hostfile").write_text("localhost slots=1\nnode7 slots=1 # ours\n")
    said = dsrun("doctor", "--hostfile", "hostfile", "--json", "--timeout", 120)
    found = json.loads(said.out)
    assert [(row["host"], row["slots"]) for row in found["hosts"]] == [("localhost", 1), ("node7", 1)]
    assert all(row["facts"]["disk"]["folder"]["path"] == str(lab) for row in found["hosts"])
    assert all(row["facts"]["route"]["master"] == "localhost" for row in found["hosts"])
    assert said.err == ""


def test_slots_in_a_list(lab, dsrun, tmp_path):
    canned(tmp_path)
    found = json.loads(dsrun("doctor", "--hosts", "canned[1-2]:1,canned3:8,canned4", "--json").out)
    assert [row["slots"] for row in found["hosts"]] == [1, 1, 8, None]


def test_a_hostfile_with_errors(lab, dsrun):
    Path("hostfile").write_text("node1\n")
    said = dsrun("doctor", "--hostfile", "hostfile")
    assert said.code == 1
    assert "hostfile:1" in said.err
    assert dsrun("doctor", "--hostfile", "none").code == 1


def test_json(lab, dsrun):
    said = dsrun("doctor", "--json", "--timeout", 120)
    found = json.loads(said.out)
    assert set(found) == {"version", "hosts", "results"}
    assert found["hosts"][0]["slots"] is None
    assert set(found["results"][0]) == {"check", "host", "colour", "what", "fix"}
    assert found["hosts"][0]["facts"]["hostname"]["name"] == socket.gethostname()
    assert said.code == int(any(row["colour"] == "red" for row in found["results"]))


def test_a_data_file(lab, dsrun):
    Path("it's.jsonl").write_text("{}\n")
    said = dsrun("doctor", "--data", "it's.jsonl", "--json", "--timeout", 120)
    (row,) = [row for row in json.loads(said.out)["results"] if row["check"] == "data"]
    assert row["colour"] == "green" and "sha256" in row["what"]
    said = dsrun("doctor", "--data", "none.jsonl", "--timeout", 120)
    assert said.code == 1 and f"no file {lab / 'none.jsonl'}" in said.out


def test_what_a_host_says_does_not_steer_the_terminal(lab, dsrun):
    said = dsrun("doctor", "--hosts", "rude1,rude2", "--timeout", 120)
    assert said.code == 1
    assert "\x1b" not in said.out
    assert r"answers with something else: \x1b[2Jhello" in said.out


def canned(tmp_path, **facts):
    (tmp_path / "answer").write_text(json.dumps({"probe": 1, "clock": {"time": 0}, **facts}) + "\n")


def test_of_many_hosts_the_worst_are_shown(lab, dsrun, tmp_path):
    canned(tmp_path)
    said = dsrun("doctor", "--hosts", "canned[01-60],denied[1-3]", "--timeout", 120)
    rows = [line.split()[0] for line in said.out.splitlines()[1:51]]
    assert rows[:3] == ["denied1", "denied2", "denied3"] and len(set(rows)) == 50
    assert "and 13 hosts more, 13 of them without a remark" in said.out
    assert "denied1, denied2, denied3: no login without a password" in said.out
    assert "ssh-copy-id denied1 (likewise for the others)" in said.out


def test_a_hundred_different_faults_of_one_kind(lab, dsrun, tmp_path):
    (tmp_path / "ssh").write_text("#!/bin/sh\necho $$ >&2\nexit 9\n")
    said = dsrun("doctor", "--hosts", "node[01-20]", "--timeout", 120)
    assert len(re.findall("ended with 9, and said: [0-9]+\n", said.out)) == 5
    assert "bad  reachable: 15 hosts more: --json" in said.out


@pytest.mark.parametrize(
    "given",
    [
        ("--hosts", "a", "--hostfile", "b"),
        ("--timeout", 0),
        ("--port", 0),
        ("--port", 70000),
        ("x",),
        ("--launcher", "rsh"),
        ("--hosts", "a,b", "--launcher", "manual"),
    ],
)
def test_wrong_usage(dsrun, given):
    assert dsrun("doctor", *given).code == 2


def test_the_ports_state_is_judged_where_it_was_asked_for(lab, dsrun):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        said = dsrun("doctor", "--port", other.getsockname()[1], "--timeout", 120)
    assert said.code == 1 and "bad  port" in said.out


def test_forwarded_variables_are_judged_on_every_host(lab, dsrun, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth-none")
    said = dsrun("doctor", "--hosts", "node[1-2]:1", "--timeout", 120)
    assert said.code == 1
    assert "bad  interface: node1, node2: GLOO_SOCKET_IFNAME=eth-none" in said.out
    assert "Unset GLOO_SOCKET_IFNAME.  # where dsrun is called" in said.out


def test_an_all_reduce_that_is_not_tried(lab, dsrun, tmp_path):
    said = dsrun("doctor", "--hosts", "node1,denied2", "--timeout", 120, "--smoke")
    assert said.code == 1
    assert (
        "bad  smoke: denied2: does not answer: no login without a password\n  ssh-copy-id denied2\n"
        in said.out
    )
    assert list(lab.iterdir()) == []


@pytest.mark.slow
def test_an_all_reduce_on_this_machine(lab, dsrun, environ, monkeypatch):
    for name in ("DS_ACCELERATOR", "DSRUN_CACHE", "PYTHONPATH"):
        monkeypatch.setenv(name, environ[name])
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    found = json.loads(dsrun("doctor", "--timeout", 120, "--smoke", "--json").out)["smoke"]
    assert found["found"]["ranks"] == 2 and found["problems"] == [] and found["run_dir"] == ""
    assert [card["wrong"] for card in found["found"]["cards"]] == [0, 0]


def test_it_needs_neither_torch_nor_rich_for_one_host(imported):
    modules = imported("doctor", "--help")
    assert not modules & {"torch", "transformers", "deepspeed", "rich", "psutil"}

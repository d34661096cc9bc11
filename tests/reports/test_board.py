"""`dsrun board`: what it shows, what it keeps, and whom it answers."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from running import until

from dsrun.cluster.devices import Gpu, Machine
from dsrun.cluster.gpu_use import GpuUse, LockHolder
from dsrun.job import run_folder
from dsrun.jobs.runs import run_summaries
from dsrun.reports.board import known_runs
from dsrun.reports.board.known_runs import KnownRuns, key_of
from dsrun.training.reports.report import Report

testclient = pytest.importorskip("starlette.testclient")
pytest.importorskip("matplotlib")
TOKEN = "a-token"


@pytest.fixture
def board(home, monkeypatch):
    """The board of `home`, asked by somebody who knows the token; every look is a new one."""
    from dsrun.reports.board.app import make_app

    monkeypatch.setattr(known_runs, "FRESH_S", -1.0)
    monkeypatch.setattr(known_runs, "FOLDERS_S", -1.0)
    monkeypatch.setattr(known_runs, "LOOK_S", 600.0)
    runs = KnownRuns(home)
    app = make_app(runs, TOKEN)
    client = testclient.TestClient(app, base_url="http://127.0.0.1:8420", follow_redirects=False)
    assert client.get(f"/?token={TOKEN}").status_code == 303
    return SimpleNamespace(get=client.get, client=client, app=app, runs=runs)


@pytest.mark.parametrize(
    "address", ["//evil.example/", "///evil.example", "/\\evil.example", "/%5Cevil.example"]
)
def test_nobody_is_sent_to_another_host(board, address):
    answer = board.get(f"http://127.0.0.1:8420{address}?token={TOKEN}")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/" + answer.headers["location"].lstrip("/\\")
    assert "samesite=strict" in answer.headers["set-cookie"].lower()


# What it shows


def test_the_table(board, make_run):
    make_run("done")
    path = make_run("<b>dead", "failed", losses=(7.5, float("nan")))
    told = {"cause": "gpu_oom", "rank": 3, "summary": "A GPU ran out."}
    run_folder.write_state(path, "failed", why="out of memory", diagnosis=told)
    answer = board.get("/")
    assert answer.status_code == 200
    for words in (
        "2 runs: 1 failed",
        "done",
        "7.0000",
        "3 of 4",
        "rank 3: gpu_oom",
        "not finite",
        "planned 2.00 GiB",
    ):
        assert words in answer.text, words
    assert "<b>dead" not in answer.text and "&lt;b&gt;dead" in answer.text


def test_a_run_that_goes_on(board, make_run):
    path = make_run("live", "running")
    with run_folder.held(path):
        run_folder.write_state(path, "running")
        assert "1 running" in board.get("/").text
        assert "0:00 left" in board.get("/").text or "left</small>" in board.get("/").text
    assert "interrupted" in board.get("/").text, "its dsrun is gone, and no file has changed"


def test_a_page_grows_with_its_run(board, make_run):
    path = make_run("mine", losses=(7.5, 7.0))
    address = f"/run/{key_of('mine')}?part=1"
    first = board.get(address)
    assert "step 3" not in first.text and "7.0000" in first.text
    again = board.get(address, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.text) == (304, "")
    Report(path, 0).metrics(step=3, loss=6.125, tokens=100, seconds=0.5, skipped=0, memory_bytes=1)
    later = board.get(address, headers={"If-None-Match": first.headers["etag"]})
    assert later.status_code == 200 and "6.1250" in later.text


def test_a_run_that_was_resumed_loses_no_step_and_doubles_none(board, make_run):
    path = make_run("mine", losses=(7.5, 7.0, 6.5))
    board.get(f"/run/{key_of('mine')}")
    report = Report(path, 0)
    report.truncate_metrics(1)
    report.metrics(step=2, loss=6.75, tokens=100, seconds=0.5, skipped=0, memory_bytes=1)
    columns = board.runs.columns(path).read()
    assert columns.losses == {1: 7.5, 2: 6.75}


def test_runs_over_each_other(board, make_run):
    make_run("one")
    make_run("other", losses=(7.5, 6.0), preset="zero3")
    address = f"/compare?run={key_of('one')}&run={key_of('other')}"
    words = board.get(address).text
    assert "zero3" in words and "at most 1.25 apart" in words
    assert "tokens trained on" in board.get(f"{address}&by=tokens").text
    assert "seconds of training" in board.get(f"{address}&by=time").text
    assert board.get(f"{address}&by=nonsense").status_code == 200
    assert "Choose two runs" in board.get(f"/compare?run={key_of('one')}").text


def test_new_runs_appear_and_old_ones_go(board, make_run, home):
    assert "No run lies here yet" in board.get("/").text
    path = make_run("later")
    assert "later" in board.get("/").text
    shutil.rmtree(path)
    assert "later" not in board.get("/").text
    assert board.get(f"/run/{key_of('later')}").status_code == 404
    shutil.rmtree(home)
    assert board.get("/").status_code == 404


def test_damaged_folders_have_a_row_and_a_page(board, make_run, home):
    path = make_run("half")
    (path / "job.json").write_text("{")
    bad = os.fsdecode(os.fsencode(str(home)) + b"/\xff")
    Path(bad).mkdir()
    shutil.copy(path / "run.json", bad)
    text = board.get("/").text
    assert text.count("broken") >= 2
    for name in ("half", os.fsdecode(b"\xff")):
        assert board.get(f"/run/{key_of(name)}").status_code == 200


def test_who_has_which_gpu(board, make_run, monkeypatch):
    from dsrun.reports.board import views

    path = make_run("mine")
    holder = LockHolder("alice", 1234, str(path), "2026-11-23 01:00")
    gpus = (
        Gpu(0, "A100", "GPU-0", 80 << 30, (8, 0), use=GpuUse((), 40 << 30, holder)),
        Gpu(1, "A100", "GPU-1", 80 << 30, (8, 0), use=GpuUse((), 0)),
    )
    may_answer = threading.Event()
    monkeypatch.setattr(views, "GPUS_S", -1.0)
    monkeypatch.setattr(views, "detect", lambda _: may_answer.wait(60) and Machine("cuda", gpus, 8, ""))
    assert "GPUs of this machine" not in board.get("/").text, "nobody waits for a driver"
    may_answer.set()
    until(lambda: "GPUs of this machine" in board.get("/").text, "the driver answers", 60, 0.05)
    text = board.get("/").text
    assert (
        f'<a href="/run/{key_of("mine")}">alice' in text
        and "nobody" in text
        and "40.00 GiB of 80.00 GiB" in text
    )


# What it keeps


def test_only_what_has_changed_is_read_again(board, make_run, monkeypatch):
    for name in ("a", "b", "c"):
        make_run(name)
    board.get("/")
    read = []
    real = run_summaries.summary
    monkeypatch.setattr(known_runs, "summary", lambda path, name: read.append(name) or real(path, name))
    board.get("/")
    assert read == []
    Report(board.runs.path_of("b"), 0).event("note", text="x")
    board.get("/")
    assert read == ["b"]


def test_a_table_at_once_which_fills(board, make_run, monkeypatch):
    """However long reading takes."""
    for name in ("a", "b", "c"):
        make_run(name)
    may_read = threading.Event()
    real = run_summaries.summary
    monkeypatch.setattr(known_runs, "summary", lambda path, name: may_read.wait(60) and real(path, name))
    monkeypatch.setattr(known_runs, "LOOK_S", 0.0)
    until(lambda: "3 runs: 3 not read yet" in board.get("/").text, "every run is found", 60, 0.05)
    text = board.get("/").text
    assert f"/run/{key_of('b')}" in text and "7.0000" not in text
    may_read.set()
    until(lambda: board.get("/").text.count("7.0000") == 3, "every run is read", 60, 0.05)
    assert "not read yet" not in board.get("/").text


def test_metrics_of_few_runs_are_kept(board, make_run, monkeypatch):
    monkeypatch.setattr(known_runs, "MOST_COLUMNS", 2)
    paths = [make_run(name) for name in ("a", "b", "c")]
    kept = [board.runs.columns(path) for path in paths]
    assert board.runs.columns(paths[2]) is kept[2]
    assert board.runs.columns(paths[0]) is not kept[0]


# Whom it answers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8420", "127.0.0.1.evil.example", "10.0.0.1", ""]
)
def test_other_hosts_are_refused(board, make_run, host):
    make_run("mine")
    answer = board.get("/", headers={"Host": host})
    assert answer.status_code == 400 and "mine" not in answer.text


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1"])
def test_a_tunnel_may_have_another_port(board, host):
    assert board.get("/", headers={"Host": host}).status_code in (200, 403)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("address", ["/", "/compare", "/run/x"])
def test_nothing_is_written(board, method, address):
    assert board.client.request(method, address).status_code == 405


def test_who_does_not_know_the_token_sees_nothing(board, make_run):
    make_run("mine")
    stranger = testclient.TestClient(board.app, base_url="http://127.0.0.1:8420", follow_redirects=False)
    for address in ("/", "/?part=1", f"/run/{key_of('mine')}", "/compare", "/?token=wrong", "/?token=%ff"):
        answer = stranger.get(address)
        assert answer.status_code == 403 and "mine" not in answer.text


@pytest.mark.parametrize("address", ["/run/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/run/x", "/static/x"])
def test_other_addresses_lead_nowhere(board, address):
    assert board.get(address).status_code == 404


def test_nothing_is_fetched_from_elsewhere(board, make_run):
    make_run("mine")
    for address in ("/", f"/run/{key_of('mine')}"):
        answer = board.get(address)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'nonce-" in policy
        nonce = policy.split("'nonce-")[1].split("'")[0]
        assert answer.text.count("<script") == answer.text.count(f'<script nonce="{nonce}"')
        assert (
            answer.headers["x-content-type-options"] == "nosniff"
            and answer.headers["cache-control"] == "no-store"
        )


# The command


def test_it_listens_on_the_loopback_alone():
    from dsrun.reports.board.serve import LOOPBACK, listening

    with listening(0) as listener:
        assert listener.getsockname()[0] == LOOPBACK == "127.0.0.1"


def test_a_port_that_is_taken(dsrun, home):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = dsrun("board", home, "--port", port)
    assert said.code == 1 and f"--port {port}" in said.err


def test_no_such_folder(dsrun, tmp_path):
    assert dsrun("board", tmp_path / "none").code == 1


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "matplotlib"])
def test_a_package_is_missing(dsrun, home, monkeypatch, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    said = dsrun("board", home)
    assert said.code == 1 and package in said.err and "pip install" in said.err

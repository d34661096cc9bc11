"""`dsrun report`: every kind of run has a page, in one file, with nothing secret and nothing of a user's that runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from needed import needs

from dsrun.host.hiding import HIDDEN
from dsrun.job import run_folder
from dsrun.job.job import HostDevices, ScriptJob
from dsrun.options.table import ParallelismOptions
from dsrun.reports import report

needs("matplotlib")
FETCHED = {"src", "href", "xlink:href", "action", "data", "poster", "srcset"}
"""Attributes by which a page would fetch something."""
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A page's tags, texts and addresses; what is opened has to be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in FETCHED]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in FETCHED]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.words += data


def text_of(*paths: Path, file: Path, **given) -> str:
    report.write(report.of_runs(paths), file, **given)
    return file.read_text(encoding="utf-8")


@pytest.fixture
def written(tmp_path):
    """`written(run, ...)`: the report as a file's text."""
    return lambda *paths, **given: text_of(*paths, file=tmp_path / "report.html", **given)


def test_a_finished_run(make_run, answered, written):
    path = make_run()
    answered(path)
    page = Page(written(path))
    for words in (
        "mine", "finished", "7.0000", "from 7.5000", "evaluation", "checkpoint", "skipped step (1)", "planned 2.00 GiB",
        "zero_optimization.stage", "preset: zero2", "command line", "noise", "长裙", "25.0 % of the rows were cut",
        "1 rows left out: no answer", "dsrun rerun",
    ):  # fmt: skip
        assert words in page.words, words
    assert page.tags.count("svg") >= 6
    assert [address for address in page.addresses if not address.startswith(("#", "data:,"))] == []


def test_how_a_model_lies_on_the_ranks(dsrun, make_run, written):
    path = make_run(parallel=ParallelismOptions(tp=2))
    assert "tp 2 x dp 1" in Page(written(path)).words
    assert "tp 2 x dp 1" in dsrun("show", path).out


def test_texts_of_users_stay_texts(make_run, answered, written):
    path = make_run("<img src=x onerror=alert(1)>", preset="<script>alert(2)</script>")
    answered(path)
    text = written(path)
    page = Page(text)
    assert "img" not in page.tags
    assert page.tags.count("script") == 1, "the page's own"
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    (nonce,) = re.findall(r'<script nonce="([^"]{16,})">', text)
    assert "default-src &#39;none&#39;" in policy and f"script-src &#39;nonce-{nonce}&#39;" in policy
    assert "<script>alert(1)" not in text and "&lt;script&gt;alert(1)" in text


def test_secrets_are_hidden(dsrun, make_run, written, home):
    token = "hf_" + "a" * 20
    path = make_run("one", "failed")
    run_folder.write_state(path, "failed", problems=[f"no access with {token}"], why="no access")
    script = home / "two"
    job = ScriptJob(
        run_dir=str(script), hosts=(HostDevices("localhost", (0,)),), script="/x/train.py",
        args=("--api-key", "geheim1", "--wandb_token=geheim2", "--lr", "0.1"), cwd="/x", accelerator="cpu",
        dsrun_version="0", ds_config={"comet": {"api_key": "geheim3"}, "wandb": {"team": "open"}},
    )  # fmt: skip
    with run_folder.held(script):
        (script / "job.json").write_text(job.to_json())
        (script / "command.sh").write_text("export HF_TOKEN=geheim4\n")
    text = written(path, script)
    assert token not in text and "geheim" not in text
    for words in (("show", script), ("show", script, "--json")):
        said = dsrun(*words)
        assert (said.code, "geheim" in said.out) == (0, False) and "--api-key" in said.out
    assert HIDDEN in text and "0.1" in text and "open" in text and "--api-key" in text


@pytest.mark.parametrize("state", ["failed", "interrupted", "stopped: the terminal was closed", "running"])
def test_every_state(make_run, written, state):
    word = "interrupted" if state == "running" else state  # nobody holds the folder
    assert word in Page(written(make_run(state=state))).words


def test_a_failed_run_says_why(make_run, written):
    path = make_run(state="failed")
    run_folder.write_state(
        path, "failed", why="out of memory", problems=["rank 1 failed first"],
        diagnosis={"cause": "gpu_oom", "summary": "A GPU ran out.", "rank": 1,
                   "line": "CUDA & more", "next_step": "Less."},
    )  # fmt: skip
    words = Page(written(path)).words
    for said in ("Why it failed", "A GPU ran out.", "gpu_oom", "First: rank 1", "CUDA & more", "Less."):
        assert said in words


def test_logs_tell_where_nobody_asked_them(make_run, written):
    path = make_run(state="interrupted")
    (path / "logs").mkdir(exist_ok=True)
    (path / "logs" / "rank-0.log").write_text(
        'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 88.00 MiB.\n"
    )
    assert "gpu_oom" in Page(written(path)).words


@pytest.mark.parametrize("losses", [(), (7.5,), (7.5, float("nan"), 7.0), (float("nan"),), (1e-3, 1e9, 1.0)])
def test_losses_of_every_kind(make_run, written, losses):
    text = written(make_run(losses=losses))
    assert "NaN" not in text and 'd="M nan' not in text
    assert ("not finite from step" in Page(text).words) == any(loss != loss for loss in losses)


def test_folders_that_went_wrong(make_run, written):
    """A page all the same, and on it what is wrong."""
    old = make_run("old")
    value = json.loads((old / "job.json").read_text())
    (old / "job.json").write_text(json.dumps({**value, "format": 1}))
    half = make_run("half")
    (half / "job.json").write_text((half / "job.json").read_text()[:100])
    strange = make_run("strange")
    for name in ("events.jsonl", "metrics.jsonl"):
        with (strange / name).open("ab") as file:
            file.write(
                b'[]\n\xff\n{"step": "x", "loss": []}\n{"event": 7}\n{"event": "plan"}\n{"step": 4, "loss": 6.'
            )
    (strange / "data.json").write_text('{"train": {"files": 3}}')
    (strange / "environment.json").write_text('{"gpus": 3, "git": 4}')
    (strange / "state" / "rank-0.json").write_text('{"peaks": 4}')
    assert "has format 1" in Page(written(old)).words
    assert "is not a job file" in Page(written(half)).words
    words = Page(written(strange)).words
    assert "data.json is damaged" in words and "environment.json is damaged" in words and "7.0000" in words


def test_a_script(home, written):
    path = home / "script"
    job = ScriptJob(
        run_dir=str(path), hosts=(HostDevices("localhost", (0, 1)),), script="/x/train.py", args=("--x",), cwd="/x",
        accelerator="cpu", dsrun_version="0",
    )  # fmt: skip
    with run_folder.held(path):
        (path / "job.json").write_text(job.to_json())
    words = Page(written(path)).words
    assert "train.py" in words and "not started" in words and "dsrun rerun" in words


def test_a_hundred_thousand_steps(make_run, written):
    path = make_run(losses=())
    losses = [99.0 if step == 77_777 else 2.0 + step % 7 for step in range(100_000)]
    others = {"lr": 1e-3, "grad_norm": 1.0, "tokens": 10, "seconds": 0.5, "skipped": 0, "memory_bytes": 1}
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"step": step, "loss": loss, **others}) + "\n" for step, loss in enumerate(losses, 1)
        )
    text = written(path)
    assert len(text) < 600_000, "thinned"
    assert "highest 99" in text


def test_several(make_run, written):
    one, other = make_run("one"), make_run("other", losses=(7.5, 6.0), preset="zero3")
    words = Page(written(one, other)).words
    for said in ("2 runs side by side", "preset", "zero3", "at most 1.25 apart", "last loss"):
        assert said in words


def test_one_that_cannot_be_compared(make_run, written):
    one, other = make_run("one"), make_run("other")
    (other / "job.json").write_text("{}")
    assert "other is not compared" in Page(written(one, other)).words


def test_equal_names_are_told_apart(make_run, home):
    (home / "a").mkdir()
    paths = [make_run("mine"), make_run("a/mine")]
    assert len({run.name for run in report.of_runs(paths)}) == 2


def test_watching_ends_with_the_run(make_run, tmp_path):
    path, file, slept = make_run(state="running"), tmp_path / "live.html", []
    held = run_folder.held(path)
    held.__enter__()
    run_folder.write_state(path, "running")

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert 'http-equiv="refresh"' in file.read_text(encoding="utf-8")
        if len(slept) == 2:
            run_folder.write_state(path, "finished")
            held.__exit__(None, None, None)

    assert report.watch(report.of_runs([path]), file, sleep) == 3
    assert 'http-equiv="refresh"' not in file.read_text(encoding="utf-8")


# The command


def test_the_command(dsrun, make_run, tmp_path):
    said = dsrun("report", make_run(), "-o", tmp_path / "r.html")
    assert (said.code, said.out) == (0, "") and str(tmp_path / "r.html") in said.err
    assert dsrun("report", make_run("again"), "-o", tmp_path / "r.html").code == 0, "a report may be replaced"


def test_what_is_no_report_stays(dsrun, make_run, tmp_path):
    file = tmp_path / "notes.html"
    file.write_text("mine")
    path = make_run()
    assert dsrun("report", path, "-o", file).code == 1
    assert file.read_text() == "mine"
    assert dsrun("report", path, "-o", file, "--force").code == 0


@pytest.mark.parametrize("where", ["no/such/folder/r.html", "."])
def test_where_it_can_not_be_written(dsrun, make_run, tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    said = dsrun("report", make_run(), "-o", where)
    assert said.code == 1 and "Traceback" not in said.err


def test_what_is_no_run(dsrun, make_run, tmp_path):
    said = dsrun("report", make_run(), tmp_path, tmp_path / "none", "-o", tmp_path / "r.html")
    assert said.code == 1 and "no such run" in said.err and "holds no run" in said.err, (
        "all problems together"
    )
    assert not (tmp_path / "r.html").exists()


def test_without_matplotlib(dsrun, make_run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    said = dsrun("report", make_run(), "-o", tmp_path / "r.html")
    assert said.code == 1 and "pip install" in said.err and not (tmp_path / "r.html").exists()

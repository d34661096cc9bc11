"""`dsrun evaluate` and `dsrun chat` for real: what a fine-tune printed comes out again, and a talk in a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from needed import needs

needs("deepspeed", "transformers")

from running import COMMON, check_form, lines_of, little_data, until

pytestmark = pytest.mark.slow

SHORT = ("--gpus", "2", *COMMON, "--max-steps", "8", "--generate-rows", "10")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("asked")


@pytest.fixture(scope="module")
def dsrun_for_real(environ, place):
    """`dsrun_for_real(*args, text=...)`: dsrun in a process of its own; it must end well unless a code is given."""

    def run(*args: object, text: str | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "dsrun", *map(str, args)], env=environ, cwd=place, input=text or "", text=True,
            capture_output=True, check=False, timeout=400,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done

    return run


@pytest.fixture(scope="module", params=["chatglm2-tiny", pytest.param("llama-tiny", marks=pytest.mark.full)])
def trained(request, dsrun_for_real, place):
    """A fine-tune's folder and what it printed. ChatGLM2's is trained on talks of two rounds, in two files."""
    run_dir = place / f"{request.param} 运行"
    data = place / f"data of {request.param}"
    data.mkdir()
    options = little_data(data)
    if request.param == "chatglm2-tiny":
        options = (
            *talks(data, "--train-file"),
            "--train-file",
            f"{data / 'train.jsonl'}:0.5",
            *talks(data, "--eval-file"),
        )
    done = dsrun_for_real("finetune", request.param, "--output-dir", run_dir, *SHORT, *options, "--json")
    return run_dir, json.loads(done.stdout)


def talks(folder: Path, option: str) -> tuple[str, str]:
    """The option that names such a file, made of the folder's own rows."""
    rows = lines_of(folder / ("train.jsonl" if option == "--train-file" else "dev.jsonl"))
    path = folder / f"talks{option}.json"
    turns = [[(turn["content"], "user"), (turn["summary"], "assistant")] for turn in rows]
    found = [
        {"messages": [{"role": role, "content": text} for text, role in (*first, *second)]}
        for first, second in zip(turns[::2], turns[1::2], strict=True)
    ]
    path.write_text(json.dumps(found), encoding="utf-8")
    return option, str(path)


in_one_model = pytest.mark.parametrize("trained", ["chatglm2-tiny"], indirect=True)


def test_a_runs_own_rows_give_its_own_numbers(trained, dsrun_for_real):
    run_dir, printed = trained
    found = json.loads(dsrun_for_real("evaluate", run_dir, "--json").stdout)
    check_form("evaluate", found)
    assert found["eval_loss"] == pytest.approx(printed["eval_loss"]["last"], abs=1e-5)
    assert found["scores"] == printed["scores"]["after"]
    assert lines_of(Path(found["predictions"])) == lines_of(run_dir / "generated_predictions.jsonl")
    assert (found["rows"], found["answered"]) == (12, 10)

    again = dsrun_for_real("evaluate", run_dir, code=1)
    assert "exists already" in again.stderr


def test_a_chat_answers_as_the_evaluation_did(trained, dsrun_for_real):
    run_dir, _ = trained
    line = lines_of(run_dir / "generated_predictions.jsonl")[0]
    done = dsrun_for_real("chat", run_dir, "--prompt", line["prompt"], "--max-new-tokens", "16")
    assert done.stdout.strip() == line["predict"]


@in_one_model
def test_a_pipe_gets_the_answers_alone(trained, dsrun_for_real):
    run_dir, _ = trained
    text = "类型#裙\n/reset\n类型#裙\n一行\\\n又一行\n"
    done = dsrun_for_real("chat", run_dir / "model", "--max-new-tokens", "12", text=text)
    first, second, *_ = done.stdout.splitlines()
    assert first == second, "the conversation started over"
    assert "starts over" in done.stderr
    assert "> " not in done.stdout + done.stderr
    wrong = dsrun_for_real("chat", run_dir, text="/nope\n" + "长" * 3000 + "\n", code=1)
    assert "there is no /nope" in wrong.stderr
    assert "the model's context has 512" in wrong.stderr


class Terminal:
    """dsrun in a terminal of its own."""

    def __init__(self, environ: dict[str, str], cwd: Path, *args: object) -> None:
        command = [sys.executable, "-m", "dsrun", *map(str, args)]
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execve(command[0], command, {**environ, "TERM": "dumb"})

    def until(self, text: str, timeout: float = 300) -> str:
        """Output up to this text, from where the last look ended."""
        deadline = time.monotonic() + timeout
        content = b""
        while text not in (shown := content.decode("utf-8", "ignore")):
            assert time.monotonic() < deadline, f"no {text!r} in {shown!r}"
            if select.select([self._end], [], [], 0.2)[0]:
                try:
                    content += os.read(self._end, 1)
                except OSError:  # its other end is closed
                    raise AssertionError(f"it ended without {text!r}: {shown!r}") from None
        return shown

    def character(self) -> str:
        """The next one that is no space."""
        content = b""
        while not content.decode("utf-8", "ignore").strip():
            content += os.read(self._end, 1)
        return content.decode("utf-8").strip()

    def type(self, text: str) -> None:
        os.write(self._end, text.encode("utf-8"))

    def interrupted(self, text: str) -> None:
        """Ctrl-C, until this is shown. Python hears one between two keys only at the next key."""
        for _ in range(30):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.until(text, timeout=4)
                return
        self.until(text)

    def code(self) -> int:
        """The exit code, once it has ended; what was shown until then is in `rest`."""
        content = b""
        with contextlib.suppress(OSError):
            while part := os.read(self._end, 4096):
                content += part
        self.rest = content.decode("utf-8", "replace")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._end)


@pytest.fixture
def terminal(environ, place):
    """`terminal(*args)`: a Terminal."""
    opened: list[Terminal] = []

    def start(*args: object) -> Terminal:
        opened.append(Terminal(environ, place, *args))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@in_one_model
def test_a_talk_in_a_terminal(trained, terminal):
    run_dir, _ = trained
    # The model before training: what its random weights say knows no end.
    untrained = json.loads((run_dir / "job.json").read_text(encoding="utf-8"))["prepared"]["model_dir"]
    shell = terminal("chat", untrained, "--prompt-format", "chatglm2" if "glm" in untrained else "llama-2")
    assert "on the CPU, fp32" in shell.until("/help says what there is")
    shell.until("> ")
    shell.type("类型#裙\n")
    shell.until("\n")  # the terminal's own echo
    shown = shell.character()
    shell.type("\x03")
    shell.until("[stopped]")
    assert shown, "it comes while it is made"
    shell.until("> ")
    shell.type("half a line")
    shell.until("half a line")  # it listens
    shell.interrupted("[/quit or Ctrl-D ends]")
    shell.until("> ")
    shell.type("/help\n")
    shell.until("/reset")
    shell.until("> ")
    shell.type("\x04")
    assert shell.code() == 0


@in_one_model
def test_ctrl_c_ends_a_single_answer(trained, terminal):
    run_dir, _ = trained
    untrained = json.loads((run_dir / "job.json").read_text(encoding="utf-8"))["prepared"]["model_dir"]
    shell = terminal(
        "chat", untrained, "--prompt", "类型#裙", "--prompt-format", "plain", "--max-new-tokens", "500"
    )
    process = Path("/proc", str(shell.pid))

    def imports_torch():
        """The program that dsrun has become; what was forked from the tests may have torch itself."""
        return b"chat_process" in (process / "cmdline").read_bytes() and "libtorch" in (
            process / "maps"
        ).read_text(encoding="utf-8")

    until(imports_torch, "it imports torch")
    shell.type("\x03")  # while it loads, or while it answers
    assert shell.code() in {130, -signal.SIGINT}, "a shell calls both 130"
    assert "Traceback" not in shell.rest


@in_one_model
def test_an_evaluation_that_is_ended_leaves_nothing(trained, environ, place):
    run_dir, _ = trained
    before = sorted(run_dir.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-m", "dsrun", "evaluate", str(run_dir), "--sample", "--seed", "99"],
        env=environ, cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr
    while "loading the model" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (143, "")
    assert "No answers were written." in err
    assert sorted(run_dir.iterdir()) == before

"""What is said of exceptions that no signature knows: by their type, their message or where they were raised."""

from __future__ import annotations

import pytest

from dsrun.jobs.diagnosis.diagnosis import in_words
from dsrun.jobs.diagnosis.log_files import LogSource
from dsrun.jobs.diagnosis.reading.log_lines import peeled
from dsrun.jobs.diagnosis.signatures import SignatureIndex, find_signatures
from dsrun.jobs.diagnosis.verdict import judge

INDEX = SignatureIndex(find_signatures())
OWN = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 7, in <module>\n    {code}\n'
IN_LIBRARY = (
    OWN.format(code="go()")
    + '  File "/opt/env/lib/python3.11/site-packages/somelib/core.py", line 70, in go\n    work(x)\n'
)
STEPS = "".join(f"step={number} loss=2.{number}\n" for number in range(40))


def verdict_on(text):
    return judge([peeled(0, number, line) for number, line in enumerate(text.split("\n"), 1)], INDEX)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("ValueError: beta wants nevergrad>=1.2, please upgrade", "version"),
        ("ImportError: somelib wants a torch that is not older than 2.1: please upgrade it", "version"),
        ("RuntimeError: this needs nevergrad to be installed", "import"),
        ("ValueError: 12 columns can't be split evenly among 5 ranks", "config"),
        ("ValueError: alpha and beta are mutually exclusive", "arguments"),
        ("NotImplementedError: no way to do this with sparse weights", "unsupported"),
        ("ValueError: this column isn't in the dataset", "data"),
        ("AssertionError: gamma must be positive", "arguments"),
        ("KeyError: 'the strategy zig is unknown'", "arguments"),
    ],
)
@pytest.mark.parametrize("frames", ["", IN_LIBRARY], ids=["bare", "in a library"])
def test_a_message_says_what_is_refused(error, cause, frames):
    found = verdict_on(frames + error)
    assert found.cause == cause
    assert found.confidence in ("low", "medium"), "nobody knows these texts"
    assert found.line.text == error


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: the rendezvous must be joined, and the connection was lost",
        "RuntimeError: a worker process died, which was not expected",
        "TypeError: unsupported operand type(s) for *: 'int' and 'NoneType'",
        "TypeError: 'NoneType' object is not subscriptable",
        "ValueError: too many values to unpack (expected 2)",
        "KeyError: 'must'",
        "RuntimeError: invalid",
        "FutureWarning: this must not be used, and was removed",
    ],
)
def test_what_came_of_something_else_or_says_nothing_is_no_reason(error):
    assert verdict_on(error).cause is None


def test_a_known_file_counts_where_the_message_is_no_surer():
    below = (
        OWN.format(code="go()") + '  File "/opt/env/lib/python3.11/site-packages/deepspeed/runtime/config.py"'
    )
    refused = f"{below}, line 4, in go\n    check()\nAssertionError: "
    assert verdict_on(refused + "beta must be positive").cause == "config"
    assert verdict_on(refused + "please upgrade somelib").signature.kind == "place"


@pytest.mark.parametrize(
    ("code", "error", "cause"),
    [
        ("raise ValueError(text)", "ValueError: so nicht", "script_error"),
        ("assert rows, 1", "AssertionError: 1", "script_error"),
        ("loss = step(x)", "RuntimeError: so nicht", None),
    ],
)
def test_a_check_of_the_scripts_own_is_told_from_compiled_code(code, error, cause):
    assert verdict_on(OWN.format(code=code) + error).cause == cause


def test_a_warning_isnt_taken_for_the_first_exception():
    text = f"FutureWarning: alpha will go away\n{OWN.format(code='x')}ZeroDivisionError: division by zero"
    assert verdict_on(text).cause == "script_error"


def test_an_exception_after_which_the_steps_go_on_isnt_why_it_died():
    text = f"{IN_LIBRARY}ValueError: alpha must be positive\n{STEPS}{OWN.format(code='x')}ZeroDivisionError: by zero"
    assert verdict_on(text).raised.name == "ZeroDivisionError"


def test_it_is_said_who_raised_it_and_from_where_it_was_called():
    log = LogSource("train.log", None)
    found = in_words(verdict_on(f"{IN_LIBRARY}ValueError: gamma must be positive"), [log], {})
    assert all(text in found.summary for text in ("gamma must be positive", "somelib", "/home/u/train.py:7"))


@pytest.mark.parametrize(
    "line",
    [
        "Training failed: ValueError: alpha must be positive",
        "task exception=ValueError('alpha must be positive')>",
        "E       ValueError: alpha must be positive",
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  alpha must be positive",
    ],
)
def test_an_exception_that_a_line_only_speaks_of(line):
    assert verdict_on(line).cause == "arguments"
    assert verdict_on(f"{line}\nZeroDivisionError: by zero").raised.name == "ZeroDivisionError", (
        "one that is raised"
    )


def test_a_line_of_code_is_none():
    assert (
        verdict_on("    except ValueError: pass_on(positive)\n12     raise KeyError('must be there')").cause
        is None
    )


@pytest.mark.parametrize(
    ("file", "cause"),
    [
        ("/home/u/train.py", "script_error"),
        ("/home/u/LLaMA-Factory/src/llamafactory/train/tuner.py", None),
        ("/home/u/.cache/huggingface/modules/transformers_modules/own/modeling_own.py", "version"),
    ],
)
def test_a_trainer_that_was_cloned_is_nobodys_script(file, cause):
    text = f'{OWN.format(code="x")}  File "{file}", line 3, in f\n    y = x[0]\n'
    assert verdict_on(f"{text}TypeError: 'NoneType' object is not subscriptable").cause == cause


def test_what_a_launcher_says_below_is_no_part_of_the_message():
    text = f"{IN_LIBRARY}ValueError: gamma must be positive\nKilling subprocess 7\n[ERROR] exits with return code = 1"
    assert verdict_on(text).cause == "arguments"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ERROR:trainer:the folder /data/own does not exist", "missing_file"),
        ("2025-01-01 10:00:00,000 - ERROR - alpha and beta are mutually exclusive", "arguments"),
        ("[ERROR] step 7 of the dataset was slow", None),
        ("[WARNING] the folder /data/own does not exist", None),
        ("[ERROR] ['/usr/bin/python3', 'train.py', '--no-such-file'] exits with return code = 1", None),
    ],
)
def test_what_is_logged_as_an_error_counts_where_nothing_was_raised(line, cause):
    found = verdict_on(line)
    assert found.cause == cause
    assert found.confidence == ("low" if cause else "none")
    assert verdict_on(f"{line}\n{OWN.format(code='x')}ZeroDivisionError: by zero").cause == "script_error"
    assert verdict_on(f"{line}\n{STEPS}").cause is None


BODY = f"{IN_LIBRARY}ValueError: gamma must be positive\n"
IGNORED = f"Exception ignored in: <f>\n{IN_LIBRARY}AttributeError: 'Dataset' object has no attribute 'x'\n"
TRIED = f"{IN_LIBRARY}ReadTimeoutError: HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out.\n{STEPS}"


@pytest.mark.parametrize("rank", ["", "[rank0]: "])
@pytest.mark.parametrize("before", ["", IGNORED, TRIED], ids=["nothing", "ignored", "tried again"])
@pytest.mark.parametrize(
    "after",
    [
        "",
        "wandb: Waiting for W&B process to finish... (failed 1). Press Control-C to abort syncing.",
        "srun: error: node1: task 0: Exited with exit code 1\nslurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 1 **",
        "[2025-01-01 10:00:00,323] [ERROR] [launch.py:321:f] ['t.py', '--local_rank=1'] exits with return code = -9",
    ],
    ids=["nothing", "wandb", "srun", "killed"],
)
def test_what_stands_around_a_failure_doesnt_hide_it(rank, before, after):
    body = "".join(f"{rank}{line}\n" for line in BODY.splitlines())
    assert verdict_on(f"{before}{body}{after}").cause == "arguments"


def test_what_was_ignored_counts_where_there_is_nothing_else():
    assert verdict_on(IGNORED).cause == "version"


def test_a_threads_exception_counts_where_there_is_no_other():
    thread = f"Exception in thread Thread-3 (load):\n{BODY}"
    assert verdict_on(thread).cause == "arguments"
    assert verdict_on(f"{thread}{OWN.format(code='x')}ZeroDivisionError: by zero").cause == "script_error"

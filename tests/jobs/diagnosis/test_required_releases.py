"""A release that is asked for beside the one that is there; and who asked for what a package only carries out."""

from __future__ import annotations

import pytest

from dsrun.jobs.diagnosis.diagnosis import in_words
from dsrun.jobs.diagnosis.exceptions.requirements import requirement
from dsrun.jobs.diagnosis.log_files import LogSource
from dsrun.jobs.diagnosis.reading.log_lines import peeled
from dsrun.jobs.diagnosis.signatures import SignatureIndex, find_signatures
from dsrun.jobs.diagnosis.verdict import judge

INDEX = SignatureIndex(find_signatures())
PINNED = "ImportError: {} is required for a normal functioning of this module, but found {}."


def answer(text, environ=()):
    lines = [peeled(0, number, line) for number, line in enumerate(text.split("\n"), 1)]
    return in_words(judge(lines, INDEX), [LogSource("train.log", None)], dict(environ))


@pytest.mark.parametrize(
    ("wanted", "found", "spec", "too_new"),
    [
        ("transformers>=4.41.2,<=4.45.0", "transformers==4.45.2", "transformers>=4.41.2,<=4.45.0", True),
        ("tokenizers>=0.21,<0.22", "tokenizers==0.20.3", "tokenizers>=0.21,<0.22", False),
        ("numpy!=2.0.0", "numpy==2.0.0", "numpy!=2.0.0", True),
        ("peft==0.10.0", "peft==0.9.1", "peft==0.10.0", False),
    ],
)
def test_the_direction_and_what_pip_takes(wanted, found, spec, too_new):
    text = PINNED.format(wanted, found)
    asked = requirement(text)
    assert (asked.spec, asked.is_too_new) == (spec, too_new)
    told = answer(text)
    assert ("too new" if too_new else "too old") in told.summary
    assert f"pip install '{spec}'" in told.next_step
    assert spec in answer(text, {"LANG": "zh_CN.UTF-8"}.items()).next_step


@pytest.mark.parametrize(
    "text",
    [
        "foo>=2 needs bar, found bar==1.0",
        "foo>=2.1 is fine, found foo==2.4.0",
        "requires Accelerate: pip install accelerate>=0.26.0",
        "loss < 3 at step 7",
    ],
)
def test_what_names_no_release_that_is_refused(text):
    assert requirement(text) is None


def test_who_asked_for_a_transfer_that_failed():
    text = (
        'Traceback (most recent call last):\n  File "/home/u/train.py", line 7, in <module>\n    go()\n'
        '  File "/x/site-packages/trl/extras/vllm_client.py", line 9, in update_named_param\n'
        "    self.session.post(url)\n"
        '  File "/x/site-packages/requests/adapters.py", line 682, in send\n    raise ConnectionError(err)\n'
        "requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('Remote end closed'))"
    )
    assert (
        "trl (`self.session.post(url)`) had asked requests, called from /home/u/train.py:7"
        in answer(text).summary
    )


def test_the_others_of_a_chain_are_quoted():
    text = (
        "pyarrow.lib.ArrowInvalid: JSON parse error: Column() changed from object to array in row 0\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "datasets.exceptions.DatasetGenerationError: the column age of part 3 is no number"
    )
    found = answer(text)
    assert "part 3" in found.summary and "object to array" in found.summary


def test_frames_of_a_notebook_with_qualified_names():
    text = (
        "NameError                       Traceback (most recent call last)\n"
        "Cell In[20], line 8\n----> 8 trainer.train()\n"
        "File ~/unsloth_compiled_cache/UnslothGRPOTrainer.py:3107, in _Trainer._prepare(self, batch)\n"
        "NameError: name 'has_rows' is not defined"
    )
    assert "unsloth" in answer(text).summary


def test_a_warning_after_which_steps_follow_is_no_failure():
    warned = "warning: The size of tensor a (2017) must match the size of tensor b (3328) at non-singleton dimension 0"
    assert answer(f"{warned}\nstep=1 loss=2.1\nstep=2 loss=2.0").cause is None


def test_a_notebooks_first_line_gives_way_to_the_exceptions_own():
    text = (
        "ArrowInvalid                    Traceback (most recent call last)\n"
        "File ~/x/site-packages/datasets/a.py:1, in f(x)\n"
        "----> 1 read(x)\n\nArrowInvalid: JSON parse error: Column(/age) changed from number to string in row 13"
    )
    found = answer(text)
    assert all(name in found.summary for name in ("/age", "number to string", "row 13"))

"""Names that are the user's own modules' or Python's, values that Python refuses, and what pip calls a module."""

from __future__ import annotations

import pytest

from dsrun.jobs.diagnosis.diagnosis import diagnose_logs
from dsrun.jobs.diagnosis.exceptions import distributions
from dsrun.jobs.diagnosis.log_files import LogSource

OWN = "/home/u/proj/train.py"
SITE = "/opt/env/lib/python3.11/site-packages"


def diagnosed(error, code="work()", file=OWN):
    text = f'Traceback (most recent call last):\n  File "{file}", line 7, in main\n    {code}\n{error}\n'
    return diagnose_logs([LogSource("train.log", None, content=text.encode())], {})


FILE = "/home/u/proj/proj/a.py"
CASES = {
    f"ImportError: cannot import name 'build' from 'models' ({FILE})": (
        f"models ({FILE}) has no build", "or define it there",
    ),
    "ImportError: cannot import name 'build' from partially initialized module 'proj.a' (most likely due to a circular "
    f"import) ({FILE})": ("import each other in a circle", "inside the function"),
    "AttributeError: module 'datetime' has no attribute 'now'": (
        "Python's own module datetime has no now", "datetime.datetime.now",
    ),
    "ImportError: attempted relative import with no known parent package": ("imports relatively", "python -m"),
    "ValueError: too many values to unpack (expected 2)": ("too many values to unpack", "Print that value"),
    "ValueError: invalid literal for int() with base 10: '4e5'": ("4e5", "Print that value"),
}  # fmt: skip


@pytest.mark.parametrize("error", CASES)
def test_what_is_the_users_own(error):
    words, remedy = CASES[error]
    found = diagnosed(error)
    assert (found.cause, found.confidence) == ("script_error", "medium")
    assert words in found.summary
    assert remedy in found.next_step
    assert f"{OWN}:7" in found.summary + found.next_step


@pytest.mark.parametrize(
    ("error", "file"),
    [
        (
            f"ImportError: cannot import name 'odd_name' from 'transformers' ({SITE}/transformers/__init__.py)",
            OWN,
        ),
        (f"ImportError: cannot import name 'odd_name' from 'somelib' ({SITE}/somelib/__init__.py)", OWN),
        ("ImportError: cannot import name 'odd_name' from 'torch' (/home/u/proj/torch.py)", OWN),
        ("AttributeError: module 'inspect' has no attribute 'getargspec'", f"{SITE}/oldlib/core.py"),
        ("AttributeError: module 'numpy' has no attribute 'bool8'", OWN),
    ],
)
def test_what_is_a_packages(error, file):
    assert diagnosed(error, file=file).cause != "script_error"


def test_what_left_python_is_of_the_package_that_asks():
    found = diagnosed(
        "AttributeError: module 'inspect' has no attribute 'getargspec'", file=f"{SITE}/oldlib/core.py"
    )
    assert (found.cause, found.confidence) == ("version", "medium")
    assert "oldlib was written for an older Python" in found.summary


def test_a_value_that_the_script_refuses_itself_is_its_own_check():
    found = diagnosed(
        "ValueError: too many values to unpack", code='raise ValueError("too many values to unpack")'
    )
    assert "a check of its own" in found.summary


@pytest.mark.parametrize(
    ("module", "words"),
    [("cv2", "opencv-python-headless"), ("yaml", "pyyaml"), ("google.protobuf.message", "protobuf"),
     ("pkg_resources", "setuptools<81"), ("imp", "left Python")],
)  # fmt: skip
def test_what_pip_calls_a_module(module, words):
    found = diagnosed(f"ModuleNotFoundError: No module named '{module}'")
    assert words in found.next_step


@pytest.mark.parametrize("module", ["peft", "google.cloud", "deepspeed.ops"])
def test_most_packages_are_called_as_their_module(module):
    assert distributions.in_words(module) == ""

"""Whose code raised an exception decides what it can mean: the user's own, a trainer's, a library's."""

from __future__ import annotations

import pytest

from dsrun.jobs.diagnosis.diagnosis import in_words
from dsrun.jobs.diagnosis.log_files import LogSource
from dsrun.jobs.diagnosis.reading import owners
from dsrun.jobs.diagnosis.reading.log_lines import peeled
from dsrun.jobs.diagnosis.signatures import SignatureIndex, find_signatures
from dsrun.jobs.diagnosis.verdict import judge

INDEX = SignatureIndex(find_signatures())
OWN = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 7, in <module>\n    {}\n'
PACKAGE = '  File "/opt/env/lib/python3.11/site-packages/{}", line 70, in {}\n    {}\n'


def answer(text, environ=()):
    lines = [peeled(0, number, line) for number, line in enumerate(text.split("\n"), 1)]
    return in_words(judge(lines, INDEX), [LogSource("train.log", None)], dict(environ))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/home/u/train.py", ("user", "")),
        ("train.py", ("user", "")),
        ("C:\\work\\glm\\train.py", ("user", "")),
        ("Cell In[3]", ("user", "")),
        ("<string>", ("user", "")),
        ("/home/u/lib/core/function.py", ("user", "")),
        ("/opt/env/lib/python3.11/site-packages/trl/trainer/sft_trainer.py", ("library", "trl")),
        ("C:\\env\\Lib\\site-packages\\peft\\config.py", ("library", "peft")),
        ("/opt/env/lib/python3.11/site-packages/peft-0.4.0-py3.8.egg/peft/mapping.py", ("library", "peft")),
        (
            "/root/.cache/huggingface/modules/transformers_modules/x/modeling.py",
            ("library", owners.REMOTE_CODE),
        ),
        ("/opt/env/lib/python3.11/site-packages/swift/llm/train/sft.py", ("trainer", "swift")),
        ("/home/me/LLaMA-Factory/src/llamafactory/train/tuner.py", ("trainer", "llamafactory")),
        ("/root/unsloth_compiled_cache/UnslothGRPOTrainer.py", ("trainer", "unsloth")),
        ("/home/me/DeepSpeed/deepspeed/runtime/engine.py", ("library", "deepspeed")),
        ("/usr/lib/python3.10/json/decoder.py", ("runtime", "")),
        ("C:\\env\\lib\\enum.py", ("runtime", "")),
        ("<frozen importlib._bootstrap>", ("runtime", "")),
        ("pandas/_libs/index.pyx", ("compiled", "pandas")),
        ("pyarrow/error.pxi", ("compiled", "pyarrow")),
    ],
)
def test_owner_and_package_of_a_file(file, expected):
    assert owners.owner(file) == expected
    assert expected[0] in owners.OWNERS


def test_the_module_of_a_packages_file():
    assert owners.module_of("/x/site-packages/trl/trainer/utils.py") == "trl.trainer.utils"
    assert owners.module_of("/x/site-packages/trl/__init__.py") == "trl"
    assert owners.module_of("/home/u/train.py") == ""


@pytest.mark.parametrize(
    ("code", "error", "cause", "says"),
    [
        ("loss.backward()", "AttributeError: 'NoneType' object has no attribute 'backward'", "script_error", "no loss"),
        (
            "for g in optimizer.param_groups:",
            "AttributeError: 'NoneType' object has no attribute 'param_groups'",
            "script_error",
            "`optimizer` is None",
        ),
        ("x()", "AttributeError: 'DeepSpeedZeRoOffload' object has no attribute 'optimizer_swapper'", "version",
         "a name inside DeepSpeed"),
        ("path = cfg['llama_path']", "KeyError: 'llama_path'", "script_error", "the key 'llama_path' of `cfg`"),
        ("data = config['glm_data']", "KeyError: 'glm_data'", "script_error", "'glm_data'"),
        (
            "from transformers.models.llama.modeling_llama import LlamaSdpaAttention",
            "ImportError: cannot import name 'LlamaSdpaAttention' from 'transformers.models.llama.modeling_llama' (/x)",
            "version",
            "left transformers in 4.48.0",
        ),
        ("torch.save(m, p)", "RuntimeError: PytorchStreamWriter failed writing file", "disk_full", "doesn't say why"),
        ("x = rows[9]", "IndexError: list index out of range", "script_error", "beyond the end"),
        ("n = total / count", "ZeroDivisionError: division by zero", "script_error", "divides by zero"),
        ("print(sceduler)", "NameError: name 'sceduler' is not defined", "script_error", "`sceduler`"),
        ("y(3)", "TypeError: 'int' object is not callable", "script_error", "`y` is of type int"),
        ("x = rows[0]", "TypeError: 'NoneType' object is not subscriptable", "script_error", "`rows` is None"),
        ("for a in rows:", "TypeError: 'NoneType' object is not iterable", "script_error", "`rows` is None"),
        ("open('a/b.txt')", "FileNotFoundError: [Errno 2] No such file or directory: 'a/b.txt'", "missing_file",
         "a/b.txt"),
        ("go(x)", "UnboundLocalError: local variable 'rows' referenced before assignment", "script_error", "`rows`"),
    ],
)  # fmt: skip
def test_everyday_errors_of_a_script(code, error, cause, says):
    found = answer(OWN.format(code) + error)
    assert found.cause == cause
    assert says in found.summary
    assert "pip install -U" not in found.next_step
    assert answer(OWN.format(code) + error, {"LANG": "zh_CN.UTF-8"}.items()).summary != found.summary


def test_memory_that_ran_out_as_weights_were_loaded_and_a_key_that_is_refused():
    loading = PACKAGE.format("transformers/modeling_utils.py", "from_pretrained", "return model.to(device)")
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert answer(OWN.format("load()") + loading + oom).signature == "gpu-oom-loading"
    assert answer("wandb.errors.AuthenticationError: API key is invalid: 401").cause == "tracker"
    orted = "bash: orted: command not found\nORTE was unable to reliably start one or more daemons."
    assert (answer(orted).cause, answer(orted).signature) == ("launcher", "mpi-not-there")


@pytest.mark.parametrize(
    ("frame", "error", "cause", "says"),
    [
        (("swift/llm/sft.py", "run", "use(linear)"),
         "UnboundLocalError: local variable 'linear' referenced before assignment", "version", "swift uses `linear`"),
        (("trl/trainer/utils.py", "get", "x = LoraConfig("), "NameError: name 'LoraConfig' is not defined", "import",
         "of peft"),
        (("datasets/formatting/formatting.py", "__getitem__", "value = self.data[key]"), "KeyError: 'messages'",
         "data", "the field messages"),
    ],
)  # fmt: skip
def test_the_same_in_a_packages_code_is_not_the_scripts(frame, error, cause, says):
    found = answer(OWN.format("go()") + PACKAGE.format(*frame) + error)
    assert found.cause == cause
    assert says in found.summary
    assert "Correct" not in found.next_step


def test_exceptions_of_a_chain_share_the_users_frames():
    text = (
        "Traceback (most recent call last):\n  File \"pandas/_libs/index.pyx\", line 3, in get\nKeyError: 'age'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        + OWN.format("rows['age']")
        + "KeyError: 'age'"
    )
    assert "/home/u/train.py:7" in answer(text).summary


def test_what_a_worker_raised_counts_before_the_one_that_passes_it_on():
    text = (
        OWN.format("for batch in loader:")
        + "KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        + '  File "/home/u/dataset.py", line 36, in __getitem__\n    text = sample["text"]\nKeyError: \'text\''
    )
    found = answer(text)
    assert "text" in found.summary and "dataset.py:36" in found.summary


def test_frames_of_the_same_exception_in_another_rank_count():
    text = "[rank1]: KeyError: 'glm_data'\n" + "\n".join(
        f"[rank0]: {line}" for line in (OWN.format("cfg['glm_data']") + "KeyError: 'glm_data'").split("\n")
    )
    assert answer(text).cause == "script_error"


def test_the_words_of_a_library_in_a_scripts_own_check_are_no_sure_cause():
    own = (
        OWN.format("raise RuntimeError(text)")
        + "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert answer(own).confidence != "high"


@pytest.mark.parametrize(
    ("file", "code", "error", "says"),
    [
        ("verl/workers/actor.py", "self.engine.swap_out(names)",
         "AttributeError: 'ownEngine' object has no attribute 'swap_out'", "verl's own code asks a `ownEngine`"),
        ("unsloth/models/loader.py", "del model._kept_forward", "AttributeError: _kept_forward",
         "unsloth 2025.3.4's own code asks for `_kept_forward`"),
        ("accelerate/hooks.py", 'hook = module.__dict__["_first_hook"]', "KeyError: '_first_hook'",
         "accelerate's own code reads the key '_first_hook'"),
    ],
)  # fmt: skip
def test_what_a_packages_own_code_misses_is_that_releases_fault(file, code, error, says):
    log = (
        "Unsloth 2025.3.4 patched 8 layers.\n" + OWN.format("go()") + PACKAGE.format(file, "f", code) + error
    )
    found = answer(log)
    assert found.cause == "version"
    assert says in found.summary
    assert "newer first" in found.next_step
    assert found.confidence == ("low" if "KeyError" in error else "medium")
    assert answer(log, {"LANG": "zh_CN.UTF-8"}.items()).summary != found.summary


def test_a_value_of_pythons_own_type_in_the_place_of_an_object():
    code = "ids = self.processor.image_token_id"
    found = answer(
        OWN.format("go()") + PACKAGE.format("transformers/data/own_collator.py", "f", code)
        + "AttributeError: 'dict' object has no attribute 'image_token_id'"
    )  # fmt: skip
    assert "`self.processor` is a dict where transformers asks for its `.image_token_id`" in found.summary
    assert "/home/u/train.py:7" in found.next_step

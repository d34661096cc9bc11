"""Lines that only list what may have happened, numbers that contradict a message, and marks of surroundings: the
specific words decide."""

from __future__ import annotations

import pytest
from test_phases import answer

from dsrun.jobs.diagnosis import names
from dsrun.jobs.diagnosis.memory import memory_text
from dsrun.jobs.diagnosis.reading.suppositions import is_supposed

RAISED = 'Traceback (most recent call last):\n  File "/opt/env/lib/python3.11/site-packages/x/y.py", line 1, in f\n'
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 44.50 GiB of "
    "which {} is free."
)


@pytest.mark.parametrize(
    ("text", "where", "expected"),
    [
        ("Possible causes: (1) CUDA out of memory", "CUDA", True),
        ("There are several reasons. (a) stop was called. (b) a SIGSEGV", "SIGSEGV", True),
        ("This may be due to a full disk or No space left on device", "No space", True),
        ("If you use a gated repo, log in", "gated", True),
        ("It may be late. CUDA out of memory", "CUDA", False),
        ("the worker died: SIGSEGV", "SIGSEGV", False),
    ],
)
def test_what_supposes(text, where, expected):
    assert is_supposed(text, text.index(where)) == expected


@pytest.mark.parametrize(
    ("log", "signature"),
    [
        # the line before the list decides
        ("OSError: [Errno 98] Address already in use\nPossible reasons: CUDA out of memory, Connection reset by peer",
         "port-in-use"),
        ("ModuleNotFoundError: No module named 'flash_attn_2_cuda'\nThis could be caused by one of the following:\n"
         "  1. CUDA out of memory\n  2. No space left on device", "extension-missing"),
        # Ray's list, and a worker of which it says more
        ("The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR. There are potential "
         "root causes. (1) OOM killer. (2) SIGSEGV.", "ray-worker-gone"),
        ("Worker exit type: SYSTEM_ERROR. Potential root causes: (1) SIGSEGV\nFatal Python error: Segmentation fault",
         "segfault"),
        # a name that nobody has, whatever the Hub's advice says
        (f"{RAISED}huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.\n\nRepository Not Found for url: "
         "https://huggingface.co/api/models/lab/gone.\nIf you are trying to access a private or gated repo, make sure "
         "you are authenticated.\nInvalid username or password.", "hub-no-such-name"),
        ("HfHubHTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/api/whoami-v2\n"
         "Invalid user token.", "hub-token"),
    ],
)  # fmt: skip
def test_a_list_of_causes_decides_nothing(log, signature):
    assert answer(log).signature == signature


def test_a_list_alone_is_little():
    found = answer("The job ended. Possible causes: (1) No space left on device (2) it was stopped")
    assert found.confidence == "low"


@pytest.mark.parametrize(
    ("requested", "free", "signature"),
    [
        ("20.00 MiB", "30.10 GiB", "gpu-oom-with-room"),
        ("2.00 GiB", "20.00 GiB", "gpu-oom-with-room"),
        ("2.00 GiB", "1.02 GiB", "gpu-oom"),
        ("2.00 GiB", "6.00 GiB", "gpu-oom"),
        ("20.00 MiB", "300.00 MiB", "gpu-oom"),
    ],
)
def test_memory_is_not_what_lacked_where_the_figures_have_room(requested, free, signature):
    found = answer(RAISED + FULL.format(requested, free))
    assert found.signature == signature
    assert signature == "gpu-oom" or f"{free[:4]} GiB are free" in found.summary


def test_an_engines_allocator_is_named_before_the_memory_it_blames():
    line = "CUDA Error: invalid device ordinal at /src/vllm/csrc/cumem_allocator.cpp:70"
    found = answer(f"{line}\n{RAISED}{FULL.format('20.00 MiB', '30.10 GiB')}")
    assert found.signature == "engine-allocator"
    assert '"invalid device ordinal"' in found.summary
    assert "vLLM" in found.next_step


@pytest.mark.parametrize(
    ("why", "signature"),
    [
        ("Cannot copy out of meta tensor; no data!", "tensor-copy-failed"),
        ("aten.copy_.default: got mixed torch.Tensor and DTensor, convert them", "dtensor-mixed"),
    ],
)
def test_equal_sizes_are_no_mismatch(why, signature):
    size = "torch.Size([16, 8])"
    sizes = f"dimensions in the model are {size} and whose dimensions in the checkpoint are {size}"
    message = f"{sizes}, an exception occurred : ('{why}',)."
    head = "RuntimeError: Error(s) in loading state_dict for OwnModel:\n"
    found = answer(f'{RAISED}{head}\tWhile copying the parameter named "a.b.weight", whose {message}')
    assert found.signature == signature
    assert "other sizes" not in found.summary


def test_a_vocabulary_by_its_rows():
    line = (
        "size mismatch for transformer.wte.weight: copying a param with shape torch.Size([50260, 768]) from "
        "checkpoint, the shape in current model is torch.Size([50257, 768])."
    )
    found = answer(f"{RAISED}RuntimeError: Error(s) in loading state_dict for OwnModel:\n\t{line}")
    assert found.signature == "vocabulary-mismatch"
    assert "resize_token_embeddings(50260)" in found.next_step


@pytest.mark.parametrize(
    ("log", "kubernetes"),
    [
        ("srun: error: node9: task 3: Exited with exit code 137", False),
        ("train.sh: line 12: 4242 Killed    python train.py\nexited with code 137", False),
        ("pod/worker-1 phase Failed\ncontainer exited with code 137", True),
    ],
)
def test_kubernetes_only_where_its_marks_are(log, kubernetes):
    found = answer(log)
    text = f"{found.summary} {found.next_step} {found.check}"
    assert ("pod" in text or "container reached" in text) == kubernetes
    assert found.cause == ("host_oom" if kubernetes else "killed")


def test_advice_for_kubernetes_goes_where_its_marks_are_missing():
    line = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. Insufficient shared memory (shm)."
    assert "Kubernetes" not in answer(line).next_step
    assert "--shm-size" in answer(line).next_step
    assert "Kubernetes" in answer(f"[pod/trainer-0/main] {line}").next_step


@pytest.mark.parametrize(
    ("above", "signature"),
    [
        ("", "gpu-oom-engine"),
        ('  File "/opt/env/lib/python3.11/site-packages/trl/trainer/rloo_trainer.py", line 9, in f\n',
         "gpu-oom-vllm-share"),
    ],
)  # fmt: skip
def test_a_training_on_the_same_card_only_where_it_is_seen(above, signature):
    engine = '  File "/opt/env/lib/python3.11/site-packages/vllm/v1/worker/gpu_worker.py", line 3, in load\n'
    found = answer(
        f"Traceback (most recent call last):\n{above}{engine}{FULL.format('2.00 MiB', '1.00 MiB')}"
    )
    assert found.signature == signature
    assert "2 MiB were asked for" in found.summary


def test_the_variable_of_the_devices_own_allocator():
    line = (
        "RuntimeError: NPU out of memory. Tried to allocate 1.00 GiB (NPU 0; 60.96 GiB total capacity; 30.00 GiB "
        "already allocated; 0.50 GiB free; 55.00 GiB reserved in total by PyTorch)"
    )
    found = answer(RAISED + line)
    assert "PYTORCH_NPU_ALLOC_CONF" in found.summary
    assert "CUDA" not in f"{found.summary} {found.next_step.partition('says itself')[0]}"


@pytest.mark.parametrize(
    ("gib", "digits", "expected"), [(2 / 1024, 2, "2 MiB"), (0.5, 1, "0.5 GiB"), (0.0, 1, "0.0 GiB")]
)
def test_small_sizes_in_mib(gib, digits, expected):
    assert memory_text.shown(gib, digits) == expected


def test_a_list_that_is_cut_off_has_no_names():
    listed = ", ".join(f"'name{number}'" for number in range(200))
    found = [name.value for name in names.names_in(f"KeyError: 'beta' not in ['alpha', {listed}")]
    assert found == ["beta"]


@pytest.mark.parametrize(
    ("log", "tool"),
    [
        ("loading /data/a.jsonl\njson.decoder.JSONDecodeError: Extra data: line 1 column 9 (char 8)", "jq -c . FILE"),
        ("loading /data/a.json\njson.decoder.JSONDecodeError: Expecting ',' delimiter: line 4 column 1 (char 80)",
         "`python -m json.tool FILE`"),
    ],
)  # fmt: skip
def test_how_a_broken_file_is_checked(log, tool):
    found = answer(log)
    assert tool in found.next_step
    assert ("json.tool FILE" in f"{found.next_step} {found.check}") == (".jsonl" not in log)


def test_a_code_of_an_error_is_no_host():
    found = answer(
        "[rank1]: EJ0001: [PID: 7] Failed to initialize the HCCP process. Reason: Maybe the last job runs."
    )
    assert (found.rank, found.host) == (1, None)


def test_the_stop_that_ends_a_sentence_is_no_part_of_a_value():
    assert (
        names.names_in("Detected 1 oom_kill event in StepId=99.0. Some of the tasks died")[0].value == "99.0"
    )

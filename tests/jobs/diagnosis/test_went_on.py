"""What says that something failed, and the run went on or ended well: none of it is why a job died."""

from __future__ import annotations

import pytest
from test_phases import answer

END = "{'train_runtime': 801.2, 'train_loss': 0.7, 'epoch': 3.0}"
STEPS = "\n".join(f"{{'loss': 1.{number}, 'epoch': 0.{number}}}" for number in range(1, 6))
RAISED = (
    'Traceback (most recent call last):\n  File "/home/u/probe.py", line 4, in <module>\n    probe()\n'
    "RuntimeError: CUDA error: out of memory"
)
SURVIVED = {
    "a batch that was made smaller": "CUDA out of memory. Tried to allocate 1.00 GiB. Reducing the batch size to 4",
    "an import": "ImportError: cannot import name 'fused_rope' from 'transformer_engine.pytorch' (/x.py)",
    "an operator": "RuntimeError: Error building extension 'cpu_adam'",
    "a kernel": "libcudart.so.12: cannot open shared object file: No such file or directory",
    "an exception": RAISED,
    "a file": "OSError: [Errno 28] No space left on device: '/cache/x.lock'",
}


@pytest.mark.parametrize("text", SURVIVED.values(), ids=SURVIVED)
def test_before_a_good_end(text):
    found = answer(f"start\n{text}\n{STEPS}\n{END}\nsaved to /out")
    assert found.cause is None
    assert found.summary == "No failure was found in these lines."


@pytest.mark.parametrize(
    "end", ["train loop: 100%|######| 40/40 [00:09<00:00,  4.10it/s]", "final eval metrics: {'acc': 0.4}"]
)
def test_a_full_bar_of_training_and_last_metrics_are_a_good_end(end):
    assert answer(f"start\n{RAISED}\n{end}").cause is None
    assert answer(f"start\n{end}\n{RAISED}").cause is not None
    half = end.replace("40/40", "20/40").replace("100%", " 50%").replace("final", "next")
    assert answer(f"start\n{RAISED}\n{half}").cause is not None


@pytest.mark.parametrize("text", SURVIVED.values(), ids=SURVIVED)
def test_it_counts_where_something_fails_behind_that_end(text):
    later = "exits with return code = -7"
    assert answer(f"start\n{text}\n{later}").cause is not None
    assert answer(f"start\n{text}\n{END}\n{text}").cause is not None


def test_a_loss_that_is_no_number_counts_although_the_run_ends():
    steps = "\n".join(f"step {number}: loss nan" for number in range(5))
    assert answer(f"{steps}\n{END}").cause == "nan"


@pytest.mark.parametrize(
    "noise",
    [
        "Exception ignored in: <function Loader.__del__ at 0x7f>\nTraceback (most recent call last):\n"
        '  File "/opt/env/lib/python3.11/site-packages/x/y.py", line 2, in __del__\n    self.close()\n'
        "AttributeError: 'Loader' object has no attribute 'pool'",
        "wandb: ERROR Error while calling W&B API: permission denied",
        "[W1105 10:00:00.000000 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl: Connection reset by peer",
    ],
)
def test_noise_of_a_process_that_is_ending(noise):
    assert answer(f"{STEPS}\n{END}\n100%|####| 9/9 [00:01<00:00, 1.0it/s]\n{noise}").cause is None


def test_steps_behind_a_line_that_nobody_raised():
    line = "Could not load the library of bitsandbytes: libbitsandbytes_cuda999.so: cannot open shared object file"
    assert answer(f"{line}\n{STEPS}").cause is None
    assert answer(f"{line}\n{STEPS[:50]}").cause is not None


def test_what_a_program_leaves_out_is_no_failure():
    line = "Could not read record 4 (ValueError: bad row); skipping it"
    work = "Map:  50%|###   | 500/1000 [00:05<00:05, 90.0 examples/s]\n{'loss': 2.0, 'epoch': 0.1}"
    assert answer(f"{line}\n{work}").summary == "No failure was found in these lines."
    assert "skipping it" in answer(line).summary


@pytest.mark.parametrize(
    "text",
    [
        'Sample 3 answer: "You see torch.OutOfMemoryError: CUDA out of memory. Use a smaller batch."',
        "[prompt] Why NCCL error: unhandled system error?\n[response] First:\nTraceback (most recent call last):\n"
        "  File \"a.py\", line 1, in <module>\nModuleNotFoundError: No module named 'deepspeed'\n[ground_truth] 4",
        "### Instruction: fix\n[Errno 28] No space left on device\n### Response: delete files",
        "<|im_start|>user\nCUDA error: device-side assert triggered\n<|im_start|>assistant\nlook at the labels",
        "completion = 'KeyError: 1, ncclSystemError: socket closed'\nreward: 0.5",
    ],
)
def test_texts_that_a_program_prints_as_data(text):
    assert answer(f"{text}\nstep 3").cause is None


@pytest.mark.parametrize(
    "text",
    [
        "prompt: fine\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "[rank0] ERROR answer: CUDA out of memory",
        'Error response: "CUDA out of memory"',
    ],
)
def test_the_programs_own_words_beside_such_data(text):
    assert answer(text).cause == "gpu_oom"

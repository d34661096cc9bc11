"""What a job was doing before a collective timed out, from the words and bars of any trainer."""

from __future__ import annotations

import pytest

from dsrun.jobs.diagnosis.diagnosis import in_words
from dsrun.jobs.diagnosis.log_files import LogSource
from dsrun.jobs.diagnosis.reading.log_lines import peeled
from dsrun.jobs.diagnosis.signatures import SignatureIndex, find_signatures
from dsrun.jobs.diagnosis.verdict import judge

INDEX = SignatureIndex(find_signatures())
TIMED_OUT = (
    "[rank3]:[E1101 10:32:11.000 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=71, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800012 milliseconds "
    "before timing out."
)
TRAINS = (
    "***** Running training *****\n"
    " 49%|████▉     | 499/1000 [59:53<1:00:07,  7.2s/it]\n"
    "{'loss': 1.2, 'grad_norm': 0.3, 'learning_rate': 1e-05, 'epoch': 0.5}\n"
    " 50%|█████     | 500/1000 [1:00:00<1:00:00,  7.2s/it]"
)


def answer(text, environ=None):
    lines = [peeled(0, number, line) for number, line in enumerate(text.split("\n"), 1)]
    return in_words(judge(lines, INDEX), [LogSource("train.log", None)], environ or {})


@pytest.mark.parametrize(
    ("before", "name", "percent"),
    [
        ("Running tokenizer on dataset (num_proc=16):  43%|████▎  | 430/1000 [28:10<37:00]", "tokenising", 43),
        ("Map (num_proc=8):   7%|▋         | 70/1000 [01:10<15:40,  1.01s/ examples]", "tokenising", 7),
        ("[2025-01-02 03:04:05,678] [INFO] [axolotl.utils.data.load_tokenized] Tokenizing Prompts", "tokenising", None),
        ("11/02/2025 03:04:05 - INFO - llmtuner.data.loader - Preprocessing the rows", "tokenising", None),
        ("Loading checkpoint shards:  33%|███▎      | 1/3 [05:10<10:20, 310.2s/it]", "loading", 33),
        (f"{TRAINS}\n[INFO|trainer.py:3503] >> Saving model checkpoint to /out/step-500", "saving", None),
        (f"{TRAINS}\n[INFO] [logging.py:96:log_dist] [Rank 0] Saving model checkpoint: /o/a.pt", "saving", None),
        (f"{TRAINS}\n***** Running Evaluation *****\n  Num examples = 7\n 5%|▌  | 3/6 [09:10<1:00]", "evaluating", 5),
        (f"{TRAINS}\nValidation DataLoader 0:  10%|█         | 10/100 [00:10<01:30,  1.0it/s]", "evaluating", 10),
        ("Syncing weights to the vLLM engine", "weight_sync", None),
        (f"{TRAINS}\nBuilding extension module cpu_adam...", "compiling", None),
        (f"{TRAINS}\nFrobnicating rows:  10%|█         | 10/100 [00:10<01:30,  1.0it/s]", "other", 10),
        (TRAINS, "training", 50),
        (f"Tokenizing train dataset:  43%|████▎     | 430/1000 [28:10<37:00, 3 examples/s]\n{TRAINS}", "training", 50),
        (f"{TRAINS}\n***** Running Evaluation *****\n{{'eval_loss': 1.1, 'epoch': 0.5}}", "training", None),
        ("config: saving_steps: 100\nweights_path: /data/loading", None, None),
    ],
)  # fmt: skip
def test_the_phase_stands_in_the_lines_before(before, name, percent):
    diagnosis = answer(f"{before}\n{TIMED_OUT}")
    assert diagnosis.cause == "nccl_timeout"
    assert (diagnosis.phase and diagnosis.phase["name"]) == name
    assert diagnosis.phase is None or diagnosis.phase["percent"] == percent
    assert diagnosis.confidence == ("low" if name in (None, "other", "training") else "medium")


def test_where_no_line_says_it_the_waiting_ranks_functions_do():
    frames = (
        "Traceback (most recent call last):\n"
        '  File "/o/site-packages/transformers/trainer.py", line 3500, in _save_checkpoint\n'
        '  File "/o/site-packages/torch/distributed/distributed_c10d.py", line 4100, in barrier\n'
        f"torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3\n{TIMED_OUT}"
    )
    diagnosis = answer(f"{TRAINS}\n{frames}")
    assert diagnosis.phase["name"] == "saving" and diagnosis.phase["function"] == "_save_checkpoint"
    assert "was in _save_checkpoint()" in diagnosis.summary


def test_one_rank_that_gathers_the_whole_model_is_named():
    saving = f"{TRAINS}\nSaving model checkpoint to /out/step-500\n{TIMED_OUT}"
    assert "SHARDED_STATE_DICT" not in answer(saving).next_step
    text = f"fsdp_state_dict_type: FULL_STATE_DICT\n{saving}"
    assert answer(text).next_step.startswith("FULL_STATE_DICT")
    assert "SHARDED_STATE_DICT" in answer(text, {"LANG": "zh_CN.UTF-8"}).next_step
    assert '"Saving model checkpoint to /out/step-500" (line 6)' in answer(text).summary


def test_slow_ways_are_noted_and_no_failure():
    text = (
        "The fast path is not available because one of the required library is not installed. Falling back to torch "
        f"implementation.\nflash-attn is not installed, falling back to eager attention\n{TRAINS}"
    )
    diagnosis = answer(text)
    assert diagnosis.cause is None and not diagnosis.lines
    assert [note["line"].split()[0] for note in diagnosis.slow] == ["flash-attn", "The"]
    assert "falling back to eager attention" in diagnosis.slow[0]["means"]
    assert not answer(TRAINS).slow

"""What logs say: kinds before the order of lines, types before words, and who was first."""

from __future__ import annotations

import pytest

from dsrun.jobs.diagnosis.reading.log_lines import peeled
from dsrun.jobs.diagnosis.signatures import SignatureIndex, find_signatures
from dsrun.jobs.diagnosis.verdict import judge

INDEX = SignatureIndex(find_signatures())
FRAMES = '{0}Traceback (most recent call last):\n{0}  File "/home/u/train.py", line 7, in <module>\n{0}    main()\n'
LIBRARY = '{0}  File "/opt/env/lib/python3.11/site-packages/lib/core.py", line 70, in call\n'
LOST = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:33421: Connection reset by peer"
WATCHDOG = (
    "[rank{0}]:[E1206 18:44:12.715 ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600061 milliseconds"
)
PROGRESS = (
    "[rank{0}]:[E1206 18:44:12.715 ProcessGroupNCCL.cpp:1664] [PG 1 Rank {0}] last enqueued NCCL work: {1}"
)
TORCHRUN = """Root Cause (first observed failure):
[0]:
  time      : 2025-05-21_15:43:0{second}
  host      : {host}
  rank      : {rank} (local_rank: 0)
  exitcode  : 1 (pid: 14750)
"""


def verdict_on(*logs):
    lines = [
        peeled(source, number, line)
        for source, text in enumerate(logs)
        for number, line in enumerate(text.split("\n"), 1)
    ]
    return judge(lines, INDEX)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("TypeError: unsupported operand type(s) for +: 'int' and 'str'", "script_error"),
        ("KeyError: 'peer'", "script_error"),
        ("ZeroDivisionError: division by zero", "script_error"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/datastore/restore/peer.jsonl'", "missing_file"),
        ("ValueError: the peer store has timed out", None),
        ("MyOwnError: broken", None),
    ],
)  # fmt: skip
def test_the_type_decides_before_the_words(error, cause):
    text = FRAMES.format("[rank1]: ") + f"[rank1]: {error}\n[rank0]: {LOST}"
    found = verdict_on(text)
    assert (found.cause, found.first.rank) == (cause, 1)
    assert found.raised.user_frame.line == 7


@pytest.mark.parametrize(
    "warning",
    [
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node1]:29500 (errno: 113 - No route).",
        "[W socket.cpp:697] [c10d] The client socket cannot be initialized to connect to [node1]:29500 (errno: 97 - "
        "Address family not supported by protocol).",
    ],
)
def test_what_torch_warns_of_gives_way_to_the_failure(warning):
    found = verdict_on(f"{warning}\n/usr/bin/python: No module named deepspeed")
    assert found.signature.id == "module-missing"


def test_an_address_that_no_socket_gets_is_no_note():
    refused = "[E socket.cpp:435] [c10d] The server socket has failed to bind to [::]:29500 (errno: 99 - Cannot assign"
    assert verdict_on(f"{refused} requested address).").cause == "rendezvous_host"


def test_what_torch_only_warned_of_is_named_with_little_confidence():
    lost = "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node1]:29500 (errno: 113 - No route)."
    assert verdict_on(lost).confidence == "low"


def test_a_type_says_nothing_of_a_librarys_own_code():
    assert verdict_on(FRAMES.format("") + LIBRARY.format("") + "KeyError: 'x'").cause is None


def test_an_attribute_that_a_library_misses_is_one_of_versions_with_little_confidence():
    inside = FRAMES.format("") + LIBRARY.format("")
    found = verdict_on(inside + "AttributeError: 'StepState' object has no attribute 'last_loss'")
    assert (found.cause, found.confidence) == ("version", "low")
    assert verdict_on(inside + "AttributeError: 'NoneType' object has no attribute 'last_loss'").cause is None


@pytest.mark.parametrize(
    ("frame", "cause"),
    [
        ("Cell In[2], line 7", "script_error"),
        ("<ipython-input-3-a1b2c3> in <module>", "script_error"),
        ('  File "C:\\env\\lib\\enum.py", line 437, in __getattr__', None),
        ('  File "C:\\env\\lib\\site-packages\\x\\y.py", line 4, in f', "version"),
        ('  File "C:\\work\\train.py", line 4, in f', "script_error"),
    ],
)
def test_whose_code_it_is_shows_in_notebooks_and_on_windows(frame, cause):
    assert (
        verdict_on(
            f"Traceback (most recent call last):\n{frame}\nNameError: name 'trainer' is not defined"
        ).cause
        == cause
    )


def test_a_root_counts_before_what_came_of_it():
    text = "\n".join(
        [WATCHDOG.format(0), WATCHDOG.format(2), "[rank1]: OSError: [Errno 28] No space left on device"]
    )
    found = verdict_on(text)
    assert (found.cause, found.first.rank, found.confidence) == ("disk_full", 1, "high")


def test_ranks_that_waited_are_not_to_blame():
    found = verdict_on("\n".join(map(WATCHDOG.format, (0, 1, 3))))
    assert (found.cause, found.first.rank) == ("nccl_timeout", None)


def test_the_rank_that_is_behind():
    text = "\n".join([WATCHDOG.format(0), *(PROGRESS.format(rank, 9 - (rank == 2)) for rank in range(4))])
    assert verdict_on(text).first.rank == 2


ENDED = (
    "[2026-11-28 10:00:12,106] [ERROR] [launch.py:325:f] ['python', 'train.py', '--local_rank={last}'] "
    "exits with return code = {code}"
)
CLOSED = "[rank{rank}]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:48000"


@pytest.mark.parametrize(
    ("last", "code", "lost", "rank"),
    [
        (1, 1, [0], 1),  # the launcher looked at rank 0 first, which only lost its peer
        (1, 3, [0], 1),
        (1, -9, [1], 0),
        (3, 3, [0, 1, 3], 2),
        (3, 3, [0, 1], None),
        (3, 3, [], None),  # its line has the last rank's command, whichever ended
        (0, 3, [], 0),
    ],
)
def test_deepspeeds_last_line_names_no_rank(last, code, lost, rank):
    """The first is the one that wrote nothing, where each of the others had lost its peer."""
    text = "\n".join([*(CLOSED.format(rank=one) for one in lost), ENDED.format(last=last, code=code)])
    found = verdict_on(text)
    assert found.first.rank == rank
    assert found.cause == {1: None, 3: "exited", -9: "killed"}[code]


def test_a_kill_after_a_failure_is_clean_up():
    killed = "['/usr/bin/python3', '-u', 'train.py', '--local_rank=3'] exits with return code = -9"
    assert verdict_on(killed).cause == "killed"
    assert verdict_on(f"CPU Virtual Memory:  used = 240 GB, percent = 96%\n{killed}").cause == "host_oom"
    assert (
        verdict_on(f"{FRAMES.format('[rank1]: ')}[rank1]: TypeError: bad\n{killed}").cause == "script_error"
    )
    assert verdict_on(f"{FRAMES.format('[rank1]: ')}[rank1]: OddError: bad\n{killed}").cause is None


def test_of_several_hosts_torchruns_earliest_word():
    logs = [TORCHRUN.format(second=9, host="n1", rank=0), TORCHRUN.format(second=3, host="n2", rank=8)]
    found = verdict_on(*(f"IndexError: index out of range in self\n{log}" for log in logs))
    assert (found.first.rank, found.first.host) == (8, "n2")


def test_of_several_logs_the_clock_decides():
    later = "2025-01-01 10:00:09 ERROR RuntimeError: CUDA out of memory."
    first = "2025-01-01 10:00:03 ERROR OSError: [Errno 28] No space left on device"
    assert verdict_on(later, first).cause == "disk_full"


def test_what_says_less_gives_way():
    killed = "RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error"
    assert verdict_on(f"OSError: [Errno 28] No space left on device\n{killed}").cause == "shm"


def test_a_warning_is_no_failure_beside_an_error():
    text = f"[WARNING] CUDA out of memory, a smaller batch is tried\n{FRAMES.format('')}TypeError: bad"
    assert verdict_on(text).cause == "script_error"


def test_what_is_raised_counts_before_the_code_that_raises_it():
    raising = "    raise RuntimeError(f'still have inflight params {names}')"
    found = verdict_on(f"{FRAMES.format('')}{raising}\nRuntimeError: still have inflight params [7]")
    assert found.line.text.endswith("[7]")
    assert verdict_on(f"{FRAMES.format('')}{raising}").cause == found.cause, "a log that was cut"


def test_an_input_methods_colons_are_read():
    assert verdict_on("报错：OSError：[Errno 28] No space left on device").cause == "disk_full"
    assert (
        verdict_on(f"{FRAMES.format('')}AttributeError：'Model' object has no attribute 'x'").cause
        == "version"
    )


def test_what_deepspeed_says_on_every_single_host_is_no_cause():
    text = "[WARNING] Unable to find hostfile, will proceed with training with local resources only."
    assert verdict_on(f"{text}\nstep 1 loss 2.5").cause is None


def test_a_size_of_nothing_is_zero_3s_where_deepspeed_ran():
    text = "RuntimeError: shape '[-1, 0]' is invalid for input of size 4478976"
    assert verdict_on(text).cause == "shape"
    below = FRAMES.format("") + LIBRARY.format("").replace("lib/", "deepspeed/")
    assert verdict_on(below + text).cause == "zero3_ungathered"


def test_of_a_chain_the_first():
    text = (
        f"{FRAMES.format('')}json.decoder.JSONDecodeError: Extra data: line 2 column 1 (char 9)\n\n"
        f"During handling of the above exception, another exception occurred:\n\n{FRAMES.format('')}OddError: no data"
    )
    assert verdict_on(text).cause == "data"


def test_what_a_library_tried_first_is_no_cause():
    text = (
        f"{FRAMES.format('')}{LIBRARY.format('')}KeyError: 'x'\n\nDuring handling of the above exception, another "
        f"exception occurred:\n\n{FRAMES.format('')}FileNotFoundError: [Errno 2] No such file or directory: 'a'"
    )
    assert verdict_on(text).cause == "missing_file"


def test_what_was_ignored_is_no_cause():
    text = f"Exception ignored in: <function f at 0x7>\n{FRAMES.format('')}TypeError: 'NoneType' object is not callable"
    assert verdict_on(text).cause is None


@pytest.mark.parametrize(
    "text",
    [
        "step 1 loss 2.5\nstep 2 loss 2.4",
        "failed (exitcode: 1) local_rank: 0 (pid: 1464610) of binary: /usr/bin/python",
        "exits with return code = -6",
        "RuntimeError: CUDA error: unspecified launch failure",
        LOST,
        "",
    ],
)
def test_it_abstains(text):
    found = verdict_on(text)
    assert (found.cause, found.confidence) == (None, "none")


def test_a_job_that_hangs_stands_at_its_last_line():
    root = "Using /home/u/.cache/torch_extensions/py310_cu118 as PyTorch extensions root..."
    assert verdict_on(root).cause == "op_lock"
    assert verdict_on(f"{root}\nstep 1").cause is None


def test_a_process_that_is_named_alone_may_be_the_jobs_own():
    """In a container a process doesn't know itself by the number that the driver has for it."""
    line = "CUDA out of memory. Process 105400 has 76.92 GiB memory in use. Of the allocated memory {0} is allocated"
    own, other = verdict_on(line.format("73.28 GiB")), verdict_on(line.format("8.00 MiB"))
    assert (own.cause, other.cause) == ("gpu_oom", "gpu_oom")
    assert own.signature.id != other.signature.id == "gpu-oom-other-process"


@pytest.mark.parametrize(
    ("reserved", "free", "others"), [("3.00 GiB", "0.20 GiB", True), ("38.00 GiB", "0.20 GiB", False)]
)
def test_who_holds_the_card_is_reckoned_from_the_older_words(reserved, free, others):
    text = f"(GPU 0; 40.00 GiB total capacity; 2.90 GiB already allocated; {free} free; {reserved} reserved in total by"
    found = verdict_on(f"RuntimeError: CUDA out of memory. Tried to allocate 1.00 GiB {text} PyTorch)")
    assert (found.signature.id == "gpu-oom-held-by-others", found.cause) == (others, "gpu_oom")


@pytest.mark.parametrize(
    ("module", "cause"),
    [
        ("labtools", "import"),
        ("labtools.io", "version"),
        ("google.protobuf", "import"),
        ("torch.parts", "version"),
    ],
)
def test_a_part_that_is_missing_is_no_package_that_is(module, cause):
    """Python names the top package alone where that isn't there."""
    assert verdict_on(f"ModuleNotFoundError: No module named '{module}'").cause == cause


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("lab/small", "hub_auth"),
        ("None", "model_files"),
        ("your-model", "model_files"),
        ("out/run/3", "model_files"),
    ],
)
def test_a_name_that_is_none_comes_before_rights(name, cause):
    said = (
        "is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'"
    )
    assert verdict_on(f"OSError: {name} {said}").cause == cause


@pytest.mark.parametrize(
    "last",
    [
        "{'loss': 1.2, 'grad_norm': nan, 'learning_rate': 1e-05}",
        "Skipping step. Attempted loss scale: 1, reducing to 1",
        "ld: libfoo.so: undefined reference to `dlopen'",
    ],
)
def test_what_may_pass_counts_only_where_the_log_ends(last):
    """A step that is skipped now and then, and operators that are only tried out, are in healthy logs, too."""
    assert verdict_on(f"starting\n{last}").cause
    assert verdict_on(f"starting\n{last}\n{{'loss': 1.1, 'grad_norm': 0.5}}").cause is None


def test_a_rendezvous_that_is_gone_at_the_end_is_not_why_it_ended():
    raised = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has"
    raised += " failed."
    closing = (
        "W1126 20:01:02.000000 11 torch/distributed/elastic/rendezvous/dynamic.py:1347] The node 'n1_9_0'"
    )
    closing += " has failed to shutdown the rendezvous '4' due to an error of type RendezvousConnectionError."
    failed = f"{FRAMES.format('')}TypeError: main() takes 1 positional argument but 2 were given"
    assert verdict_on(f"{failed}\n{closing}\n{raised}").cause == "script_error"
    assert verdict_on(f"{closing}\n{raised}").cause == "peer_gone"
    assert verdict_on(raised).cause == "rendezvous_timeout"


def test_a_crash_says_more_than_the_launchers_clean_up():
    text = "Sending process 12 closing signal SIGTERM\nfailed (exitcode: -11) local_rank: 1 (pid: 13) of binary: python"
    assert verdict_on(text).signature.id == "segfault"


def test_a_notebooks_traceback_that_was_cut_names_its_type_first():
    header = f"{'FileNotFoundError':<42}Traceback (most recent call last)"
    frame = "/opt/env/lib/python3.11/site-packages/lib/core.py in call(self)\n     12     work()\n---> 13     more()"
    cut = verdict_on(f"{header}\n{frame}")
    assert (cut.cause, cut.raised.type, cut.raised.frames[0].name) == (
        "missing_file",
        "FileNotFoundError",
        "call",
    )
    whole = verdict_on(f"{header}\n{frame}\n\nFileNotFoundError: [Errno 2] No such file or directory: 'a'")
    assert "No such file" in whole.raised.message


def test_what_nccl_prints_when_it_is_aborted_is_no_set_up():
    line = "node1:1:7 [1] NCCL INFO comm 0x5575 rank 1 nranks 2 cudaDev 1 busId 2d000"
    assert verdict_on(f"{line} - Init START").cause == "nccl_net"
    assert verdict_on(f"{line} - Abort COMPLETE").cause is None


def test_a_settings_file_that_is_broken_is_named_by_its_reader():
    text = (
        FRAMES.format("")
        + LIBRARY.format("")
        + "yaml.scanner.ScannerError: mapping values are not allowed here"
    )
    assert verdict_on(text).cause == "config"


def test_a_python_warning_is_no_failure_but_may_say_more_of_one():
    aside = "/opt/env/torch/fsdp.py:2224: UserWarning: Failed to clone() tensor. Error: CUDA out of memory."
    assert verdict_on(f"{aside}\nstep 1 loss 2.5").confidence == "low"
    assert verdict_on(f"{aside}\n{FRAMES.format('')}TypeError: bad").cause == "script_error"
    driver = "/opt/env/torch/cuda.py:107: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old"
    assert verdict_on(f"{driver}\nRuntimeError: No CUDA GPUs are available").cause == "driver"


STEPS = "\n".join(f"step={number} loss=2.{number}" for number in range(40))
READ_TIMED_OUT = "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='hub', port=443): Read timed out."


def test_what_a_program_survived_is_not_why_it_died():
    """A download that was tried again, steps, and then the failure."""
    early = FRAMES.format("") + READ_TIMED_OUT
    assert verdict_on(early).cause == "network"
    late = FRAMES.format("") + "KeyError: 'peer'"
    assert verdict_on(f"{early}\n{STEPS}\n{late}").cause == "script_error"
    assert (
        verdict_on(f"{early}\n{STEPS}\n[rank0]: OSError: [Errno 28] No space left on device").cause
        == "disk_full"
    )
    assert verdict_on(f"{early}\n{STEPS}\nexits with return code = 1").cause is None


def test_nobody_is_sure_of_a_failure_after_which_nothing_failed():
    found = verdict_on(f"{FRAMES.format('')}{READ_TIMED_OUT}\n{STEPS}")
    assert (found.cause, found.confidence) == ("network", "low")


def test_other_ranks_steps_are_no_sign():
    failed = f"[rank1]: {READ_TIMED_OUT}"
    others = "\n".join(f"[rank0]: {line}" for line in STEPS.split("\n"))
    assert verdict_on(f"{failed}\n{others}").confidence != "low"


def test_what_nobody_tries_again_counts_whatever_follows():
    """Logs of several ranks without prefixes: the others' steps stand behind it, so that nobody is sure."""
    failed = "OSError: [Errno 28] No space left on device"
    found = verdict_on(f"{failed}\n{STEPS}\nexits with return code = 1")
    assert (found.cause, found.confidence) == ("disk_full", "medium")


def test_two_causes_leave_it_less_sure():
    both = "OSError: [Errno 28] No space left on device\nOSError: [Errno 24] Too many open files"
    found = verdict_on(both)
    assert (found.cause, found.confidence) == ("disk_full", "medium")


def test_a_blank_before_the_colon_of_an_exception():
    found = verdict_on(f"{FRAMES.format('')}ModuleNotFoundError : No module named 'peft'")
    assert (found.cause, found.values["module"]) == ("import", "peft")


NOTES = """\
[2026-01-02 10:00:00,000] [INFO] micro_batch_size=2, gradient_accumulation_steps=4, rank=0
No chat template is defined for this tokenizer - using the default template.
Token indices sequence length is longer than the specified maximum sequence length for this model (5000 > 4096). \
Running this sequence through the model will result in indexing errors
Some weights of LlamaForSequenceClassification were not initialized from the model checkpoint: ['score.weight']
UserWarning: None of the inputs have requires_grad=True. Gradients will be None
`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.
[WARNING] [stage3.py:1949:step] 2 pytorch allocator cache flushes since last step.
[W socket.cpp:697] [c10d] The client socket cannot be initialized to connect to [localhost]:29500 (errno: 97 - \
Address family not supported by protocol).
FutureWarning: `tokenizer` is deprecated and will be removed for `Trainer.__init__`. Use `processing_class` instead.
Deleting older checkpoint [out/checkpoint-400] due to args.save_total_limit
step 803: error 0.003
sbatch: Submitted batch job 12345
"""


@pytest.mark.parametrize("note", NOTES.splitlines())
def test_what_a_job_that_goes_on_says_names_nothing(note):
    assert verdict_on(note).cause is None

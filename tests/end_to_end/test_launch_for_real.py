"""`dsrun launch` for real: scripts under the real launcher, two CPU ranks, and what becomes of them.

The faults that wait for --full are met in tests/jobs/supervision, too, by real agents without DeepSpeed's launcher.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from needed import needs

needs("deepspeed")

from running import check_form, in_terminal, until

from dsrun.job.run_folder import describe_state

pytestmark = pytest.mark.slow

TELLS = """
import json, os, sys
if not sys.argv:
    import deepspeed
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CUDA_VISIBLE_DEVICES")
told = {name: os.environ.get(name) for name in names}
told |= {"argv": sys.argv, "name": __name__, "first": sys.path[0], "cwd": os.getcwd(), "file": __file__}
os.write(1, f"TOLD {json.dumps(told)}\\n".encode())
"""
RAW = """
import argparse
import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--compile", action="store_true")
args = deepspeed.add_config_arguments(parser).parse_args()
if not args.compile:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step in range(args.steps):
    loss = (engine(torch.full((engine.train_micro_batch_size_per_gpu(), 8), 0.5)) - 3).square().mean()
    engine.backward(loss)
    engine.step()
    print(f"step {step} stage {engine.zero_optimization_stage()} loss {loss.item():.6f}", flush=True)
"""
TRAINER = """
import deepspeed
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
(training,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
rows = [{"input_ids": torch.arange(8) + row, "labels": torch.arange(8) + row} for row in range(8)]
trainer = Trainer(model=LlamaForCausalLM(config), args=training, train_dataset=rows)
done = trainer.train()
print(f"steps {done.global_step} stage {trainer.model_wrapped.zero_optimization_stage()}", flush=True)
"""
ACCELERATOR = """
import deepspeed
import torch
from accelerate import Accelerator, InitProcessGroupKwargs

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
rows = torch.utils.data.DataLoader(torch.arange(32.0).reshape(8, 4) / 32, batch_size=2)
model, optimizer, rows = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), rows)
seen = 0
for batch in rows:
    loss = (model(batch) - 1).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    seen += len(batch)
kind, stage = accelerator.distributed_type.name, model.zero_optimization_stage()
print(f"{kind} of {accelerator.num_processes}, {type(model).__name__} stage {stage}: {seen} rows", flush=True)
"""
WAITS = """
import os, signal, sys, time
if "--deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("here", flush=True)
time.sleep(600)
"""


@pytest.fixture
def start(environ, tmp_path):
    """`start(script, *options, args=())`: a `dsrun launch` of the script's text that is under way."""
    started: list[subprocess.Popen[str]] = []

    def run(script: str, *options: str, args: tuple[str, ...] = (), run_dir: str = "run"):
        path = tmp_path / "a lab's 脚本.py"
        path.write_text(script, encoding="utf-8")
        command = [sys.executable, "-m", "dsrun", "launch", "--gpus", "2", "--output-dir", run_dir, *options]
        process = subprocess.Popen(
            [*command, path.name, *args],
            env=environ, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=300)


@pytest.fixture
def launch(start):
    """`launch(...)`: the same to its end: exit code, stdout, stderr."""

    def run(*words, **given) -> tuple[int, str, str]:
        process = start(*words, **given)
        out, err = process.communicate(timeout=800)
        return process.returncode, out, err

    return run


def state_of(run_dir: Path) -> str:
    return json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["state"]


def pids_of(run_dir: Path) -> list[int]:
    return [json.loads(path.read_text())["pid"] for path in run_dir.glob("state/rank-*.json")]


def told(text: str) -> list[dict]:
    found = [json.loads(line) for line in re.findall(r"TOLD (\{.*?\})\s*$", text, re.MULTILINE)]
    return sorted(found, key=lambda one: one["RANK"])


def gone(pids: list[int]) -> bool:
    return not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids
    )


def test_a_script_sees_what_the_bare_launcher_shows_it(launch, environ, tmp_path):
    args = ("--help", "--gpus", "7", "a b", "--", "-x")
    code, out, err = launch(TELLS, args=args)
    assert code == 0, err
    bare = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "a lab's 脚本.py", *args],
        env=environ, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told(out) == told(bare.stdout)
    assert [one["argv"][1] for one in told(out)] == ["--local_rank=0", "--local_rank=1"]
    assert state_of(tmp_path / "run") == "finished"


def test_a_script_without_deepspeed_gets_torchruns_variables(launch, tmp_path):
    plain = TELLS.replace("import deepspeed", "pass").replace('"LOCAL_SIZE"', '"LOCAL_WORLD_SIZE"')
    code, out, err = launch(plain.replace('"CUDA_VISIBLE_DEVICES"', '"DS_ACCELERATOR"'), args=("--x",))
    assert code == 0, err
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in told(out)] == [
        ("0", "0", "2", "2"), ("1", "1", "2", "2"),
    ]  # fmt: skip
    assert told(out)[0]["argv"][1:] == ["--x"], "no --local_rank, which its parser doesn't know"
    assert "deepspeed.launcher" not in (tmp_path / "run" / "command.sh").read_text()


FOREIGN = {
    "torch": (
        """
import argparse, os, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
args = parser.parse_args()
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
print(f"ranks {dist.get_world_size()} gradient {model.module.weight.grad[0, 0].item():.1f}", flush=True)
""",
        ("--lr", "0.1"),
        "ranks 2 gradient 1.0",
    ),
    # Megatron's own: its parser knows --local-rank, and takes the place from the environment.
    "megatron": (
        """
import argparse, os, torch
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--local-rank", type=int, default=int(os.getenv("LOCAL_RANK", "0")))
parser.add_argument("--tensor-model-parallel-size", type=int)
args = parser.parse_args()
rank, world = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
torch.distributed.init_process_group("gloo", world_size=world, rank=rank)
groups = [torch.distributed.new_group([0, 1])]
print(f"tp {args.tensor_model_parallel_size} of {torch.distributed.get_world_size(groups[0])}", flush=True)
""",
        ("--tensor-model-parallel-size", "2"),
        "tp 2 of 2",
    ),
    "trainer": (
        TRAINER.replace("import deepspeed\n", "")
        .replace('deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled\n', "")
        .replace(" stage {trainer.model_wrapped.zero_optimization_stage()}", " ranks {training.world_size}"),
        ("--output_dir", "out", "--use_cpu", "true", "--max_steps", "2", "--report_to", "none", "--save_strategy", "no",
         "--per_device_train_batch_size", "1", "--disable_tqdm", "true"),
        "steps 2 ranks 2",
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", FOREIGN)
def test_scripts_that_want_no_deepspeed(launch, name):
    script, args, words = FOREIGN[name]
    code, out, err = launch(script, args=args)
    assert code == 0, err
    assert words in out


def test_a_labs_own_python(launch, tmp_path):
    """A second environment that has nothing of dsrun's; an older Python where there is one."""
    subprocess.run([older_python(), "-m", "venv", "--without-pip", tmp_path / "lab's env"], check=True)
    script = (
        "import os, sys\nprint(sys.prefix, sys.argv[1:], flush=True)\n"
        "if os.environ['RANK'] == '1' and 'fail' in sys.argv:\n    raise ValueError('a bad row')\n"
    )
    code, out, err = launch(script, "--python", "lab's env/bin/python", args=("a b",))
    assert (code, out) == (0, f"{tmp_path}/lab's env ['a b']\n"), err
    described = json.loads((tmp_path / "run" / "environment.json").read_text())["ranks"]
    assert described["executable"] == f"{tmp_path}/lab's env/bin/python"
    code, out, err = launch(script, "--python", "lab's env/bin/python", args=("fail",), run_dir="second")
    assert code == 1
    assert "rank 1 failed first: ValueError: a bad row" in err


def older_python() -> str:
    others = sorted(
        Path.home().glob(".pyenv/versions/3.*/bin/python"), key=lambda path: "/3.8." not in str(path)
    )
    able = [path for path in others if not path.parts[-3].startswith(("3.6", "3.7"))]
    return str(next(iter(able), sys.executable))


@pytest.mark.full
def test_a_rank_of_another_python_that_is_killed(start, tmp_path):
    process = start("import os\nopen('pid-' + os.environ['RANK'], 'w')\n" + WAITS, "--python", sys.executable)
    until(lambda: len([*tmp_path.glob("pid-*")]) == 2, "two ranks")
    family = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
    scripts = [pid for pid in family if "dsrun" not in " ".join(psutil.Process(pid).cmdline()[1:3])]
    os.kill(scripts[0], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "SIGKILL" in err or "signal 9" in err
    assert gone(family)


def test_a_module_and_no_local_rank(launch, tmp_path):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "train.py").write_text(TELLS)
    process = launch("", "--no-local-rank", "-m", "lab.train", "--x")
    code, out, _ = process
    assert code == 0
    for one in told(out):
        assert one["argv"][1:3] == ["--x", "a lab's 脚本.py"]
        assert (one["first"], one["cwd"], one["name"]) == (str(tmp_path), str(tmp_path), "__main__")


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((), ("--set", "optimizer.params.torch_adam=true")),
        # DeepSpeed compiles what it uses.
        pytest.param(("--compile",), (), marks=pytest.mark.full),
    ],
)
def test_a_script_with_deepspeeds_arguments(launch, tmp_path, args, options):
    options = ("--preset", "zero2", "--micro-batch", "2", *options)
    code, out, err = launch(RAW, *options, args=("--steps", "3", *args))
    assert code == 0, err
    steps = re.findall(r"^step (\d) stage 2 loss ([\d.]+)$", out, re.MULTILINE)
    assert [step for step, _ in steps] == ["0", "1", "2"], "each step once: both ranks say the same"
    assert float(steps[2][1]) < float(steps[0][1])
    config = json.loads((tmp_path / "run" / "deepspeed.json").read_text())
    assert config["train_batch_size"] == 4
    assert "micro batch 2" in err


def test_a_script_with_the_trainers_arguments(launch, tmp_path):
    pytest.importorskip("transformers")
    args = ("--output_dir", "out", "--use_cpu", "true", "--max_steps", "2", "--report_to", "none")
    args += ("--per_device_train_batch_size", "1", "--save_strategy", "no", "--disable_tqdm", "true")
    options = ("--gpus", "1", "--preset", "zero2", "--set", "optimizer.params.torch_adam=true")
    code, out, err = launch(TRAINER, *options, args=args)
    assert code == 0, err
    assert "steps 2 stage 2" in out
    assert '"auto"' in (tmp_path / "run" / "deepspeed.json").read_text()


def test_an_accelerator_is_engaged_and_each_rank_has_its_rows(launch, dsrun, tmp_path):
    pytest.importorskip("accelerate")
    path = tmp_path / "acc.yaml"
    assert (
        dsrun("preset", "zero2", "--for", "accelerate", "--precision", "fp32", "-o", path, "--gpus", 2).code
        == 0
    )
    code, out, err = launch(ACCELERATOR, "--accelerate", str(path))
    assert code == 0, err
    assert "DEEPSPEED of 2, DeepSpeedEngine stage 2: 4 rows" in out


def test_the_rank_that_failed_is_named(launch, tmp_path):
    script = (
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('a bad row')\ntime.sleep(600)\n"
    )
    code, out, err = launch(script)
    assert code == 1
    assert "rank 1 failed first: ValueError: a bad row" in err
    assert "[rank 1] ValueError: a bad row" in out
    assert state_of(tmp_path / "run") == "failed"
    assert gone(pids_of(tmp_path / "run"))


@pytest.mark.full
def test_the_scripts_exit_code(launch):
    code, _, err = launch("import sys\nsys.exit(3)\n")
    assert code == 3
    assert "exit code 3" in err


@pytest.mark.full
@pytest.mark.parametrize("deaf", [(), ("--deaf",)], ids=["", "deaf"])
def test_nothing_is_left_when_dsrun_is_killed(start, tmp_path, deaf):
    process = start(WAITS, args=deaf)
    run_dir = tmp_path / "run"
    logs = [run_dir / "logs" / f"rank-{rank}.log" for rank in (0, 1)]
    until(lambda: len(pids_of(run_dir)) == 2 and all(map(Path.is_file, logs)), "two ranks")
    until(lambda: all("here" in path.read_text() for path in logs), "both are here")
    family = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
    assert set(pids_of(run_dir)) <= set(family)
    process.kill()
    process.communicate()
    until(lambda: gone(family), "nothing is left")


def test_ctrl_c(start, tmp_path):
    process = start(WAITS)
    until(lambda: len(pids_of(tmp_path / "run")) == 2, "two ranks")
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "dsrun rerun" in err
    assert state_of(tmp_path / "run") == "interrupted"
    assert gone(pids_of(tmp_path / "run"))


@pytest.mark.full
def test_a_closed_terminal(environ, tmp_path):
    (tmp_path / "waits.py").write_text(WAITS, encoding="utf-8")
    words = ["launch", "--gpus", "2", "--output-dir", "run", "waits.py"]
    process, terminal = in_terminal([sys.executable, "-m", "dsrun", *words], env=environ, cwd=tmp_path)
    try:
        until(lambda: len(pids_of(tmp_path / "run")) == 2, "two ranks")
    finally:
        os.close(terminal)
    assert process.wait(300) == 129
    assert describe_state(tmp_path / "run") == "stopped: the terminal was closed"
    assert gone(pids_of(tmp_path / "run"))


@pytest.mark.full
def test_a_hang_ends_with_every_ranks_stack(launch, tmp_path):
    script = "import time\n\ndef stuck():\n    time.sleep(600)\n\nprint('here', flush=True)\nstuck()\n"
    code, _, err = launch(script, "--hang-timeout", "0.15")
    assert code == 1
    assert "the job hangs" in err
    for rank in (0, 1):
        assert "in stuck" in (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
    assert gone(pids_of(tmp_path / "run"))


FAILS_ONCE = """
import os, pathlib
mark = pathlib.Path(f"mark-{os.environ['RANK']}")
if not mark.exists():
    mark.touch()
    raise OSError("a stale handle")
print("done")
"""
MEETS = """
import os, socket, time
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(place) as server:
        server.accept()[0].sendall(b"met")
else:
    for _ in range(3000):
        try:
            print(socket.create_connection(place).recv(3).decode())
            break
        except OSError:
            time.sleep(0.1)
    else:
        raise TimeoutError
"""


FAULTS = {
    "key": ("script_error", "{}['peer']"),
    "disk": ("disk_full", "open('/dev/full', 'w', buffering=1).write('x\\n')"),
    "module": ("import", "import no_such_module_of_ours"),
    "port": (
        "port_in_use",
        "import socket; s = socket.create_server(('', 0)); socket.create_server(s.getsockname())",
    ),
}
"""Faults of rank 1 while rank 0 waits for it, and the cause that is to be named."""


@pytest.mark.parametrize(
    "fault", ["key", *(pytest.param(name, marks=pytest.mark.full) for name in FAULTS if name != "key")]
)
def test_the_cause_and_the_first_rank_are_named(launch, fault, tmp_path):
    cause, line = FAULTS[fault]
    script = (
        "import os\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        f"if os.environ['RANK'] == '1':\n    {line}\ndist.barrier()\n"
    )
    code, _, err = launch(script)
    assert code != 0
    assert f"({cause})" in err
    (record,) = tmp_path.rglob("run.json")
    found = json.loads(record.read_text())["diagnosis"]
    assert (found["cause"], found["rank"]) == (cause, 1)


@pytest.mark.full
def test_it_is_started_again(launch):
    code, out, err = launch(FAILS_ONCE, "--max-restarts", "1", "--json")
    assert code == 0, err
    check_form("launch", json.loads(out))
    assert json.loads(out)["restarts"] == 1
    assert "starting again (1 of 1)" in err
    assert err.count("done") == 1


@pytest.mark.full
def test_two_at_once(start):
    processes = [start(MEETS, run_dir=name) for name in ("one", "two")]
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert out == "[rank 1] met\n"


@pytest.mark.full
def test_a_reader_that_leaves_ends_nothing(start, tmp_path):
    process = start("import time\nfor line in range(30):\n    print(line, flush=True)\n    time.sleep(0.1)\n")
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.wait(300) == 0
    assert "the job continues" in process.stderr.read()
    assert state_of(tmp_path / "run") == "finished"
    process.stderr.close()

"""Real failures: programs that fail in the way that a job does, and what is said of their own output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from dsrun.jobs.diagnosis.diagnosis import diagnose_files

PYTHON = [sys.executable, "-X", "faulthandler"]
FAULTS = {
    "module-missing": ("import", "import no_such_module_of_ours"),
    "import-name": ("version", "from json import no_such_name"),
    "type-error": ("script_error", "def add(a): return a + 'x'\nadd(1)"),
    "key-error": ("script_error", "{}['peer']"),
    "name-error": ("script_error", "print(nothing_of_the_kind)"),
    "division": ("script_error", "1 / 0"),
    "syntax": ("script_error", "def f(:\n    pass"),
    "indentation": ("script_error", "def f():\npass"),
    "recursion": ("script_error", "def f(): return f()\nf()"),
    "lambda-to-a-process": ("script_error", "import pickle\npickle.dumps(lambda: 1)"),
    "file-missing": ("missing_file", "open('/datastore/restore/train.jsonl')"),
    "disk-full": ("disk_full", "f = open('/dev/full', 'w', buffering=1)\nf.write('x\\n')"),
    "name-too-long": ("storage", "open('x' * 300, 'w')"),
    "host-memory": (
        "host_oom",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))\nx = bytearray(1 << 33)",
    ),
    "open-files": (
        "fd_limit",
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))\n"
        "files = [open('/dev/null') for _ in range(99)]",
    ),
    "port-in-use": (
        "port_in_use",
        "import socket\none = socket.create_server(('127.0.0.1', 0))\nsocket.create_server(one.getsockname())",
    ),
    "address-of-another-host": ("rendezvous_host", "import socket\nsocket.create_server(('192.0.2.7', 0))"),
    "no-such-host": ("rendezvous_host", "import socket\nsocket.getaddrinfo('node7.invalid', 29500)"),
    "nobody-listens": (
        "rendezvous_timeout",
        "import socket\nwith socket.create_server(('127.0.0.1', 0)) as one: place = one.getsockname()\n"
        "socket.create_connection(place)",
    ),
    "json-cut-off": ("data", "import json\njson.loads('{\"a\": [1, 2')"),
    "encoding": ("data", "b'\\xb0\\xa1'.decode('utf-8')"),
    "archive-cut-off": ("checkpoint", "import zipfile\nopen('w.pt', 'wb').write(b'PK')\nzipfile.ZipFile('w.pt')"),
    "pickle-cut-off": ("checkpoint", "import pickle\npickle.loads(b'')"),
    "argument": ("arguments", "import argparse\nargparse.ArgumentParser().parse_args(['--local_rank=0'])"),
    "no-launcher": ("launcher", "import os\nos.environ.pop('LOCAL_RANK', 0)\nos.environ['LOCAL_RANK']"),
    "ctrl-c": ("interrupted", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(9)"),
    "bus-error": (
        "shm",
        "import mmap\nf = open('m', 'w+b')\nf.truncate(8192)\nm = mmap.mmap(f.fileno(), 8192)\nf.truncate(0)\nm[5000]",
    ),
    "segmentation-fault": ("segfault", "import ctypes\nctypes.string_at(0)"),
    "abort": (None, "import os\nos.abort()"),
    "exit-code": (None, "print('step 1')\nraise SystemExit(3)"),
    "own-error": (None, "class OddError(Exception): pass\nraise OddError('the peer timed out')"),
}  # fmt: skip
"""Name -> the cause that is to be named (None: none), and a script."""
COMMANDS = {
    "killed": ("killed", f"{sys.executable} -c 'import os; os.kill(os.getpid(), 9)'; exit $?"),
    "illegal-instruction": ("illegal_instruction", "bash -c 'kill -ILL $$'; exit $?"),
    "asked-to-end": (None, f"{sys.executable} -c 'import os; os.kill(os.getpid(), 15)'; exit $?"),
    "no-such-program": ("launcher", "PATH=/nowhere; torchrun train.py"),
    "script-missing": ("missing_file", f"{sys.executable} /no/such/train.py"),
    "script-not-executable": ("permission", "touch train.sh; chmod 644 train.sh; ./train.sh"),
    "ssh-refused": ("ssh", "ssh -o BatchMode=yes -p 1 127.0.0.1 hostname"),
    "linker": ("op_build", "echo 'int main(){}' > a.c; cc a.c -lcurand"),
    "header": ("op_build", "echo '#include <curand_kernel.h>' > b.c; cc b.c"),
    "full-disk-of-a-shell": ("disk_full", "echo checkpoint > /dev/full"),
}
"""Name -> cause, and a command for bash."""
NEEDS = {"ssh-refused": "ssh", "linker": "cc", "header": "cc"}


def said_of(command, folder, log="train.log"):
    path = folder / log
    with path.open("wb") as output:
        environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C", "LC_ALL": "C"}
        subprocess.run(
            command, cwd=folder, env=environ, stdout=output, stderr=output, timeout=300, check=False
        )
    return diagnose_files([str(path)], {})


@pytest.mark.parametrize("name", FAULTS)
def test_a_script_that_fails(name, tmp_path):
    cause, script = FAULTS[name]
    (tmp_path / "train.py").write_text(script)
    found = said_of([*PYTHON, "train.py"], tmp_path)
    assert found.cause == cause, found.line
    assert found.where or cause is None


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_fails(name, tmp_path):
    if (program := NEEDS.get(name)) and not shutil.which(program):
        pytest.skip(f"there is no {program}")
    cause, command = COMMANDS[name]
    assert said_of(["bash", "-c", command], tmp_path).cause == cause


LIBRARIES = {
    "host-memory": ("host_oom", "torch.empty(1 << 50)"),
    "dtype": ("dtype", "torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.bfloat16)"),
    "shapes": ("shape", "torch.ones(2, 3) @ torch.ones(2, 3)"),
    "token-beyond-the-table": ("device_assert", "torch.nn.Embedding(3, 2)(torch.tensor([7]))"),
    "nothing-trains": ("no_grad", "torch.ones(1).sum().backward()"),
    "backward-twice": ("autograd", "x = torch.ones(1, requires_grad=True).exp().exp(); x.backward(); x.backward()"),
    "no-parameters": ("no_grad", "torch.optim.AdamW([])"),
    "no-gpu": ("torch_cpu_build", "torch.ones(1).cuda()"),
    "meta": ("model_loading", "torch.ones(2, device='meta').to('cpu')"),
    "other-sizes": ("model_loading", "torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(2, 3).state_dict())"),
    "checkpoint-cut-off": (
        "checkpoint",
        "torch.save(torch.ones(9), 'a.pt'); b = open('a.pt', 'rb').read(); "
        "open('a.pt', 'wb').write(b[:300]); torch.load('a.pt')",
    ),
    "pickled-class": ("checkpoint", "import argparse; torch.save(argparse.Namespace(a=1), 'a.pt'); torch.load('a.pt')"),
    "no-launcher": ("launcher", "torch.distributed.init_process_group('gloo')"),
    "first-host-not-there": (
        "rendezvous_timeout",
        "import datetime; torch.distributed.TCPStore('127.0.0.1', 9, 2, False, datetime.timedelta(seconds=1))",
    ),
    "port-taken": (
        "port_in_use",
        "import socket; s = socket.create_server(('', 0))\n"
        "torch.distributed.TCPStore('127.0.0.1', s.getsockname()[1], 1, True)",
    ),
    "others-do-not-come": (
        "rendezvous_timeout",
        "import datetime; torch.distributed.TCPStore('127.0.0.1', 0, 2, True, datetime.timedelta(seconds=1))",
    ),
    "sampling-nan": ("nan", "torch.multinomial(torch.tensor([float('nan')]), 1)"),
    "different-lengths": (
        "data", "torch.utils.data.default_collate([torch.ones(2), torch.ones(3)])",
    ),
    "worker-killed": (
        "host_oom",
        "class D(torch.utils.data.Dataset):\n    def __len__(self): return 4\n    def __getitem__(self, i):\n"
        "        import os; os.kill(os.getpid(), 9)\nlist(torch.utils.data.DataLoader(D(), num_workers=1))",
    ),
    "no-examples": ("data", "torch.utils.data.DataLoader([], shuffle=True)"),
    "weights-cut-off": (
        "checkpoint",
        "from safetensors.torch import load_file, save_file; save_file({'a': torch.ones(99)}, 'a.safetensors')\n"
        "b = open('a.safetensors', 'rb').read(); open('a.safetensors', 'wb').write(b[:-9]); load_file('a.safetensors')",
    ),
    "weights-are-a-pointer": (
        "model_files",
        "from safetensors.torch import load_file\n"
        "open('a.safetensors', 'w').write('version https://git-lfs.github.com/spec/v1')\n"
        "load_file('a.safetensors')",
    ),
    "no-such-model": (
        "hub_offline",
        "import os; os.environ['HF_HUB_OFFLINE'] = '1'\nfrom transformers import AutoConfig\n"
        "AutoConfig.from_pretrained('a/b')",
    ),
    "folder-without-config": (
        "model_files",
        "import os; os.makedirs('empty', exist_ok=True)\nfrom transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained('./empty')",
    ),
    "unknown-architecture": (
        "version",
        "import os, json; os.makedirs('m', exist_ok=True)\n"
        "json.dump({'model_type': 'llama99'}, open('m/config.json', 'w'))\n"
        "from transformers import AutoConfig; AutoConfig.from_pretrained('./m')",
    ),
}  # fmt: skip
"""Name -> cause, and lines that fail in the libraries that train."""
RUNNER = """
import json, os, sys, traceback
import torch
for name, script in json.load(open("scripts.json")).items():
    sys.stdout.flush(); sys.stderr.flush()
    if os.fork() == 0:
        log = os.open(name + ".log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1); os.dup2(log, 2)
        try:
            exec(compile(script, "train.py", "exec"), {"torch": torch, "__name__": "train"})
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os.wait()
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The logs of all LIBRARIES: torch is imported once, and each fails in a process of its own."""
    import json

    folder = tmp_path_factory.mktemp("faults")
    (folder / "scripts.json").write_text(
        json.dumps({name: script for name, (_, script) in LIBRARIES.items()})
    )
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUNNER)], cwd=folder, env=environ, timeout=600, check=True
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_fails(name, logs):
    import torch

    cause, _ = LIBRARIES[name]
    if name == "no-gpu" and torch.version.cuda:  # this build looks for a driver first
        cause = "no_gpu"
    found = diagnose_files([str(logs / f"{name}.log")], {})
    assert found.cause == cause, (found.signature, found.line)


def test_there_are_enough_kinds():
    assert len(FAULTS) + len(COMMANDS) + len(LIBRARIES) > 60

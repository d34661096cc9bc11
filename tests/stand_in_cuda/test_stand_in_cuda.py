"""dsrun's CUDA branches under torch's CUDA build without a GPU: a stand-in runtime, and tensors without content.

A CPU build of torch can't record a backward pass of tensors on "cuda", so these run where a CUDA build is installed
(`bash tests/run.sh --versions torch==2.11.0,transformers==5.17.0`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from needed import needs

needs("torch", "transformers")

from dsrun.cluster.ports import free_port

HERE = Path(__file__).parent
HEADER = "driver_types.h"
CAPABILITIES = {"V100": (7, 0), "H100": (9, 0)}
RANK_0 = {"DS_ACCELERATOR": "cuda", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""The environment of the cases' process alone: tests behind these, in the same worker, have no GPU."""
ANYWHERE = "fsdp_steps"
"""The case that is the same on every GPU, and takes the longest: on one."""


def headers() -> list[Path]:
    """The folders of CUDA's headers, torch's own version first: a struct of another one has another size. They come
    with torch's CUDA build, whose packages leave out what triton's has (crt/)."""
    from importlib.util import find_spec

    nvidia, triton = find_spec("nvidia"), find_spec("triton")
    if nvidia is None or triton is None:
        return []
    places = [Path(place) for place in nvidia.submodule_search_locations or ()]
    own = [file.parent for place in places for file in sorted(place.glob(f"*/include/{HEADER}"))]
    rest = Path(str(triton.origin)).parent / "backends/nvidia/include"
    return [*own, rest] if own and (rest / "crt/host_defines.h").is_file() else []


def why_not() -> str:
    """Why the cases can't run here; empty where they can."""
    import torch

    if torch.version.cuda is None:
        return "torch is a CPU build"
    return "" if shutil.which("cc") and headers() else "no C compiler, or no headers of CUDA's"


@pytest.fixture(scope="module", params=CAPABILITIES)
def gpu(request):
    return request.param


@pytest.fixture(scope="module")
def outcome(gpu, environ, tmp_path_factory):
    """What each case came to on that GPU, all in one process."""
    if why := why_not():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp(gpu)
    major, minor = CAPABILITIES[gpu]
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-w", f"-DMAJOR={major}", f"-DMINOR={minor}",
         *(f"-I{folder}" for folder in headers()), "-o", str(library), str(HERE / "runtime.c")],
        check=True,
    )  # fmt: skip
    sys.path.insert(0, str(HERE))
    from cases import CASES

    names = [name for name in CASES if name != ANYWHERE or gpu == "H100"]
    done = subprocess.run(
        [sys.executable, str(HERE / "cases.py"), str(free_port()), *names], text=True, capture_output=True, timeout=900,
        env={**environ, **RANK_0, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(folder)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


def result(outcome, name):
    assert "error" not in outcome[name], outcome[name]["error"]
    return outcome[name]["result"]


pytestmark = pytest.mark.slow


def test_the_gpu_is_the_stand_ins(outcome, gpu):
    assert tuple(result(outcome, "capability")) == CAPABILITIES[gpu]
    held, there = result(outcome, "memory")
    assert held < 1 << 20
    assert there == 80 << 30


def test_what_it_is_asked_in_passing(outcome, gpu):
    half = "torch.float16" if gpu == "V100" else "torch.bfloat16"
    allocated, reserved, *rest = result(outcome, "questions")
    assert allocated <= reserved < 1 << 30
    assert rest == ["cuda:0", half, "Stand-in"]


def test_packed_examples_have_torchs_kernel_from_ampere_on(outcome, gpu):
    """With this torch's own arguments, for as many keys as queries and for fewer, and for a window."""
    found = result(outcome, "varlen")
    if gpu == "V100":
        assert found is None
        return
    for keys, shapes in zip((32, 8, 8), found, strict=True):
        assert shapes == [
            "cuda bfloat16 [1, 4096, 32, 128]", "cuda bfloat16 [1, 32, 4096, 128]",
            f"cuda bfloat16 [1, {keys}, 4096, 128]",
        ]  # fmt: skip


def test_attention_by_the_gpu(outcome, gpu):
    found = result(outcome, "attention_of_a_model")
    assert found == "dsrun_sdpa" if gpu == "V100" else found in ("dsrun_varlen", "flash_attention_4")
    assert result(outcome, "repeated_heads")[1] == "cuda float16 [1, 8, 4096, 128]"


def test_loss_and_step(outcome, gpu):
    assert result(outcome, "tiled_loss")[1:] == ["cuda float32 [100, 64]", "cuda float32 [512, 64]"]
    step = result(outcome, "a_packed_step")
    assert step is None if gpu == "V100" else step[1:] == ["cuda bfloat16 [512, 256]"] * 2


def test_a_process_connects_and_makes_its_batches(outcome):
    assert result(outcome, "fsdp_connects") == ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", 0]
    assert result(outcome, "a_thread_of_batches") == [3, 2, 0]


def test_fsdps_memory_is_the_plans(outcome, gpu):
    """What torch gathers and reduces at one time, on the first of eight ranks, without activations to speak of."""
    if gpu != "H100":
        pytest.skip("the same on every GPU")
    from cases import LAYERS, RANKS, SIZES

    from dsrun.planner import gpu_memory
    from dsrun.planner.setup import Setup, fsdp_fields
    from dsrun.planner.shape import from_config

    for name, sizes in SIZES.items():
        for tied in (False, True):
            config = {
                "model_type": "llama", "num_hidden_layers": LAYERS, "num_attention_heads": 32,
                "num_key_value_heads": 8, "tie_word_embeddings": tied, **sizes,
            }  # fmt: skip
            setup = Setup(from_config(config, name), gpus=RANKS, seq_len=16, micro_batch=1, precision="bf16")
            setup = replace(setup, **fsdp_fields(setup, replicas=1, offload=False, whole_gradients=False))
            terms = gpu_memory._fsdp(setup)
            planned = terms["gathered"], terms["gathered"] / 2 + terms["gradients"]
            counted = result(outcome, "fsdp_steps")[f"{name}{', tied' * tied}"]
            for plan, count in zip(planned, counted, strict=True):
                assert 0.93 < plan / count < 1.15, (name, tied, plan, count)

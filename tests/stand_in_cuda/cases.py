"""What dsrun does on "cuda", with tensors of no content: run by test_stand_in_cuda.py with the stand-in runtime.

`python cases.py NAME ...` prints a line of JSON for each case: its name and what came of it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

RANKS, LAYERS = 8, 6
SIZES = {
    "a large vocabulary": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
    "large layers": {"vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672},
}
CASES: dict[str, Callable[[], Any]] = {}
CUDA = torch.device("cuda", 0)


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def heads(count: int, tokens: int = 4096, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(1, count, tokens, 128, device=CUDA, dtype=dtype, requires_grad=True)


def placed(*tensors: Any) -> list[str]:
    return [f"{one.device.type} {one.dtype} {list(one.shape)}".replace("torch.", "") for one in tensors]


@case
def capability() -> Any:
    return torch.cuda.get_device_capability()


@case
def varlen() -> Any:
    """torch's own kernel for packed examples, with the arguments that this torch has."""
    from dsrun.training.models import varlen

    if not varlen.has_kernel(torch.bfloat16):
        return None
    results = []
    for keys, window in ((32, None), (8, None), (8, 512)):
        with FakeTensorMode():
            query, key, value = heads(32), heads(keys), heads(keys)
            ends = torch.empty(3, dtype=torch.int32, device=CUDA)
            answer, _ = varlen.attend(
                torch.nn.Module(), query, key, value, None, scaling=128**-0.5, sliding_window=window,
                cu_seq_lens_q=ends, max_length_q=3096, example_lengths=(1000, 3096),
            )  # fmt: skip
            answer.sum().backward()
            results.append(placed(answer, query.grad, key.grad))
    return results


@case
def repeated_heads() -> Any:
    """torch's SDPA with a key for each query, as GPUs before Ampere get it."""
    from dsrun.training.models.kernels import attend_repeated

    with FakeTensorMode():
        query, key, value = heads(32, dtype=torch.float16), *(heads(8, dtype=torch.float16) for _ in range(2))
        answer, _ = attend_repeated(
            SimpleNamespace(is_causal=True), query, key, value, None, scaling=128**-0.5
        )
        answer.sum().backward()
        return placed(answer, key.grad)


@case
def attention_of_a_model() -> Any:
    """Which attention this GPU gets, by torch's own answer on its compute capability."""
    import tempfile

    from dsrun.training.models.kernels import attention_for

    with tempfile.TemporaryDirectory() as folder:
        llama(hidden_size=256, vocab_size=64, intermediate_size=64).config.save_pretrained(folder)
        return attention_for(folder, "fp16" if torch.cuda.get_device_capability() < (8, 0) else "bf16")


@case
def tiled_loss() -> Any:
    from dsrun.training.models.tiling import tiled_cross_entropy

    with FakeTensorMode():
        hidden = torch.empty(100, 64, device=CUDA, requires_grad=True)
        weight = torch.empty(512, 64, device=CUDA, requires_grad=True)
        targets = torch.empty(100, dtype=torch.long, device=CUDA)
        loss = tiled_cross_entropy(hidden, weight, targets, tile=32, bias=None, ignore_index=-100)
        loss.backward()
        return placed(loss, hidden.grad, weight.grad)


@case
def a_packed_step() -> Any:
    """Forward and backward of a packed row, as the loop makes it, and torch's AdamW in one kernel."""
    from dsrun.training.data.batches import on
    from dsrun.training.data.packing import borders
    from dsrun.training.loss import StepTotals, token_mean
    from dsrun.training.models import varlen

    if not varlen.has_kernel(torch.bfloat16):
        return None
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = llama(
            device=CUDA, dtype=torch.bfloat16, attention=varlen.register(),
            hidden_size=256, vocab_size=512, intermediate_size=512,
        )  # fmt: skip
        ids = torch.zeros(1, 300, dtype=torch.long)
        batch = on(CUDA, {"input_ids": ids, "labels": ids, **borders([100, 200], "cpu", unmasked=True)})
        loss = token_mean(model, batch, StepTotals(298, 1))
        loss.backward()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer.step()
        return placed(loss, model.lm_head.weight.grad, optimizer.state[model.lm_head.weight]["exp_avg"])


@case
def memory() -> Any:
    """The questions that dsrun asks of a GPU's memory."""
    from dsrun.training.loop import memory_bytes

    return [memory_bytes(CUDA), torch.cuda.mem_get_info(CUDA)[1]]


@case
def questions() -> Any:
    """What a GPU is asked in passing: by a rank's report, the loader, and `doctor --smoke`."""
    from dsrun.training import smoke_parts
    from dsrun.training.models import load
    from dsrun.training.reports.report import gpu_bytes

    torch.cuda.set_device(CUDA)
    smoke_parts.wait(CUDA)
    job = SimpleNamespace(accelerator="cuda", parallel=SimpleNamespace(alone=True))
    return [
        *gpu_bytes(),
        str(load._device(job)),
        str(smoke_parts._dtype(CUDA)),
        torch.cuda.get_device_name(CUDA),
    ]


@case
def a_thread_of_batches() -> Any:
    """The thread that makes the next step's batches sets its GPU, and pins them."""
    from dsrun.training.data.ahead import made_ahead, pinned

    with_pages = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "rows": 2}
    batch, *_ = made_ahead(lambda step: pinned(with_pages, CUDA), range(2), CUDA)
    return [batch["input_ids"].shape[1], batch["rows"], torch.cuda.current_device()]


@case
def fsdp_connects() -> Any:
    """One rank's process group, of NCCL beside gloo, with its GPU set."""
    from dsrun.training.engines import fsdp

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    fsdp.connect()
    try:
        return [dist.get_backend(), dist.get_backend_config(), torch.cuda.current_device()]
    finally:
        dist.destroy_process_group()


@case
def fsdp_steps() -> Any:
    """Two steps of FSDP2 on the first of eight ranks; the most memory above what is held, forward and backward."""
    return {
        f"{name}{', tied' * tied}": fsdp_peaks(sizes, tied=tied)
        for name, sizes in SIZES.items()
        for tied in (False, True)
    }


def llama(
    *,
    device: Any = "meta",
    dtype: Any = torch.float32,
    attention: str = "sdpa",
    tied: bool = False,
    **sizes: int,
) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=8, use_cache=False,
        head_dim=sizes["hidden_size"] // 32, tie_word_embeddings=tied, **sizes,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()


def fsdp_peaks(sizes: dict[str, int], *, tied: bool = False) -> list[int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dsrun.job.job import FsdpSpec
    from dsrun.training.engines import fsdp

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    spec = FsdpSpec(micro_batch=1, grad_accum=1, grad_clip=1.0, shard_ranks=RANKS)
    training = SimpleNamespace(optimizer="adamw", optimizer_params={"weight_decay": 0.1}, lr=1e-3)
    job = SimpleNamespace(
        precision="bf16", accelerator="cuda", preset="fsdp", fsdp=spec, world_size=RANKS, training=training
    )
    try:
        mesh = fsdp._mesh(job, "cuda")
        with FakeTensorMode(allow_non_fake_inputs=True), Memory() as memory:
            model = llama(tied=tied, **sizes)
            for name, buffer in list(model.named_buffers()):
                path, _, own = name.rpartition(".")
                model.get_submodule(path).register_buffer(
                    own, torch.empty(buffer.shape, device=CUDA), persistent=False
                )
            model.gradient_checkpointing_enable({"use_reentrant": False})
            kept = fsdp._shard(model, job, mesh)
            for names, weight in list(fsdp._tied(model)):
                rows = torch.empty(weight.to_local().shape)
                fsdp._put(model, names, fsdp._put_in(rows, weight, fsdp._device(job), fsdp._keeps_on(job)))
            engine = fsdp.Fsdp(model, job, CUDA, kept)
            ids = torch.zeros(1, 16, dtype=torch.long, device=CUDA)
            for _ in range(2):
                held = memory.restart()
                loss = engine(input_ids=ids, labels=ids).loss
                forward = memory.most - held
                memory.restart()
                engine.backward(loss)
                backward = memory.most - held
                del loss
                engine.step()
    finally:
        dist.destroy_process_group()
    return [forward, backward]


class Memory(TorchDispatchMode):
    """Counts the bytes of tensors on the GPU. Storages change their size: FSDP empties what it has gathered."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Callable[[], Any]] = {}
        self.most = 0

    def restart(self) -> int:
        """Forget the most so far; returns what is held now."""
        self.most = self._now()
        return self.most

    def _now(self) -> int:
        there = (known() for known in self._storages.values())
        return sum(storage.nbytes() for storage in there if storage is not None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in tree_iter((result, args)):
            tensor = getattr(one, "_local_tensor", one)  # of a DTensor this rank's rows
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                storage = tensor.untyped_storage()
                known = self._storages.get(storage._cdata)
                if known is None or known() is None:
                    self._storages[storage._cdata] = weakref.ref(storage)
        self.most = max(self.most, self._now())
        return result


if __name__ == "__main__":
    for wanted in sys.argv[2:] or CASES:
        try:
            outcome = {"result": CASES[wanted]()}
        except Exception:
            outcome = {"error": traceback.format_exc()}
        print(json.dumps({"case": wanted, **outcome}), flush=True)
    os._exit(0)  # the stand-in has nothing to take down

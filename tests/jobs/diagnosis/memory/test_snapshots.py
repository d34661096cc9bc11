"""torch's memory snapshots: who has the GPU's memory, by the calls that allocated it, and which allocation failed."""

from __future__ import annotations

import io
import json
import os
import pickle
import random

import pytest

from dsrun.errors import DsrunError
from dsrun.job import memory_division
from dsrun.job.memory_division import (
    ACTIVATIONS,
    BUCKETS,
    CACHE,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OUTPUTS,
    STATES,
    STEP,
    UNKNOWN,
    WEIGHTS,
    KnownTensor,
)
from dsrun.jobs.diagnosis.diagnosis import diagnose_files
from dsrun.jobs.diagnosis.flight_recorder import data_pickle
from dsrun.jobs.diagnosis.memory import division_text, snapshots

MIB = 1 << 20
SITE = "/opt/conda/lib/python3.11/site-packages"
TRAINER = f"{SITE}/transformers/trainer.py"
MODULE = (f"{SITE}/torch/nn/modules/module.py", 1784, "_call_impl")
LLAMA = f"{SITE}/transformers/models/llama/modeling_llama.py"
TRAIN = [(TRAINER, 4020, "training_step"), (TRAINER, 2509, "train"), ("/home/u/sft.py", 88, "<module>")]
WITHIN = [MODULE, (LLAMA, 459, "forward"), MODULE, (TRAINER, 4110, "compute_loss"), *TRAIN]
LAYER = [MODULE, (LLAMA, 294, "forward"), MODULE, (LLAMA, 395, "forward"), *WITHIN]
STACKS = {
    "a weight that transformers loads": (WEIGHTS, [
        (f"{SITE}/transformers/modeling_utils.py", 812, "_load_state_dict_into_meta_model"),
        (f"{SITE}/transformers/modeling_utils.py", 4399, "from_pretrained"), ("/home/u/sft.py", 40, "<module>")]),
    "a module that is moved": (WEIGHTS, [
        (f"{SITE}/torch/nn/modules/module.py", 1355, "convert"), (f"{SITE}/torch/nn/modules/module.py", 942, "_apply"),
        (f"{SITE}/torch/nn/modules/module.py", 1369, "to"), (TRAINER, 903, "_move_model_to_device")]),
    "Adam's moments": (STATES, [
        (f"{SITE}/torch/optim/adamw.py", 160, "_init_group"), (f"{SITE}/torch/optim/adamw.py", 232, "step"),
        (TRAINER, 2560, "_inner_training_loop")]),
    "a step's temporary": (STEP, [
        (f"{SITE}/torch/optim/adamw.py", 600, "_multi_tensor_adamw"), (f"{SITE}/torch/optim/adamw.py", 232, "step")]),
    "an MLP's inside": (ACTIVATIONS, [
        (f"{SITE}/torch/nn/modules/linear.py", 134, "forward"), MODULE, (LLAMA, 155, "forward"), *LAYER]),
    "a norm": (ACTIVATIONS, [(LLAMA, 74, "forward"), *LAYER]),
    "LoRA": (ACTIVATIONS, [
        (f"{SITE}/torch/nn/modules/linear.py", 134, "forward"), MODULE,
        (f"{SITE}/peft/tuners/lora/layer.py", 727, "forward"), MODULE, (LLAMA, 155, "forward"), *LAYER]),
    "what is computed again": (ACTIVATIONS, [
        (LLAMA, 155, "forward"), *LAYER[:4], (f"{SITE}/torch/utils/checkpoint.py", 310, "backward"),
        (f"{SITE}/torch/autograd/graph.py", 824, "_engine_run_backward")]),
    "logits": (LOGITS, [(f"{SITE}/torch/nn/modules/linear.py", 134, "forward"), *WITHIN]),
    "their fp32 copy": (LOGITS, [(f"{SITE}/transformers/loss/loss_utils.py", 58, "ForCausalLMLoss"), *WITHIN]),
    "log-softmax": (LOGITS, [(f"{SITE}/torch/nn/functional.py", 3462, "cross_entropy"), *WITHIN]),
    "GRPO's": (LOGITS, [
        (f"{SITE}/trl/trainer/utils.py", 1438, "selective_log_softmax"),
        (f"{SITE}/trl/trainer/grpo_trainer.py", 795, "_get_per_token_logps"), *TRAIN]),
    "backward on the main thread": (GRADIENTS, [
        (f"{SITE}/torch/autograd/graph.py", 824, "_engine_run_backward"),
        (f"{SITE}/torch/_tensor.py", 648, "backward"), *TRAIN]),
    "backward with C++ calls": (GRADIENTS, [
        ("??", 0, "c10::cuda::CUDACachingAllocator::Native::malloc"),
        ("??", 0, "torch::autograd::generated::MmBackward0::apply"),
        ("??", 0, "torch::autograd::Engine::thread_main")]),
    "ZeRO-2's bucket": (BUCKETS, [
        (f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py", 1430, "setup_buckets"),
        (f"{SITE}/deepspeed/runtime/engine.py", 2100, "backward")]),
    "DDP's": (BUCKETS, [
        (f"{SITE}/torch/nn/parallel/distributed.py", 1205, "_ddp_init_helper"),
        (f"{SITE}/torch/nn/parallel/distributed.py", 844, "__init__"), ("/home/u/train.py", 12, "<module>")]),
    "ZeRO-2's flat weights": (WEIGHTS, [
        (f"{SITE}/torch/_utils.py", 510, "_flatten_dense_tensors"),
        (f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py", 1010, "flatten_dense_tensors_aligned"),
        (f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py", 400, "__init__")]),
    "their fp32 copies": (STATES, [
        (f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py", 432, "__init__"),
        (f"{SITE}/deepspeed/runtime/engine.py", 1621, "_configure_zero_optimizer")]),
    "ZeRO-3 gathers in a hook": (GATHERED, [
        (f"{SITE}/deepspeed/runtime/zero/partition_parameters.py", 1160, "all_gather_coalesced"),
        (f"{SITE}/deepspeed/runtime/zero/partitioned_param_coordinator.py", 390, "__all_gather_params"),
        (f"{SITE}/deepspeed/runtime/zero/parameter_offload.py", 470, "pre_sub_module_forward_function"), *LAYER]),
    "FSDP2 gathers": (GATHERED, [
        (f"{SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 229, "foreach_all_gather"), *LAYER]),
    "a cache of keys and values": (CACHE, [
        (f"{SITE}/transformers/cache_utils.py", 118, "update"), (LLAMA, 250, "forward"), *LAYER]),
    "vLLM's": (CACHE, [
        (f"{SITE}/vllm/v1/worker/gpu_model_runner.py", 4400, "_allocate_kv_cache_tensors"),
        (f"{SITE}/vllm/v1/worker/gpu_worker.py", 300, "initialize_from_config")]),
    "what an evaluation keeps": (OUTPUTS, [
        (f"{SITE}/transformers/trainer_pt_utils.py", 110, "nested_concat"),
        (TRAINER, 4500, "evaluation_loop"), *TRAIN]),
    "nothing known": (UNKNOWN, [("/home/u/own.py", 3, "<module>")]),
}  # fmt: skip
"""What is allocated -> its owner, and the calls as torch's snapshots have them."""


def frames(stack):
    return [{"filename": file, "line": line, "name": name} for file, line, name in stack]


@pytest.mark.parametrize("name", STACKS)
def test_an_owner_by_its_calls(name):
    owner, stack = STACKS[name]
    assert memory_division.owner_of(memory_division.calls_of(frames(stack))) == owner


def snapshot(sizes, *, failed=2048, holes=(300, 200), later=3, device=0, events=50):
    """A snapshot in torch's form, whose stacks share their calls. sizes: MiB of each of STACKS."""
    blocks, history, address, shared = [], [], 0x7F0000000000, frames(TRAIN)
    for name, size in sizes.items():
        calls = frames(STACKS[name][1]) if name else []
        blocks.append(block(address, size * MIB, "active_allocated", calls))
        event = {
            "action": "alloc",
            "addr": address,
            "size": size * MIB,
            "stream": 0,
            "frames": calls,
            "time_us": 5,
        }
        freed = event | {"action": "free_completed"}
        history += [event, *(freed | {"frames": list(shared)} for _ in range(events))]
        address += size * MIB
    for size in holes:
        blocks.append(block(address, size * MIB, "inactive", []))
        address += size * MIB
    if failed:
        calls = frames(STACKS["logits"][1])
        oom = {"action": "oom", "size": failed * MIB, "stream": 0, "device_free": 100 * MIB, "time_us": 9}
        history.append(oom | {"frames": frames(STACKS["logits"][1])})
        freed = {"action": "free_requested", "addr": 1, "size": 7, "stream": 0, "frames": [], "time_us": 10}
        history += [dict(freed) for _ in range(later)]
    whole = sum(one["size"] for one in blocks)
    segment = {
        "device": device, "address": 0x7F0000000000, "total_size": whole, "allocated_size": 0, "active_size": 0,
        "requested_size": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": True,
        "frames": [], "blocks": blocks,
    }  # fmt: skip
    traces = [[] for _ in range(device)] + [history]
    return {"segments": [segment], "device_traces": traces, "allocator_settings": {"expandable_segments": True},
            "external_annotations": []}  # fmt: skip


def block(address, size, state, calls):
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": calls}


SIZES = {
    "a weight that transformers loads": 2000,
    "Adam's moments": 4000,
    "logits": 9000,
    "a norm": 500,
    "": 700,
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_filled_a_card(tmp_path, protocol):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot(SIZES, device=1), protocol))
    found = diagnose_files([str(path)], {})
    memory = found.memory
    assert (found.cause, found.confidence, found.retry, memory.device) == ("gpu_oom", "high", False, 1)
    assert {one.owner: round(one.gib * 1024) for one in memory.owners} == {
        LOGITS: 9000, STATES: 4000, WEIGHTS: 2000, GRADIENTS: 700, ACTIVATIONS: 500,
    }  # fmt: skip
    assert memory.owners[0].parts[0].name == "modeling_llama.py:459 forward"
    assert (round(memory.holes_gib * 1024), round(memory.largest_hole_gib * 1024)) == (500, 300)
    assert (memory.requested_gib, memory.later) == (2.0, 3)
    assert "2.00 GiB on GPU 1 failed" in found.summary and "3 allocations and frees" in found.summary
    assert "Most of what was in use are logits: 8.79 GiB, 56%." in found.summary
    assert "Less for logits" in found.next_step


def test_in_chinese_and_as_json(tmp_path, dsrun, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot(SIZES)))
    assert "占用最多的是logits" in diagnose_files([str(path)], {"LANG": "zh_CN.UTF-8"}).summary
    assert json.loads(dsrun("diagnose", path, "--json").out)["memory"]["owners"][0]["owner"] == LOGITS
    done = dsrun("diagnose", path)
    assert done.code == 0
    assert "memory      logits 8.79 GiB (modeling_llama.py:459 forward 8.79 GiB)" in done.out


def test_a_snapshot_without_a_failure_names_no_cause(tmp_path, dsrun):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot(SIZES, failed=0)))
    found = diagnose_files([str(path)], {})
    assert (found.cause, found.confidence) == (None, "none")
    assert "No allocation failed" in found.summary and "logits: 8.79 GiB" in found.summary
    assert dsrun("diagnose", path).code == 3


def test_a_snapshot_without_stacks_says_how_to_get_them(tmp_path):
    path = tmp_path / "snapshot.pickle"
    taken = snapshot(SIZES, failed=0)
    for one in taken["segments"][0]["blocks"]:
        one["frames"] = []
    path.write_bytes(pickle.dumps(taken))
    found = diagnose_files([str(path)], {})
    assert {one.owner for one in found.memory.owners} == {UNKNOWN}
    assert "_record_memory_history" in found.next_step


@pytest.mark.parametrize(
    ("holes", "failed", "later", "owner"),
    [
        ((600, 600, 600), 700, 0, division_text.HOLES),
        ((600, 800, 600), 700, 0, LOGITS),
        ((600, 600), 700, 1, LOGITS),
    ],
)
def test_holes_are_to_blame_where_they_would_have_held_it(tmp_path, holes, failed, later, owner):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot(SIZES, holes=holes, failed=failed, later=later)))
    found = diagnose_files([str(path)], {})
    assert division_text.suspect(found.memory) == owner
    assert ("expandable_segments" in found.next_step) == (owner == division_text.HOLES)


def test_logs_beside_a_snapshot(tmp_path):
    """A log's own cause stands; memory that ran out gets its owners."""
    path, log = tmp_path / "snapshot.pickle", tmp_path / "train.log"
    path.write_bytes(pickle.dumps(snapshot(SIZES)))
    words = "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 100.00 MiB is free."
    log.write_text(f"torch.OutOfMemoryError: CUDA out of memory. {words}\n")
    found = diagnose_files([str(path), str(log)], {})
    assert found.signature and found.memory.owners[0].owner == LOGITS
    log.write_text("OSError: [Errno 28] No space left on device\n")
    assert diagnose_files([str(path), str(log)], {}).cause == "disk_full"


def test_tensors_that_are_known_come_before_calls():
    taken = snapshot({"a weight that transformers loads": 10, "a norm": 10}, failed=0, holes=())
    start = taken["segments"][0]["address"]
    known = [
        KnownTensor(STATES, "flat", start, 10 * MIB),  # a flat buffer, and two views of it
        KnownTensor(WEIGHTS, "layers.0", start, 4 * MIB),
        KnownTensor(WEIGHTS, "layers.1", start + 4 * MIB, 5 * MIB),
        KnownTensor(ACTIVATIONS, "layers.7", start + 10 * MIB, 10 * MIB),
    ]
    division = memory_division.divide(taken, 0, known)
    parts = {(one.owner, part.name): round(part.gib * 1024) for one in division.owners for part in one.parts}
    assert parts == {
        (WEIGHTS, "layers.0"): 4, (WEIGHTS, "layers.1"): 5, (STATES, "flat"): 1, (ACTIVATIONS, "layers.7"): 10,
    }  # fmt: skip


class Trap:
    def __reduce__(self):
        return os.system, ("touch trapped",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_code_in_a_snapshot_is_refused(tmp_path, monkeypatch, protocol, dsrun):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": Trap()}, protocol))
    with pytest.raises(DsrunError, match="run code"):
        snapshots.read(path)
    assert not (tmp_path / "trapped").exists()
    assert dsrun("diagnose", path).code == 2


def test_damaged_snapshots_are_told(tmp_path):
    """Whatever is cut off or changed: what is left is read, or an error says so; nothing else is raised."""
    data = pickle.dumps(snapshot({"logits": 5, "a norm": 3}, events=1))
    path, draw, told = tmp_path / "snapshot.pickle", random.Random(7), 0
    for number in range(1500):
        changed = bytearray(data[: draw.randrange(70, len(data))] if number % 3 == 0 else data)
        for _ in range(number % 3):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        path.write_bytes(bytes(changed))
        try:
            snapshots.read(path)
        except DsrunError as error:
            told += 1
            assert str(path) in str(error)
    assert told > 500


def test_a_history_leaves_nothing_behind(tmp_path, monkeypatch):
    """A long history passes within a limit that a tenth of it would break, and the blocks keep their calls."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot(SIZES, events=20_000)))
    monkeypatch.setattr(data_pickle, "MOST_HELD", 2_200_000)
    division = snapshots.read(path).division
    assert division.owners[0].owner == LOGITS
    with pytest.raises(DsrunError, match="more values"):
        data_pickle.read(path.read_bytes())


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02" + b"]" * 5_000_000 + b".",
        b"\x80\x02" + b"(" * 5_000_000 + b".",
        b"\x80\x02]"
        + b"".join(b"r" + number.to_bytes(4, "little") for number in range(0, 1 << 31, 2000))
        + b".",
    ],
    ids=["lists", "marks", "places"],
)
def test_a_short_file_may_not_ask_for_any_number_of_values(data, monkeypatch):
    monkeypatch.setattr(data_pickle, "MOST_HELD", 1_000_000)
    with pytest.raises(DsrunError, match="more values"):
        data_pickle.read(data)


def test_data_are_read_as_pickle_reads_them():
    """Everything that a snapshot may hold, in every protocol, by C's pickler and Python's."""
    shared = frames(TRAIN)
    value = {
        "a": [shared, shared, shared[0]], "b": ((0, 0), (1, 2, 3), (1, 2, 3, 4), ()), "c": [1, 255, 256, 65536, -1],
        "d": [2**31, -(2**40), 2**900, 1.5, float("inf")], "e": "x" * 70_000 + "中", "f": {True: None, False: "é"},
    }  # fmt: skip
    for protocol in range(6):
        assert data_pickle.read(pickle.dumps(value, protocol)) == value
        file = io.BytesIO()
        pickle._Pickler(file, protocol).dump(value)
        assert data_pickle.read(file.getvalue()) == value

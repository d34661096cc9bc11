"""Lines of memory that ran out, in the words of torch's releases, of numpy and of the kernel."""

from __future__ import annotations

import pytest

from dsrun.jobs.diagnosis.memory import memory_text

TAIL = " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
GPU = {
    "torch 1.13 and 2.0": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 3; 23.69 GiB total "
        "capacity; 21.00 GiB already allocated; 102.40 MiB free; 22.50 GiB reserved in total by PyTorch) If reserved "
        "memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
        {"asked": 0.5, "total": 23.69, "free": 0.1, "allocated": 21.0, "reserved": 22.5, "unallocated": 1.5},
    ),
    "with a limit of the process": (
        "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 80.00 GiB total capacity; 30.00 GiB already "
        "allocated; 40.00 GiB free; 32.00 GiB allowed; 31.00 GiB reserved in total by PyTorch)",
        {"asked": 1.0, "total": 80.0, "free": 40.0, "allocated": 30.0, "limit": 32.0, "unallocated": 1.0},
    ),
    "torch 2.1, which misspelt it": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacty of "
        "79.15 GiB of which 1.00 GiB is free. Process 4242 has 78.15 GiB memory in use. Of the allocated memory 70.00 "
        "GiB is allocated by PyTorch, and 2.00 GiB is reserved by PyTorch but unallocated." + TAIL,
        {"asked": 2.0, "total": 79.15, "free": 1.0, "allocated": 70.0, "unallocated": 2.0},
    ),
    "torch 2.5 to 2.13": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 24.00 "
        "GiB of which 0 bytes is free. Process 4242 has 20.00 GiB memory in use. Including non-PyTorch memory, this "
        "process has 4.00 GiB memory in use. 12.00 GiB allowed; Of the allocated memory 3.00 GiB is allocated by "
        "PyTorch, with 12.00 MiB allocated in private pools (e.g., CUDA Graphs), and 512.00 MiB is reserved by "
        "PyTorch but unallocated." + TAIL,
        {
            "total": 24.0,
            "free": 0.0,
            "in_use": 4.0,
            "limit": 12.0,
            "allocated": 3.0,
            "unallocated": 0.5,
            "others": 20.0,
        },
    ),
    "torch 2.0, beside other processes": (
        "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 40.00 GiB total capacity; 2.00 GiB already allocated; "
        "0.50 GiB free; 3.50 GiB reserved in total by PyTorch)",
        {"others": 35.0},
    ),
    "of an XPU": (
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 64.00 "
        "GiB. Of the allocated memory 60.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but "
        "unallocated.",
        {"asked": 2.0, "total": 64.0, "allocated": 60.0, "unallocated": 1.0},
    ),
    "of an NPU": (
        "RuntimeError: NPU out of memory. Tried to allocate 128.00 MiB (NPU 0; 60.97 GiB total capacity; 57.39 GiB "
        "already allocated; 57.39 GiB current active; 122.49 MiB free; 58.00 GiB reserved in total by PyTorch)",
        {"asked": 0.125, "total": 60.97, "allocated": 57.39, "reserved": 58.0},
    ),
}
HOST = {
    "torch": (
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 32212254720 bytes.",
        {"asked": 30.0},
    ),
    "numpy": ("Unable to allocate 29.8 GiB for an array with shape (4000000000,)", {"asked": 29.8}),
    "the kernel": (
        "Out of memory: Killed process 4711 (python3) total-vm:125829120kB, anon-rss:104857600kB, file-rss:0kB",
        {"reserved": 120.0, "in_use": 100.0},
    ),
    "a container's limit": (
        "Memory cgroup out of memory: Killed process 12 (python) total-vm:2097152kB, anon-rss:1048576kB",
        {"reserved": 2.0, "in_use": 1.0},
    ),
}


@pytest.mark.parametrize("name", GPU)
def test_of_a_gpu(name):
    line, wanted = GPU[name]
    found = memory_text.numbers(line)
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, abs=0.001)
    assert "GiB" in memory_text.in_words(found) and "GiB" in memory_text.in_words(found, chinese=True)


@pytest.mark.parametrize("name", HOST)
def test_of_a_host(name):
    line, wanted = HOST[name]
    found = memory_text.host_numbers(line)
    assert found == pytest.approx(wanted)
    assert "GiB" in memory_text.host_in_words(found) and "GiB" in memory_text.host_in_words(
        found, chinese=True
    )


@pytest.mark.parametrize(
    "line", ["CUDA error: out of memory", "CUDA out of memory. Tried to allocate more than 1EB memory.", ""]
)
def test_no_numbers(line):
    assert memory_text.numbers(line) is None and memory_text.host_numbers(line) is None

"""DeepSpeed's compiled operators: where they are, which a job needs, and what dead builds leave."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

import pytest
from running import waiting_processes

from dsrun import catalog, packages
from dsrun.cluster import extensions
from dsrun.config.presets.build import Options, build_config
from dsrun.config.presets.preset import load
from dsrun.errors import DsrunError
from dsrun.host import operators as host_operators
from dsrun.host import toolkit as host_toolkit
from dsrun.host.gpus import gpu_models
from dsrun.host.operators import stale_locks


def test_the_users_own_folder_wins(tmp_path):
    assert extensions.folder({"TORCH_EXTENSIONS_DIR": str(tmp_path)}, tmp_path / "cache") == tmp_path
    assert extensions.folder({"TORCH_EXTENSIONS_DIR": ""}, tmp_path).is_relative_to(tmp_path)


def test_each_environment_has_a_folder_of_its_own(tmp_path, monkeypatch):
    folders = {extensions.folder({}, tmp_path), extensions.folder({}, tmp_path)}
    assert len(folders) == 1
    monkeypatch.setattr(sys, "prefix", "/another/venv")
    folders.add(extensions.folder({}, tmp_path))
    monkeypatch.setattr(host_operators, "_cpu_flags", lambda: "flags : another processor")
    folders.add(extensions.folder({}, tmp_path))
    assert len(folders) == 3
    assert all(folder.is_relative_to(tmp_path) for folder in folders)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("ddp", {"fused_adam"}),
        ("zero1", {"fused_adam"}),
        ("zero2", {"fused_adam"}),
        ("zero2-offload", {"cpu_adam"}),
        ("zero3", {"fused_adam"}),
        ("zero3-offload", {"cpu_adam"}),
        ("zero3-nvme", {"cpu_adam", "async_io"}),
    ],
)
def test_needed_by_a_preset(preset, expected):
    config = build_config(preset, Options(gpus=2, precision="bf16", nvme_path="/local_nvme")).ds_config
    assert set(extensions.needed(config)) == expected


def test_what_any_preset_needs_can_be_built():
    for preset in catalog.files("presets"):
        if load(preset).fsdp:
            continue  # DeepSpeed has no part in it
        config = build_config(preset, Options(gpus=2, precision="bf16", nvme_path="/local_nvme")).ds_config
        assert set(extensions.needed(config)) <= set(extensions.BUILDERS)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, []),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, []),
        ({"optimizer": {"type": "Lion"}}, []),
        ({"optimizer": {"type": "Adam"}, "zero_optimization": {"offload_optimizer": None}}, ["fused_adam"]),
        (
            {"optimizer": {"type": "adam"}, "zero_optimization": {"offload_optimizer": {"device": "none"}}},
            ["fused_adam"],
        ),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, ["async_io"]),
    ],
)
def test_needed_by_a_config(config, expected):
    assert extensions.needed(config) == expected


def test_what_is_built_is_not_missing(tmp_path):
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    (tmp_path / "async_io").mkdir()  # a build that didn't end
    assert extensions.missing(["cpu_adam", "async_io", "fused_adam"], tmp_path) == ["async_io", "fused_adam"]


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DsrunError, match=r"cpu_adam.*C\+\+ compiler") as caught:
        extensions.check_tools(["cpu_adam"], "cpu")
    assert "g++" in caught.value.problems[0].hint


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A PATH with a C++ compiler and nothing else."""
    path = tmp_path / "bin" / "c++"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(path.parent))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return path.parent


def test_a_compiler_is_enough_on_a_cpu(compiler):
    extensions.check_tools(["cpu_adam", "fused_adam"], "cpu")


def test_no_nvcc(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(host_toolkit, "CUDA", str(tmp_path / "nothing"))
    with pytest.raises(DsrunError, match="nvcc") as caught:
        extensions.check_tools(["fused_adam"], "cuda")
    assert "CUDA_HOME" in caught.value.problems[0].hint
    toolkit(tmp_path / "cuda", monkeypatch)
    extensions.check_tools(["fused_adam"], "cuda")


def toolkit(home, monkeypatch, release="12.6", torch="12.6", lacks=()):
    """A CUDA toolkit in that folder, beside a torch for some CUDA."""
    parts = [f"include/{name}" for name in host_toolkit.HEADERS] + ["lib64/libcudart.so"]
    for part in (part for part in ["bin/nvcc", *parts] if part not in lacks):
        (home / part).parent.mkdir(parents=True, exist_ok=True)
        (home / part).write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V1'\n")
        (home / part).chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(extensions, "torch_build", lambda path: {"cuda": torch, "cpu_build": False})
    return home


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        ({}, ""),
        ({"release": "12.1"}, ""),  # DeepSpeed takes other minor versions of CUDA 12
        ({"release": "11.8"}, "nvcc 11.8 for a torch of CUDA 12.6"),
        ({"release": "13.2", "torch": "13.0"}, "nvcc 13.2"),
        ({"lacks": ("include/cusparse.h",)}, "cusparse.h"),
        ({"lacks": ("lib64/libcudart.so",)}, "libcudart.so"),
    ],
)
def test_an_nvcc_that_cannot_compile(compiler, monkeypatch, tmp_path, made, fault):
    monkeypatch.setattr(host_toolkit, "SYSTEM_LIBRARIES", ())
    monkeypatch.setenv("PATH", f"{compiler}:/bin:/usr/bin")
    toolkit(tmp_path / "cuda", monkeypatch, **made)
    found = extensions.nvcc_fault(os.environ)
    assert fault in found and bool(fault) == bool(found)


def test_the_cuda_check_can_be_skipped_as_in_deepspeed(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{compiler}:/bin:/usr/bin")
    toolkit(tmp_path / "cuda", monkeypatch, release="13.2", torch="13.0")
    assert "13.2" in extensions.nvcc_fault({**os.environ, "DS_SKIP_CUDA_CHECK": "0"})
    assert extensions.nvcc_fault({**os.environ, "DS_SKIP_CUDA_CHECK": "1"}) == ""


def test_hosts_with_other_gpus_have_other_folders(tmp_path, monkeypatch):
    file = tmp_path / "nvidia" / "gpus" / "0000:3b:00.0" / "information"
    file.parent.mkdir(parents=True)
    file.write_text("Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ: 7\n")
    assert gpu_models(tmp_path / "nvidia") == ["NVIDIA A100-SXM4-80GB"]
    assert gpu_models(tmp_path / "none") == []
    folders = set()
    for models in ([], ["NVIDIA A100-SXM4-80GB"], ["Tesla V100-SXM2-32GB"]):
        monkeypatch.setattr(host_operators, "gpu_models", lambda models=models: models)
        folders.add(extensions.folder({}, tmp_path))
    assert len(folders) == 3


@pytest.mark.parametrize(
    ("deepspeed", "names", "for_nvcc"),
    [
        ("0.19.8", ["cpu_adam"], []),
        ("none", ["cpu_adam"], []),
        ("0.20.0+abc", ["cpu_adam"], []),
        ("0.19.8", ["cpu_adam", "async_io"], ["async_io"]),
        ("0.19.7", ["cpu_adam"], ["cpu_adam"]),
        ("0.19.8", ["fused_adam"], ["fused_adam"]),
    ],
)
def test_which_operators_take_nvcc(compiler, monkeypatch, tmp_path, deepspeed, names, for_nvcc):
    monkeypatch.setattr(packages, "installed_version", lambda package: deepspeed)
    monkeypatch.setattr(host_toolkit, "CUDA", str(tmp_path / "nothing"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "libaio.h").touch()
    assert extensions.with_cuda(names, "cuda") == for_nvcc
    assert extensions.with_cuda(names, "cpu") == []
    problem = pytest.raises(DsrunError, match=f"compile {for_nvcc[0]} .*nvcc") if for_nvcc else nullcontext()
    with problem:
        extensions.check_tools(names, "cuda")


def test_the_installed_deepspeed_builds_them_so():
    pytest.importorskip("deepspeed")
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    names = ["cpu_adam", "fused_adam", "async_io"]
    builders = {name: CUDA_Accelerator().get_op_builder(extensions.BUILDERS[name]) for name in names}
    assert extensions.with_cuda(names, "cuda") == [
        name for name in names if issubclass(builders[name], CUDAOpBuilder)
    ]


def test_no_libaio(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(host_toolkit, "_roots", lambda prefix: (str(tmp_path),))
    with pytest.raises(DsrunError, match="libaio") as caught:
        extensions.check_tools(["async_io"], "cpu")
    assert "libaio-dev" in caught.value.problems[0].hint


@pytest.fixture
def operators(tmp_path):
    """A folder of operators, two of them locked; its name is a hostile one."""
    folder = tmp_path / "it's an 扩展 folder"
    for name in ("cpu_adam", "fused_adam", "async_io"):
        (folder / name).mkdir(parents=True)
    for name in ("cpu_adam", "fused_adam"):
        (folder / name / "lock").touch()
    return folder


@pytest.fixture
def sitting():
    """`sitting(folder, *arguments)`: a real process whose working folder is that one."""
    code = "import sys; print('here', flush=True); sys.stdin.read()"
    with waiting_processes() as start:
        yield lambda folder, *arguments: start(code, *arguments, says="here", cwd=folder)


def names(locks) -> list[str]:
    return [lock.parent.name for lock in locks]


def test_locks_that_nobody_builds_behind_are_stale(operators):
    assert stale_locks(operators) == [
        operators / "cpu_adam" / "lock",
        operators / "fused_adam" / "lock",
    ]


def test_a_lock_with_a_build_in_its_folder_is_not(operators, sitting, tmp_path):
    build = sitting(operators / "cpu_adam")
    assert names(stale_locks(operators)) == ["fused_adam"]
    build.kill()
    build.wait()
    assert names(stale_locks(operators)) == ["cpu_adam", "fused_adam"]


def test_a_lock_with_a_build_that_names_its_folder_is_not(operators, sitting, tmp_path):
    sitting(tmp_path, "-o", str(operators / "fused_adam" / "fused_adam.so"))
    assert names(stale_locks(operators)) == ["cpu_adam"]


def test_a_build_in_a_folder_that_a_link_leads_to(operators, sitting, tmp_path):
    # As where ~/.cache is a link to a scratch disk: the kernel shows the folder behind it.
    link = tmp_path / "cache"
    link.symlink_to(operators)
    sitting(operators / "cpu_adam")
    assert names(stale_locks(link)) == ["fused_adam"]


def test_a_process_in_a_folder_of_a_similar_name_is_no_build(operators, sitting):
    (operators / "cpu_adam_old").mkdir()
    sitting(operators / "cpu_adam_old")
    assert names(stale_locks(operators)) == ["cpu_adam", "fused_adam"]


def test_no_locks(tmp_path):
    assert stale_locks(tmp_path) == []
    assert stale_locks(tmp_path / "none") == []


def test_looking_at_locks_leaves_them(operators):
    stale_locks(operators)
    assert [path.name for path in (operators / "cpu_adam").iterdir()] == ["lock"]

"""What the probe reads of faults, limits, toolkits and builds, from programs that stand for the machine's own."""

from __future__ import annotations

import os

import pytest

from dsrun.cluster import probe
from dsrun.host.memory import oom_kills
from dsrun.host.toolkit import HEADERS, cuda_toolkit

GPU = """<gpu id="00000000:{bus}:00.0"><product_name>NVIDIA H100</product_name>
<fabric><state>{fabric}</state><status>Success</status></fabric>
<pci><pci_gpu_link_info><link_widths><max_link_width>16x</max_link_width>
<current_link_width>{width}</current_link_width></link_widths></pci_gpu_link_info></pci>
<ecc_errors><volatile><sram_correctable>9</sram_correctable><sram_uncorrectable_parity>{parity}</sram_uncorrectable_parity>
<sram_uncorrectable_secded>0</sram_uncorrectable_secded><dram_correctable>5</dram_correctable>
<dram_uncorrectable>{dram}</dram_uncorrectable></volatile>
<aggregate><sram_uncorrectable_parity>4</sram_uncorrectable_parity><dram_uncorrectable>2</dram_uncorrectable>
<sram_threshold_exceeded>No</sram_threshold_exceeded></aggregate></ecc_errors>
<retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
<remapped_rows><remapped_row_pending>{pending}</remapped_row_pending>
<remapped_row_failure>No</remapped_row_failure></remapped_rows>
<clocks_event_reasons><clocks_event_reason_hw_thermal_slowdown>{hot}</clocks_event_reason_hw_thermal_slowdown>
<clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap></clocks_event_reasons></gpu>"""
FINE = {
    "bus": "19", "fabric": "Completed", "width": "16x", "parity": 0, "dram": 0, "pending": "No", "hot": "Not Active",
}  # fmt: skip
OLD = """<gpu id="0"><product_name>Tesla V100</product_name><ecc_errors><volatile>
<double_bit><total>N/A</total></double_bit></volatile></ecc_errors><retired_pages>
<pending_retirement>Yes</pending_retirement></retired_pages><clocks_throttle_reasons>
<clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown></clocks_throttle_reasons></gpu>"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """`program(name, output, code)`: such a program is found first."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(name, output, code=0):
        (folder / f"{name}.txt").write_text(output)
        (folder / name).write_text(f"#!/bin/sh\ncat '{folder / name}.txt'\nexit {code}\n")
        (folder / name).chmod(0o755)

    return put


def smi(program, *gpus):
    program("nvidia-smi", f"<?xml version='1.0' ?><nvidia_smi_log>{''.join(gpus)}</nvidia_smi_log>")
    return probe.Probe({}).fact_gpu_health()["gpus"]


def test_gpus_with_faults(program):
    hurt = {
        **FINE,
        "parity": 1,
        "dram": 2,
        "pending": "Yes",
        "hot": "Active",
        "width": "8x",
        "fabric": "In Progress",
    }
    fine, found = smi(program, GPU.format(**FINE), GPU.format(**hurt))
    assert fine == {
        "index": 0, "name": "NVIDIA H100", "uncorrected": 0, "uncorrected_ever": 6, "failed": [], "pending": [],
        "slowed": [], "width": ["16x", "16x"], "fabric": "Completed",
    }  # fmt: skip
    assert (found["index"], found["uncorrected"], found["pending"]) == (1, 3, ["remapped_row_pending"])
    assert (found["slowed"], found["width"], found["fabric"]) == (
        ["hw_thermal_slowdown"],
        ["8x", "16x"],
        "In Progress",
    )


def test_an_older_drivers_words(program):
    (found,) = smi(program, OLD)
    assert found["uncorrected"] is None and found["width"] is None and found["fabric"] is None
    assert (found["pending"], found["slowed"]) == (["pending_retirement"], ["hw_slowdown"])


def test_a_driver_that_answers_no_xml_is_an_error_of_this_fact_alone(program):
    program("nvidia-smi", "NVIDIA-SMI has failed", 9)
    assert "NVIDIA-SMI has failed" in probe.facts({})["gpu_health"]["error"]


def test_the_kernels_log(program):
    line = "[{at}] NVRM: Xid (PCI:0000:3b:00): {xid}, pid='<unknown>', name=<unknown>\n"
    program(
        "dmesg", f"[    1.0] usb\n{line.format(at='    2.500000', xid=79)}{line.format(at='    3.0', xid=79)}"
    )
    (found,) = probe.Probe({}).fact_kernel_log()["xids"]
    assert (found["bus"], found["xid"]) == ("0000:3b:00", 79) and found["hours_ago"] >= 0
    program("dmesg", "dmesg: read kernel buffer failed: Operation not permitted", 1)
    assert "not permitted" in probe.Probe({}).fact_kernel_log()["unreadable"]


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (
            "Disk quotas for user lab (uid 7):\n     Filesystem   blocks   quota   limit   grace   files   quota\n"
            "     srv:/home   1030*   1000    1200    77   33      0       0       0\n",
            {"kib": 1030, "limit_kib": 1200, "files": 33, "limit_files": 0},
        ),
        ("Disk quotas for user lab (uid 7): none\n", {}),
        ("", {}),
    ],
)
def test_quotas(program, tmp_path, output, found):
    program("quota", output, 1)
    fact = probe.Probe({"cwd": str(tmp_path / "not" / "yet")}).fact_quota()
    assert fact.pop("tool") == "quota" and fact.pop("file_system")
    assert fact == found


def test_a_slurm_jobs_limits():
    environ = {"SLURM_JOB_ID": "12", "SLURM_JOB_END_TIME": "1700000000", "SLURM_MEM_PER_NODE": "65536"}
    found = probe.Probe({"environ": environ}).fact_limits()
    assert found["slurm"] == {"job": "12", "end": 1700000000, "node_mib": 65536, "cpu_mib": None}


def toolkit(home, *files, environ=None):
    for name in files:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(
            "#if __GNUC__ > 13\n#error -- unsupported GNU version!\n" if "config" in name else ""
        )
    return cuda_toolkit(f"{home}/bin/nvcc", environ or {})


def test_a_whole_toolkit_and_a_part_of_one(tmp_path):
    headers = [f"include/{name}" for name in HEADERS]
    libraries = ["targets/x86_64-linux/lib/libcurand.so", "lib64/libcudart.so"]
    found = toolkit(tmp_path / "whole", *headers, *libraries, "include/crt/host_config.h")
    assert found == {"home": str(tmp_path / "whole"), "no_headers": [], "no_libraries": [], "gcc": 13}
    part = toolkit(tmp_path / "pip", "include/cuda_runtime.h", "lib/libcudart.so.13")
    assert "cusparse.h" in part["no_headers"] and "cudart" in part["no_libraries"] and part["gcc"] is None


def test_headers_and_libraries_of_other_folders_count(tmp_path):
    for name in (*HEADERS, "libcudart.so", "libcurand.so"):
        (tmp_path / name).write_text("")
    environ = {"CPATH": str(tmp_path), "LIBRARY_PATH": str(tmp_path), "CUDA_HOME": str(tmp_path / "cuda")}
    found = cuda_toolkit("/elsewhere/bin/nvcc", environ)
    assert (found["home"], found["no_headers"], found["no_libraries"]) == (str(tmp_path / "cuda"), [], [])


def test_what_operators_were_compiled_for(tmp_path):
    flags = "-isystem {torch}/include -isystem {torch}/include/torch -gencode=arch=compute_90,code=sm_90 "
    more = "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=compute_90"
    site = tmp_path / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text("cuda = '12.6'\n")
    for name, torch in (("fused_adam", site / "torch"), ("cpu_adam", "/another/torch")):
        (tmp_path / "ops" / name).mkdir(parents=True)
        (tmp_path / "ops" / name / "build.ninja").write_text(f"cflags = {flags.format(torch=torch)}{more}\n")
    look = probe.Probe({"environ": {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}})
    vars(look)["python"] = {"path": [str(site)], "prefix": "/x", "version": "3.11"}
    assert look.fact_operators()["builds"] == [
        {"name": "cpu_adam", "own_torch": False, "gpus": ["8.0", "9.0"]},
        {"name": "fused_adam", "own_torch": True, "gpus": ["8.0", "9.0"]},
    ]


def test_oom_kills_of_a_cgroup(tmp_path, monkeypatch):
    (tmp_path / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3


def test_what_torch_has_code_for(program, tmp_path, monkeypatch):
    program("nvidia-smi", "")
    program("python", "sm_80 sm_90 compute_90\n")
    monkeypatch.setattr(probe.Probe, "fact_torch", lambda look: {"cuda": "12.6", "cpu_build": False})
    python = str(tmp_path / "programs" / "python")
    found = probe.Probe({"python": python, "import_torch": True}).fact_architectures()
    assert found == {"asked": True, "flags": ["sm_80", "sm_90", "compute_90"]}
    assert probe.Probe({"python": python}).fact_architectures() == {"asked": False}

"""How much of the host's memory a rank takes as free, in a container and in a scheduler's step, too."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from dsrun.cluster import devices, probe
from dsrun.host import memory
from dsrun.training.engines import on_ranks

GIB = 2**30


@pytest.fixture
def step(tmp_path, monkeypatch):
    """A step of 5 GiB, 2 in use, inside a job of 12, on a machine of 64: as a Slurm step's cgroups are."""
    job = tmp_path / "slurm" / "job_7"
    for folder, limit, used in ((job, 12, 4), (job / "step_0", 5, 2)):
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit * GIB}\n")
        (folder / "memory.current").write_text(f"{used * GIB}\n")
    own = tmp_path / "own"
    own.write_text("0::/slurm/job_7/step_0\n")
    monkeypatch.setattr(memory, "_machine_ram", lambda: (64 * GIB, 40 * GIB))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(on_ranks.dist, "all_reduce", lambda *_, **__: None)
    look = partial(memory.host_ram, tmp_path, own)
    for module in (on_ranks, probe, memory):
        monkeypatch.setattr(module, "host_ram", look)
    return 3 * GIB


def test_ranks_the_probe_and_the_planner_see_the_same(step):
    assert probe.Probe({}).fact_ram()["available"] == step
    assert devices.detect({"DS_ACCELERATOR": "cpu"}).host_memory_bytes == step
    most = step * on_ranks.GATHERED_SHARE
    device = torch.device("cpu")
    assert on_ranks.room_for(most, device) and not on_ranks.room_for(most + GIB / 8, device)

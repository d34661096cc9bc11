"""This host's memory within the limits of its cgroups: made-up folders in place of /sys/fs/cgroup."""

from __future__ import annotations

import pytest

from dsrun.host import memory
from dsrun.host.memory import HostRam, host_ram

GIB = 2**30
TOTAL, AVAILABLE = 64 * GIB, 40 * GIB
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """A machine of 64 GiB of which 40 are free."""
    monkeypatch.setattr(memory, "_machine_ram", lambda: (TOTAL, AVAILABLE))


@pytest.fixture
def cgroups(tmp_path):
    """`cgroups(lines, {folder: {file: content}})`: what host_ram finds there."""
    root, own = tmp_path / "cgroup 组", tmp_path / "own"
    root.mkdir()

    def find(lines: str | None, folders) -> HostRam:
        for folder, files in folders.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (root / folder / name).write_text(f"{content}\n", encoding="utf-8")
        if lines is not None:
            own.write_text(lines, encoding="utf-8")
        return host_ram(root, own)

    return find


def v2(limit, used=0, cache=0):
    stat = f"anon 12345\nfile 99\ninactive_file {cache}\nactive_file 7"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def v1(limit, used=0, cache=0):
    stat = f"cache 5\ninactive_file 1\ntotal_inactive_file {cache}\ntotal_cache 5"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


PLAIN = HostRam(TOTAL, AVAILABLE, limited=False)


@pytest.mark.parametrize(
    ("lines", "folders"),
    [
        (None, {}),
        ("0::/\n", {}),
        ("0::/job\n", {}),
        ("", {".": v2("max")}),
        ("0::/job\n", {"job": v2("max", 5 * GIB)}),
        ("0::/job\n", {"job": v2(2 * TOTAL, 5 * GIB)}),
        ("9:memory:/job\n", {"memory/job": v1(UNLIMITED_V1, 5 * GIB)}),
        ("0::/job\n", {"job": {"memory.current": 5 * GIB}}),
        ("0::/job\n", {"job": {"memory.max": "rubbish"}}),
        ("0::/job\n", {"another": v2(GIB, 0)}),
        ("9:cpu,cpuacct:/job\n", {"memory/job": v1(GIB), "cpu/job": v1(GIB)}),
        ("rubbish\n", {}),
    ],
)
def test_without_a_limit_it_is_the_machines(cgroups, lines, folders):
    assert cgroups(lines, folders) == PLAIN


@pytest.mark.parametrize(
    ("lines", "folder", "files"),
    [
        ("0::/user/job\n", "user/job", v2), ("0::/\n", ".", v2), (None, ".", v2),
        ("4:cpu:/x\n9:memory:/user/job\n", "memory/user/job", v1), ("9:cpu,memory:/job\n", "memory/job", v1),
        ("9:memory:/\n", "memory", v1), ("0::/a:b/job\n", "a:b/job", v2),
    ],
)  # fmt: skip
def test_a_limit(cgroups, lines, folder, files):
    """Free is what the limit leaves of what is in use; pages of files that nobody reads are not in use."""
    found = cgroups(lines, {folder: files(16 * GIB, 6 * GIB, 2 * GIB)})
    assert found == HostRam(16 * GIB, 12 * GIB, limited=True)


def test_the_tightest_on_the_way_up_counts(cgroups):
    folders = {"lab": v2(8 * GIB, GIB), "lab/user": v2(32 * GIB, 2 * GIB), "lab/user/job": v2("max", GIB)}
    found = cgroups("0::/lab/user/job\n", folders)
    assert (found.total, found.available) == (8 * GIB, 7 * GIB)


def test_a_job_within_a_users_share(cgroups):
    folders = {"user": v2(32 * GIB, 20 * GIB), "user/job": v2(16 * GIB, 2 * GIB)}
    found = cgroups("0::/user/job\n", folders)
    # The job may have 14 more, but of the user's 32 only 12 are left.
    assert (found.total, found.available) == (16 * GIB, 12 * GIB)


def test_no_more_is_free_than_the_machine_has(cgroups):
    found = cgroups("0::/job\n", {"job": v2(60 * GIB, 0)})
    assert (found.total, found.available) == (60 * GIB, AVAILABLE)


def test_more_in_use_than_allowed_is_nothing_free(cgroups):
    assert cgroups("0::/job\n", {"job": v2(4 * GIB, 5 * GIB)}).available == 0


def test_more_cache_than_use_frees_no_more_than_the_limit(cgroups):
    assert cgroups("0::/job\n", {"job": v2(4 * GIB, GIB, 2 * GIB)}).available == 4 * GIB


@pytest.mark.parametrize("missing", ["memory.current", "memory.stat"])
def test_a_limit_without_the_rest(cgroups, missing):
    files = {name: text for name, text in v2(4 * GIB, GIB, GIB // 2).items() if name != missing}
    expected = {"memory.current": 4 * GIB, "memory.stat": 3 * GIB}
    assert cgroups("0::/job\n", {"job": files}).available == expected[missing]


def test_both_versions_at_once(cgroups):
    """systemd's hybrid: memory under version 1, an empty version 2 beside it."""
    folders = {"memory/job": v1(16 * GIB, 4 * GIB), "job": {"cgroup.procs": 1}}
    found = cgroups("9:memory:/job\n0::/job\n", folders)
    assert (found.total, found.available) == (16 * GIB, 12 * GIB)


def test_this_machine_answers():
    found = host_ram()
    assert 0 <= found.available <= found.total <= TOTAL


def test_oom_kills_are_a_number(tmp_path):
    assert memory.oom_kills() >= 0
    assert memory.oom_kills(tmp_path) >= 0

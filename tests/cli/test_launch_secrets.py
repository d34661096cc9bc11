"""A real run of a script that is given secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
open(sys.argv[1], "a").write(json.dumps([sys.argv[2:], os.environ["MY_PASSWORD"]]) + "\\n")
print("with", sys.argv[2:])
sys.exit("--fail" in sys.argv and "API_KEY=hunter3x https://u:hunter3x@host")
"""
GIVEN = ["--password", "hunter3x", "--url", "https://u:hunter3x@host", "--fail"]


@pytest.mark.slow
def test_a_scripts_secrets_reach_its_ranks_and_nobody_else(dsrun, tmp_path, monkeypatch):
    (tmp_path / "s.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("MY_PASSWORD", "hunter3x")
    said = [
        dsrun("launch", "--gpus", 1, "--output-dir", "run", "s.py", tmp_path / "got", *GIVEN),
        dsrun("rerun", "run", "--output-dir", "again"),
        dsrun("show", "run"), dsrun("report", "run", "-o", "r.html"), dsrun("diagnose", "run", "--json"),
        dsrun("logs", "run"),
    ]  # fmt: skip
    got = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
    assert got == [[GIVEN, "hunter3x"]] * 2
    assert [one.code for one in said[:2]] == [1, 1]
    assert not [one for one in said if "hunter3x" in one.out + one.err]
    holders = {
        str(path.relative_to(tmp_path))
        for path in tmp_path.rglob("*")
        if path.is_file() and b"hunter3x" in path.read_bytes() and path.stat().st_mode & 0o077
    }
    printed = {str(Path(run, "logs", "rank-0.log")) for run in ("run", "again")}
    assert holders == {"s.py", "got", *printed}  # what the script itself has written

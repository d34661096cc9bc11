"""Which versions dsrun is installed and tested with: setup.cfg, the pinned files, the lane of other versions."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from lowest import bounds, constraints

from dsrun.packages import plain
from dsrun.versions import meets

ROOT = Path(__file__).resolve().parents[1]
FILES = {name: ROOT / "requirements" / f"{name}.txt" for name in ("train", "cuda")}


def pinned(path: Path) -> dict[str, list[str]]:
    """Package -> its versions: more than one where Pythons differ."""
    versions: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE):
        versions.setdefault(name, []).append(version)
    return versions


def test_pinned_versions_are_allowed_and_complete():
    train, cuda = pinned(FILES["train"]), pinned(FILES["cuda"])
    assert not set(train) & set(cuda), "one of the files says it"
    for name, (lowest, _) in bounds().items():
        versions = {**train, **cuda}[plain(name)]
        assert all(meets(version, f">={lowest}") for version in versions), name
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {f"torch=={version}" for version in cuda["torch"]} == set(re.findall(r"torch==[0-9.]+", readme))


@pytest.mark.parametrize("name", FILES)
def test_every_pin_has_hashes_and_no_address(name):
    text = FILES[name].read_text(encoding="utf-8")
    for entry in re.split(r"\n(?=\S)", text.partition("\n")[2]):
        assert re.fullmatch(
            r"[\w.-]+==\S+( ; .*)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\\n|\s*$))+", entry
        ), entry
    assert "://" not in text


def test_the_lowest_versions_are_setup_cfgs():
    lines = constraints("lowest")
    config = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    for line in lines:
        name, _, version = line.partition(";")[0].strip().partition("==")
        assert f"{name}>={version}" in config
    assert 'tomli==2; python_version < "3.11"' in lines


def test_named_versions():
    assert constraints("torch==2.11.0,transformers=5.17.0") == ["torch==2.11.0", "transformers==5.17.0"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("torhc==2.11.0", "setup.cfg doesn't name it"),
        ("torch", "neither lowest nor NAME==VERSION"),
        ("torch>=2", "neither lowest nor NAME==VERSION"),
        ("", "neither lowest nor NAME==VERSION"),
    ],
)
def test_what_is_no_set_of_versions_is_refused_before_anything_is_installed(wanted, message):
    done = subprocess.run(
        ["bash", "tests/run.sh", "--versions", wanted], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode and done.stdout == ""
    assert message in done.stderr or (not wanted and "--versions takes lowest" in done.stderr)


def test_a_package_without_a_lower_bound_is_no_set(tmp_path):
    setup = tmp_path / "setup.cfg"
    setup.write_text(
        "[options]\ninstall_requires =\n    click\n[options.extras_require]\ntrain =\nboard =\nlogs =\n"
    )
    with pytest.raises(SystemExit, match="no lower bound: click"):
        constraints("lowest", setup)


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / "docs/howto/ci.md"], ids=lambda path: path.name)
def test_actions_are_named_by_their_commits(path):
    uses = re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))
    assert uses and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name) for name in uses)

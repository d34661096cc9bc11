"""What changed between two releases, in words, and what it touches; the cache and the index behind it."""

from __future__ import annotations

import json

import pytest
from made_releases import OLD, cached, made, wheel
from packaging.version import Version

from dsrun.errors import DsrunError
from dsrun.releases import config_changes, packed
from dsrun.releases.config_changes import ConfigChange
from tools.releases import __main__ as command
from tools.releases import fetch, report
from tools.releases.config_facts import OVERLAY, Fact, facts
from tools.releases.fetch import Archive, Cache
from tools.releases.packages import PACKAGES
from tools.schemas.source import ReleaseSource


def test_names(tmp_path):
    text = report.report(made(tmp_path), "0.1.0", "0.10.0")
    gone, came = text.partition("## New names")[::2]
    assert text.startswith("# peft 0.1.0 -> 0.10.0\n")
    for path in ("peft.gone_soon", "peft.utils.prepare(use_reentrant=)", "peft.base.Sdpa2Attention"):
        assert f"- `{path}`\n" in gone
    for path in ("peft.helpers", "peft.utils.prepare(reentrant=)", "peft.base.Base.save(selected=)"):
        assert f"- `{path}`\n" in came
    assert "peft.LoraConfig`" not in text
    assert "_hidden" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (ConfigChange("key", "fp16.fused", (), ("",)), "`fp16.fused` is new"),
        (ConfigChange("key", "fp16.fused", ("",), ()), "`fp16.fused` is no longer read"),
        (ConfigChange("refused", "amp", (), ("",)), "`amp` stops DeepSpeed now"),
        (
            ConfigChange("default", "gradient_clipping", ("0",), ("1",)),
            "`gradient_clipping`, left out, is `1`; it was `0`",
        ),
        (ConfigChange("bound", "aio.depth", ("minimum 0",), ()), "`aio.depth`: none; it was `minimum 0`"),
        (ConfigChange("checked", "bf16", (), ("",)), "`bf16` is closed to unknown keys"),
    ],
)
def test_configs_in_words(change, words):
    assert report.in_words(change) == words


def test_what_a_change_touches():
    touched = "\n".join(
        report.touches(ConfigChange("default", "zero_optimization.overlap_comm", ("false",), ("true",)))
    )
    assert "DS206" in touched
    assert "presets: presets/" in touched
    assert not list(report.touches(ConfigChange("key", "no_such_section.no_such_key", (), ("",))))


CODE = """
def read(self, warn):
    if self.stage > 3:
        raise ValueError(f"stage {self.stage} "
                         "is too high")
    elif self.new:
        logger.warning("new is slow")
    assert self.old is None, "old is gone"
"""


def test_refusals_have_their_condition():
    """The same message under another condition is another fact."""
    overlay = {"properties": {}, "removed": {}}
    found = facts(ReleaseSource("0.19.0", {"runtime/x_config.py": CODE}), overlay, {})
    place = "runtime/x_config.py:read"
    assert found == [
        Fact("refusal", place, "stage {} is too high", "self.stage > 3"),
        Fact("warning", place, "new is slow", "self.new"),
        Fact("refusal", place, "old is gone", "self.old is None"),
    ]
    changed = facts(ReleaseSource("0.19.1", {"runtime/x_config.py": CODE.replace("> 3", "> 2")}), overlay, {})
    assert [fact.when for fact in changed if fact not in found] == ["self.stage > 2"]


def test_the_installed_deepspeed_is_as_the_data_say(deepspeed):
    package = packed.package("deepspeed")
    release = deepspeed.__version__.partition("+")[0]
    if release != package.releases[-1]:
        pytest.skip("the installed release is not the newest in the data")
    overlay = json.loads(OVERLAY.read_text(encoding="utf-8"))
    there = {tuple(fact) for fact in facts(ReleaseSource.installed(), overlay, {})}
    told = {
        (fact.kind, fact.place, fact.text, fact.when) for fact in config_changes.holding(package, release)
    }
    assert there == told
    assert len(there) > 1000


def test_changes_of_the_configuration():
    found = config_changes.changes(packed.package("deepspeed"), "0.19.2", "0.19.3")
    assert ConfigChange("default", "gradient_clipping", ("0",), ("1",)) in found
    assert ConfigChange("default", "bf16.check_grad_overflow", ("false",), ("true",)) in found
    words = {
        text: span
        for kind, text, span in config_changes.key_history(packed.package("deepspeed"), "gradient_clipping")
        if kind == "default"
    }
    assert words == {"0": "0.9.0 to 0.19.2", "1": "0.19.3 and newer"}


# The cache and the index


class FakeIndex:
    """An index with these archives."""

    def __init__(self, archives):
        self.known, self.fetched = archives, []

    def archives(self, _package):
        return self.known

    def fetch(self, archive, folder):
        self.fetched.append(archive.release)
        return wheel(folder / archive.name, OLD)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_only_what_the_cache_lacks_is_fetched(tmp_path, monkeypatch):
    package = cached(tmp_path, {"0.1.0": OLD})
    there = [
        Archive(release, f"peft-{release}-py3-none-any.whl", "", "")
        for release in ("0.1.0", "0.2.0", "0.3.0")
    ]
    index = FakeIndex(there)
    monkeypatch.setattr(fetch, "index", lambda: index)
    assert fetch.update(package, tmp_path, only=["0.1.0"], say=str) == []
    assert fetch.update(package, tmp_path, only=["0.1.0", "0.3.0"], say=str) == ["0.3.0"]
    assert fetch.update(package, tmp_path, say=str) == ["0.2.0"]
    assert index.fetched == ["0.3.0", "0.2.0"]
    assert [source.release for source in Cache(package, tmp_path).sources()] == ["0.1.0", "0.2.0", "0.3.0"]
    assert "peft/utils.py" in Cache(package, tmp_path).files("0.2.0")
    assert not [path for path in Cache(package, tmp_path).files("0.1.0") if "test" in path or "setup" in path]


@pytest.mark.parametrize(
    ("name", "names", "taken"),
    [
        ("peft", ["peft-0.1.0.tar.gz", "peft-0.1.0-py3-none-any.whl"], "peft-0.1.0-py3-none-any.whl"),
        ("deepspeed", ["deepspeed-0.9.0.tar.gz"], "deepspeed-0.9.0.tar.gz"),
        ("torch", ["torch-2.1.0-cp311-cp311-manylinux1_x86_64.whl"], None),
        (
            "torch",
            ["torch-2.1.0-cp310-none-macosx_11_0_arm64.whl", "torch-2.1.0-cp311-none-macosx_11_0_arm64.whl"],
            "torch-2.1.0-cp311-none-macosx_11_0_arm64.whl",
        ),
    ],
)
def test_which_file_of_a_release(name, names, taken):
    archive = fetch.preferred(PACKAGES[name], [Archive("1", name, "", "") for name in names])
    assert (archive and archive.name) == taken


def test_releases_of_names():
    assert fetch.version_of("peft-0.1.0-py3-none-any.whl") == Version("0.1.0")
    assert fetch.version_of("flash_attn-2.8.3.post2.tar.gz") == Version("2.8.3.post2")
    assert fetch.version_of("peft-0.1.0.exe") is None


def test_a_release_that_there_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("DSRUN_RELEASES", str(tmp_path))
    monkeypatch.setattr(fetch, "index", lambda: FakeIndex([]))
    cached(tmp_path, {"0.1.0": OLD})
    with pytest.raises(DsrunError, match=r"no peft 77\.0 that can be read"):
        command.between(PACKAGES["peft"], "0.1.0", "77.0")
    assert command.main(["diff", "pest", "1", "2"]) == 1

"""The documentation: generated pages are current, links lead somewhere, and what the READMEs say holds."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "presets", "bench", "tests", "launch")
PAGES = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
ON_CPU = (
    "python3 -m venv .venv && .venv/bin/pip install --no-deps torch==2.13.0 "
    "--index-url https://download.pytorch.org/whl/cpu && .venv/bin/pip install -e '.[train]' "
    "&& .venv/bin/dsrun finetune chatglm2-tiny"
)
TRAIN = (
    "python3 -m venv .venv && .venv/bin/pip install torch==2.13.0 -e '.[train]' "
    "&& .venv/bin/dsrun finetune chatglm2-tiny"
)
TEST = "bash tests/run.sh"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path):
    return path.read_text(encoding="utf-8")


def blocks(name, language):
    return [text for kind, text in BLOCK.findall(read(ROOT / name)) if kind == language]


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    plain = BLOCK.sub("", read(path))
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        for heading in HEADING.findall(plain)
    }


def test_generated_pages_are_current(generator):
    assert generator.stale() == [], "run: python docs/generate.py"


def test_there_are_pages():
    assert len(PAGES) > 20


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for link in LINK.findall(BLOCK.sub("", read(path))):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.relative_to(ROOT)}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{path.relative_to(ROOT)}: {link}"


def test_every_page_is_in_the_index():
    linked = {(ROOT / "docs" / link).resolve() for link in LINK.findall(read(ROOT / "docs" / "README.md"))}
    pages = {path for path in PAGES if path.is_relative_to(ROOT / "docs")} - {ROOT / "docs" / "README.md"}
    assert pages <= linked


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_commands_to_begin_with(name):
    assert [block.strip() for block in blocks(name, "sh")[:3]] == [ON_CPU, TRAIN, TEST]


def test_ci_runs_the_readmes_test_command():
    lines = [line for line in read(ROOT / ".ci" / "run").splitlines() if line and line[0] != "#"]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."', TEST]


def test_the_test_script_is_what_the_readme_says():
    script = read(ROOT / "tests" / "run.sh")
    assert "apt-get" in script and "sudo" in script
    # Both commands train with the same torch.
    assert re.search(r"torch==[\d.]+", script)[0] == re.search(r"torch==[\d.]+", TRAIN)[0]
    places = [script.index(word) for word in (".venv-test", "ruff", "mypy", "pytest")]
    assert places[0] < min(places[1:3])


@pytest.mark.parametrize("language", ["sh", "json", "python"])
def test_both_readmes_hold_the_same_commands(language):
    assert blocks("README.md", language) == blocks("README.zh-CN.md", language)
    assert blocks("README.md", language)


def test_the_readmes_config_is_what_the_command_prints(dsrun):
    assert [dsrun("preset", "zero2-offload", "--gpus", 2).out] == blocks("README.md", "json")


def test_the_plans_in_the_docs_are_made(generator):
    """So that their tables are current where test_generated_pages_are_current is content."""
    commands = [
        command for name in generator.SHOWN for _, command in generator.SHOWN_PLAN.findall(read(ROOT / name))
    ]
    assert len(commands) == sum(read(ROOT / name).count(" layers of ") for name in generator.SHOWN) == 4
    text = "```sh\ndsrun plan llama-7b --gpu t4\n```\n\n```text\nold\n```\n"
    assert "old" not in generator.with_plans(text) and "llama-7b: 6.738e9 parameters" in generator.with_plans(
        text
    )


def test_the_readmes_tables_show_presets_as_they_are(dsrun):
    english, chinese = (
        dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", read(ROOT / name), re.MULTILINE))
        for name in ("README.md", "README.zh-CN.md")
    )
    listed = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in dsrun("preset").out.splitlines())
    assert english and english.items() <= listed.items()
    assert set(chinese) == set(english)


def test_the_options_page_has_every_option_of_finetune_once():
    from dsrun.cli.finetune import command

    known = [opt for option in command.params for opt in (*option.opts, *option.secondary_opts)]
    rows = re.findall(r"^\| (`-.*?`) \|", read(ROOT / "docs" / "reference" / "options.md"), re.MULTILINE)
    shown = [flag.strip("`") for row in rows for flag in row.split(", ")]
    assert sorted(shown) == sorted({opt for opt in known if opt.startswith("-")} - {"--help-all"})


def test_the_finetune_pages_order_of_sources_is_the_codes():
    from dsrun.options.table import Source

    page = read(ROOT / "docs" / "reference" / "finetune.md")
    shown = re.findall(r"^\d+\. \*\*(.+?)\*\*", page, re.MULTILINE)
    assert shown == [source.words.removesuffix(" default") for source in Source]


def test_the_run_folder_page_names_every_file():
    from dsrun.jobs.spec import run_folder

    page = read(ROOT / "docs" / "reference" / "run-folder.md")
    for name in (
        *re.findall(r"[\w-]+\.(?:json\w*|sh|log|png)\b", run_folder.__doc__),
        run_folder.LOCK,
        run_folder.AGENTS_LOG,
        run_folder.SUBMITTED,
    ):
        assert name in page, name

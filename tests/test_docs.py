"""The documentation: generated pages are current, links lead somewhere, and what the READMEs say holds."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest
from needed import since

from dsrun import catalog

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
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
    "python3 -m venv .venv && .venv/bin/pip install torch==2.13.0 -e '.[train,gpu]' "
    "&& .venv/bin/dsrun finetune chatglm2-tiny"
)
TEST = "bash tests/run.sh"
TWINS = [
    ("README.md", "README.zh-CN.md"),
    *(
        (f"docs/{path.relative_to(DOCS)}".replace(".zh.md", ".md"), f"docs/{path.relative_to(DOCS)}")
        for path in sorted(DOCS.rglob("*.zh.md"))
    ),
]
"""The pages in both languages."""
FEWER_IN_CHINESE = "docs/reference/rules.md"
"""Explains the commonest rules in Chinese, and lists them all in English."""


def script(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator():
    return script("generate")


@pytest.fixture(scope="module")
def hooks():
    return script("hooks")


def read(path):
    return path.read_text(encoding="utf-8")


def blocks(name, language):
    return [text for kind, text in BLOCK.findall(read(ROOT / name)) if kind == language]


@functools.cache
def without_code(path):
    return BLOCK.sub("", read(path))


def anchors(path, hooks):
    """The anchors of a page: of its headings, as code hosts and the site make them, and those written out."""
    text = without_code(path)
    return {hooks.slug(heading) for heading in HEADING.findall(text)} | set(
        re.findall(r'<a id="([^"]+)"', text)
    )


@since(click="8.2")  # before, what is for stderr comes among the output
def test_generated_pages_are_current(generator):
    assert generator.stale() == [], "run: python docs/generate.py"


def test_there_are_pages():
    assert len(PAGES) > 20


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path, hooks):
    for link in LINK.findall(without_code(path)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.relative_to(ROOT)}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target, hooks), f"{path.relative_to(ROOT)}: {link}"


@pytest.mark.parametrize(("index", "chinese"), [("README.md", False), ("README.zh.md", True)])
def test_every_page_is_in_the_index(index, chinese, hooks):
    """The navigation of the site is made of it. A page that has no Chinese is there in English. Pages of measurements
    are in an index of their own."""
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in LINK.findall(read(DOCS / index))}
    measured = {DOCS / page for page in hooks.outside_of_navigation()}
    assert not measured & linked
    linked |= measured
    pages = {path for path in DOCS.rglob("*.md") if not path.name.endswith(".zh.md")} - {DOCS / "README.md"}
    twins = {path: path.with_suffix(".zh.md") for path in pages}
    wanted = {twins[path] if chinese and twins[path].exists() else path for path in pages}
    assert wanted == {path for path in linked if path.is_relative_to(DOCS) and path != DOCS / "README.md"}


def test_pages_of_measurements_are_in_their_index(generator, hooks):
    """Pages that say which command made them, and when, in both languages."""
    made = {f"reference/{name}.md" for name in generator.measured.pages()}
    assert len(made) > 15
    assert set(hooks.outside_of_navigation()) == made
    for name, date in generator.measured.pages().items():
        for index in ("measured.md", "measured.zh.md"):
            assert re.search(rf"\({name}\.md\) \|.*\| {date} \|", read(DOCS / "reference" / index)), name


@pytest.mark.parametrize("name", [chinese for _, chinese in TWINS])
def test_a_chinese_page_leads_to_chinese_pages(name):
    path = ROOT / name
    for link in LINK.findall(without_code(path)):
        target = (path.parent / link.partition("#")[0]).resolve()
        if target.suffix == ".md" and not target.name.endswith(".zh.md") and target.is_relative_to(DOCS):
            assert not target.with_suffix(".zh.md").exists(), link


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
    assert re.search(r"install -q (torch==[\d.]+)", script)[1] == re.search(r"torch==[\d.]+", TRAIN)[0]
    places = [script.index(word) for word in (".venv-test", "ruff", "mypy", "pytest")]
    assert places[0] < min(places[1:3])


def test_the_readme_is_short():
    """A screen and a half."""
    assert len(read(ROOT / "README.md").split()) < 900
    assert len(re.findall(r"[\u4e00-\u9fff]|[\w.'-]+", read(ROOT / "README.zh-CN.md"))) < 1800


@pytest.mark.parametrize(("english", "chinese"), TWINS)
def test_both_languages_hold_the_same_blocks_of_code(english, chinese):
    assert BLOCK.findall(read(ROOT / chinese)) == BLOCK.findall(read(ROOT / english))


def parts(name):
    """What a page has in any language: levels of its headings, how many rows its tables have, options, links."""
    text = without_code(ROOT / name)
    return {
        "headings": re.findall(r"^#+(?= )", text, re.MULTILINE),
        "rows": len(re.findall(r"^\|", text, re.MULTILINE)),
        "options": set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)),
        "links": {re.sub(r"#.*|\.zh(?:-CN)?(?=\.md)", "", link) for link in LINK.findall(text)},
    }


@pytest.mark.parametrize(("english", "chinese"), [pair for pair in TWINS if pair[0] != FEWER_IN_CHINESE])
def test_both_languages_have_the_same_parts(english, chinese):
    assert parts(chinese) == parts(english)


def test_the_picture_of_the_terminal_is_whole(generator):
    """The picture has all scenes; their text is compared with the commands' where the pages are."""
    shown = generator.record.shown()
    assert list(shown) == list(generator.record.COMMANDS)
    assert any("ROUGE-L" in line for line in shown["dsrun finetune chatglm2-tiny"])
    picture = read(generator.record.PICTURE)
    assert "<script" not in picture and "://" not in picture.replace("http://www.w3.org/2000/svg", "")


def test_the_overviews_config_is_what_the_command_prints(dsrun):
    assert [dsrun("preset", "zero2-offload", "--gpus", 2).out] == blocks("docs/overview.md", "json")


def test_pairs_of_techniques_go_together_or_are_refused_in_one_message(generator):
    """A refusal says what would do in its place; an option that is refused alone is no matter of pairs."""
    pairs = generator.combinations.pairs()
    wrong = [
        pair
        for pair in pairs
        if len(pair.problems) > 1 or not all(one.hint and one.where for one in pair.problems)
    ]
    assert wrong == []
    assert any(pair.problems for pair in pairs)
    for axis in generator.combinations.AXES.values():
        assert [name for name, options in axis.items() if generator.combinations.problems(options)] == []


def test_the_plans_in_the_docs_are_made(generator):
    """Plans are found, so that test_generated_pages_are_current compares their tables."""
    commands = [
        command for name in generator.SHOWN for _, command in generator.SHOWN_PLAN.findall(read(ROOT / name))
    ]
    assert len(commands) == sum(read(ROOT / name).count(" layers of ") for name in generator.SHOWN) == 6
    assert set(generator.record.CHOSEN_PRESETS) <= set(catalog.files("presets"))
    text = "```sh\ndsrun plan llama-7b --gpu t4\n```\n\n```text\nold\n```\n"
    assert "old" not in generator.with_plans(text) and "llama-7b: 6.738e9 parameters" in generator.with_plans(
        text
    )


def test_a_new_preset_changes_no_plan_in_the_docs(generator, dsrun, tmp_path, monkeypatch):
    command = "plan chatglm2-6b --gpu v100-32g --gpus 2 --host-memory 256GiB"
    before = generator.planned(command)
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "anew.toml").write_text('summary = "Another one"\nextends = "zero1"\n')
    monkeypatch.setenv("DSRUN_PATH", str(tmp_path))
    generator.planned.cache_clear()
    assert generator.planned(command) == before
    whole = dsrun(*command.split()).out
    assert "\nanew " in whole and "\n...\n" in before
    first = [line for line in before.splitlines() if line.startswith("zero2-offload")]
    assert len(first) == 2 and all(" ".join(line.split()) in " ".join(whole.split()) for line in first)


def test_the_overviews_table_shows_presets_as_they_are(dsrun):
    english, chinese = (
        dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", read(ROOT / name), re.MULTILINE))
        for name in ("docs/overview.md", "docs/overview.zh.md")
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
    from dsrun.options.layers import Source

    page = read(ROOT / "docs" / "reference" / "finetune.md")
    shown = re.findall(r"^\d+\. \*\*(.+?)\*\*", page, re.MULTILINE)
    assert shown == [source.words.removesuffix(" default") for source in Source]


def test_the_run_folder_page_names_every_file():
    from dsrun.job import run_folder

    page = read(ROOT / "docs" / "reference" / "run-folder.md")
    for name in (
        *re.findall(r"[\w-]+\.(?:json\w*|sh|log|png)\b", run_folder.__doc__),
        run_folder.LOCK,
        run_folder.AGENTS_LOG,
        run_folder.SUBMITTED,
    ):
        assert name in page, name


def test_the_exit_codes_are_those_of_the_code():
    """Codes that the commands end with, those in the text of `main`, and those in the table."""
    from dsrun.cli import main

    table, _, _signals = read(ROOT / "docs" / "reference" / "exit-codes.md").partition(
        "What a rank's end means"
    )
    shown = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    told = {int(code) for code in re.findall(r"\b(\d+) [a-zA-Z]", main.__doc__.partition("Exit codes: ")[2])}
    assert shown == told == {0, *codes_of(ROOT / "dsrun" / "cli"), *codes_of(ROOT / "dsrun" / "errors.py")}


def codes_of(place):
    """The numbers with which modules end a process."""
    modules = [place] if place.is_file() else place.rglob("*.py")
    for node in (node for module in modules for node in ast.walk(ast.parse(read(module)))):
        match node:
            case ast.Call(func=ast.Attribute(attr="exit") | ast.Name(id="SystemExit" | "_say"), args=args):
                values = args
            case ast.Assign(
                targets=[
                    ast.Attribute(attr="exit_code") | ast.Name(id="exit_code" | "EX_TEMPFAIL" | "ABSTAINED")
                ]
            ):
                values = [node.value]
            case _:
                continue
        yield from (
            value.value for value in values if isinstance(value, ast.Constant) and type(value.value) is int
        )

"""What makes a site of the pages, which are read on a code host, too: mkdocs calls the functions on_... (mkdocs.yml).

The navigation is the index page, in each language. Links that leave docs/ (to a preset, a cluster's file, the guide for
contributors) lead to copies in the site, and headings have the anchors that code hosts give them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

try:
    from mkdocs.plugins import event_priority
except ModuleNotFoundError:  # `slug` and `index` need none of it

    def event_priority(_: float) -> Any:
        return lambda function: function


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = "repository"
"""Folder in the site for the files outside of docs/ that are pages, or are linked to."""
INDEX = ("README.md", "README.zh.md")
INDEXES_OF_ENTRIES = ("reference/rules.md", "reference/signatures.md")
ENTRIES = ROOT / "build" / "entries"
"""Where the pages of single rules and signatures are written for the site."""
ENTRY_ID = re.compile(r"^(\| (?:<a id=\"[\w.-]+\"></a>))([\w.-]+) \|", re.MULTILINE)
"""The first cell of an index's row."""
MEASURED = "reference/measured.md"
"""The index of the pages of measurements, which have no other place in the navigation."""
CHECKER = '<div id="checker"></div>'
NOT_BUILT = {"en": "The checker isn't built into this copy of the site", "zh": "这份网站没有编入检查器"}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^(##+) (.+)$|^- \[([^\]]+)\]\(([^)\s]+)\)", re.MULTILINE)


def slug(heading: str, _separator: str = "-") -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def index(page: str) -> Iterator[tuple[int, str, str]]:
    """The rows of an index page: its level (2 for a section), the title, and the page; a heading has none."""
    for level, heading, title, link in ENTRY.findall((DOCS / page).read_text(encoding="utf-8")):
        yield (len(level), heading, "") if level else (9, title, link)


def navigation(page: str) -> list[Any]:
    """An index page as mkdocs' nav: sections, sections in them, pages."""
    top: list[Any] = []
    open_at: dict[int, list[Any]] = {1: top}
    for level, title, link in index(page):
        inside = open_at[max(depth for depth in open_at if depth < level)]
        if link:
            inside.append({title: link})
        else:
            open_at = {depth: rows for depth, rows in open_at.items() if depth < level} | {level: []}
            inside.append({title: open_at[level]})
    return top


def outside_of_navigation() -> list[str]:
    """The pages in docs/ that the index of measurements links to and the index does not."""
    page = DOCS / MEASURED
    linked = {target_of(page, link) for _, link in LINK.findall(page.read_text(encoding="utf-8"))}
    there = {DOCS / link for _, _, link in index(INDEX[0]) if link}
    return sorted(
        path.relative_to(DOCS).as_posix() for path in linked - there if path and DOCS in path.parents
    )


@event_priority(100)  # before the plugin that divides the languages reads them
def on_config(config: Any) -> Any:
    """The navigation, its Chinese titles, the pages outside of it, and the anchors."""
    from pathspec.gitignore import GitIgnoreSpec

    english, chinese = (list(index(page)) for page in INDEX)
    if [row[0] for row in english] != [row[0] for row in chinese]:
        raise ValueError(f"{INDEX[0]} and {INDEX[1]} don't have the same entries in the same order")
    titles = {there[1]: here[1] for there, here in zip(english, chinese, strict=True)}
    config.nav = [{config.site_name: INDEX[0]}, *navigation(INDEX[0])]
    config.not_in_nav = GitIgnoreSpec.from_lines(outside_of_navigation())
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    for language in config.plugins["i18n"].config.languages:
        if language.locale == "zh":
            language.nav_translations = titles
    return config


@event_priority(-200)  # behind the plugin that divides the languages, which knows files below docs/ alone
def on_files(files: Any, config: Any) -> Any:
    """The files, and those outside of docs/ that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel
    from mkdocs_static_i18n.suffix import create_i18n_file

    languages = config.plugins["i18n"]
    outside = {
        f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}": path
        for path in sorted(linked_outside(DOCS.rglob("*.md")))
    }
    # Rules and signatures are explained in English: the Chinese site leads there.
    entries = written_entries() if languages.current_language == languages.default_language else {}
    for uri, path in (outside | entries).items():
        found = File.generated(config, uri, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
        of_language = create_i18n_file(
            found, languages.current_language, languages.default_language, languages.all_languages, config
        )
        of_language.abs_src_path = str(path)
        files.append(of_language)
    return files


def written_entries() -> dict[str, Path]:
    """The pages of rules and signatures, written anew below build/: their names in the site, and their files."""
    import sys

    sys.path[:0] = [str(ROOT), str(DOCS)]
    import entries

    files = {}
    for uri, text in entries.pages().items():
        files[uri] = ENTRIES / uri
        files[uri].parent.mkdir(parents=True, exist_ok=True)
        files[uri].write_text(text, encoding="utf-8")
    return files


def with_links(markdown: str, uri: str) -> str:
    """An index of rules or signatures, whose ids lead to their pages."""
    folder = posixpath.basename(uri).removesuffix(".md")
    return ENTRY_ID.sub(lambda match: f"{match[1]}[{match[2]}]({folder}/{match[2].lower()}.md) |", markdown)


def linked_outside(pages: Iterable[Path]) -> set[Path]:
    """The files outside of docs/ that pages link to, and those that these link to if they are pages themselves."""
    found: set[Path] = set()
    queue = list(pages)
    while queue:
        page = queue.pop()
        for _, link in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
            target = target_of(page, link)
            if target and target.is_file() and not target.is_relative_to(DOCS) and target not in found:
                found.add(target)
                queue += [target] if target.suffix == ".md" else []
    return found


def target_of(page: Path, link: str) -> Path | None:
    """The file or folder that a link means; None for one that leaves the repository, or stays in its page."""
    name = link.partition("#")[0]
    if not name or "://" in name or name.startswith("mailto:"):
        return None
    return (page.parent / name).resolve()


@event_priority(100)
def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page, with links out of docs/ that lead to the copies; a folder, which has no page, stays as its words.

    A Chinese page has its English anchors, too: pages that are there in English alone lead to them.
    """
    uri = page.file.src_uri
    if uri.endswith(".zh.md"):
        markdown = with_anchors(markdown, (DOCS / uri.replace(".zh.md", ".md")).read_text(encoding="utf-8"))
    if uri in INDEXES_OF_ENTRIES:
        markdown = with_links(markdown, uri)
    if (ENTRIES / uri).is_file():
        return markdown
    origin = ROOT / uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else DOCS / uri

    def moved(match: re.Match[str]) -> str:
        text, link = match.groups()
        target = target_of(origin, link)
        if target is None or (origin.is_relative_to(DOCS) and target.is_relative_to(DOCS)):
            return match[0]
        if target.is_dir():
            return text
        inside = target.is_relative_to(DOCS)
        there = target.relative_to(DOCS if inside else ROOT).as_posix()
        where = posixpath.relpath(there if inside else f"{OUTSIDE}/{there}", posixpath.dirname(uri))
        return f"[{text}]({where}{link[len(link.partition('#')[0]) :]})"

    return outside_of_code(markdown, moved)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """The page with the checker in its place, or with why it isn't there."""
    if CHECKER not in html:
        return html
    language = "zh" if page.file.src_uri.endswith(".zh.md") else "en"
    return html.replace(CHECKER, checker(language, posixpath.relpath("checker", posixpath.dirname(page.url))))


def checker(language: str, assets: str) -> str:
    """The checker's part of a page. assets: the folder of its files, as the page names it."""
    import json

    if why_not := in_browser().why_not():
        return f'<div class="admonition warning"><p>{NOT_BUILT[language]} ({why_not})</p></div>'
    texts = json.loads((DOCS / "checker" / "texts.json").read_text(encoding="utf-8"))[language]
    values = {**texts, "language": language, "assets": assets}
    values["texts"] = json.dumps(texts, ensure_ascii=False).replace("<", "\\u003c")
    form = (DOCS / "checker" / "checker.html").read_text(encoding="utf-8")
    return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], form)


def in_browser() -> Any:
    """The module that makes what the checker runs on."""
    import sys

    sys.path[:0] = [str(DOCS)]
    import in_browser as module

    return module


def on_post_build(config: Any) -> None:
    """Python and dsrun for the checker, into the site."""
    import shutil

    module = in_browser()
    if not module.why_not():
        shutil.copytree(module.FOLDER, Path(config.site_dir) / "checker" / "lib", dirs_exist_ok=True)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The page, with a name for the search dialog, which the theme leaves without one: screen readers say it."""
    name = "搜索" if page.file.src_uri.endswith(".zh.md") or page.url.startswith("zh/") else "Search"
    return output.replace('role="dialog"', f'role="dialog" aria-label="{name}"')


def with_anchors(markdown: str, english: str) -> str:
    """A page with the anchors of its English twin before its headings, where both have as many."""
    slugs = [slug(heading) for heading in HEADING.findall(BLOCK.sub("", english))]
    if len(slugs) != len(HEADING.findall(BLOCK.sub("", markdown))):
        return markdown
    left = iter(slugs)

    def marked(heading: re.Match[str]) -> str:
        english_slug = next(left)
        if english_slug == slug(heading[1]):
            return heading[0]
        return f'<a id="{english_slug}"></a>\n\n{heading[0]}'

    return outside_of_code(markdown, marked, HEADING)


def outside_of_code(
    markdown: str, moved: Callable[[re.Match[str]], str], what: re.Pattern[str] = LINK
) -> str:
    """A page with its links (or something else) replaced, but those in blocks of code."""
    parts, end = [], 0
    for block in BLOCK.finditer(markdown):
        parts += [what.sub(moved, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, what.sub(moved, markdown[end:])])

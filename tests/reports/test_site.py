"""The documentation as a site: built strictly in both languages, and read by who can't see it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import browser
import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Strictly: a link or an anchor that leads nowhere, or a page outside the navigation, is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def read(path):
    return path.read_text(encoding="utf-8")


def test_pages_in_both_languages(site):
    assert 'lang="zh"' in read(site / "zh" / "howto" / "data.html")
    assert "How to add" in read(site / "repository" / "CONTRIBUTING.html")
    assert (site / "repository" / "presets" / "zero2.toml").read_bytes() == (
        ROOT / "presets" / "zero2.toml"
    ).read_bytes()


def test_search_in_both_languages(site):
    index = json.loads(read(site / "search" / "search_index.json"))
    assert {"en", "zh"} <= set(index["config"]["lang"])
    words = next(page["title"] for page in index["docs"] if page["location"] == "zh/howto/data.html")
    assert "数据" in re.split(index["config"]["separator"], words), "Chinese is found by its words"
    found = {page["location"] for page in index["docs"] if "V100" in page["title"]}
    assert {"howto/two-v100s.html", "zh/howto/two-v100s.html"} <= found


@pytest.mark.full
@pytest.mark.skipif(bool(browser.missing()), reason=f"not installed here: {browser.missing()}")
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_in_it_is_hard_to_reach(site, dark):
    """No fault that axe-core calls serious, in either language, wide and on a phone."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever).start()
    found = {}
    try:
        with browser.opened(dark=dark) as driver:
            for page in (
                "index.html",
                "howto/plan.html",
                "zh/index.html",
                "zh/howto/plan.html",
                "zh/howto/board.html",
                "zh/reference/rules.html",
            ):
                for size in (browser.WIDE, browser.PHONE):
                    browser.resize(driver, size)
                    driver.get(f"http://127.0.0.1:{server.server_port}/{page}")
                    scheme = driver.find_element("tag name", "body").get_attribute("data-md-color-scheme")
                    assert scheme == ("slate" if dark else "default")
                    found[page, size] = browser.faults(driver)
    finally:
        server.shutdown()
        server.server_close()
    assert not any(found.values()), found

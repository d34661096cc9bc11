"""The checker in the documentation, in a real Chromium: its answers are the command line's, and it asks nobody else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import browser
import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(
        bool(browser.missing()) or shutil.which("npm") is None,
        reason=f"not installed here: {browser.missing() or 'npm'}",
    ),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page in a browser that reaches this machine only, its address, and the requests that the site got."""
    import browser_page

    folder = tmp_path_factory.mktemp("site")
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    for command in (
        ["docs/in_browser.py"],
        ["-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    with (
        browser_page.served(folder) as (address, asked),
        browser.opened(more_flags=browser_page.ALONE) as driver,
    ):
        browser_page.ready(driver, address)
        yield driver, address, asked


@pytest.mark.parametrize(("kind", "count"), [("configs", 200), ("plans", 50), ("logs", 46), ("names", 40)])
def test_the_page_answers_as_the_command_line(page, kind, count):
    import browser_page

    drawn = browser_page.example_logs(count) if kind == "logs" else count
    group = getattr(browser_page, kind)(drawn)
    with browser_page.isolated():
        browser_page.compare(page[0], group)
    assert group.different == []
    assert group.equal + group.refused == len(group.cases) == count
    assert group.equal > count / 2


def test_what_the_reader_sees(page):
    import browser_page

    driver, _, asked = page
    assert "train_batch_size" in browser_page.press_example(driver, "validate")
    assert "zero3" in browser_page.press_example(driver, "plan")
    assert "gpu_oom" in browser_page.press_example(driver, "diagnose")
    assert "DS221" in browser_page.press_example(driver, "explain")
    assert browser.faults(driver) == []
    focused = driver.execute_script(
        "document.getElementById('tab-explain').focus();"
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));"
        "return [document.activeElement.id, document.getElementById('panel-validate').hidden]"
    )
    assert focused == ["tab-validate", False]
    assert {method for method, _ in asked} == {"GET"}


def test_what_can_not_be_is_said_on_the_page(page):
    import browser_page

    driver = page[0]
    driver.execute_script(
        "const form = document.querySelector('#panel-explain form'); form.elements.name.value = 'DS999';"
        "document.getElementById('results').hidden = true; form.requestSubmit()"
    )
    browser_page.browser_waits(driver, "return !document.getElementById('results').hidden")
    seen = driver.execute_script("return document.getElementById('results').textContent")
    assert "there is no rule DS999" in seen


def test_in_chinese(page):
    import browser_page

    driver, address, _ = page
    browser_page.ready(driver, address, f"zh/{browser_page.PAGE}")
    assert "原因" in browser_page.press_example(driver, "diagnose")

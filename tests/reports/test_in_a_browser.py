"""The report and the board in a real Chromium: what they look like to who reads, and to who can't see."""

from __future__ import annotations

import threading

import browser
import pytest
from running import until

from dsrun.job import run_folder
from dsrun.reports import report
from dsrun.reports.board import known_runs
from dsrun.training.reports.report import Report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(browser.missing()), reason=f"not installed here: {browser.missing()}"),
]


@pytest.fixture(scope="module")
def driver():
    with browser.opened() as found:
        yield found


@pytest.fixture
def runs(make_run, answered):
    """Two runs that ended and one that failed."""
    answered(make_run("one"))
    make_run("other", losses=(7.5, 6.0), preset="zero3")
    failed = make_run("failed", "failed", losses=(7.5, float("nan")))
    told = {
        "cause": "gpu_oom",
        "rank": 1,
        "summary": "A GPU ran out.",
        "line": "CUDA out of memory",
        "next_step": "Less.",
    }
    run_folder.write_state(failed, "failed", why="out of memory", problems=["rank 1"], diagnosis=told)
    return failed.parent


@pytest.fixture
def address(runs, monkeypatch):
    """A board that is really served."""
    uvicorn = pytest.importorskip("uvicorn")
    from dsrun.reports.board.app import make_app
    from dsrun.reports.board.serve import listening

    monkeypatch.setattr(known_runs, "FOLDERS_S", -1.0)
    with listening(0) as listener:
        port = listener.getsockname()[1]
        app = make_app(known_runs.KnownRuns(runs), "a-token", port)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{port}/?token=a-token"
        server.should_exit = True
        thread.join(60)


def texts(driver, selector):
    """Texts that the reader sees, asked for in one go: the page is renewed between two questions."""
    return driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])]"
        ".filter(one => one.checkVisibility()).map(one => one.innerText.trim())",
        selector,
    )


def chosen_runs(driver):
    return driver.execute_script(
        "return [...document.querySelectorAll('tr input:checked')].map(one => one.value)"
    )


def press(driver, by, what):
    """Click on it; it is looked for again where the page was renewed in between."""
    from selenium.common.exceptions import StaleElementReferenceException

    def clicked():
        try:
            driver.find_element(by, what).click()
        except StaleElementReferenceException:
            return False
        return True

    until(clicked, f"a click on {what}", 60, 0.1)


def told(driver, text):
    until(lambda: text in " ".join(texts(driver, "body")), text, 60, 0.1)


def no_sideways_scrolling(driver):
    return driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("dark", [False, True])
def test_a_report(driver, runs, tmp_path, dark):
    """No serious fault, nothing wider than a phone, no error in the console; its own colours in the dark."""
    file = tmp_path / "report.html"
    report.write(report.of_runs([runs / "one", runs / "failed"]), file)
    browser.scheme(driver, dark=dark)
    driver.get(file.as_uri())
    ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.strip("rgb()").split(","))) < 300) is dark
    assert browser.faults(driver) == []
    for size, hidden in ((browser.WIDE, ".small"), (browser.PHONE, ".large")):
        browser.resize(driver, size)
        assert no_sideways_scrolling(driver)
        assert not driver.find_element("css selector", f"figure.wide {hidden}").is_displayed()
    browser.resize(driver, browser.WIDE)
    assert driver.get_log("browser") == []


def test_the_table_is_filtered_sorted_and_renewed(driver, address, runs):
    browser.scheme(driver, dark=False)
    driver.get(address)
    assert "token" not in driver.current_url
    assert browser.faults(driver) == []
    assert sorted(texts(driver, "td.name a")) == ["failed", "one", "other"]
    driver.find_element("id", "filter").send_keys("oom")
    assert texts(driver, "td.name a") == ["failed"]
    driver.find_element("id", "filter").clear()
    driver.find_element("id", "filter").send_keys(" ")
    press(driver, "css selector", 'button[data-column="4"]')
    press(driver, "css selector", 'button[data-column="4"]')
    assert texts(driver, "td.name a")[:2] == ["other", "one"], "by the loss; one that is not finite is last"
    press(driver, "css selector", "tr input")
    chosen = chosen_runs(driver)
    assert len(chosen) == 1
    Report(runs / "one", 0).metrics(step=4, loss=0.125, tokens=100, seconds=0.5, skipped=0, memory_bytes=1)
    told(driver, "0.1250")
    assert texts(driver, "td.name a")[:2] == ["one", "other"], "still sorted"
    assert chosen_runs(driver) == chosen, "still chosen"
    browser.resize(driver, browser.PHONE)
    assert no_sideways_scrolling(driver)
    browser.resize(driver, browser.WIDE)
    assert driver.get_log("browser") == []


def test_runs_and_their_comparison(driver, address):
    browser.scheme(driver, dark=True)
    driver.get(address)
    for name in ("one", "other", "failed"):
        press(driver, "xpath", f"//tr[.//a[text()='{name}']]//input")
    press(driver, "id", "compare")
    told(driver, "3 runs side by side")
    assert browser.faults(driver) == []
    press(driver, "link text", "tokens")
    told(driver, "tokens trained on")
    press(driver, "link text", "All runs")
    press(driver, "link text", "failed")
    told(driver, "A GPU ran out.")
    assert browser.faults(driver) == []
    assert driver.get_log("browser") == []

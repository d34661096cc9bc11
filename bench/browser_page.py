"""The checker in the documentation beside the command line: the same configs, plans, logs and names, and equal JSON?

    python bench/browser_page.py --site SITE --configs 200 --plans 50 --logs LOGS.json --names 40
    python bench/browser_page.py ... --pictures FOLDER --output docs/reference/browser-measured.md

SITE is what `python docs/in_browser.py && mkdocs build --site-dir SITE` made. It is served below a path, as code hosts
do it, and Chromium can reach nothing else. LOGS.json is a list of objects with "text"; without it the logs are the
healthy and the cancelled ones of the tests, and examples of signatures. The command line runs in this process, with the
options that the page sends.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "reports")]

import browser  # noqa: E402

from dsrun.cli import main as command_line  # noqa: E402
from dsrun.config.schemas import schema  # noqa: E402

PAGE = "howto/in-the-browser.html"
ALONE = ("--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",)
"""Chromium's flag for a browser that reaches this machine only."""
FOR_TRAINING: tuple[Mapping[str, Any], ...] = (
    {"gpus": 1}, {"gpus": 4, "seq_len": 2048}, {"gpus": 8, "nodes": 2, "host_memory": "512GiB"},
    {"gpus": 2, "method": "lora"}, {"gpus": 8, "layouts": True, "seq_len": 1024}, {"purpose": "inference"},
)  # fmt: skip
ASK = """
const [requests, done] = arguments;
(async () => {
  const answers = [];
  for (const request of requests) {
    const began = performance.now();
    let answer;
    try { answer = await window.dsrunChecker.ask(request); } catch (error) { answer = {failure: error.message}; }
    answers.push([answer, (performance.now() - began) / 1000]);
  }
  done(JSON.stringify(answers));
})();
"""


@dataclass
class Group:
    """Requests of one kind with the command's words for each, and what came of them."""

    title: str
    cases: list[tuple[dict[str, Any], list[str], dict[str, str]]]
    """The page's request, the command's words, and the files that it needs."""
    equal: int = 0
    refused: int = 0
    """How many both refuse, with the same words."""
    different: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Recording(SimpleHTTPRequestHandler):
    """A server of files that keeps what it was asked for."""

    asked: list[tuple[str, str]]

    def log_message(self, *_: Any) -> None:
        self.asked.append((self.command, self.path))


@contextlib.contextmanager
def served(site: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The site's address, below a path, and the requests that it got."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "below").symlink_to(site.resolve(), target_is_directory=True)
        handler = type("Handler", (Recording,), {"asked": []})
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=folder))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/below", handler.asked
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def configs(count: int) -> Group:
    """Known configs, whose trainers and worlds differ: JSON, and every tenth one an accelerate YAML that holds it."""
    known = [
        json.loads(line)
        for name in ("wrong", "tricky")
        for line in (ROOT / "tests/config/known" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    files = [json.dumps(row["config"], indent=2) for row in known if isinstance(row.get("config"), dict)]
    files += [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests/examples").rglob("*.json"))]
    releases = [schema.name_of(schema.nearest(version)) for version in schema.versions()]
    draw = random.Random(0)
    cases = []
    for number, config in enumerate(draw.sample(files, min(count, len(files)))):
        name, text = "config.json", config
        if number % 10 == 9:
            name, text = (
                "launch.yaml",
                f"distributed_type: DEEPSPEED\ndeepspeed_config: {json.dumps(config)}\n",
            )
        version = draw.choice(releases) if number % 2 else releases[-1]
        request = {
            "command": "validate",
            "text": text,
            "name": name,
            "deepspeed_version": version,
            "level": "note",
        }
        words = ["validate", name, "--json", "--deepspeed-version", version, "--level", "note"]
        if number % 3 == 0:
            request |= {"world_size": 8, "gpu": "v100-32g"}
            words += ["--world-size", "8", "--gpu", "v100-32g"]
        cases.append((request, words, {name: text}))
    return Group("configs", cases)


def plans(count: int) -> Group:
    """Plans of models drawn from the catalogue, for cards drawn from it, one kind of question after the other."""
    from dsrun import catalog
    from dsrun.models.model_files import list_models

    names = [model.name for model in list_models([])]
    cards = sorted(catalog.files("presets/gpus"))
    draw = random.Random(0)
    cases = []
    for number in range(count):
        model, options = draw.choice(names), dict(FOR_TRAINING[number % len(FOR_TRAINING)])
        options["gpu"] = draw.choice(cards)
        request: dict[str, Any] = {"command": "plan", "model": model, **options}
        words = ["plan", model, "--json"]
        if "purpose" not in options:
            request["trace"] = False
            words.append("--no-trace")
        for name, value in options.items():
            flag = "--for" if name == "purpose" else "--" + name.replace("_", "-")
            words += [flag] if value is True else [flag, str(value)]
        cases.append((request, words, {}))
    return Group("plans", cases)


def logs(texts: Sequence[str]) -> Group:
    return Group(
        "logs",
        [
            ({"command": "diagnose", "texts": [text]}, ["diagnose", "log", "--json"], {"log": text})
            for text in texts
        ],
    )


def names(count: int) -> Group:
    """Rules, keys and signatures, and names that nothing has."""
    from dsrun.config.rules import find_rules
    from dsrun.jobs.diagnosis.signatures import find_signatures

    known = [*(rule.id for rule in find_rules()), *schema.load().paths, *find_signatures()]
    drawn = [*random.Random(0).sample(known, count - 2), "DS999", "zero_optimisation.stage"]
    return Group(
        "names",
        [({"command": "explain", "name": name}, ["explain", name, "--json"], {}) for name in drawn],
    )


def example_logs(count: int) -> list[str]:
    """The whole logs that the tests have, and examples of signatures."""
    from dsrun.jobs.diagnosis.signatures import find_signatures

    whole = sorted((ROOT / "tests/jobs/diagnosis/peaceful").glob("*.log"))
    examples = [example for signature in find_signatures().values() for example in signature.examples]
    texts = [path.read_text(encoding="utf-8") for path in whole]
    return texts + random.Random(0).sample(examples, count - len(texts))


def said(words: Sequence[str], files: Mapping[str, str]) -> tuple[Any, str]:
    """What the command prints, in a folder with these files: the JSON, or None, and its other words."""
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        os.chdir(folder)
        try:
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                contextlib.suppress(SystemExit),
            ):
                command_line(list(words))
        finally:
            os.chdir(before)
    return (json.loads(out.getvalue()) if out.getvalue() else None), err.getvalue()


def compare(driver: Any, group: Group) -> None:
    """Ask the page and the command line for each case of a group, and count."""
    answers = json.loads(driver.execute_async_script(ASK, [request for request, _, _ in group.cases]))
    for (_, words, files), (answer, seconds) in zip(group.cases, answers, strict=True):
        value, err = said(words, files)
        group.seconds.append(seconds)
        problems = answer.get("problems")
        if value is not None and answer.get("value") == value:
            group.equal += 1
        elif (
            value is None
            and problems
            and all(" ".join(row["what"].split()) in " ".join(err.split()) for row in problems)
        ):
            group.refused += 1
        else:
            where = first_difference(answer.get("value"), value)
            group.different.append(f"{' '.join(words)}: {where or json.dumps(answer)[:300]} {err[:300]}")


def first_difference(left: Any, right: Any, path: str = "$") -> str:
    """The path of the first place where two JSON values differ, with both; empty where they are equal."""
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        pairs = [(left[key], right[key], f"{path}.{key}") for key in left]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = [
            (one, other, f"{path}[{place}]")
            for place, (one, other) in enumerate(zip(left, right, strict=True))
        ]
    else:
        return "" if left == right else f"{path}: {json.dumps(left)[:200]} and {json.dumps(right)[:200]}"
    return next(filter(None, (first_difference(*pair) for pair in pairs)), "")


def ready(driver: Any, address: str, page: str = PAGE) -> float:
    """Open the page and start its Python; returns the seconds that took."""
    driver.get(f"{address}/{page}")
    browser_waits(driver, "return typeof window.dsrunChecker === 'object'")
    began = time.monotonic()
    ((answer, _),) = json.loads(driver.execute_async_script(ASK, [{"command": "explain", "name": "DS203"}]))
    assert answer.get("value"), answer
    return time.monotonic() - began


def browser_waits(driver: Any, condition: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, browser.PATIENCE_S).until(lambda opened: opened.execute_script(condition))


def press_example(driver: Any, command: str) -> str:
    """Choose a tab, press its example, and wait; returns what the reader sees."""
    driver.execute_script(f"document.getElementById('tab-{command}').click()")
    driver.execute_script(f"document.querySelector('#panel-{command} [data-example]').click()")
    browser_waits(
        driver, "return document.getElementById('stop').hidden && !document.getElementById('results').hidden"
    )
    return str(driver.execute_script("return document.getElementById('results').innerText"))


def pictures(address: str, folder: Path) -> None:
    """Each tab with its example, light, dark, narrow and in Chinese."""
    folder.mkdir(parents=True, exist_ok=True)
    looks = {
        "light": ((1280, 1100), False, PAGE),
        "dark": ((1280, 1100), True, PAGE),
        "narrow": ((420, 1300), False, PAGE),
        "chinese": ((1280, 1100), False, f"zh/{PAGE}"),
    }
    for look, (size, dark, page) in looks.items():
        with browser.opened(size, dark=dark, more_flags=ALONE) as driver:
            driver.get(f"{address}/{page}")
            for command in ("validate", "plan", "diagnose", "explain"):
                press_example(driver, command)
                driver.execute_script("window.scrollTo(0, document.getElementById('checker').offsetTop - 70)")
                driver.save_screenshot(str(folder / f"{look}-{command}.png"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--configs", type=int, default=200)
    parser.add_argument("--plans", type=int, default=50)
    parser.add_argument("--names", type=int, default=40)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    texts = (
        [row["text"] for row in json.loads(given.logs.read_text(encoding="utf-8"))]
        if given.logs
        else example_logs(46)
    )
    groups = [configs(given.configs), plans(given.plans), logs(texts), names(given.names)]
    with served(given.site) as (address, asked):
        with isolated(), browser.opened(more_flags=ALONE) as driver:
            start = ready(driver, address)
            for group in groups:
                compare(driver, group)
            version = driver.capabilities["browserVersion"]
        if given.pictures:
            pictures(address, given.pictures)
    text = report(
        groups,
        start,
        version,
        (f"{len(texts)} real ones" if given.logs else "whole ones of the tests, and examples of signatures"),
    )
    print(text)
    for group in groups:
        print(*group.different[:5], sep="\n")
    methods = {method for method, _ in asked}
    print(f"{len(asked)} requests of the page: {methods}")
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    return int(any(group.different for group in groups) or methods != {"GET"})


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """A home without settings, runs or calibrations, and English, as the page has them."""
    kept = dict(os.environ)
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(
            HOME=home, XDG_CONFIG_HOME=home, XDG_CACHE_HOME=home, XDG_DATA_HOME=home, LC_ALL="en_US.UTF-8"
        )
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(kept)


def report(groups: Sequence[Group], start: float, version: str, kind: str) -> str:
    """The page of the comparison."""
    rows = "".join(
        f"| {group.title} | {len(group.cases)} | {group.equal} | {group.refused} "
        f"| {len(group.different)} | {statistics.median(group.seconds):.2f} | {max(group.seconds):.2f} |\n"
        for group in groups
    )
    python = platform.python_version()
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    return f"""# The browser's page beside the commands

Made by `python bench/browser_page.py` on {today}: [the page](../howto/in-the-browser.md) in Chromium {version},
served below a path, with no way to another host, against the command line with `--json` and the same options on Python
{python}. Equal means the same JSON, key by key and number by number. A plan's numbers have 12 digits: what comes after
them depends on a machine's libm, and the browser has another one. Refused means that neither has JSON and the page's
words are the command's.

| | asked | equal JSON | refused alike | different | median seconds in the browser | most |
| --- | --- | --- | --- | --- | --- | --- |
{rows}
The logs are {kind}.
Every tenth config is an accelerate YAML, half of them are judged for a drawn release of
DeepSpeed, a third for 8 V100s. Plans are by formula on both sides (`--no-trace`), of drawn models and cards: presets,
LoRA, several nodes, layouts and inference. Python and dsrun started in {start:.1f} s, on two cores, from this machine's
disk. The full lane repeats it.
"""


if __name__ == "__main__":
    raise SystemExit(main())

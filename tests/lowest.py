"""pip's constraints for an environment of other versions: those that setup.cfg allows at the least, or named ones.

    python3 tests/lowest.py lowest
    python3 tests/lowest.py torch==2.11.0,transformers==5.17.0

`bash tests/run.sh --versions ...` installs what this prints. setup.cfg alone has the bounds.
"""

from __future__ import annotations

import configparser
import re
import sys
from pathlib import Path

SETUP = Path(__file__).resolve().parents[1] / "setup.cfg"
EXTRAS = ("train", "board", "logs")
"""What users install beside dsrun itself. `gpu` needs CUDA; what tests need alone isn't held to its bounds."""
LOWEST = "lowest"
BOUND = re.compile(r"(?P<name>[\w.-]+)\s*>=\s*(?P<version>[\w.]+)(?:\s*,[^;]*)?(?P<marker>\s*;.*)?")
GIVEN = re.compile(r"\s*(?P<name>[\w.-]+?)\s*==?\s*(?P<version>\d[\w.+!-]*)\s*")


def bounds(setup: Path = SETUP) -> dict[str, tuple[str, str]]:
    """Name -> lowest version and marker of each package that dsrun may be installed with."""
    config = configparser.ConfigParser()
    config.read(setup, encoding="utf-8")
    texts = [
        config["options"]["install_requires"],
        *(config["options.extras_require"][name] for name in EXTRAS),
    ]
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip() and line[:1] != "#"]
    matches = {line: BOUND.fullmatch(line) for line in lines}
    if without := [line for line, match in matches.items() if match is None]:
        raise SystemExit(f"{setup.name}: no lower bound: {', '.join(without)}")
    return {match["name"]: (match["version"], match["marker"] or "") for match in matches.values() if match}


def constraints(wanted: str, setup: Path = SETUP) -> list[str]:
    """Lines for `pip install -c`. wanted: "lowest", or NAME==VERSION with commas between. Exits where it is neither."""
    known = bounds(setup)
    if wanted == LOWEST:
        return [f"{name}=={version}{marker}" for name, (version, marker) in known.items()]
    lines = []
    for text in wanted.split(","):
        match = GIVEN.fullmatch(text)
        if match is None:
            raise SystemExit(f"--versions {text}: neither {LOWEST} nor NAME==VERSION")
        if match["name"] not in known:
            raise SystemExit(f"--versions {text}: {setup.name} doesn't name it; {', '.join(sorted(known))}")
        lines.append(f"{match['name']}=={match['version']}")
    return lines


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(*constraints(sys.argv[1]), sep="\n")

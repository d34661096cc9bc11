"""Record the README's terminal: run validate, plan and finetune for real, and draw what they print as an SVG.

    python docs/record.py            docs/terminal.svg; finetune trains for a minute or two on CPUs

docs/generate.py renews what validate and plan print, and keeps the fine-tune that was recorded. The scenes follow one
another; where animations are off, the first one stands. The picture needs no script, no font and no network.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from html import escape, unescape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from dsrun.cli.output.columns import folded  # noqa: E402

PICTURE = ROOT / "docs" / "terminal.svg"
CONFIG = """{
  "train_batch_size": 15,
  "gradient_cliping": 0.5,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "offload_param": {"device": "cpu"}
  }
}
"""
COMMANDS = (
    "dsrun validate ds_config.json --world-size 2 --gpu v100-32g",
    "dsrun plan chatglm2-6b --gpu v100-32g --gpus 2 --host-memory 256GiB",
    "dsrun finetune chatglm2-tiny",
)
CHOSEN_PRESETS = ("zero2", "zero3", "zero2-offload", "zero3-offload")
"""Rows of the plans in the documentation; "..." stands for the others, so that a new preset changes no table."""
COLUMNS, LINES = 100, 27
SECONDS = 8
"""How long a scene stands."""
LETTER, LINE, MARGIN, BAR = 7.2, 17, 16, 34
"""Pixels: a letter's width at 12 px, a line's height, what is around the text, the window's bar."""
HEAD, TAIL = 3, 17
"""Lines of a long output that are shown, from its beginning and its end."""
COLOURS = (
    (r"\b(error(?=:)|out of memory)\b", "#ff7b72"),
    (r"\b(warning(?=:)|tight)\b", "#e3b341"),
    (r"\bfits\b", "#7ee787"),
)
"""As validate and plan colour them on a terminal."""
STYLE = """
  text {{ font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
  text {{ fill: #e6edf3; white-space: pre; }}
  .prompt {{ fill: #7ee787; }} .command {{ font-weight: bold; }}
  .scene {{ opacity: 0; animation: turn {total}s step-end infinite; }} .first {{ opacity: 1; }}
  @keyframes turn {{ 0% {{ opacity: 1; }} {share:.3f}% {{ opacity: 0; }} 100% {{ opacity: 0; }} }}
  @media (prefers-reduced-motion: reduce) {{ .scene {{ animation: none; }} }}
"""


def with_chosen_presets(words: list[str]) -> list[str]:
    """A command's words; those of `dsrun plan` for a training with CHOSEN_PRESETS, if they name none."""
    if "plan" not in words or {"--preset", "--for", "--layouts"} & {*words}:
        return words
    return [*words, *(word for preset in CHOSEN_PRESETS for word in ("--preset", preset))]


def with_others(text: str) -> str:
    """A plan's table with "..." for the presets that it leaves out; any other text as it is."""
    return re.sub(r"((?:^|\n)─+  ─+.*\n(?:.+\n)+)", r"\1...\n", text, count=1)


def printed(command: str, folder: Path) -> list[str]:
    """The output of a command on a terminal of COLUMNS, stdout and stderr together."""
    done = subprocess.run(
        [sys.executable, "-m", *with_chosen_presets(shlex.split(command))],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS), "XDG_CONFIG_HOME": str(folder)},
    )  # fmt: skip
    if done.returncode not in (0, 1):  # 1: validate found errors
        raise RuntimeError(f"{command}: {done.stdout}")
    text = done.stdout.replace(f"{folder}/", ".../").replace(sys.executable, "python")
    return with_others(text).splitlines()


def shortened(lines: Sequence[str]) -> list[str]:
    """At most LINES of an output; a line wider than COLUMNS goes on in the next, as dsrun writes it on a terminal."""
    if len(lines) > LINES:
        lines = [*lines[:HEAD], "...", *lines[-TAIL:]]
    return [part for line in lines for part in folded(line, COLUMNS, 4).split("\n")]


def coloured(line: str) -> str:
    """A line as tspans."""
    marked = escape(line, quote=False)
    for pattern, colour in COLOURS:
        marked = re.sub(
            pattern, lambda hit, colour=colour: f'<tspan fill="{colour}">{hit[0]}</tspan>', marked
        )
    return marked


def scene(number: int, command: str, lines: Sequence[str]) -> Iterator[str]:
    """A command and its output, shown in its turn."""
    first = " first" if number == 0 else ""
    yield f'<g class="scene{first}" style="animation-delay: {number * SECONDS}s">'
    shown = f'<tspan class="prompt">$</tspan> <tspan class="command">{escape(command)}</tspan>'
    for row, text in enumerate([shown, *map(coloured, lines)]):
        yield f'<text x="{MARGIN}" y="{BAR + MARGIN + row * LINE}">{text}</text>'
    yield "</g>"


def drawn(scenes: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The picture."""
    rows = 1 + max(len(lines) for _, lines in scenes)
    wide = round(COLUMNS * LETTER + 2 * MARGIN)
    high = BAR + rows * LINE + MARGIN
    style = STYLE.format(total=SECONDS * len(scenes), share=100 / len(scenes))
    dots = "".join(
        f'<circle cx="{MARGIN + 4 + 18 * place}" cy="{BAR / 2:g}" r="5.5" fill="{colour}"/>'
        for place, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">',
        "<title>dsrun validate, plan and finetune in a terminal</title>",
        f"<style>{style}</style>",
        f'<rect width="{wide}" height="{high}" rx="8" fill="#161b22"/>{dots}',
        *(line for number, one in enumerate(scenes) for line in scene(number, *one)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def shown() -> dict[str, list[str]]:
    """What the picture shows now: command -> lines."""
    groups = re.findall(r"<g .*?</g>", PICTURE.read_text(encoding="utf-8"), re.DOTALL)
    found = {}
    for group in groups:
        texts = re.findall(r"<text [^>]*>(.*?)</text>", group)
        command, *lines = (unescape(re.sub(r"<[^>]+>", "", text)) for text in texts)
        found[command.removeprefix("$ ")] = lines
    return found


def renewed(kept: Mapping[str, Sequence[str]]) -> str:
    """The picture with what the commands print now. kept: command -> lines, of those that are not run again."""
    with tempfile.TemporaryDirectory(prefix="dsrun-") as name:
        folder = Path(name)
        (folder / "ds_config.json").write_text(CONFIG, encoding="utf-8")
        return drawn(
            [(command, kept.get(command) or shortened(printed(command, folder))) for command in COMMANDS]
        )


def current() -> str:
    """The picture as it has to be, with the fine-tune that was recorded."""
    return renewed({command: lines for command, lines in shown().items() if "finetune" in command})


if __name__ == "__main__":
    PICTURE.write_text(renewed({}), encoding="utf-8")

"""Texts that nobody means well with: a finding or a clear error each time, and never an internal error.

DSRUN_FUZZ=10000 python -m pytest tests/config/test_hostile.py    more of the random texts (seeds 0, 1, 2, ...)
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from running import examples

from dsrun.config.reading.document import read
from dsrun.config.rules import Setting
from dsrun.config.schemas import schema
from dsrun.config.validation import edits, report
from dsrun.config.validation.validate import RuleSelection, apply_fixes, validate

COUNT = int(os.environ.get("DSRUN_FUZZ", examples(600)))
EXAMPLES = Path(__file__).parents[1] / "examples"
SEEDS = [path.read_bytes() for path in sorted(EXAMPLES.rglob("*.json"))]
KEYS = schema.load().paths
TOKENS = [
    *(b"{ } [ ] : , \" ' ''' // /* */ # \\ \\u \\ud800 NaN -Infinity 1e999 True None null".split()),
    *(b'"auto" 0x1f 1_000 .5 -0 "" "a.b" "stage" "zero_optimization" "_dsrun_ignore" {"": [[ {"a":'.split()),
    *(
        b"\n",
        b"\r",
        b"\t",
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\xf0\x9f\xa6\x99",
        b"\xe2\x80\xa8",
        b"\xed\xa0\x80",
    ),
    *(b"9" * 400, b"9" * 5000),
]
ODD_KEYS = [
    "",
    ".",
    "a.b",
    "\n",
    "x",
    "stge",
    "zero_optimization.stge",
    "\ud800",
    "_dsrun_ignore",
    "é",
    "k" * 300,
]
VALUES = [
    *(None, True, False, 0, -1, 1, 2, 3, 16, 2**63, 10**399, 1.5, 1e308, -0.0),
    *("", "auto", "true", "3", "cpu", "nvme", "2e8", "1e400", "9" * 5000, "\ud800", "a\nb", "\u202e", "/tmp"),
    *([], [0], ["auto"], [[1, 2], {}], {}, {"a": 1}, {"stage": 3}, {"": {"": 0}}, {"device": "cpu"}),
]
SETTINGS = [
    Setting(),
    Setting(world_size=8, nodes=2, device="cuda", bf16=False),
    Setting(target="hf", trainer={"bf16": True, "learning_rate": 1e-4}, world_size=4),
    Setting(target="accelerate"),
    Setting(target="lightning"),
    Setting(version=(0, 14)),
    Setting(upgrade_from=(0, 9)),
]


def mutated(draw: random.Random) -> bytes:
    """A config with a few bytes put in, taken out, doubled or brought from elsewhere."""
    text = draw.choice(SEEDS)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(text) + 1)
        end = min(len(text), at + draw.choice((0, 1, 2, 5, 30)))
        other = draw.choice(SEEDS)
        start = draw.randrange(len(other))
        new = (draw.choice(TOKENS), draw.randbytes(2), other[start : start + 60], text[at:end] * 2, b"")
        text = text[:at] + draw.choice(new) + text[end:]
    return text[: draw.randrange(len(text) + 1)] if draw.random() < 0.1 else text


def altered(draw: random.Random) -> bytes:
    """A config with values that don't belong there, under known and unknown keys."""
    config = json.loads(draw.choice(SEEDS))
    for _ in range(draw.randint(1, 5)):
        path = draw.choice(KEYS if draw.random() < 0.8 else ODD_KEYS)
        *sections, last = path.split(".")
        box = config
        for key in sections:
            box[key] = box[key] if isinstance(box.get(key), dict) else {}
            box = box[key]
        box[last] = draw.choice(VALUES)
    return json.dumps(config, indent=draw.choice((None, 2))).encode()


def soup(draw: random.Random) -> bytes:
    return b"".join(draw.choice(TOKENS) for _ in range(draw.randint(0, 40)))


def noise(draw: random.Random) -> bytes:
    return draw.randbytes(draw.randint(0, 200))


def survives(data: bytes, setting: Setting, target: str | None = None) -> None:
    """Judged, shown and fixed: findings have places, and the fixed text can be read."""
    result = validate(data, "x.json", setting, target=target)
    assert result.document or {located.finding.rule for located in result.findings} == {"DS020"}
    for located in result.findings:
        assert located.place.line >= 1
        assert located.place.column >= 1
        assert located.finding.message
    shown = {form: write([result]) for form, write in report.FORMATS.items()}
    assert "\x1b" not in shown["text"]
    shown["text"].encode()
    shown["github"].encode()
    assert len(json.loads(shown["json"])["findings"]) == len(json.loads(shown["sarif"])["runs"][0]["results"])
    after = apply_fixes(result, setting, RuleSelection(), unsafe=True)
    if result.document is not None:
        assert after.document is not None
        after.document.text.encode()
        edits.patch(result.document.text, after.document.text, "x.json").encode()


def test_random_texts():
    for seed in range(COUNT):
        draw = random.Random(seed)
        data = draw.choice((mutated, mutated, altered, altered, altered, soup, noise))(draw)
        setting = SETTINGS[seed % len(SETTINGS)]
        try:
            survives(data, setting, None if draw.random() < 0.5 else setting.target)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {data[:2000]!r}") from error


def dumped(**given: object) -> bytes:
    return json.dumps({"train_micro_batch_size_per_gpu": 1, **given}).encode()


MANY = examples(20_000)
LONG = "x" * 1_000_000
HOSTILE = {
    "empty": b"",
    "blanks": b" \n\t\n",
    "deep lists": b"[" * 100_000,
    "deep sections": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "as deep as can be": b'{"a":' * 99 + b"1" + b"}" * 99,
    "too large": b'{"a": "' + b"x" * 5_000_000 + b'"}',
    "NUL": b'{"a": "\0"}',
    "numbers that are none": b'{"train_batch_size": NaN, "gradient_clipping": -Infinity, "steps_per_print": 1e999}',
    "5000 digits": b'{"train_batch_size": ' + b"9" * 5000 + b"}",
    "huge integers": dumped(
        train_batch_size=10**399,
        gradient_clipping=10**399,
        fp16={
            "enabled": True,
            "min_loss_scale": 10**399,
            "loss_scale": 10**399,
            "initial_scale_power": 10**399,
        },
        zero_optimization={"stage": 3, "reduce_bucket_size": 10**399, "sub_group_size": -(10**399)},
    ),
    "mark": b'\xef\xbb\xbf{"train_batch_size": 1}',
    "UTF-16": '{"train_batch_size": 1}'.encode("utf-16"),
    "UTF-16 without a mark": '{"train_batch_size": 1}'.encode("utf-16-le"),
    "Latin-1": b'{"train_batch_size": "\xe9"}',
    "odd keys": dumped(
        **{
            "a.b": 1,
            "zero_optimization.stage": 3,
            "": 1,
            "\n::error::x": 1,
            "\x1b[31mred": 1,
            "😀": 2,
            "\ud800": 3,
        },
        zero_optimization={"": {}, ".": 1, "\udfff": 2, "a\nb": "\0", "\u202e": 1},
        fp16={"enabled": "\ud83d"},
    ),
    "the same key": b"{" + b", ".join([b'"a": 1'] * MANY) + b"}",
    "unknown keys": dumped(**{f"key_{index}": index for index in range(MANY)}),
    "unknown keys of ZeRO": dumped(zero_optimization={f"stage_{index}": index for index in range(MANY)}),
    "autos": dumped(**{f"key_{index}": "auto" for index in range(MANY)}),
    "ignored": dumped(_dsrun_ignore=[f"DS{index}" for index in range(MANY)]),
    "too many values": dumped(**{f"key_{index}": index for index in range(60_000)}),
    "a long key": dumped(**{LONG: 1}),
    "a long key of ZeRO": dumped(zero_optimization={LONG: 1}),
    "a long value": dumped(zero_optimization={"stage": LONG}),
    "a list for a number": dumped(train_batch_size=[1] * MANY),
    "comments": b"// x\n" * 20_000 + b"{}",
    "commas": b"[" + b"," * 500_000,
    "backslashes": b'{"a": "' + b"\\" * 500_000 + b'"}',
    "half surrogates": b'{"' + b"\\ud800" * 100_000 + b'": 1}',
    "ignore what is no list": dumped(_dsrun_ignore={"DS001": {"a": 1}}),
    "no object": b'[{"train_batch_size": 1}]',
}


@pytest.mark.parametrize("target", ["deepspeed", "hf"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name, target):
    survives(HOSTILE[name], Setting(), target)


def test_findings_stay_on_their_lines():
    result = validate(HOSTILE["odd keys"], "a\nb.json", Setting())
    heads = [line for line in report.text([result]).splitlines() if line[:1] not in (" ", "")]
    assert len({located.finding.rule for located in result.findings}) <= len(heads) <= len(result.findings)
    assert all(line.startswith("a\\nb.json:") for line in heads)
    assert all(line.startswith("::") for line in report.github([result]).splitlines())
    assert sum("::error::x" in line for line in report.github([result]).splitlines()) <= 2


def test_the_document_is_left_alone():
    data = dumped(zero_optimization={"stge": 2}, **{f"key_{index}": index for index in range(MANY * 2)})
    result = validate(data, "x.json", Setting())
    after = apply_fixes(result, Setting(), RuleSelection(), unsafe=True)
    assert after.document is not None
    assert read(after.document.text, "x.json", "json").value == json.loads(after.document.text)

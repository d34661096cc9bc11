"""The names and numbers that a line of a log quotes, each with what it is, so that the answer can give them.

"A package is too old" helps nobody who isn't told which; patterns of signatures can't all have a group for each name,
so the line itself is read, by the word before a name or by the name's form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dsrun.host.hiding import without_secrets

MOST_TEXT = 1200
"""Characters of a line that are read."""
MOST_NAMES = 10
LONGEST = 120
"""Longest name that is shown whole, in characters."""
MOST_IN_LIST = 12
"""Names of a list that are shown."""

LABELS = {
    "argument": "argument", "parameter": "parameter", "attribute": "attribute", "column": "column", "key": "key",
    "field": "field", "module": "module", "package": "package", "library": "library", "class": "class",
    "name": "name", "host": "host", "port": "port", "device": "device", "file": "file", "directory": "folder",
    "folder": "folder", "path": "path", "option": "option", "extension": "extension", "operator": "operator",
    "symbol": "symbol", "version": "version", "type": "type", "split": "split", "config": "config",
    "model": "model", "user": "user", "partition": "partition", "variable": "variable", "token": "token",
    "shape": "shape", "dtype": "dtype", "process": "process", "rank": "rank", "row": "row", "line": "line",
}  # fmt: skip
"""Words before a name -> what it is."""
LABELS_ZH = {
    "argument": "参数", "parameter": "参数", "attribute": "属性", "column": "列", "key": "键", "field": "字段",
    "module": "模块", "package": "包", "library": "库", "class": "类", "name": "名字", "host": "主机", "port": "端口",
    "device": "设备", "file": "文件", "folder": "目录", "path": "路径", "option": "选项", "extension": "扩展",
    "operator": "算子", "symbol": "符号", "version": "版本", "type": "类型", "split": "split", "config": "配置",
    "model": "模型", "user": "用户", "partition": "分区", "variable": "变量", "token": "token", "shape": "形状",
    "dtype": "dtype", "process": "进程", "rank": "进程", "row": "行", "line": "行", "address": "地址", "url": "地址",
    "from": "从", "call": "",
    "size": "大小", "architecture": "架构", "release": "版本", "list": "列表", "number": "数", "quoted": "",
}  # fmt: skip

_QUOTED = r"(?P<quote>['\"`])(?P<value>(?:(?!(?P=quote))[^\n]){1,300})(?P=quote)"
LABELLED = re.compile(
    rf"(?i)(?<![\w-])(?P<label>{'|'.join(LABELS)})s?(?: names?| named)?(?:[:=]?[ (]{{1,2}}|=){_QUOTED}"
)
_FORMS = {
    "list": r"(?<!\w)\[(?:['\"][^'\"\n]{1,80}['\"](?:, ?)?){1,60}\]|\{'[^{}\n]{1,400}'\}",
    "url": r"\w{2,12}://[^\s'\"`<>)\]]{3,200}",
    "release": r"\b[A-Za-z][\w-]{1,40}\s?(?:[<>~=!]=|[<>])\s?v?\d[\w.*]{0,20}(?:,\s?[<>=!~]{1,2}\s?\d[\w.]{0,20})?",
    "address": r"(?<![\w./])(?:\d{1,3}(?:\.\d{1,3}){3}|\[?[A-Za-z][\w-]{1,60}(?:\.[\w-]{1,60}){0,6}\]?)(?::|, )"
    r"\d{4,5}\b(?!\.)|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])",
    "path": r"(?<![\w:/.])(?:~|\.{1,2})?/[\w.@+-]{1,80}(?:/[\w.@+-]{1,80}){1,20}|\b[A-Za-z]:\\[^\s'\"<>|]{2,200}",
    "file": r"(?<![\w./\\-])[\w-][\w.-]{0,80}\.(?:json|jsonl|ya?ml|toml|py|sh|txt|csv|parquet|arrow|bin|pt|pth|ckpt"
    r"|safetensors|model|so|yaml)\b(?![\w./(:])",
    "size": r"(?<![\w.-])\d{1,9}(?:\.\d{1,4})?(?: ?/ ?\d{1,9}(?:\.\d{1,4})?)? ?(?:[KMGT]i?B|bytes)\b",
    "shape": r"(?:torch\.Size\()?\[\d{1,12}(?:, ?-?\d{1,12}){0,8}\]\)?"
    r"|\(\d{1,12}x\d{1,12}(?: and \d{1,12}x\d{1,12})?\)",
    "dtype": r"\bc10::\w{2,20}(?: !=? \w{2,20})?|(?:(?<=scalar type )|(?<=found )|(?<=got ))"
    r"(?:torch\.)?(?:Half|Float|BFloat16|Double|Byte|Long|Int|Float8_\w{4,8}|u?int\d{1,2}|b?float\d{1,2})\b",
    "device": r"\b(?:cuda|npu|xpu|hpu|mps):\d{1,3}\b",
    "architecture": r"\b(?:sm|compute)_\d{2,3}a?\b",
    "version": r"(?<![\w.])v?\d{1,4}\.\d{1,4}\.\d{1,4}(?:[.+][\w.]{1,20})?(?![\w.])",
    "name": r"(?<![\w./])[A-Z][A-Z\d]{1,20}(?:_[A-Z\d]{1,30}){1,8}\b|(?<![\w./-])--[a-z][\w-]{2,40}",
    "number": r"(?<![\w.:x-])-?\d{2,15}(?:\.\d{1,6})?(?![\w:.]|\.\d)",
}
_BY_FORM = {kind: re.compile(f"(?P<value>{form})") for kind, form in _FORMS.items()}
_COUNTED = re.compile(
    r"(?i)(?<![\w/.-])(?P<label>port|rank|row|line|column|char|size|capability|utilization|device|error code|exit code"
    r"|exitcode|return code|errno|error|status|dimension|dim|version|layer|epoch|step)s?\]? ?(?:of )?[:=#]? ?\(?"
    r"(?P<value>-?\d{1,12}(?:\.\d{1,6}){0,3})(?![\w./]\w|\.?\d)"
)
"""A number with the word that says what it counts."""
_IN_BRACKETS = re.compile(r"(?i)\b(?P<label>column|field|key|file|path|shape)s?\((?P<value>[^()\n]{1,120})\)")
_CALLED = re.compile(
    r"(?i)(?<![\w-])(?P<label>hca|nic|interface|device|undefined symbol|host not found|resolve host|key)(?:name)?"
    r"(?: in [\w ]{1,40})?:? (?P<value>(?=[\w.-]{0,100}[\d_.])[A-Za-z_][\w.-]{2,200}(?<!\.))(?=[\s:,;.)]|$)"
)
"""A name without quotes, behind a word or two that say what it is; one with a digit, a bar or a point in it."""
_STARTED = re.compile(r"\b(?P<label>execve|execvp|chdir)\(\): (?P<value>[^\s:]{1,200}): ")
"""What a batch system could not start, or not go to."""
_FROM_TO = re.compile(r"\bfrom (?P<value>[\w.]{1,40} to [\w.]{1,40})\b")
_ASSIGNED = re.compile(
    r"(?<![\w.])(?P<label>[A-Za-z_]\w{1,40})(?:\(ms\))?=(?P<value>[\w./:+-]{0,79}[\w/+-])(?=[.:]?(?:[\s,;)\]]|$))"
)
"""A name with its value, as programs write their settings."""
FORMS = {
    "bracketed": _IN_BRACKETS,
    "counted": _COUNTED,
    "called": _CALLED,
    "started": _STARTED,
    "list": _BY_FORM["list"],
    "url": _BY_FORM["url"],
    "model": re.compile(r"(?<![\w./-])(?P<value>[\w.-]{1,96}(?:/[\w.-]{1,96})?)(?= is not a local folder)"),
    "quoted": re.compile(rf"(?<![\w'\"`]){_QUOTED}"),
    "from": _FROM_TO,
    **{kind: form for kind, form in _BY_FORM.items() if kind != "number"},
    "assigned": _ASSIGNED,
    "call": re.compile(r"(?<![\w.])(?P<value>[A-Za-z_][\w.]{1,120}\(\))"),
    "number": _BY_FORM["number"],
}
"""What a name is -> its form, where no word says it; the first that fits a place counts."""
WITHOUT_LABEL = ("quoted", "list", "number", "name", "call")
NOT_NAMES = re.compile(
    r"^(?:0x[\da-f]+|torch\.Tensor|int|str|float|dict|list|tuple|bool|None|True|False|[^\w<]{1,8}|\.{2,3}"
    r"|https?://\S{1,60}/docs/\S*)$"
)
"""Quoted words that name nothing of the user's."""
PLACE_IN_CODE = re.compile(
    r"\b\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d(?:\.\d{3}){0,2}|\[PID: ?\d{1,9}\]"
    r"|[\w./-]{1,80}\.(?:cpp|cc|cu|cuh|h|hpp|py|rs|go):\d{1,6}|\(pid:? ?\d{1,9}\)|pid=\d{1,9}|0x[\da-fA-F]{4,20}"
)
CUT_LIST = re.compile(r"[\[({](?:['\"][^'\"\n]{1,80}['\"](?:, ?|: ?)){3,400}[^\])}\n]{0,120}$")
"""A list whose end was cut off: what stands in its quotation marks, and between them, is no name by itself."""
FRAGMENT = re.compile(r"^[\s,;:.)\]}]|[,;:(\[{]$")
"""A text between two quotations, as a line that is cut leaves it."""
LIST_ITEM = re.compile(r"['\"]([^'\"\n]{1,80})['\"]")
MISSED = re.compile(
    r"(?i)(?:column|key|field|feature|split|argument|option|name|file)s? \(?['\"`]?(?P<name>[\w.-]{1,60})['\"`]? "
    r"(?:is |are |was )?(?:not|n't|isn't|unknown|invalid|missing|doesn't|does not)"
    r"|(?:unknown|invalid|no such|unrecognized|missing) (?:\w{1,20} ){0,2}['\"`](?P<other>[\w.-]{1,60})['\"`]"
)
"""A name that something lacks, of which the same line may list what is there."""
CLOSE = 0.6


class Name(NamedTuple):
    """A name or number in a line."""

    kind: str
    """What it is: a word of LABELS, or the form that it has."""
    value: str


def names_in(text: str) -> list[Name]:
    """The names and numbers that a text quotes, in the order of their places; without secrets."""
    text = PLACE_IN_CODE.sub(_blanks, without_secrets(text)[:MOST_TEXT])
    text = CUT_LIST.sub(_blanks, text)
    taken: list[tuple[int, int, Name]] = []
    for kind, form in (("", LABELLED), *FORMS.items()):
        for hit in form.finditer(text):
            start, end = hit.span()
            if any(start < other_end and other_start < end for other_start, other_end, _ in taken):
                continue
            word = hit.groupdict().get("label")
            label = (
                kind if not word else word if kind == "assigned" else LABELS.get(word.lower(), word.lower())
            )
            value = hit["value"].strip()
            fragment = hit.groupdict().get("quote") and FRAGMENT.search(hit["value"])
            if value and not fragment and not NOT_NAMES.match(value):
                taken.append((start, end, Name(label, value)))
    return list(dict.fromkeys(name for _, _, name in sorted(taken)))


def _blanks(hit: re.Match[str]) -> str:
    return " " * len(hit[0])


def unnamed(names: Iterable[Name], answer: str) -> list[Name]:
    """The names that an answer lacks, the telling ones first: bare numbers only where little else is there."""
    lacking = [name for name in names if not _stands(name.value, answer)]
    lacking = [
        name for name in lacking if not any(name.value in other.value and name != other for other in lacking)
    ]
    ordered = sorted(lacking, key=lambda name: name.kind == "number")
    return ordered[:MOST_NAMES]


def all_in(text: str, answer: str) -> bool:
    """Whether an answer has every name of a text that is more than a number or an address of documentation."""
    return all(_stands(name.value, answer) for name in names_in(text) if name.kind not in ("number", "url"))


def _stands(value: str, answer: str) -> bool:
    """Whether an answer has a name: as a word of its own, not as a part of another."""
    return re.search(rf"(?<![\w.]){re.escape(value)}(?![\w])", answer) is not None


def in_words(names: Sequence[Name], chinese: bool = False) -> str:
    """The names in a sentence; empty for none."""
    if not names:
        return ""
    parts = [_shown(name, chinese) for name in names]
    return f"日志行写明：{'；'.join(parts)}。" if chinese else f"The line names: {', '.join(parts)}."


def _shown(name: Name, chinese: bool) -> str:
    label = LABELS_ZH.get(name.kind, "") if chinese else name.kind
    label = "" if name.kind in WITHOUT_LABEL else f"{label} "
    value = name.value
    if name.kind == "list" and len(items := LIST_ITEM.findall(value)) > MOST_IN_LIST:
        value = f"[{', '.join(items[:MOST_IN_LIST])}, ... {len(items)} in all]"
    return f"{label}{value if len(value) <= LONGEST or name.kind == 'list' else f'{value[:LONGEST]}...'}"


def near(text: str) -> tuple[str, list[str]]:
    """A name that a text says is missing, and those most like it of what the text lists; the best first."""
    hit = MISSED.search(text)
    if not hit:
        return "", []
    from difflib import get_close_matches

    missed = hit["name"] or hit["other"]
    listed = [item for item in LIST_ITEM.findall(text[hit.end() :][: 4 * MOST_TEXT]) if item != missed]
    return missed, get_close_matches(missed, listed, 3, CLOSE)

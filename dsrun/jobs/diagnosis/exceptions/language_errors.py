"""What Python's own exceptions mean, by the code at which they were raised and by whose code that is.

"Correct the script at that line" is said of the user's own code alone: in a trainer's or a library's, the same
exception is a value that it doesn't expect, or a fault of that release.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dsrun.host.hiding import without_secrets
from dsrun.jobs.diagnosis.exceptions import api_history
from dsrun.jobs.diagnosis.exceptions.assertions import Assertion, assertion
from dsrun.jobs.diagnosis.exceptions.log_versions import releases_in
from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine
from dsrun.jobs.diagnosis.reading.owners import LIBRARY, TRAINER, USER
from dsrun.jobs.diagnosis.reading.tracebacks import Frame, RaisedException

NONE_ATTRIBUTE = re.compile(r"^'NoneType' object has no attribute '(?P<name>\w{1,80})'")
NOT_SUCH = re.compile(r"^'(?P<class>\w{1,80})' object is not (?P<how>subscriptable|iterable|callable)")
ATTRIBUTE = re.compile(
    r"^(?:type object )?'(?P<class>[\w.]{1,120})'(?: object)? has no attribute '(?P<name>\w{1,80})'"
)
UNDEFINED = re.compile(r"name '(?P<name>\w{1,80})' is not defined")
UNBOUND = re.compile(
    r"local variable '(?P<name>\w{1,80})' (?:referenced before|where it is not)|cannot access (?:local|free) variable "
    r"'(?P<new>\w{1,80})'"
)
PLAIN_KEY = re.compile(r"^(?:['\"](?P<name>[^'\"\n]{0,80})['\"]|-?\d{1,12}|\([^\n]{0,80}\))\s*$")
"""The message of a KeyError that is the key itself; a longer text is a library's own message."""
BARE_NAME = re.compile(r"^(?P<name>[A-Za-z_]\w{2,80})$")
"""The message of an AttributeError that is the name alone, as torch's modules raise it where one is deleted."""
PLAIN_TYPES = ("str", "int", "float", "bool", "bytes", "dict", "list", "tuple", "set")
"""Python's own types: an object of these where a package asks for an attribute is a value that it was handed."""
DATA_FILE = re.compile(r"(?i)data|preprocess|collat|template|conversation|token|sample|example")
"""Names of files and functions that read training data."""
RECEIVER = r"(?P<what>[A-Za-z_][\w.]{0,80}(?:\[[^\]\n]{0,40}\]|\(\)){0,2})"
LOSS = re.compile(r"(?:^|_|\.|\b)loss\w{0,10}$")


class Told(NamedTuple):
    """An exception of Python's in words: what it is, and what to do; English and Chinese."""

    means: str
    next: str
    means_zh: str
    next_zh: str
    cause: str = ""
    """The class of failures; empty for that of the exception's type."""
    confidence: str = "medium"
    """The least confidence in it."""


def told(raised: RaisedException, lines: Sequence[PeeledLine] = ()) -> Told | None:
    """An exception that Python raised at an expression, in words; None for others, and where no frame tells whose it
    is. lines: the log's, which may show the releases of packages."""
    frame = raised.raiser
    if frame and (asserted := assertion(raised)):
        return _of_assertion(asserted, frame, raised)
    if frame is None or not raised.is_of_language:
        return None
    if frame.owner == USER:
        return _of_user(raised, frame)
    return _of_package(raised, frame, lines) if frame.owner in (TRAINER, LIBRARY) else None


def _of_user(raised: RaisedException, frame: Frame) -> Told | None:
    """One at an expression of the user's own."""
    message = raised.message.split("\n")[0].strip()
    place, code = f"{without_secrets(frame.file)}:{frame.line}", _code(frame)
    if raised.name == "KeyError" and PLAIN_KEY.match(message):
        return _key(message, frame, place, code)
    if hit := NONE_ATTRIBUTE.match(message):
        return _none(hit["name"], frame, place, code)
    if hit := NOT_SUCH.match(message):
        return _not_such(hit["class"], hit["how"], frame, place, code)
    if hit := UNBOUND.search(message):
        name = hit["name"] or hit["new"]
        return Told(
            f"The script uses `{name}` before it has a value: the branch or loop that sets it didn't run.",
            f"In {place} see on which way `{name}` gets its value (an if that wasn't true, a loop over nothing), and "
            "give it one before.",
            f"脚本在 `{name}` 赋值之前使用了它：给它赋值的分支或循环没有执行。",
            f"检查 {place} 之前 `{name}` 在哪个分支赋值，并先给它一个值。",
        )
    if hit := UNDEFINED.search(message):
        return Told(
            f"The script uses `{hit['name']}`, which is defined nowhere.",
            f"Correct the name in {place}, or import or set it before.",
            f"脚本使用了未定义的名字 `{hit['name']}`。",
            f"修改 {place} 中的名字，或先导入、赋值。",
        )
    if hit := ATTRIBUTE.match(message):
        return Told(
            f"The script asks a `{hit['class']}` for `{hit['name']}`, which it doesn't have{code}.",
            f"Correct that line of the script ({place}): is the object the one that is meant there, and the name "
            f"right? `print(type(...), dir(...))` before it shows.",
            f"脚本访问 `{hit['class']}` 没有的 `{hit['name']}`。",
            f"修改脚本的 {place}：对象是否正确、名字是否写对。",
        )
    return None


def _of_assertion(asserted: Assertion, frame: Frame, raised: RaisedException) -> Told:
    """An assertion without a message, by the expression in its line of code."""
    place = f"{without_secrets(frame.file)}:{frame.line}"
    code = without_secrets(asserted.code)
    who = "The script" if frame.owner == USER else frame.package or "Python's own code"
    fact = f": {without_secrets(asserted.fact)}" if asserted.fact else ""
    fact_zh = f"：{without_secrets(asserted.fact_zh)}" if asserted.fact_zh else ""
    user = raised.user_frame
    called = (
        f" (called from {without_secrets(user.file)}:{user.line})" if user and frame.owner != USER else ""
    )
    return Told(
        f"{who} asserts `{code}`, which doesn't hold{fact}.",
        f"Print the values of `{code}` just before {place}{called}: the one that isn't as it has to be comes from what "
        "was handed over there.",
        f"{who if frame.owner != USER else '脚本'} 的断言 `{code}` 不成立{fact_zh}。",
        f"在 {place} 之前打印 `{code}` 中各个值：不符合要求的值来自传入的参数。",
    )


def _key(message: str, frame: Frame, place: str, code: str) -> Told:
    """A key that the user's own code reads."""
    what = re.search(rf"{RECEIVER}\[", frame.code)
    of = f" of `{what['what']}`" if what else ""
    return Told(
        f"The script reads the key {message}{of}, which isn't there{code}.",
        f"Before {place} print the keys that are there. Is it a column or field of the data, write it as the data "
        "have it, or give the data that column; is it a setting of the script's own, add it where it is read from.",
        f"脚本读取的键 {message} 不存在。",
        f"在 {place} 之前打印已有的键：若是数据的列或字段，按数据中的名字书写；若是脚本自己的设置，在其来源处补上。",
        "data" if DATA_FILE.search(f"{frame.file.rpartition('/')[2]} {frame.name}") else "",
    )


def _none(name: str, frame: Frame, place: str, code: str) -> Told:
    """Something that is None where the user's own code asks it for an attribute."""
    hit = re.search(rf"{RECEIVER}\.{re.escape(name)}\b", frame.code)
    what = hit["what"] if hit else ""
    if name == "backward" or LOSS.search(what):
        return Told(
            f"The model returned no loss: `{what or 'the loss'}` is None where its `.{name}` is asked for{code}.",
            f"Hand the labels to the model (a batch without `labels` gives none; remove_unused_columns drops columns "
            f"that its forward() doesn't name), or compute the loss from the logits before {place}.",
            f"模型没有返回 loss：`{what or 'loss'}` 为 None。",
            f"把 labels 传给模型（batch 中没有 labels 就没有 loss），或在 {place} 之前用 logits 计算 loss。",
        )
    return Told(
        f"`{what or 'A value'}` is None where the script asks for its `.{name}`{code}.",
        f"Look in the script where `{what or 'it'}` gets its value before {place}: a function that returned nothing, "
        "an argument that wasn't given, a file or entry that wasn't found.",
        f"脚本访问 `.{name}` 时 `{what or '该值'}` 为 None。",
        f"检查 {place} 之前 `{what or '它'}` 的来源：函数没有返回值、参数没有给出，或没有找到对应内容。",
    )


def _not_such(kind: str, how: str, frame: Frame, place: str, code: str) -> Told:
    """A value that is used as what it isn't: indexed, iterated or called."""
    forms = {"subscriptable": rf"{RECEIVER}\[", "callable": rf"{RECEIVER}\(", "iterable": rf"\bin {RECEIVER}"}
    found = {hit["what"] for hit in re.finditer(forms[how], frame.code)}
    what = f"`{found.pop()}`" if len(found) == 1 else "A value"
    use = {"subscriptable": "indexed", "callable": "called", "iterable": "gone through"}[how]
    use_zh = {"subscriptable": "取下标", "callable": "调用", "iterable": "遍历"}[how]
    is_none = kind == "NoneType"
    state = "None" if is_none else f"of type {kind}"
    where = (
        "a function that returned nothing, an argument that wasn't given, a file or entry that wasn't found"
        if is_none
        else "a name that was given another value before, or a field that holds something else"
    )
    it = "it" if what == "A value" else what
    return Told(
        f"{what} is {state} where the script has it {use}{code}.",
        f"Look in the script where {it} gets its value before {place}: {where}.",
        f"脚本对 {what.replace('A value', '某个值')} {use_zh}，而它是 {'None' if is_none else kind}。",
        f"检查 {place} 之前该值的来源。",
    )


def _of_package(raised: RaisedException, frame: Frame, lines: Sequence[PeeledLine]) -> Told | None:
    """One in a trainer's or a library's own code, of which its type says that this code is at fault, or the data."""
    message = raised.message.split("\n")[0].strip()
    package, code = frame.package, _code(frame)
    user = raised.user_frame
    called = f", called from {without_secrets(user.file)}:{user.line}" if user else ""
    if (hit := UNDEFINED.search(message)) and (home := api_history.home_of(hit["name"])) not in ("", package):
        return _not_imported(hit["name"], home, package)
    if hit := UNBOUND.search(message) or UNDEFINED.search(message):
        name = hit["name"] or hit.groupdict().get("new")
        return Told(
            f"{package} uses `{name}`, which has no value there{code}: a fault of that release, or a case that it "
            "wasn't written for.",
            f"Another release of {package} (newer first); its known issues name `{name}`. Else look at the arguments "
            f"that it was given{called}: one of them leads to this case.",
            f"{package} 使用了没有值的 `{name}`：该版本的缺陷，或它没有考虑到的情况。",
            f"换一个 {package} 版本（先试新版），或检查传给它的参数。",
            "version",
        )
    if raised.name == "KeyError" and PLAIN_KEY.match(message) and _reads_data(frame):
        return Told(
            f"{package} reads the column or field {message} of the data, which they don't have{code}.",
            f"Print one record and its keys: rename the column to {message}, or tell {package} the name that the data "
            "use (its option for the column, or for the data's format).",
            f"{package} 要读取数据中的列或字段 {message}，但数据里没有。",
            f"打印一条数据及其键：把列改名为 {message}，或在 {package} 的数据格式选项中写明列名。",
            "data",
        )
    return _lacking(raised, message, called, lines)


def _lacking(raised: RaisedException, message: str, called: str, lines: Sequence[PeeledLine]) -> Told | None:
    """A key or an attribute that a package's own code asks for, and that isn't there: a case that this release wasn't
    written for, or a value of another kind than it takes."""
    hit = ATTRIBUTE.match(message)
    bare = BARE_NAME.match(message) if raised.name == "AttributeError" else None
    name = hit["name"] if hit else bare["name"] if bare else message.strip("'\"")
    frame = _asking(raised, name)
    if frame is None or not frame.package or raised.name not in ("AttributeError", "KeyError"):
        return None
    package, code, here = frame.package, _code(frame), _release(frame.package, lines)
    place = f"{without_secrets(frame.file)}:{frame.line}"
    if hit and hit["class"] in (*PLAIN_TYPES, "NoneType"):
        return _plain_value(hit["class"], name, frame, called)
    if not hit and not bare:
        return _key_of_package(package, message, place, called, code) if PLAIN_KEY.match(message) else None
    kind = f"a `{hit['class']}` for `{name}`" if hit else f"for `{name}`"
    return Told(
        f"{package}{here}'s own code asks {kind}, which isn't there{code}: a fault of that release, or a case that it "
        "wasn't written for.",
        f"Another release of {package}, newer first: its known issues name `{name}`. Else the way that leads to {place}"
        f"{called}: another mode or option of {package}, or the object that it was handed there.",
        f"{package}{here} 自己的代码访问不存在的 `{name}`：该版本的缺陷，或它没有考虑到的情况。",
        f"换一个 {package} 版本（先试新版，已知问题中搜索 `{name}`），或避开通向 {place} 的模式与选项。",
        "version",
        "medium" if code else "low",
    )


def _plain_value(kind: str, name: str, frame: Frame, called: str) -> Told | None:
    """A value of one of Python's own types, or None, where a package's code asks an object for an attribute: something
    else was handed over, or nothing."""
    hit = re.search(rf"{RECEIVER}\.{re.escape(name)}\b", frame.code)
    if hit is None:
        return None
    value, package, code = f"`{hit['what']}`", frame.package, _code(frame)
    what = "None" if kind == "NoneType" else f"a {kind}"
    handed = called.replace(", called", "")
    instead = (
        "an argument that wasn't given, a field that the config lacks, something that wasn't found"
        if kind == "NoneType"
        else "a name or a path, and not what is loaded from it; settings in text that fill the field"
    )
    return Told(
        f"{value} is {what} where {package} asks for its `.{name}`{code}.",
        f"Something handed over{handed} is {what} in the place of an object that has `{name}`: look what becomes "
        f"{value} there ({instead}).",
        f"{package} 访问 `.{name}` 时，{value} 是 {kind}。",
        f"检查传给 {package} 的内容：{value} 应是带有 `{name}` 的对象，而不是 {kind}。",
        confidence="low" if kind == "NoneType" else "medium",
    )


def _key_of_package(package: str, key: str, place: str, called: str, code: str) -> Told | None:
    """A key that a package's own code reads, where the log shows the code: it may be of what it was handed."""
    if not code:
        return None
    return Told(
        f"{package}'s own code reads the key {key}, which isn't there{code}: what it was handed (settings, a config, a "
        "state) lacks it, or it is a fault of that release.",
        f"Print the keys of what is read at {place}{called}. Does the key have to come from your side, add it; else "
        f"another release of {package}, newer first: its known issues name {key}.",
        f"{package} 自己的代码读取不存在的键 {key}：传给它的内容（设置、配置、状态）缺少该键，或是该版本的缺陷。",
        f"打印 {place} 处所读内容的键：若应由自己提供，补上；否则换一个 {package} 版本（先试新版）。",
        "version",
        "low",
    )


def _asking(raised: RaisedException, name: str) -> Frame | None:
    """The innermost frame of a package whose code has the name: one below it may only carry the question out. Where no
    code is shown, the innermost."""
    frames = [frame for frame in raised.frames if frame.owner in (TRAINER, LIBRARY)]
    with_name = (frame for frame in reversed(frames) if re.search(rf"\b{re.escape(name)}\b", frame.code))
    return next(with_name, frames[-1] if frames and not frames[-1].code else None)


def _release(package: str, lines: Sequence[PeeledLine]) -> str:
    """The release of a package as the log shows it, with a blank before; empty where it doesn't."""
    release = releases_in(lines, [package]).get(package, "")
    return f" {release}" if release else ""


def _not_imported(name: str, home: str, package: str) -> Told:
    """A name of another package, which a package imports only where it can."""
    return Told(
        f"{package} uses `{name}` of {home}, which it imports only where {home} is there: it isn't installed, or its "
        "import failed.",
        f"`pip install {home}` in the environment of the ranks, on every host; is it there, "
        f"`python -c 'import {home}'` says why its import fails, or it is too old for this {package}.",
        f"{package} 使用了 {home} 的 `{name}`，而 {home} 没有安装，或导入失败。",
        f"在各进程的环境中 `pip install {home}`；已安装时，用 `python -c 'import {home}'` 查看导入失败的原因。",
        "import",
    )


def _reads_data(frame: Frame) -> bool:
    """Whether a frame is where training data are read."""
    file = frame.file.replace("\\", "/")
    return frame.package == "datasets" or bool(DATA_FILE.search(f"{file.rpartition('/')[2]} {frame.name}"))


def _code(frame: Frame) -> str:
    """The frame's line of code as a quotation in brackets; empty where the log has none."""
    return f" (`{without_secrets(frame.code)[:120]}`)" if frame.code else ""

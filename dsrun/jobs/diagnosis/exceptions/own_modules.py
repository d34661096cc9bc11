"""Exceptions about names and values that are the user's own or Python's own, and of no package that has releases.

`cannot import name X from M` is a matter of versions where M is a library; where M's file is the user's, X isn't
written there. Python says the file itself, and which modules are its own is known.
"""

from __future__ import annotations

import re
import sys

from dsrun.host.hiding import without_secrets
from dsrun.jobs.diagnosis.exceptions.language_errors import Told
from dsrun.jobs.diagnosis.reading import owners
from dsrun.jobs.diagnosis.reading.owners import USER
from dsrun.jobs.diagnosis.reading.tracebacks import CODE, RaisedException

IMPORTED = re.compile(
    r"^cannot import name '(?P<name>\w{1,80})' from (?P<part>partially initialized module )?'(?P<module>[\w.]{1,120})'"
    r"(?P<circle> \(most likely due to a circular import\))? \((?P<file>[^()\n]{2,400}\.py)\)"
)
OF_MODULE = re.compile(r"^module '(?P<module>[\w.]{1,120})' has no attribute '(?P<name>\w{1,80})'")
RELATIVE = re.compile(r"^attempted relative import (?:with no known parent package|beyond top-level package)")
VALUE = re.compile(
    r"^(?:too many values to unpack|not enough values to unpack|invalid literal for \w+\(\) with base"
    r"|could not convert string to float|substring not found|math domain error|empty separator|.{1,80} is not in list$"
    r"|list\.remove\(x\)|dictionary update sequence element|(?:max|min)\(\) (?:arg|iterable argument) is (?:an )?empty"
    r"|zip\(\) argument)"
)
"""What Python itself says of a ValueError at an expression."""


def told(raised: RaisedException) -> Told | None:
    """An exception about a name of the user's own modules or of Python's, or a value that Python refuses, in words;
    None for any other."""
    message = " ".join(raised.message.split())
    frame = raised.raiser
    if frame is None:
        return None
    if frame.owner != USER:
        hit = OF_MODULE.match(message)
        is_pythons = hit and hit["module"].partition(".")[0] in sys.stdlib_module_names
        return (
            _left_python(hit["module"], hit["name"], frame.package)
            if hit and is_pythons and frame.package
            else None
        )
    place = f"{without_secrets(frame.file)}:{frame.line}"
    if hit := IMPORTED.match(message):
        return None if _is_of_package(hit["module"], hit["file"]) else _not_imported(hit, place)
    if (hit := OF_MODULE.match(message)) and hit["module"].partition(".")[0] in sys.stdlib_module_names:
        return _not_in_python(hit["module"], hit["name"], place)
    if RELATIVE.match(message):
        return Told(
            f"{place} imports relatively (from .), and was started as a script, so that it is in no package.",
            "Start it as a module from the folder above its package (`python -m PACKAGE.MODULE`, `torchrun -m ...`, "
            "`dsrun launch -m ...`), or import by the whole name.",
            f"{place} 使用相对导入（from .），却被当作脚本直接启动，因此不属于任何包。",
            "在包的上一级目录以模块方式启动（`python -m 包.模块`、`torchrun -m ...`、`dsrun launch -m ...`），"
            "或改用完整名称导入。",
        )
    if raised.name == "ValueError" and VALUE.match(message) and not CODE.match(frame.code):
        code = f" (`{without_secrets(frame.code)[:120]}`)" if frame.code else ""
        text = without_secrets(message)[:160]
        return Told(
            f"Python refuses a value in the script: {text}{code}.",
            f"Print that value just before {place}: its length, type or content isn't what the line takes.",
            f"脚本中的某个值不被 Python 接受：{text}{code}。",
            f"在 {place} 之前打印该值：它的长度、类型或内容与这一行要求的不同。",
        )
    return None


def _is_of_package(module: str, file: str) -> bool:
    """Whether a module is a package's: by its file, or by a name that packages with releases or Python have."""
    from dsrun.releases.packed import package_of

    top = module.partition(".")[0]
    return owners.owner(file)[0] != USER or package_of(top) is not None or top in sys.stdlib_module_names


def _not_imported(hit: re.Match[str], place: str) -> Told:
    name, module, file = hit["name"], hit["module"], without_secrets(hit["file"])
    if hit["part"] or hit["circle"]:
        return Told(
            f"Modules of your own import each other in a circle: {place} asks {module} ({file}) for {name}, while "
            f"{module} is still being imported.",
            f"Break the circle: import {name} inside the function that needs it, or move it into a module that both "
            "import. The frames name the modules in their order.",
            f"你自己的模块互相导入：{place} 向 {module}（{file}）请求 {name}，而 {module} 尚未导入完。",
            f"拆开循环：在需要 {name} 的函数内部导入，或把它移到双方都导入的模块。调用栈按顺序列出了这些模块。",
        )
    return Told(
        f"Your own module {module} ({file}) has no {name}.",
        f"Write the name in {place} as {file} has it, or define it there. Is it there: another copy of {module} is "
        "found first (`print(MODULE.__file__)`; PYTHONPATH, the folder that the job starts in).",
        f"你自己的模块 {module}（{file}）中没有 {name}。",
        f"按 {file} 中的名字修改 {place}，或在其中定义它。若确实已定义：先被找到的是 {module} 的另一份副本"
        "（PYTHONPATH、启动目录）。",
    )


def _not_in_python(module: str, name: str, place: str) -> Told:
    return Told(
        f"Python's own module {module} has no {name} in this release of Python.",
        f"Correct {place}: a class or module inside {module} may have it (`{module}.{module}.{name}`, as of datetime), "
        f"or it left Python; and no file {module}.py of yours may lie beside the script.",
        f"当前 Python 自带的模块 {module} 中没有 {name}。",
        f"修改 {place}：可能在 {module} 内的类或子模块里（如 `{module}.{module}.{name}`），或已从 Python 移除；"
        f"脚本旁也不要有自己的 {module}.py。",
    )


def _left_python(module: str, name: str, package: str) -> Told:
    return Told(
        f"Python's own module {module} has no {name} in this release: {package} was written for an older Python.",
        f"A newer release of {package} (`pip install -U`), or an older Python for all of it (3.9 had "
        "collections.Mapping, 3.10 inspect.getargspec, 3.11 pkgutil.ImpImporter). And no file of yours called "
        f"{module}.py may lie beside the script.",
        f"当前 Python 自带的模块 {module} 中没有 {name}：{package} 是为更旧的 Python 写的。",
        f"升级 {package}（`pip install -U`），或换用更旧的 Python；脚本旁也不要有自己的 {module}.py。",
        "version",
    )

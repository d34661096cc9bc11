"""Meanings of exceptions' types, for those whose text no signature knows."""

from __future__ import annotations

import re
from typing import NamedTuple

from dsrun.jobs.diagnosis.reading.tracebacks import RaisedException

LAUNCHERS = frozenset(
    {"ChildFailedError", "CalledProcessError", "SignalException", "SystemExit", "ProcessRaisedException",
     "ProcessExitedException", "JobFailedError"}
)  # fmt: skip
"""Exceptions that launchers raise about their ranks: a consequence, never a cause."""
PROBES = frozenset(
    {"KeyError", "AttributeError", "ImportError", "ModuleNotFoundError", "StopIteration", "IndexError"}
)
"""Types that libraries raise and catch to try something else: of a chain that begins with one, the last counts."""
WIDE = frozenset({"ImportError"})
"""Types that libraries also raise for an old release or a missing GPU: the message may say more."""


class TypeMeaning(NamedTuple):
    """A failure as an exception's type tells it, in English and Chinese."""

    cause: str
    means: str
    means_zh: str
    next: str
    next_zh: str
    anywhere: bool = False
    """Whether it holds for a library's code, too; else for the user's own alone."""
    confidence: str = "medium"


READ_THERE = ("Correct the script at that line.", "修改脚本中的这一行。")
BAD_SETTINGS = TypeMeaning(
    "config",
    "A settings file of the job is not valid, or lacks what the program asks of it.",
    "任务的配置文件无效，或缺少程序要求的内容。",
    "The message names the line, or the key: correct it there (YAML: indentation, a blank behind each colon).",
    "按消息中的行号或键名修改（YAML：注意缩进和冒号后的空格）。",
    True,
)
MISSING_PACKAGE = (
    "Install it in the environment that the ranks run in, on every host; the launcher may use another Python.",
    "在每台主机上、运行各进程的那个环境里安装它；启动器用的可能是另一个 Python。",
)
MEANINGS = {
    "ModuleNotFoundError": TypeMeaning(
        "import", "A Python module that is imported isn't there.", "导入的 Python 模块不存在。", *MISSING_PACKAGE, True
    ),
    "ImportError": TypeMeaning(
        "import",
        "An import failed: a package lacks, or doesn't fit the others that are installed.",
        "导入失败：缺少某个包，或其版本与已安装的其他包不符。",
        "The message names the package: install it, or releases of the two from about the same time (`pip list`).",
        "消息写明了该包：安装它，或安装两者同期发布的版本（`pip list`）。",
        True,
    ),
    "FileNotFoundError": TypeMeaning(
        "missing_file",
        "A file or folder that the job needs isn't there.",
        "任务需要的文件或目录不存在。",
        "Look at the path on the host of that rank: relative paths count from the folder that the job was started in, "
        "and a local disk is no other host's.",
        "在该进程所在主机上检查路径：相对路径从启动目录算起，本地磁盘其他主机看不到。",
        True,
    ),
    "NotADirectoryError": TypeMeaning(
        "missing_file", "A path leads through a file where a folder is expected.", "路径中应为目录的部分是一个文件。",
        "Correct the path.", "改正路径。", True,
    ),
    "IsADirectoryError": TypeMeaning(
        "missing_file", "A folder was given where a file is expected.", "应给文件，却给了目录。",
        "Name the file in it.", "写明其中的文件。", True,
    ),
    "PermissionError": TypeMeaning(
        "permission",
        "The job may not read or write a file.",
        "任务没有读写某个文件的权限。",
        "Look at the owner and mode of the path (`ls -ld`), or choose another folder.",
        "查看该路径的属主和权限（`ls -ld`），或换一个目录。",
        True,
    ),
    "MemoryError": TypeMeaning(
        "host_oom", "Host memory ran out in an allocation.", "主机内存不足。",
        "Fewer ranks a host, no CPU offload, data that are mapped instead of read, or more memory.",
        "减少每台主机的进程数、关闭 CPU offload、用内存映射读数据，或增加内存。", True,
    ),
    "UnicodeDecodeError": TypeMeaning(
        "data", "A text file isn't in the encoding that it is read in.", "文本文件的编码与读取时用的不同。",
        "Find the file in the traceback and convert it to UTF-8 (`iconv`).",
        "按调用栈找到文件，转成 UTF-8（`iconv`）。",
        True,
    ),
    "JSONDecodeError": TypeMeaning(
        "data", "A file that should be JSON isn't.", "应为 JSON 的文件不是 JSON。",
        "Check the file at the line and column that the message names (`python -m json.tool FILE`; of a file of "
        "records by lines `jq -c . FILE`).",
        "按消息给出的行列检查文件（`python -m json.tool FILE`；按行存放的用 `jq -c . FILE`）。", True,
    ),
    "ScannerError": BAD_SETTINGS,
    "TOMLDecodeError": BAD_SETTINGS,
    "TomlDecodeError": BAD_SETTINGS,
    "ConfigAttributeError": BAD_SETTINGS,
    "ConfigKeyError": BAD_SETTINGS,
    "MissingConfigException": BAD_SETTINGS,
    "MissingMandatoryValue": BAD_SETTINGS,
    "ConfigCompositionException": BAD_SETTINGS,
    "OverrideParseException": BAD_SETTINGS,
    "MisconfigurationException": TypeMeaning(
        "config", "Lightning refuses its Trainer's settings: two contradict one another, or one is missing.",
        "Lightning 拒绝了 Trainer 的设置：两项互相矛盾，或缺少一项。",
        "The message names the setting: in the Trainer's arguments, or in the DeepSpeed config, where Lightning fills "
        "in batch size, accumulation and clipping itself.",
        "消息写明了该设置：在 Trainer 的参数中，或在 DeepSpeed 配置中（批大小、梯度累积和裁剪由 Lightning 自己填写）。",
        True,
    ),
    "SyntaxError": TypeMeaning(
        "script_error", "The script isn't valid Python for the interpreter that ran it.",
        "脚本对所用解释器不是合法的 Python。",
        *READ_THERE, True,
    ),
    "IndentationError": TypeMeaning(
        "script_error", "The script's indentation is broken.", "脚本的缩进有误。", *READ_THERE, True,
    ),
    "TabError": TypeMeaning(
        "script_error", "The script mixes tabs and blanks.", "脚本混用了制表符和空格。", *READ_THERE, True,
    ),
    "TypeError": TypeMeaning(
        "script_error", "The script uses a value of the wrong type, or calls something with the wrong arguments.",
        "脚本中某个值的类型不对，或调用参数不对。", *READ_THERE,
    ),
    "NameError": TypeMeaning(
        "script_error", "The script uses a name that is defined nowhere.", "脚本使用了未定义的名字。", *READ_THERE
    ),
    "UnboundLocalError": TypeMeaning(
        "script_error", "The script uses a variable before it has a value.", "脚本在赋值之前使用了变量。", *READ_THERE
    ),
    "AttributeError": TypeMeaning(
        "script_error", "The script asks an object for something that it doesn't have.", "脚本访问了对象没有的属性。",
        *READ_THERE,
    ),
    "KeyError": TypeMeaning(
        "script_error", "The script asks for a key that isn't there.", "脚本访问了不存在的键。", *READ_THERE
    ),
    "IndexError": TypeMeaning(
        "script_error", "The script reads beyond the end of a list or a tensor.", "脚本的下标越界。", *READ_THERE
    ),
    "ZeroDivisionError": TypeMeaning(
        "script_error", "The script divides by zero.", "脚本中出现除以零。", *READ_THERE
    ),
    "RecursionError": TypeMeaning(
        "script_error", "A function calls itself without end.", "函数无限递归。", *READ_THERE
    ),
    "NotImplementedError": TypeMeaning(
        "script_error", "The script calls something that nobody has written.", "脚本调用了未实现的功能。", *READ_THERE
    ),
}  # fmt: skip


OF_A_CLASS = re.compile(
    r"^'(?!NoneType|Tensor'|Parameter'|Namespace'|TrainerState')[A-Z]\w{3,80}' object has no attribute '\w{1,60}'"
)
"""Message of a missing attribute, where the object's class is a package's own: no list, text or None."""
OTHER_RELEASE = TypeMeaning(
    "version",
    "An object lacks what a library asks of it: that library and the one that makes it are of releases that don't "
    "match, or it was given another object than it takes.",
    "对象没有库所要的属性：该库与提供该对象的库版本不匹配，或传入了错误的对象。",
    "Is the class in the message a package's own: releases of the two from about the same time. Is it yours: look at "
    "what your code hands over in the last frame that is yours.",
    "若消息中的类属于某个包：安装两者同期发布的版本。若是自己的类：检查自己代码最后一帧传入的内容。",
    confidence="low",
)


OWN_CHECK = TypeMeaning(
    "script_error",
    "The program's own code refuses to go on: a check of its own fails.",
    "程序自己的代码检查未通过，主动报错。",
    "Look at that line, and at what it checks: the message is its author's.",
    "查看这一行及其检查的内容：消息由脚本作者写成。",
    confidence="low",
)
CHECKS = frozenset({"ValueError", "AssertionError", "Exception", "RuntimeError"})
"""Types that a program's own checks raise."""
RAISES = re.compile(r"^(?:raise|assert)\b")


def own_check(raised: RaisedException) -> TypeMeaning | None:
    """The meaning of an exception that the user's own code raises; None for one from deeper, such as compiled code."""
    innermost = raised.frames[-1] if raised.frames else None
    if innermost is None or innermost.is_library or raised.name not in CHECKS:
        return None
    return OWN_CHECK if raised.name == "AssertionError" or RAISES.match(innermost.code) else None


def meaning(raised: RaisedException) -> TypeMeaning | None:
    """The meaning of an exception's type; None where it may be anything."""
    meaning_of_type = MEANINGS.get(raised.name)
    if meaning_of_type is None or meaning_of_type.anywhere:
        return meaning_of_type
    innermost = raised.frames[-1] if raised.frames else None
    if innermost and not innermost.is_library:
        return meaning_of_type
    return OTHER_RELEASE if raised.name == "AttributeError" and OF_A_CLASS.match(raised.message) else None

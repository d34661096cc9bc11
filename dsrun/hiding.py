"""Keys, tokens and passwords are hidden in what others read: screens, logs, pages, `--json`.

By the name of a variable, an option or a setting; in a URL; and in a text of any kind by the form that a key has. What
is hidden is whole in job.json alone, which is its owner's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"

NAMES = re.compile(
    r"""
      (?:TOKEN | SECRETS? | PASSWORD | PASSWD | PASSPHRASE | SSHPASS | CREDENTIALS?
        | (?:API | ACCESS | SECRET | PRIVATE | AUTH | SSH | LICENSE)KEY) \d* (?![^_])
    | (?<![^_]) (?:KEYS? | AUTH | PASS | CREDS? | BEARER | COOKIES?) \d* (?![^_])
    | _(?:PWD | PAT | SAS | DSN)$
    | CONNECTION_STRING
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Words of a name that holds a secret. A whole word, so that BYPASS, IB_PKEY or NCCL_PAT_ENABLE are none."""
SWITCH = re.compile(r"|\d{1,3}|true|false|yes|no|on|off", re.IGNORECASE)
"""HF_HUB_DISABLE_IMPLICIT_TOKEN=1 is no secret."""
IN_VALUES = (
    # scheme://user:password@host; the password may hold an @ or a slash, but 80/ is a port.
    re.compile(
        r"(?P<before>\b[a-z][a-z0-9+.-]{0,30}://[^\s:/?#@]{0,200}:)(?!\d{1,5}/)\S{1,500}(?P<after>@)",
        re.IGNORECASE,
    ),
    # https://token@host
    re.compile(r"(?P<before>https?://)[^\s:/?#@]{1,500}(?P<after>@)", re.IGNORECASE),
    re.compile(
        r"(?P<before>[?&][\w.-]{0,50}(?:token|key|secret|password|passwd|sig|signature)=)[^\s&#]+(?P<after>)",
        re.IGNORECASE,
    ),
)
BARE_PROXY = re.compile(r"(?P<before>^[^\s:/?#@]+:)\S+(?P<after>@)")
"""user:password@host:port, which proxy variables may hold without a scheme."""
OF_TEXTS = "".join(
    rf"(?<!{word}[ _.-])"
    for word in (
        "pad", "eos", "bos", "unk", "sep", "cls", "mask", "special", "added", "image", "video", "audio", "start",
        "end", "stop", "first", "last", "next", "new", "max", "min", "num", "expected", "unexpected", "prompt",
    )
)  # fmt: skip
"""Before "token": those that texts are made of, and no secret."""
IN_TEXTS = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,80}|sk-[\w-]{8,200}|gh[pousr]_\w{8,200}|AKIA[0-9A-Z]{12,20}|xox[bap]-[\w-]{8,200}"
    r"|eyJ[\w-]{10,2000}\.[\w-]{10,2000}(?:\.[\w-]{0,2000})?)"
    r"|((?i:(?:" + OF_TEXTS + r"token|secret|passw(?:or)?d|api[_-]?key|authorization|credential)s?"
    r"[\"']?\s{0,3}[=:]\s{0,3}"
    r"(?:bearer )?[\"']?))(?!-?[\d.,_]{1,30}(?![\w-]))"
    r"([^\s\"',;]{4,200})|(://[^\s/:@]{1,100}:)([^\s/@]{1,200})(?=@)"
)
"""What must not be repeated: keys by their form, by the name before them (but no plain number), or in a URL."""


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds what nobody else may see."""
    return NAMES.search(name) is not None


def secrets(env: Mapping[str, str]) -> set[str]:
    """The names of the variables that hold a secret: by their name, or by a password in their value."""
    return {name for name, value in env.items() if _shown(name, value) != value}


def shown(env: Mapping[str, str]) -> dict[str, str]:
    """The same variables for a screen, a log or a file that others read, without what is secret."""
    return {name: _shown(name, value) for name, value in env.items()}


def shown_arguments(words: Sequence[str]) -> list[str]:
    """A program's arguments in the same way: `--api-key X`, `--api-key=X` and `api_key=X` without the X."""
    found: list[str] = []
    flag = ""
    for word in words:
        name, sign, value = word.partition("=")
        if flag and not word.startswith("-"):
            found.append(_shown(flag, word))
        else:
            found.append(f"{name}={_shown(_variable(name), value)}" if sign else _shown("", word))
        flag = "" if sign or not word.startswith("-") else _variable(word)
    return [without_secrets(word) for word in found]


def _variable(flag: str) -> str:
    """An option's name as a variable would have it: --api-key is api_key."""
    return flag.lstrip("-").replace("-", "_")


def _shown(name: str, value: str) -> str:
    if is_secret(name) and not SWITCH.fullmatch(value):
        return HIDDEN
    patterns = (
        (*IN_VALUES, BARE_PROXY) if name.lower().endswith("_proxy") and "://" not in value else IN_VALUES
    )
    for pattern in patterns:
        value = pattern.sub(rf"\g<before>{HIDDEN}\g<after>", value)
    return value


def shown_value(path: str, value: Any) -> Any:
    """A setting's value in the same way, by the last part of its path. What is no text is no secret: `tokens: 512`."""
    return _shown(path.rpartition(".")[2], value) if isinstance(value, str) else value


def without_secrets(text: str) -> str:
    """A text in which keys, tokens and passwords are hidden."""
    return IN_TEXTS.sub(lambda hit: f"{hit[2] or hit[4] or ''}{HIDDEN}", text)

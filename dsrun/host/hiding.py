"""Keys, tokens and passwords are hidden in everything that others read: screens, logs, pages, `--json`, run folders.

A secret is known in three ways, each in one place: by the name before it (`is_secret`: a variable's, an
option's, a setting's, or that in a text like NAME=VALUE), by its own form (`ISSUED`), by its place in a URL or header.

Sent to hosts as part of the probe: Python 3.8, its own library, nothing of dsrun.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

HIDDEN = "(hidden)"

PLAINLY = re.compile(
    r"""
      (?:SECRETS? | PASSWORD | PASSWD | PASSPHRASE | PASSCODE | SSHPASS | CREDENTIALS? | AUTHORIZATION
        | (?:API | ACCESS | SECRET | PRIVATE | AUTH | SSH | LICENSE | ACCOUNT | SIGNING | ENCRYPTION | MASTER | SERVICE
            | WEBHOOK | DEPLOY | SUBSCRIPTION | FUNCTION | STORAGE)_?KEY
        | (?:API | ACCESS | AUTH | REFRESH | BEARER | SESSION | SECURITY | ID | PRIVATE | HF | HUB | BOT
            | CLIENT | DEPLOY | USER | PERSONAL | GITHUB | GITLAB | NPM | WEBHOOK)_?TOKENS?) \d* (?![^_])
    | _ (?: PWD | PAT | SAS | DSN ) $
    | CONN(?:ECTION)?_?STR(?:ING)?
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Words of a name that says by itself that a secret is in it."""
MAYBE = re.compile(
    r"TOKEN \d* (?![^_]) | (?<![^_]) (?:KEYS? | AUTH | PASS | CREDS? | BEARER | COOKIES?) \d* (?![^_])",
    re.VERBOSE | re.IGNORECASE,
)
"""Words of a name that holds a secret as a variable or an option; in a text they mean other things, too. A whole word,
so that BYPASS, IB_PKEY or NCCL_PAT_ENABLE are none."""
ANOTHER = re.compile(
    r"""
      (?<![^_])(?: PAD | EOS | BOS | EOT | UNK | SEP | CLS | MASK | SPECIAL | ADDED | IMAGE | VIDEO | AUDIO | START
        | END | STOP | FIRST | LAST | NEXT | NEW | MAX | MIN | NUM | N | EXPECTED | UNEXPECTED | PROMPT | PER | TOTAL
        | DECODER | FORCED | TEXT | BEGIN | INPUT | OUTPUT | TOOL | THINK | SUPPRESS | MEAN | AVG )_?TOKENS? $
    | (?<![^_])(?: PUBLIC | CACHE | SORT | PRIMARY | FOREIGN | STATE | DICT | PARTITION | GROUP | METRIC | ROUTING
        | MISSING | UNEXPECTED | WEIGHT | MODEL | LAYER | PARAM | CONFIG | COLUMN | QUERY | JSON | HOT | RNG )_?KEYS? $
    | (?: TOKENS? | KEYS? | PASSWORD | SECRETS? | CREDENTIALS? | PASS | AUTH )
        _(?: FILE | PATH | DIR | NAME | TYPE | LENGTH | LEN | SIZE | COUNT | LIMIT | RATE | ERROR | IDS? | CLASS
            | PER_\w+ | METHOD | MODE | PLUGIN | PROVIDER | URL | EXPIRES\w* ) $
    | KEYS?_(?: VALUES? | STATES? | DIM | HEADS | MASK | PROJ ) $
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Names of other things with the same words: tokens of a vocabulary, keys of a dictionary, paths of files."""
KEY_ID = re.compile(r"ACCESS_?KEY_?ID$", re.IGNORECASE)
SWITCH = re.compile(r"|\d{1,3}|true|false|yes|no|on|off", re.IGNORECASE)
"""HF_HUB_DISABLE_IMPLICIT_TOKEN=1 is no secret."""
NO_VALUE = re.compile(
    r"""[\s.*x<>()\[\]{}|?-]*|\(hidden\).*|\[?redacted\]?|<[^<>]*>|none|null|nil|undefined|unset|empty|str|int|bytes|string
    |optional(?:\[.*)?|not|is|are|was|were|must|should|can|could|has|have|required|missing|invalid|incorrect|wrong|expired
    |denied|failed|for|from|in|of|to|the|a|an|and|or|with
    |\$\{\w+\}.*|(?-i:\$[A-Z_][A-Z0-9_]*)
    |(?:os\.)?(?:environ|getenv)\b.*|getpass\b.*|self\.\w+|args\.\w+|config\.\w+|lambda\b.*""",
    re.VERBOSE | re.IGNORECASE,
)
"""Words behind a name in code and in prose that are no secret."""


# What issuers put before their keys, as their documentation and the rules of secret scanners show it.
CERTAIN = r"""
    gh[pousr]_ github_pat_ gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct|rtr)- xox[abeoprs]- xapp-
    sk-(?:ant|proj|svcacct|admin|or|lf)- pk-lf- (?:sk|rk|pk)_(?:live|test|prod)_ whsec_ dckr_(?:pat|oat)_ do[oprt]_v1_
    pscale_(?:tkn|pw|oauth)_ pplx- nvapi- tskey-(?:auth|api|client|webhook)- sntry[su]_ glsa_ glc_ NRAK- NRII-
    NRJS- PMAK- sq0(?:atp|csp|idp)- lsv2_(?:pt|sk)_ pcsk_ wandb_v1_ KGAT_ AGE-SECRET-KEY-1 ATATT3 ATCTT3
    dt0c01\. dp\.(?:pt|st|ct|sa)\. FLWSECK duffel_(?:live|test)_ GOCSPX- ya29\. hv[sbr]\. shp(?:at|ss|ca|pa)_
    lin_(?:api|oauth)_ CLOJARS_ HRKU- figd_ AIza api_org_ pypi-AgE shippo_(?:live|test)_ amzn\.mws\. rubygems_
    EAACEdEose0cBA gocardless_live_
"""
"""Before keys and nothing else."""
LIKELY = (
    "sk- hf_ npm_ r8_ gsk_ xai- fw_ sbp_ ntn_ secret_ SG\\. EAAA p8e- pul- sgp_ ATBB rdme_ tfp_ pnu_ phc_"
)
"""Before keys, but the beginnings of other words, too: what follows has to look like a key."""
_SHAPED = r"""
     (?:AKIA|ASIA|ABIA|ACCA|AROA|AIDA|LTAI)[0-9A-Z]{12,24}\b       # Amazon's, Alibaba's
    |eyJ[\w-]{10,4000}\.[\w-]{10,8000}(?:\.[\w-]{0,2000})*         # JSON Web Token
    |[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,38}\b                   # Discord
    |\d{8,10}:AA[\w-]{32,34}\b                                     # Telegram
    |[\w~.-]{3}\dQ~[\w~.-]{31,34}                                  # Azure's client secrets
    |(?:dapi|key-|SK|AC)[0-9a-f]{32}\b                             # Databricks, Mailgun, Twilio
    |[0-9a-f]{32}-us\d{1,2}\b                                      # Mailchimp
    |[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{30,100}                      # Terraform
"""
ISSUED = re.compile(
    rf"(?<![A-Za-z0-9])(?:(?:{'|'.join(CERTAIN.split())})[\w.~+/=-]{{8,400}}"
    rf"|(?:{'|'.join(LIKELY.split())})(?P<tail>[\w.-]{{8,250}})|{_SHAPED})",
    re.VERBOSE,
)
"""Keys by the form that their issuers gave them."""
LONG = re.compile(r"[\w.~+/:=-]{12,}")
"""Words long enough for such a key, of which a log has few."""
PEM = re.compile(
    r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)"
    r"(?:(?!-----END)[\s\S]){0,20000}(?:-----END[^-]{0,60}-----)?"
)

IN_URLS = (
    # scheme://user:password@host; the password may hold an @ or a slash, but 80/ is a port.
    re.compile(
        r"(?P<before>\b[a-z][a-z0-9+.-]{0,30}://[^\s:/?#@\"'<>]{0,200}:)(?!\d{1,5}(?:[^\w@]|$))[^\s\"'<>]{1,500}(?P<after>@)",
        re.IGNORECASE,
    ),
    # https://token@host
    re.compile(r"(?P<before>https?://)[^\s:/?#@\"'<>]{1,500}(?P<after>@)", re.IGNORECASE),
    # Addresses that are keys themselves.
    re.compile(
        r"(?P<before>\b(?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks"
        r"|[\w-]+\.webhook\.office\.com/webhookb2)/)[^\s\"'<>]+(?P<after>)",
        re.IGNORECASE,
    ),
)
IN_QUERIES = re.compile(r"(?P<before>[?&;#](?P<name>[\w.%-]{1,60})=)(?P<value>[^\s&#;\"'<>]+)")
SIGNED = re.compile(r"(?:^|_)(?:sig|signature|code)$", re.IGNORECASE)
"""Names of signatures in a URL."""
BARE_PROXY = re.compile(r"(?P<before>^[^\s:/?#@]+:)\S+(?P<after>@)")
"""user:password@host:port, which proxy variables may hold without a scheme."""
CREDENTIALS = re.compile(
    r"(?P<before>\b(?P<scheme>bearer|basic)\s{1,3})(?P<value>[\w.~+/=-]{6,4000})", re.IGNORECASE
)
"""Credentials behind the name of a scheme in HTTP's headers."""
LOGIN = re.compile(
    r"(?P<before>(?:^|\s)(?:-u|--user|--proxy-user)[ =]['\"]?[^\s:'\"]{1,100}:"
    r"|\bmachine\s{1,3}\S{1,200}\s{1,3}(?:login\s{1,3}\S{1,200}\s{1,3})?password\s{1,3})[^\s'\"]+"
)
"""Passwords in curl's options, and in a .netrc."""
IN_NAMES = (
    "(?:(?<![a-z_])token(?!s)|(?<=[a-z_])token|secret|passw|passphrase|passcode|sshpass|key|auth|cred|bearer|cookie"
    "|pass|pwd|_pat|_sas|dsn|conn)"
)
"""One of these is in each name that `is_secret` takes for a secret's."""
ASSIGNED = re.compile(IN_NAMES + r"""[\w.-]{0,80}[\\"'\]]{0,6}\s{0,3}[=:]""")
FLAGGED = re.compile(r"--?(?=[a-z])[\w-]{0,80}?" + IN_NAMES + r"""[\w-]{0,80}["']?,? """)
"""Such a name before a value, in small letters: lines without one, nearly all of a log's, are done sooner."""
NAMED = re.compile(
    r"""(?<![A-Za-z0-9_.-])
    (?: -{0,2} (?P<name>[A-Za-z_][\w.-]{0,80}) (?P<sign> \\{0,4}["']? \]? \s{0,3} (?: => | :=? | = ) \s{0,3} )
      | --? (?P<flag>[A-Za-z][\w-]{1,80}) ["']? ,? [ ]{1,2} (?!-) )""",
    re.VERBOSE,
)
"""A name and what leads to its value: NAME=, "name": , --name VALUE."""
VALUE = re.compile(
    r"""(?P<quote>\\{0,4}["']) (?P<quoted> (?: (?!(?P=quote)) (?: \\. | [^\n] ) ){0,4000} )
    | (?P<bare> \S{1,200} )""",
    re.VERBOSE,
)
BARE = re.compile(r"\S+")
REST = re.compile(r"[^\n\"'\\]+")
"""A header's value: it may have several words."""
PROSE = re.compile(r"[a-z]{1,12} [a-z]+(?![\w:=])")
"""Words behind a name and a colon in a sentence: "--api-key: the key of your account"."""
HEADER = re.compile(r"(?:proxy_?)?authorization|(?:set_?)?cookie", re.IGNORECASE)
ENDS = ",;)]}'\"\\"
"""Signs behind a value that belong to the text around it."""
SIZE = re.compile(r".*\d[bmk]", re.IGNORECASE)
"""A model's size at the end of its name: 8x7b."""
WORD_AND_NUMBER = re.compile(r"[A-Za-z]+\d{1,4}[A-Za-z]?|\d+[A-Za-z]{1,8}")


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a variable, an option or a setting of this name holds a secret."""
    return _says(name) is not None


@lru_cache(maxsize=4096)
def _says(name: str) -> str | None:
    """ "plainly" or "maybe" where a name is a secret's."""
    name = re.sub(r"[-.\s]", "_", name)
    if ANOTHER.search(name) and not KEY_ID.search(name):
        return None
    if PLAINLY.search(name):
        return "plainly"
    return "maybe" if MAYBE.search(name) or name in ("pwd", "Pwd") else None


def secrets(env: Mapping[str, str]) -> set[str]:
    """The names of the variables that hold a secret: by their name, or by what is in their value."""
    return {name for name, value in env.items() if shown_variable(name, value) != value}


def shown(env: Mapping[str, str]) -> dict[str, str]:
    """The same variables for a screen, a log or a file that others read, without what is secret."""
    return {name: shown_variable(name, value) for name, value in env.items()}


def shown_variable(name: str, value: str) -> str:
    """The value of a variable, an option or a setting, without what is secret."""
    if is_secret(name) and not SWITCH.fullmatch(value):
        return HIDDEN
    if name.lower().endswith("_proxy") and "://" not in value:
        value = BARE_PROXY.sub(rf"\g<before>{HIDDEN}\g<after>", value)
    return without_secrets(value)


def shown_arguments(words: Sequence[str]) -> list[str]:
    """A program's arguments in the same way: `--api-key X`, `--api-key=X` and `api_key=X` without the X."""
    shown_words: list[str] = []
    flag = ""
    for word in words:
        name, sign, value = word.partition("=")
        if flag and not word.startswith("-"):
            shown_words.append(shown_variable(flag, word))
        elif sign and re.fullmatch(r"-{0,2}[\w.-]+", name):
            shown_words.append(f"{name}={shown_variable(name.lstrip('-'), value)}")
        else:
            shown_words.append(without_secrets(word))
        flag = word.lstrip("-") if word.startswith("-") and not sign else ""
    return shown_words


def secret_arguments(words: Sequence[str]) -> list[str]:
    """The options, or the arguments as they may be shown, that give a program a secret. As in a text: who refuses them
    must not take `--key loss` for one."""
    named, flag = [], ""
    for word in words:
        is_value = bool(flag) and not word.startswith("-")
        text = f"{flag}={word}" if is_value else word
        if without_secrets(text) != text:
            option = flag if is_value else word.partition("=")[0] if "=" in word else without_secrets(word)
            named.append(without_secrets(option))
        flag = word if word.startswith("-") and "=" not in word else ""
    return named


def shown_value(path: str, value: Any) -> Any:
    """A setting's value in the same way, by the last part of its path; in a list or a table each of its texts.

    What is no text is no secret: `tokens: 512`.
    """
    if isinstance(value, Mapping):
        return {name: shown_value(str(name), inside) for name, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(shown_value(path, inside) for inside in value)
    return shown_variable(path.rpartition(".")[2], value) if isinstance(value, str) else value


def without_secrets(text: str) -> str:
    """A text of any length in which keys, tokens and passwords are hidden."""
    if "://" in text or "hooks." in text or "/webhook" in text:
        for pattern in IN_URLS:
            text = pattern.sub(rf"\g<before>{HIDDEN}\g<after>", text)
        text = IN_QUERIES.sub(_query, text)
    if "-----BEGIN" in text:
        text = PEM.sub(rf"\1{HIDDEN}", text)
    # ISSUED has a hundred alternatives, and is too slow for every letter of a log: only long words are tried.
    text = LONG.sub(lambda word: ISSUED.sub(_issued, word[0]), text)
    lower = text.lower()
    if "bearer" in lower or "basic" in lower:
        text = CREDENTIALS.sub(_credentials, text)
    if _is_marked(lower):
        text = "".join(
            _without_named(line) if _is_marked(line.lower()) else line
            for line in text.splitlines(keepends=True)
        )
    if " -u" in text or "user" in lower or "machine" in lower:
        text = LOGIN.sub(rf"\g<before>{HIDDEN}", text)
    return text


def _is_marked(lower: str) -> bool:
    return bool(ASSIGNED.search(lower) or FLAGGED.search(lower))


def _query(match: re.Match[str]) -> str:
    name = re.sub(r"[-.%]", "_", match["name"])
    value = match["value"]
    secret = is_secret(name) or SIGNED.search(name)
    return match["before"] + HIDDEN if secret and not NO_VALUE.fullmatch(value) else match[0]


def _issued(match: re.Match[str]) -> str:
    tail = match["tail"]
    return HIDDEN if tail is None or _is_varied(tail) else match[0]


def _credentials(match: re.Match[str]) -> str:
    value = match["value"]
    if match["scheme"].lower() == "basic":
        try:  # user:password in base64; "basic configuration" is none
            is_credential = b":" in base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
        except (binascii.Error, ValueError):
            is_credential = False
    else:
        is_credential = _is_varied(value)
    return match["before"] + HIDDEN if is_credential else match[0]


def _without_named(line: str) -> str:
    """A line without the values behind names that are secrets'. Names of other things are passed over one by one, as a
    value may hold further names."""
    parts, done = [], 0
    # NAMED ends at the sign, so that a secret's name in the value of a plain one is met, too: run="--api-key X".
    for match in NAMED.finditer(line):
        name, kind = match["name"] or match["flag"], None
        if match.start() >= done:  # not inside of what is hidden already
            kind = _says(name)
        value = VALUE.match(line, match.end()) if kind else None
        if value is None:
            continue
        start, end = value.span("bare" if value["quote"] is None else "quoted")
        sign, bare = match["sign"], value["quote"] is None
        if bare and sign and sign.endswith(": ") and PROSE.match(line, start):
            continue
        header = sign and ":" in sign and bare and HEADER.fullmatch(name.replace("-", "_"))
        if _is_value(name, bool(kind == "plainly" or header), sign, line[start:end], quoted=not bare):
            if bare:
                # VALUE has a bound, for a line of megabytes. What is hidden has none: half a key is one, too.
                last = (REST if header else BARE).match(line, start)
                end = start + len(last[0].rstrip(ENDS)) if last else end
            parts += [line[done:start], HIDDEN]
            done = end
    return "".join(parts) + line[done:]


def _is_value(name: str, plainly: bool, sign: str | None, value: str, *, quoted: bool) -> bool:
    """Whether the text behind a name is a secret. plainly: the name says that one is there."""
    value = value if quoted else value.rstrip(ENDS)
    if NO_VALUE.fullmatch(value) or SWITCH.fullmatch(value) or (not quoted and value[:1] in "([{<"):
        return False
    close = sign is None or not sign.strip(" ") or " " not in sign
    if plainly or (name.isupper() and sign is not None and (close or quoted)):
        return True
    number = re.fullmatch(r"-?[\d.,_]+", value)
    if number or re.search(r"[()\[\]{}<>| ]", value):
        return False
    if (
        "." in name
        or re.search(r"keys?$", name, re.IGNORECASE)
        or (sign is not None and not (close and "=" in sign))
    ):
        return _is_varied(value)
    return len(value) >= 4 and re.fullmatch(r"[\w~+=%-][\w~+/=%-]+", value) is not None


def _is_varied(text: str) -> bool:
    """Whether a text looks drawn by chance: long parts, or letters and digits mixed. No path, name or number does."""
    for part in re.findall(r"[A-Za-z0-9]{8,}", text):
        digits = sum(map(str.isdigit, part))
        if not digits:
            if len(part) >= 16 and "/" not in text and "." not in text:
                return True
        elif digits < len(part) and not SIZE.fullmatch(part) and not WORD_AND_NUMBER.fullmatch(part):
            return True
    return False

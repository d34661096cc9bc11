"""Names that came to a package or left it, behind an exception: which releases have them, and which way to go.

Python says "cannot import name X", "unexpected keyword argument K", "has no attribute A", "No module named M", and
transformers "does not recognize this architecture": the same words for a release that is too old and for one that is
too new. `dsrun.releases` knows when each name came and went; the frames tell who asks for it, and the log often tells
which release is installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsrun.jobs.diagnosis.exceptions.log_versions import releases_in
from dsrun.jobs.diagnosis.reading import owners
from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine
from dsrun.jobs.diagnosis.reading.owners import LIBRARY, REMOTE_CODE, TRAINER, USER
from dsrun.jobs.diagnosis.reading.tracebacks import OF_NO_LIBRARY, Frame, RaisedException

if TYPE_CHECKING:
    from dsrun.releases.lookup import NameRecord, Use

_NAME = r"[A-Za-z_]\w{0,100}"
IMPORTED = re.compile(
    rf"(?m)^(?:[^\n]{{0,200}}: )?cannot import name ['\"](?P<name>{_NAME})['\"] from (?:partially initialized module )?"
    rf"['\"](?P<module>[\w.]{{1,200}})['\"]"
)
OF_MODULE = re.compile(
    r"^(?:partially initialized )?module ['\"]?(?P<module>[\w.]{1,200})['\"]? has no attribute ['\"]?"
    rf"(?P<name>{_NAME})"
)
MODULE = re.compile(
    r"(?m)^(?:[^\n]{0,200}: )?No module named ['\"](?P<module>\w{1,60}(?:\.\w{1,80}){1,12})['\"]"
)
ARGUMENT = re.compile(
    rf"^(?P<call>(?:{_NAME}\.){{0,4}}{_NAME})\(\) got an unexpected keyword argument ['\"](?P<parameter>{_NAME})['\"]"
)
POSITIONAL = re.compile(
    rf"^(?P<call>(?:{_NAME}\.){{0,4}}{_NAME})\(\) takes (?:from \d{{1,2}} to )?\d{{1,2}} positional arguments? "
    r"but (?P<given>\d{1,2}) (?:positional arguments \([^\n)]{1,60}\) )?(?:was|were) given"
)
REQUIRED = re.compile(
    rf"^(?P<call>(?:{_NAME}\.){{0,4}}{_NAME})\(\) missing \d{{1,2}} required (?:positional|keyword-only) arguments?: "
    rf"'(?P<parameter>{_NAME})'"
)
OF_OBJECT = re.compile(
    rf"^(?:type object )?['\"](?P<class>(?:{_NAME}\.){{0,4}}{_NAME})['\"](?: object)? has no attribute "
    rf"['\"](?P<name>{_NAME})['\"]"
)
MODEL_TYPE = re.compile(r"has model type [`'\"](?P<model>[\w-]{1,80})[`'\"] but")
MODEL_KEY = re.compile(r"^['\"](?P<model>[a-z][a-z\d_-]{1,60})['\"]$")
MODEL_MAPPING = re.compile(
    r"transformers/models/auto/(?:configuration|auto|modeling)_\w{1,40}\.py$|/auto_factory\.py$"
)
"""Files whose KeyError is a model_type that this transformers doesn't know."""
TYPES = (
    "ImportError",
    "ModuleNotFoundError",
    "AttributeError",
    "TypeError",
    "ValueError",
    "KeyError",
    "RuntimeError",
)
"""Exceptions in which these words are Python's or transformers', and no quotation."""
IMPORTS = ("ImportError", "ModuleNotFoundError", "RuntimeError")
"""Exceptions that say what can't be imported; RuntimeError is transformers', about an import of its own."""
SHORTEST_GAP = 5
"""Releases without a name, between others with it, from which it counts as gone."""
SETTINGS = ("Config", "Arguments")
"""Ends of the names of classes of settings."""
OF_TRAINER = ("TrainingArguments",)
"""The settings of transformers' Trainer, whose name has no stem."""
SAME_WORDS = "it has the same words"
"""How a record begins to say that a new name is taken for the old one by its words alone."""
SHORTEST_STEM = 8
"""Letters of a class's name that make it the stem of a longer one, as DPOTrainer is of _UnslothDPOTrainer."""
PLACES = (
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "deepspeed",
    "torch",
    "vllm",
    "bitsandbytes",
)
"""Packages whose exported names are looked through for a class that a message names without its module."""
MODULES_OF_BASES = ("trl", "trl.trainer.utils", "transformers", "peft")
"""Modules of classes that scripts derive their own from."""
WORDS_OF_BASE = 3
"""Words that a user's class shares with the class that it is named after."""
NAMESPACES = {"torch": ("torch.optim", "torch.nn"), "bitsandbytes": ("bitsandbytes.optim", "bitsandbytes.nn")}
"""Modules of a package in which its users find classes of one kind."""
IMPORT_LINE = re.compile(r"^from [\w.]{1,200} import \(?(?P<names>[\w, ()\\]{1,400})$")
NEWER, OLDER, NEVER, BROKEN = "newer", "older", "never", "broken"
"""The release that is needed, beside the one installed: a newer, an older; no release has the name; every release has
it, so that the installed files are at fault."""


@dataclass(frozen=True)
class ApiFinding:
    """What the releases of a package say about a name that a program asks for in vain."""

    package: str
    path: str
    """The name with its module, or the model_type."""
    kind: str
    """ "name", "module", "attribute", "parameter", "positional", "required" or "model type"."""
    name: str
    direction: str
    """The release that is needed, beside the one installed."""
    first: str = ""
    """The first release that has it."""
    gone: str = ""
    """The first release without it."""
    last: str = ""
    """The last release that has it."""
    came_between: bool = False
    """Whether releases that were not read lie before the first that has it: it may be older."""
    gone_between: bool = False
    """Whether releases that were not read lie between the last with it and the first without."""
    beside: tuple[str, ...] = ()
    """Other names of the same import line that fewer releases have, each with these releases."""
    all_of_line: str = ""
    """The releases that have all names of the import line, as pip takes them; empty where that is those of this one."""
    base_of: str = ""
    """The user's class whose base this is likely to be, by its name."""
    instead: str = ""
    instead_is_said: bool = False
    """Whether a deprecation, a decorator or where its definition lies says what to take, and not its name's words."""
    near: tuple[str, ...] = ()
    installed: str = ""
    """The installed release, as the log shows it; empty where it doesn't."""
    caller: str = ""
    """The package or trainer that asks for it; empty for the user's own code."""
    place: str = ""
    """The user's line that asks, or that leads there, as file:line."""
    is_own: bool = False
    """Whether the user's own code asks for it."""
    uses: tuple[Use, ...] = ()
    """The packages that import it, by their releases."""
    overridden: str = ""
    """The user's method that overrides one with this parameter."""
    is_sure: bool = True
    """Whether the name was found where the message says, and not by likeness."""

    @property
    def requirement(self) -> str:
        """The releases that have it, as pip takes them."""
        if self.all_of_line:
            return f"{self.package}{self.all_of_line}"
        return f"{self.package}{_bounds(self.first, self.last, self.gone, self.gone_between)}"


def _bounds(first: str, last: str, gone: str, gone_between: bool) -> str:
    """Releases as pip takes them; of those that were read, the side that is known to work."""
    until = f"<={last}" if gone_between else f"<{gone}"
    return ",".join([f">={first}"] * bool(first) + [until] * bool(gone))


def _bounds_of(record: NameRecord) -> str:
    first = "" if record.from_the_start else record.first
    return _bounds(first, record.last, record.next, record.gone_between)


@dataclass(frozen=True)
class _Asked:
    """A name as a message asks for it."""

    kind: str
    path: str
    name: str
    parameter: str = ""
    is_sure: bool = True
    overridden: str = ""
    base_of: str = ""
    given: int = 0
    """Positional arguments that were handed over, without self."""


def finding(raised: RaisedException, lines: Sequence[PeeledLine]) -> ApiFinding | None:
    """What the releases say about the name that an exception misses; None where they know nothing of it."""
    if raised.is_users_own or raised.name not in TYPES:
        return None
    records = [(asked, record) for asked in _asked(raised) if (record := _record(asked))]
    if not records:
        return None
    # Of several classes with the name, the one of which the releases know more.
    asked, record = next((pair for pair in records if pair[1].releases), records[0])
    from dsrun.releases.lookup import uses

    installed = releases_in(lines, [record.package.name]).get(record.package.name, "")
    record = _before_gap(record) if not installed else record
    whole, beside, there = _with_whole_line(record, asked, raised)
    direction = _direction(whole, installed, _possible(record, asked) & there)
    if not direction or (record.unread and not record.releases):
        return None
    if direction == NEVER and asked.kind == "attribute" and not _is_of_raiser(asked.path, raised):
        return None  # a class of that name, and not surely this one
    caller = _caller(raised)
    instead = record.instead or _taken_over(asked, record, caller)
    if asked.kind == "attribute" and caller and caller.package == record.package.name and not instead:
        return None  # its own code asks, of the same release: the class has it at times only
    user = raised.user_frame
    own = caller is None or caller.owner == USER
    return ApiFinding(
        package=record.package.name if record.releases else _package_name(asked.path),
        path=asked.path,
        kind=asked.kind,
        name=asked.name,
        direction=direction,
        first="" if record.from_the_start else record.first,
        gone=record.next,
        last=record.last,
        came_between=record.came_between,
        gone_between=record.gone_between,
        beside=beside,
        all_of_line=_bounds_of(whole) if beside else "",
        base_of=asked.base_of,
        instead=instead,
        instead_is_said=bool(record.because) and not record.because.startswith(SAME_WORDS),
        near=record.near,
        installed=installed,
        caller="" if own or caller is None else caller.package,
        place=f"{user.file}:{user.line}" if user else "",
        is_own=own,
        uses=tuple(uses(asked.path)),
        overridden=asked.overridden,
        is_sure=asked.is_sure,
    )


def _before_gap(record: NameRecord) -> NameRecord:
    """The record of a name that left and came back much later: that of its first span, which is what older code asks
    for. Releases of a side branch that lack it are no gap."""
    bits = f"{record.releases:b}"[::-1].strip("0") if record.releases else ""
    gap = re.search(f"0{{{SHORTEST_GAP},}}", bits)
    if gap is None:
        return record
    start = (record.releases & -record.releases).bit_length() - 1
    return replace(record, releases=record.releases & ((1 << start + gap.start()) - 1))


def _with_whole_line(
    record: NameRecord, asked: _Asked, raised: RaisedException
) -> tuple[NameRecord, tuple[str, ...], int]:
    """The record with the releases that have all names of the line which imports this one, those of them by which the
    releases are fewer, and the releases that may be installed: Python found the names before this one."""
    there = record.package.every
    frame = raised.raiser
    hit = IMPORT_LINE.match(frame.code) if frame and record.releases and asked.kind == "name" else None
    names = [name.split(" as ")[0].strip(" ()\\") for name in hit["names"].split(",")] if hit else []
    if asked.name not in names:
        return record, (), there
    releases, beside = record.releases, []
    module = asked.path.rpartition(".")[0]
    for place, name in enumerate(names):
        other = _record(_Asked("name", f"{module}.{name}", name)) if name.isidentifier() else None
        if other is None or not other.releases:
            continue
        if place < names.index(asked.name):
            there &= other.releases
        if releases & other.releases not in (0, releases):
            releases &= other.releases
            beside.append(f"{name} ({_bounds_of(other)})")
    return replace(record, releases=releases), tuple(beside), there or record.package.every


def _is_of_raiser(path: str, raised: RaisedException) -> bool:
    """Whether a class is of the package whose code asks, or is known to that package's data; a user's own line may ask
    any."""
    from dsrun.releases import packed

    frame = raised.raiser
    if frame is None or frame.owner == USER:
        return True
    holder = path.rpartition(".")[0]
    top, name = holder.partition(".")[0], holder.rpartition(".")[2]
    package = packed.package_of(frame.package) if frame.package else None
    if frame.package == top or package is None:
        return frame.package == top or len(_homes(name)) == 1
    used = (line.partition("\t")[0] for line in package.section("uses").splitlines())
    return any(line.startswith(f"{top}.") and line.rpartition(".")[2] == name for line in used)


def _package_name(path: str) -> str:
    """The name on the index of the package that a path begins with."""
    from dsrun.releases.packed import package_of

    package = package_of(path)
    return package.name if package else path.partition(".")[0]


def _record(asked: _Asked) -> NameRecord | None:
    """What the releases say of a name; None where there are no data of its package."""
    from dsrun.releases.lookup import look_up

    try:
        record = _inherited(look_up(asked.path, asked.parameter), asked)
    except LookupError:
        return None
    if asked.kind == "positional":
        return _with_as_many(record, asked)
    return _without(record) if asked.kind == "required" else record


def _with_as_many(record: NameRecord, asked: _Asked) -> NameRecord | None:
    """The record of a function with the releases in which it takes as many positional arguments; None where that is
    not known."""
    from dsrun.releases.lookup import parameters

    takes = parameters(asked.path)
    if not takes or any(name.startswith("*") and not name.startswith("**") for name in takes):
        return None
    plain = [had for name, had in takes.items() if not name.startswith("*")]
    numbers = range(len(record.package.releases))
    enough = sum(1 << bit for bit in numbers if sum(had >> bit & 1 for had in plain) >= asked.given)
    return replace(record, releases=enough, instead="") if enough else None


def _without(record: NameRecord) -> NameRecord | None:
    """The record of a parameter that is required now, turned round: the releases before it came. None where it was
    always there."""
    if not record.releases or record.from_the_start:
        return None
    return replace(record, releases=(record.releases & -record.releases) - 1, instead="")


def _possible(record: NameRecord, asked: _Asked) -> int:
    """The releases, as bits, that have what the name belongs to and lack the name: one of them is installed."""
    from dsrun.releases.lookup import look_up

    every = record.package.every
    holder = (
        asked.path if asked.kind in ("parameter", "positional", "required") else asked.path.rpartition(".")[0]
    )
    if not holder.startswith(record.path.partition(".")[0]) or "." not in holder:
        return every & ~record.releases
    had = look_up(holder).releases or every
    return had & ~record.releases


def _direction(record: NameRecord, installed: str, possible: int) -> str:
    """The release that is needed; empty where the data say nothing that could be relied on."""
    if not record.releases:
        # A class may take what its bases elsewhere have, or answer at run time: not to be found says nothing there.
        return "" if record.any_keyword or record.dynamic or record.inherited_from else NEVER
    if installed and (side := _side(record, installed)):
        return side
    if not record.next:
        return BROKEN if record.from_the_start else NEWER
    if possible and possible < 1 << record.releases.bit_length():
        return NEWER  # where the newer ones lack it, they lack what it belongs to as well
    return (
        OLDER  # of releases without it, the newer ones are installed more often than those of before it came
    )


def _side(record: NameRecord, installed: str) -> str:
    """The direction from an installed release, which the data may not have (a development version)."""
    known = [_number(release) for release in record.package.releases]
    here = _number(installed)
    below = [place for place, release in enumerate(known) if release <= here]
    if not below or here[:2] > known[-1][:2]:
        return ""
    bit = 1 << below[-1]
    if record.releases & bit:
        # Between two that were read, of which the next one lacks it: what is installed lacks it already.
        following = bit << 1 & record.package.every
        is_between = record.package.has_gaps and here != known[below[-1]]
        return OLDER if is_between and following and not following & record.releases else BROKEN
    return NEWER if bit < record.releases & -record.releases else OLDER


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


def _inherited(record: NameRecord, asked: _Asked) -> NameRecord:
    """The record of a member, or where only a base of another package may have it, that one's."""
    from dsrun.releases.lookup import look_up

    seen: set[str] = set()
    while not record.releases and record.inherited_from:
        base = next((path for path in record.inherited_from if path not in seen), None)
        if base is None:
            break
        seen.add(base)
        member = asked.path.rpartition(".")[2]
        method = asked.parameter and member[:1].islower()
        path = f"{base}.{member}" if not asked.parameter or method else base
        try:
            record = look_up(path, asked.parameter)
        except LookupError:
            break
    return record


# What a message asks for


def _asked(raised: RaisedException) -> Iterator[_Asked]:
    """The names that an exception's message may be about, the surest first, each with a package that there are data
    of."""
    message = raised.message
    if hit := MODEL_TYPE.search(message):
        yield _model_type(hit["model"])
    elif hit := MODEL_KEY.match(message.strip()) if raised.name == "KeyError" else None:
        if raised.raiser and MODEL_MAPPING.search(raised.raiser.file.replace("\\", "/")):
            yield _model_type(hit["model"])
    elif hit := (IMPORTED.search(message) if raised.name in IMPORTS else OF_MODULE.search(message)):
        yield _Asked("name", f"{hit['module']}.{hit['name']}", hit["name"])
    elif hit := MODULE.search(message) if raised.name in IMPORTS else None:
        yield _Asked("module", hit["module"], hit["module"])
    elif hit := ARGUMENT.search(message):
        yield from _parameter(hit["call"], hit["parameter"], raised)
    elif hit := POSITIONAL.search(message):
        yield from _positional(hit["call"], int(hit["given"]), raised)
    elif hit := REQUIRED.search(message):
        for asked in _parameter(hit["call"], hit["parameter"], raised):
            yield replace(asked, kind="required")
    elif (hit := OF_OBJECT.search(message)) and not OF_NO_LIBRARY.search(message):
        yield from _attribute(hit["class"].rpartition(".")[2], hit["name"], raised)


def _model_type(model: str) -> _Asked:
    return _Asked("model type", f"transformers.models.{model.replace('-', '_')}", model)


def _parameter(call: str, parameter: str, raised: RaisedException) -> Iterator[_Asked]:
    """A parameter of a function, or of a class's method."""
    *outer, function = call.split(".")
    if not outer:
        for path in _classes(function, raised):
            yield _Asked("parameter", path, parameter, parameter)
        return
    method = "" if function == "__init__" else f".{function}"
    for path in _classes(outer[-1], raised):
        is_sure = path.endswith(f".{outer[-1]}")
        # A class of another name that is made of the package's, and which the package itself calls, has a method of its
        # own in the place of that one.
        calls_it = raised.raiser is not None and raised.raiser.package == path.partition(".")[0]
        overridden = call if method and not is_sure and calls_it else ""
        yield _Asked("parameter", f"{path}{method}", parameter, parameter, is_sure, overridden=overridden)
    if method and (path := _overridden(function, parameter, raised)):
        yield _Asked("parameter", path, parameter, parameter, overridden=call)
    if not method and (path := _likely_base(outer[-1], parameter)):
        yield _Asked("parameter", path, parameter, parameter, is_sure=False, base_of=outer[-1])


def _likely_base(name: str, parameter: str) -> str:
    """The class of a package that a user's class is named after, and that took this parameter until it left; empty for
    none."""
    from dsrun.releases import packed
    from dsrun.releases.lookup import has_words_of, look_up

    for module in MODULES_OF_BASES:
        entry = packed.package(module.partition(".")[0]).module(module)
        for one in entry.of("") if entry else ():
            record = None
            if one.kind in ("c", "d") and has_words_of(name, one.text, WORDS_OF_BASE):
                record = look_up(f"{module}.{one.text}", parameter)
            if record and record.releases and record.next:
                return f"{module}.{one.text}"
    return ""


def _positional(call: str, given: int, raised: RaisedException) -> Iterator[_Asked]:
    """A function that was handed more arguments than it takes."""
    *outer, function = call.split(".")
    given -= 1 if outer else 0  # Python counts self
    for path in _classes(outer[-1] if outer else function, raised):
        if path.endswith(f".{(outer or [function])[-1]}"):
            whole = f"{path}.{function}" if outer and function != "__init__" else path
            yield _Asked("positional", whole, f"{function}()", given=given)
    if outer and (path := _overridden(function, "", raised)):
        yield _Asked("positional", path, f"{function}()", overridden=call, given=given)


def _attribute(class_name: str, name: str, raised: RaisedException) -> Iterator[_Asked]:
    for path in _classes(class_name, raised):
        if path.endswith(f".{class_name}"):
            yield _Asked("attribute", f"{path}.{name}", name)


def _classes(name: str, raised: RaisedException) -> Iterator[str]:
    """Paths under which a package has a class or a function of a name, or of its stem."""
    from dsrun.releases import packed

    modules = [owners.module_of(frame.file) for frame in reversed(raised.frames)]
    tops = [*dict.fromkeys(module.partition(".")[0] for module in modules if module), *PLACES]
    for module in dict.fromkeys([*filter(None, modules), *tops]):
        package = packed.package_of(module)
        entry = package.module(module) if package else None
        if entry and next(entry.of("", name), None):
            yield f"{module}.{name}"
    for top in ("trl", "transformers", "peft"):
        entry = packed.package(top).module(top)
        names = (other.text for other in entry.of("")) if entry else iter(())
        stems = [
            stem for stem in names if len(stem) >= SHORTEST_STEM and name.endswith(stem) and stem != name
        ]
        yield from (f"{top}.{stem}" for stem in sorted(stems, key=len, reverse=True))


def home_of(name: str) -> str:
    """The package that exports a name, of those that trainers import only if they are there; empty for none or
    several."""
    homes = _homes(name)
    return homes[0] if len(homes) == 1 else ""


def _homes(name: str) -> list[str]:
    """The packages that export a name, in themselves or in one of NAMESPACES."""
    from dsrun.releases import packed

    return [
        top
        for top in PLACES
        for module in (top, *NAMESPACES.get(top, ()))
        if (entry := packed.package(top).module(module)) and next(entry.of("", name), None)
    ]


def _overridden(method: str, parameter: str, raised: RaisedException) -> str:
    """The method with this parameter in the file that calls it, where the user's own class overrides it."""
    from dsrun.releases import packed
    from dsrun.releases.lookup import look_up

    module = owners.module_of(raised.raiser.file) if raised.raiser else ""
    package = packed.package_of(module) if module else None
    entry = package.module(module) if package else None
    for one in entry.of("") if entry else ():
        if one.kind in ("c", "d") and next(one.of(".", method), None):
            path = f"{module}.{one.text}.{method}"
            if not parameter or look_up(path, parameter).releases:
                return path
    return ""


def _taken_over(asked: _Asked, record: NameRecord, caller: Frame | None) -> str:
    """The class of settings that has a name now: a parameter that a trainer's config took over, or the config that a
    package asks for in the place of the class it was given; empty for none."""
    if asked.kind not in ("parameter", "attribute") or (record.releases and not record.next):
        return ""
    from dsrun.releases import packed
    from dsrun.releases.lookup import look_up

    holder = asked.path if asked.kind == "parameter" else asked.path.rpartition(".")[0]
    top = caller.package if caller and not record.releases else holder.partition(".")[0]
    package = packed.package_of(top) if top else None
    entry = package.module(top) if package else None
    if package is None or entry is None:
        return ""
    names = sorted({one.text for one in entry.of("") if one.text.endswith(SETTINGS)})
    if asked.kind == "parameter":  # a trainer's own settings alone
        stem = holder.rpartition(".")[2].removesuffix("Trainer")
        names = [
            name for name in names if name.removesuffix("Config") == stem or (not stem and name in OF_TRAINER)
        ]
    elif caller:  # those of the trainer whose file asks
        stem = re.split(r"[\\/]", caller.file)[-1].partition("_trainer")[0].replace("_", "")
        names = [name for name in names if name.removesuffix("Config").lower() == stem]
    # Where the parameter went as it left, or what has the attribute in a release that asks for it.
    left = record.releases and record.next
    asked_of = 1 << record.releases.bit_length() if left else package.every
    for name in names:
        if f"{top}.{name}" != holder and look_up(f"{top}.{name}", asked.name).releases & asked_of:
            return f"{top}.{name}({asked.name}=)" if asked.kind == "parameter" else f"{top}.{name}"
    return ""


def _caller(raised: RaisedException) -> Frame | None:
    """The frame that asks: the innermost of a package or of the user; Python's import machinery and the lazy modules
    of a package only pass the question on."""
    for frame in reversed(raised.frames):
        passes_on = frame.name in (
            "__getattr__",
            "_get_module",
            "inner_f",
            "wrapped_func",
            "wrapper",
            "inner",
        )
        if frame.owner in (USER, TRAINER, LIBRARY) and not passes_on:
            return frame
    return raised.user_frame


# In words


def in_words(found: ApiFinding, chinese: bool = False) -> tuple[str, str]:
    """A sentence on what the releases say, and the next step; English or Chinese."""
    return (_means_zh(found), _next_zh(found)) if chinese else (_means(found), _next(found))


def _what(found: ApiFinding) -> str:
    if found.kind in ("parameter", "required"):
        return f"the parameter `{found.name}` of {found.path}"
    if found.kind == "positional":
        return f"`{found.path}` with as many arguments"
    return f"the model type `{found.name}`" if found.kind == "model type" else f"`{found.path}`"


def _means(found: ApiFinding) -> str:
    what = _what(found)
    what = what[0].upper() + what[1:]
    here = f" This log shows {found.package} {found.installed}." if found.installed else ""
    if found.kind == "required":
        asks = f" {found.caller} calls it without." if found.caller else ""
        return f"{what} is there, and required, since {found.package} {found.gone}.{asks}{here}"
    span = f"{found.first} to {found.last}" if found.first else f"up to {found.last}"
    caller = "The" + REMOTE_CODE[3:] if found.caller == REMOTE_CODE else found.caller
    asks = f" {caller} asks for it." if caller else ""
    if found.overridden:
        asks = f" {found.overridden} overrides that method without it."
    since = f"since {found.first}{' (or a release just before it)' if found.came_between else ''}"
    left = f"between {found.last} and {found.gone}" if found.gone_between else f"in {found.gone}"
    because = {
        NEWER: f"{what} is in {found.package} {since} only, and the installed one is older.",
        OLDER: f"{what} left {found.package} {left} (it was there {span}).",
        NEVER: f"No release of {found.package} that is known has {_what(found)}.",
        BROKEN: f"{what} is in {_every(found)}: the installed files aren't those of one whole release, or another "
        "file or folder of that name is found first.",
    }[found.direction]
    if found.overridden and found.direction in (NEWER, BROKEN):
        since = f" since {found.first}" if found.first else ""
        because = f"{found.package} hands {_what(found)} to it{since}."
    if found.beside:
        because += f" The same line also imports {', '.join(found.beside)}."
    if found.base_of:
        asks = f" By its name {found.base_of} is made of that class."
    near = f" Names like it: {', '.join(found.near)}." if found.near else ""
    return f"{because}{asks}{near}{here}"


def _every(found: ApiFinding) -> str:
    return (
        f"{found.package} {found.installed}" if found.installed else f"every known release of {found.package}"
    )


def _next(found: ApiFinding) -> str:
    if found.overridden:
        it = "the further argument (*args" if found.kind == "positional" else f"it (`{found.name}=None`"
        return f"Let {found.overridden} take {it}, or **kwargs) and hand it on" + (
            f", or {found.package}<{found.first}." if found.first else "."
        )
    if found.direction == NEVER:
        return _next_of_unknown(found)
    if found.direction == BROKEN:
        return (
            f"`python -c 'import {found.package}; print({found.package}.__file__)'`: is it a file or folder of your "
            f"own, rename it; else reinstall {found.package} whole (`pip install --force-reinstall --no-deps "
            f"{found.package}`), and restart the notebook's kernel."
        )
    install = f"`pip install '{found.requirement}'`"
    by_caller = _by_caller(found)
    place = f" in {found.place}" if found.place else ""
    if found.instead and found.is_own and found.direction == OLDER:
        use = f"{found.instead} instead{place}"
        return f"Use {use}, or {install}." if found.instead_is_said else f"{install}, or take {use}."
    instead = f"; {found.instead} took its place" if found.instead else ""
    return f"{install}{by_caller}{instead}."


def _by_caller(found: ApiFinding) -> str:
    """The other way out: a release of whoever asks that fits what is installed."""
    if not found.caller or found.caller == found.package:
        return f", or change {found.place}" if found.is_own and found.place else ""
    if found.caller == REMOTE_CODE:
        return ", or newer files of the model"
    known = next((use for use in found.uses if use.package == found.caller), None)
    if known and not known.until_now and found.direction != NEWER:
        return f", or {found.caller} newer than {known.last}, which no longer asks for it"
    way = "an older" if found.direction == NEWER else "a newer"
    return f", or {way} {found.caller} that fits the {found.package} installed"


def _next_of_unknown(found: ApiFinding) -> str:
    if found.instead and found.kind == "attribute":
        place = f" in {found.place}" if found.place else ""
        return (
            f"Hand over a {found.instead}{place}, which has `{found.name}`, or take the "
            f"{found.caller or found.package} from before it asked for that."
        )
    if found.kind == "model type":
        return (
            "Its code comes with the model or with a package of its own: trust_remote_code=True with the model's "
            "files (config.json needs an auto_map), or import that package before loading. Another transformers "
            "doesn't help; a model of the last weeks may be in its main branch."
        )
    if found.near and found.is_own:
        return f"Is {found.near[0]} meant? Correct it" + (f" in {found.place}." if found.place else ".")
    if found.caller and found.caller == found.package:
        return (
            f"{found.package}'s own code asks for it: a fault of that release, or files of two releases. A newer "
            f"{found.package} first, or the one before; then its known issues on `{found.name}`."
        )
    if found.caller and found.caller != found.package:
        return (
            f"{found.caller} and {found.package} are of releases that don't go together, or something replaced "
            f"parts of {found.package}: install releases of the two from about the same time (`pip list`)."
        )
    return "Look at what that line hands over or asks for" + (f": {found.place}." if found.place else ".")


def _what_zh(found: ApiFinding) -> str:
    if found.kind in ("parameter", "required"):
        return f"{found.path} 的参数 `{found.name}`"
    if found.kind == "positional":
        return f"接受这么多参数的 `{found.path}`"
    return f"模型类型 `{found.name}`" if found.kind == "model type" else f"`{found.path}`"


def _means_zh(found: ApiFinding) -> str:
    what, span = _what_zh(found), f"{found.first} 至 {found.last}" if found.first else f"至 {found.last}"
    here = f"日志中的版本是 {found.package} {found.installed}。" if found.installed else ""
    if found.kind == "required":
        return f"{what} 自 {found.package} {found.gone} 起成为必需的参数，而调用方没有给出。{here}"
    asks = f"{found.caller} 用到它。" if found.caller else ""
    asks = f"{found.overridden} 重写了该方法，却没有这个参数。" if found.overridden else asks
    since = (
        f"最晚自 {found.package} {found.first} 起"
        if found.came_between
        else f"自 {found.package} {found.first} 起"
    )
    left = (
        f"在 {found.package} {found.last} 与 {found.gone} 之间"
        if found.gone_between
        else f"在 {found.package} {found.gone} 中"
    )
    because = {
        NEWER: f"{what} {since}才有，而安装的版本更旧。",
        OLDER: f"{what} {left}已移除（{span} 有）。",
        NEVER: f"已知的 {found.package} 版本都没有 {what}。",
        BROKEN: f"{found.package} 的相应版本都有 {what}：安装的文件不完整，或被同名文件、目录遮住。",
    }[found.direction]
    because += f"同一行还导入 {'、'.join(found.beside)}。" if found.beside else ""
    asks = f"{found.base_of} 看名字是由它派生的。" if found.base_of else asks
    near = f"相近的名字：{'、'.join(found.near)}。" if found.near else ""
    return f"{because}{asks}{near}{here}"


def _next_zh(found: ApiFinding) -> str:
    if found.overridden:
        return f"让 {found.overridden} 接受多出的参数（`{found.name}=None`、*args 或 **kwargs）。"
    if found.direction == NEVER and found.kind == "model type":
        return "其代码随模型或单独的包提供：用 trust_remote_code=True，或先导入那个包；换 transformers 版本没有用。"
    if found.direction == NEVER:
        meant = f"是否应为 {found.near[0]}？" if found.near else ""
        return f"{meant}检查 {found.place or '该行'} 的写法，或安装同期发布的各个包。"
    if found.direction == BROKEN:
        reinstall = f"`pip install --force-reinstall --no-deps {found.package}`"
        return f"检查 {found.package} 的路径是否被自己的同名文件遮住；否则重装：{reinstall}。"
    instead = f"改用 {found.instead}，或" if found.instead_is_said else ""
    other = f"；或换一个与之配套的 {found.caller} 版本" if found.caller else ""
    return f"{instead}`pip install '{found.requirement}'`{other}。"


def api_key(found: ApiFinding) -> Mapping[str, object]:
    """What --json says of it."""
    return {
        "package": found.package, "name": found.path, "kind": found.kind, "direction": found.direction,
        "first": found.first or None, "last": found.last or None, "gone": found.gone or None,
        "installed": found.installed or None, "caller": found.caller or None, "instead": found.instead or None,
    }  # fmt: skip

"""Exceptions in a log: type, message, frames, and which of a chain was the first.

Python prints a chain oldest first ("During handling of the above exception", "The above exception was the direct
cause"): what stands first was raised first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from dsrun.jobs.diagnosis.reading import owners
from dsrun.jobs.diagnosis.reading.log_lines import GOES_ON, PeeledLine, narrow
from dsrun.jobs.diagnosis.reading.owners import COMPILED, LIBRARY, TRAINER, USER

BEGIN = "Traceback (most recent call last)"
FRAME = re.compile(r"File \"(?P<file>[^\"\n]{1,500})\", line (?P<line>\d{1,9})(?:, in (?P<name>\S{1,200}))?")
RICH_FRAME = re.compile(r"^(?P<file>/[^:\n]{1,500}\.py):(?P<line>\d{1,9}) in (?P<name>\S{1,200})")
NOTEBOOK_FRAME = re.compile(
    r"^(?:File )?(?P<file>(?:[~/]|[A-Za-z]:[\\/])[^:\n]{1,400}\.py)(?::(?P<line>\d{1,9}))?,? in "
    r"(?P<name>[\w.<>]{1,200})(?:\(|$)"
)
CELL_FRAME = re.compile(
    r"^(?P<file>Cell In ?\[\d{1,6}\]|<ipython-input-[\w-]{1,60}>)(?:,? line (?P<line>\d{1,9})| in (?P<name>\S{1,200}))"
)
"""A frame in a notebook's own code."""
NOTEBOOK_BEGIN = re.compile(r"^(?P<type>[A-Za-z_]\w{0,80}) {2,80}Traceback \(most recent call last\)")
"""A notebook's traceback: IPython names the type first, and again at the end, which a log that was cut lacks."""
EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,60}"
    r"(?:Error|Exception|Exit|Interrupt|Warning|Timeout|Expired|Closed|NotFound|Unavailable|Failure|Iteration))"
    r"(?::(?:\s(?P<message>[^\n]{0,4000}))?)?$"
)
ANY_TYPE = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,60})(?:: (?P<message>[^\n]{0,4000}))?$"
)
"""The last line of a traceback with frames, where the type may have any name."""
DOTTED_TYPE = re.compile(
    r"^(?P<type>[a-z_]\w{0,60}\.(?:[a-z_]\w{0,60}\.){1,6}[A-Z]\w{0,60}): (?P<message>[^\n]{1,4000})$"
)
"""An exception whose type is written with two modules or more, whatever its name ends in."""
INSIDE = re.compile(
    r"(?<![\w.'\"])(?P<type>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception))"
    r"(?:: (?P<message>[^\n]{4,4000})|\((?P<quote>['\"])(?P<quoted>[^\n]{4,2000}?)(?P=quote),?\))"
)
"""An exception in the middle of a line, as programs print it that caught it."""
THROWN = re.compile(r"^what\(\): {1,4}(?P<message>[^\n]{4,4000})")
"""C++'s message for an exception that nobody caught."""
CODE = re.compile(
    r"^\s{0,60}(?:(?:-{1,8}> ?|[❱>] )?\d{1,6} {0,8}[│|]? {0,60})?(?:raise|assert|except|logger\.\w{1,12}\() ?\S"
)
"""A line of code in a traceback: the exception's own line says the same, with values."""
IGNORED = re.compile(r"^Exception ignored in\b|^Error in atexit\.|--- Logging error ---")
"""Lines after which Python goes on, or was ending anyway."""
SWALLOWED = re.compile(r"^Exception in thread\b")
LINKS = ("During handling of the above exception", "The above exception was the direct cause")
OTHERS = re.compile(
    r"^(?:srun|slurmstepd|wandb|mpirun|mpiexec|prterun|pdsh\S{0,60}|bash|sh|make|ninja|\S{1,60}\.sh): "
    r"|^(?:Killed|Aborted|Bus error|Segmentation fault|terminate called|Killing subprocess|Exception in thread)"
    r"|^(?:\(raylet\)|[=*-]{8,400}$)"
)
"""Lines of other programs, which may stand right below an exception."""
WRAPPER = re.compile(r"^Caught \w{1,80} in \w{1,40}|^CheckpointException ranks:")
"""Message of an exception that torch raises again, as a DataLoader's worker, a replica or another rank had it."""
OF_LANGUAGE = frozenset(
    {"KeyError", "IndexError", "AttributeError", "TypeError", "NameError", "UnboundLocalError", "ZeroDivisionError",
     "ModuleAttributeError"}
)  # fmt: skip
"""Types that Python itself raises at an expression: what they mean depends on whose expression it is."""
CARRIERS = frozenset(
    {
        "requests",
        "urllib3",
        "httpx",
        "httpcore",
        "aiohttp",
        "tenacity",
        "fsspec",
        "s3fs",
        "botocore",
        "boto3",
        "anyio",
    }
)
"""Packages that carry out what others ask: their failures are of what was asked for."""
ASKERS = (TRAINER, LIBRARY)
OF_NO_LIBRARY = re.compile(
    r"^(?:['\"][^'\"\n]{0,80}['\"]|-?\d{1,12}|\([^\n]{0,80}\))\s*$"
    r"|^'(?:NoneType|list|dict|str|int|float|tuple|set|bool|bytes|function|method|generator|range|zip|map)' object "
    r"|name '\w{1,80}' is not defined|^(?:cannot access )?local variable|index out of range$|^unsupported operand"
    r"|not supported between instances of|^(?:\w{1,30} )?division"
)
"""Messages that Python writes about a value of its own types, a key or a name, and about no library's object."""
MOST_CODE = 200
"""Longest line of code that is kept, in characters."""
LINES_OF_OTHERS = 12
"""Lines of other ranks that may stand between a frame and its code."""
MARKS = re.compile(r"^[\^~ ]{1,400}$")
"""Python's marks below a line of code."""
MESSAGE_LINES = 8
"""Lines of an exception's message that are read."""


class Frame(NamedTuple):
    """One call in a traceback."""

    file: str
    line: int
    name: str
    code: str = ""
    """The line of code, where the log shows it."""

    @property
    def owner(self) -> str:
        """The owner of the code that the frame is in, one of OWNERS."""
        return owners.owner(self.file)[0]

    @property
    def package(self) -> str:
        """The package that it is in; empty for the user's own code and Python's own."""
        return owners.owner(self.file)[1]

    @property
    def is_library(self) -> bool:
        """Whether it lies in an installed package, in Python's own, or in a trainer's own code."""
        return self.owner != USER


@dataclass
class RaisedException:
    """An exception that a log shows."""

    type: str
    """Type with its modules."""
    message: str
    line: PeeledLine
    """The line with its type."""
    last: int
    """The number of its message's last line."""
    frames: list[Frame] = field(default_factory=list)
    """Outermost first; empty where the log has only the last line."""
    handled: bool = False
    """Whether Python says that it was ignored, or raised in a thread."""
    ignored: bool = False
    """Whether it was ignored: nothing in it is why a job died."""
    in_chain: bool = False
    """Whether an earlier exception of the same chain precedes it."""
    chain_frames: Sequence[Frame] = ()
    """Frames of the others of its chain, or of the same exception in another rank."""

    @property
    def name(self) -> str:
        """The type without modules."""
        return self.type.rpartition(".")[2]

    @property
    def is_warning(self) -> bool:
        """Whether it is a warning after which the program went on, as it does unless one is raised (-W error)."""
        return self.name.endswith("Warning") and not self.frames

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the user's own code; of a chain, where this exception has none, that of another."""
        frames = [*self.chain_frames, *self.frames]
        return next((frame for frame in reversed(frames) if frame.owner == USER), None)

    @property
    def raiser(self) -> Frame | None:
        """The innermost frame that is Python: where it was raised, or what called the compiled code that did."""
        return next((frame for frame in reversed(self.frames) if frame.owner != COMPILED), None)

    @property
    def owner(self) -> str:
        """The owner of the code that raised the exception; empty where no frame tells."""
        return self.raiser.owner if self.raiser else ""

    @property
    def package(self) -> str:
        """The package that raised it; empty for the user's own code, or where no frame tells."""
        return self.frames[-1].package if self.frames else ""

    @property
    def asker(self) -> Frame | None:
        """The innermost frame of whoever asked for a transfer or a call, where packages raised it that only carry it
        out; None where nobody but these is in it."""
        if self.package not in CARRIERS:
            return None
        named = (
            frame
            for frame in reversed(self.frames)
            if frame.package not in CARRIERS and frame.owner in ASKERS
        )
        return next(named, None)

    @property
    def is_wrapped(self) -> bool:
        """Whether it only passes on one of another process, whose traceback follows in its message."""
        return bool(WRAPPER.match(self.message))

    @property
    def is_of_language(self) -> bool:
        """Whether Python itself raised it at an expression, and no `raise` in the code of whoever owns the frame."""
        raised = self.raiser is not None and CODE.match(self.raiser.code)
        return self.name in OF_LANGUAGE and not raised

    @property
    def is_users_own(self) -> bool:
        """Whether it is Python's word on the user's own expression, without a library's object in it."""
        return (
            self.is_of_language
            and self.owner == USER
            and bool(OF_NO_LIBRARY.search(self.message.partition("\n")[0]))
        )


def is_code(place: int, lines: Sequence[PeeledLine]) -> bool:
    """Whether a line is source code in a traceback, by what it is or by the frame above it: it quotes a message, and
    nothing is raised by it. place: its index in the lines."""
    line = lines[place]
    text = line.text.strip()
    if CODE.match(line.text):
        return True
    above = next(
        (
            other.text.strip()
            for other in reversed(lines[max(0, place - LINES_OF_OTHERS) : place])
            if (other.source, other.rank, other.host) == (line.source, line.rank, line.host)
            and other.text.strip()
        ),
        "",
    )
    raised = EXCEPTION.match(text) or ANY_TYPE.match(text)
    return _frame(above) is not None and not raised and _frame(text) is None


class _Open:
    """A traceback that is being read, of one rank in one log."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.handled = self.ignored = self.linked = False
        self.last: RaisedException | None = None
        self.announced: RaisedException | None = None
        """The exception that a notebook's traceback begins with, until its end comes."""
        self.until = 0


def streams(lines: Iterable[PeeledLine]) -> Iterator[tuple[object, list[PeeledLine]]]:
    """The lines of each rank in each log, or of each host where no rank is named."""
    by_rank: dict[object, list[PeeledLine]] = {}
    for line in lines:
        by_rank.setdefault((line.source, line.rank, line.host), []).append(line)
    yield from by_rank.items()


def exceptions(lines: Sequence[PeeledLine]) -> list[RaisedException]:
    """Every exception in some logs, in the order of their lines."""
    raised = []
    for _, rank_lines in streams(lines):
        of_rank = list(_of_stream(rank_lines))
        _share_frames(of_rank)
        raised += of_rank
    _borrow_frames(raised)
    return sorted(raised, key=lambda exception: (exception.line.source, exception.line.number))


def _share_frames(raised: Sequence[RaisedException]) -> None:
    """Give each exception of a chain the frames of the others: the user's own may stand with only one of them."""
    for first, second in pairwise(raised):
        if second.in_chain or first.is_wrapped:
            frames = [*first.chain_frames, *first.frames]
            second.chain_frames = frames
    for second, first in pairwise(reversed(raised)):
        if (second.in_chain or first.is_wrapped) and not first.user_frame:
            first.chain_frames = [*second.chain_frames, *second.frames]


def _borrow_frames(raised: Sequence[RaisedException]) -> None:
    """Give an exception without frames those of the same one in another rank, where lines of both are mixed."""
    with_frames = {(other.type, other.message): other for other in reversed(raised) if other.frames}
    for exception in raised:
        if (
            not exception.frames
            and not exception.chain_frames
            and (other := with_frames.get((exception.type, exception.message)))
        ):
            exception.frames = other.frames


def chain_of(exception: RaisedException, raised: Sequence[RaisedException]) -> list[RaisedException]:
    """The exceptions of one chain, oldest first, with the one that is given."""
    first = exception.line
    stream = [
        one
        for one in raised
        if (one.line.source, one.line.rank, one.line.host) == (first.source, first.rank, first.host)
    ]
    start = end = next((number for number, one in enumerate(stream) if one is exception), 0)
    while start and stream[start].in_chain:
        start -= 1
    while end + 1 < len(stream) and stream[end + 1].in_chain:
        end += 1
    return stream[start : end + 1]


def exceptions_inside(lines: Sequence[PeeledLine]) -> list[RaisedException]:
    """Exceptions in the middle of a line, or in C++'s message: the last resort, where no line is one by itself."""
    raised = []
    for line in lines:
        text = narrow(line.text.strip())
        if thrown := THROWN.match(text):
            raised.append(RaisedException("RuntimeError", thrown["message"], line, line.number))
        elif line.level not in GOES_ON and not CODE.match(text) and (hit := INSIDE.search(text)):
            message = hit["message"] or hit["quoted"]
            raised.append(RaisedException(hit["type"], message, line, line.number))
    return raised


def _of_stream(lines: Sequence[PeeledLine]) -> Iterator[RaisedException]:
    """The exceptions in a rank's lines: frames are gathered until a line ends the traceback."""
    now = _Open()
    for line in lines:
        text = narrow(line.text.strip())
        # The order of the branches counts: a frame's path may hold the word "Error"; a new traceback drops the frames
        # of one that was cut; only a line that is nothing else can be code below a frame, or part of a message.
        if frame := _frame(text):
            now.frames.append(frame)
        elif BEGIN in text:
            now.frames = []
            if named := NOTEBOOK_BEGIN.match(text):
                now.announced = RaisedException(named["type"], "", line, line.number, now.frames)
        elif IGNORED.search(text):
            now.handled = now.ignored = True
        elif SWALLOWED.search(text):
            now.handled = True
        elif text.startswith(LINKS):
            now.linked = True
        elif hit := _exception(text, now):
            now.last = RaisedException(
                hit["type"], hit["message"] or "", line, line.number, now.frames,
                handled=now.handled, ignored=now.ignored, in_chain=now.linked,
            )  # fmt: skip
            now.frames, now.announced = [], None
            now.handled = now.ignored = now.linked = False
            now.until = line.number + MESSAGE_LINES
            yield now.last
        # The line below a frame is its code: only the first, as tools print more of it below.
        elif now.frames and text and not now.frames[-1].code:
            now.frames[-1] = now.frames[-1]._replace(code=text[:MOST_CODE])
        elif now.frames and text and _goes_on(now.frames[-1].code):
            code = f"{now.frames[-1].code} {'' if MARKS.match(text) else text}".rstrip()
            now.frames[-1] = now.frames[-1]._replace(code=code[:MOST_CODE])
        elif now.last and _is_anothers(line, now.last):
            now.until = 0
        elif now.last and line.number <= now.until and text and not now.frames and not CODE.match(line.text):
            now.last.message += f"\n{text}"
            now.last.last = line.number
    if now.announced:
        yield now.announced


def _goes_on(code: str) -> bool:
    """Whether a line of code is the beginning of an assertion over several."""
    return code.startswith("assert") and (code.count("(") > code.count(")") or code.endswith("\\"))


def _is_anothers(line: PeeledLine, raised: RaisedException) -> bool:
    """Whether a line below an exception has a time or a level that the exception's hasn't, stands apart from it, or is
    another program's."""
    first = raised.line
    logged = (line.level and not first.level) or (line.when is not None and first.when is None)
    return bool(logged or line.number > raised.last + 2 or OTHERS.match(line.text))


def _frame(text: str) -> Frame | None:
    """The frame that a line names, in a script, a library or a notebook's cell."""
    hit = FRAME.search(text) or RICH_FRAME.match(text) or NOTEBOOK_FRAME.match(text) or CELL_FRAME.match(text)
    return Frame(hit["file"], int(hit["line"] or 0), hit["name"] or "") if hit else None


def _exception(text: str, now: _Open) -> re.Match[str] | None:
    if not text or text[0] not in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_":
        return None
    ends = len(now.frames) > 1 or bool(now.frames and now.frames[-1].code)
    return EXCEPTION.match(text) or DOTTED_TYPE.match(text) or (ANY_TYPE.match(text) if ends else None)

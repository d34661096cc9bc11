"""A verdict in words: headline, where it stands, how to make sure, what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.host.hiding import HIDDEN, without_secrets
from dsrun.job.memory_division import MemoryDivision
from dsrun.jobs.diagnosis import names, own_words
from dsrun.jobs.diagnosis.exceptions import api_history, assertions, distributions, requirements
from dsrun.jobs.diagnosis.log_files import LogSource
from dsrun.jobs.diagnosis.memory import division_text, memory_text, snapshots
from dsrun.jobs.diagnosis.reading import owners, phases
from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine, narrow
from dsrun.jobs.diagnosis.signatures import MESSAGE, PLACE, ROOT, SignatureIndex, find_signatures
from dsrun.jobs.diagnosis.verdict import Verdict, judge

MOST_OF_MESSAGE = 300
"""Longest part of an exception's message that stands in a sentence, in characters."""
MOST_CHAINED = 160
"""Longest quotation of another exception of a chain, in characters."""
MOST_QUOTED = 500
"""Longest quotation of a line, in characters."""
IMPORTS = ("ImportError", "ModuleNotFoundError")
"""Exceptions that the code raises which imports, and not what is imported."""
BY_WORDS = (MESSAGE, PLACE)
"""Kinds of signatures that know an exception by a word or a file alone: the program's own advice comes first."""
OF_RELEASES = ("version", "import")
"""Causes whose lines may name the release that is asked for and the one that is there."""
OF_KUBERNETES = re.compile(
    r" ?\(Kubernetes: [^()]{1,200}\)|（Kubernetes[:：][^（）]{1,200}）|[,，、] ?`kubectl [^`]{1,120}`"
)
"""Parts of a text that help on Kubernetes alone."""
ON_KUBERNETES = re.compile(
    r"(?i:kube|\bk8s\b|\bpods?\b|\b(?:PyTorch|Train|MPI|Ray)Job\b|PersistentVolume|ephemeral[- ]storage)"
    r"|\bOOMKilled\b|\bEvicted\b|Image(?:Pull|Inspect)|\bLast State:|\bExit Code: |TaintManager|DisruptionTarget"
    r"|\bContainer(?:Error|CannotRun)"
)
"""Marks of Kubernetes in a log."""
ON_HOST = ("host_oom", "slurm_oom")
"""Causes whose lines have sizes of host memory."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why a job died, as far as its logs say. The keys of --json are these."""

    cause: str | None
    """The class of failures; None where the logs name none."""
    summary: str
    """The cause in a sentence; without one, what the logs are."""
    rank: int | None = None
    host: str | None = None
    time: str | None = None
    line: str | None = None
    """The line that shows the cause, as in the log; secrets are hidden."""
    where: str | None = None
    """The line's log and number, as file:line."""
    next_step: str
    check: str | None = None
    """A command that confirms the cause."""
    confidence: str
    """ "high", "medium", "low", or "none"."""
    is_certain: bool = False
    """Whether the line shows the cause itself, and not a consequence."""
    retry: bool | None = None
    """Whether the same job, started again, may succeed; None where no cause is named."""
    signature: str | None = None
    causes: Sequence[str] = ()
    tell_apart: str | None = None
    numbers: Mapping[str, float] | None = None
    """Sizes of memory that ran out, on a GPU or a host, in GiB: requested, in use, reserved ..."""
    rank_by: str | None = None
    """How it is known that this rank was first."""
    source: str | None = None
    versions: str | None = None
    others: Sequence[str] = ()
    """Other signatures in the logs."""
    names: Sequence[Mapping[str, str]] = ()
    """The names and numbers that the line quotes: kind and value of each."""
    quotes: Sequence[str] = ()
    """What the program itself says about cause or remedy."""
    lines: Sequence[str] = ()
    """Where no cause is named: the lines that look like a failure, as file:line and text."""
    api: Mapping[str, Any] | None = None
    """What the releases of a package say about a name that was asked for in vain."""
    stack: Sequence[str] = ()
    """The calls in which the rank stood that others waited for, the innermost first."""
    phase: Mapping[str, Any] | None = None
    """Of a time-out: what the job was doing before it, with the line or function that shows it."""
    slow: Sequence[Mapping[str, str]] = ()
    """Notes in the logs on a slower way of computing: line and meaning of each. They are no failures."""
    looks_like: Mapping[str, Any] | None = None
    """Where no cause is named: the signature whose example is most like the line, with its cause and how much."""
    memory: MemoryDivision | None = None
    """The memory that ran out, by owner: of a run's own rank, or of a memory snapshot of torch's."""

    @property
    def is_hopeless(self) -> bool:
        """Whether the same job, started again, is sure to fail in the same way."""
        return self.cause is not None and not self.retry and self.is_certain


def speaks_chinese(environ: Mapping[str, str]) -> bool:
    """Whether the user's language is Chinese, as POSIX decides it."""
    locale = next((environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environ.get(name)), "")
    return locale.lower().startswith("zh")


def in_words(
    verdict: Verdict, logs: Sequence[LogSource], environ: Mapping[str, str], rank: int | None = None
) -> Diagnosis:
    """A verdict in the user's language. rank: the one that is known to have ended first."""
    answer = _answer(verdict, speaks_chinese(environ))
    line, first, signature = verdict.line, verdict.first, verdict.signature
    if signature and (signature.names_rank or signature.waits or signature.of_job):
        rank = None  # it only waited, or another one is as much to blame, and ended first
    return Diagnosis(
        cause=verdict.cause,
        summary=answer.summary,
        rank=first.rank if rank is None else rank,
        host=first.host or (line.host if line and first.rank is not None else None),
        time=first.when or (_time(line) if line else None),
        line=without_secrets(line.whole.strip())[:MOST_QUOTED] if line else None,
        where=f"{logs[line.source].name}:{line.number}" if line and line.source < len(logs) else None,
        next_step=answer.next_step,
        check=_check(verdict),
        confidence=_confidence(verdict),
        is_certain=_is_certain(verdict),
        retry=None if verdict.cause is None else bool(signature and signature.retry),
        signature=signature.id if signature else None,
        causes=signature.causes if signature else (),
        tell_apart=signature.tell_apart or None if signature else None,
        numbers=answer.numbers,
        rank_by=(first.why or None) if rank is None else "dsrun saw it end first",
        source=signature.source or None if signature else None,
        versions=signature.versions_in_words or None if signature else None,
        others=verdict.others,
        names=tuple({"kind": name.kind, "value": name.value[:MOST_QUOTED]} for name in answer.names),
        quotes=answer.quotes,
        lines=_failed_lines(verdict, logs),
        api=api_history.api_key(verdict.api) if verdict.api else None,
        phase=_phase(verdict),
        slow=tuple(_slow(verdict, speaks_chinese(environ))),
        looks_like=_looks_like(verdict),
    )


def _check(verdict: Verdict) -> str | None:
    """The command that confirms the cause, where the log's surroundings have it."""
    check = verdict.signature.check if verdict.signature else ""
    return None if not check or (check.startswith("kubectl") and not _on_kubernetes(verdict)) else check


def _on_kubernetes(verdict: Verdict) -> bool:
    return any(ON_KUBERNETES.search(line.whole) for line in verdict.lines)


class _Answer(NamedTuple):
    """What a diagnosis says, in the user's language."""

    summary: str
    next_step: str
    names: Sequence[names.Name]
    quotes: tuple[str, ...]
    numbers: Mapping[str, float] | None


def _answer(verdict: Verdict, chinese: bool) -> _Answer:
    """Cause and next step, with what the rest of its chain, the line's sizes and names, and the program itself say."""
    summary, next_step = _texts(verdict, chinese)
    if OF_KUBERNETES.search(next_step) and not _on_kubernetes(verdict):
        next_step = OF_KUBERNETES.sub("", next_step)
    line = verdict.line if _is_failure(verdict) else None
    quoted = own_words.quotes(line, _message(verdict), verdict.lines) if line else ()
    next_step = _with_advice(verdict, quoted, summary, next_step, chinese)
    named = names.names_in(_message(verdict)) if line else []
    if chained := _chained(verdict):
        summary += f" 同一异常链中：{chained}" if chinese else f" In the same chain: {chained}"
    numbers, sizes = _numbers(verdict, chinese)
    summary = f"{summary} {sizes}".strip()
    if verdict.phase:
        summary = f"{summary} {phases.in_words(verdict.phase, chinese)}"
        next_step = f"{phases.advice(verdict.phase, chinese)} {next_step}".strip()
    if not verdict.api and not verdict.told:  # these name what counts
        shown = [name for name in named if not (numbers and name.kind == "size")]
        summary = f"{summary} {_names_in_words(verdict, shown, f'{summary} {next_step}', chinese)}".strip()
    return _Answer(summary, next_step, named, quoted, numbers)


def _with_advice(verdict: Verdict, quoted: Sequence[str], summary: str, next_step: str, chinese: bool) -> str:
    """The next step with the program's own advice: in its place without a cause, before it where only words are known,
    and behind it where it names something more."""
    if not quoted:
        return next_step
    advice = _own_advice(quoted, chinese)
    if verdict.cause is None:
        return advice
    if verdict.signature and (verdict.signature.kind in BY_WORDS or verdict.signature.confidence == "low"):
        return f"{advice} {next_step}"
    return (
        next_step
        if names.all_in(own_words.remedy(quoted), f"{summary} {next_step}")
        else f"{next_step} {advice}"
    )


def _numbers(verdict: Verdict, chinese: bool) -> tuple[Mapping[str, float] | None, str]:
    """Sizes of memory that ran out, and a sentence of them; of other causes none."""
    text = verdict.line.whole if verdict.line else ""
    if verdict.cause == "gpu_oom" and (sizes := memory_text.numbers(text)):
        return sizes, memory_text.in_words(sizes, chinese, memory_text.setting_of(text))
    if verdict.cause in ON_HOST and (sizes := memory_text.host_numbers(text)):
        return sizes, memory_text.host_in_words(sizes, chinese)
    return None, ""


def _is_failure(verdict: Verdict) -> bool:
    """Whether the verdict's line is of a failure, and not only where a log ends."""
    return verdict.cause is not None or verdict.signature is not None or verdict.raised is not None


def _message(verdict: Verdict) -> str:
    """The line that shows the cause, or an exception's message with its type; without prefixes."""
    raised = verdict.raised or verdict.exception
    if raised and verdict.line and raised.line is verdict.line:
        return f"{raised.name}: {raised.message}"
    return narrow(verdict.line.text.strip()) if verdict.line else ""


def _chained(verdict: Verdict) -> str:
    """The other exceptions of the chain as quotations, oldest first: one of them may say what the deciding one
    doesn't."""
    own = _message(verdict)
    texts = dict.fromkeys(
        f"{one.name}: {without_secrets(' '.join(one.message.split()))[:MOST_CHAINED]}"
        for one in verdict.chain
        if len(one.message.split()) > 1 and one.message.split("\n")[0] not in own
    )
    return ", ".join(f'"{text}"' for text in list(texts)[:2]) + "." if texts else ""


def _own_advice(quoted: Sequence[str], chinese: bool) -> str:
    """A program's own words in the place of a next step."""
    words = own_words.remedy(quoted)
    return f"程序自己说：“{words}”" if chinese else f'The program says itself: "{words}"'


def _names_in_words(verdict: Verdict, named: Sequence[names.Name], answer: str, chinese: bool) -> str:
    """The names that the answer lacks, and of those that the line lists the ones most like what is missing."""
    text = names.in_words(names.unnamed(named, answer), chinese)
    missed, near = names.near(_message(verdict)) if named else ("", [])
    if near:
        like = "、".join(near) if chinese else " or ".join(near)
        text += (
            f" 与 {missed} 相近的有：{like}。"
            if chinese
            else f" Is {like} meant, where {missed} is asked for?"
        )
    return text.strip()


def _failed_lines(verdict: Verdict, logs: Sequence[LogSource]) -> tuple[str, ...]:
    """Without a cause: the lines that speak of a failure, so that nobody is told that there is none."""
    if verdict.cause is not None:
        return ()
    return tuple(
        f"{logs[line.source].name if line.source < len(logs) else ''}:{line.number}: "
        f"{without_secrets(line.whole.strip())[:MOST_QUOTED]}"
        for line in verdict.failed
    )


def _looks_like(verdict: Verdict) -> Mapping[str, Any] | None:
    """The signature whose example is most like the line, where no signature fits."""
    like = verdict.like
    if like is None:
        return None
    return {
        "signature": like.signature.id, "cause": like.signature.cause, "likeness": round(like.score, 2),
        "summary": _filled(like.signature.means, {}),
    }  # fmt: skip


def _phase(verdict: Verdict) -> Mapping[str, Any] | None:
    """What the job was doing before it timed out, as --json has it."""
    phase = verdict.phase
    if phase is None:
        return None
    line = without_secrets(phase.line.whole.strip())[:MOST_QUOTED]
    return {
        "name": phase.name, "number": phase.line.number, "line": line, "percent": phase.percent,
        "function": phase.function or None,
    }  # fmt: skip


def _slow(verdict: Verdict, chinese: bool) -> Iterator[Mapping[str, str]]:
    """What is computed in a slower way than it could be: the line that says so, and what it means."""
    for sighting in verdict.slow:
        signature = sighting.signature
        means = (chinese and signature.means_zh) or signature.means
        line = without_secrets(sighting.line.whole.strip())[:MOST_QUOTED]
        yield {"line": line, "means": _filled(means, sighting.values)}


def _is_certain(verdict: Verdict) -> bool:
    """A root, or an exception whose type says enough."""
    root = verdict.signature.kind == ROOT if verdict.signature else verdict.raised is not None
    return root and verdict.confidence in ("high", "medium")


def _confidence(verdict: Verdict) -> str:
    """The signature's confidence, at most "medium" for a consequence: it is a good guess at the cause, not more."""
    return "medium" if verdict.confidence == "high" and not _is_certain(verdict) else verdict.confidence


def _texts(verdict: Verdict, chinese: bool) -> tuple[str, str]:
    """Headline and next step."""
    if verdict.api:
        return api_history.in_words(verdict.api, chinese)
    if told := verdict.told:
        means, next_step = (told.means_zh, told.next_zh) if chinese else (told.means, told.next)
        return f"{means} {_place(verdict, chinese)}".strip(), next_step
    if asked := _requirement(verdict):
        means, next_step = requirements.in_words(asked, chinese)
        return f"{means} {_place(verdict, chinese)}".strip(), next_step
    if signature := verdict.signature:
        means = (chinese and signature.means_zh) or signature.means
        next_step = (chinese and signature.next_zh) or signature.next
        values = _open_values(verdict)
        place = f" {_place(verdict, chinese)}"
        return f"{_filled(means, values)}{_raised_text(verdict)}{place}".strip(), _filled(next_step, values)
    if verdict.raised:
        if meaning := verdict.meaning:
            means, next_step = (
                (meaning.means_zh, meaning.next_zh) if chinese else (meaning.means, meaning.next)
            )
            return f"{means}{_raised_text(verdict)} {_place(verdict, chinese)}".strip(), next_step
        return _unknown(verdict, chinese)
    if verdict.failed:
        return _unknown_lines(verdict, chinese)
    if chinese:
        return (
            "日志里没有找到失败的原因。",
            "请给出最先出错的进程的日志，或每个进程的日志；若任务卡住，看最后一行停在哪里。",
        )
    return (
        "No failure was found in these lines.",
        "Name the log of the rank that failed first, or the logs of all ranks; one that hangs stands at its last line.",
    )


def _requirement(verdict: Verdict) -> requirements.Requirement | None:
    """The release that the deciding line asks for, where it is one of versions and names the one that is there."""
    if verdict.cause not in OF_RELEASES or verdict.line is None:
        return None
    return requirements.requirement(_message(verdict))


def _raised_text(verdict: Verdict) -> str:
    """The exception as a quotation in brackets; empty where there is none."""
    raised = verdict.raised
    if raised is None:
        return ""
    asserted = assertions.assertion(raised)
    message = f"assert {asserted.code}" if asserted else " ".join(raised.message.split())
    return f" ({raised.name}: {without_secrets(message)[:MOST_OF_MESSAGE]})"


def _unknown_lines(verdict: Verdict, chinese: bool) -> tuple[str, str]:
    """Lines that speak of a failure, and no more is known of it: the first is quoted."""
    line = without_secrets(verdict.failed[0].text.strip())[:MOST_OF_MESSAGE]
    if chinese:
        return (
            f"有失败的迹象，但没有已知的特征能说明原因：“{line}”",
            "查看这一行及其上方的内容，或给出所有进程的日志。",
        )
    return (
        f'Something failed, and no known signature says why: "{line}"',
        "Look at that line and those above it, or name the logs of all ranks.",
    )


def _unknown(verdict: Verdict, chinese: bool) -> tuple[str, str]:
    """An exception whose type may mean anything: it is shown, and no cause is claimed."""
    name = verdict.raised.name if verdict.raised else ""
    if chinese:
        return (
            f"有进程抛出了 {name}，但没有已知的特征能说明原因。{_raised_text(verdict)}{_place(verdict, chinese)}",
            "阅读该异常的消息和调用栈；那里写的才是原因。",
        )
    return (
        f"A rank raised {name}, and no known signature says why{_raised_text(verdict)}. "
        f"{_place(verdict, chinese)}".strip(),
        "Read that exception's message and frames: the reason is said there, and by no signature.",
    )


def _place(verdict: Verdict, chinese: bool) -> str:
    """The place in the user's own code that an exception came from, as a sentence."""
    raised = verdict.raised or verdict.exception
    if raised is None or not raised.frames:
        return ""
    if verdict.raised is None and not (raised.user_frame or raised.asker or raised.name in IMPORTS):
        return ""
    frame = raised.user_frame or raised.frames[-1]
    place = f"{without_secrets(frame.file)}:{frame.line}"
    asker = raised.asker
    if asker and asker.package and asker.package != raised.package and raised.name not in IMPORTS:
        code = f" (`{without_secrets(asker.code)[:120]}`)" if asker.code else ""
        by = f"{asker.package}{code}"
        called = f"，调用处：{place}" if chinese else f", called from {place}"
        called = called if raised.user_frame else ""
        return (
            f"{by} 调用了 {raised.package}{called}。"
            if chinese
            else f"{by} had asked {raised.package}{called}."
        )
    if raised.package and raised.name in IMPORTS:
        return (
            f"{raised.package} 用到它（{place}）。" if chinese else f"{raised.package} asks for it ({place})."
        )
    if raised.package and raised.user_frame:
        return (
            f"由 {raised.package} 抛出，调用处：{place}。"
            if chinese
            else f"{raised.package} raised it, called from {place}."
        )
    return f"位置：{place}。" if chinese else f"It is at {place}."


def _open_values(verdict: Verdict) -> Mapping[str, str]:
    """Values of the pattern's groups, and the package that raised it as "caller"; without secrets, of which a part
    doesn't look like one any more."""
    shown = without_secrets(narrow(verdict.line.whole)) if verdict.line else ""
    caller = verdict.exception.package if verdict.exception else ""
    who = {"caller": caller} if caller and caller != owners.REMOTE_CODE else {}
    who["distribution"] = distributions.in_words(verdict.values.get("module") or "")
    return who | {name: value if value in shown else HIDDEN for name, value in verdict.values.items()}


def _filled(text: str, values: Mapping[str, str]) -> str:
    """A text with the values of the pattern's groups; where a group is empty, the words that lead to it go too."""

    def value(group: re.Match[str]) -> str:
        return values.get(group[1], "?")[:160]

    missing = [name for name in re.findall(r"\{(\w+)\}", text) if name not in values]
    for name in missing:
        text = re.sub(rf"(?:: | \(| ?`?)\{{{name}\}}\)?`?", "", text)
    return re.sub(r"\{(\w+)\}", value, text)


def _time(line: PeeledLine) -> str | None:
    """The time of a line, as the log has it."""
    if line.when is None:
        return None
    time = re.search(r"\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d|[EWIF]\d{3,4} \d\d:\d\d:\d\d", line.whole)
    return time[0] if time else None


def told(diagnosis: Diagnosis, environ: Mapping[str, str]) -> list[str]:
    """A diagnosis in two lines, to stand below an error; none where the logs name no cause."""
    if diagnosis.cause is None:
        return []
    cause, next_step = ("原因：", "下一步：") if speaks_chinese(environ) else ("Cause: ", "Next: ")
    return [f"{cause}{diagnosis.summary} ({diagnosis.cause})", f"{next_step}{diagnosis.next_step}"]


def diagnose_files(given: Sequence[str], environ: Mapping[str, str] | None = None) -> Diagnosis:
    """The diagnosis of the logs that some names stand for. Raises DsrunError where one can't be read."""
    from dsrun.jobs.diagnosis import log_files

    environ = os.environ if environ is None else environ
    logs = log_files.sources(given)
    taken = [log.path for log in logs if log.path and snapshots.is_snapshot(log.path)]
    if not taken:
        return diagnose_logs(logs, environ)
    held = [of_snapshot(path, environ) for path in taken]
    # Of several ranks' snapshots the one in which an allocation failed counts, and of these the fullest.
    chosen = max(held, key=lambda one: (one.cause is not None, one.memory.allocated_gib if one.memory else 0))
    others = [log for log in logs if log.path not in taken]
    if not others:
        return chosen
    told = diagnose_logs(others, environ)
    if told.cause not in (None, "gpu_oom") or chosen.memory is None:
        return told
    return with_memory(told, chosen.memory, speaks_chinese(environ)) if told.cause else chosen


def with_memory(diagnosis: Diagnosis, division: MemoryDivision, chinese: bool) -> Diagnosis:
    """A diagnosis of memory that ran out, with what held it, and what gives that back before the next step."""
    texts = [division_text.headline(division, chinese), division_text.remedy(division, chinese)]
    return replace(
        diagnosis,
        memory=division,
        summary=f"{diagnosis.summary} {texts[0]}".strip(),
        next_step=f"{texts[1]} {diagnosis.next_step}".strip(),
    )


def of_snapshot(path: Path, environ: Mapping[str, str]) -> Diagnosis:
    """What a memory snapshot of torch's says. Raises DsrunError where it can't be read."""
    snapshot, chinese = snapshots.read(path), speaks_chinese(environ)
    requested = snapshot.division.requested_gib
    diagnosis = Diagnosis(
        cause="gpu_oom" if snapshot.failed else None,
        summary=division_text.failure(snapshot.division, chinese),
        where=str(path),
        next_step=division_text.how_to_record(snapshot.has_stacks, chinese),
        confidence="high" if snapshot.failed else "none",
        is_certain=snapshot.failed,
        retry=False if snapshot.failed else None,
        numbers=None if requested is None else {"asked": requested},
    )
    return with_memory(diagnosis, snapshot.division, chinese)


def diagnose_logs(logs: Sequence[LogSource], environ: Mapping[str, str] | None = None) -> Diagnosis:
    """The diagnosis of some logs. Raises DsrunError where one can't be read."""
    from dsrun.jobs.diagnosis import log_files

    index = SignatureIndex(find_signatures())
    lines = log_files.read(logs, index)
    return in_words(judge(lines, index), logs, os.environ if environ is None else environ)

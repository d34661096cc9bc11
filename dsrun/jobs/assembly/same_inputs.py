"""Whether the files of a run are still those that it was planned with, as it is resumed or done again.

What the run would read once more has to be the same. What it reads from the cache or from a checkpoint may have been
changed: then it goes on with that, and says so.
"""

from __future__ import annotations

from pathlib import Path

from dsrun.data import cache, inputs
from dsrun.data.inputs import ADAPTER, KINDS, WEIGHTS
from dsrun.errors import Problem, collected, raise_all
from dsrun.job.job import Inputs, Job, Prepared
from dsrun.job.layout import whole_checkpoints
from dsrun.jobs.runs.past_runs import Run


def for_resume(run: Run) -> tuple[list[Problem], list[str]]:
    """Problems of changed files that are read again, and lines about changed files that are not."""
    job, before = run.job, run.job.prepared.inputs
    if before is None:
        return [], [_without_a_record(run)]
    now = inputs.read_inputs(job.model, job.data, job.peft.adapter, known=before)
    read = inputs.kinds_read(job, from_checkpoint=bool(whole_checkpoints(run.path)))
    problems = inputs.problems(before, now, read)
    absent = [fault for fault, path in cache.places(job.prepared) if not Path(path).exists()]
    for fault in absent:
        with collected(problems):
            if not problems:  # files that were changed, or another dsrun: one of them is enough
                cache.check_name(job, fault, before)
    notes = [
        f"{file.path}: {inputs.in_words(file, before.host, now.host)}; the run goes on with {_instead(job, file.kind)}"
        for file in inputs.differences(before, now, set(KINDS) - read)
    ]
    return problems, [*notes, *_sampled(before, now)]


def for_rerun(run: Run) -> tuple[Prepared, list[str]]:
    """Places for the prepared model and rows now, and lines for the user.

    Raises DsrunError with what was changed, or is gone.
    """
    job, before = run.job, run.job.prepared.inputs
    now = inputs.read_all(job.model, job.data, job.peft.adapter, known=before)
    if before is not None:
        raise_all(inputs.problems(before, now))
    for fault, _ in cache.places(job.prepared):
        cache.check_name(job, fault, before or now)
    notes = _sampled(before, now) if before else [_without_a_record(run)]
    return cache.named(job.model, job.data, now), notes


def _instead(job: Job, kind: str) -> str:
    """The copy that a run goes on with if it doesn't read a kind of file again."""
    if kind in (WEIGHTS, ADAPTER) and job.model.source != "gguf":
        return "what came of it, which is in its checkpoint"
    return "what was made of it, which is in the cache"


def _sampled(before: Inputs, now: Inputs) -> list[str]:
    """A line about large files of weights that were written since, and seem to be the same."""
    old = {file.path: file for file in before.files}
    touched = [
        Path(file.path).name
        for file in now.files
        if inputs.is_sampled(file)
        and file.path in old
        and (file.digest, file.size) == (old[file.path].digest, old[file.path].size)
        and file.mtime_ns != old[file.path].mtime_ns
    ]
    if not touched:
        return []
    amount = f"{inputs.SAMPLES} samples of {inputs.SAMPLE_BYTES >> 10} KiB"
    return [
        f"{', '.join(touched)}: written since the run was planned; size and {amount} of each are the same"
    ]


def _without_a_record(run: Run) -> str:
    """A line about a run whose files can't be compared, since its job.json has no record of them."""
    text = "the run was planned by an older dsrun, which kept no record of its files: what isn't in the cache by its "
    text += "content's name isn't compared"
    newer = _newer_weights(run)
    return f"{text}; changed after it was started: {', '.join(newer)}" if newer else text


def _newer_weights(run: Run) -> list[str]:
    if run.job.model.source != "folder" or run.started is None:
        return []
    weights = inputs.read_inputs(run.job.model, run.job.data, kinds=(WEIGHTS,)).files
    return [file.path for file in weights if file.mtime_ns > run.started * 1e9]

"""Sequence parallelism as DeepSpeed does it (Ulysses), around dsrun's own attention.

Every rank of a group has a run of tokens of the same sequence, and all weights. Only attention needs the others'
tokens: there ranks exchange them for heads, so that each attends over the whole sequence with its share of the heads,
and exchange back (arXiv:2309.14509). DeepSpeed's wrapper takes the place of an attention function in transformers'
table (runtime/sequence_parallel/ulysses_sp.py). It throws every mask away. Packed examples are kept apart by the
borders that `varlen.attend` gets: on every rank those of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsrun.errors import TrainingError
from dsrun.job.job import Job
from dsrun.training.models import varlen


def register(job: Job, model: Any) -> Any:
    """Put the exchange around the model's attention; returns DeepSpeed's `mpu`, which knows the groups; None without
    --sp.

    Raises TrainingError unless the attention that transformers will call exchanges heads in groups of that size.
    """
    if job.parallel.sp == 1:
        return None
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    _table()[varlen.ATTENTION] = varlen.attend  # not the wrapper of a model before this one
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, varlen.ATTENTION, job.parallel.sp, micro_batch_size=1, seq_length_is_variable=True
    )
    ranks = mpu.get_sequence_parallel_world_size()
    if "uattn_wrapper" not in _table()[varlen.ATTENTION].__qualname__ or ranks != job.parallel.sp:
        what = f"DeepSpeed has not put its exchange over {job.parallel.sp} ranks around the attention"
        hint = "Train without it, and report it with the version of DeepSpeed."
        raise TrainingError(what, where=f"--sp {job.parallel.sp}", hint=hint)
    return mpu


def averaged(job: Job) -> int:
    """The ranks over which DeepSpeed averages gradients: all of them at stage 3, below it the data-parallel ones.

    A rank's share of the loss is that of its tokens alone, without any exchange, so this is all that has to be undone.
    The loss that DeepSpeed documents (an all_gather over the group) is right at stage 3 only.
    """
    return job.world_size if job.parallel.sp > 1 and job.zero_stage == 3 else job.dp_size


@contextmanager
def undivided(job: Job) -> Iterator[None]:
    """While it lasts the model attends over whole sequences, on each rank by itself: for answers, whose cache of keys
    and values has no place in the exchange."""
    if job.parallel.sp == 1:
        yield
        return
    table = _table()
    exchanging = table[varlen.ATTENTION]
    table[varlen.ATTENTION] = varlen.attend
    try:
        yield
    finally:
        table[varlen.ATTENTION] = exchanging


def _table() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS

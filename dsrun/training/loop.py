"""The training loop: one rank's work from the loaded model to the exported one.

Every rank runs the same code and meets the others in collectives. What one rank alone knows (somebody wants a
checkpoint) has to reach all before they act on it: it is sent with the loss's all-reduce.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dsrun.errors import TrainingError
from dsrun.job.job import Job
from dsrun.job.layout import BEST, SAVE_REQUEST, STOP_WORD
from dsrun.options.table import MICRO_BATCH_MEAN, NO_EXPORT
from dsrun.training import checkpoint
from dsrun.training.data.ahead import made_ahead, pinned
from dsrun.training.data.batches import (
    IGNORED,
    BatchPlan,
    Examples,
    StepPlan,
    packed_batch,
    real_tokens,
    sequence_share,
    training_batch,
)
from dsrun.training.data.packing import packing_for, sees_later
from dsrun.training.data.reference_recipe import reference_batch
from dsrun.training.data.template_encoder import served_with
from dsrun.training.data.token_budget import TokenPlan
from dsrun.training.engines import Engine
from dsrun.training.engines.sequence_parallel import undivided
from dsrun.training.evaluate import (
    PREDICTIONS,
    evaluation_loss,
    generate,
    perplexity,
    write_and_score,
)
from dsrun.training.first_loss import LossBefore, loss_before
from dsrun.training.learning_rate import learning_rate, warmup_note
from dsrun.training.loss import LOSSES, StepTotals
from dsrun.training.loss_check import LossCheck
from dsrun.training.metrics import kind_of
from dsrun.training.models.compiled import Compilation
from dsrun.training.models.experts import REAL_TOKENS, ExpertLoad, leave_out_padding
from dsrun.training.models.export import export, export_best
from dsrun.training.models.text_part import towers
from dsrun.training.ranks.barrier import barrier
from dsrun.training.reports.report import Report
from dsrun.training.reports.tracking import Tracking
from dsrun.training.waiting import WaitClock

EVALUATIONS_BETWEEN = 4
SEES_LATER = (
    "is no causal model: its tokens see those after them, so it would read the answers that it is trained on"
)
SEES_OTHERS = "this model lets examples in one sequence see one another"
NOTHING, SAVE, STOP = 0, 1, 2
LOOK_S = 1.0
"""Seconds between two looks for a request: on a network's file system a look is not free."""


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the random numbers in one rank's step, such as dropout's."""
    return random.Random(f"{seed}:{step}:{rank}").getrandbits(63)  # noqa: S311  (not for secrets)


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on the GPU, or the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _on_host(sums: torch.Tensor, norm: Any) -> tuple[list[float], float | None]:
    """The sums of a step and the norm of its gradient, in one copy from the device."""
    if torch.is_tensor(norm) and norm.device == sums.device:
        *values, norm = torch.cat([sums, norm.detach().float().reshape(1)]).tolist()
    else:
        values = sums.tolist()
    return values, None if norm is None else float(norm)


class Requests:
    """Requests to a running job, by a file in its run folder. One rank looks, and tells the others."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SAVE_REQUEST
        self._looked = -LOOK_S

    def look(self) -> int:
        """NOTHING, SAVE or STOP."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return NOTHING
        self._looked = now
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return NOTHING
        return STOP if text.strip() == STOP_WORD else SAVE

    def done(self) -> None:
        """Remove the request, which has been met."""
        self._path.unlink(missing_ok=True)


class MadeStep(NamedTuple):
    """One rank's optimizer step, ready to be computed."""

    plan: StepPlan
    batches: list[dict[str, Any]]
    """The batches of its micro-steps, on the CPU."""


class Trainer:
    """One rank's run, with everything that its parts share."""

    compilation: Compilation | None = None
    """Notes on the work of --compile."""
    pending: checkpoint.PendingSave | None = None
    """The checkpoint that is being written beside the training."""
    all_written = False
    """Whether all ranks have written their files of it."""
    masks_padding = False
    """Whether the model gets a mask of padding, for its routers' loss."""
    waits: WaitClock | None = None
    """The measure of this rank's waiting; None where it is alone."""
    last_waits: tuple[int, float, float] | None = None
    """The step before: its number, its seconds, and those that this rank waited in it."""
    loss_before: LossBefore | None = None
    """The losses before a resume, which the first one after it is compared with; rank 0's."""

    def __init__(self, job: Job, engine: Engine, tokenizer: Any, end_ids: list[int], report: Report) -> None:
        self.job, self.engine, self.report = job, engine, report
        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.run_dir = Path(job.run_dir)
        self.rank = dist.get_rank()
        self.dp_index = job.dp_index(self.rank)
        self.train_examples = Examples(Path(job.prepared.train_rows))
        self.eval_examples = Examples(Path(job.prepared.eval_rows)) if job.prepared.eval_rows else None
        # A mean of micro batches' means depends on which examples share a micro batch: none may be packed or reordered.
        in_order = job.data.official or job.training.loss == MICRO_BATCH_MEAN
        packed = job.training.packing and not in_order
        with undivided(job):
            if towers(engine.module) and sees_later(engine):
                raise TrainingError(SEES_LATER, where=job.model.name)
            self.packing = packing_for(engine) if packed else None
        if job.parallel.sp > 1 and (self.packing is None or not self.packing.varlen):
            raise TrainingError(SEES_OTHERS, where=f"--sp {job.parallel.sp}")
        if packed and self.packing is None:
            self._note(f"no packing: {SEES_OTHERS}")
        self.plan = self._plan(in_order=in_order)
        self.total_steps = self.plan.total_steps(job.training.epochs, job.training.max_steps)
        between = max(1, round(self.total_steps / (EVALUATIONS_BETWEEN + 1)))
        self.eval_steps = job.training.eval_steps or between
        self.last_eval: tuple[int, float] | None = None
        self.best_loss = math.inf
        self.requests = Requests(self.run_dir)
        self.loss_check = LossCheck(job)
        self.experts = ExpertLoad(engine.module, engine.device)
        self.masks_padding = leave_out_padding(engine.module)
        if job.training.compile:
            self.compilation = Compilation()

    def _plan(self, *, in_order: bool) -> BatchPlan | TokenPlan:
        job, examples, seed = self.job, self.train_examples, self.job.training.seed
        if tokens := job.training.tokens_per_batch:
            room = job.micro_batch * (job.data.max_source_length + job.data.max_target_length)
            return TokenPlan(examples, seed, job.dp_size, tokens=tokens, room=room, packing=self.packing)
        return BatchPlan(
            examples,
            seed,
            job.dp_size,
            job.micro_batch,
            job.grad_accum,
            packing=self.packing,
            in_order=in_order,
        )

    def run(self, resume_from: Path | None) -> None:
        """Train from the start or from a checkpoint; evaluate, export and score. Ends before that where a stop is
        requested."""
        start = 0
        if resume_from:
            # The losses are read before truncate_metrics drops those after the checkpoint: one of them belongs to the
            # same step as the first one now.
            self.report.phase(f"loading checkpoint {resume_from.name}")
            start = checkpoint.load(self.engine, resume_from)
            if self.rank == 0:
                self.loss_before = loss_before(self.report.lines(), start)
        self.report.truncate_metrics(start if resume_from else -1)
        if self.rank == 0 and self.job.trackers.log:
            self.report.tracking = Tracking(self.job, start, self._note)
        step_rows = round(self.plan.examples_until(self.total_steps) / self.total_steps)
        self.report.event(
            "plan", total_steps=self.total_steps, start_step=start, train_rows=len(self.train_examples),
            eval_rows=len(self.eval_examples) if self.eval_examples else 0, step_rows=step_rows,
            packed=self.packing is not None,
        )  # fmt: skip
        if (short := warmup_note(self.job.training, self.total_steps)) and start == 0:
            self._note(short)
        self.best_loss = self._earlier_best()
        if start == 0:
            self._evaluate(0)
            if self.job.training.score_before:
                self._score("before", f"before_training.{PREDICTIONS}")
        stopped_at = self._train(start)
        if stopped_at is not None:
            self.report.event("stopped", step=stopped_at)
            self.report.stopped()
            return
        # The last checkpoint comes before everything that may still fail. Where it isn't wanted beside the model, it
        # goes again once the model is written.
        spec, total = self.job.training, self.total_steps
        self._settle()
        last = self._save(total) if spec.writes_last(total) and start < total else resume_from
        self._evaluate(total)
        self._check_weights(total)
        exports = spec.export_format != NO_EXPORT
        if exports:
            self.report.phase("writing the model")
            folder, notes = export(self.engine, self.tokenizer, self.end_ids, self.job)
            self.report.event("model", path=str(folder), template_args=served_with(self.job, self.tokenizer))
            for note in notes:
                self._note(note)
        # Without a model the last checkpoint is all that is left of the run.
        if exports and last and not spec.keeps_last(total) and self.rank == 0:
            checkpoint.remove(last)
        self._score("after", PREDICTIONS)
        if self.rank == 0:
            from dsrun.training.reports.plot import plot_losses

            plot_losses(self.run_dir)

    def _note(self, text: str) -> None:
        self.report.event("note", text=text)

    def _train(self, start: int) -> int | None:
        """Take the steps; returns the count of steps done where a stop was requested, None at the end."""
        steps = range(start, self.total_steps)
        self.report.phase("training")
        self.engine.train()
        if self.job.world_size > 1:
            self.waits = WaitClock(self.engine.device).start()
        with closing(made_ahead(self._make, steps, self.engine.device)) as made:
            for step in steps:
                try:
                    request = self._step(step, made)
                except TrainingError:
                    # The step before the first bad loss made the weights that gave it: its checkpoint is no good.
                    if self.rank == 0 and self.loss_check.since is not None:
                        checkpoint.doubt(self.run_dir, self.loss_check.since - 1)
                    raise
                done = step + 1
                if done % self.eval_steps == 0 and done < self.total_steps and request != STOP:
                    self._evaluate(done)
                    self.report.phase("training")
                if self.all_written and not self.loss_check.troubled:
                    self._settle()
                due = done % self.job.training.save_steps == 0 and done < self.total_steps
                # After a bad loss the weights may be bad, too, and a save would drop an older, good checkpoint.
                if request != NOTHING:
                    self._save(done, requested=True)
                elif due and not self.loss_check.troubled:
                    self._save_beside(done) if self.job.training.async_save else self._save(done)
                if request == STOP:
                    return done
        if self.waits:
            self.waits.stop()
        return None

    def _save(self, done: int, *, requested: bool = False) -> Path:
        """Write a checkpoint. Whoever has asked for one waits until it is whole."""
        self._settle()
        self._check_weights(done)
        self.report.phase("writing a checkpoint")
        folder = checkpoint.save(self.engine, self.job, done)
        if requested and self.rank == 0:
            self.requests.done()
        fields = {"requested": True} if requested else {}
        self.report.event("checkpoint", path=str(folder), step=done, **fields)
        self.report.phase("training")
        return folder

    def _save_beside(self, done: int) -> None:
        """Begin to write a checkpoint, once the one before it is whole."""
        self._settle()
        self._check_weights(done)
        self.report.phase("copying a checkpoint")
        self.pending = checkpoint.PendingSave(self.engine, self.job, done)
        self.report.phase("training")

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written beside the training, if there is one, and mark it."""
        if self.pending is None:
            return
        self.report.phase("writing a checkpoint")
        pending, self.pending, self.all_written = self.pending, None, False
        pending.finish()
        self.report.event("checkpoint", path=str(pending.folder), step=pending.step)
        self.report.phase("training")

    def _check_weights(self, done: int) -> None:
        """Raise TrainingError where a weight is not finite: what was written earlier must not be replaced by it."""
        if (name := self.engine.non_finite()) is not None:
            raise self.loss_check.weight(done, name)

    def _make(self, step: int) -> MadeStep:
        """A step's batches; runs in a thread beside the step before it."""
        plan = self.plan.step(step, self.dp_index)
        batches = [
            self._batch(sequences) if sequences else self._idle(plan.filler)
            for sequences in plan.micro_batches
        ]
        return MadeStep(plan, [pinned(batch, self.engine.device) for batch in batches])

    def _step(self, step: int, made: Iterator[MadeStep]) -> int:
        """Take one optimizer step, and write its line in metrics.jsonl; returns NOTHING, SAVE or STOP for all ranks.

        made: its next element has the step's batches. The host waits for the device once, where it reads the step's
        numbers, and wherever the engine's own step waits (FSDP's for the norm).
        """
        began = time.perf_counter()
        if self.waits:
            self.waits.taken()  # in an evaluation or a checkpoint since the step before
        written = self.pending is not None and self.pending.written()
        # Models have dropout of their own, and routers may draw: with a seed a step, a resumed run draws what an
        # undisturbed one would have drawn on as many ranks. Tensor-parallel neighbours have the same seed, for they
        # share a layer's input, of which they must drop the same.
        torch.manual_seed(step_seed(self.job.training.seed, step, self.rank // self.job.parallel.tp))
        plan, batches = next(made)
        rate = learning_rate(self.job, step, self.total_steps)
        if rate is not None:
            self.engine.set_learning_rate(rate)
        rate = self.engine.learning_rate()
        totals = StepTotals(plan.target_tokens, self.job.dp_size * len(batches))
        loss, varies = LOSSES[self.job.training.loss], bool(self.job.training.tokens_per_batch)
        try:
            loss_sum = self.engine.take_step(batches, totals, loss, varies=varies)
        except FloatingPointError as error:
            raise self.loss_check.given_up(step + 1) from error
        # Loss, request, how many ranks have written a checkpoint, and the routers' counts go in one all-reduce.
        # Only rank 0 has a request, so the sum is its own.
        request = self.requests.look() if self.rank == 0 else NOTHING
        sums = torch.stack([loss_sum, *(torch.full_like(loss_sum, value) for value in (request, written))])
        # What each rank waited in the step before goes along: of this one nobody knows yet.
        waited = torch.zeros(self.job.world_size if self.waits else 0, device=sums.device, dtype=sums.dtype)
        if self.waits and self.last_waits:
            waited[self.rank] = self.last_waits[2]
        sums = torch.cat([sums, waited, self.experts.taken()])
        dist.all_reduce(sums)
        (loss_over_ranks, request_of_all, ranks_written, *more), norm = _on_host(
            sums, self.engine.gradient_norm()
        )
        waited_by_all, routed = more[: len(waited)], more[len(waited) :]
        self.all_written = ranks_written == self.job.world_size
        loss_over_ranks /= self.job.parallel.tp  # tensor-parallel neighbours all add the same share
        scale, skipped = self.engine.loss_scale(), self.engine.skipped_steps()
        seconds = time.perf_counter() - began
        if self.waits:
            if self.last_waits:
                self.report.waits(*self.last_waits[:2], waited_by_all)
            self.last_waits = (step + 1, seconds, self.waits.taken())
        self.report.metrics(
            step=step + 1, loss=loss_over_ranks, lr=rate, grad_norm=norm,
            tokens=plan.tokens, seconds=round(seconds, 6),
            tokens_per_second=round(plan.tokens / seconds, 1), skipped=skipped,
            loss_scale=scale, memory_bytes=memory_bytes(self.engine.device),
            **self.experts.metrics(routed, totals.micro_batches),
        )  # fmt: skip
        if self.loss_before and (text := self.loss_before.surprise(step + 1, loss_over_ranks)):
            self._note(text)
        self.loss_before = None
        for text in self.compilation.notes() if self.compilation else ():
            self._note(text)
        self.loss_check.training(step + 1, loss_over_ranks, scale, norm=norm, skipped=skipped)
        return int(request_of_all)

    def _batch(self, sequences: list[list[int]]) -> dict[str, Any]:
        """A micro batch for the model's `forward`. sequences: the numbers of the examples in each packed sequence."""
        pad_id = self.tokenizer.pad_token_id
        if self.packing and self.job.parallel.sp > 1:
            return sequence_share(
                self.train_examples, sequences[0], pad_id, ranks=self.job.parallel.sp,
                index=self.rank % self.job.parallel.sp, selects=self.packing.selects,
            )  # fmt: skip
        alone = [sequence[0] for sequence in sequences]
        if self.packing:
            batch = packed_batch(self.train_examples, sequences, pad_id, self.packing)
        elif self.job.data.official:  # the scripts' attention mask has ones for padding, too
            return reference_batch(self.train_examples, alone, self.tokenizer, self.job.data)
        else:
            batch = training_batch(self.train_examples, alone, pad_id)
        if self.masks_padding:
            width = batch["input_ids"].shape[1]
            batch[REAL_TOKENS] = real_tokens(self.train_examples, sequences, width)
        return batch

    def _idle(self, example: int) -> dict[str, Any]:
        """A micro batch that adds nothing: for a rank without one, while others have one."""
        batch = self._batch([[example]])
        targets = batch.keys() & {"labels", "shift_labels"}
        return {**batch, **{name: torch.full_like(batch[name], IGNORED) for name in targets}}

    def _evaluate(self, step: int) -> None:
        if self.eval_examples is None or (self.last_eval and self.last_eval[0] == step):
            return
        self.report.phase("evaluating")
        loss = evaluation_loss(self.engine, self.job, self.eval_examples, self.tokenizer.pad_token_id)
        self.last_eval = (step, loss)
        # Perplexity says little of answers: what they are depends on their questions.
        more = {} if self.eval_examples.with_question else {"perplexity": perplexity(loss)}
        fields = {f"eval_{name}": value for name, value in more.items()}
        self.report.metrics(step=step, eval_loss=loss, **fields)
        self.report.event("eval", step=step, loss=loss, **more)
        self.loss_check.evaluation(step, loss)
        if step and loss < self.best_loss:
            self.best_loss = loss
            if self.job.training.keep_best:
                self._keep_best(step, loss)
        # The first and the last have their own, before and after.
        if self.job.training.compute_metrics and 0 < step < self.total_steps:
            self._score(f"step {step}", f"step-{step}_{PREDICTIONS}")

    def _keep_best(self, step: int, loss: float) -> None:
        self._check_weights(step)
        self.report.phase("writing the best model so far")
        folder = export_best(self.engine, self.tokenizer, self.end_ids, self.job)
        self.report.event("best", step=step, loss=loss, path=str(folder))

    def _earlier_best(self) -> float:
        """The lowest evaluation loss before a resume, the same on all ranks; infinity: none."""
        lowest = torch.full((1,), math.inf, dtype=torch.float64)
        if self.rank == 0 and (self.run_dir / BEST).is_dir():
            lines = self.report.lines()
            losses = [line["eval_loss"] for line in lines if line["step"] and line.get("eval_loss")]
            lowest[0] = min(losses, default=math.inf)
        lowest = lowest.to(self.engine.device)
        dist.broadcast(lowest, 0)
        return float(lowest)

    def _score(self, when: str, file_name: str) -> None:
        if (
            self.eval_examples is None
            or not self.eval_examples.with_question
            or not self.job.training.generate_rows
        ):
            return
        self.report.phase("answering evaluation prompts" + (" with the untrained model" * (when == "before")))
        answers = generate(self.engine, self.job, self.eval_examples, self.tokenizer, self.end_ids)
        if self.rank == 0:
            path = self.run_dir / file_name
            kind = kind_of(self.job.training.metrics, self.eval_examples.answers)
            scores = write_and_score(answers, path, kind, self.tokenizer.chat_template)
            self.report.event(
                "scores", when=when, scores=scores, rows=len(answers), of=len(self.eval_examples.with_question),
                path=str(path), example_prompt=answers[0]["prompt"],
            )  # fmt: skip
        barrier()

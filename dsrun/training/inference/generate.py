"""Answers of a model: loading it on one device, drawing its tokens, and answering held-out examples.

`python -m dsrun.training.inference.generate REQUEST` is the process behind `dsrun evaluate`. REQUEST is JSON; one line
of JSON comes out on stdout, everything else goes to stderr.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from dsrun.data.chat_templates import CHAT_TEMPLATE, OWN_FORMAT
from dsrun.data.thoughts import AUTO, serving_arguments
from dsrun.errors import DsrunError
from dsrun.files import json_text
from dsrun.job import inference_request
from dsrun.job.inference_request import Decoding, EvaluationRequest, InferenceModel
from dsrun.options.table import ANSWERED_AT_ONCE
from dsrun.training.data.batches import Examples, on, prompt_batch, training_batch
from dsrun.training.data.prompts import PromptEncoder, encoder_for
from dsrun.training.data.tokenizing import describe, tokenise
from dsrun.training.evaluate import predictions, write_and_score
from dsrun.training.loss import target_loss
from dsrun.training.metrics import kind_of
from dsrun.training.models.kernels import DTYPES
from dsrun.training.prepare import rows_encoder

EVERY_S = 10.0
"""Seconds between two lines of progress where stderr is no terminal."""
T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to answer."""

    model: Any
    """The transformers model, on its device."""
    tokenizer: Any
    encoder: PromptEncoder
    end_ids: list[int]
    """The tokens that end an answer."""
    context: int | None
    """Tokens that the model was made for, prompt and answer together; None: unknown."""


def load(request: InferenceModel) -> Loaded:
    """The model on its device, ready to answer. Raises DsrunError where the folder is not a whole model."""
    from dsrun.training.models.load import end_ids, load_answering
    from dsrun.training.models.tokenizer import load_tokenizer

    quiet()
    device = "cuda:0" if request.accelerator == "cuda" else "cpu"
    adapter = Path(request.adapter) if request.adapter else None
    with room_for(request.folder), faults_of(request.folder):
        tokenizer = load_tokenizer(Path(request.folder))
        encoder = _encoder(tokenizer, request)
        dtype = getattr(torch, DTYPES[request.precision])
        model = load_answering(Path(request.folder), dtype=dtype, device=device, adapter=adapter)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Loaded(model, tokenizer, encoder, end_ids(encoder, model), context)


def _encoder(tokenizer: Any, request: InferenceModel) -> PromptEncoder:
    """The encoder of the prompts, whose chat template gets the same arguments as in training."""
    by_template = request.prompt_format in (CHAT_TEMPLATE, OWN_FORMAT) and tokenizer.chat_template
    if not by_template or request.thinking != AUTO:
        return encoder_for(tokenizer, request.prompt_format, request.thinking, request.template_args)
    template = str(tokenizer.get_chat_template())
    arguments = serving_arguments(template, AUTO, request.template_args, request.answers)
    return encoder_for(tokenizer, request.prompt_format, AUTO, arguments)


def quiet() -> None:
    """Let transformers log errors alone, and draw a bar only on a terminal."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    logging.getLogger("torch").setLevel(logging.ERROR)


@contextmanager
def room_for(folder: str) -> Iterator[None]:
    """Make a DsrunError of a GPU's memory that runs out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(folder) from error


@contextmanager
def faults_of(folder: str) -> Iterator[None]:
    """Make a DsrunError of transformers' errors for a folder that it can't load."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DsrunError(f"transformers can't load it: {reason}", where=folder) from error


def out_of_memory(folder: str) -> DsrunError:
    """The error of a GPU's full memory, with the numbers of the moment."""
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    what = f"the GPU's memory ran out: {free:.1f} of {total:.1f} GiB are free, other processes' use counted"
    return DsrunError(
        what, where=folder, hint="Use another --device, fewer examples at once, or --precision bf16 or fp16."
    )


def seed_of(seed: int, number: int) -> int:
    """The seed of example (or turn) `number` in an evaluation (or a conversation) with this seed."""
    return random.Random(f"{seed}:{number}").getrandbits(63)  # noqa: S311  (not for secrets)


class Noise:
    """A logits processor that adds noise, so that the likeliest token is a drawn one.

    seeds: one for each row of the batch. A row's draw depends on its own seed alone, not on the rows beside it. Noise
    from -log(Exp(1)) is added to its logits ([rows, vocabulary]); the largest sum is then a draw from their softmax
    (the Gumbel trick; Maddison et al., 2014, arXiv:1411.0030).
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._streams = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        size = scores.shape[-1]
        waits = torch.stack([torch.empty(size).exponential_(generator=stream) for stream in self._streams])
        return scores - waits.clamp_min(torch.finfo(waits.dtype).tiny).log().to(scores.device)


def drawing(decoding: Decoding, seeds: Sequence[int]) -> list[Any]:
    """The logits processors that draw as `decoding` says; none where it is greedy. seeds: as in Noise."""
    if not decoding.temperature:
        return []
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    processors: list[Any] = [TemperatureLogitsWarper(decoding.temperature)]
    if decoding.top_k:
        processors.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p < 1:
        processors.append(TopPLogitsWarper(decoding.top_p))
    return [*processors, Noise(seeds)]


@torch.no_grad()
def generate(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    most: int,
    decoding: Decoding,
    seeds: Sequence[int],
    **more: Any,
) -> torch.Tensor:
    """Ids of the answers to a batch of prompts, padded on the right (int64, [prompts, longest answer]).

    most: tokens of an answer, end mark included. more: a streamer, stopping criteria.
    """
    batch = on(loaded.model.device, prompt_batch(prompts, loaded.tokenizer.pad_token_id))
    # Greedy even where tokens are drawn: the noise is in the logits by then (`Noise`).
    output = loaded.model.generate(
        **batch, **more, max_new_tokens=most, do_sample=False, use_cache=True, eos_token_id=loaded.end_ids,
        pad_token_id=loaded.tokenizer.pad_token_id, logits_processor=drawing(decoding, seeds),
    )  # fmt: skip
    return output[:, batch["input_ids"].shape[1] :]


class Progress:
    """A count on stderr: one moving line on a terminal, else a line now and then."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._moving = sys.stderr.isatty()
        self._shown = time.monotonic()

    def add(self, count: int) -> None:
        """Count some more as done."""
        self._done += count
        end = self._done >= self._total
        if self._moving or end or time.monotonic() - self._shown >= EVERY_S:
            self._shown = time.monotonic()
            before, after = ("\r", "\n" if end else "") if self._moving else ("", "\n")
            print(f"{before}{self._label} {self._done}/{self._total}", end=after, file=sys.stderr, flush=True)  # noqa: T201


def halving(chosen: list[int], work: Callable[[list[int]], list[T]], say: Callable[[str], None]) -> list[T]:
    """work(chosen), in halves where the GPU's memory does not hold all. Raises torch.OutOfMemoryError for a single
    one."""
    try:
        return work(chosen)
    except torch.OutOfMemoryError:
        if len(chosen) == 1:
            raise
    # Outside of the handler: the exception holds the tensors that are in the way.
    torch.cuda.empty_cache()
    half = len(chosen) // 2
    say(f"the GPU's memory does not hold {len(chosen)} examples at once: trying {half}")
    return halving(chosen[:half], work, say) + halving(chosen[half:], work, say)


def batches(order: Sequence[int], size: int) -> Iterator[list[int]]:
    """Rows in batches of at most `size`."""
    for start in range(0, len(order), size):
        yield list(order[start : start + size])


@torch.no_grad()
def mean_loss(
    loaded: Loaded, examples: Examples, count: int, micro_batch: int, say: Callable[[str], None]
) -> tuple[float, int]:
    """Mean cross-entropy over the target tokens of the first `count` examples (nats per token), and their number."""

    def work(chosen: list[int]) -> list[float]:
        batch = training_batch(examples, chosen, loaded.tokenizer.pad_token_id)
        return [float(target_loss(loaded.model, on(loaded.model.device, batch), 1))]

    progress = Progress("loss: examples", count)
    total = 0.0
    for chosen in batches(sorted(range(count), key=examples.length), micro_batch):
        total += sum(halving(chosen, work, say))
        progress.add(len(chosen))
    tokens = sum(map(examples.target_tokens, range(count)))
    return total / tokens, tokens


def answers_to(
    loaded: Loaded, examples: Examples, count: int, request: EvaluationRequest, say: Callable[[str], None]
) -> list[dict[str, str]]:
    """Answers to the prompts in the first `count` examples: {"prompt", "labels", "predict"} in order, as a fine-tune
    writes them."""
    prompts = {example: examples.prompt_ids(example) for example in examples.with_question if example < count}

    def work(chosen: list[int]) -> list[tuple[int, str]]:
        seeds = [seed_of(request.decoding.seed, example) for example in chosen]
        batch = [prompts[example] for example in chosen]
        most = request.data.answer_tokens(list(map(len, batch)), loaded.context)
        ids = generate(loaded, batch, most, request.decoding, seeds)
        return list(zip(chosen, loaded.tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True))

    answers: dict[int, str] = {}
    progress = Progress("answers: examples", len(prompts))
    order = sorted(prompts, key=lambda example: len(prompts[example]))
    for chosen in batches(order, request.micro_batch * ANSWERED_AT_ONCE):
        answers.update(halving(chosen, work, say))
        progress.add(len(chosen))
    return predictions(examples, answers, loaded.tokenizer)


def evaluate(request: EvaluationRequest, say: Callable[[str], None]) -> dict[str, Any]:
    """Evaluate a model, and write its answers.

    Returns the counts of examples ("rows"), answers and target tokens, eval_loss (nats per token), scores (percent;
    None without answers), the file of the answers (or None), and the seconds that it took.
    """
    began = time.monotonic()
    say("loading the model")
    loaded = load(request.model)
    with tempfile.TemporaryDirectory(prefix="dsrun-rows-") as folder, room_for(request.model.folder):
        target = Path(folder) / "rows.arrow"
        report = tokenise(
            Path(request.data.eval_file or ""),
            request.data,
            rows_encoder(loaded.encoder, request.data),
            target,
        )
        # The list of bad rows is deleted with the folder: it is not named.
        say(describe(report).replace(f", listed in {report.get('bad_rows_file')}", ""))
        examples = Examples(target)
        count = min(len(examples), request.limit or len(examples))
        loss, tokens = mean_loss(loaded, examples, count, request.micro_batch, say)
        wanted = count if request.answers is None else min(count, request.answers)
        answers = answers_to(loaded, examples, wanted, request, say)
        kind = kind_of(request.metrics, examples.answers)
    result = {
        "rows": count, "answered": wanted, "target_tokens": tokens, "eval_loss": loss,
        "scores": _written(answers, request, kind, loaded.tokenizer.chat_template) if answers else None,
        "predictions": request.output if answers else None,
    }  # fmt: skip
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def _written(
    answers: list[dict[str, str]], request: EvaluationRequest, kind: str, chat_template: str | None
) -> dict[str, float]:
    """Write the file of answers, whole or not at all; returns their scores."""
    path = Path(request.output)
    new = path.with_name(f".{path.name}.new")
    try:
        scores = write_and_score(answers, new, kind, chat_template)
        if path.exists() and not request.overwrite:  # it has come meanwhile
            hint = "--force replaces it."
            raise DsrunError("exists already and is left as it is", where=str(path), hint=hint)
        new.replace(path)
    except OSError as error:
        raise DsrunError(f"can't be written: {error.strerror}", where=str(path)) from error
    finally:
        new.unlink(missing_ok=True)
    return scores


def main() -> int:
    """Carry out the EvaluationRequest in the first argument."""
    request = inference_request.evaluation_request(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no result
    try:
        result = evaluate(request, lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201
        code = 0
    except DsrunError as error:
        result, code = {"problems": [vars(problem) for problem in error.problems]}, 1
    with out:
        out.write(json_text(result) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The scores of generated text, as ChatGLM2's own evaluation defines them.

ROUGE-1/2/L: F of rouge_chinese over jieba's words. BLEU-4: sentence BLEU over characters, smoothing method 3.
Each times 100, rounded to 4 digits per example, then averaged.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence


def _words(text: str) -> str:
    import jieba

    jieba.setLogLevel(logging.WARNING)
    return " ".join(jieba.cut(text))


@functools.lru_cache(maxsize=1)
def _rouge(prediction: str, reference: str) -> dict[str, dict[str, float]]:
    from rouge_chinese import Rouge

    return dict(Rouge().get_scores(_words(prediction), _words(reference))[0])


def _bleu_4(prediction: str, reference: str) -> float:
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    smoothing = SmoothingFunction().method3
    return float(sentence_bleu([list(reference)], list(prediction), smoothing_function=smoothing))


METRICS: dict[str, Callable[[str, str], float]] = {
    "rouge-1": lambda prediction, reference: _rouge(prediction, reference)["rouge-1"]["f"],
    "rouge-2": lambda prediction, reference: _rouge(prediction, reference)["rouge-2"]["f"],
    "rouge-l": lambda prediction, reference: _rouge(prediction, reference)["rouge-l"]["f"],
    "bleu-4": _bleu_4,
}
"""A score by its name: of a prediction and its reference, both not blank, from 0 to 1. Another one is another entry."""


def score(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean scores in percent, over pairs of texts."""
    scores = [score_pair(*pair) for pair in zip(predictions, references, strict=True)]
    return {name: round(sum(entry[name] for entry in scores) / len(scores), 4) for name in METRICS}


def score_pair(prediction: str, reference: str) -> dict[str, float]:
    """The scores of one prediction, in percent. One without words scores 0 (rouge_chinese would raise)."""
    if not prediction.strip() or not reference.strip():
        return dict.fromkeys(METRICS, 0.0)
    return {name: round(metric(prediction, reference) * 100, 4) for name, metric in METRICS.items()}

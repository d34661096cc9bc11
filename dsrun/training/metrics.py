"""The scores of answers, in percent: of texts, or of classes where answers are few different strings.

Texts are scored as ChatGLM2's own evaluation defines it. ROUGE-1/2/L: F of rouge_chinese over jieba's words. BLEU-4:
sentence BLEU over characters, smoothing method 3. Each times 100, rounded to 4 digits per example, then averaged.

These say nothing of one-word answers: a wrong class has words in common with the right one by chance only. There the
scores are how many answers are right, and whether rare classes are among them (`CLASSIFICATION`).
"""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence

from dsrun.options.table import AUTO_METRICS, CLASS_METRICS, TEXT_METRICS

MOST_CLASSES, LEAST_EACH = 100, 5
"""Answers are classes where at most MOST_CLASSES of them differ, with LEAST_EACH examples to each in the mean."""


def kind_of(requested: str, references: Sequence[str]) -> str:
    """The kind of scores that held-out answers get: the requested one, else by how many different answers there are."""
    if requested != AUTO_METRICS:
        return requested
    classes = len({reference.strip() for reference in references})
    few = classes <= MOST_CLASSES and classes * LEAST_EACH <= len(references)
    return CLASS_METRICS if few else TEXT_METRICS


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
"""Name -> the score of a prediction and its reference, both not blank, from 0 to 1. A new score is a new entry."""


def _exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    pairs = zip(predictions, references, strict=True)
    return sum(prediction.strip() == reference.strip() for prediction, reference in pairs) / len(references)


def _class(text: str) -> str:
    """The class that a text names: in small letters, without punctuation around it."""
    plain = " ".join(text.casefold().split())
    return re.sub(r"^\W+|\W+$", "", plain) or plain


def _accuracy(predictions: Sequence[str], references: Sequence[str]) -> float:
    return _exact_match([*map(_class, predictions)], [*map(_class, references)])


def _macro_f1(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The mean of every class's F1, over the classes that the references have; as scikit-learn's f1_score has it with
    average="macro" and these as labels."""
    predicted, expected = [*map(_class, predictions)], [*map(_class, references)]
    right = Counter(mine for mine, wanted in zip(predicted, expected, strict=True) if mine == wanted)
    given, there = Counter(predicted), Counter(expected)
    return sum(2 * right[name] / (given[name] + there[name]) for name in there) / len(there)


def _majority(predictions: Sequence[str], references: Sequence[str]) -> float:  # noqa: ARG001  (as all scores)
    """The accuracy of always giving the commonest class: what a classifier has to beat."""
    return Counter(map(_class, references)).most_common(1)[0][1] / len(references)


CLASSIFICATION: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    "exact-match": _exact_match,
    "accuracy": _accuracy,
    "macro-f1": _macro_f1,
    "majority": _majority,
}
"""Name -> the score of all predictions and their references, from 0 to 1. Exact match compares letters; accuracy and
macro-F1 compare the classes that answers name (`_class`); majority is the share of the commonest class."""


def score(
    predictions: Sequence[str], references: Sequence[str], kind: str = TEXT_METRICS
) -> dict[str, float]:
    """Scores in percent, of pairs of texts. kind: as `kind_of` gives it."""
    if kind == CLASS_METRICS:
        return {
            name: round(100 * metric(predictions, references), 4) for name, metric in CLASSIFICATION.items()
        }
    scores = [score_pair(*pair) for pair in zip(predictions, references, strict=True)]
    return {name: round(sum(entry[name] for entry in scores) / len(scores), 4) for name in METRICS}


def score_pair(prediction: str, reference: str) -> dict[str, float]:
    """The scores of one prediction, in percent. One without words scores 0 (rouge_chinese would raise)."""
    if not prediction.strip() or not reference.strip():
        return dict.fromkeys(METRICS, 0.0)
    return {name: round(metric(prediction, reference) * 100, 4) for name, metric in METRICS.items()}

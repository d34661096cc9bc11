"""The scores of generated text, as ChatGLM2's own evaluation defines them.

ROUGE-1/2/L: F of rouge_chinese over jieba's words. BLEU-4: sentence BLEU over characters, smoothing method 3.
Each times 100, rounded to 4 digits per example, then averaged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

NAMES = ("rouge-1", "rouge-2", "rouge-l", "bleu-4")


def score(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean scores in percent, over pairs of texts. An empty prediction scores 0 (rouge_chinese would raise)."""
    scores = [score_pair(*pair) for pair in zip(predictions, references, strict=True)]
    return {name: round(sum(entry[name] for entry in scores) / len(scores), 4) for name in NAMES}


def score_pair(prediction: str, reference: str) -> dict[str, float]:
    """The four scores of one prediction."""
    import jieba
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
    from rouge_chinese import Rouge

    jieba.setLogLevel(logging.WARNING)
    hypothesis, wanted = (" ".join(jieba.cut(text)) for text in (prediction, reference))
    if not hypothesis.strip() or not wanted.strip():
        return dict.fromkeys(NAMES, 0.0)
    rouge = Rouge().get_scores(hypothesis, wanted)[0]
    scores = {name: round(rouge[name]["f"] * 100, 4) for name in NAMES[:3]}
    bleu = sentence_bleu([list(reference)], list(prediction), smoothing_function=SmoothingFunction().method3)
    return scores | {"bleu-4": round(float(bleu) * 100, 4)}

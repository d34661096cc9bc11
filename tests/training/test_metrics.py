"""The scores against their definitions, computed here once more from the words up."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from needed import needs

needs("jieba", "rouge_chinese", "nltk")

from dsrun.jobs.assembly.finetune.data import dataset_folder
from dsrun.options.table import AUTO_METRICS, CLASS_METRICS, TEXT_METRICS
from dsrun.training.metrics import LEAST_EACH, MOST_CLASSES, kind_of, score, score_pair

NAMES = ("rouge-1", "rouge-2", "rouge-l", "bleu-4")
"""The scores that these tests are about."""

REFERENCES = [
    json.loads(line)["summary"]
    for line in (dataset_folder("advertise") / "dev.jsonl").read_text(encoding="utf-8").splitlines()[:12]
]
PAIRS = [
    ("这条裙子采用红色的设计，显得年轻。", "这条红色的裙子显得很年轻。"),
    ("宽松的版型，穿着舒适。", "版型宽松，穿着舒适自在。"),
    ("完全不同", "毫无关系的句子"),
    ("一样的话。", "一样的话。"),
    ("红", "红"),
    ("短", "这是一个很长很长的参考答案，而预测只有一个字。"),
    ("很长很长很长很长很长的预测，重复重复重复重复。", "短"),
    ("a red dress, size 38", "a blue dress, size 38"),
    ("，，，，，", "裙子，外套，上衣。"),
    *zip(REFERENCES[:6], REFERENCES[6:], strict=True),
    *((text[: len(text) // 2], text) for text in REFERENCES[:6]),
]


def words(text: str) -> list[str]:
    import jieba

    return " ".join(jieba.cut(text)).split()


def f_score(overlap: int, predicted: int, wanted: int) -> float:
    precision = overlap / predicted if predicted else 0.0
    recall = overlap / wanted if wanted else 0.0
    return 2 * precision * recall / (precision + recall) if overlap else 0.0


def rouge_n(prediction: list[str], reference: list[str], n: int) -> float:
    """F over the sets of n-grams of words."""
    given, wanted = (
        {tuple(text[i : i + n]) for i in range(len(text) - n + 1)} for text in (prediction, reference)
    )
    return f_score(len(given & wanted), len(given), len(wanted))


def rouge_l(prediction: list[str], reference: list[str]) -> float:
    """F over the longest common subsequence of words."""
    row = [0] * (len(reference) + 1)
    for word in prediction:
        before = 0
        for place, other in enumerate(reference, 1):
            before, row[place] = row[place], before + 1 if word == other else max(row[place], row[place - 1])
    return f_score(row[-1], len(prediction), len(reference))


def bleu_4(prediction: str, reference: str) -> float:
    """BLEU over characters; an order without a match counts 1 / 2^k of one, k the number of such orders so far."""
    if not set(prediction) & set(reference):
        return 0.0
    total, misses = 0.0, 0
    for n in range(1, 5):
        given = Counter(prediction[i : i + n] for i in range(len(prediction) - n + 1))
        wanted = Counter(reference[i : i + n] for i in range(len(reference) - n + 1))
        matches, count = (given & wanted).total(), max(1, given.total())
        if not matches:
            misses += 1
        total += math.log(matches / count if matches else 1 / (2**misses * count)) / 4
    brevity = min(0.0, 1 - len(reference) / len(prediction))
    return math.exp(brevity + total)


@pytest.mark.parametrize(("prediction", "reference"), PAIRS)
def test_scores_are_what_they_are_defined_as(prediction, reference):
    scores = score_pair(prediction, reference)
    split, wanted = words(prediction), words(reference)
    defined = {
        "rouge-1": rouge_n(split, wanted, 1), "rouge-2": rouge_n(split, wanted, 2), "rouge-l": rouge_l(split, wanted),
        "bleu-4": bleu_4(prediction, reference),
    }  # fmt: skip
    assert {name: scores[name] / 100 for name in NAMES} == pytest.approx(defined, abs=2e-6)


def test_the_best_and_the_worst():
    same = score_pair("一样的话，没有不同。", "一样的话，没有不同。")
    other = score_pair("完全", "毫无关系")
    for name in NAMES:
        assert same[name] == pytest.approx(100.0, abs=1e-3)
        assert other[name] == 0.0


@pytest.mark.parametrize("empty", ["", " ", "\n", "\u3000 \t"])
def test_an_empty_prediction_scores_nothing(empty):
    assert set(score_pair(empty, "参考").values()) == {0.0}


def test_an_empty_reference_scores_nothing():
    assert set(score_pair("预测", " ").values()) == {0.0}


@pytest.mark.parametrize("odd", ["🙂🙂", "\u200b", "。", "a\n\nb", "\n 红 \n", "<unk>", "x" * 2000])
def test_odd_predictions_are_no_crash(odd):
    assert set(score_pair(odd, "红色的裙子。")) >= set(NAMES)


def test_scores_are_rounded_and_then_averaged():
    predictions, references = zip(*PAIRS, strict=True)
    each = [score_pair(*pair) for pair in PAIRS]
    scores = score(predictions, references)
    for name in NAMES:
        assert all(entry[name] == round(entry[name], 4) for entry in each)
        assert scores[name] == pytest.approx(sum(entry[name] for entry in each) / len(each), abs=1e-4)


def test_an_empty_one_counts_in_the_mean():
    assert score(["一样", ""], ["一样", "一样"])["rouge-1"] == pytest.approx(50, abs=1e-3)


def test_unequal_numbers_are_a_mistake():
    with pytest.raises(ValueError, match="zip"):
        score(["a"], ["a", "b"])


def test_classes_are_few_different_answers():
    assert kind_of(AUTO_METRICS, ["yes", "no"] * LEAST_EACH) == CLASS_METRICS
    assert kind_of(AUTO_METRICS, ["yes", " no ", "no"] * LEAST_EACH) == CLASS_METRICS
    assert kind_of(AUTO_METRICS, ["yes", "no"] * (LEAST_EACH - 1)) == TEXT_METRICS
    assert kind_of(AUTO_METRICS, REFERENCES) == TEXT_METRICS
    many = [str(number) for number in range(MOST_CLASSES + 1)] * LEAST_EACH
    assert kind_of(AUTO_METRICS, many) == TEXT_METRICS
    assert kind_of(AUTO_METRICS, many[1:] + many[2:]) == TEXT_METRICS
    assert kind_of(CLASS_METRICS, REFERENCES) == CLASS_METRICS
    assert kind_of(TEXT_METRICS, ["yes", "no"] * LEAST_EACH) == TEXT_METRICS


def test_classes_are_counted():
    references = ["sport"] * 6 + ["food"] * 3 + ["art"]
    predictions = ["sport", "sport", "Sport.", " sport\n", "food", "a sport", "food", "food", "art", "sport"]
    scores = score(predictions, references, CLASS_METRICS)
    assert scores["exact-match"] == 50.0  # "Sport." is the class, and not the answer to the letter
    assert scores["accuracy"] == 60.0
    sport, food, art = 2 * 4 / (6 + 5), 2 * 2 / (3 + 3), 0.0
    assert scores["macro-f1"] == pytest.approx(100 * (sport + food + art) / 3, abs=1e-4)


def test_classes_that_are_signs_alone_stay_apart():
    assert score(["+", "-"], ["+", "+"], CLASS_METRICS)["accuracy"] == 50.0

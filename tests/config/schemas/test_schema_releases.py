"""The schemas, the overlay and the rules' versions beside the data of every release of DeepSpeed."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import cache

import pytest

from dsrun import versions
from dsrun.config import tree
from dsrun.config.rules import Setting, find_rules, run
from dsrun.config.rules.frame import REFUSED, example
from dsrun.config.schemas import schema
from dsrun.releases.config_changes import facts
from dsrun.releases.packed import package
from tools.schemas import generate, refusals
from tools.schemas.generate import nodes

DATA = package("deepspeed")
NUMBERS = [schema.numbers(release) for release in DATA.releases]
OVERLAY = json.loads(generate.OVERLAY.read_text(encoding="utf-8"))
OF_KEYS = ("key", "alias", "checked", "default", "deprecated", "refused", "type", "bound", "values")


@cache
def of_release(release):
    """Kind -> place -> texts of the data, for one release."""
    bit = 1 << DATA.releases.index(schema.name_of(release))
    found = defaultdict(lambda: defaultdict(set))
    for fact in facts(DATA):
        if fact.kind in OF_KEYS and fact.releases & bit:
            found[fact.kind][fact.place].add(fact.text)
    return found


def inner(node):
    """What a key takes beside "auto"."""
    return node["anyOf"][-1] if "anyOf" in node else node


def test_there_is_a_schema_of_each_release_that_the_data_have():
    assert list(schema.releases()) == [release for release in NUMBERS if release >= schema.versions()[0]]


@pytest.mark.parametrize("release", schema.releases(), ids=schema.name_of)
def test_keys_defaults_and_bounds_are_those_of_the_data(release):
    known, data = schema.load(release), of_release(release)
    keys = dict(nodes(known.root))
    copied = tuple(f"{path}." for path in generate.COPIED)
    assert {path for path in keys if not path.startswith((*copied, "$schema"))} == data["key"].keys()
    assert set(known.root.get("x-refused", ())) == data["refused"].keys()
    assert {path for path, node in keys.items() if node.get("x-checked")} == data["checked"].keys()
    for path, texts in data["default"].items():
        assert {json.dumps(keys[path].get("default"))} == texts, path
    for path, texts in data["bound"].items():
        for bound, value in (text.split(" ") for text in texts):
            assert inner(keys[path])[bound] == json.loads(value), path
    for path, texts in data["alias"].items():
        assert {keys[path]["x-alias-of"]} == texts, path


def spans(node, path=(), within=""):
    """(key, keyword, "since" or "until", release) of each span in the overlay, but for those of the top's lists."""
    if not isinstance(node, dict):
        return
    if next(iter(node), "").startswith(("since ", "until ")):
        for span, entry in node.items():
            words = span.split()
            yield from ((".".join(path), within, *edge) for edge in zip(words[::2], words[1::2], strict=True))
            yield from spans(entry, path, within)
        return
    for key, entry in node.items():
        if key == "properties" and within != "of a key":
            for name, child in entry.items():
                yield from spans(child, (*path, name), "")
        else:
            yield from spans(entry, path, key)


NOT_IN_THE_DATA = {
    "communication_data_type": "0.14.1",
    "seq_parallel_communication_data_type": "0.14.1",
    "seq_parallel_comm_data_type": "0.14.1",
    "fp16.fp16_master_weights_and_grads": "0.18.3",
}
"""Key -> the release of a change in what a function refuses, which the next test looks for there."""


def first_behind(edge, release):
    numbers = schema.numbers(release)
    if edge == "since":
        return next(number for number in NUMBERS if number >= numbers)
    return next(number for number in NUMBERS if number[: len(numbers)] > numbers)


def changes_of(path, release):
    """Whether a key is another in a release than in the one before."""
    before = NUMBERS[NUMBERS.index(release) - 1]
    here, there = (of_release(each) for each in (release, before))
    return any(here[kind].get(path) != there[kind].get(path) for kind in OF_KEYS)


@pytest.mark.parametrize(("path", "within", "edge", "release"), sorted(set(spans(OVERLAY))))
def test_a_hand_written_version_is_one_in_which_the_key_changes(path, within, edge, release):
    first = first_behind(edge, release)
    assert changes_of(path, first) or NOT_IN_THE_DATA.get(path) == schema.name_of(first), within


@pytest.mark.parametrize(
    ("text", "release"), [("elif val == 'bf16'", "0.14.1"), ("with ZeRO Stage 1, 2, or 3", "0.18.3")]
)
def test_the_changes_that_are_no_facts_of_keys(text, release):
    found = [fact for fact in facts(DATA) if text in fact.text or text in fact.when]
    if found:
        assert {DATA.releases[(fact.releases & -fact.releases).bit_length() - 1] for fact in found} == {
            release
        }


# Rules


def keys_of(given):
    """The keys of an example, sections included."""
    return {path for path, _ in tree.everything({k: v for k, v in given.items() if k[0] != "_"})}


@cache
def came_with(path):
    """The release that brought a key; None for one that the oldest has."""
    bits = [fact.releases for fact in facts(DATA) if fact.kind == "key" and fact.place == path]
    first = NUMBERS[(bits[0] & -bits[0]).bit_length() - 1] if bits else schema.releases()[0]
    return first if first > schema.releases()[0] else None


@pytest.mark.parametrize("rule", find_rules(), ids=lambda rule: rule.id)
def test_a_rule_begins_no_sooner_than_the_keys_that_it_is_about(rule):
    shared = set.intersection(*(keys_of(given) for given in rule.bad)) if rule.bad else set()
    born = max(filter(None, map(came_with, shared)), default=None)
    if born and rule.since > (0, 0):
        first = next((release for release in schema.releases() if rule.holds_in(release)), None)
        assert first >= born, f"{schema.name_of(born)} brought its keys"


@cache
def gone_after(path):
    """The last release with a key; None for one that the newest has."""
    bits = [fact.releases for fact in facts(DATA) if fact.kind == "key" and fact.place == path]
    last = NUMBERS[bits[0].bit_length() - 1] if bits else NUMBERS[-1]
    return last if last < NUMBERS[-1] else None


@pytest.mark.parametrize(
    "rule", [rule for rule in find_rules() if rule.until < (9, 9)], ids=lambda rule: rule.id
)
def test_a_rule_ends_with_the_keys_that_it_is_about(rule):
    shared = set.intersection(*(keys_of(given) for given in rule.bad))
    last = min(filter(None, map(gone_after, shared)))
    assert [release for release in schema.releases() if rule.holds_in(release)][-1] == last


@cache
def refused_since():
    """Rule -> the first release with one of the refusals that refusals.json gives to it."""
    spans = defaultdict(int)
    for fact in facts(DATA):
        if fact.kind == "refusal":
            spans[fact.place, fact.text] |= fact.releases
    first = defaultdict(list)
    for refusal, rules in refusals.known().items():
        if found := spans[f"{refusal.file}:{refusal.function}", refusal.text]:
            for rule in rules if isinstance(rules, list) else ():
                first[rule].append(NUMBERS[(found & -found).bit_length() - 1])
    return {rule: min(releases) for rule, releases in first.items()}


@pytest.mark.parametrize(
    "rule",
    [rule for rule in find_rules() if rule.since > (0, 0)],
    ids=lambda rule: rule.id,
)
def test_a_refusal_begins_with_the_release_that_brought_it(rule):
    if rule.id in refused_since():
        wanted = ACTS_SINCE.get(rule.id, refused_since()[rule.id])
        assert next(filter(rule.holds_in, schema.releases())) == wanted


ACTS_SINCE = {"DS227": (0, 15, 0)}
"""Refusals that stood in the code before they could act: this one asked a dict for an attribute until pydantic 2."""


@pytest.mark.parametrize(
    ("config", "accepted", "refused"),
    [
        ({"nebula": {"enabled": False}}, "0.19.6", "0.19.7"),
        ({"quantize_training": {}}, "0.19.6", "0.19.7"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "0.19.6", "0.19.7"),
        ({"sparse_attention": {}}, "0.19.6", "0.19.7"),
        ({"amp": {"enabled": False}}, "0.19.7", "0.19.8"),
        ({"elasticity": {"enabled": False}}, "0.19.7", "0.19.8"),
        ({"sparse_gradients": False}, "0.19.7", "0.19.8"),
        ({"curriculum_learning": {"enabled": False}}, "0.19.7", "0.19.8"),
        ({"eigenvalue": {"enabled": False}}, "0.19.7", "0.19.8"),
        ({"zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8}}}, "0.19.7", "0.19.8"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}, "0.19.5", "0.19.6"),
        ({"zero_optimization": {"stage": 2, "parameter_alignment": True}}, "0.19.7", "0.19.6"),
        ({"zero_optimization": {"stage": 2, "compute_grad_norm": True}}, "0.19.7", "0.19.4"),
        ({"zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8}}}, "0.16.2", "0.16.1"),
        ({"zero_optimization": {"stage": 3, "log_trace_cache_warnings": True}}, "0.16.4", "0.16.3"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": False}}, "0.18.3", "0.18.2"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "0.17.5", "0.17.4"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
)
def test_patch_releases_are_told_apart(config, accepted, refused):
    """As DeepSpeed's own reader of these releases does (bench/replay.py asks it)."""
    config = {"train_micro_batch_size_per_gpu": 1, **config}
    stops = {
        release: [
            finding.rule
            for finding in run(config, Setting(version=schema.version_of(release), world_size=1))
            if finding.effect == REFUSED
        ]
        for release in (accepted, refused)
    }
    assert not stops[accepted]
    assert stops[refused]


def test_defaults_change_in_patch_releases():
    config, setting, _ = example(
        {
            "_version": "0.19.8",
            "_upgrade_from": "0.19.2",
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        }
    )
    changed = {finding.path for finding in run(config, setting) if finding.rule == "DS901"}
    assert changed == {"gradient_clipping", "zero_optimization.offload_optimizer.pin_memory"}


# The table of versions


def test_the_table_of_versions_names_releases_that_exist():
    """An edge of DeepSpeed's own releases, as in >=0.17.6,<0.18.3, is a release."""
    for name, combination in versions.combinations().items():
        for edge in re.findall(r"\d+\.\d+\.\d+", combination.packages.get("deepspeed", "")):
            newer = schema.numbers(edge) > NUMBERS[-1]
            assert edge in DATA.releases or newer, (name, edge)

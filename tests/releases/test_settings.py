"""Settings of other libraries, release by release: how they are read, and what ships."""

from __future__ import annotations

import pytest

from dsrun.releases.config_changes import changes, key_record
from dsrun.releases.packed import FOLDER, SUFFIX, package
from dsrun.releases.words import explained
from tools.releases.fetch import Source
from tools.releases.pack import with_section
from tools.releases.settings import CLASSES, facts, settings_text

OLD = """
class TrainingArguments:
    output_dir: str
    lr: float = field(default=5e-5, metadata={"help": "The rate."})
    mode: str = field(default="no", metadata={"help": "Deprecated. Use other."})
    names: list = field(default_factory=list)

    def __post_init__(self):
        if self.lr < 0:
            raise ValueError(f"lr is {self.lr}")
        if self.mode == "a":
            return 1
        elif self.mode == "b":
            return 2
        else:
            raise ValueError("no such mode")
"""
PATH = "transformers/training_args.py"


def test_the_facts_of_a_class():
    found = {fact[:3] for fact in facts(PATH, OLD, ("TrainingArguments",))}
    place = f"{PATH}:TrainingArguments.__post_init__"
    assert found >= {
        ("key", "TrainingArguments.output_dir", ""),
        ("default", "TrainingArguments.lr", "5e-05"),
        ("default", "TrainingArguments.mode", '"no"'),
        ("deprecated", "TrainingArguments.mode", ""),
        ("default", "TrainingArguments.names", '"list()"'),
        ("refusal", place, "lr is {}"),
        ("values", place, '["a", "b"]'),
    }
    assert ("default", "TrainingArguments.output_dir", "") not in found


def test_parameters_of_a_constructor():
    text = "class FSDPStrategy:\n    def __init__(self, a, b=1, *, c=timedelta(minutes=30), d=None): ...\n"
    found = {fact[:3] for fact in facts("lightning/fabric/strategies/fsdp.py", text, ("FSDPStrategy",))}
    assert ("default", "fabric.FSDPStrategy.c", '"timedelta(minutes=30)"') in found
    assert ("default", "fabric.FSDPStrategy.d", "null") in found
    assert not any(kind == "default" and place.endswith(".a") for kind, place, _ in found)


def test_spans_over_releases():
    texts = {"1": OLD, "2": OLD.replace("5e-5", "1e-4"), "3": None}
    sources = [Source(release, "", "", "") for release in texts]
    lines = settings_text(
        "transformers", sources, lambda release, path: texts[release] if path == PATH else None
    )
    assert "default\tTrainingArguments.lr\t5e-05\t\t0\n" in lines
    assert "default\tTrainingArguments.lr\t0.0001\t\t1\n" in lines
    assert "key\tTrainingArguments.mode\t\t\t0-1\n" in lines


def test_broken_files_have_no_facts():
    assert facts(PATH, "class TrainingArguments:\n  def (", ("TrainingArguments",)) == []


@pytest.mark.parametrize("name", CLASSES)
def test_the_section_is_the_last_and_can_be_written_again(name):
    content = (FOLDER / f"{name}{SUFFIX}").read_bytes()
    text = package(name).section("config")
    assert text
    assert with_section(content, "config", text) == content


def test_what_ships():
    transformers = package("transformers")
    record = key_record(transformers, "TrainingArguments.evaluation_strategy")
    assert record is not None
    assert record.until == "4.50.3"
    found = changes(transformers, transformers.releases[0], transformers.releases[-1])
    assert any(change.kind == "default" and change.place.startswith("TrainingArguments.") for change in found)
    assert key_record(package("accelerate"), "DeepSpeedPlugin.zero_stage") is not None
    assert key_record(package("lightning"), "DeepSpeedStrategy.stage") is not None


def test_explain_says_which_default_held_when():
    lines = list(explained("lightning.pytorch.strategies.deepspeed.DeepSpeedStrategy", "stage"))
    assert any(line.startswith("Left out:    2 in ") for line in lines)

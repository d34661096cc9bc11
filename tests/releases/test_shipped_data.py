"""The data that ship: what they are made of, and that they are right of what is installed here."""

from __future__ import annotations

import re
import subprocess
import sys

import drawn_names
import pytest
from packaging.version import Version

from dsrun.releases import config_changes, lookup, packed
from tools.releases.packages import PACKAGES

MOST_BYTES = 12_000_000
"""Of all the data together."""


@pytest.mark.parametrize("name", packed.packages())
def test_the_sources(name):
    """Each release is there once, in order, with the archive that was read and its hash; none is older than asked."""
    package = packed.package(name)
    rows = [line.split("\t") for line in package.section("sources").splitlines()]
    assert [row[0] for row in rows] == package.releases
    assert sorted(package.releases, key=Version) == package.releases
    assert Version(package.releases[0]) >= Version(PACKAGES[name].first)
    assert all(re.fullmatch("[0-9a-f]{64}", row[2]) and row[1].endswith((".whl", ".tar.gz")) for row in rows)
    assert len(package.releases) > 8


def test_they_are_small():
    assert len(packed.packages()) >= 8
    assert {*packed.packages()} <= {*PACKAGES}
    assert sum(path.stat().st_size for path in packed.FOLDER.glob(f"*{packed.SUFFIX}")) < MOST_BYTES


def test_a_look_up_unpacks_little(monkeypatch):
    """A module's own block, and those of the links that are followed; not the package."""
    largest = max(packed.FOLDER.glob(f"*{packed.SUFFIX}"), key=lambda path: path.stat().st_size)
    package = packed.PackageReleases(largest)
    monkeypatch.setattr(packed, "package", lambda _name: package)
    first = package.module(package._firsts[len(package._firsts) // 2])
    name = next(first.of("")).text if list(first.of("")) else "nothing"
    assert lookup.look_up(f"{first.text}.{name}").package is package
    assert 1 <= len(package._read) <= 4
    assert sum(map(len, package._read.values())) < 4_000_000


@pytest.mark.parametrize("package", drawn_names.PACKAGES)
def test_what_is_installed_is_as_they_say(package):
    """Names, members and parameters that the data have of any release: the installed one has them or hasn't."""
    pytest.importorskip(package)
    if package not in packed.packages() or not drawn_names.installed(package):
        pytest.skip("the installed release is not in the data")
    answers = list(drawn_names.compared(package, 12, seed=1))
    assert len(answers) == 12
    assert not [answer for answer in answers if answer.real != answer.told]


@pytest.mark.parametrize("what", ["DS203", "zero_optimization.stage", "gpu-oom"])
def test_short_commands_leave_them_alone(what):
    """What explains something else reads none of them."""
    code = (
        "import sys; from dsrun.cli import main\n"
        f"try: main(['explain', {what!r}])\n"
        "except SystemExit: pass\n"
        "assert 'dsrun.releases.lookup' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


FIRST, GONE = "first", "gone"
BREAKS = [
    # Each read off the sources of the releases on both sides by hand, with a search for its line.
    ("transformers.models.llama.modeling_llama.LlamaSdpaAttention", "", FIRST, "4.36.0"),
    ("transformers.models.llama.modeling_llama.LlamaSdpaAttention", "", GONE, "4.48.0"),
    ("transformers.models.llama.modeling_llama._expand_mask", "", GONE, "4.38.0"),
    ("transformers.TrainingArguments", "evaluation_strategy", GONE, "4.51.0"),
    ("transformers.TrainingArguments", "eval_strategy", FIRST, "4.41.0"),
    ("transformers.TrainingArguments", "no_cuda", GONE, "5.0.0"),
    ("transformers.Trainer", "tokenizer", GONE, "5.0.0"),
    ("transformers.AdamW", "", GONE, "4.50.0"),
    ("transformers.deepspeed", "", GONE, "4.46.0"),
    ("transformers.modeling_utils.Conv1D", "", GONE, "4.56.0"),
    ("transformers.trainer_utils.ShardedDDPOption", "", GONE, "4.35.0"),
    ("transformers.cache_utils.HybridCache", "", GONE, "5.0.0"),
    ("transformers.generation.utils.top_k_top_p_filtering", "", GONE, "4.39.0"),
    ("transformers.AutoModelForVision2Seq", "", GONE, "5.0.0"),
    ("datasets.load_metric", "", GONE, "3.0.0"),
    ("datasets.load_dataset", "use_auth_token", GONE, "3.0.0"),
    ("peft.prepare_model_for_int8_training", "", GONE, "0.10.0"),
    ("trl.DataCollatorForCompletionOnlyLM", "", GONE, "0.20.0"),
    ("trl.trainer.utils.ConstantLengthDataset", "", GONE, "0.20.0"),
    ("trl.SFTConfig", "max_seq_length", GONE, "0.20.0"),
    ("trl.SFTConfig", "max_length", FIRST, "0.16.0"),
    ("trl.PPOConfig", "steps", GONE, "0.12.0"),
    ("accelerate.Accelerator", "dispatch_batches", GONE, "1.0.0"),
    ("accelerate.utils.imports.is_tpu_available", "", GONE, "1.0.0"),
    ("deepspeed.runtime.zero.mics.MiCS_Init", "", GONE, "0.19.7"),
    ("torch.distributed.elastic.agent.server.api.log", "", GONE, "2.4.0"),
]


@pytest.mark.parametrize(("path", "parameter", "direction", "release"), BREAKS)
def test_breaks_that_people_hit(path, parameter, direction, release):
    if packed.package_of(path) is None:
        pytest.skip("there are no data of the package")
    record = lookup.look_up(path, parameter)
    read = record.package.releases
    if Version(release) <= Version(read[0]):
        assert record.from_the_start == (direction == FIRST)
    else:  # where only last patches were read, the first of them that is as new
        expected = next(one for one in read if Version(one) >= Version(release))
        assert (record.first if direction == FIRST else record.next) == expected


# DeepSpeed's configuration


CONFIG = [
    ("default", "gradient_clipping", "0", ("0.9.0", "0.19.2")),
    ("default", "gradient_clipping", "1", ("0.19.3", "")),
    ("default", "zero_optimization.offload_optimizer.pin_memory", "true", ("0.19.5", "")),
    ("bound", "zero_optimization.reduce_bucket_size", "minimum 0", ("0.9.0", "0.19.5")),
    ("bound", "zero_optimization.reduce_bucket_size", "exclusiveMinimum 0", ("0.19.6", "")),
    ("key", "zero_optimization.parameter_alignment", "", ("0.19.7", "")),
    ("key", "zero_optimization.compute_grad_norm", "", ("0.19.7", "")),
    ("refused", "nebula", "", ("0.19.7", "")),
    ("refused", "amp", "", ("0.19.8", "")),
    ("key", "nebula", "", ("0.9.0", "0.19.6")),
    ("key", "zero_optimization.zenflow", "", ("0.17.5", "")),
    ("key", "comet", "", ("0.14.3", "")),
]


@pytest.mark.parametrize(("kind", "place", "text", "ends"), CONFIG)
def test_the_configuration_of_each_release(kind, place, text, ends):
    package = packed.package("deepspeed")
    found = [
        fact
        for fact in config_changes.facts(package)
        if (fact.kind, fact.place, fact.text) == (kind, place, text)
    ]
    (fact,) = found
    first, last = (fact.releases & -fact.releases).bit_length() - 1, fact.releases.bit_length() - 1
    until = "" if last == len(package.releases) - 1 else package.releases[last]
    assert (package.releases[first], until) == ends

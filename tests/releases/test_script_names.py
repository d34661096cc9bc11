"""Names and parameters in scripts beside versions: breaks that people hit, and what is left alone."""

from __future__ import annotations

import re
import textwrap

import pytest

from dsrun.releases.packed import package
from dsrun.releases.script_names import missing, release_of

LLAMA = "from transformers.models.llama.modeling_llama import"
BREAKS = """
transformers 4.49.0 4.50.0 torch.optim.AdamW
    from transformers import AdamW
transformers 4.47.1 4.48.0 -
    from transformers.models.llama.modeling_llama import LlamaSdpaAttention
transformers 4.47.1 4.48.0 -
    from transformers.models.llama.modeling_llama import LlamaFlashAttention2
transformers 4.50.3 4.51.0 eval_strategy
    import transformers as t
    t.TrainingArguments('o', evaluation_strategy='no')
transformers 4.57.6 5.0.0 processing_class
    import transformers as t
    t.Trainer(model=None, tokenizer=None)
transformers 4.57.6 5.0.0 AutoModelForImageTextToText
    from transformers import AutoModelForVision2Seq
transformers 4.57.6 5.0.0 -
    from transformers import TFAutoModel
transformers 4.45.2 4.46.0 transformers.integrations.deepspeed
    import transformers.deepspeed
transformers 4.45.2 4.46.0 transformers.integrations.deepspeed
    from transformers.deepspeed import HfDeepSpeedConfig
transformers 4.50.3 4.51.0 is_torch_xla_available
    from transformers import is_torch_tpu_available
trl 0.12.2 0.13.0 -
    from trl import SFTTrainer
    SFTTrainer(model=None, max_seq_length=8)
trl 0.12.2 0.13.0 -
    from trl import SFTTrainer
    SFTTrainer(model=None, dataset_text_field='t')
trl 0.12.2 0.13.0 -
    import trl
    trl.DPOTrainer(model=None, beta=0.1)
trl 0.28.0 0.29.0 trl.experimental.ppo.ppo_config.PPOConfig
    from trl import PPOConfig
trl 0.28.0 0.29.0 trl.experimental.ppo.modeling_value_head.AutoModelForCausalLMWithValueHead
    from trl import AutoModelForCausalLMWithValueHead
trl 0.24.0 0.25.0 -
    from trl.core import LengthSampler
peft 0.9.0 0.10.0 prepare_model_for_kbit_training
    from peft import prepare_model_for_int8_training
datasets 2.21.0 3.0.0 -
    from datasets import load_metric
accelerate 0.34.2 1.0.0 -
    from accelerate import Accelerator
    Accelerator(dispatch_batches=True)
accelerate 0.19.0 0.20.0 project_dir
    from accelerate import Accelerator
    Accelerator(logging_dir='x')
"""
"""Package, the last release that runs the lines below, the first that doesn't, and what took the place by the texts."""


def breaks():
    for entry in re.split(r"\n(?=\w)", BREAKS.strip()):
        head, _, lines = entry.partition("\n")
        yield pytest.param(textwrap.dedent(lines), *head.split(), id=lines.strip())


@pytest.mark.parametrize(("lines", "name", "last", "first", "instead"), list(breaks()))
def test_breaks_that_people_hit(lines, name, last, first, instead):
    assert missing(lines, {name: last}) == []
    (found,) = missing(lines, {name: first})
    assert found.use.line == lines.strip().count("\n") + 1
    assert f"{last} is the last release that has it" in found.text
    assert instead == "-" or instead in found.advice
    assert last in found.advice


def test_a_name_that_came_later():
    (found,) = missing(f"{LLAMA} LlamaSdpaAttention", {"transformers": "4.30.2"})
    assert "4.36.0 is the first release that has it" in found.text
    assert found.advice.startswith("Install transformers 4.36.0 or newer")


GUARDED = [
    "try:\n    from transformers import AdamW\nexcept ImportError:\n    from torch.optim import AdamW",
    "import transformers\nif transformers.__version__ < '5':\n    from transformers import AdamW",
    "import transformers\nif hasattr(transformers, 'AdamW'):\n    transformers.AdamW",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from transformers import AdamW",
    "import transformers\ndef f(transformers):\n    return transformers.AdamW",
    "import transformers\ntransformers = object()\ntransformers.AdamW",
    "from .transformers import AdamW",
    "import mine as transformers\ntransformers.AdamW",
    "import transformers\ntransformers.NoSuchName\ntransformers.Trainer(no_such_parameter=1)",
    "from transformers import AutoModel\nAutoModel.from_pretrained('x', torch_dtype='auto', anything=1)",
]


@pytest.mark.parametrize("lines", GUARDED)
def test_what_is_guarded_or_unsure_is_left_alone(lines):
    assert missing(lines, {"transformers": "5.23.0"}) == []


def test_what_runs_at_the_start_is_told_apart():
    lines = "import transformers as t\nt.AdamW\ndef f():\n    t.TFAutoModel.from_pretrained('x')"
    found = missing(lines, {"transformers": "5.23.0"})
    assert [(one.use.path, one.use.line, one.use.at_start) for one in found] == [
        ("transformers.AdamW", 2, True),
        ("transformers.TFAutoModel", 4, False),
    ]


def test_packages_that_are_not_named_are_not_judged():
    assert missing("from transformers import AdamW", {"torch": "2.9.0"}) == []
    assert missing("from transformers import AdamW", {"transformers": ""}) == []


@pytest.mark.parametrize(
    ("name", "version", "release"),
    [
        ("transformers", "4.49.0", "4.49.0"),
        ("transformers", "99.0", package("transformers").releases[-1]),
        ("transformers", "4.49.99", "4.49.0"),
        ("torch", "2.6.0+cu124", "2.6.0"),
        ("transformers", "1.0", ""),
        ("transformers", "unknown", ""),
    ],
)
def test_the_release_that_a_version_is_judged_as(name, version, release):
    assert release_of(package(name), version) == release

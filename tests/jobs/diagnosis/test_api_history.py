"""Names that came to a package or left it: which release is needed, who asks, and what took their place."""

from __future__ import annotations

import pytest

from dsrun.jobs.diagnosis.diagnosis import in_words
from dsrun.jobs.diagnosis.exceptions import log_versions
from dsrun.jobs.diagnosis.log_files import LogSource
from dsrun.jobs.diagnosis.reading.log_lines import peeled
from dsrun.jobs.diagnosis.signatures import SignatureIndex, find_signatures
from dsrun.jobs.diagnosis.verdict import judge

INDEX = SignatureIndex(find_signatures())
OWN = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 7, in <module>\n    go()\n'
PACKAGE = '  File "/opt/env/lib/python3.11/site-packages/{}", line 70, in {}\n    work(x)\n'
LLAMA = "transformers.models.llama.modeling_llama"


def lines_of(text):
    return [peeled(0, number, line) for number, line in enumerate(text.split("\n"), 1)]


def answer(text, environ=()):
    return in_words(judge(lines_of(text), INDEX), [LogSource("train.log", None)], dict(environ))


@pytest.mark.parametrize(
    ("error", "frame", "direction", "next_has"),
    [
        # it left, and the script asks
        (f"ImportError: cannot import name 'LlamaFlashAttention2' from '{LLAMA}' (/x.py)", "", "older",
         ["transformers>=4.34.0,<4.48.0"]),
        # it left, and another package asks
        (f"ImportError: cannot import name 'LlamaFlashAttention2' from '{LLAMA}' (/x.py)", ("somelib/core.py", "f"),
         "older", ["transformers>=4.34.0,<4.48.0", "newer somelib"]),
        # a parameter that was renamed
        ("TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'", "",
         "older", ["eval_strategy", "/home/u/train.py:7"]),
        ("TypeError: Trainer.__init__() got an unexpected keyword argument 'tokenizer'",
         ("trl/trainer/dpo_trainer.py", "__init__"), "older", ["transformers<5.0.0", "newer trl", "processing_class"]),
        # one that came
        ("TypeError: DPOTrainer.__init__() got an unexpected keyword argument 'processing_class'", "", "newer",
         ["trl>=0.12.0"]),
        ("TypeError: Accelerator.unwrap_model() got an unexpected keyword argument 'keep_torch_compile'",
         ("transformers/trainer.py", "_inner_training_loop"), "newer", ["accelerate>=1.3.0", "older transformers"]),
        # an attribute that came
        ("AttributeError: 'Accelerator' object has no attribute 'parallelism_config'",
         ("transformers/trainer.py", "training_step"), "newer", ["accelerate>=1.10.0"]),
        # one of a base in another package
        ("AttributeError: 'GRPOTrainer' object has no attribute 'current_gradient_accumulation_steps'",
         ("trl/trainer/grpo_trainer.py", "_compute_loss"), "newer", ["transformers>=4.55.0"]),
        # a module that came, and names that were there for a while
        ("ModuleNotFoundError: No module named 'transformers.integrations.deepspeed'",
         ("trl/trainer/utils.py", "<module>"), "newer", ["transformers>=4.33.0"]),
        ("ImportError: cannot import name 'PeftSavingCallback' from 'trl.trainer.utils' (/x.py)", "", "older",
         ["trl>=0.4.5,<0.7.5"]),
        # calls with more, or with fewer arguments
        ("TypeError: CPOTrainer.log() takes 2 positional arguments but 3 were given",
         ("transformers/trainer.py", "_maybe_log_save_evaluate"), "newer", ["trl>=0.13.0", "older transformers"]),
        ("TypeError: LlamaRotaryEmbedding.forward() missing 1 required positional argument: 'position_ids'",
         ("transformers/models/llama/modeling_llama.py", "forward"), "older", ["transformers<4.38.0"]),
        # models
        ("ValueError: The checkpoint you are trying to load has model type `qwen2_5_omni` but Transformers does not "
         "recognize this architecture.", "", "newer", ["transformers>=4.52.0"]),
        ("KeyError: 'qwen3'", ("transformers/models/auto/configuration_auto.py", "__getitem__"), "newer",
         ["transformers>=4.51.0"]),
        ("ValueError: The checkpoint you are trying to load has model type `ownllm` but Transformers does not "
         "recognize this architecture.", "", "never", ["trust_remote_code=True"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("environ", [{}, {"LANG": "zh_CN.UTF-8"}], ids=["en", "zh"])
def test_direction_range_and_who_asks(error, frame, direction, next_has, environ):
    found = answer(OWN + (PACKAGE.format(*frame) if frame else "") + error, environ.items())
    assert found.api is not None
    assert found.api["direction"] == direction
    assert found.cause in ("version", "script_api")
    assert not environ or found.summary != answer(OWN + error).summary
    if not environ:
        assert [text for text in next_has if text not in found.next_step] == []
        assert "pip install -U" not in found.next_step


def test_all_names_of_an_import_line_count():
    frame = PACKAGE.format("somelib/core.py", "<module>").replace(
        "work(x)", "from transformers import StaticCache, HybridCache, DynamicCache"
    )
    found = answer(f"{OWN}{frame}ImportError: cannot import name 'StaticCache' from 'transformers' (/x.py)")
    assert "StaticCache` is in transformers since 4.38.0" in found.summary
    assert "HybridCache (>=4.44.0" in found.summary
    assert "transformers>=4.44.0" in found.next_step


@pytest.mark.parametrize(
    ("shown", "direction", "next_has"),
    [
        ("", "older", "'torch<=2.3.1'"),
        ("torch==2.4.0\n", "older", "'torch<=2.3.1'"),
        ("torch==2.3.0\n", "broken", "--force-reinstall"),
    ],
)
def test_between_two_releases_that_were_read_the_side_that_works_is_advised(shown, direction, next_has):
    error = "ImportError: cannot import name 'log' from 'torch.distributed.elastic.agent.server.api' (/x.py)"
    found = answer(f"{shown}{OWN}{error}")
    assert found.api["direction"] == direction
    assert next_has in found.next_step
    assert shown or "between 2.3.1 and 2.4.1" in found.summary


@pytest.mark.parametrize(
    ("error", "never"),
    [
        # alike, and another thing
        ("ImportError: cannot import name 'is_torch_onnx_dict_inputs_support_available' from 'transformers.utils' "
         "(/x.py)", "took its place"),
        # settings of another trainer
        ("TypeError: OnlineDPOConfig.__init__() got an unexpected keyword argument 'dataset_num_proc'", "CPOConfig"),
    ],
)  # fmt: skip
def test_what_is_merely_alike_did_not_take_its_place(error, never):
    frame = PACKAGE.format("somelib/core.py", "f")
    found = answer(f"{OWN}{frame}{error}")
    assert found.api is not None
    assert never not in f"{found.summary} {found.next_step}"


def test_a_class_of_the_script_that_is_named_after_one_of_a_package():
    error = "TypeError: OwnDPODataCollator.__init__() got an unexpected keyword argument 'max_target_length'"
    found = answer(OWN + error)
    assert found.api["name"] == "trl.trainer.utils.DPODataCollatorWithPadding"
    assert found.api["direction"] == "older"
    assert "By its name OwnDPODataCollator is made of that class" in found.summary
    assert found.confidence == "medium"


def test_an_attribute_of_a_class_that_several_packages_have():
    frame = PACKAGE.format("accelerate/optimizer.py", "reset").replace(
        "work(x)", "self.optimizer.reset_all()"
    )
    found = answer(f"{OWN}{frame}AttributeError: 'AdamW' object has no attribute 'reset_all'")
    assert found.api is None
    assert "accelerate's own code asks a `AdamW` for `reset_all`" in found.summary
    assert "transformers" not in found.summary


def test_settings_of_the_trainer_that_asks_in_the_place_of_the_general_ones():
    frame = PACKAGE.format("trl/trainer/dpo_trainer.py", "__init__").replace(
        "work(x)", "args.ref_adapter_name"
    )
    found = answer(
        f"{OWN}{frame}AttributeError: 'TrainingArguments' object has no attribute 'ref_adapter_name'"
    )
    assert "Hand over a trl.DPOConfig in /home/u/train.py:7" in found.next_step


def test_an_override_without_a_parameter_is_the_scripts_to_change():
    frame = PACKAGE.format("transformers/trainer.py", "training_step")
    found = answer(
        f"{OWN}{frame}TypeError: OwnTrainer.compute_loss() got an unexpected keyword argument 'num_items_in_batch'"
    )
    assert "OwnTrainer.compute_loss overrides" in found.summary and "4.46.0" in found.summary
    assert "num_items_in_batch=None" in found.next_step


def test_an_override_in_a_class_that_is_named_after_the_packages():
    frame = PACKAGE.format("transformers/modeling_utils.py", "gradient_checkpointing_enable")
    call = "OwnPreTrainedModel._set_gradient_checkpointing()"
    found = answer(f"{OWN}{frame}TypeError: {call} got an unexpected keyword argument 'enable'")
    assert "transformers hands the parameter `enable`" in found.summary and "since 4.35.0" in found.summary
    assert "transformers<4.35.0" in found.next_step


@pytest.mark.parametrize(
    ("names", "direction"), [("AdamW, AnyToAnyPipeline", "newer"), ("AnyToAnyPipeline", "older")]
)
def test_names_before_the_one_that_is_missing_were_found(names, direction):
    frame = PACKAGE.format("somelib/core.py", "<module>").replace(
        "work(x)", f"from transformers import {names}"
    )
    found = answer(
        f"{OWN}{frame}ImportError: cannot import name 'AnyToAnyPipeline' from 'transformers' (/x.py)"
    )
    assert found.api["direction"] == direction


def test_an_override_that_takes_too_few():
    frame = PACKAGE.format("transformers/trainer.py", "_inner_training_loop")
    found = answer(
        f"{OWN}{frame}TypeError: OwnTrainer.training_step() takes 3 positional arguments but 4 were given"
    )
    assert "OwnTrainer.training_step overrides" in found.summary and "4.46.0" in found.summary
    assert "*args" in found.next_step


@pytest.mark.parametrize(
    ("shown", "direction", "says"),
    [
        ("transformers==4.40.0", "newer", "transformers 4.40.0"),
        ("`transformers` version: 4.54.0.dev0", "older", "transformers 4.54.0"),
        ("Transformers version: 4.49.0", "broken", "4.49.0"),
    ],
)
def test_the_installed_release_decides(shown, direction, says):
    error = "ImportError: cannot import name 'add_model_info_to_custom_pipelines' from 'transformers.utils' (/x.py)"
    found = answer(f"- {shown}\n{OWN}{error}")
    assert found.api["direction"] == direction
    assert says in found.summary


def test_what_every_release_has_is_hidden_or_not_whole():
    found = answer(f"{OWN}ImportError: cannot import name 'Trainer' from 'transformers' (unknown location)")
    assert found.cause == "import"
    assert "--force-reinstall" in found.next_step and "rename" in found.next_step


@pytest.mark.parametrize(
    "error",
    [
        "ImportError: cannot import name 'x' from 'somelib' (/x.py)",
        "AttributeError: 'NoneType' object has no attribute 'backward'",
        "StudyError: cannot import name 'LlamaFlashAttention2' from 'transformers'",
        "TypeError: own() got an unexpected keyword argument 'evaluation_strategy'",
        "KeyError: 'qwen3'",
    ],
)
def test_what_the_releases_know_nothing_of(error):
    assert answer(OWN + error).api is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("transformers==4.49.0", {"transformers": "4.49.0"}),
        (" transformers-4.49.0", {"transformers": "4.49.0"}),
        ("- `transformers` version: 4.50.0.dev0", {"transformers": "4.50.0"}),
        ("transformers                      4.45.0", {"transformers": "4.45.0"}),
        ("PyTorch version (GPU?): 2.6.0+cu124 (True)", {"torch": "2.6.0"}),
        ("DeepSpeed info: version=0.16.3, git-hash=unknown", {"deepspeed": "0.16.3"}),
        ("transformers>=4.41.2 is required", {}),
        (
            "transformers>=4.41.2,<=4.45.0 is required, but found transformers==4.45.2.",
            {"transformers": "4.45.2"},
        ),
        ("sentence-transformers==2.2.0", {}),
        ("/site-packages/transformers/trainer.py:1510", {}),
    ],
)
def test_releases_that_a_log_shows(line, expected):
    packages = ["transformers", "torch", "deepspeed"]
    assert log_versions.releases_in(lines_of(line), packages) == expected


def test_a_name_that_left_and_came_back_much_later():
    error = "AttributeError: 'DynamicCache' object has no attribute 'get_max_length'"
    assert answer(OWN + error).api["gone"] == "4.49.0"


def test_a_parameter_that_the_trainers_config_took_over():
    found = answer(
        f"{OWN}TypeError: SFTTrainer.__init__() got an unexpected keyword argument 'max_seq_length'"
    )
    assert "trl.SFTConfig(max_seq_length=)" in found.next_step


def test_a_config_that_a_package_asks_for_in_the_place_of_its_base():
    frame = PACKAGE.format("trl/trainer/sft_trainer.py", "__init__")
    found = answer(f"{OWN}{frame}AttributeError: 'TrainingArguments' object has no attribute 'packing'")
    assert "trl.SFTConfig" in found.next_step and "/home/u/train.py:7" in found.next_step


def test_a_package_that_asks_its_own_class_is_told_no_direction():
    """Both are of one release; vLLM's newer engine has the attribute in one of its modes only."""
    found = answer(
        'Traceback (most recent call last):\n  File "/opt/env/lib/python3.11/site-packages/vllm/entrypoints/llm.py", '
        "line 495, in collective_rpc\n    executor = self.llm_engine.model_executor\n"
        "AttributeError: 'LLMEngine' object has no attribute 'model_executor'"
    )
    assert found.confidence != "high" and "vllm's own code asks" in found.summary

"""`dsrun import`: other trainers' files as run files, with nothing left out in silence."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from click.testing import CliRunner

from dsrun.catalog import read_toml
from dsrun.cli import finetune
from dsrun.cli.import_ import command
from dsrun.errors import DsrunError
from dsrun.options import run_file
from dsrun.trainers import arguments, files, trainers
from dsrun.trainers.counterparts import DIFFERS, REFUSED, SAME, UNKNOWN

LLAMA_FACTORY = {
    "model_name_or_path": "Qwen/Qwen3-4B", "trust_remote_code": True, "stage": "sft", "do_train": True,
    "finetuning_type": "lora", "lora_rank": 16, "lora_target": "all", "dataset": "mine", "template": "qwen3",
    "cutoff_len": 2048, "max_samples": 1000, "val_size": 0.1, "output_dir": "saves/first", "logging_steps": 10,
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1.0e-4,
    "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True,
    "weight_decay": 0.05, "max_grad_norm": 0.5, "ddp_timeout": 180, "resume_from_checkpoint": None,
}  # fmt: skip
AXOLOTL = {
    "base_model": "NousResearch/Llama-3.2-1B", "load_in_4bit": True, "adapter": "qlora", "lora_r": 32, "lora_alpha": 16,
    "lora_target_linear": True, "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca", "split": "train[:1%]"}],
    "val_set_size": 0.05, "sequence_len": 1024, "sample_packing": True, "micro_batch_size": 2,
    "gradient_accumulation_steps": 4, "num_epochs": 1, "optimizer": "paged_adamw_32bit", "lr_scheduler": "cosine",
    "learning_rate": "2e-4", "bf16": "auto", "gradient_checkpointing": True, "warmup_steps": 10, "output_dir": "out",
    "special_tokens": {"pad_token": "<|end_of_text|>"}, "wandb_project": "mine", "evals_per_epoch": 4,
}  # fmt: skip
TORCHTUNE = {
    "output_dir": "/tmp/out", "batch_size": 2, "epochs": 1, "dtype": "bf16", "seed": None, "shuffle": True,
    "model": {"_component_": "torchtune.models.llama3.lora_llama3_8b", "lora_attn_modules": ["q_proj", "output_proj"],
              "lora_rank": 8, "lora_alpha": 16, "apply_lora_to_mlp": False},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "/m/t.model", "max_seq_len": 512},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "/m/Llama-3-8B"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-4, "weight_decay": 0.01},
    "lr_scheduler": {"_component_": "x.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 100},
    "gradient_accumulation_steps": 8, "metric_logger": {"_component_": "x.DiskLogger", "log_dir": "${output_dir}/logs"},
}  # fmt: skip
FILES = {"llama-factory": LLAMA_FACTORY, "axolotl": AXOLOTL, "torchtune": TORCHTUNE}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """`written(values, name)`: a file with these values, in a folder with a space and Chinese in its name."""
    folder = tmp_path / "别 的"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def write(values, name="sft.yaml"):
        path = folder / name
        path.write_text(
            values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False), encoding="utf-8"
        )
        return path

    return write


def imported(path, **more):
    return files.drafted(files.read(path), **more)


def values(draft):
    return {name: setting.value for name, setting in draft.options.items()}


def keys_of(value):
    if isinstance(value, dict):
        return set(value) | {name for inner in value.values() for name in keys_of(inner)}
    return {name for inner in value for name in keys_of(inner)} if isinstance(value, list) else set()


@pytest.mark.parametrize("name", FILES)
def test_every_key_stands_in_the_run_file_and_it_reads_back(written, name):
    path = written(FILES[name])
    done = CliRunner().invoke(command, [path.name, "-o", "run.toml"])
    assert done.exit_code == 0, done.output
    text = path.with_name("run.toml").read_text(encoding="utf-8")
    assert not {
        key for key in keys_of(FILES[name]) if not re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", text)
    }
    run = run_file.read(path.with_name("run.toml"))
    assert run.model
    assert set(run.values) == set(values(imported(path)))


def test_llama_factory(written):
    draft = imported(written(LLAMA_FACTORY))
    made = values(draft)
    expected = {
        "method": "lora", "lora_rank": 16, "lora_alpha": 32.0, "max_length": 2048, "max_samples": 1000, "val_size": 0.1,
        "micro_batch": 1, "grad_accum": 8, "lr": 1e-4, "epochs": 3.0, "lr_schedule": "cosine", "warmup_ratio": 0.1,
        "precision": "bf16", "weight_decay": 0.05, "grad_clip": 0.5, "activation_checkpointing": "full", "timeout": 3,
        "allow_truncation": True, "output_dir": "saves/first",
    }  # fmt: skip
    assert {name: made.get(name) for name in expected} == expected
    assert draft.model == "Qwen/Qwen3-4B"
    assert draft.outcomes["dataset"].kind == DIFFERS
    assert draft.outcomes["learning_rate"].line


def test_a_trainers_own_defaults_are_part_of_the_job(written):
    draft = imported(written({"model_name_or_path": "m/m", "stage": "sft", "template": "x", "dataset": "a"}))
    made = values(draft)
    assert made["lr"] == arguments.default("llama-factory", "learning_rate") == 5e-5
    assert (made["lr_schedule"], made["warmup_ratio"], made["micro_batch"], made["max_length"]) == (
        "linear",
        0.0,
        8,
        2048,
    )
    assert "own default" in draft.options["lr"].source


@pytest.mark.parametrize(
    ("values", "model"),
    [
        (LLAMA_FACTORY | {"model_revision": "v1.0"}, "Qwen/Qwen3-4B@v1.0"),
        (AXOLOTL | {"revision_of_model": "0a1b"}, "NousResearch/Llama-3.2-1B@0a1b"),
        (AXOLOTL | {"revision_of_model": None}, "NousResearch/Llama-3.2-1B"),
        (LLAMA_FACTORY | {"model_name_or_path": "/models/qwen", "model_revision": "v1.0"}, "/models/qwen"),
    ],
)
def test_a_revision_stands_behind_the_repositorys_name(written, values, model):
    draft = imported(written(values))
    assert draft.model == model
    told = draft.outcomes.get("model_revision") or draft.outcomes["revision_of_model"]
    assert (told.kind == SAME) == ("@" in model)


@pytest.mark.parametrize(
    ("script", "model"),
    [
        (
            "swift sft --model o/n --model_revision v1 --dataset a.jsonl --tuner_type lora",
            "modelscope:o/n@v1",
        ),
        ("trl sft --model_name_or_path o/n --model_revision v1 --dataset_name a/b --use_peft", "o/n@v1"),
    ],
)
def test_a_scripts_revision_stands_behind_the_repositorys_name(written, script, model):
    assert imported(written(script, "train.sh")).model == model


def test_dataset_info_leads_to_the_files(written, tmp_path):
    path = written(LLAMA_FACTORY | {"dataset": "mine,hub,named", "eval_dataset": "mine"})
    data = path.parent / "data"
    data.mkdir()
    info = {
        "mine": {"file_name": "我的.json"},
        "hub": {"hf_hub_url": "o/n", "split": "test", "subset": "en"},
        "named": {"file_name": "x.jsonl", "columns": {"prompt": "q", "response": "a"}},
        "seen": {"file_name": "y.json", "columns": {"images": "images"}},
        "ranked": {"file_name": "z.json", "ranking": True},
    }
    (data / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    made = values(imported(path))
    assert made["train_file"] == [str(data / "我的.json"), "hf:o/n/en#test", str(data / "x.jsonl")]
    assert (made["eval_file"], made["prompt_column"]) == (str(data / "我的.json"), "q")
    for name in ("seen", "ranked"):
        with pytest.raises(DsrunError, match=name):
            imported(written(LLAMA_FACTORY | {"dataset": name}))


@pytest.mark.parametrize(
    ("place", "dataset_dir"),
    [(".", None), ("data", None), ("../data", None), ("mine", "mine"), (".", "mine"), ("../..", "mine")],
    ids=["beside", "data", "data above", "named", "beside, another named", "the working folder"],
)
def test_dataset_info_is_found_where_it_is(written, place, dataset_dir, monkeypatch):
    path = written(LLAMA_FACTORY | ({"dataset_dir": dataset_dir} if dataset_dir else {}))
    folder = (path.parent / place).resolve()
    folder.mkdir(exist_ok=True)
    (path.parent / "data").mkdir(exist_ok=True)  # one without dataset_info.json hides no other
    monkeypatch.chdir(folder if dataset_dir and place == "../.." else path.parent)
    (folder / "dataset_info.json").write_text('{"mine": {"file_name": "a.json"}}', encoding="utf-8")
    assert values(imported(path))["train_file"] == [str(folder / "a.json")]


@pytest.mark.parametrize(
    ("dataset_dir", "looked"),
    [(None, ["data", "."]), ("mine", ["mine", "."]), ("/no/such", ["/no/such", "."])],
)
def test_places_without_dataset_info_are_named(written, dataset_dir, looked):
    path = written(LLAMA_FACTORY | ({"dataset_dir": dataset_dir} if dataset_dir else {}))
    outcome = imported(path).outcomes["dataset"]
    assert outcome.kind == DIFFERS
    assert ", ".join(str(path.parent / place) for place in looked) in outcome.text


@pytest.mark.parametrize(("text", "says"), [("{,}", "can't be read"), ("[]", "holds no entries")])
def test_a_broken_dataset_info_is_told_of(written, text, says):
    path = written(LLAMA_FACTORY)
    (path.parent / "dataset_info.json").write_text(text, encoding="utf-8")
    told = imported(path).outcomes["dataset"].text
    assert says in told
    assert str(path.with_name("dataset_info.json")) in told


def test_axolotl_counts_a_packed_step_in_tokens(written):
    path = written(AXOLOTL)
    made = values(imported(path))
    assert made["tokens_per_batch"] == 2 * 4 * 1024
    assert values(imported(path, gpus=8))["tokens_per_batch"] == 8 * made["tokens_per_batch"]
    assert not {"micro_batch", "grad_accum", "warmup_ratio"} & set(made)
    assert made["train_file"] == ["hf:tatsu-lab/alpaca#train[:1%]"]
    assert (made["method"], made["lora_target"], made["lr"], made["warmup_steps"]) == (
        "qlora",
        "all",
        2e-4,
        10,
    )
    unpacked = values(imported(written(AXOLOTL | {"sample_packing": False})))
    assert (unpacked["micro_batch"], unpacked["grad_accum"]) == (2, 4)


def test_torchtune(written):
    draft = imported(written(TORCHTUNE))
    made = values(draft)
    assert draft.model == "/m/Llama-3-8B"
    assert (made["method"], made["lora_target"], made["train_file"]) == (
        "lora",
        "q_proj,o_proj",
        ["hf:yahma/alpaca-cleaned"],
    )
    assert (made["lr"], made["weight_decay"], made["max_length"], made["warmup_steps"]) == (
        3e-4,
        0.01,
        512,
        100,
    )


@pytest.mark.parametrize(
    ("values_of", "more", "clip", "source"),
    [
        (TORCHTUNE, {}, 0.0, "never clipped there"),
        (TORCHTUNE, {"clip_grad_norm": None}, 0.0, "clip_grad_norm is empty"),
        (TORCHTUNE, {"clip_grad_norm": 0.7}, 0.7, "clip_grad_norm"),
        (LLAMA_FACTORY, {"max_grad_norm": None}, 0.0, "max_grad_norm is empty"),
        (LLAMA_FACTORY, {"max_grad_norm": 0}, 0.0, "max_grad_norm"),
        (AXOLOTL, {"max_grad_norm": 0.0}, 0.0, "max_grad_norm"),
    ],
)
def test_what_is_never_clipped_there_is_not_clipped_here(written, values_of, more, clip, source):
    path = written(values_of | more)
    setting = imported(path).options["grad_clip"]
    assert setting.value == clip
    assert source in setting.source
    assert CliRunner().invoke(command, [path.name, "-o", "run.toml"]).exit_code == 0
    assert run_file.read(path.with_name("run.toml")).values["grad_clip"] == clip


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", "trl sft --model_name_or_path m/m --dataset_name o/n"),
        ("a.sh", "swift sft --model o/n --dataset a.jsonl --tuner_type lora"),
        (
            "a.sh",
            "torchrun t.py --model_name_or_path m/m --train_file a.jsonl --output_dir o --learning_rate 1e-5",
        ),
        ("a.yaml", {key: value for key, value in LLAMA_FACTORY.items() if key != "max_grad_norm"}),
        ("a.yaml", AXOLOTL),
        ("a.yaml", AXOLOTL | {"max_grad_norm": None}),
    ],
    ids=["trl", "ms-swift", "transformers", "llama-factory", "axolotl", "axolotl, null"],
)
def test_what_is_clipped_at_one_there_has_that_default_here(written, name, text):
    from dsrun.options.commands import FinetuneOptions
    from dsrun.options.declare import entries

    assert entries(FinetuneOptions)["grad_clip"].default == 1.0
    assert "grad_clip" not in values(imported(written(text, name)))


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"stage": "dpo"}, "stage"), ({"finetuning_type": "freeze"}, "finetuning_type"), ({"fp8": True}, "fp8"),
        ({"pissa_init": True}, "pissa_init"), ({"image_max_pixels": 262144}, "image_max_pixels"),
        ({"use_galore": True}, "use_galore"),
        ({"quantization_bit": 4, "finetuning_type": "full"}, "quantization_bit"),
    ],
)  # fmt: skip
def test_another_job_is_refused_by_its_argument_and_its_line(written, more, key):
    path = written(LLAMA_FACTORY | more)
    with pytest.raises(DsrunError) as caught:
        imported(path)
    (place,) = [problem.where for problem in caught.value.problems if problem.where.endswith(f": {key}")]
    line = int(place.removesuffix(f": {key}").rpartition(":")[2])
    assert path.read_text(encoding="utf-8").splitlines()[line - 1].startswith(f"{key}:")


def test_every_refusal_is_told_at_once(written):
    with pytest.raises(DsrunError) as caught:
        imported(written(LLAMA_FACTORY | {"use_badam": True, "use_dora": True}))
    assert len(caught.value.problems) == 2


def test_what_is_off_refuses_nothing(written):
    off = {
        "use_galore": False,
        "galore_rank": 16,
        "pissa_init": False,
        "use_unsloth": False,
        "fp8": False,
        "use_dora": None,
    }
    draft = imported(written(LLAMA_FACTORY | off))
    assert not {outcome.kind for outcome in draft.outcomes.values()} & {REFUSED}
    assert set(off) <= set(draft.outcomes)


def test_an_unknown_key_is_told_with_the_nearest(written):
    draft = imported(written(LLAMA_FACTORY | {"learning_rat": 1, "zzz": 2}))
    assert draft.outcomes["learning_rat"].kind == draft.outcomes["zzz"].kind == UNKNOWN
    assert "learning_rate" in draft.outcomes["learning_rat"].text


def test_a_value_that_an_option_does_not_take_is_told_and_not_written(written):
    draft = imported(
        written(LLAMA_FACTORY | {"warmup_ratio": 0.0, "lr_scheduler_type": "polynomial", "seed": "x"})
    )
    assert draft.outcomes["lr_scheduler_type"].kind == DIFFERS
    assert draft.outcomes["seed"].kind == DIFFERS
    assert not {"lr_schedule", "seed"} & set(draft.options)


def test_a_deepspeed_config_comes_along(written):
    path = written(LLAMA_FACTORY | {"deepspeed": "cfg/ds_z3_config.json"})
    assert values(imported(path))["preset"] == "zero3"  # not here: the preset of its name
    (path.parent / "cfg").mkdir()
    config = path.parent / "cfg" / "ds_z3_config.json"
    config.write_text('{"zero_optimization": {"stage": 3, "nonsense_key": 1}}', encoding="utf-8")
    done = CliRunner().invoke(command, [path.name, "-o", "run.toml"])
    assert read_toml(path.with_name("run.toml"))["preset"] == "./cfg/ds_z3_config.json"
    assert f"{config}: " in done.output
    assert "no findings" not in done.output


SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
export MODEL=${BASE:-Qwen/Qwen3-0.6B}
cd /work && source venv/bin/activate
cat > ds.json <<EOF
{"zero_optimization": {"stage": 2}}
EOF
deepspeed --num_gpus 4 sft.py \\
  --model_name_or_path "$MODEL" --train_file 'my data.json' --per_device_train_batch_size 4 \\
  --learning_rate 1e-4 --bf16 True --num_train_epochs 2 --report_to wandb tensorboard > log 2>&1
python eval.py --model out
"""


def test_a_script_with_variables_a_launcher_and_hf_arguments(written):
    draft = imported(written(SCRIPT, "train.sh"))
    made = values(draft)
    assert draft.model == "Qwen/Qwen3-0.6B"
    assert (made["gpus"], made["micro_batch"], made["lr"], made["precision"]) == (4, 4, 1e-4, "bf16")
    assert (made["train_file"], made["log"]) == (["my data.json"], ["wandb", "tensorboard"])
    assert "max_length" not in made  # a script of somebody's own has no default of TRL's
    notes = "\n".join(draft.notes)
    for told in ("#SBATCH --nodes=2", "ds.json", "eval.py"):
        assert told in notes


@pytest.mark.parametrize(
    ("line", "trainer", "expected"),
    [
        ("CUDA_VISIBLE_DEVICES=2,3 llamafactory-cli train sft.yaml learning_rate=5e-6", "llama-factory",
         {"lr": 5e-6, "devices": "2,3"}),
        ("srun -N 1 --gres=gpu:8 accelerate launch --num_processes 8 -m axolotl.cli.train a.yml --learning_rate 1e-5",
         "axolotl", {"lr": 1e-5, "gpus": 8}),
        ("NPROC_PER_NODE=4 swift sft --model Qwen/Q --dataset 'a.jsonl#500' --tuner_type full --torch_dtype bfloat16",
         "ms-swift", {"max_samples": 500, "gpus": 4, "method": "full", "precision": "bf16", "weight_decay": 0.1}),
        ("trl sft --model_name_or_path m/m --dataset_name o/n --use_peft --lora_r 8 --max_length 512", "trl",
         {"method": "lora", "lora_rank": 8, "max_length": 512, "train_file": ["hf:o/n"]}),
        ("accelerate launch --mixed_precision no t.py --model_name_or_path m/m --train_file a.jsonl --max_steps 3",
         "transformers", {"precision": "fp32"}),
        ("accelerate launch trl/scripts/sft.py --model_name_or_path m/m --dataset_name o/n --packing --max_length 64 "
         "--per_device_train_batch_size 2", "trl", {"tokens_per_batch": 128, "precision": "bf16"}),
        ("tune run --nproc_per_node 2 lora_finetune_distributed --config t.yaml epochs=3", "torchtune",
         {"epochs": 3, "gpus": 2}),
        ("python -m torch.distributed.run --nproc_per_node=8 src/train.py sft.yaml", "llama-factory", {"gpus": 8}),
    ],
)  # fmt: skip
def test_the_command_lines_of_each_trainer(written, line, trainer, expected):
    written(LLAMA_FACTORY)
    written(AXOLOTL, "a.yml")
    written(TORCHTUNE, "t.yaml")
    draft = imported(written(f"#!/bin/sh\n{line}\n", "run.sh"))
    assert draft.trainer.name == trainer
    assert {name: values(draft).get(name) for name in expected} == expected
    assert not [outcome for outcome in draft.outcomes.values() if outcome.kind == UNKNOWN]


def test_what_trl_trains_on_of_a_row(written):
    line = "trl sft --model_name_or_path m/m --dataset_name o/n"
    whole = "rows of `messages` are trained on whole in TRL"
    assert any(whole in note for note in imported(written(line, "a.sh")).notes)
    answers = imported(written(f"{line} --assistant_only_loss True", "b.sh"))
    assert not any(whole in note for note in answers.notes)
    assert "train_on_prompt" not in values(answers)
    everything = imported(written(f"{line} --completion_only_loss False", "c.sh"))
    assert values(everything)["train_on_prompt"] is True
    off = imported(written(f"{line} --assistant_only_loss False", "d.sh"))
    assert off.outcomes["assistant_only_loss"].kind == DIFFERS


def test_a_folder_is_nearer_than_a_set_of_the_hub(written):
    file = written("trl sft --model_name_or_path m/m --dataset_name rows", "a.sh")
    assert values(imported(file))["train_file"] == ["hf:rows"]
    (file.parent / "rows").mkdir()
    for name in ("train-0.jsonl", "test.jsonl", "README.md"):
        (file.parent / "rows" / name).touch()
    assert values(imported(file))["train_file"] == [str(file.parent / "rows" / "train-0.jsonl")]


def test_a_script_of_ones_own_is_answered_with_launch(written):
    with pytest.raises(DsrunError) as caught:
        imported(written("torchrun --nproc_per_node=8 train.py --config 'a b.py'\n", "run.sh"))
    assert "dsrun launch --gpus 8 train.py --config 'a b.py'" in caught.value.problems[0].hint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("apiVersion: v1\nkind: Pod\n", "Kubernetes"), ("hello: world\n", "no file that dsrun knows"),
        ("- a\n", "a list"),
        ("a: [\n", "sft.yaml"), ("", "empty"), ("site_name: x\nnav: []\n", "mkdocs"),
    ],
)  # fmt: skip
def test_another_file_is_called_by_its_name(written, text, says):
    path = written(text)
    done = CliRunner().invoke(command, [path.name])
    assert isinstance(done.exception, DsrunError)
    assert says in str(done.exception)


@pytest.mark.parametrize("name", ["llama-factory", "axolotl"])
def test_finetune_names_the_command_for_such_a_file(written, name):
    written(FILES[name])
    done = CliRunner().invoke(finetune.command, ["sft.yaml"])
    assert isinstance(done.exception, DsrunError)
    assert trainers()[name].title in str(done.exception)
    assert "dsrun import sft.yaml -o run.toml" in str(done.exception)


@pytest.mark.parametrize(
    "name", [name for name, trainer in trainers().items() if trainer.telling and name != "accelerate"]
)
def test_the_table_has_a_place_for_every_argument_that_its_classes_declare(name):
    trainer = trainers()[name]
    declared = arguments.declared(name)
    assert declared, f"python -m tools.trainers {name}=WHEEL"
    sections = {key.partition(".")[0] for row in trainer.rows for key in row.keys if "." in key}
    assert not {key for key in declared if trainer.row(key) is None} - {trainer.model} - sections


@pytest.mark.parametrize("name", trainers())
def test_every_option_in_a_table_is_one_of_finetunes(name):
    from dsrun.options.commands import FinetuneOptions
    from dsrun.options.declare import entries

    rows = trainers()[name].rows
    named = {option for row in rows for option in (*row.options, *row.named.values())}
    assert named <= set(entries(FinetuneOptions))
    assert all(row.text for row in rows if row.kind not in (SAME, "settled"))


def test_fp8_is_fsdps(written):
    given = LLAMA_FACTORY | {"fp8": True, "fp8_backend": "torchao"}
    made = values(imported(written(given | {"fsdp": "full_shard auto_wrap"})))
    assert (made["fp8"], made["preset"]) == ("tensorwise", "fsdp")
    with pytest.raises(DsrunError, match="under FSDP only"):
        imported(written(given))
    assert "fp8" not in values(imported(written(LLAMA_FACTORY | {"fp8": False, "fp8_backend": "auto"})))


ARGUMENTS = "--model_name_or_path m/m --dataset_name o/n --learning_rate 1e-4 --num_train_epochs 2"


@pytest.mark.parametrize(
    "text",
    [
        f'srun --jobid 7 bash -c "torchrun --nproc_per_node 2 sft.py {ARGUMENTS}"',
        f"CMD=\"torchrun --nproc_per_node 2 sft.py {ARGUMENTS}\"\nsrun -N 2 bash -lc \"$CMD\"",
        f"CMD='torchrun --nproc_per_node 2 sft.py {ARGUMENTS}'\n$CMD 2>&1 | tee log.txt",
        f'OPTIONS="{ARGUMENTS}"\ntorchrun --nproc_per_node=2 sft.py $OPTIONS &> log.txt',
        f"ARGS=(\n  # of the lab\n  {ARGUMENTS.replace(' --', chr(10) + '  --')}  # usual\n)\n"
        'torchrun --nproc_per_node 2 sft.py "${ARGS[@]}"',
        "ARGS=( # it's (all)\n--model_name_or_path m/m)\nARGS+=( --dataset_name o/n --learning_rate 1e-4 )\n"
        'torchrun --nproc_per_node 2 sft.py "${ARGS[@]}" --num_train_epochs 2',
        "LRS=(1e-3 1e-4)\nexport MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)\n"
        "torchrun --rdzv_endpoint $MASTER_ADDR:29500 --nproc_per_node 2 sft.py --model_name_or_path m/m \\\n"
        "  --dataset_name o/n --num_train_epochs 2 --learning_rate ${LRS[1]}",
    ],
    ids=["bash -c", "a command kept", "a command in parts", "options kept", "an array", "an array that grows", "slurm"],
)  # fmt: skip
def test_what_a_shell_makes_of_a_command(written, text):
    draft = imported(written(f"#!/bin/bash\nset -euo pipefail\n{text}\n", "run.sh"))
    made = values(draft)
    assert (draft.model, made["train_file"], made["lr"], made["epochs"], made["gpus"]) == (
        "m/m", ["hf:o/n"], 1e-4, 2, 2
    )  # fmt: skip
    assert not [note for note in draft.notes if "no argument" in note or "not taken over" in note]


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("--output_dir out#1", "out#1"), ("--output_dir=out#1 # --learning_rate 9", "out#1"),
        ("--output_dir '#1'", "#1"), ('--output_dir "a #1"', "a #1"), ("--output_dir a\\ #1", "a #1"),
        ("--output_dir out  # don't \"keep\"", "out"), ("--output_dir out#1# ;# --learning_rate 9", "out#1#"),
        ("--output_dir out \\\n  # --learning_rate 9 \\", "out"), ("--output_dir out;#1", "out"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "frame",
    [
        "{start} {words}\n",
        "# {start} --learning_rate 9 \\\n{start} {words}\n",
    ],
    ids=["line", "behind a comment with a backslash"],
)
def test_a_comment_begins_where_a_word_does(written, words, output, frame):
    start = "trl sft --model_name_or_path m/m --dataset_name o/n --learning_rate 1e-4"
    draft = imported(written(frame.format(start=start, words=words), "run.sh"))
    made = values(draft)
    assert (made["lr"], made["output_dir"]) == (1e-4, output)
    assert not [note for note in draft.notes if "no argument" in note or "not taken over" in note]


def test_what_stands_behind_a_number_of_rows_counts(written):
    line = (
        "swift sft --model Qwen/Q --dataset alpaca-train.jsonl#200 --learning_rate 3e-4 --tuner_type full\n"
    )
    made = values(imported(written(line, "run.sh")))
    assert (made["max_samples"], made["lr"], made["method"]) == (200, 3e-4, "full")


def test_options_behind_a_comment_in_a_command_are_a_command_of_their_own(written):
    text = f"trl sft {ARGUMENTS} \\\n  # --packing \\\n  --max_length 64\n"
    assert any("--max_length 64" in note for note in imported(written(text, "run.sh")).notes)


def test_a_value_that_only_the_shell_knows_is_told_of(written):
    script = f"LRS=(1e-3 1e-4)\nfor i in 0 1; do\ntrl sft {ARGUMENTS} --learning_rate ${{LRS[$i]}}\ndone\n"
    draft = imported(written(script, "run.sh"))
    assert draft.outcomes["learning_rate"].kind == DIFFERS
    assert "${LRS[$i]}" in draft.outcomes["learning_rate"].text


@pytest.mark.parametrize(
    ("line", "trainer"),
    [
        ("torchrun src/train.py --stage sft --do_train --model_name_or_path m/m --dataset d --template qwen3 "
         "--finetuning_type full --output_dir o --learning_rate 1e-5 --num_train_epochs 2", "llama-factory"),
        ("torchrun t.py --model_name_or_path m/m --train_file a.jsonl --output_dir o --learning_rate 1e-5",
         "transformers"),
        ("torchrun s.py --model_name_or_path m/m --dataset_name a/b --max_length 9 --learning_rate 1e-5 --output_dir o",
         "trl"),
    ],
)  # fmt: skip
def test_a_script_is_the_trainers_that_has_all_its_arguments(written, line, trainer):
    assert imported(written(line, "run.sh")).trainer.name == trainer


PACKED = "sft.py --model_name_or_path m/m --dataset_name o/n --packing --max_length 64 --per_device_train_batch_size 2"


@pytest.mark.parametrize(
    ("lines", "launch"),
    [
        ("--nodes=2\n--gpus-per-node=4", "torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_PER_NODE"),
        ("-N 2 --gres=gpu:4", "torchrun --nnodes=${SLURM_JOB_NUM_NODES} --nproc_per_node=${SLURM_GPUS_ON_NODE}"),
        ("-N2\n--gres=nvme:1,gpu:a100:4(S:0-1) # all", 'torchrun --nnodes "$SLURM_NNODES" --nproc_per_node 4'),
        ("--ntasks=8\n--ntasks-per-node 4",
         "accelerate launch --num_machines $SLURM_NNODES --num_processes $SLURM_NTASKS"),
        ("--nodes 2-2\n--gpus=h100:8",
         "GPUS=$SLURM_GPUS_ON_NODE\ndeepspeed --num_nodes ${SLURM_NNODES:-1} --num_gpus $GPUS"),
        ("--nodes=2\n--gpus-per-node=a100:2,h100:2",
         "accelerate launch --num_machines $SLURM_NNODES --num_processes $((SLURM_NNODES * $SLURM_GPUS_PER_NODE))"),
        ("--nodes=2 --ntasks-per-node=2\n--gpus-per-task=2",
         'srun bash -c "torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE PACKED"'),
    ],
    ids=["per node", "gres", "gres by model", "tasks", "all gpus", "product", "per task"],
)  # fmt: skip
def test_what_the_queue_is_asked_for_is_counted(written, lines, launch):
    head = "\n".join(f"#SBATCH {line}" for line in lines.splitlines())
    launch = launch.replace("PACKED", PACKED) if "PACKED" in launch else f"{launch} {PACKED}"
    draft = imported(written(f"#!/bin/bash\n{head}\n\nset -e\n{launch}\n", "run.sbatch"))
    assert values(draft)["gpus"] == 4
    assert values(draft)["tokens_per_batch"] == 8 * 2 * 64
    assert any("2 hosts of 4 GPUs, 8 in all" in outcome.text for outcome in draft.outcomes.values())
    assert not any("SLURM" in note for note in draft.notes)


@pytest.mark.parametrize(
    "lines",
    ["", "#SBATCH --time=1:00:00\n", "#SBATCH --nodes=2-4 --gres=nvme:1\n", "##SBATCH --nodes=2 --gres=gpu:4\n",
     "set -e\n#SBATCH --nodes=2 --gres=gpu:4\n"],
    ids=["nothing", "other things", "a range", "commented out", "behind a command"],
)  # fmt: skip
def test_what_no_line_asks_the_queue_for_is_unknown(written, lines):
    launch = f"torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE {PACKED}\n"
    draft = imported(written(f"#!/bin/bash\n{lines}{launch}", "run.sbatch"))
    assert values(draft)["tokens_per_batch"] == 2 * 64
    assert "gpus" not in values(draft)
    for key in ("nnodes", "nproc_per_node"):
        assert draft.outcomes[key].kind == DIFFERS
        assert "the script doesn't say how many" in draft.outcomes[key].text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("python -m verl.trainer.sft data.files=a.parquet", "starts verl.trainer.sft"),
        ("tune run full_finetune_distributed --config llama3_1/8B_full epochs=2", "names llama3_1/8B_full"),
    ],
)
def test_what_is_started_is_named(written, line, says):
    with pytest.raises(DsrunError, match=says):
        imported(written(f"{line}\n", "run.sh"))


def test_a_builder_of_data_sets_is_none(written):
    local = {"path": "json", "data_files": ["data/a.jsonl", "data/b.jsonl"], "type": "alpaca"}
    draft = imported(written({**AXOLOTL, "datasets": [*AXOLOTL["datasets"], local]}, "a.yml"))
    assert values(draft)["train_file"][-2:] == ["data/a.jsonl", "data/b.jsonl"]


def test_an_older_name_of_a_limit_holds(written):
    draft = imported(written(f"trl sft {ARGUMENTS} --max_seq_length 512\n", "run.sh"))
    assert values(draft)["max_length"] == 512


def test_divided_experts_are_dsruns(written):
    experts = {
        "plugins": ["axolotl.integrations.expert_parallel.ExpertParallelPlugin"],
        "expert_parallel_size": 4,
    }
    whole = {
        key: value for key, value in AXOLOTL.items() if not key.startswith(("adapter", "lora_", "load_"))
    }
    assert values(imported(written({**whole, **experts}, "a.yml")))["ep"] == 4
    with pytest.raises(DsrunError, match="--ep divides experts whose weights are all trained"):
        imported(written({**AXOLOTL, **experts}, "b.yml"))


def test_convert_names_the_command_for_a_trainers_file(written):
    from dsrun.cli import convert

    for name, says in (("llama-factory", "dsrun import"), ("axolotl", "dsrun import")):
        written(FILES[name])
        done = CliRunner().invoke(convert.command, ["sft.yaml"])
        assert isinstance(done.exception, DsrunError)
        assert says in done.exception.problems[0].hint
    written("apiVersion: v1\nkind: Pod\n", "pod.yaml")
    assert "Kubernetes" in str(CliRunner().invoke(convert.command, ["pod.yaml"]).exception)

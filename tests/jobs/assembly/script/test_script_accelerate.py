"""A script of accelerate's under `dsrun launch`: its launch config, its variables, and what is refused on CPU ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from asking import script_request

from dsrun.cluster.devices import Gpu, Machine
from dsrun.errors import DsrunError
from dsrun.job import run_folder
from dsrun.jobs.allocation.request import ConnectionOptions
from dsrun.jobs.allocation.reservation import Preview
from dsrun.jobs.assembly.script import plan
from dsrun.jobs.assembly.script import source as script_source
from dsrun.jobs.assembly.script.repeat import repeated
from dsrun.jobs.launchers.common import environment
from dsrun.jobs.runs import past_runs

PLAIN = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
GLOO = (
    "import accelerate\nfrom accelerate import InitProcessGroupKwargs\n"
    'accelerate.Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])\n'
)
ON_CPU = PLAIN.replace("()", "(cpu=True)")
LIGHTNING = "from lightning.pytorch.accelerators import Accelerator\nAccelerator()\n"
GPUS = Machine("cuda", tuple(Gpu(i, "A100", f"GPU-{i}", 80 << 30, (8, 0)) for i in range(4)), 32, "4 x A100")
TRAINER = "from transformers import Trainer, TrainingArguments\nTrainer(args=TrainingArguments())\n"
STAGE_2 = {
    "distributed_type": "DEEPSPEED",
    "num_processes": 2,
    "mixed_precision": "no",
    "deepspeed_config": {"zero_stage": 2},
}
FSDP = {
    "distributed_type": "FSDP", "num_processes": 4, "num_machines": 2, "main_process_ip": "10.0.0.1",
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "w[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_PER_NODE": "2",
}  # fmt: skip


@pytest.fixture
def planned(work, machine):
    """`planned(script, launch config or None, **options)`: the plan of `dsrun launch`."""

    def make(text, config=STAGE_2, *, on=machine, environ=None, args=(), **given):
        (work / "train.py").write_text(text, encoding="utf-8")
        environ = environ if environ is not None else {"DS_ACCELERATOR": on.accelerator}
        if config is not None:
            (work / "acc.yaml").write_text(yaml.safe_dump(config))
            given["accelerate"] = Path("acc.yaml")
        allocator = Preview(on, environ, ConnectionOptions(check=False))
        return plan(
            script_request("train.py", args, output_dir=Path("run"), **given),
            on,
            environ,
            allocator=allocator,
        )

    return make


def refused(planned, *words, **given) -> str:
    with pytest.raises(DsrunError) as error:
        planned(*words, **given)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "reader", "gloo", "on_cpu"),
    [
        (PLAIN, "accelerate", False, False),
        (GLOO, "accelerate", True, False),
        (ON_CPU, "accelerate", False, True),
        (LIGHTNING, None, False, False),
        (PLAIN.replace("()", "(cpu=False)"), "accelerate", False, False),
        (TRAINER + PLAIN, "hf", False, False),
    ],
)  # fmt: skip
def test_sources(work, text, reader, gloo, on_cpu):
    (work / "train.py").write_text(text)
    found = script_source.of_script(work / "train.py")
    assert (found.reader, found.names_gloo, found.on_cpu) == (reader, gloo, on_cpu)


def test_the_ranks_and_their_variables(planned):
    job = planned(GLOO).job
    assert job.world_size == 2, "as many as the file says"
    assert job.env["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert job.env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert job.ds_config is None
    assert environment.of_ranks(job, {}).items() >= job.env.items()


def test_a_config_that_is_named_lies_in_the_run_folder(planned, work, dsrun):
    assert dsrun("preset", "zero3", "--for", "accelerate", "-o", "acc.yaml", "--gpus", "2").code == 0
    config = yaml.safe_load((work / "acc.yaml").read_text())
    job = planned(GLOO, config).job
    assert job.ds_config == json.loads((work / "acc.deepspeed.json").read_text())
    assert job.env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(work / "run" / "deepspeed.json")
    assert job.env["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "true"


def test_run_again_the_config_is_the_new_runs(planned, work, machine):
    job = planned(GLOO, None, preset="zero2", gpus=2).job
    (work / "run").mkdir()
    (work / "run" / run_folder.JOB).write_text(job.to_json(), encoding="utf-8")
    again = repeated(past_runs.read(work / "run"), job, machine, {}, output_dir=work / "second").job
    assert again.env == {
        **job.env,
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(work / "second" / "deepspeed.json"),
    }


def test_a_preset_reaches_an_accelerator(planned, work):
    job = planned(GLOO, None, preset="zero3", gpus=2).job
    assert job.args == ()
    assert job.ds_config["train_batch_size"] == "auto"
    assert job.env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(work / "run" / "deepspeed.json")


def test_a_preset_of_fsdps_reaches_an_accelerator(planned):
    job = planned(PLAIN, None, preset="fsdp-offload", gpus=2, precision="bf16", on=GPUS, environ={}).job
    assert (job.plain, job.ds_config) == (True, None)
    assert job.env["FSDP_VERSION"] == "2"
    assert (job.env["FSDP_OFFLOAD_PARAMS"], job.env["ACCELERATE_MIXED_PRECISION"]) == ("true", "bf16")
    assert "--micro-batch" in refused(
        planned, PLAIN, None, preset="fsdp", gpus=2, micro_batch=2, on=GPUS, environ={}
    )
    assert "without FSDP" in refused(planned, PLAIN, None, preset="fsdp", gpus=2)


def test_what_the_user_says_stands(planned):
    found = planned(GLOO, gpus=1, env=("ACCELERATE_DEEPSPEED_ZERO_STAGE=1",))
    assert found.job.world_size == 1
    assert any("num_processes is 2" in note for note in found.notes)
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" not in found.job.env


def test_devices_of_the_file(planned):
    config = {**FSDP, "num_machines": 1, "num_processes": 2, "gpu_ids": "1,3"}
    assert planned(PLAIN, config, on=GPUS, environ={}).job.hosts[0].devices == (1, 3)


def test_fsdp_on_two_hosts_of_slurm(planned):
    found = planned(PLAIN, FSDP, on=replace(GPUS, gpus=GPUS.gpus[:2]), environ=SLURM)
    assert [host.host for host in found.job.hosts] == ["w1", "w2"]
    assert found.job.world_size == 4
    assert found.job.env["ACCELERATE_USE_FSDP"] == "true"
    assert found.job.env["FSDP_SHARDING_STRATEGY"] == "FULL_SHARD"
    assert any("main_process_ip" in note for note in found.notes)


@pytest.mark.parametrize("config", [STAGE_2, None])
def test_ranks_that_would_not_see_each_other_are_refused(planned, config):
    text = refused(planned, PLAIN, config, gpus=2)
    assert "train.py:2" in text
    assert ('backend="gloo"' if config else "ACCELERATE_USE_CPU=true") in text
    assert planned(PLAIN, config, gpus=1).job.world_size == 1, "one rank sees all there are"
    assert planned(PLAIN, config, gpus=2, force=True).job.world_size == 2


def test_plain_cpu_ranks(planned):
    assert planned(ON_CPU, None, gpus=2).job.env == {}
    assert planned(PLAIN, None, gpus=2, env=("ACCELERATE_USE_CPU=true",)).job.env == {}
    config = {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True, "mixed_precision": "no"}
    assert planned(PLAIN, config).job.env["ACCELERATE_USE_CPU"] == "True"


@pytest.mark.parametrize(
    ("text", "config", "given", "words"),
    [
        (PLAIN, {**FSDP, "num_machines": 1}, {"gpus": 2}, "without FSDP"),
        (TRAINER, {**FSDP, "num_machines": 1}, {"gpus": 2}, "without FSDP"),
        (ON_CPU, STAGE_2, {}, "drops DeepSpeed"),
        (GLOO, {**STAGE_2, "num_procs": 2}, {}, "num_processes"),
        (GLOO, {**STAGE_2, "deepspeed_config": {"deepspeed_config_file": "no.json"}}, {}, "no.json"),
        (GLOO, {**STAGE_2, "distributed_type": "MEGATRON_LM"}, {}, "accelerate launch"),
        (GLOO, {**STAGE_2, "num_machines": 2, "num_processes": 4}, {}, "--hosts"),
        (GLOO, STAGE_2, {"preset": "zero2"}, "Leave one of them out"),
        (GLOO, STAGE_2, {"args": ("--deepspeed_config", "acc.yaml")}, "Leave one of them out"),
        (GLOO, {**FSDP, "fsdp_config": {"fsdp_auto_wrap_policy": "LAYERS"}}, {"gpus": 2}, "DS693"),
    ],
)  # fmt: skip
def test_refusals(planned, text, config, given, words):
    assert words in refused(planned, text, config, **given)


def test_a_file_beside_the_script_is_named(planned, work):
    (work / "other.yaml").write_text(yaml.safe_dump(STAGE_2))
    (work / "data.yaml").write_text("rows: 3\n")
    notes = [note for note in planned(ON_CPU, None, gpus=2).notes if "--accelerate" in note]
    assert [note.split()[0] for note in notes] == ["other.yaml"]

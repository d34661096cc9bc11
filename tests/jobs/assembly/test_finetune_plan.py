"""From what was asked for to a Job: everything is looked at, and all that is wrong is said at once."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from asking import finetune_request

from dsrun.cluster import cpu_types, extensions
from dsrun.cluster.devices import Gpu, Machine
from dsrun.errors import DsrunError
from dsrun.job import run_folder
from dsrun.job.job import FsdpSpec, HostDevices, Job
from dsrun.jobs.allocation import reservation
from dsrun.jobs.allocation.request import ConnectionOptions
from dsrun.jobs.assembly.finetune import FinetuneRequest, plan
from dsrun.jobs.assembly.finetune.stages import Requested, WithConfig, WithDevices, WithModel
from dsrun.jobs.assembly.resume import resumed
from dsrun.jobs.assembly.script.stages import KnownScript, RankInputs
from dsrun.jobs.launchers.common.environment import of_ranks
from dsrun.options.commands import FinetuneOptions

ROWS = [{"content": f"类型#裙*编号#{number}", "summary": f"第{number}条裙子。"} for number in range(20)]
GPUS = Machine(
    "cuda",
    tuple(Gpu(i, "NVIDIA A100", f"GPU-{i}", 80 << 30, (8, 0)) for i in range(4)),
    32,
    "4 x NVIDIA A100",
)


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    """Nothing of the user's is read or written: the working folder and the cache are empty ones."""
    for name in ("work", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()


@pytest.fixture
def train_file(tmp_path):
    path = tmp_path / "the lab's 数据.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    return path


def asked(model="llama-tiny", overrides=(), **given) -> FinetuneRequest:
    return finetune_request(model, overrides, **given)


def planned(request: FinetuneRequest, machine: Machine, environ=None) -> Job:
    return plan(request, machine, environ or {}).job


def problems_of(request: FinetuneRequest, machine: Machine, environ=None):
    with pytest.raises(DsrunError) as caught:
        plan(request, machine, environ or {})
    return caught.value.problems


def the_problem(request: FinetuneRequest, machine: Machine, environ=None):
    (problem,) = problems_of(request, machine, environ)
    return problem


@pytest.mark.parametrize(
    ("encoding", "hint"), [("utf-8", "Rename it"), ("ascii", "Take a locale of UTF-8 (LC_ALL=C.UTF-8)")]
)
def test_a_name_that_is_no_text(machine, untouched, monkeypatch, encoding, hint):
    """job.json is UTF-8; what Python can't decode in a name would stop it half written, in a folder that is there."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    problem = the_problem(asked(output_dir=Path(os.fsdecode(b"runs/\xff\xfe"))), machine)
    assert (
        problem.where.endswith("runs/\\xff\\xfe")
        and encoding in problem.what
        and problem.hint.startswith(hint)
    )


def test_the_shortest_command(machine, untouched):
    job = planned(asked(), machine)
    assert (job.model.name, job.preset, job.precision, job.accelerator) == (
        "llama-tiny",
        "zero2",
        "fp32",
        "cpu",
    )
    assert job.hosts == (HostDevices("localhost", (0, 1)),)
    assert job.data.train_file.endswith("presets/datasets/advertise/train.jsonl")
    assert job.data.eval_file.endswith("presets/datasets/advertise/dev.jsonl")
    assert job.run_dir.startswith(f"{Path.cwd()}/runs/llama-tiny-zero2-")
    assert job.training.epochs
    assert job.training.max_steps is None


def test_micro_batches_that_are_tried_say_nothing(train_file):
    """13 billion weights fit one GPU in the smallest micro batch alone."""
    machine = replace(GPUS, gpus=GPUS.gpus[:1], host_memory_bytes=512 << 30)
    request = asked("llama-2-13b", train_file=train_file, preset="fsdp-hybrid", dry_run=True, force=False)
    notes = plan(request, machine, {}, download=False).notes
    assert len(notes) == len(set(notes))
    assert sum("one copy of the model" in note for note in notes) == 1


@pytest.mark.parametrize("stage", [Requested, WithModel, WithDevices, WithConfig, KnownScript, RankInputs])
def test_a_stage_is_not_changed_once_it_is_there(stage):
    """A step that knows more makes another one: what a micro batch is tried with leaves nothing behind."""
    assert stage.__dataclass_params__.frozen


def test_a_job_is_explicit(machine, train_file):
    job = planned(asked(train_file=train_file, gpus=3, global_batch=6), machine)
    assert "auto" not in json.dumps(job.ds_config)
    config = job.ds_config
    assert config["train_batch_size"] == 3 * config["train_micro_batch_size_per_gpu"] * job.grad_accum
    for path in (job.run_dir, job.data.train_file, job.prepared.model_dir, job.prepared.train_rows):
        assert Path(path).is_absolute()
    assert Job.from_json(job.to_json(), "x") == job


def test_given_before_the_models_own_before_the_rest(machine, train_file):
    own = planned(asked(), machine)
    assert own.training.lr == own.ds_config["optimizer"]["params"]["lr"] == 2e-3
    assert own.data.max_length == 160
    given = planned(asked(lr=3e-5, max_target_length=20, micro_batch=2, train_file=train_file), machine)
    assert given.training.lr == given.ds_config["optimizer"]["params"]["lr"] == 3e-5
    assert (given.data.max_length, given.data.max_target_length, given.micro_batch) == (None, 20, 2)
    assert given.data.eval_file is None
    assert given.training.seed == FinetuneOptions().seed == 42


def test_steps_in_place_of_epochs(machine):
    assert planned(asked(max_steps=7), machine).training.epochs is None
    assert planned(asked(max_steps=7), machine).training.max_steps == 7
    assert planned(asked(epochs=0.5), machine).training.epochs == 0.5


def test_every_option_arrives(machine, train_file, tmp_path):
    given = {
        "train_file": train_file, "eval_file": train_file, "prompt_column": "summary",
        "response_column": "content", "max_source_length": 11, "max_target_length": 12, "micro_batch": 2,
        "grad_accum": 3, "grad_clip": 0.5, "precision": "bf16", "lr": 1e-3, "lr_schedule": "cosine",
        "warmup_steps": 4, "max_steps": 9, "seed": 1, "save_steps": 5, "keep_checkpoints": 6, "eval_steps": 2,
        "generate_rows": 0, "score_before": False, "activation_checkpointing": "selective", "recompute_every": 3,
        "devices": "1,2", "preset": "zero3", "output_dir": tmp_path / "run",
    }  # fmt: skip
    job = planned(asked(**given, overrides=["zero_optimization.reduce_bucket_size=2e8"]), machine)
    flat = {
        **vars(job.data), **vars(job.training), "micro_batch": job.micro_batch, "grad_accum": job.grad_accum,
        "grad_clip": job.ds_config["gradient_clipping"], "precision": job.precision, "preset": job.preset,
        "devices": ",".join(map(str, job.hosts[0].devices)), "output_dir": job.run_dir,
    }  # fmt: skip
    for name, value in given.items():
        assert flat[name] == (str(value) if isinstance(value, os.PathLike) else value), name
    assert job.zero_stage == 3
    assert job.ds_config["bf16"]["enabled"] is True
    assert job.ds_config["zero_optimization"]["reduce_bucket_size"] == 200_000_000


def test_devices_are_in_the_order_of_ranks(machine, train_file):
    job = planned(asked(train_file=train_file, devices="3,1"), machine)
    assert job.hosts == (HostDevices("localhost", (3, 1)),)
    assert job.launcher == "local"
    gpus = planned(asked(train_file=train_file), GPUS, {"CUDA_VISIBLE_DEVICES": "3,GPU-1"})
    assert gpus.hosts[0].cuda_visible_devices == "3,1"


def test_a_job_on_several_hosts(machine, train_file):
    """What is planned is the scarcest host's share; the batch is that of all ranks."""
    where = reservation.Preview(machine, {"DS_ACCELERATOR": "cpu"}, ConnectionOptions(check=False))
    request = asked(train_file=train_file, hosts="w[1-2]:3", micro_batch=2, grad_accum=1)
    found = plan(request, machine, {}, allocator=where)
    assert found.job.hosts == (HostDevices("w1", (0, 1, 2)), HostDevices("w2", (0, 1, 2)))
    assert (found.job.launcher, found.job.ds_config["train_batch_size"]) == ("ssh", 12)
    assert any("w1, w2 were not asked" in note for note in found.notes)
    uneven = plan(
        asked(train_file=train_file, hosts="w1:3,w2:1", micro_batch=2, grad_accum=1),
        machine,
        {},
        allocator=where,
    )
    assert uneven.job.ds_config["train_batch_size"] == 8


def test_gpus_are_taken_as_they_are_visible(train_file):
    environ = {"CUDA_VISIBLE_DEVICES": "2,3"}
    job = planned(asked(train_file=train_file), GPUS, environ)
    assert (job.hosts, job.precision, job.accelerator) == (
        (HostDevices("localhost", (2, 3)),),
        "bf16",
        "cuda",
    )


def test_the_cache_names_things_by_their_content(machine, train_file):
    first = planned(asked(train_file=train_file), machine).prepared
    assert planned(asked(train_file=train_file), machine).prepared == first
    longer = planned(asked(train_file=train_file, max_source_length=33), machine).prepared
    assert longer.model_dir == first.model_dir
    assert longer.train_rows != first.train_rows
    assert (
        planned(asked("chatglm2-tiny", train_file=train_file), machine).prepared.train_rows
        != first.train_rows
    )
    os.utime(train_file, (1, 1))
    touched = planned(asked(train_file=train_file), machine).prepared
    assert (touched.model_dir, touched.train_rows) == (first.model_dir, first.train_rows)
    train_file.write_text(train_file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert planned(asked(train_file=train_file), machine).prepared.train_rows != first.train_rows


def test_a_warning_is_passed_on(machine, train_file):
    request = asked(train_file=train_file, overrides=["fp16.hysteresis=3"], precision="fp32")
    assert any("DS305" in note for note in plan(request, machine, {}).notes)


@pytest.mark.parametrize(
    ("changed", "fault", "compiled", "noted"),
    [
        ({}, "", [], False),
        ({}, "no nvcc", [], False),  # nobody misses it
        ({"overrides": ("optimizer.params.torch_adam=false",)}, "", ["fused_adam"], False),
        ({"overrides": ("optimizer.params.bias_correction=false",)}, "", ["fused_adam"], False),
        ({"preset": "ddp"}, "", [], False),
        ({"preset": "zero1", "precision": "fp16"}, "", [], False),
        (
            {"preset": "ddp", "precision": "fp16"},
            "",
            ["fused_adam"],
            False,
        ),  # another wrapper scales the loss
        ({"preset": "ddp", "precision": "fp16"}, "no nvcc", [], True),
    ],
)
def test_torchs_adam_is_taken_where_it_is_alike(monkeypatch, train_file, changed, fault, compiled, noted):
    """GPUs start without minutes of compiling, unless somebody wants DeepSpeed's, or only that one will do."""
    monkeypatch.setattr(extensions, "nvcc_fault", lambda environ: fault)
    monkeypatch.setattr(extensions, "check_tools", lambda *_: None)
    planned_job = plan(asked(train_file=train_file, **changed), GPUS, {})
    assert extensions.needed(planned_job.job.ds_config) == compiled
    assert any("nvcc" in note for note in planned_job.notes) == noted


def test_a_short_disk_takes_the_model_alone(machine, train_file, monkeypatch):
    """As a first try of a large model has it: the checkpoints would take seven times as much."""
    from dsrun.jobs.assembly.checks import disk_check

    whole = plan(asked(train_file=train_file, max_steps=40), machine, {}).job
    model = disk_check.need_of(whole, disk_check.setup_of(whole), 40).model_bytes
    monkeypatch.setattr(disk_check, "free_bytes", lambda folder: model)
    planned_job = plan(asked(train_file=train_file, max_steps=40), machine, {})
    training = planned_job.job.training
    assert (training.save_steps >= 40, training.last_checkpoint) == (True, False)
    assert planned_job.job.origins["options"]["last_checkpoint"].startswith("derived: ")
    assert any("only the model" in note for note in planned_job.notes)


# What is wrong


def test_everything_wrong_at_once(machine, tmp_path, untouched):
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "thesis.tex").touch()
    mtime = busy.stat().st_mtime_ns
    request = asked(
        "lama-tiny", train_file=tmp_path / "trian.jsonl", eval_file=tmp_path / "none" / "dev.jsonl", gpus=9,
        preset="zero3-nvme", output_dir=busy,
    )  # fmt: skip
    try:
        problems = problems_of(request, machine)
        assert busy.stat().st_mtime_ns == mtime
    finally:
        (busy / "thesis.tex").unlink()
        busy.rmdir()
    text = "\n".join(map(str, problems))
    for words in ("lama-tiny", "trian.jsonl", "none/dev.jsonl", "--gpus 9", "--nvme-path", str(busy)):
        assert words in text, words
    assert len(problems) == 6
    assert all(problem.hint for problem in problems)


def test_a_gpu_that_torch_has_no_code_for(monkeypatch, train_file):
    """CUDA 13 left out compute capability 7.0; what the driver takes and has it is named, with its index."""
    monkeypatch.setattr("dsrun.host.toolkit.torch_build", lambda path: {"cuda": "13.0", "cpu_build": False})
    monkeypatch.setattr("dsrun.versions.installed", lambda path=None: {"torch": "2.11.0"})
    monkeypatch.setattr("dsrun.host.gpus.driver_version", lambda: "580.95.05")
    volta = Gpu(0, "Tesla V100-SXM2-32GB", "GPU-0", 32 << 30, (7, 0))
    mixed = Machine("cuda", (volta, replace(GPUS.gpus[1], index=1)), 32, "a V100 and an A100")
    problem = the_problem(asked(train_file=train_file, precision="fp16"), mixed)
    assert "Tesla V100" in problem.what and "7.0" in problem.what
    assert "cu126" in problem.hint
    assert planned(asked(train_file=train_file, devices="1"), mixed).hosts[0].devices == (1,)


def test_more_wrong_at_once(machine, train_file, tmp_path):
    request = asked(
        train_file=train_file, prompt_column="question", response_column="answer", devices="7",
        overrides=["fp16.hysteresis=two", "stage=1"], preset="zero2", output_dir=train_file,
    )  # fmt: skip
    text = "\n".join(map(str, problems_of(request, machine)))
    for words in ("question", "answer", "--devices 7", "hysteresis", "--set", "not a folder"):
        assert words in text, words


@pytest.mark.parametrize("name", ["chatglm2-tinny", "llama-7", "qqqq"])
def test_an_unknown_model_is_one_problem(machine, untouched, name):
    problem = the_problem(asked(name), machine)
    assert name in problem.what
    assert "dsrun models" in problem.hint


def test_an_unknown_preset_is_one_problem(machine, untouched):
    problem = the_problem(asked(preset="zero2-ofload"), machine)
    assert "zero2-ofload" in problem.what
    assert "zero2-offload" in problem.hint


def test_a_model_without_data_wants_a_file(machine, untouched):
    assert "--train-file" in the_problem(asked("llama-7b"), machine).hint


def test_an_evaluation_file_that_is_not_there(machine, train_file, tmp_path, untouched):
    problem = the_problem(asked(train_file=train_file, eval_file=tmp_path / "dev.jsonl"), machine)
    assert problem.where == str(tmp_path / "dev.jsonl")


def test_missing_columns_name_their_options(machine, train_file, untouched):
    request = asked(train_file=train_file, prompt_column="question", response_column="answer")
    hints = [problem.hint for problem in problems_of(request, machine)]
    assert ["--prompt-column" in hints[0], "--response-column" in hints[1], len(hints)] == [True, True, 2]


def test_nvme_without_a_folder(machine, train_file, untouched):
    problem = the_problem(asked(train_file=train_file, preset="zero3-nvme"), machine)
    assert "zero3-nvme" in problem.where
    assert "--nvme-path" in problem.hint


def test_too_many_ranks_are_the_only_problem(machine, train_file, untouched):
    # A batch size that suits 8 ranks is no second fault.
    request = asked(train_file=train_file, gpus=8, overrides=["train_batch_size=32"])
    assert "--gpus 8" in the_problem(request, machine).what


def test_a_folder_that_holds_a_run(machine, train_file, tmp_path):
    with run_folder.held(tmp_path / "run"):
        (tmp_path / "run" / run_folder.JOB).touch()
        run_folder.write_state(tmp_path / "run", "interrupted")
    problem = the_problem(asked(train_file=train_file, output_dir=tmp_path / "run"), machine)
    assert "interrupted" in problem.what
    assert "--resume" in problem.hint


@pytest.fixture
def without(monkeypatch):
    """`without(name)`: a package that is not installed."""
    import importlib.util

    real = importlib.util.find_spec

    def take(absent: str) -> None:
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name, *rest: None if name == absent else real(name, *rest)
        )

    return take


@pytest.mark.parametrize(
    ("name", "install"), [("torch", "[train]'"), ("matplotlib", "pip install 'matplotlib>=")]
)
def test_packages_that_are_missing(machine, train_file, without, untouched, name, install):
    """torch comes with all that training needs, as README has it."""
    without(name)
    problem = the_problem(asked(train_file=train_file), machine)
    assert name in problem.what
    assert install in problem.hint


def test_what_scores_need_is_asked_for_where_there_are_scores(machine, train_file, without, untouched):
    without("rouge_chinese")
    with_scores = {"train_file": train_file, "eval_file": train_file}
    assert "rouge_chinese" in the_problem(asked(**with_scores), machine).what
    plan(asked(**with_scores, generate_rows=0), machine, {})
    plan(asked(train_file=train_file), machine, {})


def test_nothing_is_compiled_for_a_tiny_model_on_a_cpu(machine):
    job = plan(asked("chatglm2-tiny"), machine, {}).job
    params = job.ds_config["optimizer"]["params"]
    assert params["torch_adam"] is params["fused"] is True
    assert job.origins["config"]["optimizer.params.torch_adam"].startswith("derived: nothing to compile")
    assert extensions.needed(job.ds_config) == []


@pytest.mark.parametrize(
    "text", ["optimizer.params.torch_adam=false", "optimizer.params.bias_correction=false"]
)
def test_deepspeeds_own_adam_where_it_is_asked_for(machine, monkeypatch, text):
    monkeypatch.setattr(extensions, "check_tools", lambda *_: None)
    job = plan(asked("chatglm2-tiny", overrides=(text,)), machine, {}).job
    assert extensions.needed(job.ds_config) == ["fused_adam"]


@pytest.mark.parametrize("there", [True, False])
def test_fp16_on_a_cpu(machine, train_file, monkeypatch, there):
    monkeypatch.setattr("dsrun.cluster.cpu_types.has_fp16", lambda: there)
    request = asked(train_file=train_file, precision="fp16")
    if there:
        assert plan(request, machine, {}).job.precision == "fp16"
    else:
        problem = the_problem(request, machine)
        assert problem.where == "--precision"
        assert "bf16" in problem.hint


def test_torch_is_asked_what_deepspeed_will_ask():
    import torch

    cpu_types.has_fp16.cache_clear()
    assert cpu_types.has_fp16() is bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def test_an_unknown_default_in_a_model_file(machine, lab):
    folder = lab / "presets" / "models"
    folder.mkdir()
    from dsrun.models.model_files import load_model_file

    text = load_model_file("llama-tiny").path.read_text(encoding="utf-8")
    (folder / "ours.toml").write_text(text.replace("warmup_steps", "warmup_step"), encoding="utf-8")
    problem = the_problem(asked("ours"), machine)
    assert "warmup_step" in problem.what
    assert "warmup_steps" in problem.hint


# The environment of the processes


def test_what_the_processes_get(make_job, tmp_path):
    job = make_job(ranks=2)
    added = of_ranks(job, {})
    assert added["DS_ACCELERATOR"] == "cpu"
    assert added["TORCH_EXTENSIONS_DIR"].startswith(str(tmp_path / "cache"))
    assert int(added["OMP_NUM_THREADS"]) >= 1
    assert "OMP_NUM_THREADS" not in of_ranks(job, {"OMP_NUM_THREADS": "3"})
    assert of_ranks(job, {"TORCH_EXTENSIONS_DIR": "/x"})["TORCH_EXTENSIONS_DIR"] == "/x"
    on_gpus = of_ranks(replace(job, accelerator="cuda"), {})
    assert on_gpus["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert on_gpus["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert on_gpus["NCCL_DEBUG"] == "WARN"
    assert "NCCL_DEBUG" not in of_ranks(replace(job, accelerator="cuda"), {"NCCL_DEBUG": "INFO"})
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        assert "PYTORCH_CUDA_ALLOC_CONF" not in of_ranks(
            replace(job, accelerator="cuda"), {name: "backend:native"}
        )
    assert "OMP_NUM_THREADS" not in on_gpus


@pytest.mark.parametrize(("there", "setting"), [(True, True), (None, True), (False, False)])
def test_expandable_segments_where_the_driver_has_what_they_take(make_job, monkeypatch, there, setting):
    monkeypatch.setattr("dsrun.jobs.launchers.common.environment.has_virtual_memory", lambda: there)
    assert ("PYTORCH_CUDA_ALLOC_CONF" in of_ranks(make_job(accelerator="cuda"), {})) == setting


def offloading(device, part="offload_optimizer"):
    return {"zero_optimization": {"stage": 3, part: {"device": device}}}


@pytest.mark.parametrize(
    ("changed", "threads"),
    [
        ({"ds_config": offloading("cpu")}, "14"),
        ({"ds_config": offloading("nvme")}, "14"),
        ({"ds_config": offloading("cpu", "offload_param")}, "14"),
        ({"ds_config": offloading("none")}, None),
        ({"fsdp": FsdpSpec(micro_batch=1, grad_accum=1, grad_clip=1.0, shard_ranks=8, offload=True)}, "14"),
        ({"fsdp": FsdpSpec(micro_batch=1, grad_accum=1, grad_clip=1.0, shard_ranks=8)}, None),
    ],
)
def test_ranks_that_offload_share_the_cores(make_job, monkeypatch, changed, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(112)))
    job = make_job(accelerator="cuda", **changed)
    job = replace(job, hosts=(HostDevices("localhost", tuple(range(8))),))
    assert of_ranks(job, {}).get("OMP_NUM_THREADS") == threads
    assert "OMP_NUM_THREADS" not in of_ranks(job, {"OMP_NUM_THREADS": "3"})


# --resume


@pytest.fixture
def started(machine, train_file, tmp_path):
    """A run of two ranks that died."""
    job = planned(
        asked(
            train_file=train_file, gpus=2, max_steps=8, output_dir=tmp_path / "a user's 运行", lr=1e-3,
            preset="zero3-nvme", nvme_path=str(tmp_path / "nvme"),
        ),
        machine,
    )  # fmt: skip
    run_dir = tmp_path / "a user's 运行"
    with run_folder.held(run_dir):
        (run_dir / run_folder.JOB).write_text(job.to_json(), encoding="utf-8")
        run_folder.write_state(run_dir, "failed")
    return job


def continued(job: Job, machine: Machine, environ=None, model=None, overrides=(), **given) -> Job:
    request = asked(model or job.model.name, overrides, output_dir=Path(job.run_dir), **given)
    return resumed(request, machine, environ or {}).job


def refused(job: Job, machine: Machine, **given):
    with pytest.raises(DsrunError) as caught:
        continued(job, machine, **given)
    (problem,) = caught.value.problems
    return problem


def test_what_is_continued_is_what_was_started(started, machine):
    assert continued(started, machine) == started


def test_options_may_be_repeated(started, machine, train_file):
    given = {"train_file": train_file, "gpus": 2, "max_steps": 8, "lr": 1e-3, "preset": "zero3-nvme"}
    assert continued(started, machine, **given) == started


def test_options_may_be_repeated_from_another_folder(started, machine, train_file, monkeypatch):
    monkeypatch.chdir(train_file.parent)
    assert continued(started, machine, train_file=Path(train_file.name)) == started


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 2e-3), ("max_steps", 9), ("epochs", 2.0), ("seed", 1), ("precision", "bf16"),
        ("micro_batch", 1), ("grad_accum", 2), ("grad_clip", 0.1), ("save_steps", 3), ("max_source_length", 5),
        ("prompt_column", "x"), ("nvme_path", "/elsewhere"),
    ],
)  # fmt: skip
def test_an_option_that_says_something_else(started, machine, name, value):
    option = "--" + name.replace("_", "-")
    assert option in str(refused(started, machine, **{name: value}))


def test_another_model_or_config(started, machine, tmp_path):
    assert "chatglm2-tiny" in str(refused(started, machine, model="chatglm2-tiny"))
    assert "--set" in str(refused(started, machine, overrides=("gradient_clipping=0.5",)))


def test_all_that_differs_at_once(started, machine):
    with pytest.raises(DsrunError) as caught:
        continued(started, machine, lr=2e-3, seed=1, model="chatglm2-tiny")
    assert len(caught.value.problems) == 3


def test_another_number_of_ranks(started, machine):
    problem = refused(started, machine, gpus=3)
    assert "3 ranks can't share" in problem.what
    assert "1, 2, 4, 8" in problem.hint
    assert continued(started, machine, devices="0").world_size == 1


def test_other_devices_in_the_order_of_ranks(started, machine):
    job = continued(started, machine, devices="3,1")
    assert job.hosts == (HostDevices("localhost", (3, 1)),)
    assert replace(job, hosts=started.hosts) == started


def test_devices_that_are_gone(started):
    one = Machine("cpu", (), 1, "a machine of paper")
    assert "1 CPU core" in refused(started, one).what


def test_another_kind_of_device(started):
    problem = refused(started, GPUS)
    assert "cpu" in problem.what


def test_a_run_that_was_moved(started, machine, tmp_path):
    moved = Path(started.run_dir).rename(tmp_path / "moved")
    job = resumed(asked(output_dir=moved), machine, {}).job
    assert job == replace(started, run_dir=str(moved))


def test_a_finished_run(started, machine):
    run_folder.write_state(Path(started.run_dir), "finished")
    assert "finished" in refused(started, machine).what


def test_a_running_run(started, machine):
    with run_folder.held(Path(started.run_dir)):
        assert "running" in refused(started, machine).what


def test_no_run(machine, tmp_path):
    with pytest.raises(DsrunError, match="--output-dir"):
        resumed(asked(), machine, {})
    with pytest.raises(DsrunError) as caught:
        resumed(asked(output_dir=tmp_path / "none"), machine, {})
    assert "--resume" in caught.value.problems[0].hint


def test_a_gpu_that_torch_has_no_code_for_is_refused_with_the_build_that_has(monkeypatch, train_file):
    volta = replace(GPUS, gpus=tuple(replace(gpu, compute_capability=(7, 0)) for gpu in GPUS.gpus))
    monkeypatch.setattr("dsrun.cluster.extensions.nvcc_fault", lambda environ: "no nvcc")
    monkeypatch.setattr("dsrun.host.toolkit.torch_build", lambda path: {"cuda": "13.0", "cpu_build": False})
    with pytest.raises(DsrunError, match="compute capability") as caught:
        plan(asked(train_file=train_file, precision="fp16"), volta, {})
    assert any(
        "'torch<2.15'" in problem.hint and "cu126" in problem.hint for problem in caught.value.problems
    )
    plan(asked(train_file=train_file), GPUS, {})


# What a measurement, or the GPU's generation, decides


HOPPERS = Machine(
    "cuda",
    tuple(Gpu(i, "NVIDIA H100 80GB HBM3", f"GPU-{i}", 80 << 30, (9, 0)) for i in range(4)),
    32,
    "4 x NVIDIA H100",
)


@pytest.fixture
def compile_pays(lab, monkeypatch):
    """--compile was measured on H100s, with DeepSpeed and with FSDP."""
    monkeypatch.setattr("dsrun.jobs.assembly.checks.compiling._tools", lambda *_: iter(()))
    folder = lab / "presets" / "measured"
    folder.mkdir(parents=True)
    for engine in ("zero", "fsdp"):
        (folder / f"compile-h100-80g-{engine}.toml").write_text(
            "seconds_without = 1.0\nseconds_with = 0.8\nstart_seconds = 60\n"
            'day = "2026-11-24"\nwith_what = "llama-3-8b; torch 2.11.0"\n'
        )


@pytest.mark.parametrize(
    ("machine", "given", "compiles"),
    [
        (HOPPERS, {"preset": "fsdp"}, True),
        (HOPPERS, {"preset": "zero1"}, True),
        (HOPPERS, {"preset": "zero3"}, False),
        (HOPPERS, {"preset": "zero2-offload"}, False),
        (HOPPERS, {"preset": "fsdp", "compile": False}, False),
        (HOPPERS, {"preset": "fsdp", "max_steps": 3}, False),
        (GPUS, {"preset": "fsdp"}, False),
    ],
)
def test_layers_are_compiled_where_it_was_measured_to_pay(compile_pays, train_file, machine, given, compiles):
    made = plan(asked(train_file=train_file, gpus=2, **given), machine, {})
    assert made.job.training.compile is compiles
    assert any("layers are compiled" in note for note in made.notes) is compiles
    if compiles:
        assert "h100-80g" in made.job.origins["options"]["compile"]


def test_no_gpu_has_compiled_layers_by_what_ships(monkeypatch, train_file):
    """Until the bench has run on one."""
    monkeypatch.setattr("dsrun.jobs.assembly.checks.compiling._tools", lambda *_: iter(()))
    assert planned(asked(train_file=train_file, gpus=2, preset="fsdp"), HOPPERS).training.compile is False


def test_fp8_on_hoppers_and_not_on_amperes(monkeypatch, train_file):
    monkeypatch.setattr(
        "dsrun.jobs.assembly.checks.precision.packages.installed_version", lambda name: "0.18.0"
    )
    wanted = asked(train_file=train_file, gpus=2, preset="fsdp", fp8="rowwise")
    made = plan(wanted, HOPPERS, {})
    assert made.job.training.fp8 == "rowwise" and made.job.precision == "bf16"
    assert any("--fp8 without --compile" in note for note in made.notes)
    problem = the_problem(wanted, GPUS)
    assert "compute capability 8.9" in problem.what and "8.0" in problem.what
    problem = the_problem(asked(train_file=train_file, gpus=2, preset="zero2", fp8="rowwise"), HOPPERS)
    assert "--preset fsdp" in problem.hint


def test_the_copy_of_a_checkpoint_is_said_and_kept(machine, train_file):
    made = plan(asked(train_file=train_file, gpus=2, async_save=True), machine, {})
    assert made.job.training.async_save is True
    assert any("--async-save: a checkpoint takes" in note for note in made.notes)
    assert not any("async" in note for note in plan(asked(train_file=train_file, gpus=2), machine, {}).notes)


@pytest.mark.parametrize("gpus", [1, 2])
def test_rounded_weights_want_several_hosts_and_a_compiler(train_file, gpus, monkeypatch):
    problem = the_problem(asked(train_file=train_file, gpus=gpus, preset="zero3-qwz"), HOPPERS)
    assert "there is one host" in problem.what
    said = ("zero_optimization.zero_quantized_weights=true",)
    on_one = asked(overrides=said, train_file=train_file, gpus=gpus, preset="zero3-qwz")
    assert "has to compile quantizer" in the_problem(on_one, HOPPERS).what, "with a folder that is no toolkit"
    monkeypatch.setattr("dsrun.cluster.extensions.nvcc_fault", lambda environ: "")
    made = planned(on_one, HOPPERS)
    assert made.ds_config["zero_optimization"]["zero_quantized_weights"] is True

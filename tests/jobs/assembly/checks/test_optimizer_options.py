"""--optimizer, --liger, --attention, --compute-metrics: what is refused before the start, and what a job then holds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from asking import finetune_request

from dsrun import packages
from dsrun.cluster.devices import Gpu, Machine
from dsrun.config import rules
from dsrun.config.rules import Setting
from dsrun.errors import DsrunError
from dsrun.job.job import HostDevices, Job
from dsrun.job.layout import MARK
from dsrun.jobs.allocation.allocation import Allocation, HostAllocation
from dsrun.jobs.assembly import finetune
from dsrun.jobs.assembly.checks import disk_check, kernels, memory_check
from dsrun.jobs.assembly.checks.optimizers import UNTESTED
from dsrun.jobs.assembly.resume import divided, resumed
from dsrun.jobs.supervision.display.progress import describe_event
from dsrun.models import model_files
from dsrun.options.commands import FinetuneOptions
from dsrun.options.optimizers import ADAM_TAKES
from dsrun.planner.disk import checkpoint_bytes
from dsrun.planner.setup import LOGITS
from dsrun.versions import version

GIB = 2**30
CPU = Machine("cpu", (), 4, "NVML finds no NVIDIA GPU", 64 * GIB)


def cards(count=2, capability=(8, 0), free=79, name="NVIDIA A100-SXM4-80GB") -> Machine:
    kinds = capability if isinstance(capability, list) else [capability] * count
    gpus = tuple(Gpu(i, name, f"GPU-{i}", 80 * GIB, kind, free * GIB) for i, kind in enumerate(kinds))
    return Machine("cuda", gpus, 32, f"{len(gpus)} x {name}", 500 * GIB)


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    for name in ("work", "cache", "config", "site"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(finetune, "check_operators", lambda *_: None)


@pytest.fixture(autouse=True)
def install(tmp_path, monkeypatch):
    """`install(name, version)`: what pip leaves of a package. What is really installed is not seen."""
    site = tmp_path / "site"

    def version(name: str) -> str | None:
        found = next(iter(metadata.distributions(name=name, path=[str(site)])), None)
        return found and found.version

    def make(name: str, version: str = "1.0") -> None:
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    monkeypatch.setattr(packages, "installed_version", version)
    return make


def planned(machine=None, model="llama-tiny", *, overrides=(), **given):
    request = finetune_request(model, overrides, **given)
    return finetune.plan(request, machine or cards(), {}, download=False)


def refused(*args, **given) -> list:
    with pytest.raises(DsrunError) as caught:
        planned(*args, **given)
    return caught.value.problems


def the_refusal(*args, **given) -> str:
    (problem,) = refused(*args, **given)
    return str(problem)


# adamw-8bit


def test_the_config_has_no_optimizer_and_the_job_its_numbers(install):
    install("bitsandbytes")
    plain = planned(lr=3e-4, preset="zero2").job
    betas = ["optimizer.params.betas=[0.9, 0.95]"]
    job = planned(lr=3e-4, preset="zero2", optimizer="adamw-8bit", overrides=betas).job
    assert "optimizer" not in job.ds_config
    assert job.ds_config[UNTESTED] is True
    assert job.training.optimizer == "adamw-8bit"
    assert job.training.optimizer_params == {
        "lr": 3e-4,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert set(job.training.optimizer_params) == set(ADAM_TAKES)
    rest = {key: value for key, value in plain.ds_config.items() if key != "optimizer"}
    assert {key: value for key, value in job.ds_config.items() if key != UNTESTED} == rest
    assert Job.from_json(job.to_json(), "x") == job
    findings = rules.run(job.ds_config, Setting(world_size=2))
    assert not [finding for finding in findings if finding.severity == "error"]


def test_adamw_is_deepspeeds_own():
    job = planned().job
    assert job.training.optimizer == "adamw"
    assert job.training.optimizer_params == {}
    assert job.ds_config["optimizer"]["type"] == "AdamW"
    assert UNTESTED not in job.ds_config


@pytest.mark.parametrize(
    ("machine", "given", "words"),
    [
        (CPU, {}, "needs an NVIDIA GPU"),
        (cards(), {"preset": "zero2-offload"}, "zero2-offload keeps the optimizer in host memory"),
        (cards(), {"preset": "zero3-offload"}, "zero3-offload keeps the optimizer in host memory"),
        (cards(), {"preset": "ddp"}, "Take zero1"),
        (
            cards(),
            {"overrides": ["optimizer.type=RAdam", "zero_allow_untested_optimizer=true"]},
            "--set optimizer.type says",
        ),
        (cards(), {"overrides": ["optimizer.params.adam_w_mode=false"]}, "adam_w_mode=false"),
        (cards(), {"overrides": ["optimizer.params.bias_correction=false"]}, "bias_correction"),
    ],
)
def test_where_it_cannot_be(install, machine, given, words):
    install("bitsandbytes")
    said = the_refusal(machine, optimizer="adamw-8bit", **given)
    assert "--optimizer" in said
    assert "adamw-8bit" in said
    assert words in said


def test_without_its_package():
    said = the_refusal(optimizer="adamw-8bit")
    assert "needs bitsandbytes, which is not installed" in said
    assert "pip install bitsandbytes" in said


def test_in_fp32_there_is_nothing_against_plain_data_parallelism(install):
    install("bitsandbytes")
    assert planned(optimizer="adamw-8bit", preset="ddp", precision="fp32").job.zero_stage == 0


def test_no_compiler_is_asked_for(install, monkeypatch):
    """Without nvcc DeepSpeed's fused Adam gives way to torch's; of neither is anything used here."""
    install("bitsandbytes")
    monkeypatch.setattr("dsrun.cluster.extensions.nvcc_fault", lambda environ: "no nvcc")
    assert any("no nvcc" in note for note in planned(preset="ddp", precision="fp16").notes)
    assert not any("no nvcc" in note for note in planned(optimizer="adamw-8bit").notes)


def test_what_fits_only_with_8_bits(install, tmp_path):
    install("bitsandbytes")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"content": "类型#裙", "summary": "一条裙子。"}\n' * 9, encoding="utf-8")
    given = {"train_file": rows, "preset": "zero2", "activation_checkpointing": "full"}
    two = cards(free=68)
    assert "out of memory" in the_refusal(two, "chatglm2-6b", **given)
    eight = planned(two, "chatglm2-6b", **given, optimizer="adamw-8bit").job
    plain = planned(cards(free=79), "chatglm2-6b", **given).job
    # Of both moments 6 bytes of 8 are saved, each of two ranks its half.
    saved = plain.prediction["gpu_held_bytes"] - eight.prediction["gpu_held_bytes"]
    assert saved == pytest.approx(6 * 6_243_584_000 / 2, rel=0.01)


def test_auto_takes_no_preset_that_it_does_not_go_with(install, tmp_path):
    install("bitsandbytes")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"content": "类型#裙", "summary": "一条裙子。"}\n' * 9, encoding="utf-8")
    for free in (79, 50, 40):
        job = planned(
            cards(4, free=free), "chatglm2-6b", train_file=rows, preset="auto", optimizer="adamw-8bit"
        ).job
        assert job.preset in ("zero1", "zero2", "zero3")


def test_checkpoints_are_planned_with_what_they_hold(install):
    install("bitsandbytes")
    plain, eight = (disk_check.setup_of(planned(optimizer=name).job) for name in ("adamw", "adamw-8bit"))
    assert checkpoint_bytes(plain) - checkpoint_bytes(eight) == 6 * plain.shape.parameters


# Continued


@pytest.fixture
def run(install, tmp_path):
    """A run with the 8-bit optimizer that has a checkpoint: its folder and its job."""
    install("bitsandbytes")
    folder = tmp_path / "run"
    job = planned(optimizer="adamw-8bit", preset="zero2", output_dir=folder, gpus=2).job
    checkpoint = folder / "checkpoints" / "step-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / MARK).write_text(json.dumps({"step": 2, "layout": {}}))
    (folder / "job.json").write_text(job.to_json())
    return folder, job


def again(folder: Path, **given) -> Job:
    return resumed(finetune_request(output_dir=folder, **given), cards(4), {}).job


def test_it_goes_on_as_it_was(run):
    folder, job = run
    assert again(folder, gpus=2, optimizer="adamw-8bit").ds_config == job.ds_config


def test_it_says_why_it_cannot_be_resharded(run):
    folder, _ = run
    for given in ({"gpus": 4}, {"gpus": 2, "preset": "zero3"}):
        with pytest.raises(DsrunError, match="adamw-8bit") as caught:
            again(folder, **given)
        assert "--preset zero2 --gpus 2" in caught.value.problems[0].hint


def test_another_optimizer_is_another_run(run):
    with pytest.raises(DsrunError, match="--optimizer: is adamw, and the run was started with adamw-8bit"):
        again(run[0], gpus=2, optimizer="adamw")


def test_it_needs_its_package_still(run, tmp_path):
    shutil.rmtree(tmp_path / "site" / "bitsandbytes-1.0.dist-info")
    with pytest.raises(DsrunError, match="bitsandbytes, which is not installed any more"):
        again(run[0], gpus=2)


def test_another_preset_before_there_is_a_checkpoint(run):
    _, job = run
    other = divided(job, preset="zero3", batch=(job.micro_batch, job.grad_accum))
    assert other.zero_stage == 3
    assert "optimizer" not in other.ds_config
    assert other.ds_config[UNTESTED] is True
    with pytest.raises(DsrunError, match="host memory"):
        divided(job, preset="zero2-offload", batch=(job.micro_batch, job.grad_accum))


# The fused loss


@pytest.mark.parametrize(
    ("machine", "version", "given", "why"),
    [
        (CPU, "0.8.5", {}, "this job trains on CPUs"),
        (cards(), None, {}, "liger-kernel is not installed"),
        (cards(), "0.6.0", {}, "liger-kernel 0.6.0 is installed, and it takes 0.6.2"),
        (cards(capability=[(8, 0), (6, 1)]), "0.8.5", {}, "compute capability 7.0"),
        (cards(), "0.8.5", {"official": True}, "--official"),
    ],
)
def test_off_with_a_word_only_where_it_is_missing_unless_it_is_asked_for(
    install, machine, version, given, why
):
    if version:
        install("liger-kernel", version)
    found = planned(machine, **given)
    assert found.job.training.liger is False
    assert any("liger" in note for note in found.notes) == (why == kernels.NOT_INSTALLED)
    said = the_refusal(machine, **given, liger=True)
    assert said.startswith("--liger: can't be: ")
    assert why in said


@pytest.mark.parametrize(("model", "capability"), [("llama-tiny", (9, 0)), ("chatglm2-tiny", (7, 0))])
def test_on_where_it_works(install, model, capability):
    install("liger-kernel", "0.6.2.post1")
    found = planned(cards(capability=capability), model)
    assert found.job.training.liger is True
    assert planned(cards(capability=capability), model, liger=False).job.training.liger is False


@pytest.mark.parametrize("liger", [None, False])
def test_liger_that_is_missing_has_its_price_in_a_note(liger):
    notes = [line for line in planned(cards(), "llama-tiny", liger=liger).notes if "liger-kernel" in line]
    if liger is False:
        assert notes == []
        return
    (note,) = notes
    assert note.startswith("liger-kernel is not installed: the loss takes ")
    assert note.endswith("(pip install liger-kernel)")


def test_liger_is_missed_where_it_would_be_taken():
    gpus = kernels.Devices("cuda", (8, 0))
    assert kernels.chosen(FinetuneOptions(), gpus, "llama", "bf16").missing
    assert not kernels.chosen(FinetuneOptions(), gpus, "bloom", "bf16").missing
    assert not kernels.chosen(FinetuneOptions(), kernels.Devices("cpu", None), "llama", "fp32").missing
    assert "norms" in kernels.missing_note("gemma2", None)


def test_another_network_is_left_alone():
    devices = kernels.Devices("cuda", (9, 0))
    assert kernels.chosen(FinetuneOptions(), devices, "bloom", "bf16").liger is False
    with pytest.raises(DsrunError, match="bloom"):
        kernels.chosen(FinetuneOptions(liger=True), devices, "bloom", "bf16")


def test_a_network_of_whose_layers_alone_there_are_kernels(install):
    """Gemma 2 scales its logits, which the fused loss doesn't."""
    install("liger-kernel", "0.8.5")
    found = kernels.chosen(FinetuneOptions(), kernels.Devices("cuda", (9, 0)), "gemma2", "bf16")
    assert found == kernels.Chosen(liger=True, fused_loss=False)


def test_attention_that_the_model_lacks():
    gpu = kernels.Devices("cuda", (9, 0))
    with pytest.raises(DsrunError, match="gpt_oss"):
        kernels.chosen(FinetuneOptions(attention="sdpa"), gpu, "gpt_oss", "bf16")
    with pytest.raises(DsrunError, match="bloom"):
        kernels.chosen(FinetuneOptions(attention="flash"), gpu, "bloom", "bf16")
    kernels.chosen(FinetuneOptions(), gpu, "gpt_oss", "bf16")
    assert kernels.keeps_scores("auto", {"model_type": "gpt_oss"})
    assert not kernels.keeps_scores("auto", {"model_type": "llama"})
    assert kernels.keeps_scores("eager", {"model_type": "llama"})


def test_the_plan_knows_of_it(install):
    install("liger-kernel", "0.8.5")
    request = memory_check.MemoryRequest({}, "x", (0,), "bf16", 128, 4, 1)
    request = replace(request, architecture=model_files.load_model_file("llama-2-7b").architecture)
    fused = replace(request, fused_loss=True).base(cards())
    assert fused.fused_loss
    assert request.base(cards()).logits_bytes == LOGITS["hf"]
    took = [
        planned(cards(), micro_batch=64, grad_accum=1, liger=liger).job.prediction["gpu_allocated_bytes"]
        for liger in (True, False)
    ]
    assert took[0] < took[1]


def test_the_gpus_that_the_job_has_decide(install):
    install("liger-kernel", "0.8.5")
    machine = cards(capability=[(8, 0), (6, 1)])
    assert planned(machine, devices="0").job.training.liger is True


@pytest.mark.parametrize(
    ("text", "numbers"), [("0.6.2", (0, 6, 2)), ("0.10.0.dev1", (0, 10, 0)), ("nightly", ())]
)
def test_versions_are_numbers(text, numbers):
    assert version(text) == numbers


# Attention


@pytest.mark.parametrize(
    ("machine", "given", "words"),
    [
        (CPU, {}, "this job trains on CPUs"),
        (cards(), {"precision": "fp32"}, "this job in fp32"),
        (cards(capability=(7, 5)), {}, "a GPU has 7.5"),
        (cards(), {}, "flash-attn is not installed"),
    ],
)
def test_flash_that_cannot_be(machine, given, words):
    said = the_refusal(machine, attention="flash", **given)
    assert "--attention flash" in said
    assert words in said


def test_attention_arrives(install):
    install("flash-attn", "2.8.0")
    assert planned(attention="flash").job.training.attention == "flash"
    assert planned(CPU, attention="eager").job.training.attention == "eager"
    assert planned(CPU).job.training.attention == "auto"


def test_a_matrix_of_scores_is_planned_for():
    took = [
        planned(attention=name, preset="zero2", micro_batch=64, grad_accum=1).job.prediction[
            "gpu_allocated_bytes"
        ]
        for name in ("eager", "sdpa")
    ]
    assert took[0] > took[1]


# All that is wrong with the three is said at once


def test_all_together():
    problems = refused(CPU, optimizer="adamw-8bit", liger=True, attention="flash")
    assert {problem.where for problem in problems} == {
        "--optimizer adamw-8bit",
        "--liger",
        "--attention flash",
    }


# Precision


@pytest.mark.parametrize(
    ("capability", "precision"),
    [
        ((7, 0), "fp16"),
        ((7, 5), "fp16"),
        ((8, 0), "bf16"),
        ([(9, 0), (7, 5)], "fp16"),
        ([(8, 6), (9, 0)], "bf16"),
    ],
)
def test_what_v100_t4_and_the_newer_ones_train_in(capability, precision):
    job = planned(cards(capability=capability)).job
    assert job.precision == precision
    assert job.ds_config[precision]["enabled"] is True


def test_the_precision_is_that_of_the_gpus_that_are_taken():
    both = cards(capability=[(8, 0), (7, 0)])
    assert [planned(both, devices=text).job.precision for text in ("0", "1", "0,1")] == [
        "bf16",
        "fp16",
        "fp16",
    ]


def test_hosts_of_two_kinds_train_in_what_all_have():
    shares = tuple(
        HostAllocation(HostDevices(name, (0, 1)), cards(capability=capability), (0, 1), asked=True)
        for name, capability in (("new", (9, 0)), ("old", (7, 0)))
    )
    placed = Allocation(shares, "cuda", "ssh")
    assert placed.machine.default_precision == "fp16"
    assert kernels.devices_of(placed.machine, placed.devices).capability == (7, 0)


# Scores while it trains


def test_scores_at_each_evaluation_only_where_they_are_asked_for():
    assert planned(CPU).job.training.compute_metrics is False
    assert planned(CPU, compute_metrics=True).job.training.compute_metrics is True


def test_they_are_told_with_their_step():
    event = {"event": "scores", "rows": 5, "when": "step 20", "scores": {"bleu-4": 1.25}}
    assert describe_event(event) == "5 prompts answered at step 20: BLEU-4 1.25"
    assert describe_event({**event, "when": "after"}) == "5 prompts answered after training: BLEU-4 1.25"


# --lr-schedule, --lr

SCHEDULER = "scheduler.type=WarmupCosineLR", "scheduler.params.total_num_steps=9"
CYCLE = (
    "scheduler.type=OneCycle",
    "scheduler.params.cycle_min_lr=1e-5",
    "scheduler.params.cycle_max_lr=1e-3",
)


@pytest.fixture
def lab_preset(tmp_path, monkeypatch):
    """`lab_preset(text)`: a lab's preset labx, which goes on from zero2."""
    (tmp_path / "lab" / "presets").mkdir(parents=True)
    monkeypatch.setenv("DSRUN_PATH", str(tmp_path / "lab"))

    def make(text: str) -> None:
        path = tmp_path / "lab" / "presets" / "labx.toml"
        path.write_text(f'summary = "a lab\'s"\nextends = "zero2"\n{text}', encoding="utf-8")

    return make


def test_a_presets_scheduler_decides_the_learning_rate(lab_preset):
    lab_preset('[config.scheduler]\ntype = "WarmupLR"\n[config.scheduler.params]\nwarmup_max_lr = 3e-4\n')
    found = planned(preset="labx")
    training = found.job.training
    assert (training.lr_schedule, training.lr) == ("config", 3e-4)
    assert found.job.ds_config["scheduler"]["type"] == "WarmupLR"
    own = planned(preset="labx", lr_schedule="cosine", lr=1e-3)
    assert "scheduler" not in own.job.ds_config
    assert own.job.training.lr_schedule == "cosine"
    assert any("--lr-schedule" in note for note in own.notes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr": 1e-3}, ("warmup_max_lr", "0.0003", "0.001")),
        ({"warmup_steps": 5}, ("--warmup-steps", "warmup_num_steps")),
        ({"warmup_ratio": 0.1}, ("--warmup-ratio", "warmup_num_steps")),
    ],
)
def test_what_a_presets_scheduler_leaves_no_room_for(lab_preset, given, words):
    lab_preset('[config.scheduler]\ntype = "WarmupLR"\n[config.scheduler.params]\nwarmup_max_lr = 3e-4\n')
    said = the_refusal(preset="labx", **given)
    for word in words:
        assert word in said


def test_set_says_a_scheduler():
    warm_up = "scheduler.params.warmup_num_steps=2"
    job = planned(overrides=[*SCHEDULER, warm_up]).job
    assert job.training.lr_schedule == "config"
    assert job.ds_config["scheduler"]["params"] == {"total_num_steps": 9, "warmup_num_steps": 2}
    assert job.training.lr == job.ds_config["optimizer"]["params"]["lr"]
    assert "--lr-schedule" in the_refusal(overrides=SCHEDULER, lr_schedule="linear")
    assert planned(overrides=CYCLE).job.training.lr == 1e-3
    assert "--lr" in the_refusal(overrides=CYCLE, lr=1e-4)
    assert "scheduler" in the_refusal(lr_schedule="config")


@pytest.mark.parametrize(
    ("model", "given", "lr"),
    [
        ("qwen2.5-0.5b", {}, 2e-5),  # its file's
        ("glm-4-9b", {}, 1e-5),
        ("glm-4-9b", {"method": "lora"}, 2e-4),
        ("chatglm2-6b", {}, 1e-4),
        ("glm-4-9b", {"lr": 3e-6}, 3e-6),
    ],
)
def test_the_learning_rate_of_a_size(model, given, lr, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text('{"content": "a", "summary": "b"}\n')
    machine = cards(8)
    job = planned(
        machine, model, train_file=(str(data),), preset="zero3", precision="bf16", gpus=8, **given
    ).job
    assert job.training.lr == lr


# muon's two rates


def test_muons_matrices_and_the_rest_have_rates_of_their_own():
    params = planned(optimizer="muon", muon_lr=0.02, lr=3e-4).job.ds_config["optimizer"]["params"]
    assert (params["muon_lr"], params["adam_lr"]) == (0.02, 3e-4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optimizer": "sgd"}, "muon"),
        ({}, "muon"),
        ({"overrides": ("optimizer.type=Muon", "optimizer.params.muon_lr=0.01")}, "optimizer.params.muon_lr"),
    ],
)
def test_a_rate_for_muon_that_goes_unheard_is_refused(given, words):
    said = the_refusal(muon_lr=0.02, **given)
    assert "--muon-lr" in said
    assert words in said

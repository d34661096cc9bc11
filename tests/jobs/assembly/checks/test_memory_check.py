"""finetune asks the planner first: what can't fit is not started, and --preset auto is its first choice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from asking import finetune_request
from running import write_tokenizer

from dsrun.cluster.devices import Gpu, Machine
from dsrun.errors import DsrunError
from dsrun.job import run_folder
from dsrun.job.job import Job
from dsrun.jobs.assembly import finetune, resume
from dsrun.jobs.assembly.checks import memory_check
from dsrun.jobs.assembly.plan_target import PlanTarget, room_here
from dsrun.jobs.assembly.planning import search, setups
from dsrun.jobs.assembly.planning.subjects import subject
from dsrun.jobs.runs import calibration
from dsrun.jobs.runs.calibration import DeviceCalibration
from dsrun.options.commands import PlanOptions
from dsrun.options.layers import Source
from dsrun.options.table import ANSWERED_AT_ONCE, MICRO_BATCH_MEAN
from dsrun.planner.plan import FITS, OUT, TIGHT, Calibration

GIB = 2**30
OTHER = {"model_type": "mamba", "hidden_size": 64, "vocab_size": 100}


def cards(count, free, name="NVIDIA A100-SXM4-80GB", capability=(8, 0), host=500, total=80) -> Machine:
    """So many GPUs with so many GiB free (a number, or one for each)."""
    each = free if isinstance(free, (list, tuple)) else [free] * count
    gpus = tuple(Gpu(i, name, f"GPU-{i}", total * GIB, capability, int(each[i] * GIB)) for i in range(count))
    return Machine("cuda", gpus, 32, f"{count} x {name}", host * GIB)


EIGHT = cards(8, 79)
V100S = cards(2, 31, "Tesla V100-SXM2-32GB", (7, 0), total=32)


pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def train_file(tmp_path):
    path = tmp_path / "the lab's 数据.jsonl"
    path.write_text('{"content": "类型#裙", "summary": "一条裙子。"}\n' * 9, encoding="utf-8")
    return path


@pytest.fixture
def plan(train_file):
    """`plan(machine, model, force=..., **given)`: what finetune would start; nothing is downloaded."""

    def make(machine, model="chatglm2-6b", *, force=False, overrides=(), **given):
        request = finetune_request(model, overrides, **{"train_file": train_file, "force": force, **given})
        return finetune.plan(request, machine, {}, download=False)

    return make


def refused(plan, *args, **given):
    with pytest.raises(DsrunError) as caught:
        plan(*args, **given)
    (problem,) = caught.value.problems
    return problem


# --preset auto


@pytest.mark.parametrize("machine", [EIGHT, cards(2, 79), V100S, cards(4, 23, "NVIDIA GeForce RTX 3090")])
def test_auto_is_the_planners_first_choice(plan, machine):
    planned = plan(machine, preset="auto")
    what = subject("chatglm2-6b")
    devices = planned.job.hosts[0].devices
    room = room_here(machine, devices)
    job = planned.job
    options = PlanOptions(
        seq_len=128, activation_checkpointing="full", micro_batch=job.micro_batch, grad_accum=job.grad_accum,
        packing=job.training.packing,
    )  # fmt: skip
    base = setups.base_setup(what.shape, room, options, planned.job.precision)
    where = PlanTarget(room, "", True)
    best = search.settled(
        search.answer(base, where, setups.all_presets(), recomputed=search.RECOMPUTED).plans
    )
    assert planned.job.preset == best.preset
    (note,) = [note for note in planned.notes if f"preset {best.preset}: " in note]
    assert best.reason in note
    assert planned.job.zero_stage == best.setup.stage
    assert planned.job.training.recomputed == best.setup.checkpointing
    assert f"-{best.preset}-" in planned.job.run_dir


def test_auto_differs_with_the_machine(plan):
    """Where much is free little is divided."""
    chosen = {name: plan(machine, preset="auto").job.preset for name, machine in
              {"much": EIGHT, "two old cards": V100S}.items()}  # fmt: skip
    assert chosen == {"much": "zero1", "two old cards": "zero2-offload"}


def test_auto_takes_nvme_only_where_a_folder_is_named(plan, tmp_path):
    machine = cards(1, 23, "NVIDIA GeForce RTX 3090", host=60)
    given = {"preset": "auto", "activation_checkpointing": "full"}
    assert plan(machine, "llama-7b", nvme_path=str(tmp_path), **given).job.preset == "zero3-nvme"
    assert "no preset fits" in refused(plan, machine, "llama-7b", **given).what


def test_auto_hears_what_is_set(plan):
    planned = plan(EIGHT, preset="auto", overrides=["zero_optimization.reduce_bucket_size=2e8"])
    assert planned.job.ds_config["zero_optimization"]["reduce_bucket_size"] == 200_000_000


def test_auto_where_nothing_fits_says_the_way_out(plan):
    problem = refused(plan, cards(1, 10, host=20), preset="auto", micro_batch=64, global_batch=64)
    assert "no preset fits: " in problem.what
    assert problem.hint.startswith("It fits with: ")


def test_auto_for_a_shape_that_is_not_known(plan, make_folder):
    problem = refused(plan, EIGHT, str(make_folder(OTHER)), preset="auto")
    assert problem.where == "--preset auto"
    assert "dsrun preset" in problem.hint


def test_auto_on_cpus(plan):
    machine = Machine("cpu", (), 4, "a machine of paper", 64 * GIB)
    planned = plan(machine, "llama-tiny", preset="auto")
    assert planned.job.preset != "auto"
    assert planned.job.prediction["device"] == "cpu"


# The planner chooses where nobody has


STANDS = {
    "8 x H100": cards(8, 79, "NVIDIA H100 80GB HBM3", (9, 0), host=1000),
    "8 x A100-40G": cards(8, 39, "NVIDIA A100-SXM4-40GB", host=1000, total=40),
    "2 x V100-32G": replace(V100S, host_memory_bytes=1000 * GIB),
    "4 x RTX 4090": cards(4, 23.5, "NVIDIA GeForce RTX 4090", (8, 9), host=1000, total=24),
    "1 x B200": cards(1, 178, "NVIDIA B200", (10, 0), host=1000, total=180),
    "1 x GH200": cards(1, 94.5, "NVIDIA GH200 480GB", (9, 0), host=1000, total=96),
    "a card that no file describes": cards(2, 90, "NVIDIA Foo", (9, 0), host=1000, total=96),
}


@pytest.mark.parametrize("name", STANDS)
def test_it_takes_the_fastest_that_fits(plan, name):
    """Within 5 % of the fastest that is sure to fit, of all presets, splits and ways to compute again."""
    machine = STANDS[name]
    count = len(machine.gpus)
    planned = plan(machine, "llama-3-8b", gpus=count)
    job = planned.job
    what, room = subject("llama-3-8b"), room_here(machine, range(count))
    length = job.data.max_source_length + job.data.max_target_length
    share = job.micro_batch * job.grad_accum
    assert share * count == 16, "what a step holds stays"
    splits = [(size, share // size) for size in range(1, share + 1) if share % size == 0]
    options = PlanOptions(seq_len=length, packing=job.training.packing)
    base = setups.base_setup(what.shape, room, options, job.precision)
    plans = search.answer(
        base, PlanTarget(room, "", True), setups.all_presets(), recomputed=search.RECOMPUTED, batches=splits
    ).plans
    sure = min(one.speed.seconds_per_step for one in plans if one.verdict == FITS)
    assert job.prediction["step_seconds"] <= 1.05 * sure
    (note,) = (note for note in planned.notes if note.startswith("preset "))
    assert note.startswith(f"preset {job.preset}: ")
    assert " a step by the plan" in note
    assert "zero2-offload" in note, "the model file's own is shown beside it"
    assert ("is planned as a100-80g" in note) == ("Foo" in machine.gpus[0].name)


def test_eight_h100s_do_not_offload(plan):
    job = plan(STANDS["8 x H100"], "llama-3-8b", gpus=8).job
    assert (job.preset, job.training.activation_checkpointing) == ("zero1", "none")


def test_what_somebody_gives_stays(plan):
    machine = STANDS["8 x H100"]
    assert plan(machine, "llama-3-8b", gpus=8, preset="zero2-offload").job.preset == "zero2-offload"
    job = plan(machine, "llama-3-8b", gpus=8, activation_checkpointing="full", micro_batch=1).job
    assert (job.preset, job.micro_batch) == ("zero1", 1)
    assert job.training.activation_checkpointing == "full"
    job = plan(machine, "chatglm2-6b", gpus=8, official=True, save_steps=6000, last_checkpoint=False).job
    assert (job.training.activation_checkpointing, job.micro_batch) == ("full", 4), "the recipe's"


def test_without_a_plan_the_model_files_preset_holds(plan, make_folder):
    other = make_folder(OTHER)
    assert plan(EIGHT, str(other), gpus=8).job.preset == plan(EIGHT, str(other), gpus=1).job.preset
    cpu = Machine("cpu", (), 4, "a machine of paper", 640 * GIB)
    assert plan(cpu, "chatglm2-6b", gpus=1).job.preset == "zero2-offload"
    assert plan(EIGHT, "llama-3-8b", gpus=8, tp=2, attention="sdpa", packing=False).job.preset == "zero3"


def test_where_nothing_fits_the_refusal_names_the_files_preset(plan):
    problem = refused(plan, cards(1, 10, host=20), "llama-3-8b", micro_batch=16)
    assert problem.where == "preset zero2-offload"
    assert problem.hint.startswith("It fits with: ")


# What can't fit


def test_out_of_memory_is_refused_with_the_shortest_way_out(plan):
    problem = refused(plan, cards(2, 79), preset="ddp")
    assert problem.what.startswith("out of memory: GPU: ")
    assert "79.0 GiB" in problem.what
    assert problem.where == "preset ddp"
    assert problem.hint.startswith("It fits with: ")
    assert problem.hint.endswith(" --force starts it all the same.")


def test_a_preset_that_fits_is_the_way_out(plan):
    """And who takes it is let through."""
    hint = refused(plan, cards(2, 79), preset="ddp").hint
    preset = re.search(r"--preset ([a-z0-9-]+)", hint)[1]
    assert plan(cards(2, 79), preset=preset).job.preset == preset


@pytest.mark.parametrize(
    "given", [{"preset": "zero2"}, {"preset": "auto", "micro_batch": 64, "grad_accum": 1}]
)
def test_the_way_out_is_one_that_finetune_has(plan, given):
    """Who reads the hint can follow it: every option in it is one of finetune's."""
    from dsrun.cli.finetune import command

    options = {name for one in command.params for name in one.opts}
    hint = refused(plan, cards(2, 20, host=20), **given).hint
    assert set(re.findall(r"--[a-z-]+", hint)) <= options


def test_the_way_out_is_one(plan):
    """Who follows the hint is let through."""
    machine, given = (
        cards(2, 79),
        {"preset": "zero3", "max_source_length": 8000, "micro_batch": 16, "grad_accum": 1},
    )
    problem = refused(plan, machine, **given)
    accumulation = int(re.search(r"--micro-batch 1 --grad-accum (\d+)", problem.hint)[1])
    assert accumulation == 16
    assert plan(machine, **{**given, "micro_batch": 1, "grad_accum": accumulation}).job.micro_batch == 1


@pytest.mark.parametrize(("capability", "wanted"), [((8, 0), "bf16"), ((7, 0), "fp16")])
def test_a_gpu_with_bf16_is_told_of_it(plan, capability, wanted):
    """fp32 that doesn't fit, where half of it would: bf16 if the cards have it, else fp16."""
    machine = cards(2, 70, capability=capability)
    given = {"preset": "zero3", "precision": "fp32", "max_source_length": 6000, "micro_batch": 2}
    assert f"--precision {wanted}" in refused(plan, machine, **given).hint


def test_the_hosts_memory_counts(plan):
    problem = refused(plan, cards(2, 31, "Tesla V100-SXM2-32GB", (7, 0), host=40), preset="zero2-offload")
    assert problem.what.startswith("out of memory: host: ")
    assert "40.0 GiB" in problem.what


def test_force_lets_it_through_with_a_note(plan):
    planned = plan(cards(2, 79), preset="ddp", force=True)
    assert planned.job.preset == "ddp"
    assert any("will run out of memory (GPU: " in note for note in planned.notes)
    assert planned.job.prediction["gpu_allocated_bytes"] > 80 * GIB


def test_out_of_memory_is_said_with_everything_else_that_is_wrong(plan, tmp_path):
    with pytest.raises(DsrunError) as caught:
        plan(cards(2, 79), preset="ddp", eval_file=tmp_path / "none.jsonl")
    text = str(caught.value)
    assert len(caught.value.problems) == 2
    assert "none.jsonl" in text
    assert "out of memory" in text


def test_what_fits_needs_no_word(plan):
    planned = plan(EIGHT, preset="zero2")
    assert not any("tight" in note or "out of memory" in note for note in planned.notes)


def test_tight_is_a_note(plan):
    found = plan(EIGHT, preset="zero2").job.prediction
    needed = found["gpu_allocated_bytes"] / GIB + 1.8  # CUDA's context and NCCL
    planned = plan(cards(8, needed / 0.96), preset="zero2")
    assert any("is tight (GPU: " in note for note in planned.notes)
    assert not any("tight" in note for note in plan(cards(8, needed / 0.9), preset="zero2").notes)
    full = cards(8, needed / 1.01)
    assert "out of memory" in refused(plan, full, preset="zero2", micro_batch=planned.job.micro_batch).what


# Smaller micro batches


def rows_of(job):
    return job.micro_batch * job.grad_accum * job.world_size


@pytest.fixture
def short(plan):
    """Two GPUs that hold no micro batch of 4 under zero2, and the step's options."""
    given = {
        "preset": "zero2", "method": "lora", "max_source_length": 3000, "max_target_length": 1000,
        "global_batch": 16, "gpus": 2,
    }  # fmt: skip
    needed = [plan(EIGHT, micro_batch=size, **given).job.prediction["gpu_allocated_bytes"] for size in (2, 4)]
    assert needed[0] < needed[1]
    return cards(2, sum(needed) / 2 / GIB + 1), given


def test_a_micro_batch_that_memory_has_no_room_for_is_lowered(plan, short):
    machine, given = short
    planned = plan(machine, **given)
    assert (planned.job.micro_batch, rows_of(planned.job)) == (2, 16)
    assert planned.resolved.source("micro_batch") == Source.DERIVED
    (note,) = [note for note in planned.notes if note.startswith("micro batch 2 x accumulation 4")]
    assert "the same 16 examples" in note


@pytest.mark.parametrize("asked", [{"micro_batch": 4}, {"loss": MICRO_BATCH_MEAN}])
def test_one_that_was_asked_for_or_counts_is_refused(plan, short, asked):
    machine, given = short
    assert "out of memory" in refused(plan, machine, **given, **asked).what


def test_force_takes_it_as_it_is(plan, short):
    machine, given = short
    assert plan(machine, force=True, **given).job.micro_batch == 4


def test_auto_lowers_it_where_no_preset_fits(plan):
    given = {"preset": "auto", "max_source_length": 12000, "max_target_length": 4000, "global_batch": 16}
    planned = plan(cards(2, 40), **given)
    assert planned.job.micro_batch < 4
    assert rows_of(planned.job) == 16


# What is free


def test_gpus_that_are_half_full_count_with_what_is_free(plan):
    assert plan(cards(2, 79), preset="zero3").job.preset == "zero3"
    problem = refused(plan, cards(2, 40), preset="zero3")
    assert "of 40.0 GiB" in problem.what


def test_the_scarcest_of_the_chosen_counts(plan):
    machine = cards(4, [79, 79, 5, 79])
    assert plan(machine, preset="zero3", devices="0,1,3", global_batch=12).job.world_size == 3
    assert "of 5.0 GiB" in refused(plan, machine, preset="zero3").what


def test_auto_counts_what_is_free(plan):
    assert plan(cards(8, 79), preset="auto").job.preset != plan(cards(8, 20), preset="auto").job.preset


def test_gpus_whose_use_is_unknown_count_whole(plan):
    machine = cards(8, 79)
    unknown = replace(machine, gpus=tuple(replace(gpu, memory_free_bytes=None) for gpu in machine.gpus))
    assert plan(unknown, preset="zero2").job.prediction == plan(machine, preset="zero2").job.prediction


# What isn't known


@pytest.fixture
def make_folder(tmp_path):
    """A Hugging Face folder with this config; its weights are an empty file, its tokenizer knows no word."""

    def make(config):
        folder = tmp_path / "a model's 文件夹"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "model.safetensors").touch()
        write_tokenizer(folder)
        return folder

    return make


def test_a_shape_that_is_not_known_is_a_note(plan, make_folder):
    planned = plan(EIGHT, str(make_folder(OTHER)))
    assert planned.job.prediction is None
    assert any("memory is not predicted" in note for note in planned.notes)


def test_a_folder_whose_shape_is_known(plan, make_folder):
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11008, "vocab_size": 32000,
    }  # fmt: skip
    folder = make_folder(config)
    assert plan(EIGHT, str(folder), preset="zero3").job.prediction
    assert "out of memory" in refused(plan, EIGHT, str(folder), preset="ddp").what


# The record


def test_the_record_in_the_job(plan):
    planned = plan(V100S, preset="zero2-offload")
    found = planned.job.prediction
    assert set(found) == {"device", "gpu_terms", "host_terms", *calibration.PREDICTED}
    assert found["device"] == "v100-32g"
    numbers = [found[name] for name in calibration.PREDICTED]
    assert all(isinstance(value, float) and value > 0 for value in numbers)
    assert found["gpu_held_bytes"] < found["gpu_allocated_bytes"] <= found["gpu_reserved_bytes"]
    assert Job.from_json(planned.job.to_json(), "x").prediction == found


def test_the_record_is_of_the_job_as_it_runs(plan):
    one, more = (
        plan(EIGHT, preset="zero2", micro_batch=rows, grad_accum=1).job.prediction for rows in (1, 256)
    )
    assert one["gpu_held_bytes"] == more["gpu_held_bytes"]
    assert one["gpu_allocated_bytes"] < more["gpu_allocated_bytes"]
    longer = plan(EIGHT, preset="zero2", micro_batch=1, max_source_length=30_000).job.prediction
    assert longer["gpu_allocated_bytes"] > one["gpu_allocated_bytes"]


def test_an_old_job_file_still_reads(make_job):
    old = json.loads(make_job().to_json())
    del old["prediction"]
    assert Job.from_json(json.dumps(old), "x").prediction is None


def test_the_record_is_of_the_plain_model_but_the_verdict_is_not(plan):
    """What was learnt decides, and is no part of what the next run will be measured against."""
    before = plan(V100S, preset="zero2-offload").job.prediction
    calibration.save([DeviceCalibration("v100-32g", Calibration(process_gib=200.0), 1, {})])
    assert "out of memory: host" in refused(plan, V100S, preset="zero2-offload").what
    assert plan(V100S, preset="zero2-offload", force=True).job.prediction == before


def test_a_check_judges_the_finished_config():
    request = memory_check.MemoryRequest(
        {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "intermediate_size": 11008, "vocab_size": 32000},
        "llama", (0, 1), "bf16", 1024, 4, 1,
    )  # fmt: skip
    config = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
    }
    verdicts = {}
    for stage in (0, 3):
        found = memory_check.check(request, {**config, "zero_optimization": {"stage": stage}}, "mine", EIGHT)
        assert found
        assert (found[0].setup.stage, found[0].setup.micro_batch, found[0].setup.grad_accum) == (stage, 2, 3)
        assert found[0].setup.gpus == 2
        verdicts[stage] = found[0].verdict
    assert verdicts[0] == OUT
    assert verdicts[3] in {FITS, TIGHT}
    assert memory_check.check(replace(request, architecture={}), config, "mine", EIGHT) is None


# After a GPU ran out of memory


def test_what_ran_out_of_memory_gets_the_shortest_list_of_changes(plan):
    """The plan said that it fits; the log says that it did not: the changes make the plan itself smaller."""
    job = plan(EIGHT, preset="zero2", devices="0,1").job
    for total in (79.0, 24.0):
        found = memory_check.changes_after_oom(job, {"asked": 1.0, "total": total, "allocated": total - 0.5})
        assert found is not None and found.steps and found.plan.verdict != OUT
        assert all(step.saves_bytes >= 0 for step in found.steps) and found.steps[0].saves_bytes > 0


@pytest.mark.parametrize(
    ("kind", "preset"),
    [("tp", "zero1"), ("sp", "zero1"), pytest.param("pp", "zero1", marks=pytest.mark.full)],
)
def test_advice_after_it_is_for_ranks_that_share_examples_too(plan, kind, preset):
    """Nothing of it is refused beside their groups: no offload, and no other stage of a pipeline."""
    job = plan(EIGHT, "llama-3.1-8b", preset=preset, **{kind: 2}).job
    found = memory_check.changes_after_oom(job, {"asked": 1.0, "total": 24.0, "allocated": 23.5})
    assert found is not None and found.steps and found.plan.verdict != OUT
    words = " ".join(step.text for step in found.steps)
    assert "offload" not in words and "nvme" not in words
    assert kind != "pp" or ("--preset" not in words and "--method" not in words)


def test_no_changes_are_invented_after_it(plan):
    job = plan(EIGHT, preset="zero2").job
    assert memory_check.changes_after_oom(job, {"asked": 1.0}) is None, "a card of unknown size"
    assert (
        memory_check.changes_after_oom(replace(job, accelerator="cpu"), {"asked": 1.0, "total": 79.0}) is None
    )


# Resuming


@pytest.fixture
def stopped(plan, tmp_path):
    """A run that was started on eight A100s, and died; its checkpoint is yet to come."""
    run_dir = tmp_path / "run"
    job = plan(EIGHT, preset="zero3", max_source_length=2048, max_target_length=2048,
               micro_batch=16, grad_accum=1, activation_checkpointing="full", output_dir=run_dir).job  # fmt: skip
    with run_folder.held(run_dir):
        (run_dir / run_folder.JOB).write_text(job.to_json(), encoding="utf-8")
        run_folder.write_state(run_dir, "failed")
    return job


def resume_on(job, machine, **given):
    asked = finetune_request(job.model.name, output_dir=Path(job.run_dir), gpus=8, **given)
    return resume.resumed(asked, machine, {})


def test_smaller_cards_go_on_in_smaller_micro_batches(stopped):
    again = resume_on(stopped, cards(8, 31, "Tesla V100-SXM2-32GB", (7, 0), total=32))
    assert again.job.micro_batch < stopped.micro_batch
    assert again.job.micro_batch * again.job.grad_accum == stopped.micro_batch, "the examples of a step stay"
    assert again.job.ds_config["train_micro_batch_size_per_gpu"] == again.job.micro_batch
    assert any(f"micro batch {again.job.micro_batch} x" in note for note in again.notes)


def test_the_same_cards_keep_the_split(stopped):
    again = resume_on(stopped, EIGHT)
    assert again.job.ds_config == stopped.ds_config
    assert again.job.prediction == stopped.prediction


def test_cards_that_are_too_small_at_any_split(stopped):
    with pytest.raises(DsrunError, match="out of memory"):
        resume_on(stopped, cards(8, 5, "Tesla V100-SXM2-32GB", (7, 0), total=32))


# Ranks that share examples


def test_tensor_parallel_ranks_hold_less(plan):
    given = {
        "preset": "zero1",
        "max_source_length": 1024,
        "max_target_length": 1024,
        "micro_batch": 1,
        "grad_accum": 1,
    }
    alone, divided = (plan(EIGHT, "llama-7b", tp=size, **given).job.prediction for size in (1, 2))
    assert divided["gpu_held_bytes"] < 0.8 * alone["gpu_held_bytes"]


def test_a_divided_job_that_does_not_fit_is_refused(plan):
    problem = refused(plan, cards(8, 5), "llama-2-13b", preset="zero1", tp=2, micro_batch=1, grad_accum=1)
    assert "out of memory" in problem.what


def test_long_examples_fit_once_they_are_divided_or_taken_in_tiles(plan):
    given = {
        "preset": "zero3", "max_source_length": 65536, "max_target_length": 65536, "micro_batch": 1, "grad_accum": 1,
        "activation_checkpointing": "full", "last_checkpoint": False,
    }  # fmt: skip
    assert "out of memory" in refused(plan, EIGHT, "llama-3.2-1b", tile_tokens=0, **given).what
    for how in ({"sp": 8, "tile_tokens": 0}, {}):
        planned = plan(EIGHT, "llama-3.2-1b", **given, **how)
        assert planned.job.prediction["gpu_allocated_bytes"] < 79 * GIB
    assert any("4096 tokens at a time" in note for note in planned.notes)


def test_cpu_ranks_that_share_examples_are_not_modelled(plan):
    planned = plan(Machine("cpu", (), 4, "no GPU", 32 * GIB), "llama-tiny", preset="zero1", tp=2, gpus=2)
    assert planned.job.prediction is None
    assert any("isn't modelled" in note for note in planned.notes)


# Buckets


def test_buckets_are_the_planners_with_their_reason(plan):
    job = plan(EIGHT, "llama-7b", preset="zero3", activation_checkpointing="full").job
    zero = job.ds_config["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == 200_000_000
    assert job.origins["config"]["zero_optimization.stage3_prefetch_bucket_size"].startswith("derived: ")
    assert json.loads(job.to_json())["ds_config"] == job.ds_config
    tight = plan(
        cards(8, 32), "llama-7b", preset="zero2", micro_batch=1, activation_checkpointing="full", force=True
    )
    assert tight.job.ds_config["zero_optimization"]["reduce_bucket_size"] == 20_000_000
    assert "free" in tight.job.origins["config"]["zero_optimization.reduce_bucket_size"]


def test_what_somebody_says_of_buckets_stays(plan, tmp_path):
    said = ["zero_optimization.reduce_bucket_size=123456"]
    given = {"preset": "zero3", "activation_checkpointing": "full"}
    zero = plan(EIGHT, "llama-7b", overrides=said, **given).job.ds_config["zero_optimization"]
    assert zero["reduce_bucket_size"] == 123456
    own = tmp_path / "ours.toml"
    own.write_text('summary = "ours"\nextends = "zero3"\n', encoding="utf-8")
    zero = plan(EIGHT, "llama-7b", **{**given, "preset": str(own)}).job.ds_config["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == 50_000_000


def test_on_cpus_and_without_buckets_nothing_changes(plan):
    assert (
        "reduce_bucket_size" not in plan(EIGHT, "llama-tiny", preset="ddp").job.ds_config["zero_optimization"]
    )
    cpus = Machine("cpu", (), 16, "CPUs", 500 * GIB)
    zero = plan(cpus, "llama-tiny", preset="zero2", gpus=2).job.ds_config["zero_optimization"]
    assert zero["reduce_bucket_size"] == 200_000_000


# Answers


@pytest.mark.parametrize("preset", ["zero3", "fsdp"])
def test_as_many_prompts_as_are_answered_at_once_where_weights_stay_partitioned(plan, preset, train_file):
    """140 GB of weights fit no card of 79 GiB: each token gathers them, for as many prompts as there is room for."""
    given = {"preset": preset, "micro_batch": 1, "activation_checkpointing": "full"}
    given |= {"method": "lora", "export_format": "adapter"}  # so that no disk is too small
    none = plan(EIGHT, "llama-2-70b", **given)
    assert not any("dsrun evaluate" in note for note in none.notes), "there is nothing to answer"
    given["eval_file"] = train_file
    planned = plan(EIGHT, "llama-2-70b", **given)
    assert planned.job.training.generate_rows == 8 * ANSWERED_AT_ONCE
    assert any("dsrun evaluate" in note for note in planned.notes)
    assert plan(EIGHT, "llama-2-70b", **given, generate_rows=100).job.training.generate_rows == 100


def test_weights_that_fit_whole_answer_all_prompts(plan, train_file):
    given = {"micro_batch": 1, "activation_checkpointing": "full", "eval_file": train_file}
    for preset in ("zero3", "zero2"):
        assert plan(EIGHT, "llama-7b", preset=preset, **given).job.training.generate_rows == 100

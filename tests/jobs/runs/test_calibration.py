"""What finished runs teach the planner: made-up runs with known factors, the user's file, and the plans after it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.cluster.devices import Gpu, Machine
from dsrun.errors import DsrunError
from dsrun.job.job import HostDevices
from dsrun.jobs.assembly import plan_target
from dsrun.jobs.runs import calibration
from dsrun.jobs.runs.calibration import known, learn, read, read_all, save
from dsrun.options.commands import PlanOptions
from dsrun.planner.plan import Calibration, MemoryBudget, judge
from dsrun.planner.setup import Setup
from dsrun.planner.shape import from_numbers
from dsrun.planner.speed import Hardware

GIB = 2**30
PREDICTION = {
    "device": "v100-32g", "gpu_held_bytes": 8.0 * GIB, "gpu_allocated_bytes": 10.0 * GIB,
    "gpu_reserved_bytes": 14.0 * GIB, "host_bytes": 40.0 * GIB, "step_seconds": 2.0,
}  # fmt: skip
V100S = Machine(
    "cuda",
    tuple(Gpu(i, "Tesla V100-SXM2-32GB", f"GPU-{i}", 32 * GIB, (7, 0), 30 * GIB) for i in range(2)),
    16,
    "2 x Tesla V100-SXM2-32GB",
    200 * GIB,
)


@pytest.fixture(autouse=True)
def config_home(tmp_path, monkeypatch) -> Path:
    """The user's config folder: an empty one that is not made yet."""
    home = tmp_path / "a user's 设置"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    return home / "dsrun"


def peaks(rank: int, **fields) -> dict:
    return {
        "rank": rank, "gpu_allocated_bytes": 11 * GIB, "gpu_reserved_bytes": 13 * GIB,
        "host_peak_bytes": 21 * GIB, "host_baseline_bytes": GIB, "step_seconds": 3.0, **fields,
    }  # fmt: skip


@pytest.fixture
def make_run(tmp_path, make_job):
    """`make_run(name, [rank's peaks, ...])`: the folder of a run that has ended."""

    def make(name="run", ranks=None, *, prediction=PREDICTION, status="finished", hosts=None) -> Path:
        ranks = [peaks(0), peaks(1)] if ranks is None else ranks
        folder = tmp_path / name
        (folder / "state").mkdir(parents=True)
        fields = {"prediction": prediction} | ({"hosts": hosts} if hosts else {})
        job = make_job(folder, ranks=len(ranks), **fields)
        (folder / "job.json").write_text(job.to_json(), encoding="utf-8")
        for rank, values in enumerate(ranks):
            state = {"rank": rank, "status": status, "peaks": values}
            (folder / "state" / f"rank-{rank}.json").write_text(json.dumps(state), encoding="utf-8")
        return folder

    return make


# What is learnt


def test_two_runs_give_the_factors(make_run):
    """Each is in the middle of what the two runs say, and is right to the last digit."""
    other = [peaks(0, gpu_allocated_bytes=9 * GIB, gpu_reserved_bytes=12 * GIB, step_seconds=2.5,
                   host_peak_bytes=24 * GIB)] * 2  # fmt: skip
    runs = read_all([make_run("一"), make_run("two", other)])
    (learnt,) = learn(runs)
    assert (learnt.device, learnt.runs) == ("v100-32g", 2)
    found = learnt.calibration
    assert found.moving == (1.5 + 0.5) / 2  # (11 - 8) / (10 - 8) and (9 - 8) / 2
    assert found.reserved == (0.5 + 0.75) / 2  # (13 - 11) / (14 - 10) and (12 - 9) / 4
    assert found.seconds == (1.5 + 1.25) / 2
    assert found.process_gib == (1 + 4) / 2  # (42 - 40) / 2 ranks and (48 - 40) / 2


def test_one_run_is_met_exactly(make_run):
    (learnt,) = learn([read(make_run())])
    assert learnt.calibration == Calibration(moving=1.5, reserved=0.5, process_gib=1.0, seconds=1.5)
    before, after = zip(*learnt.errors.values(), strict=True)
    assert before == pytest.approx((1 / 11, 1 / 13, 1 / 21, 1 / 3))
    assert after == pytest.approx((0, 0, 0, 0), abs=1e-9)


def test_the_worst_rank_counts_on_gpus_and_all_ranks_on_the_host(make_run):
    ranks = [
        peaks(0, host_peak_bytes=5, step_seconds=1.0),
        peaks(1, gpu_allocated_bytes=12 * GIB, host_peak_bytes=7),
    ]
    run = read(make_run(ranks=ranks))
    assert run.measured == {
        "gpu_allocated_bytes": 12 * GIB,
        "gpu_reserved_bytes": 13 * GIB,
        "host_bytes": 12,
        "step_seconds": 3.0,
    }
    assert run.ranks == 2


def test_hosts_share_the_memory(make_run):
    hosts = (HostDevices("a", (0, 1)), HostDevices("b", (0, 1)))
    run = read(
        make_run(ranks=[peaks(rank, host_peak_bytes=10 * (rank + 1)) for rank in range(4)], hosts=hosts)
    )
    assert (run.measured["host_bytes"], run.ranks) == (50, 2)


def test_a_cpu_run_teaches_memory_and_seconds(make_run):
    none = {"gpu_allocated_bytes": None, "gpu_reserved_bytes": None}
    run = read(make_run(ranks=[peaks(0, **none)] * 2, prediction={**PREDICTION, "device": "cpu"}))
    (learnt,) = learn([run])
    assert learnt.calibration == Calibration(process_gib=1.0, seconds=1.5)
    assert set(learnt.errors) == {"host_bytes", "step_seconds"}


def test_a_run_without_a_step_teaches_no_seconds(make_run):
    (learnt,) = learn([read(make_run(ranks=[peaks(0, step_seconds=None)] * 2))])
    assert learnt.calibration.seconds == 1.0
    assert "step_seconds" not in learnt.errors


def test_what_was_predicted_as_nothing_teaches_nothing(make_run):
    """No activations, and no holes: there is nothing that a factor could stretch."""
    same = {"gpu_held_bytes": 10.0 * GIB, "gpu_allocated_bytes": 10.0 * GIB, "gpu_reserved_bytes": 10.0 * GIB}
    (learnt,) = learn([read(make_run(prediction={**PREDICTION, **same}))])
    assert (learnt.calibration.moving, learnt.calibration.reserved) == (1.0, 1.0)


@pytest.mark.parametrize(("seconds", "factor"), [(100.0, 4.0), (0.01, 0.25)])
def test_a_factor_stays_within_reason(make_run, seconds, factor):
    (learnt,) = learn([read(make_run(ranks=[peaks(0, step_seconds=seconds)] * 2))])
    assert learnt.calibration.seconds == factor


def test_every_kind_of_device_learns_for_itself(make_run):
    runs = [
        read(make_run("a")),
        read(make_run("b", prediction={**PREDICTION, "device": "RTX 9090", "step_seconds": 6.0})),
    ]
    by_device = {one.device: one.calibration.seconds for one in learn(runs)}
    assert by_device == {"v100-32g": 1.5, "RTX 9090": 0.5}


# Runs that can't be learnt from


def unusable(path: Path) -> str:
    with pytest.raises(DsrunError) as caught:
        read(path)
    (problem,) = caught.value.problems
    assert str(path) in problem.where
    return str(problem)


def test_an_old_run(make_run):
    assert "older dsrun" in unusable(make_run(prediction=None))


def test_an_old_job_file(make_run):
    """One from before there were predictions: it lacks the key altogether."""
    folder = make_run()
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    del job["prediction"]
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    assert "holds no prediction" in unusable(folder)


@pytest.mark.parametrize("key", sorted(PREDICTION))
def test_a_prediction_that_lacks_something(make_run, key):
    prediction = {name: value for name, value in PREDICTION.items() if name != key}
    assert "another dsrun's prediction" in unusable(make_run(prediction=prediction))


@pytest.mark.parametrize("status", ["running", "failed"])
def test_an_unfinished_run(make_run, status):
    assert "did not finish" in unusable(make_run(status=status))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_state(make_run, rank):
    folder = make_run()
    (folder / "state" / f"rank-{rank}.json").unlink()
    assert "Did the run finish?" in unusable(folder)


@pytest.mark.parametrize(
    "text", ["{", "[]", "3", '{"status": "finished"}', '{"status": "finished", "peaks": {}}']
)
def test_a_broken_state(make_run, text):
    folder = make_run()
    (folder / "state" / "rank-1.json").write_text(text, encoding="utf-8")
    assert unusable(folder)


def test_all_that_is_wrong_is_said_together(make_run, tmp_path):
    paths = [
        make_run("old", prediction=None),
        make_run("good"),
        make_run("half", status="running"),
        tmp_path / "no",
    ]
    with pytest.raises(DsrunError) as caught:
        read_all(paths)
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert all(str(tmp_path / name) in text for name in ("old", "half", "no"))


# The user's file


def test_nothing_is_known_at_first(config_home):
    assert known("v100-32g") == Calibration()
    assert not config_home.exists()


def test_what_is_saved_is_known_for_its_device_only(make_run, config_home):
    path = save(learn([read(make_run())]))
    assert path == config_home / "planner.toml"
    assert known("v100-32g") == Calibration(1.5, 0.5, 1.0, 1.5)
    assert known("v100-16g") == known("cpu") == Calibration()
    assert [file.name for file in config_home.iterdir()] == ["planner.toml"]


def test_other_devices_are_kept_and_the_same_one_is_renewed(make_run):
    name = 'NVIDIA "Odd" 卡'
    save(learn([read(make_run("a", prediction={**PREDICTION, "device": name}))]))
    save(learn([read(make_run("b"))]))
    save(learn([read(make_run("c", ranks=[peaks(0, step_seconds=4.0)] * 2))]))
    assert known(name).seconds == 1.5
    assert known("v100-32g").seconds == 2.0


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration.config_file() == tmp_path / ".config" / "dsrun" / "planner.toml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[cpu", "TOML"), ("cpu = 3", "cpu is no table"), ('[cpu]\nseconds = "2"', "seconds must be numbers"),
        ("[cpu]\nmoving = true", "moving"), ("[cpu]\nreserved = nan", "reserved"), ("[cpu]\nseconds = 0", "seconds"),
        ("[cpu]\nmoving = -1.0", "above 0"),
    ],
)  # fmt: skip
def test_a_broken_file(config_home, text, said):
    config_home.mkdir(parents=True)
    (config_home / "planner.toml").write_text(text, encoding="utf-8")
    with pytest.raises(DsrunError, match=said) as caught:
        known("cpu")
    assert caught.value.problems[0].where.startswith(str(config_home / "planner.toml"))


def test_a_process_may_take_less_than_assumed(config_home):
    config_home.mkdir(parents=True)
    (config_home / "planner.toml").write_text("[cpu]\nprocess_gib = -1.5\nruns = 3\n", encoding="utf-8")
    assert known("cpu") == Calibration(process_gib=-1.5)


def test_a_broken_file_is_not_written_over(make_run, config_home):
    config_home.mkdir(parents=True)
    (config_home / "planner.toml").write_text("[cpu", encoding="utf-8")
    with pytest.raises(DsrunError, match="TOML"):
        save(learn([read(make_run())]))
    assert (config_home / "planner.toml").read_text(encoding="utf-8") == "[cpu"


def test_a_folder_that_can_not_be_made(make_run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(DsrunError, match="can't be made"):
        save(learn([read(make_run())]))


# Plans afterwards


def test_plans_use_it_and_meet_what_was_measured(make_run):
    """A run that took other than predicted: the next plan of the same set-up says what it took."""
    setup = Setup(from_numbers(1.1e9), gpus=2, precision="fp16", stage=2, variable_lengths=True)
    room = plan_target.room_here(V100S, (0, 1))
    plain = judge("zero2", setup, room)
    predicted = {
        "device": "v100-32g", "gpu_held_bytes": plain.gpu.held, "gpu_allocated_bytes": plain.gpu.allocated,
        "gpu_reserved_bytes": plain.gpu.reserved, "host_bytes": plain.host.peak,
        "step_seconds": plain.speed.seconds_per_step,
    }  # fmt: skip
    allocated = plain.gpu.held + 1.25 * (plain.gpu.allocated - plain.gpu.held)
    reserved = allocated + 1.5 * (plain.gpu.reserved - plain.gpu.allocated)
    took = peaks(
        0, gpu_allocated_bytes=allocated, gpu_reserved_bytes=reserved,
        host_peak_bytes=plain.host.peak / 2 + GIB / 2, step_seconds=2 * plain.speed.seconds_per_step,
    )  # fmt: skip
    save(learn([read(make_run(ranks=[took, took], prediction=predicted))]))
    plan = judge("zero2", setup, plan_target.room_here(V100S, (0, 1)))
    assert plan.gpu.allocated == pytest.approx(allocated, rel=1e-4)
    assert plan.gpu.reserved == pytest.approx(reserved, rel=1e-4)
    assert plan.gpu.held == plain.gpu.held
    assert plan.host.peak == pytest.approx(plain.host.peak + GIB, rel=1e-4)
    assert plan.speed.seconds_per_step == pytest.approx(2 * plain.speed.seconds_per_step)
    assert plan.speed.tokens_per_second == pytest.approx(plain.speed.tokens_per_second / 2)
    assert plan.used > plain.used


def test_only_plans_for_that_device_use_it(make_run):
    save(learn([read(make_run())]))
    learnt = Calibration(1.5, 0.5, 1.0, 1.5)
    assert plan_target.room_here(V100S, (0, 1)).calibration == learnt
    assert plan_target.target(PlanOptions(gpu="v100-32g"), None).room.calibration == learnt
    assert plan_target.target(PlanOptions(gpu="a100-80g"), None).room.calibration == Calibration()
    assert plan_target.target(PlanOptions(gpu_memory="32GiB"), None).room.calibration == Calibration()
    assert plan_target.room_here(Machine("cpu", (), 4, "paper", GIB), (0, 1)).calibration == Calibration()


def planned(rows, *, seconds=2.0):
    shape = from_numbers(6.7e9)
    setup = Setup(shape, gpus=1, stage=2, method="lora", adapters=4_000_000, micro_batch=rows, seq_len=4096)
    room = MemoryBudget(1, 1, 80 * GIB, Hardware(300, 20, 2000, 200))
    plan = judge("zero2", setup, room)
    return replace(plan, speed=replace(plan.speed, seconds_per_step=seconds * rows))


def took(*sizes, seconds=3.0):
    return [
        {"gpu_allocated_bytes": size, "step_seconds": seconds * rows} for rows, size in enumerate(sizes, 1)
    ]


def test_two_runs_give_a_slope_and_a_constant():
    """What has a length takes 1.5 times as much, and 3 GiB are there that no plan knows: the plans then say so."""
    plans = [planned(rows) for rows in (1, 2)]
    small, large = (plan.gpu.allocated for plan in plans)
    slope = large - small
    found = calibration.of_two(plans, took(small + 0.5 * slope + 3 * GIB, large + slope + 3 * GIB))
    assert (found.lengths, found.gpu_gib, found.seconds) == pytest.approx((1.5, 3, 1.5), abs=0.02)
    room = MemoryBudget(1, 1, 80 * GIB, Hardware(300, 20, 2000, 200), calibration=found)
    said = judge("zero2", planned(4).setup, room).gpu.allocated
    assert said == pytest.approx(small + 3 * slope + 2 * slope + 3 * GIB, rel=0.01)


def test_a_peak_that_does_not_grow_gives_a_constant_alone():
    one = planned(1)
    size = one.gpu.allocated
    found = calibration.of_two([one, replace(planned(2), gpu=one.gpu)], took(size + GIB, size + GIB))
    assert (found.lengths, found.gpu_gib) == (1.0, pytest.approx(1, abs=0.01))


def test_two_runs_on_cpus_give_a_process_and_a_pace():
    plans = [planned(rows) for rows in (1, 2)]
    runs = [
        {**run, "host_bytes": plan.host.peak + 2 * GIB} for plan, run in zip(plans, took(0, 0), strict=True)
    ]
    found = calibration.of_two(plans, runs, cpu=True)
    assert found == Calibration(seconds=1.5, process_gib=2.0)


def test_ranks_that_counted_nothing_are_refused():
    with pytest.raises(DsrunError, match="no GPU memory"):
        calibration.of_two([planned(1), planned(2)], took(None, None))

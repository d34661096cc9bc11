"""Whether ZeRO divides what it should: what is looked at, on stand-ins; real engines pass it in all slow tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed")

from dsrun.errors import TrainingError
from dsrun.options.table import ParallelismOptions
from dsrun.training.engines import zero

SIZES = (1000, 30)


def job(stage, ranks=4, **more):
    return SimpleNamespace(
        zero_stage=stage,
        world_size=ranks,
        parallel=ParallelismOptions(),
        ds_config={"zero_optimization": more},
    )


def stepping(share, name="single_partition_of_fp32_groups"):
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size)) for size in SIZES])
    return SimpleNamespace(module=module, optimizer=SimpleNamespace(**{name: [torch.zeros(share)]}))


def holding(ranks, copies=None, *, whole=False, group=None):
    """Weights as ZeRO-3 leaves them: the parts of one of `ranks`, and of a second copy for `copies`."""
    weights = []
    for size in SIZES:
        weight = torch.nn.Parameter(torch.zeros(0))
        if not whole:
            aligned = -(-size // 8) * 8
            weight.ds_numel, weight.ds_numel_aligned = size, aligned
            weight.ds_tensor = SimpleNamespace(ds_numel=aligned // ranks)
            weight.ds_status = SimpleNamespace(name="NOT_AVAILABLE")
            weight.ds_zero_param_process_group = group
            weight.ds_secondary_tensor = copies and SimpleNamespace(ds_numel=aligned // copies)
        weights.append(weight)
    return SimpleNamespace(module=torch.nn.ParameterList(weights), optimizer=None)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_steps_share_is_counted(stage):
    zero.engaged(job(stage), stepping(258))  # 1030 / 4, and a little padding
    zero.engaged(job(stage), stepping(260, "fp32_groups_flat_partition"))
    zero.engaged(job(stage, ranks=1), stepping(1030))
    zero.engaged(job(0), stepping(1030))
    for engine in (stepping(1030), stepping(100), stepping(258, "something_else")):
        with pytest.raises(
            TrainingError, match=rf"steps [\d,]+ of 1,030 weights, which 4 ranks .* ZeRO-{stage}"
        ):
            zero.engaged(job(stage), engine)


def test_the_weights_held_are_counted():
    zero.engaged(job(3), holding(4))
    zero.engaged(job(3, mics_shard_size=2), holding(2))
    for engine in (holding(1), holding(2), holding(4, whole=True)):
        with pytest.raises(TrainingError, match="4 ranks should share at ZeRO-3"):
            zero.engaged(job(3), engine)


def test_the_groups_of_a_second_copy_are_looked_at(monkeypatch):
    monkeypatch.setattr(zero.dist, "get_world_size", lambda group: {"host": 2}[group])
    asked = job(3, zero_hpz_partition_size=2)
    zero.engaged(asked, holding(4, group="host"))
    for engine, ranks in ((holding(4), 2), (holding(4, group="host"), 4)):
        with pytest.raises(TrainingError, match=f"not by {ranks}"):
            zero.engaged(job(3, zero_hpz_partition_size=ranks), engine)


@pytest.mark.parametrize(("seen", "right"), [(2, True), (1, False), (4, False)])
def test_the_groups_of_rounded_gradients_are_the_hosts(monkeypatch, seen, right):
    """DeepSpeed makes them of the GPUs that a rank sees."""
    monkeypatch.setattr(zero, "get_accelerator", lambda: SimpleNamespace(device_count=lambda: seen))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    asked = job(3, zero_quantized_weights=True)
    asked.ds_config["zero_optimization"]["stage"] = 3
    zero.engaged(asked, holding(4))
    asked.ds_config["zero_optimization"]["zero_quantized_gradients"] = True
    if right:
        zero.engaged(asked, holding(4))
        return
    with pytest.raises(TrainingError, match=f"sees {seen} GPUs, and its host has 2 ranks"):
        zero.engaged(asked, holding(4))


def test_a_second_copy_is_there_after_a_forward():
    def check(engine):
        zero.check_second_copy(list(engine.module), 2)

    check(holding(4, 2))
    for engine in (holding(4), holding(4, 4)):
        with pytest.raises(TrainingError, match="shared by 2 ranks"):
            check(engine)
    gathered = holding(4)
    for weight in gathered.module:
        weight.ds_status.name = "AVAILABLE"
    check(gathered)

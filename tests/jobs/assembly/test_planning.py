"""From what the user says to plans: models by name, folder and numbers, settings, presets, the first choice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dsrun.cluster.devices import Machine
from dsrun.config.presets.build import Options, build_config
from dsrun.errors import DsrunError
from dsrun.jobs.assembly.plan_target import target
from dsrun.jobs.assembly.planning import remarks, search, setups, subjects
from dsrun.jobs.assembly.planning.search import answer
from dsrun.jobs.assembly.planning.setups import base_setup, seq_len_of
from dsrun.models import model_files
from dsrun.options.commands import PlanOptions, PresetOptions
from dsrun.options.declare import entries
from dsrun.options.layers import Resolved, Source
from dsrun.planner.plan import FITS, OUT, TIGHT, judge, ranked
from dsrun.planner.setup import zero_fields

GIB = 2**30
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000,
}  # fmt: skip
CHATGLM = {
    "model_type": "chatglm", "num_layers": 28, "hidden_size": 4096, "ffn_hidden_size": 13696,
    "num_attention_heads": 32, "multi_query_group_num": 2, "kv_channels": 128, "padded_vocab_size": 65024,
    "seq_length": 32768, "layernorm_epsilon": 1e-5, "multi_query_attention": True,
}  # fmt: skip
WITHOUT_FORMULAS = {
    "falcon-h1-3b", "falcon-h1-7b", "gemma-4-26b-a4b", "gemma-4-31b", "gemma-4-e2b", "gemma-4-e4b",
    "granite-4-h-1b", "granite-4-h-tiny", "minicpm-3-4b",
}  # fmt: skip
"""Names whose networks are planned by their own class in transformers."""
CPU = Machine("cpu", (), 4, "a machine of paper", 64 * GIB)


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def make_model(tmp_path):
    """`make_model(config)`: a folder with that config.json (a dict or a text)."""

    def make(config, name="it's a 模型"):
        folder = tmp_path / name
        folder.mkdir()
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text, encoding="utf-8")
        return folder

    return make


def base(model="llama-7b", given=None, **where):
    """The set-up that presets divide, and its place."""
    what, found = subject(model, {}), place({"gpu": "a100-80g", **where}, None)
    return base_setup(what.shape, found.room, settings_of(what, given or {}), "bf16"), found


def place(given, machine):
    return target(PlanOptions(**given), machine)


def subject(model, given):
    return subjects.subject(model, PlanOptions(**given))


def settings_of(what, given):
    """The options of a plan: given, else the model's, else finetune's."""
    asked = Resolved.built_in(PlanOptions).filled(Source.COMMAND_LINE, given)
    return subjects.with_model(asked, what).options


def first_choice(request, options, machine):
    """As `dsrun preset auto` has it: what is asked for, beside what goes into the config."""
    own = {name: value for name, value in vars(options).items() if value != getattr(Options(), name)}
    said = {name: value for name, value in {**own, **request}.items() if name in entries(PresetOptions)}
    asked = Resolved.built_in(PresetOptions).filled(Source.COMMAND_LINE, said)
    return search.first_choice(asked, machine, options)


# The model


@pytest.mark.parametrize("name", list(model_files.names()))
def test_every_model_has_a_shape(name):
    found = subject(name, {"trace": False})
    assert found.name == name
    assert found.folder is None
    assert found.shape.parameters > 1e6
    assert bool(found.shape.assumed) == (name in WITHOUT_FORMULAS)


def test_a_folder_and_its_config_are_one_model(make_model):
    folder = make_model(LLAMA)
    by_folder, by_file = subject(str(folder), {}), subject(str(folder / "config.json"), {})
    assert by_folder.shape == by_file.shape
    assert by_folder.shape.parameters == subject("llama-7b", {}).shape.parameters
    assert (by_folder.name, by_folder.folder, by_file.folder) == ("it's a 模型", folder, folder)
    assert by_folder.defaults == {}
    assert by_file.name == "config.json"


def test_chatglms_original_format(make_model):
    found = subject(str(make_model(CHATGLM)), {}).shape
    assert found.parameters == pytest.approx(subject("chatglm2-6b", {}).shape.parameters, rel=1e-3)
    assert (found.layers, found.kv_heads, found.positions) == (28, 2, 32768)


def test_a_home_is_expanded(make_model, monkeypatch, tmp_path):
    make_model(LLAMA, "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert subject("~/mine", {}).shape.layers == 32


def test_a_model_in_numbers():
    found = subject(None, {"params": 6.2e9, "hidden": 4096, "layers": 28, "gpus": 2})
    assert (found.shape.parameters, found.shape.layers, found.shape.hidden) == (6_200_000_000, 28, 4096)
    assert found.name == "6.2e9 parameters"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "model_type": "mixtral", "num_local_experts": 8}, "xperts|mixtral"),
        ({**LLAMA, "num_local_experts": 8}, "experts"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({**CHATGLM, "position_encoding_2d": True}, "ChatGLM-6B"),
        ({"model_type": "llama", "hidden_size": 64}, "lacks num_hidden_layers"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({}, "no model_type"), ("[1]", "a JSON object"), ('{"model_type":', "not JSON"), ("", "not JSON"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_planned_for(make_model, config, said):
    folder = make_model(config)
    with pytest.raises(DsrunError, match=said) as caught:
        subject(str(folder), {})
    assert all(str(folder) in problem.where for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (None, {}, ["no model", "--params"]), (None, {"hidden": 64}, ["no model"]),
        ("llama-7b", {"params": 7e9, "kv_heads": 8}, ["llama-7b", "--params, --kv-heads"]),
        ("lama-7b", {}, ["'lama-7b'", "'llama-7b'"]), ("", {}, ["unknown model ''"]), ("x" * 300, {}, ["xxx"]),
        ("./none", {}, ["./none", "no such folder or file"]), ("/none/config.json", {}, ["no such folder or file"]),
        (".", {}, ["holds no config.json"]), ("x.gguf", {}, ["x.gguf", "--params"]),
    ],
)  # fmt: skip
def test_a_model_that_is_none(model, given, words):
    with pytest.raises(DsrunError) as caught:
        subject(model, given)
    (problem,) = caught.value.problems
    assert all(word in str(problem) for word in words), problem
    assert problem.hint


# Settings


def test_settings_are_given_or_the_models_or_finetunes():
    what = subject("chatglm2-6b", {})
    own = settings_of(what, {})
    assert (own.micro_batch, own.micro_steps, seq_len_of(own)) == (4, 1, 128)
    given = settings_of(what, {"micro_batch": 2, "max_source_length": 500, "gpu": "t4"})
    assert (given.micro_batch, seq_len_of(given), given.gpu) == (2, 564, "t4")
    assert seq_len_of(settings_of(what, {"seq_len": 99})) == 99
    other = replace(what, defaults={"max_target_length": 1000, "grad_accum": 8})
    assert (seq_len_of(settings_of(other, {})), settings_of(other, {}).grad_accum) == (1512, 8)


def test_a_set_up():
    setup, found = base(given={"seq_len": 512, "micro_batch": 3, "packing": False}, gpus=2, nodes=2)
    assert (setup.gpus, setup.nodes, setup.seq_len, setup.micro_batch, setup.method) == (4, 2, 512, 3, "full")
    assert setup.variable_lengths
    assert setup.adapters == 0
    assert setup.zero_init
    settings = settings_of(subject("llama-tiny", {}), {})
    plain = base_setup(setup.shape, found.room, settings, "fp16")
    assert not plain.variable_lengths
    assert plain.flash and not plain.fused_loss
    assert not base_setup(setup.shape, found.room, settings, "fp16", flash=False).flash
    assert (plain.optimizer, plain.precision, plain.checkpointing) == ("adamw", "fp16", 0)


def test_lora_and_its_rank():
    usual, small, quantized = (
        base(given=given)[0]
        for given in ({"method": "lora"}, {"method": "lora", "lora_rank": 4}, {"method": "qlora"})
    )
    # Llama-7B, rank 8 on every linear layer: half of what PEFT's print_trainable_parameters says of rank 16.
    assert usual.adapters == 2 * small.adapters == quantized.adapters == 39_976_960 // 2
    assert (usual.quantized, quantized.quantized) == (None, "nf4")


# The plans


def test_every_preset_is_planned_as_its_config_divides():
    setup, found = base(gpus=8, nvme="4TB", host_memory="2000GiB")
    result = answer(setup, found, setups.all_presets())
    assert {plan.preset for plan in result.plans} == set(setups.all_presets())
    assert result.skipped == {}
    for plan in result.plans:
        config = build_config(
            plan.preset, Options(gpus=8, precision="bf16", micro_batch=4, nvme_path="/x")
        ).ds_config
        assert {name: getattr(plan.setup, name) for name in zero_fields(config)} == zero_fields(config)


def test_plans_are_in_order():
    setup, found = base(gpus=2)
    plans = answer(setup, found, setups.all_presets(), recomputed=search.RECOMPUTED).plans
    verdicts = [(FITS, TIGHT, OUT).index(plan.verdict) for plan in plans]
    assert verdicts.index(2) == len(verdicts) - verdicts.count(2)
    pace = [
        plan.seconds_per_token * (1, 2)[where]
        for plan, where in zip(plans, verdicts, strict=True)
        if where < 2
    ]
    assert pace == sorted(pace)
    out = [plan.used for plan in plans if plan.verdict == OUT]
    assert out == sorted(out)
    assert plans == ranked(reversed(plans))


def test_checkpointing_is_searched():
    """The better of none, every second layer and all; one of them where it alone is tried."""
    setup, found = base("llama-13b", given={"seq_len": 2048}, gpus=8)
    plain = answer(setup, found, setups.all_presets()).plans
    chosen = {
        plan.preset: plan
        for plan in answer(setup, found, setups.all_presets(), recomputed=search.RECOMPUTED).plans
    }
    assert not any(plan.setup.checkpointing for plan in plain)
    assert {name for name, plan in chosen.items() if plan.setup.checkpointing}
    for plan in plain:
        others = (
            judge(plan.preset, replace(plan.setup, checkpointing=every), found.room) for every in (1, 2)
        )
        assert chosen[plan.preset] == ranked([plan, *others])[0]
    assert chosen["ddp"].verdict == OUT
    wanted = replace(setup, checkpointing=3)
    assert {p.setup.checkpointing for p in answer(wanted, found, setups.all_presets()).plans} == {3}


def test_advice_where_nothing_fits_and_only_there():
    setup, found = base("llama-2-70b")
    result = answer(setup, found, ["ddp", "zero2"], recomputed=search.RECOMPUTED)
    assert result.plans[0].verdict == OUT
    assert result.advice
    assert result.advice.plan.verdict != OUT
    assert answer(*base("llama-tiny"), ["ddp"], recomputed=search.RECOMPUTED).advice is None


def test_presets_that_can_not_be_planned_are_left_out_with_a_reason():
    setup, found = base()
    result = answer(setup, found, ["zero2", "zero3-nvme", "zero9"], recomputed=search.RECOMPUTED)
    assert [plan.preset for plan in result.plans] == ["zero2"]
    assert "--nvme" in result.skipped["zero3-nvme"]
    assert "'zero9'" in result.skipped["zero9"]


def test_four_bit_weights_under_zero_3_are_left_out():
    setup, found = base(given={"method": "qlora"}, gpus=2)
    result = answer(setup, found, setups.all_presets(), recomputed=search.RECOMPUTED)
    assert {"zero3", "zero3-offload"} <= set(result.skipped)
    assert all(plan.setup.stage < 3 for plan in result.plans)


def test_keys_that_are_set_count():
    setup, found = base(gpus=2)
    (plain,) = answer(setup, found, ["zero2"]).plans
    texts = ("zero_optimization.reduce_bucket_size=1e9",)
    (bigger,) = answer(setup, found, ["zero2"], overrides=texts).plans
    assert bigger.setup.reduce_bucket == 1_000_000_000 > plain.setup.reduce_bucket
    assert bigger.gpu.terms["buckets"] > plain.gpu.terms["buckets"]


def test_a_finished_config_as_a_set_up():
    setup, _ = base(gpus=2)
    config = build_config(
        "zero3-offload", Options(gpus=2, precision="fp16", micro_batch=7, grad_accum=3)
    ).ds_config
    found = setups.of_job(config, setup)
    assert (found.stage, found.precision, found.micro_batch, found.grad_accum) == (3, "fp16", 7, 3)
    assert (found.optimizer_device, found.parameter_device) == ("cpu", "cpu")
    assert found.shape == setup.shape


def test_precision_as_finetune_takes_it():
    kinds = {"v100-32g": "fp16", "a100-80g": "bf16", "p100-16g": "fp32"}
    assert {name: setups.default_precision(place({"gpu": name}, None)) for name in kinds} == kinds
    assert setups.default_precision(place({}, CPU)) == "fp32"


# Notes


def noted(model="llama-7b", given=None, **where) -> str:
    setup, found = base(model, given, **where)
    what = subject(model, {})
    return "\n".join(
        remarks.notes(what, found, answer(setup, found, setups.all_presets(), recomputed=search.RECOMPUTED))
    )


def test_notes_say_what_was_not_judged_or_assumed():
    assert "Host memory is not judged" in noted()
    assert "Host memory is not judged" not in noted(host_memory="100GiB")
    assert "factor of" in noted()
    setup, found = base(gpu=None, gpu_memory="24GiB")
    what = subject(None, {"params": 7e9})
    text = "\n".join(
        remarks.notes(what, found, answer(setup, found, ["zero2"], recomputed=search.RECOMPUTED))
    )
    assert "Speed is that of a100-80g" in text
    assert "Assumed for the model: layers 32, hidden 4096" in text
    assert "Assumed" not in noted()


def test_bf16_on_gpus_without_it():
    assert "have no bf16" in noted(gpu="v100-32g")  # these plans are in bf16
    assert "have no bf16" not in noted(gpu="a100-80g")


def test_rows_beyond_the_models_positions():
    assert "Rows of 4096 tokens are longer than the model's 2048 positions" in noted(given={"seq_len": 4096})
    assert "positions" not in noted(given={"seq_len": 2048})


@pytest.mark.parametrize(
    ("version", "keeps"), [("0.42.0", True), ("0.43.2", False), ("0.50.1", False), (None, False)]
)
def test_an_old_bitsandbytes_takes_more_and_is_named(monkeypatch, version, keeps):
    monkeypatch.setattr(setups.packages, "installed_version", lambda name: version)
    setup, _ = base(given={"method": "qlora"})
    assert setup.keeps_inputs is keeps
    assert ("keeps the inputs of 4-bit matrices" in noted(given={"method": "qlora"})) is keeps
    assert not base(given={"method": "lora"})[0].keeps_inputs


def test_large_logits_are_worth_a_word():
    # 13 bytes x 8 x 4096 tokens x 128256
    assert "The logits take 47.0 GiB: a fused cross-entropy" in noted(
        "llama-3-8b", {"seq_len": 4096, "micro_batch": 8}
    )
    assert "fused cross-entropy" not in noted("llama-7b", {"seq_len": 128, "micro_batch": 1})


def test_a_slow_network_is_named():
    assert "zero3: ZeRO-3 moves" in noted(gpus=8, nodes=2, network=10)
    assert "moves" not in noted(gpus=8)


# The first choice


def test_the_first_choice_is_the_first_plan():
    request = {"model": "llama-7b", "gpu": "a100-80g", "host_memory": "500GiB"}
    name, options, why = first_choice(request, Options(gpus=8), CPU)
    setup, found = base(
        given={"activation_checkpointing": "full"}, gpus=8, host_memory="500GiB"
    )  # as its file says
    best = answer(setup, found, setups.all_presets()).plans[0]
    assert name == best.preset
    assert (options.precision, options.micro_batch, options.grad_accum, options.gpus) == ("bf16", 4, 1, 8)
    assert name in why
    assert best.reason in why
    assert "rows of 1024 tokens, micro batch 4, bf16" in why


def test_the_first_choice_hears_the_options():
    request = {"model": "llama-7b", "gpu": "a100-80g", "seq_len": 64}
    _, options, why = first_choice(
        request, Options(gpus=8, precision="fp16", micro_batch=2, grad_accum=3), CPU
    )
    assert (options.precision, options.micro_batch, options.grad_accum) == ("fp16", 2, 3)
    assert "rows of 64 tokens, micro batch 2, fp16" in why


@pytest.mark.parametrize(
    ("model", "wanted", "expected"),
    [
        ("llama-2-7b", {}, "full"),
        ("llama-tiny", {}, "none"),
        ("llama-tiny", {"activation_checkpointing": "full"}, "full"),
        ("llama-2-7b", {"activation_checkpointing": "none", "seq_len": 64}, "none"),
        ("llama-2-7b", {"activation_checkpointing": "selective", "seq_len": 64}, "selective"),
    ],
)
def test_checkpointing_is_wished_for_or_the_models_own(model, wanted, expected):
    _, _, why = first_choice(
        {"model": model, "gpu": "a100-80g", **wanted}, Options(gpus=8, micro_batch=64), CPU
    )
    setup, found = base(model, {**wanted, "micro_batch": 64, "activation_checkpointing": expected}, gpus=8)
    best = answer(setup, found, setups.all_presets()).plans[0]
    assert best.setup.checkpointing == {"none": 0, "full": 1, "selective": 2}[expected]
    assert best.reason in why
    assert ("activation checkpointing" in why) == (expected != "none")


def test_other_machines_have_to_be_named():
    with pytest.raises(DsrunError, match="name them: --gpu"):
        first_choice({"model": "llama-tiny"}, Options(gpus=8), CPU)
    name, options, _ = first_choice({"model": "llama-tiny", "gpu": "v100-32g"}, Options(gpus=8), CPU)
    assert name in setups.all_presets()
    assert (options.gpus, options.precision) == (8, "fp16")


def test_nvme_is_a_choice_only_where_a_folder_is_named(tmp_path):
    request = {
        "model": "llama-13b",
        "gpu": "rtx-3090",
        "host_memory": "100GiB",
        "activation_checkpointing": "full",
    }
    name, _, _ = first_choice(request, Options(nvme_path=str(tmp_path)), CPU)
    assert name == "zero3-nvme"
    with pytest.raises(DsrunError, match="no preset fits"):
        first_choice(request, Options(), CPU)


def test_no_first_choice_says_the_shortest_way_out():
    with pytest.raises(DsrunError) as caught:
        first_choice({"model": "llama-7b", "gpu": "t4", "host_memory": "64GiB"}, Options(), CPU)
    (problem,) = caught.value.problems
    assert "no preset fits" in problem.what
    assert problem.hint.startswith("It fits with: ")


def test_best_of():
    setup, found = base("llama-tiny", gpus=2)
    several = answer(setup, found, ["ddp", "zero2"])
    assert "the fastest of 2 presets that fit (" in search.best_of(several)[1]
    one = answer(setup, found, ["zero2"])
    assert "the only preset that fits (" in search.best_of(one)[1]
    # 95 % of the memory is tight.
    used = judge("zero2", one.plans[0].setup, found.room).used * found.room.gpu_bytes
    narrow = replace(found, room=replace(found.room, gpu_bytes=used / 0.95))
    tight = answer(setup, narrow, ["zero2"])
    assert "fits, tightly" in search.best_of(tight)[1]
    with pytest.raises(DsrunError) as caught:
        search.best_of(answer(setup, found, ["zero8", "zero9"]))
    assert len(caught.value.problems) == 2

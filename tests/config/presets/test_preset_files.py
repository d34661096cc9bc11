"""Presets as files: extending, merging, and what is wrong with them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import each

from dsrun.config import tree
from dsrun.config.presets import preset
from dsrun.config.presets.build import Options, build_config
from dsrun.config.presets.sources import draft
from dsrun.config.schemas import schema
from dsrun.config.schemas import violations as schema_violations
from dsrun.errors import DsrunError
from dsrun.options.commands import FinetuneOptions
from dsrun.options.table import PRECISIONS, TARGETS


def write(lab, name, text):
    path = lab / "presets" / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_lab_adds_a_preset_by_adding_a_file(lab):
    path = write(
        lab,
        "ours",
        'summary = "ours"\nextends = "zero2"\n[config.zero_optimization]\nreduce_bucket_size = 2e7\n',
    )
    built = build_config("ours", Options(gpus=2))
    assert built.ds_config["zero_optimization"]["reduce_bucket_size"] == 20_000_000
    assert type(built.ds_config["zero_optimization"]["reduce_bucket_size"]) is int
    assert built.origins["zero_optimization.reduce_bucket_size"] == str(path)
    assert built.origins["zero_optimization.stage"] == "presets/zero2.toml"


def test_a_childs_number_beats_the_bases_auto(lab):
    write(
        lab,
        "ours",
        'summary = "ours"\nextends = "zero2"\n[config.zero_optimization]\nreduce_bucket_size = 20000\n',
    )
    built = build_config("ours", Options(target="hf"))
    assert built.ds_config["zero_optimization"]["reduce_bucket_size"] == 20_000
    assert (
        build_config("zero2", Options(target="hf")).ds_config["zero_optimization"]["reduce_bucket_size"]
        == "auto"
    )


def test_hf_values_are_for_hf_only(lab):
    text = 'summary = "ours"\nextends = "zero2"\n[config]\nsteps_per_print = 7\n[hf]\nsteps_per_print = 9\n'
    write(lab, "ours", text)
    assert build_config("ours", Options()).ds_config["steps_per_print"] == 7
    assert build_config("ours", Options(target="hf")).ds_config["steps_per_print"] == 9


def test_any_other_section_is_written_as_it_stands(lab):
    write(
        lab,
        "ours",
        'summary = "x"\nextends = "zero1"\n[config.csv_monitor]\nenabled = true\njob_name = "</c> \\"b\\""\n',
    )
    assert build_config("ours", Options()).ds_config["csv_monitor"] == {
        "enabled": True,
        "job_name": '</c> "b"',
    }


@pytest.mark.parametrize("target", TARGETS)
def test_shipped_presets_fit_the_schema(target):
    """Where nothing is added to one, nobody asks again."""
    known = schema.load()

    def judged(name: str) -> None:
        chosen = preset.load(name)
        assert chosen.shipped
        merged, _ = chosen.merged(target)
        if chosen.for_hosts:
            tree.put(merged, preset.SECOND_COPY, 8)
        assert schema_violations.check(known, known.whole_numbers(merged), target) == []

    assert len(preset.names()) > 5
    each(preset.names(), judged)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_comes_of_a_shipped_preset_fits_the_schema(data):
    """So that its own values need not be judged before the finished config is."""
    choose = data.draw
    options = Options(
        gpus=choose(st.integers(1, 64)),
        nodes=choose(st.integers(1, 8)),
        precision=choose(st.sampled_from([None, *PRECISIONS])),
        micro_batch=choose(st.none() | st.integers(1, 10**6)),
        grad_accum=choose(st.none() | st.integers(1, 10**6)),
        grad_clip=choose(st.none() | st.floats(0, 1e9)),
        lr=choose(st.none() | st.floats(1e-12, 1e3)),
        target=choose(st.sampled_from(TARGETS)),
        nvme_path="/nvme",
        largest_parameter=choose(st.none() | st.integers(1, 10**10)),
        own_schedule=choose(st.booleans()),
    )
    names = [name for name in preset.names() if preset.load(name).fsdp is None]
    config = draft(choose(st.sampled_from(names)), options)
    assert schema_violations.check(schema.load(), config, options.target) == []


@pytest.mark.parametrize("kind", ["a preset", "a template", "--set"])
def test_what_others_write_is_asked_about(kind, lab, monkeypatch):
    asked = []
    monkeypatch.setattr(schema_violations, "check", lambda *said: asked.append(said) or [])
    assert build_config("zero2", Options(gpus=2)) and len(asked) == 1, "the finished config"
    asked.clear()
    if kind == "a preset":
        write(lab, "ours", 'summary = "x"\nextends = "zero2"\n')
    if kind == "a template":
        (lab / "templates").mkdir(exist_ok=True)
        text = '{% include "shipped/batch.json.j2" %}\n"steps_per_print": {{ 10 | tojson }},'
        (lab / "templates" / "batch.json.j2").write_text(text)
    said = ("wall_clock_breakdown=true",) if kind == "--set" else ()
    build_config("ours" if kind == "a preset" else "zero2", Options(gpus=2, overrides=said))
    assert len(asked) == (1 if kind == "a template" else 2), "what they wrote, and the finished config"


def test_a_wrong_key_of_a_lab_s_preset_is_found_by_a_plan_too(lab):
    write(lab, "ours", 'summary = "x"\nextends = "zero2"\n[config]\ngradient_cliping = 0.3\n')
    with pytest.raises(DsrunError, match="gradient_clipping"):
        draft("ours", Options())


def test_a_preset_can_stand_alone(lab):
    write(lab, "bare", 'summary = "x"\n[config.zero_optimization]\nstage = 1\n')
    config = build_config("bare", Options(gpus=3)).ds_config
    assert config["train_batch_size"] == 3 * FinetuneOptions().micro_batch
    assert config["zero_optimization"] == {"stage": 1}
    assert "optimizer" not in config


def test_a_preset_can_choose_its_precision(lab):
    write(lab, "ours", 'summary = "x"\nextends = "zero1"\n[config.bf16]\nenabled = true\n')
    assert set(build_config("ours", Options()).ds_config) & {"fp16", "bf16"} == {"bf16"}
    assert build_config("ours", Options()).origins["bf16.enabled"].endswith("ours.toml")
    assert set(build_config("ours", Options(precision="fp16")).ds_config) & {"fp16", "bf16"} == {"fp16"}


def test_a_preset_that_shadows_a_shipped_one_can_extend_it(lab):
    write(lab, "zero2", 'summary = "ours"\nextends = "zero2"\n[config]\ngradient_clipping = 0.3\n')
    assert build_config("zero2", Options()).ds_config["gradient_clipping"] == 0.3
    assert [file.label for file in preset.load("zero2").chain[:3]] == [
        f"presets/{name}.toml" for name in ("ddp", "zero1", "zero2")
    ]
    assert build_config("zero2-offload", Options()).ds_config["gradient_clipping"] == 0.3


def test_a_path_in_place_of_a_name(tmp_path):
    folder = tmp_path / 'sp ace "q" 文件'
    folder.mkdir()
    (folder / "base.toml").write_text('summary = "x"\nextends = "zero1"\n[config]\ngradient_clipping = 0.1\n')
    path = folder / "mine.toml"
    path.write_text('summary = "x"\nextends = "base.toml"\n')
    built = build_config(str(path), Options())
    assert built.ds_config["gradient_clipping"] == 0.1
    assert built.origins["gradient_clipping"] == str(folder / "base.toml")


def test_a_circle_is_named_with_its_files(lab):
    one = write(lab, "one", 'summary = "x"\nextends = "two"\n')
    two = write(lab, "two", 'summary = "x"\nextends = "one"\n')
    with pytest.raises(DsrunError) as caught:
        preset.load("one")
    assert f"{one} -> {two} -> {one}" in str(caught.value)
    write(lab, "self", 'summary = "x"\nextends = "self"\n')
    with pytest.raises(DsrunError, match="extends itself"):
        preset.load("self")


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ('summery = "x"', ["unknown key 'summery'", "Did you mean 'summary'?", "has no summary"]),
        ('summary = ""', ["has no summary"]),
        ('summary = "x"\nextends = 3', ["extends is not a name: 3"]),
        ('summary = "x"\nextends = "zero-2"', ["extends: unknown preset 'zero-2'", "'zero2'"]),
        ('summary = "x"\nextends = "no.toml"', ["bad.toml: extends: no such file", "no.toml"]),
        ('summary = "x"\nrequires = ["gpu"]', ["requires can't be ['gpu']", "nvme_path"]),
        ('summary = "x"\nconfig = 3', ["config is not a table"]),
        ('summary = "x"\n[config]\nsteps_per_print = inf', ["config.steps_per_print", "can't be inf"]),
        ('summary = "x"\n[config]\nsteps_per_print = 2020-01-01', ["config.steps_per_print", "a date"]),
        ('summary = "x"\n[zero_optimization]\nstage = 1', ["'zero_optimization'", "below [config]"]),
        (
            'summary = "x"\n[config.zero_optimization]\nstage = "two"',
            ["bad.toml: $.zero_optimization.stage", "0, 1, 2, 3"],
        ),
        (
            'summary = "x"\n[config.zero_optimisation]\nstage = 2',
            ["bad.toml: $.zero_optimisation", "zero_optimization?"],
        ),
        ('summary = "x"\n[config.fp16]\nloss_scale = "auto"', ["$.fp16.loss_scale", "a number"]),
        (
            'summary = "x"\n[config]\ngradient_clipping = "auto"',
            ["bad.toml: $.gradient_clipping", "only HF Trainer"],
        ),
        (
            'summary = "x"\n[config.elasticity]\nenabled = false',
            ["$.elasticity", "removed", "train_batch_size"],
        ),
        ('summary = "x"\n[config]\nbf16 = true', ["bad.toml: $.bf16", "a section"]),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_name(lab, text, texts):
    write(lab, "bad", text)
    with pytest.raises(DsrunError) as caught:
        build_config("bad", Options())
    assert "bad.toml" in str(caught.value)
    for part in texts:
        assert part in str(caught.value)


def test_all_problems_of_a_file_come_together(lab):
    write(lab, "bad", "extends = 1\nrequires = 2\nhf = 3\n")
    with pytest.raises(DsrunError) as caught:
        preset.load("bad")
    assert len(caught.value.problems) == 4


def test_nvme_needs_a_folder(monkeypatch, lab):
    with pytest.raises(DsrunError, match="--nvme-path FOLDER, or set DSRUN_NVME_PATH"):
        build_config("zero3-nvme", Options())
    monkeypatch.setenv("DSRUN_NVME_PATH", "/from/environment")
    built = build_config("zero3-nvme", Options())
    assert built.ds_config["zero_optimization"]["offload_param"]["nvme_path"] == "/from/environment"
    assert built.origins["zero_optimization.offload_param.nvme_path"] == "environment DSRUN_NVME_PATH"
    built = build_config("zero3-nvme", Options(nvme_path="/given"))
    assert built.origins["zero_optimization.offload_optimizer.nvme_path"] == "--nvme-path"
    assert not build_config("zero2", Options()).findings
    monkeypatch.delenv("DSRUN_NVME_PATH")
    text = 'summary = "x"\nextends = "zero3-nvme"\n' + "".join(
        f'[config.zero_optimization.offload_{part}]\nnvme_path = "/scratch"\n'
        for part in ("param", "optimizer")
    )
    write(lab, "ours", text)
    assert (
        build_config("ours", Options())
        .origins["zero_optimization.offload_param.nvme_path"]
        .endswith("ours.toml")
    )

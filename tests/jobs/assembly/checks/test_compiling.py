"""--compile: where layers can't be compiled, in words, before anything is started."""

from __future__ import annotations

import dataclasses

import pytest

from dsrun import packages
from dsrun.jobs.assembly.checks import compiling
from dsrun.options.commands import FinetuneOptions
from dsrun.options.layers import Resolved


def found(stage=2, accelerator="cpu", environ=None, **given):
    options = Resolved.by_user(FinetuneOptions, {"compile": True, **given}).options
    return list(compiling.problems(options, accelerator=accelerator, stage=stage, environ=environ))


@pytest.fixture
def tools(tmp_path):
    """An environment whose PATH has these programs alone."""

    def environ(*names, **more):
        for name in names:
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        return {"PATH": str(tmp_path), **more}

    return environ


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_it_can_be_below_stage_3(stage, tools):
    assert found(stage, environ=tools("g++")) == []


def test_nothing_is_asked_of_a_job_without_it(tools):
    assert found(3, compile=False, environ=tools()) == []


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"stage": 3}, "fsdp"), ({"tp": 2}, "--tp 2"), ({"sp": 2}, "--sp 2"), ({"pp": 2}, "--pp 2"),
        ({"method": "ptuning"}, "lora"), ({"method": "qlora"}, "lora"), ({"official": True}, "--official"),
        ({"optimizer": "muon"}, "Muon"), ({"tile_tokens": 4096}, "--tile-tokens 4096"),
    ],
)  # fmt: skip
def test_what_it_is_not_combined_with(given, word):
    (problem,) = found(**given)
    assert problem.where == "--compile"
    assert word in problem.what + problem.hint


def test_without_a_compiler(tools):
    (problem,) = found(environ=tools())
    assert "g++" in problem.what and "CXX" in problem.hint
    assert found(environ=tools("mine", CXX="mine -O2")) == []
    assert found(environ=None) == [], "hosts that are not looked at"


def test_on_gpus_with_triton_and_a_c_compiler(tools, monkeypatch):
    monkeypatch.setattr(packages, "installed_version", lambda name: None)
    (problem,) = found(accelerator="cuda", environ=tools("gcc"), optimizer="muon")
    assert "triton" in problem.what


def test_a_run_that_goes_on_at_stage_3(make_job):
    job = make_job()
    job = dataclasses.replace(job, training=dataclasses.replace(job.training, compile=True))
    assert not list(compiling.resumed(job, {"PATH": "/usr/bin:/bin"}))
    job.ds_config["zero_optimization"]["stage"] = 3
    (problem,) = compiling.resumed(job, {})
    assert "ZeRO-3" in problem.what

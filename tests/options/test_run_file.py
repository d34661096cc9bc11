"""A run as one file: what is written is read back as the same, and what has no place in it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from dsrun.errors import DsrunError
from dsrun.options import run_file
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import COUNT, LIST_OR_FILE, LIST_SUFFIX, entries
from dsrun.options.layers import EXCLUSIVE, Resolved, Source

TABLE = {
    name: entry for name, entry in entries(FinetuneOptions).items() if not entry.option.command_line_only
}
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0/~"), min_size=1, max_size=12)
LITTLE = '{"content": "a", "summary": "b"}\n' * 8
"""A data file."""


def values_of(entry):
    """Values that an option takes."""
    option = entry.option
    if entry.choices:
        strategy = st.sampled_from(entry.choices)
    elif entry.kind is bool:
        strategy = st.booleans()
    elif entry.kind in (int, float):
        low = option.at_least if option.at_least is not None else option.above
        top = option.at_most if option.at_most is not None else option.below
        low, top = -100 if low is None else low, 1000 if top is None else top
        strategy = st.integers(
            int(low) + (option.above is not None), int(top) - (option.below is not None and top > 1)
        )
        if entry.kind is float:
            strategy = st.floats(
                low, top, exclude_min=option.above is not None, exclude_max=option.below is not None
            )
    else:
        strategy = TEXTS.filter(lambda text: not run_file.REMOTE.match(text))
        ending = LIST_SUFFIX if option.path == LIST_OR_FILE else ""
        strategy = (
            strategy.map(lambda text: f"dir/{text}{ending}")
            if entry.kind is Path or option.path
            else strategy
        )
    return st.lists(strategy, min_size=1, max_size=3) if entry.repeated else strategy


OPTIONS = st.fixed_dictionaries(
    {}, optional={name: values_of(entry) for name, entry in TABLE.items() if entry.option.unit != COUNT}
)


@hypothesis.settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(values=OPTIONS)
def test_what_is_written_is_read_back(tmp_path, monkeypatch, values):
    for one, other in EXCLUSIVE:
        if one in values and other in values:
            del values[one]
    (tmp_path / "conf").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    resolved = Resolved.by_user(FinetuneOptions, values)
    path = tmp_path / "conf" / "a lab's 运行.toml"
    path.write_text(run_file.text("llama-tiny", resolved.rows(), path.parent), encoding="utf-8")
    read_back = run_file.read(path)
    again = Resolved.built_in(FinetuneOptions).filled(Source.RUN_FILE, read_back.values, str(path))
    assert read_back.model == "llama-tiny"
    assert set(again.user) == set(resolved.user)
    for name, value in resolved.user.items():
        got = getattr(again.options, name)
        for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (value, got)), strict=True):
            if TABLE[name].kind is Path or TABLE[name].option.path:
                assert Path(other).is_absolute()
                assert Path(other) == tmp_path / one
            else:
                assert one == other, name


JOBS = st.fixed_dictionaries(
    {},
    optional={
        "--lr": st.sampled_from(["1e-5", "0.003"]), "--micro-batch": st.integers(1, 5),
        "--grad-clip": st.sampled_from([0.0, 0.5]), "--preset": st.sampled_from(["ddp", "zero3", "auto"]),
        "--method": st.sampled_from(["full", "lora", "ptuning"]), "--max-steps": st.integers(1, 9),
        "--packing": st.booleans(), "--score-before": st.booleans(), "--seed": st.integers(0, 9),
        "--set": st.sampled_from(["gradient_clipping=0.25", "zero_optimization.reduce_bucket_size=1000000"]),
        "--train-file": st.sampled_from(["one.jsonl", "one.jsonl:2"]), "--warmup-steps": st.integers(0, 3),
        "--data-format": st.just("prompt-response"), "--official": st.just(True),
    },
)  # fmt: skip


def words_of(options):
    for flag, value in options.items():
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-")
        else:
            yield from (flag, str(value))


@hypothesis.settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(options=JOBS)
def test_a_written_file_gives_the_same_job(dsrun, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.jsonl").write_text(LITTLE, encoding="utf-8")
    (tmp_path / "run.toml").unlink(missing_ok=True)
    command = ("finetune", "llama-tiny", "--gpus", 2, *words_of(options), "--dry-run", "--json")
    written = dsrun(*command, "-o", "run.toml", "--force")
    if written.code:  # options that contradict each other
        assert not (tmp_path / "run.toml").exists()
        return
    elsewhere = tmp_path / "else"
    elsewhere.mkdir(exist_ok=True)
    monkeypatch.chdir(elsewhere)
    jobs = [json.loads(written.out)["job"]]
    jobs.append(json.loads(dsrun("finetune", "../run.toml", "--dry-run", "--json").out)["job"])
    for job in jobs:
        # The time is in one, what memory is free now in another, and the file itself in the third.
        del job["run_dir"], job["prediction"], job["origins"]
    assert jobs[0] == jobs[1]


@pytest.mark.parametrize("step", [(), ("--tokens-per-batch", 2000)])
def test_other_devices_divide_the_same_step(dsrun, tmp_path, step):
    """Nothing that this machine's devices decided is fixed by the file: not the split of a step, nor their kernels."""
    path = tmp_path / "run.toml"
    assert dsrun("finetune", "llama-tiny", "--gpus", 2, *step, "--dry-run", "-o", path).code == 0
    text = path.read_text(encoding="utf-8").replace("\ngpus = 2", "\n# gpus = 2")
    assert not [name for name in ("micro_batch", "grad_accum", "overrides") if f"\n{name} = " in text]
    path.write_text(text, encoding="utf-8")
    for devices in (1, 2):
        words = ("--gpus", devices, "--dry-run", "--json")
        one, other = (dsrun("finetune", *what, *words) for what in ((path,), ("llama-tiny", *step)))
        assert one.code == 0, one.err
        assert json.loads(one.out)["job"]["ds_config"] == json.loads(other.out)["job"]["ds_config"]


@pytest.fixture
def written(tmp_path):
    """`written(text)`: a run file."""

    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("micro_bach = 1", ("run.toml:1", "micro_batch")),
        ("lr = 1\n\nlora_dropout = 1", ("run.toml:3", "lora_dropout")),
        ("model = 3", ("run.toml:1", "model")),
        ("dry_run = true", ("--dry-run",)),
        ("[training]\nlr = 1", ("run.toml:1", "[training]")),
        ('summary = "x"\n[config]\n', ("--preset",)),
        ("lr = [1e-4]", ("lr",)),
        ("lr = ", ("run.toml", "TOML")),
    ],
)
def test_what_has_no_place_in_a_run_file_is_refused(written, text, words):
    with pytest.raises(DsrunError) as caught:
        run_file.read(written(text))
    for word in words:
        assert word in str(caught.value)


def test_all_that_is_wrong_is_said_together(written):
    with pytest.raises(DsrunError) as caught:
        run_file.read(written('lr = "x"\nmicro_bach = 1\n'))
    assert len(caught.value.problems) == 2


def test_paths_are_relative_to_the_file(written, tmp_path):
    text = (
        'model = "./mine"\ntrain_file = ["a.jsonl:2", "/x/b.jsonl", "hf:lab/set"]\neval_file = "dev.jsonl"\n'
    )
    found = run_file.read(written(text + 'preset = "zero3"\ncluster = "lab.toml"\n'))
    assert found.model == str(tmp_path / "mine")
    assert found.values == {
        "train_file": [f"{tmp_path}/a.jsonl:2", "/x/b.jsonl", "hf:lab/set"], "preset": "zero3",
        "eval_file": f"{tmp_path}/dev.jsonl", "cluster": f"{tmp_path}/lab.toml",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["llama-tiny", "lab/model"])
def test_a_models_name_is_no_path(written, name):
    assert run_file.read(written(f'model = "{name}"')).model == name


def test_a_secret_is_not_written(dsrun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--env", "LAB_TOKEN=geheim", "--env", "A=b", "--dry-run", "-o", "run.toml")
    assert dsrun("finetune", "llama-tiny", "--gpus", 2, *words).code == 0
    assert "geheim" not in (tmp_path / "run.toml").read_text(encoding="utf-8")
    assert run_file.read(tmp_path / "run.toml").values["env"] == ["LAB_TOKEN", "A=b"]


def test_no_file_is_replaced_unasked(dsrun, tmp_path, monkeypatch, written):
    monkeypatch.chdir(tmp_path)
    path = written("# mine\n")
    command = ("finetune", "llama-tiny", "--gpus", 2, "--dry-run", "-o", path)
    assert dsrun(*command).code == 1
    assert path.read_text(encoding="utf-8") == "# mine\n"
    assert dsrun(*command, "--force").code == 0
    assert run_file.read(path).model == "llama-tiny"


@pytest.mark.parametrize(
    "words",
    [
        ("llama-tiny", "-o", "x.toml"),
        ("llama-tiny", "--dry-run", "-o", "x.txt"),
        ("a.toml", "b.toml"),
        ("llama-tiny", "glm-tiny"),
    ],
)
def test_wrong_usage(dsrun, words):
    assert dsrun("finetune", *words).code == 2


def test_another_cluster_has_its_own_hosts(dsrun, tmp_path, written):
    cluster = tmp_path / "other.toml"
    cluster.write_text('launcher = "ssh"\nhosts = "there1:2"\n', encoding="utf-8")
    path = written('model = "llama-tiny"\nhosts = "here1:2"\nno_check = true\nlr = 1e-3\n')
    words = ("finetune", path, "--dry-run", "--json")
    assert [h["host"] for h in json.loads(dsrun(*words).out)["job"]["hosts"]] == ["here1"]
    said = dsrun(*words, "--cluster", cluster)
    assert [h["host"] for h in json.loads(said.out)["job"]["hosts"]] == ["there1"]
    assert "--hosts" in said.err


def test_plan_takes_a_run_file(dsrun, written):
    path = written(
        'model = "chatglm2-6b"\ngpus = 2\nmicro_batch = 3\nmethod = "lora"\npreset = "zero3"\nepochs = 2\n'
    )
    words = ("--gpu", "v100-32g", "--host-memory", "256GiB", "--json")
    typed = ("chatglm2-6b", "--gpus", 2, "--micro-batch", 3, "--method", "lora", "--preset", "zero3")
    assert dsrun("plan", path, *words).out == dsrun("plan", *typed, *words).out


def test_submit_sends_a_run_file(dsrun, tmp_path, written):
    path = written('model = "llama-tiny"\nmicro_bach = 2\n')
    words = ("submit", "--gpus-per-node", 2, "--dry-run", "--", "finetune", path)
    assert "micro_batch" in dsrun(*words).err
    path = written(f'model = "llama-tiny"\nmicro_batch = 2\noutput_dir = "{tmp_path}/night"\n')
    said = dsrun(*words)
    assert said.code == 0, said.err
    assert "run.toml" in said.out
    assert f"{tmp_path}/night" in said.out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: m\nlr: 1e-4\n# a comment\n", "looks like YAML"),
        ('{"model": "m"}', "looks like JSON"),
        ("lr = = 3\n", ""),
    ],
)
def test_another_form_in_a_run_file_is_told(tmp_path, text, says):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DsrunError) as caught:
        run_file.read(path)
    (problem,) = caught.value.problems
    assert says in problem.hint
    assert bool(says) == bool(problem.hint)


def test_a_slip_in_a_run_files_name_is_answered_with_the_file(dsrun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "senti.toml").write_text('model = "m"\n', encoding="utf-8")
    said = dsrun("finetune", "senti.tml")
    assert said.code == 1
    assert "senti.toml" in said.err


def test_submits_folder_wins_over_the_run_files(dsrun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('model = "llama-tiny"\noutput_dir = "theirs"\n', encoding="utf-8")
    cluster = tmp_path / "c.toml"
    cluster.write_text('launcher = "slurm"\n', encoding="utf-8")
    words = ("submit", "--cluster", cluster, "--gpus-per-node", 1, "--output-dir", "ours", "--dry-run")
    said = dsrun(*words, "--", "finetune", "run.toml")
    assert "given twice" not in said.err
    said = dsrun(*words, "--", "finetune", "run.toml", "--output-dir", "x")
    assert "given twice" in said.err

"""Accelerate's YAML: read with its places, judged as what accelerate launch makes of it, and safe to read."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from accelerating import arguments_of, deepspeed_of, variables_of
from needed import since

from dsrun.config.accelerate import findings as accelerate_yaml
from dsrun.config.accelerate import launch as accelerate_launch
from dsrun.config.accelerate.launch import LaunchConfig
from dsrun.config.reading import yaml_document
from dsrun.config.rules import Setting, find_rules
from dsrun.config.rules.frame import example
from dsrun.config.validation import report
from dsrun.config.validation.sources import ConfigText
from dsrun.config.validation.validate import RuleSelection
from dsrun.errors import DsrunError

# As `accelerate config` writes it: keys by the alphabet, texts that YAML could take for something else in quotes.
STAGE_3 = """\
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
STAGE_2 = """\
compute_environment: LOCAL_MACHINE
deepspeed_config: {gradient_accumulation_steps: 1, zero3_init_flag: false, zero_stage: 2}
distributed_type: DEEPSPEED
fsdp_config: {}
mixed_precision: 'no'
num_processes: 2
use_cpu: false
"""
TWO_MACHINES = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 1
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29512
mixed_precision: fp16
num_machines: 2
num_processes: 16
"""
BARE = "distributed_type: DEEPSPEED\nnum_processes: 1\n"
GOOD = {"stage-3": STAGE_3, "stage-2": STAGE_2, "two-machines": TWO_MACHINES, "bare": BARE}
AUTOS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
NAMED = """\
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: {name}
  zero3_init_flag: {init}
num_machines: 1
num_processes: 8
"""
LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}\n" for level in range(1, 12)
)


def judged(text, path=None, setting=None, selection=None):
    data = text if isinstance(text, bytes) else text.encode()
    return accelerate_yaml.validate(
        ConfigText("launch.yaml", data, path or Path("launch.yaml")),
        setting or Setting(),
        selection or RuleSelection(),
    )


def rows(result):
    """(rule, severity, line, column, path) of each finding."""
    return [
        (
            located.finding.rule,
            located.finding.severity,
            located.place.line,
            located.place.column,
            located.path,
        )
        for located in result.findings
    ]


def only(text, **given):
    (result,) = judged(text, **given)
    (located,) = result.findings
    return located


# ---------------------------------------------------------------- good files


@pytest.mark.parametrize("name", GOOD)
def test_good_files(name):
    (result,) = judged(GOOD[name])
    assert [row for row in rows(result) if row[1] != "note"] == []
    assert result.target == "accelerate"


@pytest.mark.parametrize("name", GOOD)
def test_accelerate_reads_the_good_files_alike(name, tmp_path):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "launch.yaml"
    path.write_text(GOOD[name])
    theirs = config_args.load_config_from_file(str(path))
    launch = LaunchConfig(yaml_document.read(GOOD[name], "launch.yaml").value)
    assert theirs.deepspeed_config == launch.options
    assert (theirs.num_processes, theirs.num_machines) == (launch.processes, launch.machines)
    assert (theirs.mixed_precision or "no") == launch.precision


OPTIONS = [
    {},
    {"zero_stage": 3, "zero3_save_16bit_model": True, "gradient_clipping": 0.5},
    {"zero_stage": "1", "gradient_accumulation_steps": "2", "gradient_clipping": "1e-1"},
    {"zero_stage": None, "gradient_accumulation_steps": 4, "zero3_save_16bit_model": "yes"},
    {"offload_optimizer_device": "CPU", "zero_stage": 2, "gradient_clipping": None},
    {"offload_param_device": "cpu", "offload_optimizer_device": "cpu", "zero_stage": 3},
    {"zero_stge": 3, "offload_optimizer_device": False},
    {"gradient_accumulation_steps": "auto", "gradient_clipping": "AUTO", "deepspeed_config_file": "none"},
]


@pytest.mark.parametrize(
    "precision", [{}, {"mixed_precision": "bf16"}, {"mixed_precision": "FP16"}, {"fp16": True}]
)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_config_is_the_one_that_accelerate_builds(options, precision, tmp_path):
    given = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": options, **precision}
    theirs = accelerates(given, tmp_path / "launch.yaml")
    theirs.pop("steps_per_print")
    assert LaunchConfig(given).config() == theirs


def test_what_accelerate_drops_is_kept(tmp_path):
    """What DS686 and DS690 say: if accelerate starts to hand it on, they go."""
    options = {
        "zero_stage": 3,
        "offload_param_device": "nvme",
        "offload_param_nvme_path": "/x",
        "gradient_clipping": 0,
    }
    given = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": options}
    theirs, ours = accelerates(given, tmp_path / "launch.yaml"), LaunchConfig(given).config()
    assert theirs["zero_optimization"]["offload_param"]["nvme_path"] == "none"
    assert ours["zero_optimization"]["offload_param"]["nvme_path"] == "/x"
    assert "gradient_clipping" not in theirs
    assert ours["gradient_clipping"] == 0


@since(accelerate="1.13")  # before, with IPEX
def test_keys_are_accelerates():
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    launching = pytest.importorskip("accelerate.commands.launch")
    assert set(accelerate_launch.KEYS) == set(config_args.ClusterConfig.__dataclass_fields__)
    parser = launching.launch_command_parser()
    (group,) = [group for group in parser._action_groups if group.title == "DeepSpeed Arguments"]
    assert set(accelerate_launch.OPTIONS) == {action.dest for action in group._group_actions}


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        pytest.param(
            "FSDP Arguments",
            accelerate_launch.FSDP_DEFAULTS,
            marks=since(accelerate="1.15"),  # fsdp_activation_checkpointing_offload
        ),
        ("ParallelismConfig Arguments", accelerate_launch.PARALLELISM_DEFAULTS),
    ],
)
def test_defaults_are_accelerates(title, keys):
    launching = pytest.importorskip("accelerate.commands.launch")
    groups = launching.launch_command_parser()._action_groups
    actions = [action for group in groups if group.title == title for action in group._group_actions]
    theirs = {action.dest: action.default for action in actions}
    assert dict(keys) == {"fsdp_ignored_modules": None, **theirs} if "fsdp_version" in keys else theirs


# Examples that fail only at the training itself, or where accelerate itself goes on.
LATER = ("DS683", "DS686", "DS687", "DS688", "DS689", "DS690", "DS692", "DS693", "DS694")
STOPPING = [
    (rule, given)
    for rule in find_rules()
    if "DS680" <= rule.id <= "DS690" and rule.id not in LATER
    for given in rule.bad
]


@pytest.mark.parametrize(("rule", "given"), STOPPING, ids=lambda value: getattr(value, "id", ""))
def test_accelerate_stops_where_the_rules_say_so(rule, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, setting, _ = example(given)
    launch = dict(setting.launch)
    referenced = launch.pop("_referenced", None)
    if referenced is None:
        (tmp_path / "ds_config.json").write_text(json.dumps(config))
    errors = [hit for hit in hits(rule, config, setting) if hit.severity == "error"]
    if errors:
        with pytest.raises((ValueError, TypeError, AttributeError, AssertionError)):
            accelerates(launch, tmp_path / "launch.yaml", strict=True)


def hits(rule, config, setting):
    from dsrun.config.rules import run

    return [finding for finding in run(config, setting) if finding.rule == rule.id]


def accelerates(given, path, *, strict=False):
    """The ds_config that accelerate makes of a launch config, or its exception. strict: as torchrun and a script do."""
    pytest.importorskip("accelerate.commands.launch")
    import yaml

    path.write_text(yaml.safe_dump(given))
    variables = variables_of(path)
    if strict:
        args = arguments_of(path)
        assert args.use_deepspeed
        assert args.num_machines > 1 or int(args.num_processes) > 0
        int(variables.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1))
    return deepspeed_of(variables)


# ---------------------------------------------------------------- findings and their places


def test_places_of_a_setting():
    located = only(STAGE_3.replace("offload_optimizer_device: cpu", "offload_optimizer_device: ssd"))
    assert (located.finding.rule, located.path) == ("DS002", "deepspeed_config.offload_optimizer_device")
    assert (located.place.line, located.place.column) == (6, 3)


def test_places_in_a_flow_mapping():
    located = only(STAGE_2.replace("zero_stage: 2", "zero_stage: 4"))
    assert (located.finding.rule, located.path) == ("DS002", "deepspeed_config.zero_stage")
    assert (located.place.line, located.place.column) == (2, 76)


def test_a_setting_that_is_missing_is_shown_at_the_section():
    (result,) = judged(STAGE_3.replace("  zero3_save_16bit_model: true\n", ""))
    assert rows(result) == [("DS203", "warning", 3, 1, "deepspeed_config.zero3_save_16bit_model")]


def test_texts_name_the_keys_of_the_yaml():
    text = STAGE_2.replace("zero_stage: 2", "zero_stage: 2, offload_param_device: cpu")
    located = only(text)
    assert located.path == "deepspeed_config.offload_param_device"
    assert "deepspeed_config.zero_stage" in located.finding.suggestion
    assert "zero_optimization" not in located.finding.message + located.finding.suggestion


def test_no_fix_is_offered():
    (result,) = judged(STAGE_2.replace("zero_stage: 2", "zero_stage: 2, offload_param_device: cpu"))
    assert all(located.finding.fix is None for located in result.findings)


def test_unknown_keys_at_both_levels():
    text = STAGE_2.replace("zero_stage: 2", "zero_stge: 2").replace("use_cpu: false", "zero_stage: 3")
    (result,) = judged(text)
    assert rows(result) == [
        ("DS683", "error", 2, 76, "deepspeed_config.zero_stge"),
        ("DS681", "error", 7, 1, "zero_stage"),
    ]
    assert "zero_stage" in result.findings[0].finding.suggestion
    assert "deepspeed_config" in result.findings[1].finding.suggestion


def test_a_key_given_twice():
    located = only(STAGE_3 + "mixed_precision: bf16\n")
    assert (located.finding.rule, located.place.line, located.place.column) == ("DS022", 25, 1)
    assert located.path == "mixed_precision"
    assert "line 16" in located.finding.message


def test_the_last_of_two_counts():
    (result,) = judged(STAGE_3.replace("  zero_stage: 3\n", "  zero_stage: 2\n  zero_stage: 3\n"))
    assert [row[0] for row in rows(result)] == ["DS022"]
    assert (
        LaunchConfig(yaml_document.read("deepspeed_config: {zero_stage: 1, zero_stage: 3}", "x").value).stage
        == 3
    )


def test_report():
    (result,) = judged(STAGE_3.replace("mixed_precision: bf16", "mixed_precision: no"))
    head, *excerpt, advice, empty = report.text([result]).split("\n")[:-1]
    assert head.startswith("launch.yaml:16:1  $.mixed_precision  DS682  error: is false, ")
    assert excerpt == ["  16 | mixed_precision: no", "     | ^^^^^^^^^^^^^^^"]
    assert advice.startswith("    Write ")
    assert not empty


def test_numbers_in_quotes_count_as_numbers():
    """PyYAML reads 1e-1 as a text; accelerate hands all on as texts anyway."""
    (result,) = judged(STAGE_3.replace("gradient_clipping: 1.0", "gradient_clipping: 1e-1"))
    assert result.findings == ()
    assert result.document.value["gradient_clipping"] == 0.1


def test_rules_are_chosen():
    bad = STAGE_3.replace("zero_stage: 3", "zero_stge: 3")
    assert judged(bad, selection=RuleSelection(select=("DS1",)))[0].findings == ()
    assert judged(bad, selection=RuleSelection(ignore=("DS683",)))[0].count("error") == 0
    kept = bad.replace("  zero_stge", "  _dsrun_ignore: [DS683]\n  zero_stge")
    assert judged(kept)[0].count("error") == 0


def test_the_size_of_the_job_comes_from_the_file(monkeypatch):
    seen = []
    real = accelerate_yaml.validation.validate_document

    def judge(read, setting, *rest):
        seen.append((setting.target, setting.world_size, setting.nodes))
        return real(read, setting, *rest)

    monkeypatch.setattr(accelerate_yaml.validation, "validate_document", judge)
    judged(TWO_MACHINES)
    judged(TWO_MACHINES, setting=Setting(target="hf", world_size=4, nodes=1))
    assert seen == [("accelerate", 16, 2), ("accelerate", 4, 1)]


@pytest.mark.parametrize(
    ("top", "options", "size"),
    [
        ({"num_processes": 8}, {}, 8),
        ({"num_processes": "8"}, {}, 8),
        ({"num_processes": 7, "num_machines": 2}, {}, 6),
        ({"num_processes": 1, "num_machines": 2}, {}, None),
        ({"num_processes": 0}, {}, None),
        ({"num_processes": -1}, {}, None),
        ({"num_processes": True}, {}, None),
        ({}, {}, None),
        ({"num_processes": 8, "num_machines": 2}, {"deepspeed_inclusion_filter": "a:0"}, None),
        ({"num_processes": 8, "num_machines": 1}, {"deepspeed_inclusion_filter": "a:0"}, 8),
        (
            {"num_processes": 8, "num_machines": 2},
            {"deepspeed_exclusion_filter": "a:0", "deepspeed_multinode_launcher": "standard"},
            8,
        ),
    ],
)
def test_world_size(top, options, size):
    assert LaunchConfig({**top, "deepspeed_config": options}).world_size == size


# ---------------------------------------------------------------- a file that is named


def write(folder, config, name="ds.json"):
    path = folder / name
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def test_a_file_where_accelerate_looks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {**AUTOS, "zero_optimization": {"stage": 2, "stge": 1}})
    launch, config = judged(NAMED.format(name="ds.json", init="false"), path=Path("configs/launch.yaml"))
    assert launch.findings == ()
    assert (config.name, config.target) == ("ds.json", "accelerate")
    assert [row[0] for row in rows(config) if row[1] == "error"] == ["DS006"]


def test_a_file_beside_the_yaml(tmp_path):
    path = write(tmp_path, AUTOS)
    launch, config = judged(NAMED.format(name="ds.json", init="false"), path=tmp_path / "launch.yaml")
    assert rows(launch) == [("DS685", "note", 3, 3, "deepspeed_config.deepspeed_config_file")]
    assert config.name == str(path)
    assert config.count("error") == 0


@pytest.mark.parametrize("name", ["gone.json", "~/ds.json", "x" * 5000, "."])
def test_a_file_that_is_not_there(name):
    located = only(NAMED.format(name=name, init="true"))
    assert (located.finding.rule, located.finding.severity) == ("DS685", "error")
    assert (located.place.line, located.place.column) == (3, 3)
    assert len(located.finding.message) < 150


def test_a_config_in_base64():
    text = base64.urlsafe_b64encode(json.dumps(AUTOS).encode()).decode()
    located = only(NAMED.format(name=text, init="false"))
    assert (located.finding.rule, located.finding.severity) == ("DS685", "note")


def test_what_stands_beside_the_file(tmp_path):
    write(tmp_path, AUTOS, "ds.json")
    text = NAMED.format(name=tmp_path / "ds.json", init="false") + "mixed_precision: 'no'\n"
    text = text.replace("num_machines", "  zero_stage: 2\n  Gradient_Clipping:\nnum_machines")
    launch, _ = judged(text)
    assert rows(launch) == [
        ("DS684", "error", 5, 3, "deepspeed_config.zero_stage"),
        ("DS684", "error", 6, 3, "deepspeed_config.Gradient_Clipping"),
        ("DS684", "error", 9, 1, "mixed_precision"),
    ]
    assert "zero_optimization.stage" in launch.findings[0].finding.suggestion
    assert "bf16" in launch.findings[2].finding.suggestion


def test_the_stage_is_the_one_of_the_file(tmp_path):
    path = write(tmp_path, AUTOS)
    launch, _ = judged(NAMED.format(name=path, init="true"))
    assert [row[:4] for row in rows(launch)] == [("DS689", "warning", 4, 3)]
    write(tmp_path, {**AUTOS, "zero_optimization": {"stage": 3}})
    launch, _ = judged(NAMED.format(name=path, init="true"))
    assert launch.findings == ()


def test_a_file_that_cannot_be_read(tmp_path):
    path = write(tmp_path, '{\n  "a": [1\n}')
    launch, config = judged(NAMED.format(name=path, init="true"))
    assert launch.findings == ()
    ((rule, severity, line, _, _),) = rows(config)
    assert (rule, severity, line) == ("DS020", "error", 3)


# ---------------------------------------------------------------- no DeepSpeed, no YAML


@pytest.mark.parametrize(
    ("text", "severity", "line"),
    [
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_procs: 2\n", "note", 2),
        ("services: {web: {image: x}}\n", "note", 1),
        ("distributed_type: 'NO'\ndeepspeed_config: {zero_stage: 3}\n", "warning", 1),
        ("deepspeed_config: {}\n", "error", 1),
        ("\ndistributed_type: DeepSpeed\n", "error", 2),
    ],
)
def test_no_deepspeed(text, severity, line):
    located = only(text)
    assert (located.finding.rule, located.finding.severity) == ("DS680", severity)
    assert located.place.line == line


@pytest.mark.parametrize(
    ("text", "place", "word"),
    [
        ("", ":1:1", "empty"),
        ("# nothing\n", ":1:1", "empty"),
        ("- a\n- b\n", ":1:1", "list"),
        ("just words\n", ":1:1", "single value"),
        ("a: 1\n---\nb: 2\n", ":2:1", "single document"),
        ("a:\n\tb: 1\n", ":2:1", "scanning"),
        ("a: b: c\n", ":1:5", "mapping values"),
        ("a: 'x\n", ":2:1", "quoted scalar"),
        ("a: 1\nb: *c\n", ":2:4", "undefined alias"),
        ("a: \0\n", ":1:4", "U+0000"),
        ("? [a]\n: 1\n", ":1:3", "key"),
        ("a: !!python/object/apply:os.system [x]\n", ":1:4", "tag:yaml.org,2002:python/object/apply:o…"),
        ("a: !!python/name:os.system x\n", ":1:4", "python/name:os.system"),
        ("a: !x y\n", ":1:4", "!x"),
        ("a: !!int ''\n", ":1:4", "int"),
        ("a: 2024-99-99\n", ":1:4", "timestamp"),
        ("a: {<<: [1]}\n", ":1:9", "<<"),
        (b"a: \xff\n", ":1:4", "0xff"),
        ("a: 1\n".encode("utf-16"), "", "UTF-16"),
    ],
)
def test_what_cannot_be_read(text, place, word):
    with pytest.raises(DsrunError) as raised:
        yaml_document.read(text, "f.yaml")
    (problem,) = raised.value.problems
    assert problem.where == f"f.yaml{place}"
    assert word in problem.what


def test_what_cannot_be_read_is_a_finding():
    located = only("a:\n  b: [1\nc: 2\n")
    assert (located.finding.rule, located.finding.severity) == ("DS020", "error")
    assert located.place.line == 3
    assert "256 KiB" in only(b"a" * 300_000).finding.message


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        pytest.param(LAUGHS, "5,000 values", id="laughs"),
        pytest.param(MERGES, "100 mappings", id="merges"),
        pytest.param("a: &a {<<: *a}\n", "100 mappings", id="merges-itself"),
        pytest.param("a: &a [*a]\n", "20 levels", id="holds-itself"),
        pytest.param("a: " + "[" * 100_000, "20 levels", id="flow"),
        pytest.param("- " * 50_000 + "x", "20 levels", id="block"),
        pytest.param("? " * 50_000 + "x", "20 levels", id="keys"),
        pytest.param("a: [" + "1," * 90_000 + "]", "5,000 values", id="values"),
        pytest.param("a: " + "9" * 5_000, "5,000 characters", id="digits"),
        pytest.param("a: 1" + ":59" * 60_000, "180,001 characters", id="sexagesimal"),
        pytest.param("? " + "x" * 5_000 + "\n: 1\n", "5,000 characters", id="key"),
    ],
)
def test_hostile_files(text, limit):
    """No timing here: a reader that follows aliases without end would hang."""
    with pytest.raises(DsrunError) as raised:
        yaml_document.read(text, "f.yaml")
    assert limit in raised.value.problems[0].what


def test_limits_are_wide_enough():
    nested = "a: " + "[" * 19 + "]" * 19
    assert yaml_document.read(nested, "x").value["a"] != []
    with pytest.raises(DsrunError):
        yaml_document.read("a: " + "[" * 20 + "]" * 20, "x")
    assert len(yaml_document.read("a: [" + "1," * 4_998 + "]", "x").value["a"]) == 4_998
    with pytest.raises(DsrunError):
        yaml_document.read("a: [" + "1," * 4_999 + "]", "x")


# ---------------------------------------------------------------- the reader


@pytest.mark.parametrize(
    "text",
    [
        *GOOD.values(),
        "a: 5e8\nb: 1e-5\nc: 1.0e+5\nd: .inf\ne: 1_000\nf: 0x1f\ng: 017\nh: 1:30\n",
        "a: yes\nb: no\nc: on\nd: ~\ne:\nf: 'no'\ng: null\nh: 2024-01-02\n",
        "a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}\ne: {<<: [{f: 1}, {f: 2, g: 3}]}\nh: *x\n",
        "a: |\n  x\n  y\nb: >-\n  x\n  y\nc: [1, [2, {d: 3}]]\n",
        "\ufeffa: 1\r\nb:\r\n  - 2\r\n",
        "a: 1\na: 2\nb: {c: 1, c: [2]}\n",
    ],
)
def test_values_are_pyyamls(text):
    import yaml

    assert yaml_document.read(text, "x").value == yaml.safe_load(text)


def test_entries():
    document = yaml_document.read("a:\n  b: 1   # one\n  c:\n  - x\n  - {d: 2}\n\n# end\ne: 'f'\n", "x")

    def shown(path):
        entry = document.entries[path]
        return [
            document.text[place.start : place.end] for place in (entry.key, entry.value, entry.whole) if place
        ]

    assert list(document.entries) == ["", "a", "a.b", "a.c", "a.c.0", "a.c.1", "a.c.1.d", "e"]
    assert shown("a.b") == ["b", "1", "b: 1"]
    assert shown("a.c.0") == ["x", "x"]
    assert shown("a.c.1.d") == ["d", "2", "d: 2"]
    assert shown("e") == ["e", "'f'", "e: 'f'"]
    place = document.entries["a.c.1.d"].key
    assert (place.line, place.column) == (5, 6)


def test_a_number_is_a_key_as_it_is_written():
    assert yaml_document.read("1: a\nno: b\n", "x").value == {"1": "a", "no": "b"}


# ---------------------------------------------------------------- with HF Trainer


def test_with_hf_trainer_its_arguments_count():
    """The Trainer compares them with what the YAML says, and decides the precision itself."""
    yaml = (
        BARE + "mixed_precision: bf16\ndeepspeed_config:\n  gradient_accumulation_steps: 1\n  zero_stage: 1\n"
    )
    data = yaml.encode()
    source = ConfigText("launch.yaml", data, Path("launch.yaml"))
    setting = Setting(trainer={"gradient_accumulation_steps": 8})
    for target in (None, "hf"):
        (result,) = accelerate_yaml.validate(source, setting, RuleSelection(), target=target)
        assert result.target == "hf"
        assert [(rule, line) for rule, severity, line, *_ in rows(result) if severity == "error"] == [
            ("DS601", yaml[: yaml.index("gradient_acc")].count("\n") + 1)
        ]
    (result,) = accelerate_yaml.validate(source, setting, RuleSelection(), target="accelerate")
    assert result.target == "accelerate"
    with pytest.raises(DsrunError, match="lightning doesn't read it"):
        accelerate_yaml.validate(source, setting, RuleSelection(), target="lightning")

from __future__ import annotations

import pytest

from dsrun.catalog import shipped_root
from dsrun.config.presets import template
from dsrun.config.presets.build import Options, build_config
from dsrun.errors import DsrunError

NAMES = [
    "plain",
    "with space",
    "quote\"s and 'these'",
    "back\\slash",
    "{{ 7 * 7 }}",
    "</script>&",
    "路径/数据",
    "a\nb\t",
    "$(reboot)",
]


@pytest.mark.parametrize("name", NAMES)
def test_hostile_text_arrives_as_it_is(name):
    config = build_config("zero3-nvme", Options(nvme_path=f"/{name}")).ds_config
    assert config["zero_optimization"]["offload_param"]["nvme_path"] == f"/{name}"


def test_every_value_in_the_shipped_templates_goes_through_tojson():
    for path in (shipped_root() / "templates").glob("*.j2"):
        text = path.read_text(encoding="utf-8")
        for value in text.split("{{")[1:]:
            assert value.split("}}")[0].rstrip().endswith("| tojson"), path


def test_a_lab_replaces_one_part(lab):
    (lab / "templates" / "optimizer.json.j2").write_text('"optimizer": {"type": {{ "Lion" | tojson }}},')
    config = build_config("zero2", Options(gpus=2)).ds_config
    assert config["optimizer"] == {"type": "Lion"}
    assert config["train_batch_size"] == 8


def test_a_lab_adds_to_the_shipped_part(lab):
    text = '{% include "shipped/batch.json.j2" %}\n"steps_per_print": {{ 10 * ranks | tojson }},'
    (lab / "templates" / "batch.json.j2").write_text(text.replace("10 * ranks", "(10 * ranks)"))
    config = build_config("zero2", Options(gpus=2)).ds_config
    assert config["steps_per_print"] == 20
    assert config["train_batch_size"] == 8


@pytest.mark.parametrize(
    ("part", "texts"),
    [
        ("\n\n{{ presett.x | tojson }}", ["batch.json.j2:3", "'presett' is undefined"]),
        ("{{ preset.nothing | tojson }}", ["batch.json.j2:1", "nothing"]),
        ("\n{{ preset.gradient_clipping }}", ["batch.json.j2:2", "without `| tojson`"]),
        ("\n{% if %}", ["batch.json.j2:2"]),
        ("\n{{ (1 / 0) | tojson }}", ["batch.json.j2:2", "zero"]),
        ("{{ (1).__class__.__mro__ | tojson }}", ["batch.json.j2:1", "unsafe"]),
        ("\n{{ preset.update({'a': 1}) | tojson }}", ["batch.json.j2:2"]),
        ('{% include "other.j2" %}', ["no template other.j2", "batch.json.j2:1"]),
        ('"a": 1 "b": 2,', ["deepspeed.json.j2", "gives no JSON", '"a": 1 "b": 2']),
        ('"optimizer": {{ 1 | tojson }},', ["writes optimizer twice"]),
        ('"x": NaN,', ["writes NaN"]),
        ('"gradient_clip": {{ 1 | tojson }},', ["$.gradient_clip", "DS001", "gradient_clipping?"]),
    ],
)
def test_faults_are_said_with_their_place(lab, part, texts):
    (lab / "templates" / "batch.json.j2").write_text(part)
    with pytest.raises(DsrunError) as caught:
        build_config("zero2", Options())
    for text in texts:
        assert text in str(caught.value)


def test_a_labs_own_part_is_named_for_what_it_writes(lab):
    path = lab / "templates" / "optimizer.json.j2"
    path.write_text('"optimizer": {"type": {{ "Lion" | tojson }}},')
    origins = build_config("zero2", Options(gpus=2)).origins
    assert origins["optimizer.type"] == str(path)
    assert origins["train_batch_size"] == template.LABEL

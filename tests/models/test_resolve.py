"""Model files, and the folders and files that take their place."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dsrun import catalog
from dsrun.data.chat_templates import CHAT_TEMPLATE
from dsrun.errors import DsrunError
from dsrun.models import model_files, multimodal, resolve, transformers_code
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import entries
from dsrun.planner.families import FAMILIES
from dsrun.training.data import prompt_formats

PROMISED = {
    "chatglm2-6b", "chatglm3-6b", "glm-4-9b", "glm-4-0414-9b", "llama-7b", "llama-13b", "llama-30b", "llama-65b",
    "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3.1-8b", "llama-3.2-1b",
    "llama-3.3-70b", "chatglm2-tiny", "llama-tiny", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-72b",
    "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-32b", "mistral-7b", "yi-6b", "gemma-2-9b", "gemma-3-1b",
    "phi-3-mini", "phi-4-14b", "llama-4-scout-17b-16e", "gemma-3-4b", "gemma-3-27b", "gemma-4-e2b", "gemma-4-26b-a4b",
    "qwen2.5-vl-7b", "qwen3.5-0.8b", "olmo-2-7b", "olmo-3-7b", "internlm-3-8b", "minicpm-3-4b", "granite-3-8b",
    "granite-4-h-tiny", "falcon-h1-7b", "glm-4.6-355b-a32b", "deepseek-v3.1-671b", "smollm3-3b",
}  # fmt: skip
FILES = model_files.list_models()


def by_name(name: str):
    return next(model for model in FILES if model.name == name)


def refused(name, model_path=None):
    with pytest.raises(DsrunError) as caught:
        resolve.resolve(str(name), model_path)
    (problem,) = caught.value.problems
    assert problem.what
    return problem


def test_every_promised_model_is_there():
    assert {model.name for model in FILES} >= PROMISED
    assert len(FILES) == len(model_files.names())


def test_smallest_first():
    assert [model.parameters for model in FILES] == sorted(model.parameters for model in FILES)


@pytest.mark.parametrize("model", FILES, ids=lambda model: model.name)
def test_a_model_file(model):
    header = [line for line in model.path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    (command,) = (line for line in header if line.startswith("# Use:"))
    assert command.split()[4] in {one.name for one in FILES if one.path == model.path}
    assert any(line.startswith("# Not for:") for line in header)
    assert model.summary
    assert model.prompt_format in {*prompt_formats.FORMATS, CHAT_TEMPLATE, "auto"}
    assert set(model.defaults) <= {*entries(FinetuneOptions), "dataset"}
    assert model.defaults["preset"] in catalog.files("presets")
    text = multimodal.text_config(model.architecture)
    # Without formulas in the planner, transformers' own class says what the network is.
    assert text["model_type"] in FAMILIES or transformers_code.config_defaults(text["model_type"])
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        assert text[key] > 0
    assert (model.repository is None) != (model.random is None)
    assert bool(model.repository) == bool(model.licence) == bool(model.source)


PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_248_023_552, "yi-6b": 6_061_035_520, "llama-2-7b": 6_738_415_616, "llama-3-8b": 8_030_261_248,
    "chatglm2-6b": 6_243_584_000, "glm-4-9b": 9_399_951_360,
}  # fmt: skip
"""Parameters as the models' own pages give them."""


def test_the_published_counts():
    assert {name: by_name(name).parameters for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize("model", FILES, ids=lambda model: model.name)
def test_the_count_is_that_of_transformers_own_class(model):
    torch = pytest.importorskip("torch")
    from transformers import CONFIG_MAPPING, AutoConfig

    if model.architecture["model_type"] not in CONFIG_MAPPING:
        pytest.skip("the installed transformers doesn't have it")
    from dsrun.training.models.text_part import class_of, whole_class

    config = AutoConfig.for_model(**model.architecture)
    kind = whole_class(config) or class_of(config)[0]
    with torch.device("meta"):
        network = kind._from_config(config)
    network.tie_weights()  # transformers 5.0 leaves that out on this device
    assert sum(parameter.numel() for parameter in network.parameters()) == model.parameters
    text = multimodal.text_config(model.architecture)
    ropes = (config.get_text_config().rope_parameters, {**text, **(text.get("rope_parameters") or {})})
    # Gemma 3 and 4 have a table for each kind of layer; where a file says nothing, the class has a value of its own.
    rope, told = (table.get("full_attention", table) for table in ropes)
    assert rope["rope_theta"] == told.get("rope_theta", rope["rope_theta"])


def test_the_fields_defaults_for_chatglm2():
    defaults = {**vars(FinetuneOptions()), **by_name("chatglm2-6b").defaults}
    wanted = {
        "prompt_column": "content", "response_column": "summary", "max_source_length": 64,
        "max_target_length": 64, "lr": 1e-4, "micro_batch": 4,
    }  # fmt: skip
    assert {key: defaults[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", ["chatglm2-tiny", "llama-tiny"])
def test_what_ships_whole(name):
    spec, defaults = resolve.resolve(name, None)
    assert spec.source == "random"
    assert defaults["dataset"]
    assert isinstance(spec.architecture["seed"], int)
    assert {"style", "vocab_size", "dataset"} <= set(spec.tokenizer)


def test_a_named_model_comes_from_its_repository(monkeypatch):
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    spec, defaults = resolve.resolve("chatglm2-6b", None)
    assert (spec.source, spec.location) == ("hub", by_name("chatglm2-6b").repository)
    assert spec.prompt_format == "chatglm2"
    assert defaults["preset"]
    assert resolve.architecture(spec)["hidden_size"] == 4096


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_without_the_model(monkeypatch, tmp_path, variable):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv(variable, "1")
    problem = refused("chatglm2-6b")
    assert variable in problem.what
    assert "--model-path" in problem.hint
    (tmp_path / "hub" / "models--zai-org--chatglm2-6b" / "snapshots").mkdir(parents=True)
    assert resolve.resolve("chatglm2-6b", None)[0].source == "hub"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("chatglm2-tinny", "chatglm2-tiny"), ("LLaMA-7B", "llama-7b"), ("llama_2_13b", "llama-2-13b")],
)
def test_an_unknown_name_offers_the_nearest(name, nearest):
    problem = refused(name)
    assert repr(name) in problem.what
    assert repr(nearest) in problem.hint
    assert "dsrun models" in problem.hint


def test_a_name_that_resembles_nothing():
    assert "dsrun models" in refused("qqqq").hint


@pytest.fixture
def hugging_face_folder(tmp_path):
    """A folder that looks like a model; its name is a hostile one."""
    folder = tmp_path / "a user's 模型"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 7, "hidden_size": 5}')
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()
    return folder


def test_a_folder_in_place_of_a_name(hugging_face_folder):
    spec, defaults = resolve.resolve(str(hugging_face_folder), None)
    assert (spec.source, spec.location) == ("folder", str(hugging_face_folder))
    assert (spec.prompt_format, defaults) == ("auto", {})
    assert resolve.architecture(spec) == {"model_type": "llama", "vocab_size": 7, "hidden_size": 5}


def test_a_relative_folder(hugging_face_folder, monkeypatch):
    monkeypatch.chdir(hugging_face_folder.parent)
    assert resolve.resolve(hugging_face_folder.name, None)[0].location == str(hugging_face_folder)
    assert resolve.resolve(f"./{hugging_face_folder.name}", None)[0].location == str(hugging_face_folder)


def test_a_model_file_is_nearer_than_a_folder_of_its_name(hugging_face_folder, monkeypatch):
    monkeypatch.chdir(hugging_face_folder.parent)
    hugging_face_folder.rename("llama-tiny")
    assert resolve.resolve("llama-tiny", None)[0].source == "random"


def test_a_named_model_in_a_folder(hugging_face_folder):
    spec, defaults = resolve.resolve("llama-3-8b", hugging_face_folder)
    assert (spec.name, spec.source, spec.location) == ("llama-3-8b", "folder", str(hugging_face_folder))
    assert spec.prompt_format == "llama-3"
    assert "max_source_length" not in defaults, "the data decide"


def test_a_gguf_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "a model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    spec, _ = resolve.resolve(str(path), None)
    assert (spec.source, spec.architecture) == ("gguf", {"max_position_embeddings": 4096})
    assert resolve.resolve("llama-7b", path)[0].prompt_format == by_name("llama-7b").prompt_format


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\3\0\0\0" + b"\0" * 15, b"text" * 99])
def test_a_file_that_is_no_gguf(tmp_path, content):
    pytest.importorskip("gguf")
    path = tmp_path / "a model.gguf"
    path.write_bytes(content)
    problem = refused(path)
    assert problem.where == str(path)
    assert problem.hint


def test_what_is_neither_a_folder_nor_a_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (Path("/dev/null"), tmp_path / "pipe.gguf"):
        assert "neither a folder nor a file" in refused(path).what
        assert "neither a folder nor a file" in refused("llama-7b", path).what
        with pytest.raises(DsrunError, match="neither a folder nor a file"):
            resolve.config_of(str(path))
    assert "link" in refused(tmp_path / "link").what


def test_a_folder_that_the_system_keeps_closed(tmp_path, monkeypatch):
    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(resolve, "_check_folder", lambda path, **_: closed(path))
    assert "Permission denied" in refused(tmp_path).what


def test_two_paths(hugging_face_folder):
    assert "--model-path" in refused(hugging_face_folder, hugging_face_folder).what


def test_a_folder_that_is_not_there(tmp_path):
    problem = refused(tmp_path / "none")
    assert problem.where == str(tmp_path / "none")
    assert problem.hint
    assert refused("llama-7b", tmp_path / "none").where == str(tmp_path / "none")


def test_a_file_that_is_no_model(tmp_path):
    path = tmp_path / "model.bin"
    path.touch()
    assert ".gguf" in refused(path).what


def test_an_empty_folder(tmp_path):
    assert "config.json" in refused(tmp_path).what


def test_a_folder_with_a_gguf_file_names_it(tmp_path):
    (tmp_path / "q8.gguf").touch()
    assert str(tmp_path / "q8.gguf") in refused(tmp_path).hint


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\x00", '"llama"'])
def test_a_config_that_describes_no_model(hugging_face_folder, text):
    (hugging_face_folder / "config.json").write_text(text)
    assert refused(hugging_face_folder).where == str(hugging_face_folder / "config.json")


def test_the_first_chatglm_is_refused_by_name(hugging_face_folder):
    config = {"model_type": "chatglm", "position_encoding_2d": True, "inner_hidden_size": 16384}
    (hugging_face_folder / "config.json").write_text(json.dumps(config))
    (hugging_face_folder / "tokenizer.model").write_bytes(b"\n\x0e")
    problem = refused(hugging_face_folder)
    assert "ChatGLM-6B" in problem.what
    assert "ChatGLM2-6B" in problem.hint


def test_no_weights(hugging_face_folder):
    (hugging_face_folder / "model.safetensors").unlink()
    assert "weights" in refused(hugging_face_folder).what
    (hugging_face_folder / "pytorch_model.bin").touch()
    assert resolve.resolve(str(hugging_face_folder), None)


def test_no_tokenizer(hugging_face_folder):
    (hugging_face_folder / "tokenizer.json").unlink()
    assert "tokenizer" in refused(hugging_face_folder).what


@pytest.mark.parametrize("index", resolve.WEIGHT_INDEXES)
def test_shards_that_are_missing_are_named(hugging_face_folder, index):
    shards = {f"layer.{number}": f"shard-{number}.safetensors" for number in range(3)}
    (hugging_face_folder / index).write_text(json.dumps({"weight_map": shards}))
    (hugging_face_folder / "shard-0.safetensors").touch()
    problem = refused(hugging_face_folder)
    assert "2 of 3" in problem.what
    assert "shard-1.safetensors" in problem.what
    assert "download" in problem.hint
    for shard in shards.values():
        (hugging_face_folder / shard).touch()
    assert resolve.resolve(str(hugging_face_folder), None)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"weight_map": []}'])
def test_a_broken_index_is_named(hugging_face_folder, text):
    path = hugging_face_folder / "model.safetensors.index.json"
    path.write_text(text)
    assert str(path) in str(refused(hugging_face_folder))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(hugging_face_folder, name):
    (hugging_face_folder / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    problem = refused(hugging_face_folder)
    assert "Git LFS pointer" in problem.what and name in problem.what
    assert "lfs pull" in problem.hint


def test_a_format_that_a_model_can_not_be_written_in(hugging_face_folder):
    spec, _ = resolve.resolve(str(hugging_face_folder), None)
    resolve.check_export_format(spec, "transformers")
    with pytest.raises(DsrunError, match="original format"):
        resolve.check_export_format(spec, "chatglm")


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_offline_looks_where_the_hub_library_does(monkeypatch, tmp_path, variable):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(variable, str(tmp_path))
    below = {"HF_HUB_CACHE": ".", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    (tmp_path / below / "models--zai-org--chatglm2-6b" / "snapshots").mkdir(parents=True)
    assert resolve.resolve("chatglm2-6b", None)[0].source == "hub"
    assert "llama" in refused("llama-3-8b").what.lower()


@pytest.fixture
def lab_models(lab):
    folder = lab / "presets" / "models"
    folder.mkdir()
    return folder


def test_a_lab_adds_a_model_by_adding_a_file(lab_models):
    shutil.copy(by_name("llama-3-8b").path, lab_models / "ours.toml")
    shutil.copy(by_name("llama-tiny").path, lab_models / "alone.toml")
    assert {"ours-8b", "ours-70b", "alone"} <= {model.name for model in model_files.list_models()}
    assert resolve.resolve("ours-8b", None)[0].prompt_format == "llama-3"
    assert model_files.file_label("ours-8b") == str(lab_models / "ours.toml")


def test_a_labs_size_is_nearer_than_the_shipped_one(lab_models):
    text = by_name("qwen3-8b").path.read_text(encoding="utf-8")
    ours = text.replace("8_190_735_360", "8_000_000_000").partition("[sizes.14b]")[0]
    (lab_models / "qwen3.toml").write_text(ours, encoding="utf-8")
    assert by_name_now("qwen3-8b").parameters == 8_000_000_000
    assert by_name_now("qwen3-14b").path == by_name("qwen3-14b").path


def by_name_now(name: str):
    return model_files.load_model_file(name)


def test_a_size_says_more_than_its_family():
    small, large = by_name_now("qwen3-0.6b"), by_name_now("qwen3-32b")
    assert (small.architecture["tie_word_embeddings"], large.architecture["tie_word_embeddings"]) == (
        True,
        False,
    )
    assert small.architecture["model_type"] == large.architecture["model_type"] == "qwen3"
    assert (small.defaults["preset"], large.defaults["preset"]) == ("zero2", "zero3-offload")
    assert large.summary == "Qwen3 32B"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("summary =", "sumary ="), "sumary"),
        (('prompt_format = "llama-3"\n', ""), "prompt_format"),
        (("repository =", "#"), "repository"),
        (("parameters = ", "parameters = = "), "TOML"),
        (('summary = "Llama 3"', "summary = 3"), "summary"),
        (("parameters = 8_030_261_248", 'parameters = "8B"'), "parameters"),
    ],
)
def test_a_fault_in_a_model_file_is_named(lab_models, change, said):
    text = by_name("llama-3-8b").path.read_text(encoding="utf-8")
    assert change[0] in text
    (lab_models / "ours.toml").write_text(text.replace(*change), encoding="utf-8")
    broken = change[1] == "parameters = = "  # then nobody knows the sizes in it
    problem = refused("ours" if broken else "ours-8b")
    assert problem.where == str(lab_models / "ours.toml")
    assert said in f"{problem.what} {problem.hint}"


def test_the_list_survives_a_broken_file(lab_models, dsrun):
    (lab_models / "broken.toml").write_text("summary = \n")
    said = dsrun("models")
    assert said.code == 0
    assert "llama-tiny" in said.out
    assert "broken.toml" in said.err


@pytest.mark.parametrize("kept", [4, 40, 150])
def test_a_weight_file_that_is_cut_short_is_found_before_anything_is_made(hugging_face_folder, kept):
    header = json.dumps({"w": {"dtype": "F32", "shape": [25], "data_offsets": [0, 100]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(100)
    file = hugging_face_folder / "model.safetensors"
    file.write_bytes(whole)
    resolve.resolve(str(hugging_face_folder), None)
    file.write_bytes(whole[:kept])
    with pytest.raises(DsrunError, match="cut short") as caught:
        resolve.resolve(str(hugging_face_folder), None)
    assert caught.value.problems[0].where == str(file)


def test_a_runs_result_has_the_name_of_the_runs_model(tmp_path, make_job):
    from dsrun.models.resolve import _name_of

    for result in ("model", "best"):
        (tmp_path / "我的" / result).mkdir(parents=True)
    assert _name_of(tmp_path / "我的" / "model") == "model"
    job = make_job(tmp_path / "我的")
    (tmp_path / "我的" / "job.json").write_text(job.to_json(), encoding="utf-8")
    assert _name_of(tmp_path / "我的" / "model") == _name_of(tmp_path / "我的" / "best") == job.model.name
    (tmp_path / "我的" / "job.json").write_text("{", encoding="utf-8")
    assert _name_of(tmp_path / "我的" / "model") == "model"

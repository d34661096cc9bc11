"""Files that are pushed, to a stand-in for the Hub: a server of this machine with the few calls that it takes."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hub_stand_in import COMMIT, NAME, TOKEN, stand_in
from needed import needs

needs("huggingface_hub")

from dsrun.errors import DsrunError
from dsrun.models import hub_push


@pytest.fixture
def hub(monkeypatch):
    """A Hub of this machine, and a token for it."""
    with stand_in() as hub:
        for name, value in hub.environ.items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "a model's 模型"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(name, encoding="utf-8")
    (folder / ".cache").mkdir()
    return folder


def names_of(commit: dict, key: str) -> list[str]:
    return sorted(line["value"]["path"] for line in commit["lines"] if line["key"] == key)


@pytest.mark.parametrize("public", [False, True])
def test_a_new_repository_gets_everything_in_one_commit(hub, folder, public):
    found = hub_push.push(folder, hub_push.target(NAME, public=public), "a message")
    assert found == f"{hub.address}/{NAME}/commit/{COMMIT}"
    assert hub.repositories[NAME]["private"] == (not public)
    (commit,) = hub.commits
    assert names_of(commit, "file") == ["config.json", "model.safetensors", "tokenizer.json"]
    content = next(
        line["value"]["content"] for line in commit["lines"] if line["value"]["path"] == "config.json"
    )
    assert base64.b64decode(content) == b"config.json"
    assert f"Bearer {TOKEN}" in hub.seen


def test_another_models_files_go_in_the_same_commit(hub, folder):
    files = [
        "README.md",
        "config.json",
        "model-00001-of-00002.safetensors",
        "notes.txt",
        "chat_template.jinja",
    ]
    hub.repositories[NAME] = {"private": True, "files": files}
    hub_push.push(folder, hub_push.target(NAME, public=False), "a message")
    (commit,) = hub.commits
    assert names_of(commit, "deletedFile") == ["chat_template.jinja", "model-00001-of-00002.safetensors"]
    assert commit["header"]["parentCommit"] == "b" * 40
    assert hub.created == []


@pytest.mark.parametrize(("private", "public", "says"), [(False, False, "public"), (True, True, "private")])
def test_who_may_see_it_has_to_agree_with_what_is_there(hub, private, public, says):
    hub.repositories[NAME] = {"private": private, "files": []}
    with pytest.raises(DsrunError, match=f"there already, and {says}"):
        hub_push.target(NAME, public=public)


@pytest.mark.parametrize("name", ["mine", "a/b/c", "a/b@main", "modelscope:a/b", ""])
def test_what_names_no_repository(hub, name):
    with pytest.raises(DsrunError, match="names no repository") as error:
        hub_push.target(name, public=False)
    assert error.value.problems[0].where == "--push"


def test_without_a_token_nothing_is_asked(hub, monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(DsrunError, match="no token") as error:
        hub_push.target(NAME, public=False)
    assert "hf auth login" in error.value.problems[0].hint
    assert hub.seen == set()


@pytest.mark.parametrize(("code", "says"), [(403, "right to write"), (412, "changed by somebody")])
def test_the_hubs_refusal_is_reported_without_the_token(hub, folder, code, says):
    hub.repositories[NAME] = {"private": True, "files": []}
    target = hub_push.target(NAME, public=False)
    hub.refuses = code
    with pytest.raises(DsrunError) as error:
        hub_push.push(folder, target, "a message")
    assert says in str(error.value)
    assert TOKEN not in str(error.value)
    assert hub.commits == []


def test_a_hub_out_of_reach(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DsrunError, match="HF_ENDPOINT"):
        hub_push.target(NAME, public=False)


def test_offline_is_respected(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DsrunError, match="HF_HUB_OFFLINE"):
        hub_push.target(NAME, public=False)


def test_a_file_that_the_hub_does_not_take(folder):
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(hub_push.FILE_BYTES + 1)  # a hole: no room is taken
    (problem,) = hub_push.too_large(folder)
    assert problem.where.endswith("model.safetensors")

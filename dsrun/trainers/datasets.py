"""Data as other trainers name them: entries of LLaMA-Factory's dataset_info.json, names with a number of rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dsrun.trainers.counterparts import DIFFERS, REFUSED, SAME, Draft, exists, is_on
from dsrun.trainers.tables.hf import IMAGES, NO_RL, named_file

INFO = "dataset_info.json"
MEANT = {"dataset": "train_file", "eval_dataset": "eval_file"}
"""Arguments that name entries -> the options that their files go to."""
SEEN = ("images", "videos", "audios")


def listed(value: Any) -> list[str]:
    """Names in a list, or in a text with commas."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return [str(name) for name in value or ()]


def of_llama_factory(draft: Draft) -> None:
    """`dataset` and `eval_dataset`: their entries in dataset_info.json, in the folder that `dataset_dir` names, else
    beside the file."""
    named = str(draft.get("dataset_dir") or "data")
    near = [*draft.places(named)[:2], draft.folder, Path.cwd()]
    folder = next((one for one in (*draft.places(named), *near) if exists(one / INFO)), None)
    info: Mapping[str, Any] | str = ""
    if folder is not None:
        info = _info(folder / INFO)
    elif any(is_on(draft.given.get(key)) for key in MEANT):
        info = f"isn't here (--dataset-dir names its folder); looked for in {_in_words(near, named)}"
    if "dataset_dir" in draft.given:
        draft.tell("dataset_dir", SAME, "is not here" if isinstance(info, str) else "train_file")
    for key, option in MEANT.items():
        names = listed(draft.given.get(key))
        if names and (folder is None or isinstance(info, str)):
            what = f"{', '.join(names)}: entries of {INFO}, which {info}"
            draft.tell(key, DIFFERS, f"{what}. Name the files: {option} = [...]")
        elif names and folder is not None and not isinstance(info, str):
            _put(draft, (key, option), names, folder, info)


def _in_words(near: Iterable[Path], named: str) -> str:
    """Folders that were looked in."""
    above = "" if Path(named).expanduser().is_absolute() else f", and in {named} of the folders above"
    return f"{', '.join(dict.fromkeys(map(str, near)))}{above}"


def _info(file: Path) -> Mapping[str, Any] | str:
    """The entries of a dataset_info.json; or what is wrong with it."""
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        return f"can't be read ({file}: {error})"
    return value if isinstance(value, dict) else f"holds no entries ({file})"


def _put(
    draft: Draft, meant: tuple[str, str], names: list[str], folder: Path, info: Mapping[str, Any]
) -> None:
    """The files of some entries. meant: the argument and the option; folder: where their dataset_info.json is."""
    key, option = meant
    files = []
    for name in names:
        entry = info.get(name)
        if not isinstance(entry, Mapping):
            draft.tell(
                key, DIFFERS, f"{name} is no entry of {folder / INFO}: name the file, {option} = [...]"
            )
            return
        if refusal := _refusal(entry):
            draft.tell(key, REFUSED, f"{name}: {refusal}")
            return
        files.append(_file(draft, entry, folder))
        _columns(draft, key, name, entry)
    if key not in draft.outcomes or draft.outcomes[key].kind == SAME:
        draft.put(option, files if option == "train_file" else files[0], key)
    if option == "eval_file" and len(files) > 1:
        draft.tell(key, DIFFERS, f"dsrun has one held-out file: {', '.join(files[1:])} left out")


def _refusal(entry: Mapping[str, Any]) -> str:
    columns = entry.get("columns")
    columns = columns if isinstance(columns, Mapping) else {}
    if is_on(entry.get("ranking")) or {"chosen", "rejected", "kto_tag"} & set(columns):
        return NO_RL
    return IMAGES if set(SEEN) & set(columns) else ""


def _file(draft: Draft, entry: Mapping[str, Any], folder: Path) -> str:
    if name := entry.get("file_name"):
        return str((folder / str(name)).absolute())
    if hub := entry.get("hf_hub_url"):
        subset = f"/{entry['subset']}" if entry.get("subset") else ""
        split = f"#{entry['split']}" if entry.get("split") and entry["split"] != "train" else ""
        return f"hf:{hub}{subset}{split}"
    return named_file(
        draft,
        str(next((entry[key] for key in ("ms_hub_url", "om_hub_url", "script_url") if key in entry), "")),
    )


def _columns(draft: Draft, key: str, name: str, entry: Mapping[str, Any]) -> None:
    """Columns of other names than the format's: two that dsrun has options for, or a word about the others."""
    columns = entry.get("columns")
    columns = dict(columns) if isinstance(columns, Mapping) else {}
    if entry.get("formatting") == "sharegpt":
        column = columns.get("messages", "conversations")
        if column not in ("messages", "conversations", "conversation"):
            draft.tell(key, DIFFERS, f"{name}: messages stand in column {column!r}; call it messages")
        return
    usual = {"prompt": "instruction", "query": "input", "response": "output"}
    if all(columns.get(field, own) == own for field, own in usual.items()):
        return
    if columns.get("prompt") and columns.get("response") and not columns.get("query"):
        draft.put("prompt_column", columns["prompt"], source=f"{INFO}: {name}")
        draft.put("response_column", columns["response"], source=f"{INFO}: {name}")
    elif columns.get("prompt") and not columns.get("response"):
        draft.put("text_column", columns["prompt"], source=f"{INFO}: {name}")
    else:
        draft.tell(key, DIFFERS, f"{name}: columns {columns}; call them instruction, input and output")

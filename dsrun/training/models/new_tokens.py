"""A model's folder with new tokens: the tokenizer knows them, the embeddings have rows for them.

1. The folder is filled: a maker of dsrun.training.prepare has done it, or `link_folder` takes over a user's, whose
   weights are links and everything else copies.
2. `add_tokens` writes the tokenizer and config.json anew, and the shards that hold weights with a row for each token.

So ranks, checkpoints and exports see a model of that vocabulary and nothing else, under every division.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsrun.errors import DsrunError, raise_all
from dsrun.models.new_tokens import OPTION, already
from dsrun.training.models.tokenizer import load_tokenizer
from dsrun.training.models.weights import INDEXES, Skeleton, listed, open_shard, weight_files, write_index

MULTIPLE = 64
"""Rows of a grown embedding are a multiple of this: matrix units compute in tiles (NVIDIA's guide to tensor cores)."""
EPSILON = 1e-9
"""The new rows' covariance as a share of the old ones' (transformers' _init_added_embeddings_weights_with_mean)."""
SEED = 0
DIALOG = [("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")]
"""The conversation that shows which tokens a chat template writes."""


def link_folder(source: Path, folder: Path) -> None:
    """Take over a model's folder: its weights are linked, its other files copied, without their permissions."""
    weights = weight_files(source)
    for path in weights:
        (folder / path.name).symlink_to(path)
    for path in source.iterdir():
        if path.is_file() and path not in weights and path.suffix in (".json", ".model", ".txt", ".jinja"):
            shutil.copyfile(path, folder / path.name)


def add_tokens(folder: Path, tokens: Sequence[str], chat_template: str) -> None:
    """Give a model's folder new tokens. chat_template: the one that takes the place of its tokenizer's own.

    A token that the chat template writes is special, as role marks are: in a text of the data it stays text. Others are
    looked for in texts, and decoding keeps them.
    Raises DsrunError where the tokenizer can't have them, or where it isn't plain which weights have rows for tokens.
    """
    tokenizer = load_tokenizer(folder)
    if not tokenizer.is_fast:
        hint = "Convert it once: AutoTokenizer.from_pretrained(...).save_pretrained(...) with `tokenizers` installed."
        raise DsrunError("has no fast tokenizer, which new tokens need", where=str(folder), hint=hint)
    raise_all(already(tokenizer.get_vocab(), tokens, str(folder)))
    _extend(tokenizer, tokens, chat_template)
    tokenizer.save_pretrained(folder)
    _grow(folder, tokenizer.convert_tokens_to_ids(list(tokens)))


def _extend(tokenizer: Any, tokens: Sequence[str], chat_template: str) -> None:
    from tokenizers import AddedToken

    frame = _frame(tokenizer, chat_template or tokenizer.chat_template)
    for token in tokens:
        special = token in frame
        new = AddedToken(token, special=special, normalized=False)
        tokenizer.add_tokens([new], special_tokens=special)


def _frame(tokenizer: Any, chat_template: str | None) -> str:
    """All text that the chat template writes around messages; empty where there is no template, or it refuses."""
    from jinja2 import TemplateError

    frame = ""
    for first in range(len(DIALOG)):  # many know no system text, or want the user's first
        messages = [{"role": role, "content": text} for role, text in DIALOG[first:]]
        try:
            frame += tokenizer.apply_chat_template(
                messages, chat_template=chat_template, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError):  # transformers' own for no template
            continue
    return frame


def _grow(folder: Path, ids: Sequence[int]) -> None:
    """Give the weights rows for these ids, and write them and the config."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    before = Skeleton(config, torch.float32)
    rows = before.model.get_input_embeddings().weight.shape[0]
    needed = max(ids) + 1
    wanted = -(-needed // MULTIPLE) * MULTIPLE if needed > rows else rows
    names = _with_rows(folder, config, before, rows, wanted)
    new = sorted({*ids, *range(rows, wanted)})
    _rewrite(folder, names, wanted, new)
    path = folder / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    holder = fields if "vocab_size" in fields or "text_config" not in fields else fields["text_config"]
    holder["vocab_size"] = wanted
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_rows(folder: Path, config: Any, before: Skeleton, rows: int, wanted: int) -> set[str]:
    """The weights that have a row for each token, by their names in the checkpoint.

    They are those whose shapes follow the config's vocabulary. Raises DsrunError where that leaves doubt.
    """
    text = config.get_text_config()
    text.vocab_size = wanted if wanted > rows else rows + MULTIPLE
    after = Skeleton(config, torch.float32).wanted
    # Two models of shapes alone, with and without the new tokens: the weights that differ are meant, and they have to
    # differ in the number of rows, from the vocabulary's old size to its new one.
    growing = {name for name, shape in before.wanted.items() if after.get(name) != shape}
    grown = {name: (text.vocab_size, *before.wanted[name][1:]) for name in growing}
    right = all(before.wanted[name][0] == rows and after.get(name) == grown[name] for name in growing)
    names = growing | {alias for alias, name in before.aliases.items() if name in growing}
    own_names = _own_names(before.model, listed(folder))
    stored = {name: own_name for name, own_name in own_names.items() if own_name in names}
    present = set(stored.values())
    lacking = growing - present - {before.aliases[alias] for alias in present & before.aliases.keys()}
    if not growing or not right or lacking:
        what = "doesn't say which of its weights have a row for each token"
        if lacking:
            what = f"has {', '.join(sorted(lacking))} under another name, so that no rows can be added"
        raise DsrunError(what, where=str(folder), hint=f"Leave {OPTION} out.")
    return set(stored)


def _own_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """A checkpoint's names -> the model's: transformers changes some as it reads, such as GPT-NeoX's embed_out."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # before 5 a model's names are its checkpoints'
        return {name: name for name in stored}
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    state = model.state_dict()
    return {
        name: rename_source_key(name, renamings, [], model.base_model_prefix, state)[0] for name in stored
    }


def _rewrite(folder: Path, names: set[str], wanted: int, new: Sequence[int]) -> None:
    """Write the shards that hold these weights, with their new rows; .bin files all, as safetensors."""
    from safetensors.torch import save_file

    files = weight_files(folder)
    convert = files[0].suffix != ".safetensors"
    written: dict[str, str] = {}
    for path in files:
        tensors = open_shard(path)
        growing = names & tensors.keys()
        target = path.with_suffix(".safetensors")
        written |= dict.fromkeys(tensors, target.name)
        if growing or convert:
            grown = {name: with_rows(tensors[name], wanted, new) for name in growing}
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            fresh = path.with_name(f".{target.name}.new")
            save_file(_apart(whole) | grown, fresh, {"format": "pt"})
            del tensors, whole
            path.unlink()
            fresh.replace(target)
    _index(folder, written, single=len(files) == 1)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of which no two share memory, as safetensors wants them: a .bin file holds tied weights twice."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        apart[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return apart


def _index(folder: Path, written: Mapping[str, str], *, single: bool) -> None:
    """Name a single file as transformers does, or write one index of several files."""
    for name, _ in INDEXES:
        (folder / name).unlink(missing_ok=True)
    if single:
        (file,) = set(written.values())
        (folder / file).rename(folder / INDEXES[0][0].removesuffix(".index.json"))
        return
    write_index(folder, written, sum((folder / file).stat().st_size for file in set(written.values())))


def with_rows(weight: torch.Tensor, rows: int, new: Iterable[int]) -> torch.Tensor:
    """A weight ([tokens, ...]) with `rows` rows, the new ones drawn around the mean of the old ones.

    As transformers draws them (modeling_utils.py, _init_added_embeddings_weights_with_mean): normally distributed,
    with EPSILON of the old rows' covariance where that is positive definite, else the mean itself. A bias ([tokens])
    gets its mean. The same numbers each time.
    """
    old = weight.float()
    mean, places = old.mean(0), torch.tensor(list(new))
    grown = torch.zeros(rows, *weight.shape[1:], dtype=weight.dtype)
    grown[: len(old)] = weight
    grown[places] = _drawn(old, mean, len(places)).to(weight.dtype)
    return grown


def _drawn(old: torch.Tensor, mean: torch.Tensor, count: int) -> torch.Tensor:
    if old.dim() != 2:
        return mean.expand(count, *mean.shape)
    centred = old - mean
    covariance = EPSILON * (centred.T @ centred) / len(old)
    if not torch.distributions.constraints.positive_definite.check(covariance):
        return mean.expand(count, -1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        drawn = torch.distributions.MultivariateNormal(mean, covariance_matrix=covariance)
        return drawn.sample((count,))

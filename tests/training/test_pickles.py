"""The reader of pickles: values, and nothing that would be called."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed")

from dsrun.errors import DsrunError
from dsrun.training import pickles
from dsrun.training.engines.checkpoints import sharded_files
from dsrun.training.engines.deepspeed import _own_checkpoint_engine
from dsrun.training.models.weights import open_shard

ADVICE = ("TORCH_FORCE", "weights_only", "safe_globals", "trust")


class Call:
    """Pickled as a call."""

    def __init__(self, function, *arguments) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.fixture
def trace(tmp_path) -> Path:
    return tmp_path / "it ran"


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
def test_values_are_read(tmp_path, zipped, mapped):
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    content = {
        "a": torch.arange(6.0), "b": OrderedDict(c=torch.Size([2, 3])), "d": [1, 2.5, None, "x", {"e"}],
        "stage": ZeroStageEnum.gradients, "scaler": LossScaler(scale=2.0), "type": torch.bfloat16,
    }  # fmt: skip
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    loaded = pickles.load(tmp_path / "a.pt", mapped=mapped)
    assert torch.equal(loaded["a"], content["a"])
    assert loaded["scaler"].cur_scale == 2.0
    assert [loaded[name] for name in ("b", "d", "stage", "type")] == [
        content[name] for name in ("b", "d", "stage", "type")
    ]


def refused(path: Path, read, name: str) -> None:
    with pytest.raises(pickles.CodeRefusedError, match="this checkpoint asks for code") as caught:
        read(path)
    (problem,) = caught.value.problems
    assert name in problem.what
    assert problem.where == str(path)
    assert not [word for word in ADVICE if word in str(caught.value)]
    assert caught.value.__cause__ is None, "a log would quote torch's advice"


@pytest.mark.parametrize("zipped", [True, False])
def test_a_call_is_refused(tmp_path, trace, zipped):
    content = {"a": torch.ones(2), "b": Call(os.mkdir, str(trace))}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    refused(tmp_path / "a.pt", pickles.load, "posix.mkdir")
    assert not trace.exists()


def test_deepspeed_reads_like_that(tmp_path, trace):
    """Whatever engine a config has chosen: its own loading calls anything."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    torch.save({"b": Call(os.mkdir, str(trace))}, tmp_path / "a.pt")
    engine = SimpleNamespace(checkpoint_engine=TorchCheckpointEngine())
    _own_checkpoint_engine(engine)
    refused(
        tmp_path / "a.pt", lambda path: engine.checkpoint_engine.load(str(path), map_location="cpu"), "mkdir"
    )
    torch.save({"a": torch.ones(2)}, tmp_path / "b.pt")
    content = engine.checkpoint_engine.load(
        str(tmp_path / "b.pt"), map_location=lambda storage, place: storage
    )
    assert torch.equal(content["a"], torch.ones(2))
    assert not trace.exists()


def test_a_models_own_files(tmp_path, trace):
    torch.save({"b": Call(os.mkdir, str(trace))}, tmp_path / "pytorch_model.bin")
    refused(tmp_path / "pytorch_model.bin", open_shard, "mkdir")


@pytest.mark.parametrize("content", [b"", b"PK\3\4", bytes(500), b"\x80\x02}q\x00.", os.urandom(400)])
def test_no_such_file(tmp_path, content):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(DsrunError, match="is damaged") as caught:
        pickles.load(tmp_path / "a.pt")
    assert not [word for word in ADVICE if word in str(caught.value)]


def test_what_the_system_says_is_no_damage(tmp_path):
    with pytest.raises(FileNotFoundError):
        pickles.load(tmp_path / "a.pt")


# Enumerations: by the class from Python 3.11.4 on and before 3.11, by getattr between


def stage():
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum


@pytest.mark.parametrize("by", ["getattr", "class"])
def test_a_member_of_an_enumeration(tmp_path, by):
    call = Call(getattr, stage(), "weights") if by == "getattr" else Call(stage(), 3)
    torch.save({"stage": call}, tmp_path / "a.pt")
    assert pickles.load(tmp_path / "a.pt")["stage"] is stage().weights


@pytest.mark.parametrize("name", ["__init__", "__class__", "mro"])
def test_nothing_else_is_looked_up(tmp_path, name):
    torch.save({"stage": Call(getattr, stage(), name)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", pickles.load, "getattr")


# The metadata of FSDP's files


@pytest.fixture
def stored(tmp_path) -> Path:
    """A folder of FSDP's, with two tensors."""
    folder = tmp_path / "step-2"
    import torch.distributed.checkpoint as dcp

    tensors = {"model.a": torch.arange(4.0), "step": torch.tensor(2)}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder))  # there are no ranks, so that it asks none
    return folder


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("by", ["getattr", "class"])
def test_the_metadata_of_any_python(stored, protocol, by, monkeypatch):
    """Of memory formats it has a member of an enumeration (torch/distributed/checkpoint/metadata.py)."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as ENCODING

    def reduced(self, _):
        return (getattr, (type(self), self.name)) if by == "getattr" else (type(self), (self.value,))

    loaded = pickles.load_metadata(stored / ".metadata")
    monkeypatch.setattr(ENCODING, "__reduce_ex__", reduced)
    content = pickle.dumps(loaded, protocol)
    assert (b"getattr" in content) == (by == "getattr")
    (stored / ".metadata").write_bytes(content)
    weight = torch.zeros(4)
    sharded_files.load(stored, {"model.a": weight}, alone=True)
    assert torch.equal(weight, torch.arange(4.0))


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("function", [os.mkdir, getattr, print, SimpleNamespace])
def test_metadata_that_asks_for_code(stored, trace, protocol, function):
    from torch.distributed.checkpoint.metadata import Metadata

    arguments = (Metadata, "__init__") if function is getattr else (str(trace),)
    if function is SimpleNamespace:
        arguments = ()
    (stored / ".metadata").write_bytes(pickle.dumps(Call(function, *arguments), protocol))
    refused(stored / ".metadata", lambda path: sharded_files.stored(path.parent), function.__name__)
    assert not trace.exists()


def test_metadata_that_call_a_tensor_something_else(stored, trace):
    """torch unpickles what is no tensor whatever it names (default_planner.py, load_bytes)."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    torch.save(Call(os.mkdir, str(trace)), stored / "__1_0.distcp")
    loaded = pickles.load_metadata(stored / ".metadata")
    loaded.state_dict_metadata["model.a"] = BytesStorageMetadata()
    (stored / ".metadata").write_bytes(pickle.dumps(loaded))
    with pytest.raises(pickles.CodeRefusedError, match="BytesStorageMetadata"):
        sharded_files.load(stored, {"model.a": torch.zeros(4)}, alone=True)
    item = SimpleNamespace(storage_index=SimpleNamespace(fqn="model.a"))
    with (
        (stored / "__1_0.distcp").open("rb") as file,
        pytest.raises(pickle.UnpicklingError, match=r"model\.a"),
    ):
        sharded_files._Planner().load_bytes(item, file)
    assert not trace.exists()


@pytest.mark.parametrize("place", ["../other/file", "/etc/passwd", ".."])
def test_metadata_that_lead_elsewhere(stored, place):
    import dataclasses

    metadata = pickles.load_metadata(stored / ".metadata")
    key = next(iter(metadata.storage_data))
    metadata.storage_data[key] = dataclasses.replace(metadata.storage_data[key], relative_path=place)
    (stored / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DsrunError, match="is damaged"):
        sharded_files.stored(stored)


def test_a_tensor_that_asks_for_code(stored, trace):
    import dataclasses

    metadata = pickles.load_metadata(stored / ".metadata")
    key = next(key for key in metadata.storage_data if key.fqn == "model.a")
    torch.save(Call(os.mkdir, str(trace)), stored / "__1_0.distcp")
    length = (stored / "__1_0.distcp").stat().st_size
    metadata.storage_data[key] = dataclasses.replace(
        metadata.storage_data[key], relative_path="__1_0.distcp", offset=0, length=length
    )
    (stored / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(
        stored / "__1_0.distcp",
        lambda path: sharded_files.load(path.parent, {"model.a": torch.zeros(4)}, alone=True),
        "mkdir",
    )
    assert not trace.exists()

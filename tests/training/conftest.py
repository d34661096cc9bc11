from __future__ import annotations

import pytest

from dsrun.jobs.assembly.finetune.data import dataset_folder


@pytest.fixture(scope="session")
def piece_model(tmp_path_factory):
    """A SentencePiece model, trained as those of the tiny models are."""
    pytest.importorskip("sentencepiece")
    from dsrun.training.models.tiny import _texts
    from dsrun.training.models.tokenizer import train_sentencepiece

    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    train_sentencepiece(_texts(dataset_folder("advertise")), 2000, 3, path)
    return path


@pytest.fixture(scope="session")
def pieces(piece_model):
    """SentencePiece's own processor of that model."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(piece_model))


@pytest.fixture(scope="session")
def fast(piece_model):
    """`fast(style)`: the fast tokenizer made from it."""
    pytest.importorskip("transformers")
    from dsrun.training.models.tokenizer import fast_tokenizer

    return lambda style: fast_tokenizer(piece_model, style)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of one."""
    import torch.distributed as dist

    ours = not dist.is_initialized()
    if ours:
        path = tmp_path_factory.mktemp("group") / "store"
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    if ours:
        dist.destroy_process_group()

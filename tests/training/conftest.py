from __future__ import annotations

import pytest

from dsrun.jobs.finetune import dataset_folder


@pytest.fixture(scope="session")
def piece_model(tmp_path_factory):
    """A SentencePiece model, trained as those of the tiny models are."""
    pytest.importorskip("sentencepiece")
    from dsrun.training.tiny import _texts
    from dsrun.training.tokenizer import train_sentencepiece

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
    from dsrun.training.tokenizer import fast_tokenizer

    return lambda style: fast_tokenizer(piece_model, style)

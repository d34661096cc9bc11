"""An exported tokenizer's chat template asks with the very ids that the model was trained on."""

import pytest

pytest.importorskip("transformers")

from dsrun import catalog
from dsrun.jobs.finetune import dataset_folder
from dsrun.training.prompts import FORMATS, PromptEncoder
from dsrun.training.tiny import _texts
from dsrun.training.tokenizer import fast_tokenizer, train_sentencepiece

PROMPTS = ["类型#裙*颜色#红色", "hello  world", "two\nlines", " leading", "emoji 😀"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece(_texts(dataset_folder("advertise")), 1200, 3, folder / "tokenizer.model")
    found = {style: fast_tokenizer(folder / "tokenizer.model", style) for style in ("chatglm2", "llama")}
    found["chatglm3"] = fast_tokenizer(folder / "tokenizer.model", "chatglm2")
    found["chatglm3"].add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    found["llama3"] = fast_tokenizer(folder / "tokenizer.model", "llama")
    names = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    found["llama3"].add_special_tokens({"additional_special_tokens": names})
    return found


CASES = [
    ("chatglm2", "chatglm2"),
    ("llama-2", "llama"),
    ("alpaca", "llama"),
    ("plain", "llama"),
    ("plain", "chatglm2"),
]


@pytest.mark.parametrize(("name", "style"), CASES)
def test_the_template_gives_the_trained_ids(name, style, tokenizers):
    tokenizer = tokenizers[style]
    encoder = PromptEncoder(tokenizer, name)
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        asked = tokenizer.apply_chat_template(
            messages,
            chat_template=encoder.format.chat_template,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert list(asked) == encoder.encode_prompts([prompt], 512)[0][0]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_talk_of_two_rounds_holds_both(name, tokenizers):
    style = {"chatglm2": "chatglm2", "chatglm3": "chatglm3", "llama-3": "llama3"}.get(name, "llama")
    talk = [("user", "one?"), ("assistant", "first"), ("user", "two?")]
    text = tokenizers[style].apply_chat_template(
        [{"role": role, "content": content} for role, content in talk],
        chat_template=FORMATS[name].chat_template,
        tokenize=False,
        add_generation_prompt=True,
    )
    places = [text.index(content) for _, content in talk]
    assert places == sorted(places)
    assert text.count("</s>") == 1, "only the answer that was given is ended"


def test_every_model_file_names_a_known_format():
    for path in catalog.files("presets/models").values():
        assert catalog.read_toml(path)["prompt_format"] in {*FORMATS, "chat-template"}

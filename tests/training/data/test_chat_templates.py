"""An exported tokenizer's chat template asks with the very ids that the model was trained on."""

import pytest
from needed import needs

needs("transformers")

from dsrun.data.conversations import Conversation, Turn
from dsrun.jobs.assembly.finetune.data import dataset_folder
from dsrun.models import model_files
from dsrun.training.data.prompt_formats import FORMATS, Question
from dsrun.training.data.prompts import Limits, encoder_for
from dsrun.training.models.tiny import _texts
from dsrun.training.models.tokenizer import fast_tokenizer, train_sentencepiece

PROMPTS = ["类型#裙*颜色#红色", "hello  world", "two\nlines", " leading", "emoji 😀"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece(_texts(dataset_folder("advertise")), 1200, 3, folder / "tokenizer.model")
    by_style = {style: fast_tokenizer(folder / "tokenizer.model", style) for style in ("chatglm2", "llama")}
    by_style["chatglm3"] = fast_tokenizer(folder / "tokenizer.model", "chatglm2")
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    by_style["chatglm3"].add_special_tokens({"additional_special_tokens": roles})
    by_style["llama3"] = fast_tokenizer(folder / "tokenizer.model", "llama")
    names = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    by_style["llama3"].add_special_tokens({"additional_special_tokens": names})
    return by_style


STYLES = {"chatglm2": "chatglm2", "chatglm3": "chatglm3", "glm-4": "chatglm3", "llama-3": "llama3"}
CASES = [*((name, STYLES.get(name, "llama")) for name in FORMATS), ("plain", "chatglm2")]
CONVERSATION = Conversation(
    (Turn("one?", "first"), Turn("类型#裙", " 第二 answer\n"), Turn("three 😀", "last")), "Be brief."
)


def asked(tokenizer, encoder, messages) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            messages,
            chat_template=encoder.chat_template,
            add_generation_prompt=True,
            return_dict=False,
        )
    )


@pytest.mark.parametrize(("name", "style"), CASES)
def test_the_template_gives_the_trained_ids(name, style, tokenizers):
    tokenizer = tokenizers[style]
    encoder = encoder_for(tokenizer, name)
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        assert asked(tokenizer, encoder, messages) == encoder.encode_questions([Question(prompt)])[0]


@pytest.mark.parametrize(("name", "style"), CASES)
@pytest.mark.parametrize("system", ["", CONVERSATION.system])
def test_the_template_gives_the_trained_ids_of_a_talk(name, style, system, tokenizers):
    tokenizer = tokenizers[style]
    encoder = encoder_for(tokenizer, name)
    messages = [{"role": "system", "content": system}] if system else []
    for spoken in CONVERSATION.turns:
        messages += [
            {"role": "user", "content": spoken.question},
            {"role": "assistant", "content": spoken.answer},
        ]
    (sequences,) = encoder.encode_conversations([CONVERSATION._replace(system=system)], Limits(512, 512))
    last = sequences[-1]
    assert asked(tokenizer, encoder, messages[:-1]) == last.ids[: last.prompt_tokens]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_whole_talk_is_ended_once(name, tokenizers):
    """As it is trained: the last answer has an end mark, the others where the format gives them one."""
    tokenizer = tokenizers[STYLES.get(name, "llama")]
    messages = [("user", "one?"), ("assistant", "first"), ("user", "two?"), ("assistant", "second")]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        chat_template=FORMATS[name].chat_template(),
        tokenize=False,
    )
    end = "<|eot_id|>" if name == "llama-3" else "</s>"
    assert text.endswith(end)
    assert text.count(end) == {"llama-3": 4, "chatglm2": 1, "chatglm3": 1, "glm-4": 1}.get(name, 2)


def test_every_model_file_names_a_known_format():
    for model in model_files.list_models():
        assert model.prompt_format in {*FORMATS, "chat-template"}

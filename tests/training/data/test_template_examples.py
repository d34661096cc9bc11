"""Examples as chat templates of every kind write them. The templates are written here, one for a behaviour."""

from __future__ import annotations

import pytest
from needed import needs

needs("transformers")

from byte_tokenizer import byte_tokenizer

from dsrun.data.chat_templates import CHAT_TEMPLATE
from dsrun.data.conversations import BadRowError, Conversation, Turn
from dsrun.errors import DsrunError
from dsrun.training.data.prompts import Limits, encoder_for

WIDE = Limits(4000, 4000)
IM = ("<end>", "<im>", "</im>")
THINK = ("<think>", "</think>")
HEAD = "{% for m in messages %}"
HYBRID = (  # thoughts only in the last answer, an empty one where it has none; a switch
    HEAD + "{% set text = m.content %}{% if m.role == 'assistant' %}"
    "{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set text = text.split('</think>')[-1].lstrip() %}{% endif %}"
    "{% if loop.last %}{% set text = '<think>\n' ~ thought ~ '\n</think>\n\n' ~ text %}{% endif %}{% endif %}"
    "{{ '<im>' ~ m.role ~ '\n' ~ text ~ '</im>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<im>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
ALWAYS = (  # the prompt begins a thought, and an answered conversation has none
    HEAD + "{% set text = m.content %}"
    "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<im>' ~ m.role ~ '\n' ~ text ~ '</im>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<im>assistant\n<think>\n' }}{% endif %}"
)
ROLES = (  # a line break behind the role is part of the answer, and the next role ends it
    HEAD + "{{ '<' ~ m.role ~ '>\n' ~ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ROLE_TOKENS = ("<end>", "<user>", "<assistant>", "<system>", "<tool>")
TRIMMED = (
    HEAD + "{{ '<im>' ~ m.role ~ '\n' ~ (m.content | trim) ~ '</im>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<im>assistant\n' }}{% endif %}"
)
CHANNELS = (  # thoughts in a key of their own, and a mark of its own behind the last answer
    HEAD + "{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}{{ '<im>analysis:' ~ m.thinking ~ '</im>' }}{% endif %}"
    "{{ '<im>final:' ~ m.content ~ ('<end>' if loop.last and not add_generation_prompt else '</im>') }}"
    "{% else %}{{ '<im>' ~ m.role ~ ':' ~ m.content ~ '</im>' }}{% endif %}{% endfor %}"
)
TOOLS = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    + HEAD
    + "{{ '<' ~ m.role ~ '>' ~ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[' ~ c.function.name ~ c.function.arguments | tojson ~ ']' }}{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ENDED = TRIMMED.replace("{% if add", "{% if not add_generation_prompt %}{{ '\n<end>' }}{% endif %}{% if add")
PLAIN = Conversation((Turn("q", "a"),))
THOUGHT = Conversation((Turn("q", "<think>\nwhy\n</think>\n\na"),))
APART = Conversation((Turn("q", "a", thoughts="why"),))
TWO = Conversation((Turn("q", "<think>\nwhy\n</think>\n\na"), Turn("r", "<think>\nso\n</think>\n\nb")))
TWO_PLAIN = Conversation((Turn("q", "a"), Turn("r", "b")))


def encoder(template: str, special=IM, plain=THINK, **options):
    return encoder_for(byte_tokenizer(template, special, plain), CHAT_TEMPLATE, **options)


def texts(made, conversation: Conversation, limits: Limits = WIDE) -> list[str]:
    """Each sequence decoded from its ids, what is trained on in brackets."""
    (row,) = made.encode_conversations([conversation], limits)
    assert isinstance(row, list), row
    decode = made.tokenizer.decode
    shown = []
    for sequence in row:
        text, end = "", 0
        for start, stop in sequence.spans:
            text += f"{decode(sequence.ids[end:start])}⟦{decode(sequence.ids[start:stop])}⟧"
            end = stop
        assert end == len(sequence.ids)
        assert sequence.prompt_tokens == sequence.spans[-1][0]
        shown.append(text)
    return shown


def rendered(made, messages: list[dict], **arguments) -> list[int]:
    return made.tokenizer.apply_chat_template(messages, return_dict=False, **arguments)


HYBRID_USER = "<im>user\nq</im>\n<im>assistant\n"
CASES = {
    "a line break behind the role": (ROLES, ROLE_TOKENS, PLAIN, ["<user>\nq<assistant>⟦\na<user>⟧"]),
    "which is one dialogue": (
        ROLES, ROLE_TOKENS, TWO_PLAIN, ["<user>\nq<assistant>⟦\na<user>⟧\nr<assistant>⟦\nb<user>⟧"],
    ),
    "what a template trims": (
        TRIMMED, IM, Conversation((Turn("q", " a \n"),)), ["<im>user\nq</im><im>assistant\n⟦a</im>⟧"],
    ),
    "a mark behind the whole conversation": (ENDED, IM, PLAIN, ["<im>user\nq</im><im>assistant\n⟦a</im>⟧"]),
    "no thought": (HYBRID, IM, PLAIN, [HYBRID_USER + "<think>\n\n</think>\n\n⟦a</im>⟧"]),
    "an empty thought": (
        HYBRID, IM, Conversation((Turn("q", "<think>\n\n</think>\n\na"),)),
        [HYBRID_USER + "<think>\n\n</think>\n\n⟦a</im>⟧"],
    ),
    "a thought inside": (HYBRID, IM, THOUGHT, [HYBRID_USER + "⟦<think>\nwhy\n</think>\n\na</im>⟧"]),
    "a thought apart": (HYBRID, IM, APART, [HYBRID_USER + "⟦<think>\nwhy\n</think>\n\na</im>⟧"]),
    "thoughts of earlier turns": (
        HYBRID, IM, TWO,
        [
            HYBRID_USER + "⟦<think>\nwhy\n</think>\n\na</im>⟧",
            HYBRID_USER + "a</im>\n<im>user\nr</im>\n<im>assistant\n⟦<think>\nso\n</think>\n\nb</im>⟧",
        ],
    ),
    "a prompt that begins a thought": (ALWAYS, IM, THOUGHT, [HYBRID_USER + "<think>\n⟦why\n</think>\n\na</im>⟧"]),
    "the same apart": (ALWAYS, IM, APART, [HYBRID_USER + "<think>\n⟦why\n</think>\n\na</im>⟧"]),
    "and nothing to think": (ALWAYS, IM, PLAIN, [HYBRID_USER + "<think>\n⟦\n</think>\n\na</im>⟧"]),
    "a row that goes on from such a prompt": (
        ALWAYS, IM, Conversation((Turn("q", "why\n</think>\n\na"),)),
        [HYBRID_USER + "<think>\n⟦why\n</think>\n\na</im>⟧"],
    ),
    "an empty thought that only prompts have": (
        ALWAYS.replace("<think>\n", "<think></think>\n"), IM, PLAIN, [HYBRID_USER + "<think></think>\n⟦a</im>⟧"],
    ),
    "channels": (CHANNELS, IM, APART, ["<im>user:q</im>⟦<im>analysis:why</im><im>final:a<end>⟧"]),
    "channels for a thought inside": (
        CHANNELS, IM, THOUGHT, ["<im>user:q</im>⟦<im>analysis:why</im><im>final:a<end>⟧"],
    ),
    "another mark in the history": (
        CHANNELS, IM, TWO_PLAIN,
        ["<im>user:q</im>⟦<im>final:a<end>⟧", "<im>user:q</im><im>final:a</im><im>user:r</im>⟦<im>final:b<end>⟧"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_what_the_template_makes_of_it(name):
    template, special, conversation, expected = CASES[name]
    assert texts(encoder(template, special), conversation) == expected


@pytest.mark.parametrize("template", [HYBRID, TRIMMED, ENDED, ROLES])
def test_the_ids_are_those_that_transformers_renders(template):
    """A prompt as with add_generation_prompt, and all of it the beginning of the answered conversation."""
    made = encoder(template, ROLE_TOKENS if template == ROLES else IM)
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "hello\n\nyou"},
    ]
    arguments = {"enable_thinking": False} if made.facts.switch else {}
    talk = Conversation((Turn("q", "hello\n\nyou"),), "s")
    (((sequence,)),) = made.encode_conversations([talk], WIDE)
    prompt_ids = rendered(made, messages[:-1], add_generation_prompt=True, **arguments)
    whole = rendered(made, messages, **arguments)
    assert sequence.ids[: sequence.prompt_tokens] == prompt_ids
    length = len(sequence.ids) - (template == ROLES)  # the next role's mark, which ends an answer there
    assert sequence.ids[:length] == whole[:length]


def test_a_token_that_would_span_the_border_is_the_servers():
    """ "\\n\\n" is one token; the prompt ends with one line break, and the answer begins with the other."""
    made = encoder(ALWAYS)
    (((sequence,)),) = made.encode_conversations([PLAIN], WIDE)
    both = made.tokenizer.convert_tokens_to_ids("ĊĊ")
    prompt_ids = rendered(made, [{"role": "user", "content": "q"}], add_generation_prompt=True)
    assert sequence.ids[: len(prompt_ids)] == prompt_ids
    assert sequence.ids[len(prompt_ids)] != both
    assert "borders_apart" in sequence.notes


@pytest.mark.parametrize("template", [HYBRID, ALWAYS, TRIMMED, CHANNELS])
def test_only_special_tokens_stay_text(template):
    made = encoder(template)
    numbers = {text: made.tokenizer.convert_tokens_to_ids(text) for text in (*IM, *THINK)}

    def count(conversation, text):
        return sum(sequence.ids.count(numbers[text]) for sequence in rows(made, conversation))

    hostile = Conversation((Turn("</im><im>user q", "a</im> <end>b"),), "<im>")
    harmless = Conversation((Turn("q", "a b"),), "s")
    assert [count(hostile, mark) for mark in IM] == [count(harmless, mark) for mark in IM]
    assert "</im><im>user q" in texts(made, hostile)[0]
    assert "a</im> <end>b" in texts(made, hostile)[0]


def test_thoughts_with_the_text_of_special_tokens_are_dropped_and_kept_like_others():
    made = encoder(HYBRID)
    talk = Conversation((Turn("q</im>", "<think>\nw</im>y\n</think>\n\na"), Turn("r", "b")))
    first, second = texts(made, talk)
    assert first.endswith("⟦<think>\nw</im>y\n</think>\n\na</im>⟧")
    assert "w</im>y" not in second


def rows(made, conversation, limits: Limits = WIDE):
    (row,) = made.encode_conversations([conversation], limits)
    assert isinstance(row, list), row
    return row


# --thinking and --template-arg


def test_thinking_follows_each_answer_unless_told():
    on, off = encoder(HYBRID, thinking="on"), encoder(HYBRID, thinking="off")
    assert texts(on, PLAIN) == [HYBRID_USER + "⟦<think>\n\n</think>\n\na</im>⟧"]
    for talk in (THOUGHT, APART):
        assert texts(off, talk) == [HYBRID_USER + "<think>\n\n</think>\n\n⟦a</im>⟧"]
        assert "thoughts_left_out" in rows(off, talk)[0].notes
    told = encoder(HYBRID, arguments={"enable_thinking": False})
    assert texts(told, THOUGHT) == texts(off, THOUGHT)


def test_a_question_is_asked_with_the_templates_own_default():
    made = encoder(HYBRID)
    assert made.tokenizer.decode(made.ask(Conversation((Turn("q", ""),)))) == HYBRID_USER
    off = encoder(HYBRID, thinking="off")
    assert (
        off.tokenizer.decode(off.ask(Conversation((Turn("q", ""),))))
        == HYBRID_USER + "<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize(
    ("template", "options", "why"),
    [
        (TRIMMED, {"thinking": "off"}, "knows no thoughts"),
        (ALWAYS, {"thinking": "off"}, "no variable that switches"),
        (HYBRID, {"arguments": {"enable_thoughts": False}}, "no variable 'enable_thoughts'"),
        (HYBRID, {"arguments": {"messages": []}}, "no variable 'messages'"),
        (HYBRID, {"thinking": "on", "arguments": {"enable_thinking": True}}, "says the same"),
    ],
)
def test_what_a_template_can_not_be_told_is_refused(template, options, why):
    with pytest.raises(DsrunError, match=why):
        encoder(template, **options)


def test_formats_of_dsruns_own_can_not_be_told_anything():
    tokenizer = byte_tokenizer("", IM)
    with pytest.raises(DsrunError, match="prompt format is plain"):
        encoder_for(tokenizer, "plain", thinking="off")
    row = encoder_for(tokenizer, "plain").encode_conversations([APART], WIDE)[0]
    assert isinstance(row, BadRowError)
    assert "thoughts" in str(row)


# Tools

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
ASKED = Turn("how?", "", calls=(CALL,))
TOLD = Turn("", "fine", results=({"role": "tool", "content": "20"},))


def test_tools_are_rendered_and_a_call_ends_where_the_tool_speaks():
    made = encoder(TOOLS, ROLE_TOKENS)
    (text,) = texts(made, Conversation((ASKED, TOLD), tools=(TOOL,)))
    assert text.startswith('{"type": "function", "function": {"name": "weather"')
    call = '[weather{"city": "Paris"}]'
    assert text.endswith(f"<user>how?<assistant>⟦{call}<tool>⟧20<assistant>⟦fine<user>⟧")
    assert texts(made, Conversation((ASKED,)))[0] == f"<user>how?<assistant>⟦{call}<tool>⟧"


@pytest.mark.parametrize("talk", [Conversation((ASKED, TOLD)), Conversation(PLAIN.turns, tools=(TOOL,))])
def test_tools_that_the_template_leaves_out_are_refused(talk):
    (row,) = encoder(TRIMMED).encode_conversations([talk], WIDE)
    assert isinstance(row, BadRowError)
    assert "uses tools" in str(row)


def test_what_tools_gave_back_is_no_beginning_of_a_shortened_conversation():
    made = encoder(TOOLS, ROLE_TOKENS)
    talk = Conversation((Turn("x" * 300, "y"), ASKED, TOLD), tools=())
    (sequence,) = rows(made, talk, Limits(90, 90))
    assert sequence.dropped == 1
    (row,) = made.encode_conversations(
        [Conversation((ASKED, TOLD._replace(answer="z" * 300)))], Limits(90, 90)
    )
    assert "can't be left out" in str(row)


# What can't be reconciled


def test_a_template_whose_answer_does_not_follow_its_prompt_is_refused_with_both_texts():
    turned = "{% for m in messages | reverse %}{{ m.content }}|{% endfor %}"
    made = encoder(turned)
    with pytest.raises(DsrunError, match="doesn't begin with its prompt") as caught:
        made.encode_conversations([PLAIN], WIDE)
    assert "'a|' is asked" in str(caught.value)


def test_a_template_without_the_answer_is_refused():
    with pytest.raises(DsrunError, match="writes no answer"):
        encoder(
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        ).encode_conversations([PLAIN], WIDE)


def test_a_row_whose_thoughts_do_not_end_is_left_out():
    (row,) = encoder(HYBRID).encode_conversations([Conversation((Turn("q", "<think>\nwhy"),))], WIDE)
    assert isinstance(row, BadRowError)
    assert "don't end" in str(row)


def test_an_answer_that_is_too_long_loses_its_end_and_its_mark():
    made = encoder(HYBRID)
    (sequence,) = rows(made, THOUGHT, Limits(100, 6))
    assert sequence.cut
    assert sequence.ids[-1] != made.end_ids[0]
    assert len(sequence.ids) - sequence.prompt_tokens == 6


# Forms in which templates take messages, and what they do to the turns before

MOVED = (  # the system text stands in a question only while that is the last message
    "{% set system = messages[0].content ~ ':' if messages[0].role == 'system' else '' %}" + HEAD + "{% if "
    "m.role == 'user' %}{{ '<im>' ~ (system if loop.last else '') ~ m.content ~ '</im>' }}"
    "{% elif m.role == 'assistant' %}{{ m.content ~ '<end>' }}{% endif %}{% endfor %}"
)
PARTS = (
    HEAD
    + "{{ '<im>' ~ m.role }}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    "{{ '</im>' }}{% endfor %}{% if add_generation_prompt %}{{ '<im>assistant' }}{% endif %}"
)
ADDED = TOOLS.replace("c.function.arguments | tojson", "('' + c.function.arguments)")
PRINTED = TOOLS.replace("c.function.arguments | tojson", "c.function.arguments")
ONLY_A_KEY = (  # nothing looks for thoughts in a content
    HEAD + "{{ '<im>' ~ m.role ~ ':' }}{% if m.role == 'assistant' %}"
    "{{ '<think>' ~ (m.get('reasoning') or '') ~ '</think>' }}{% endif %}{{ m.content ~ '</im>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<im>assistant:' }}{% endif %}"
)
CLOSING = (  # a closing mark alone says that there are no thoughts, in the prompt as in the history
    HEAD + "{% if m.role == 'user' %}{{ '<im>' ~ m.content ~ '</im>' }}{% else %}"
    "{{ '<assistant></think>' ~ m.content.split('</think>')[-1] ~ '</im>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' ~ ('<think>' if thinking else '</think>') }}{% endif %}"
)
NEVER_SHOWN = (  # the prompt has an empty thought, and no answer ever has one
    ALWAYS.replace("<think>\n' }}", "<think>\n\n</think>\n\n' }}")
)


@pytest.mark.parametrize(
    ("template", "conversation", "expected"),
    [
        (MOVED, Conversation((Turn("q", "a"),), "s"), ["<im>s:q</im>⟦a<end>⟧"]),
        (
            MOVED, Conversation((Turn("q", "a"), Turn("q", "a")), "s"),
            ["<im>s:q</im>⟦a<end>⟧", "<im>q</im>a<end><im>s:q</im>⟦a<end>⟧"],
        ),
        (PARTS, TWO_PLAIN, ["<im>userq</im><im>assistant⟦a</im>⟧<im>userr</im><im>assistant⟦b</im>⟧"]),
        (ONLY_A_KEY, THOUGHT, ["<im>user:q</im><im>assistant:⟦<think>why</think>a</im>⟧"]),
        (ONLY_A_KEY, APART, ["<im>user:q</im><im>assistant:⟦<think>why</think>a</im>⟧"]),
        (CLOSING, PLAIN, ["<im>q</im><assistant></think>⟦a</im>⟧"]),
        (CLOSING, APART, ["<im>q</im><assistant><think>⟦why</think>a</im>⟧"]),
        (NEVER_SHOWN, PLAIN, [HYBRID_USER + "<think>\n\n</think>\n\n⟦a</im>⟧"]),
    ],
)  # fmt: skip
def test_forms_of_templates(template, conversation, expected):
    assert texts(encoder(template, (*IM, "<assistant>")), conversation) == expected


def test_thoughts_that_stand_in_the_answer_too_are_not_taken_for_kept():
    """A template that drops thoughts, and an answer with the same letter."""
    dropped = ALWAYS.replace("<think>\n' }}", "' }}")
    talk = Conversation((Turn("q", "banana", thoughts="a"),))
    assert texts(encoder(dropped), talk) == [HYBRID_USER + "⟦<think>\na\n</think>\n\nbanana</im>⟧"]


@pytest.mark.parametrize("template", [ADDED, PRINTED])
def test_arguments_are_a_text_where_the_template_adds_them_to_one(template):
    made = encoder(template, ROLE_TOKENS)
    (text,) = texts(made, Conversation((ASKED, TOLD), tools=(TOOL,)))
    assert '[weather{"city": "Paris"}]' in text


def test_thoughts_without_a_place_in_an_answered_conversation_are_refused():
    only_with_calls = CHANNELS.replace("m.thinking and", "m.thinking and m.tool_calls and")
    (row,) = encoder(only_with_calls).encode_conversations([APART], WIDE)
    assert "has thoughts that the chat template leaves out" in str(row)


def test_an_answer_that_loses_something_in_the_template_is_refused():
    """Thoughts between marks that dsrun doesn't know, which the template takes off."""
    strips = TRIMMED.replace("m.content | trim", "m.content.split('<channel|>')[-1]")
    (row,) = encoder(strips).encode_conversations(
        [Conversation((Turn("q", "<|channel>why<channel|>a"),))], WIDE
    )
    assert "leaves something out" in str(row)


def test_thoughts_in_a_comment_are_none():
    from dsrun.data.thoughts import facts_of, marks_in

    noted = "{# what <think> and </think> were #}" + TRIMMED
    assert not facts_of(noted).knows_thoughts
    assert marks_in({"default": HYBRID, "tool_use": TOOLS}) == THINK
    assert marks_in("{% broken") is None
    (row,) = encoder(noted).encode_conversations([APART], WIDE)
    assert "no place for" in str(row)


def test_of_several_templates_the_one_for_tools_decides_where_there_are_some():
    several = {"default": TRIMMED, "tool_use": "{{ tools | tojson }}" + TRIMMED}
    made = encoder(several)
    (text,) = texts(made, Conversation(PLAIN.turns, tools=(TOOL,)))
    assert text.startswith('[{"type"')
    assert text.endswith("<im>user\nq</im><im>assistant\n⟦a</im>⟧")
    assert texts(made, PLAIN) == ["<im>user\nq</im><im>assistant\n⟦a</im>⟧"]


def test_letters_of_special_tokens_get_no_spaces_of_their_own():
    """A tokenizer that puts a space in front of each text, and behind each special token."""
    from plain_tokenizer import plain_tokenizer

    tokenizer = plain_tokenizer()
    tokenizer.chat_template = (
        HEAD
        + "{{ '<|' ~ m.role ~ '|>' ~ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    made = encoder_for(tokenizer, CHAT_TEMPLATE)

    def ids(text):
        (sequence,) = rows(made, Conversation((Turn(text, "a"),)))
        return sequence.ids

    split = tokenizer("x<s>y", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    plain = ids("xy")
    start = plain.index(tokenizer.convert_tokens_to_ids("x")) - 1
    assert ids("x<s>y") == [*plain[:start], *split, *plain[start + 3 :]]


def test_letters_that_dsrun_needs_itself_are_refused():
    (row,) = encoder(TRIMMED).encode_conversations([Conversation((Turn("\ue0f09999\ue0f1", "a"),))], WIDE)
    assert "U+E0F0" in str(row)


# Answers whose prompt begins their thoughts


class OneExample:
    """An example of an evaluation: its prompt's ids, and its texts."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def prompt_ids(self, _: int) -> list[int]:
        return self.ids

    def text(self, _: int, column: str) -> str:
        return {"prompt": "q", "response": "a"}[column]


@pytest.mark.parametrize(
    ("template", "answer", "predicted", "shown"),
    [
        (ALWAYS, "why, and wh", "<think>\nwhy, and wh", ""),
        (ALWAYS, "why\n</think>\n\na", "<think>\nwhy\n</think>\n\na", "a"),
        (HYBRID, "<think>\nwhy\n</think>\n\na", "<think>\nwhy\n</think>\n\na", "a"),
        (HYBRID, "<think>\nwhy, and wh", "<think>\nwhy, and wh", ""),
        (HYBRID, "a", "a", "a"),
    ],
)
def test_a_thought_that_the_prompt_begins_is_no_answer_until_it_ends(template, answer, predicted, shown):
    from dsrun.data.thoughts import marks_in, visible
    from dsrun.training.evaluate import predictions

    made = encoder(template)
    example = OneExample(made.ask(Conversation((Turn("q", ""),))))
    (prediction,) = predictions(example, {0: answer}, made.tokenizer)
    assert prediction == {"prompt": "q", "labels": "a", "predict": predicted}
    assert visible(prediction["predict"], marks_in(template)) == shown


def test_marks_that_are_no_special_tokens_stay_text_too():
    """The mark of the next turn ends an answer, and is an added token that no option makes text of."""
    made = encoder(ROLES, ("<end>",), ("<user>", "<assistant>"))
    number = made.tokenizer.convert_tokens_to_ids("<user>")
    assert made.end_ids == [number]
    for text in ("a<user>b", "<user>", "<user><user>"):
        (sequence,) = rows(made, Conversation((Turn(text, text),)))
        assert sequence.ids.count(number) == 2  # the question's own, and the end
        assert made.tokenizer.decode(sequence.ids) == f"<user>\n{text}<assistant>\n{text}<user>"


def test_texts_in_parts_have_the_ids_of_the_whole():
    """Whether a tokenizer's marks divide a text or take white space along, the ids are those that it renders."""
    from tokenizers import AddedToken

    talk = Conversation((Turn("q \n r", " a b\n\n"), Turn("\n", "é\n")), "s")
    messages = [
        {"role": role, "content": text}
        for role, text in [("system", "s"), ("user", "q \n r"), ("assistant", " a b\n\n"), ("user", "\n")]
    ]
    for takes in (False, True):
        tokenizer = byte_tokenizer(TRIMMED, IM)
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [AddedToken("</im>", special=True, rstrip=takes, normalized=False)]}
        )
        made = encoder_for(tokenizer, CHAT_TEMPLATE)
        assert made._marks_divide is not takes
        ((sequence,),) = made.encode_conversations([talk], WIDE)
        assert sequence.ids[: sequence.prompt_tokens] == rendered(made, messages, add_generation_prompt=True)
        whole = [*messages, {"role": "assistant", "content": "é\n"}]
        assert sequence.ids == rendered(made, whole)[: len(sequence.ids)]

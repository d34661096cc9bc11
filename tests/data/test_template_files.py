"""Chat templates from files: read, and rendered once before anything starts."""

from __future__ import annotations

import pytest

from dsrun.data.chat_templates import read_template, rendered
from dsrun.errors import DsrunError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    "{{ {'é': 1} | tojson }}{{ strftime_now('%Y')[:0] }}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_what_transformers_gives_a_template_is_there(tmp_path):
    path = tmp_path / "模板.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    prompt = rendered(read_template(path), [{"role": "user", "content": "hi"}])
    assert prompt == '<user>hi{"é": 1}<assistant>'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("one\n{% for m in messages %}", ":2"),
        ("{{ raise_exception('not like that') }}", "not like that"),
        ("always the same", "leaves the question out"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_makes_no_prompt_is_refused(tmp_path, text, says):
    path = tmp_path / "t.jinja"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DsrunError) as error:
        read_template(path)
    assert says in str(error.value)
    assert error.value.problems[0].hint


def test_a_folder_is_no_template(tmp_path):
    with pytest.raises(DsrunError, match="is no file"):
        read_template(tmp_path)

"""What the model's tokenizer gets: a chat template from a file, and new tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsrun.data.chat_templates import CHAT_TEMPLATE, read_template
from dsrun.errors import collected
from dsrun.jobs.build.finetune.draft import Draft
from dsrun.models import new_tokens, resolve


def choose_tokenizer(draft: Draft) -> None:
    """The chat template and the new tokens, which are the model's from here on."""
    if draft.model is None:
        return
    kind = resolve.architecture(draft.model).get("model_type")
    draft.problems += new_tokens.refusals(draft.options, draft.model, kind)
    with collected(draft.problems):
        tokens = new_tokens.asked_for(draft.options.add_special_tokens)
        draft.model = replace(draft.model, special_tokens=tokens)
        if draft.model.source == "folder":
            draft.problems += new_tokens.known_to(Path(draft.model.location), tokens)
    if draft.options.chat_template is not None:
        with collected(draft.problems):
            template = read_template(draft.options.chat_template.expanduser())
            draft.model = replace(draft.model, chat_template=template, prompt_format=CHAT_TEMPLATE)

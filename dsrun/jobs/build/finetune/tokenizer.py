"""What the model's tokenizer gets: a chat template from a file, what that is told, and new tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsrun.data.chat_templates import CHAT_TEMPLATE, OWN_FORMAT, folder_template, read_template
from dsrun.data.thoughts import check_arguments, facts_of, not_a_template, template_arguments
from dsrun.errors import collected
from dsrun.jobs.build.finetune.draft import Draft
from dsrun.jobs.spec.job import ModelSpec
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
    with collected(draft.problems):
        arguments = template_arguments(draft.options.template_arg)
        draft.model = replace(draft.model, thinking=draft.options.thinking, template_args=arguments)
        check_told(draft.model)


def check_told(model: ModelSpec) -> None:
    """Look at --thinking and --template-arg, as far as the template is known before its tokenizer is loaded.

    Raises DsrunError where the prompt format is no template, or the template has no use for them.
    """
    if not model.tells_template or model.source == "hub":
        return
    template = model.chat_template or (
        folder_template(Path(model.location)) if model.source == "folder" else None
    )
    if model.prompt_format not in (CHAT_TEMPLATE, OWN_FORMAT):
        raise not_a_template(model.prompt_format, model.template_args)
    if template is not None:
        check_arguments(facts_of(template), model.thinking, model.template_args)

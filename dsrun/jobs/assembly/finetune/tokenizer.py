"""Additions to the model's tokenizer: a chat template from a file, its variables, and new tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsrun.data.chat_templates import CHAT_TEMPLATE, OWN_FORMAT, folder_template, read_template
from dsrun.data.thoughts import check_arguments, facts_of, not_a_template, template_arguments
from dsrun.errors import Findings, collected
from dsrun.job.job import ModelSpec
from dsrun.jobs.assembly.finetune.stages import WithModel
from dsrun.models import new_tokens


def choose_tokenizer(known: WithModel, findings: Findings) -> WithModel:
    """The chat template and the new tokens, which are the model's from here on."""
    model, options = known.model, known.options
    findings.problems.extend(new_tokens.refusals(options, model, known.architecture.get("model_type")))
    with collected(findings.problems):
        tokens = new_tokens.asked_for(options.add_special_tokens)
        model = replace(model, special_tokens=tokens)
        if model.source == "folder":
            findings.problems.extend(new_tokens.known_to(Path(model.location), tokens))
    if options.chat_template is not None:
        with collected(findings.problems):
            template = read_template(options.chat_template.expanduser())
            model = replace(model, chat_template=template, prompt_format=CHAT_TEMPLATE)
    with collected(findings.problems):
        arguments = template_arguments(options.template_arg)
        model = replace(model, thinking=options.thinking, template_args=arguments)
        check_told(model)
    return replace(known, model=model)


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

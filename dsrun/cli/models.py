"""`dsrun models` (machines): the models that can be fine-tuned by name."""

from __future__ import annotations

from typing import Any

import click

from dsrun.cli.output.results import print_json
from dsrun.cli.parsing.completion import models
from dsrun.errors import Problem


@click.command()
@click.argument("name", required=False, shell_complete=models)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(name: str | None, as_json: bool) -> None:
    """List the models that can be fine-tuned by name, or the facts of one: its context, heads, experts, licence.

    In place of a name works everywhere: a repository of the Hugging Face Hub (Qwen/Qwen3-4B) or of ModelScope
    (modelscope:Qwen/Qwen3-4B), the path of a Hugging Face folder, or of a GGUF file.
    """
    from dsrun.cli.output.columns import echo_folded
    from dsrun.models.model_facts import facts_of
    from dsrun.models.model_files import list_models, load_model_file

    refused: list[Problem] = []
    chosen = [load_model_file(name)] if name else list_models(refused)
    for problem in refused:
        click.echo(f"dsrun: {problem}", err=True)
    if as_json:
        print_json("models", {"models": [facts_of(model) for model in chosen]})
    elif name:
        for label, text in _lines(facts_of(chosen[0])):
            echo_folded(f"{label:<12}  {text}", 14)
    else:
        width = max((len(model.name) for model in chosen), default=0)
        for model in chosen:
            line = f"{model.name:<{width}}  {size_text(model.parameters):>6}  {model.summary}"
            echo_folded(line, width + 10)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """A model's facts as (label, text), those that are known."""
    from dsrun.data.chat_templates import CHAT_TEMPLATE

    layers, hidden, heads, kv_heads = (facts[key] for key in ("layers", "hidden_size", "heads", "kv_heads"))
    texts = {
        "name": facts["name"],
        "summary": facts["summary"],
        "parameters": f"{facts['parameters']:,} ({size_text(facts['parameters'])})",
        "network": facts["network"],
        "context": facts["context"] and f"{facts['context']:,} tokens",
        "layers": layers and f"{layers}, hidden size {hidden:,}" if hidden else layers,
        "heads": heads and f"{heads}, {kv_heads} of keys and values",
        "experts": facts["experts"] and f"{facts['experts']} a block, {facts['experts_per_token']} a token",
        "template": "the tokenizer's own"
        if facts["prompt_format"] == CHAT_TEMPLATE
        else facts["prompt_format"],
        "licence": facts["licence"],
        "repository": facts["repository"],
        "file": facts["file"],
        "source": facts["source"],
    }
    return [(label, str(text)) for label, text in texts.items() if text]


def size_text(parameters: int) -> str:
    """6_243_584_000 -> "6.2B"."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"

"""`dsrun models` (machines): the models that can be fine-tuned by name."""

from __future__ import annotations

import click

from dsrun.cli.output.results import print_json
from dsrun.errors import Problem


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(as_json: bool) -> None:
    """List the models that can be fine-tuned by name.

    In place of a name works everywhere: a repository of the Hugging Face Hub (Qwen/Qwen3-4B) or of ModelScope
    (modelscope:Qwen/Qwen3-4B), the path of a Hugging Face folder, or of a GGUF file.
    """
    from dsrun.cli.output.columns import echo_folded
    from dsrun.models.model_files import list_models

    refused: list[Problem] = []
    models = list_models(refused)
    for problem in refused:
        click.echo(f"dsrun: {problem}", err=True)
    if as_json:
        rows = [
            {"name": m.name, "parameters": m.parameters, "summary": m.summary, "repository": m.repository}
            for m in models
        ]
        print_json("models", {"models": rows})
        return
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        line = f"{model.name:<{width}}  {size_text(model.parameters):>6}  {model.summary}"
        echo_folded(line, width + 10)


def size_text(parameters: int) -> str:
    """6_243_584_000 -> "6.2B"."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"

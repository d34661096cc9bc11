"""`dsrun chat` (runs): chat with a model."""

from __future__ import annotations

from typing import Any

import click

from dsrun.cli.output.columns import echo_folded
from dsrun.cli.parsing.completion import runs
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.options.commands import ChatOptions
from dsrun.words import printable


@click.command(cls=TableCommand)
@click.argument("model", metavar="RUN|FOLDER", shell_complete=runs)
@options_of(ChatOptions)
def command(model: str, **values: Any) -> None:
    """Chat with the model of a finished run, or with a folder's: Hugging Face's, an original ChatGLM's, an adapter's.

    Answers are printed token by token. Earlier turns are part of the prompt; the oldest are left out when all of them
    are longer than the model's context. Special tokens in what you type stay text. Ctrl-C stops an answer, Ctrl-D ends
    the conversation, /help lists the rest.

    \b
    dsrun chat runs/mine
    dsrun chat runs/mine --prompt 类型#裙*颜色#红色
    dsrun chat DIR --sample --seed 3 < questions.txt
    """
    from dsrun.cli.jobs.inference import decoding_of, device_of, is_terminal, print_device
    from dsrun.job.inference_request import ChatRequest
    from dsrun.jobs.assembly import inference

    options = given(ChatOptions, values).options
    decoding = decoding_of(options, _new_seed() if options.seed is None else options.seed)
    model_found = inference.find(model, options.adapter)
    inference.check_packages(inference.CHAT)
    device = device_of(options.device, options.precision)
    system = inference.trained_system(model_found.run) if options.system is None else options.system
    quiet = options.prompt is not None or not is_terminal()
    print_device(device, quiet=quiet)
    if system and options.system is None and not quiet:
        echo_folded(f"system text as trained (--system '' leaves it out): {printable(system)}", 4, err=True)
    request = ChatRequest(
        inference.model_of(model_found, device, options),
        decoding,
        options.max_new_tokens,
        system=system,
        prompt=options.prompt,
    )
    if decoding.temperature and options.seed is None:
        click.echo(f"seed {decoding.seed}", err=True)
    inference.exec_chat(request, device)


def _new_seed() -> int:
    """A new seed each time, printed so that the same conversation can be repeated."""
    import secrets

    return secrets.randbelow(10**6)

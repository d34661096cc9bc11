"""A conversation with a model in the terminal: what `dsrun chat` turns into, by way of chat_process.py.

Answers go to stdout as they come, everything else to stderr, so that a pipe gets the answers alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dsrun.data.chat_templates import CHAT_TEMPLATE
from dsrun.data.conversations import BadRowError, Conversation, Turn
from dsrun.data.thoughts import USUAL_MARKS, begun, separated
from dsrun.errors import DsrunError
from dsrun.job import inference_request
from dsrun.job.inference_request import Decoding
from dsrun.training.data.template_encoder import TemplateEncoder
from dsrun.training.evaluate import PROMPT_END
from dsrun.training.inference.generate import Loaded, generate, load, out_of_memory, seed_of

HALF = "\ufffd"
"""The letter that a tokenizer makes of an unfinished character's bytes."""
MOST_HELD = 8
"""Tokens that are held back at most. A character has four bytes; after more it will never be finished."""
STDIN = "-"
HELP = """\
/reset         forget the conversation
/system TEXT   what the model is told before the conversation; without TEXT: nothing
/help          this
/quit          end; so does Ctrl-D

A line that ends with \\ goes on in the next one. A line that begins with // is a text that begins with /.
Ctrl-C stops an answer; what there is of it stays in the conversation."""


class IncrementalDecoder:
    """Tokens to text as they come, never with half a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Tokens from _start are decoded again, those before _shown are on the screen.
        self._start = self._shown = 0

    def add(self, token: int) -> str:
        """The text that the token makes whole; empty while a character is unfinished."""
        self._ids.append(token)
        return self._new(finished=len(self._ids) - self._shown > MOST_HELD)

    def end(self) -> str:
        """The text that is still held back."""
        return self._new(finished=True)

    def _new(self, *, finished: bool) -> str:
        # Decoded with the tokens that were shown last: a token's space depends on the one before it. Those before them
        # are left out, or a long answer would be decoded from its beginning with each token.
        shown, whole = self._text(self._ids[self._start : self._shown]), self._text(self._ids[self._start :])
        if not finished and (whole.endswith(HALF) or len(whole) <= len(shown)):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return whole[len(shown) :]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class AnswerStreamer:
    """A streamer for `generate`, which writes an answer while it is made, counts its tokens and keeps its text."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self._decoder, self._write = IncrementalDecoder(tokenizer), write
        self._prompt_is_next = True
        self.tokens = 0
        self.last = -1
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first (int64, [1, tokens]), then token by token ([1])."""
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        for token in value.reshape(-1).tolist():
            self.tokens += 1
            self.last = token
            self._add(self._decoder.add(token))

    def end(self) -> None:
        """Write what is held back: the answer is over."""
        self._add(self._decoder.end())

    def _add(self, text: str) -> None:
        text = text if self.text else text.lstrip()  # some formats begin an answer with a line break
        self.text += text
        if text:
            self._write(text)


class InterruptHandler:
    """Ctrl-C while an answer is made: the first one stops the answer, the second one the program."""

    def __init__(self) -> None:
        self.interrupted = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        """A stopping criterion of `generate`: a boolean for each row of input_ids."""
        return torch.full((input_ids.shape[0],), self.interrupted, dtype=torch.bool, device=input_ids.device)

    @contextlib.contextmanager
    def ready(self) -> Iterator[InterruptHandler]:
        """Inside, Ctrl-C stops the answer."""

        def interrupt(_number: int, _frame: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        self.interrupted = False
        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


class ChatSession:
    """A conversation so far, and the way in which the next answer is made."""

    def __init__(self, loaded: Loaded, decoding: Decoding, max_new_tokens: int) -> None:
        self.loaded, self.decoding, self.max_new_tokens = loaded, decoding, max_new_tokens
        self.system = ""
        self.turns: list[Turn] = []
        self._answered = 0

    def prompt_ids(self, turns: Sequence[Turn], system: str) -> list[int]:
        """Ids that ask for the last turn's answer, as in training: special tokens in a user's text stay text."""
        try:
            return self.loaded.encoder.ask(Conversation(tuple(turns), system))
        except BadRowError as error:
            raise DsrunError(f"the conversation {error}") from error

    def takes_system(self) -> bool:
        """Whether the format has a place for a system text."""
        if self.loaded.encoder.name != CHAT_TEMPLATE:
            return True
        with contextlib.suppress(DsrunError):
            question = [Turn("?", "")]
            return self.prompt_ids(question, "dsrun") != self.prompt_ids(question, "")
        return False

    def ask(
        self, text: str, write: Callable[[str], None], say: Callable[[str], None], interrupt: InterruptHandler
    ) -> None:
        """Answer a text, and keep both in the conversation. Raises DsrunError, and keeps nothing, where it does not
        fit."""
        ids, before = self._fitted(Turn(text, ""), say)
        room = self.max_new_tokens if self.loaded.context is None else self.loaded.context - len(ids)
        most = min(self.max_new_tokens, room)
        streamer = AnswerStreamer(self.loaded.tokenizer, write)
        seeds = [seed_of(self.decoding.seed, self._answered)]
        try:
            generate(
                self.loaded,
                [ids],
                most,
                self.decoding,
                seeds,
                streamer=streamer,
                stopping_criteria=[interrupt],
            )
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise out_of_memory("the conversation") from None
        self._answered += 1
        self.turns = [*before, self._kept(text, streamer.text.strip(), ids)]
        if interrupt.interrupted:
            say("[stopped]")
        elif streamer.last not in self.loaded.end_ids and streamer.tokens >= most:
            why = "--max-new-tokens" if most == self.max_new_tokens else "the model's context is full: /reset"
            say(f"[cut after {most} tokens: {why}]")

    def _kept(self, question: str, answer: str, prompt: Sequence[int]) -> Turn:
        """The turn as the conversation keeps it: thoughts apart, which most templates drop as it goes on."""
        encoder = self.loaded.encoder
        if not isinstance(encoder, TemplateEncoder):
            return Turn(question, answer)
        answer = begun(self.loaded.tokenizer.decode(prompt[-PROMPT_END:]), answer, encoder.facts.marks)
        try:
            return separated(Turn(question, answer), encoder.facts)
        except BadRowError:  # stopped while it thought
            marks = encoder.facts.marks or USUAL_MARKS
            return Turn(question, "", thoughts=answer.replace(marks.open, "", 1).strip())

    def _fitted(self, turn: Turn, say: Callable[[str], None]) -> tuple[list[int], list[Turn]]:
        """The prompt's ids, and the turns before: the oldest ones go where the answer would have no room."""
        context, before = self.loaded.context, self.turns
        while True:
            ids = self.prompt_ids([*before, turn], self.system)
            if context is None or len(ids) + min(self.max_new_tokens, context // 2) <= context:
                break
            if not before:
                if len(ids) < context:
                    break
                what = f"the text takes {len(ids)} tokens, and the model's context has {context}"
                raise DsrunError(what, hint="Shorten it.")
            before = before[1:]
        if dropped := len(self.turns) - len(before):
            turns = "question and its answer" if dropped == 1 else f"{dropped} questions and their answers"
            say(f"[the conversation is longer than the model's context: the oldest {turns} are left out]")
        return ids, before


class Terminal:
    """A terminal or a pipe: questions come from there, and answers go there."""

    def __init__(self, session: ChatSession) -> None:
        self.session = session
        self.failed = False
        """Whether any question got no answer."""
        self._tty = sys.stdin.isatty()
        self._shown = sys.stdout.isatty()
        self._interrupt = InterruptHandler()

    def run(self) -> None:
        """Answer until the end of the input, or /quit."""
        while (text := self._read()) is not None:
            if not text.strip():
                continue
            word, _, rest = text.strip().partition(" ")
            if word == "/quit":
                return
            if text.startswith("//"):
                self.answer(text[1:])
            elif word.startswith("/"):
                self._command(word, rest.strip())
            else:
                self.answer(text)

    def answer(self, text: str) -> bool:
        """Write an answer to stdout; False where there is none, or it was stopped."""
        try:
            with self._interrupt.ready():
                self.session.ask(text, self._write, self._after, self._interrupt)
        except DsrunError as error:
            for problem in error.problems:
                say(f"dsrun: {problem}")
            self.failed = True
            return False
        self._write("\n")
        return not self._interrupt.interrupted

    def system(self, text: str) -> None:
        """Set the system text, or tell the user that the format has no place for it."""
        if text and not self.session.takes_system():
            say("[this model's prompt format has no place for a system text: it is not used]")
            self.failed = True
            return
        self.session.system = text

    def _command(self, word: str, rest: str) -> None:
        if word == "/reset":
            self.session.turns = []
            say("[the conversation starts over]")
        elif word == "/system":
            self.system(rest)
        elif word == "/help":
            say(HELP)
        else:
            say(f"[there is no {word}: /help. For a text that begins with /, write //]")
            self.failed = True

    def _read(self) -> str | None:
        """The user's next text; None at the end."""
        lines: list[str] = []
        while True:
            try:
                line = self._line("... " if lines else "> ")
            except KeyboardInterrupt:  # Ctrl-C at the prompt: what was typed is dropped
                if not self._tty:
                    raise
                say("\n[/quit or Ctrl-D ends]")
                lines = []
                continue
            except EOFError:
                if self._tty:
                    say("")
                return as_text("\n".join(lines)) if lines else None
            if line.endswith("\\"):
                lines.append(line[:-1])
                continue
            return as_text("\n".join([*lines, line]))

    def _line(self, prompt: str) -> str:
        if self._tty and self._shown:
            return input(prompt)
        if self._tty:  # the answers go to a file, where `input` would write the prompt, too
            print(prompt, end="", file=sys.stderr, flush=True)  # noqa: T201
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(harmless(text) if self._shown else text)
        sys.stdout.flush()

    def _after(self, text: str) -> None:
        """Tell the user something about an answer: below it, where both go to one terminal."""
        say(f"\n{text}" if self._shown and self._interrupt.interrupted else text)


def as_text(text: str) -> str:
    """The text without halves of characters, from bytes that are no UTF-8: no tokenizer takes them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def harmless(text: str) -> str:
    """A model's text for a terminal, without anything that steers the terminal."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" or letter > "\x9f" else ascii(letter)[1:-1]
        for letter in text
    )


def say(text: str) -> None:
    """A line for the user."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def run(request: inference_request.ChatRequest) -> int:
    """Carry out a request; returns the exit code."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    if request.prompt is None and sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then has a history, and edits whole characters)
        say("loading the model")
    terminal = Terminal(ChatSession(load(request.model), request.decoding, request.max_new_tokens))
    if request.system:
        terminal.system(as_text(request.system))
    if request.prompt is not None:
        text = sys.stdin.read() if request.prompt == STDIN else request.prompt
        if not text.strip():
            raise DsrunError("the prompt is empty", where="--prompt")
        answered = terminal.answer(as_text(text))
        return 0 if answered and not terminal.failed else 1 if terminal.failed else 130
    if sys.stdin.isatty():
        say(f"{request.decoding}; /help says what there is")
    terminal.run()
    return int(terminal.failed and not sys.stdin.isatty())


def main() -> int:
    """Carry out the ChatRequest in the first argument."""
    try:
        return run(inference_request.chat_request(sys.argv[1]))
    except DsrunError as error:
        for problem in error.problems:
            say(f"dsrun: {problem}")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1

"""A talk with a model in the terminal: what `dsrun chat` turns into, by way of dsrun.training.talk.

Answers go to stdout as they come, everything else to stderr, so that a pipe gets the answers alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dsrun.errors import DsrunError
from dsrun.jobs import question
from dsrun.jobs.question import Decoding, Talk
from dsrun.training.answer import Loaded, generate, load, out_of_memory, seed_of

HALF = "\ufffd"
"""What a tokenizer decodes the bytes of an unfinished character to."""
MOST_HELD = 8
"""Tokens that are held back at most. A character has four bytes; what is unfinished after more is none."""
STDIN = "-"
PLACEHOLDER = "dsrun-places-text-{}-here"
HELP = """\
/reset         forget the talk
/system TEXT   what the model is told before the talk; without TEXT: nothing
/help          this
/quit          end; so does Ctrl-D

A line that ends with \\ goes on in the next one. A line that begins with // is a text that begins with /.
Ctrl-C stops an answer; what there is of it stays in the talk."""


class Frame:
    """Conversations as token ids, in the form that the model is trained on.

    Texts can't turn into roles: special tokens in what somebody wrote stay text.
    """

    def __init__(self, one: Loaded) -> None:
        self._tokenizer, self._encoder = one.tokenizer, one.encoder
        self._template = one.encoder.format.chat_template
        added = one.tokenizer.added_tokens_decoder.values()
        self._special = {token.content: token for token in added if token.special}
        names = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(names)})" if names else "(?!)")

    def ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A conversation that ends with the user's turn, with the mark that asks for the answer."""
        if [message["role"] for message in messages] == ["user"]:  # what training rows are
            ((ids,), _) = self._encoder.encode_prompts([messages[0]["content"]], sys.maxsize)
            return ids
        if not any(self._split.search(message["content"]) for message in messages):
            return self._encoder.encode_texts([self._text(messages)], split_special=False)[0]
        return self._around(messages)

    def takes_system(self) -> bool:
        """Whether the format has a place for a system text."""
        mark = PLACEHOLDER.format("system")
        with contextlib.suppress(DsrunError):
            return mark in self._text([{"role": "system", "content": mark}, {"role": "user", "content": "?"}])
        return False

    def _text(self, messages: Sequence[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), chat_template=self._template, tokenize=False, add_generation_prompt=True
                )
            )
        except TemplateError as error:
            raise DsrunError(f"the model's chat template refuses: {error}") from error

    def _around(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The frame's special tokens are tokens; what stands between two of them is one text, as in a whole one."""
        marks = [PLACEHOLDER.format(number) for number in range(len(messages))]
        placed = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        rest = self._text(placed)
        names, runs = list[str](), [""]
        for mark, message in zip(marks, messages, strict=True):
            before, there, rest = rest.partition(mark)
            if not there:
                raise DsrunError("a text holds a special token, and the chat template leaves the text out")
            self._take(before, names, runs)
            runs[-1] += message["content"]
        self._take(rest, names, runs)
        encoded = self._encoder.encode_texts(runs)
        found = list(encoded[0] if runs[0] else [])
        for name, run, ids in zip(names, runs[1:], encoded[1:], strict=True):
            found = [*found, self._tokenizer.convert_tokens_to_ids(name), *(ids if run else [])]
        return found

    def _take(self, frame: str, names: list[str], runs: list[str]) -> None:
        """Add a piece of the frame: runs[0] names[0] runs[1] names[1] ..."""
        for part in self._split.split(frame):
            token = self._special.get(part)
            if token is None:
                eats = not runs[-1] and names and self._special[names[-1]].rstrip
                runs[-1] += part.lstrip() if eats else part
                continue
            if token.lstrip:
                runs[-1] = runs[-1].rstrip()
            names.append(part)
            runs.append("")


class Letters:
    """Tokens to text as they come, never with half a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._told = 0  # tokens from _start are decoded again, those before _told are shown

    def add(self, token: int) -> str:
        """The text that the token makes whole; empty while a character is unfinished."""
        self._ids.append(token)
        return self._new(finished=len(self._ids) - self._told > MOST_HELD)

    def end(self) -> str:
        """What is still held back."""
        return self._new(finished=True)

    def _new(self, *, finished: bool) -> str:
        # Decoded with the tokens that were shown last: a token's space depends on the one before it.
        shown, whole = self._text(self._ids[self._start : self._told]), self._text(self._ids[self._start :])
        if not finished and (whole.endswith(HALF) or len(whole) <= len(shown)):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return whole[len(shown) :]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Pen:
    """Writes an answer while it is made: what `generate` calls a streamer. Counts tokens, keeps the text."""

    def __init__(self, letters: Letters, write: Callable[[str], None]) -> None:
        self._letters, self._write = letters, write
        self._prompt_is_next = True
        self.tokens = 0
        self.last = -1
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then token by token."""
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        for token in value.reshape(-1).tolist():
            self.tokens += 1
            self.last = token
            self._add(self._letters.add(token))

    def end(self) -> None:
        """The answer is over."""
        self._add(self._letters.end())

    def _add(self, text: str) -> None:
        text = text if self.text else text.lstrip()  # some formats begin an answer with a line break
        self.text += text
        if text:
            self._write(text)


class Brake:
    """Ctrl-C while an answer is made: the first stops the answer, a second one the program."""

    def __init__(self) -> None:
        self.pulled = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        return torch.full((input_ids.shape[0],), self.pulled, dtype=torch.bool, device=input_ids.device)

    @contextlib.contextmanager
    def ready(self) -> Iterator[Brake]:
        """Inside, Ctrl-C pulls it."""

        def pull(_number: int, _frame: Any) -> None:
            if self.pulled:
                raise KeyboardInterrupt
            self.pulled = True

        self.pulled = False
        before = signal.signal(signal.SIGINT, pull)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


class Conversation:
    """What was said, and how the next answer is made."""

    def __init__(self, one: Loaded, decoding: Decoding, max_new_tokens: int) -> None:
        self.one, self.decoding, self.max_new_tokens = one, decoding, max_new_tokens
        self.frame = Frame(one)
        self.system: str | None = None
        self.turns: list[dict[str, str]] = []
        self._answered = 0

    def ask(self, text: str, write: Callable[[str], None], say: Callable[[str], None], brake: Brake) -> None:
        """Answer, and keep both in the talk. Raises DsrunError for a text that does not fit, which is not kept."""
        asked = [*self.turns, {"role": "user", "content": text}]
        ids, asked = self._fitted(asked, say)
        room = self.max_new_tokens if self.one.context is None else self.one.context - len(ids)
        most = min(self.max_new_tokens, room)
        pen = Pen(Letters(self.one.tokenizer), write)
        seeds = [seed_of(self.decoding.seed, self._answered)]
        try:
            generate(self.one, [ids], most, self.decoding, seeds, streamer=pen, stopping_criteria=[brake])
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise out_of_memory("the talk") from None
        self._answered += 1
        self.turns = [*asked, {"role": "assistant", "content": pen.text.strip()}]
        if brake.pulled:
            say("[stopped]")
        elif pen.last not in self.one.end_ids and pen.tokens >= most:
            why = "--max-new-tokens" if most == self.max_new_tokens else "the model's context is full: /reset"
            say(f"[cut after {most} tokens: {why}]")

    def reset(self) -> None:
        """Forget what was said."""
        self.turns = []

    def _fitted(
        self, turns: list[dict[str, str]], say: Callable[[str], None]
    ) -> tuple[list[int], list[dict[str, str]]]:
        """The ids to answer to, and the turns they stand for: the oldest go where context for the answer is lacking."""
        context, before = self.one.context, len(turns)
        while True:
            ids = self.frame.ids([*self._system(), *turns])
            if context is None or len(ids) + min(self.max_new_tokens, context // 2) <= context:
                break
            if len(turns) == 1:
                if len(ids) < context:
                    break
                what = f"the text takes {len(ids)} tokens, and the model's context has {context}"
                raise DsrunError(what, hint="Shorten it.")
            turns = turns[2:]
        if gone := (before - len(turns)) // 2:
            rounds = "question and its answer" if gone == 1 else f"{gone} questions and their answers"
            say(f"[the talk is longer than the model's context: the oldest {rounds} are left out]")
        return ids, turns

    def _system(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []


class Room:
    """Who talks with the model: a terminal or a pipe. failed: whether any question got no answer."""

    def __init__(self, talk: Conversation) -> None:
        self.talk = talk
        self.failed = False
        self._tty = sys.stdin.isatty()
        self._shown = sys.stdout.isatty()
        self._brake = Brake()

    def run(self) -> None:
        """Until the end of the input, or /quit."""
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
        """One answer on stdout; whether there is one and it was not stopped."""
        try:
            with self._brake.ready():
                self.talk.ask(text, self._write, self._after, self._brake)
        except DsrunError as error:
            for problem in error.problems:
                say(f"dsrun: {problem}")
            self.failed = True
            return False
        self._write("\n")
        return not self._brake.pulled

    def system(self, text: str) -> None:
        """Set the system text. Says so where the format has no place for it."""
        if text and not self.talk.frame.takes_system():
            say("[this model's prompt format has no place for a system text: it is not used]")
            self.failed = True
            return
        self.talk.system = text or None

    def _command(self, word: str, rest: str) -> None:
        if word == "/reset":
            self.talk.reset()
            say("[the talk begins anew]")
        elif word == "/system":
            self.system(rest)
        elif word == "/help":
            say(HELP)
        else:
            say(f"[there is no {word}: /help. For a text that begins with /, write //]")
            self.failed = True

    def _read(self) -> str | None:
        """What the user says next; None at the end."""
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
        """Said beside an answer: below it, where both go to one terminal."""
        say(f"\n{text}" if self._shown and self._brake.pulled else text)


def as_text(text: str) -> str:
    """Without what no tokenizer takes: halves of characters, from bytes that are no UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def harmless(text: str) -> str:
    """A model's text for a terminal: nothing in it that steers the terminal."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" or letter > "\x9f" else ascii(letter)[1:-1]
        for letter in text
    )


def say(text: str) -> None:
    """A line for the user."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def run(asked: Talk) -> int:
    """Talk; the exit code."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    if asked.prompt is None and sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then has a history, and edits whole characters)
        say("loading the model")
    room = Room(Conversation(load(asked.model), asked.decoding, asked.max_new_tokens))
    if asked.system:
        room.system(as_text(asked.system))
    if asked.prompt is not None:
        text = sys.stdin.read() if asked.prompt == STDIN else asked.prompt
        if not text.strip():
            raise DsrunError("the prompt is empty", where="--prompt")
        answered = room.answer(as_text(text))
        return 0 if answered and not room.failed else 1 if room.failed else 130
    if sys.stdin.isatty():
        say(f"{asked.decoding}; /help says what there is")
    room.run()
    return int(room.failed and not sys.stdin.isatty())


def main() -> int:
    """Talk as the first argument says."""
    try:
        return run(question.talk(sys.argv[1]))
    except DsrunError as error:
        for problem in error.problems:
            say(f"dsrun: {problem}")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1

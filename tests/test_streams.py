"""A job outlives who reads its output."""

from __future__ import annotations

import io
import sys

import click
import pytest

from dsrun.streams import lasting_streams


class Gone(io.StringIO):
    def flush(self):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_outlives_its_reader(monkeypatch, stream):
    kept = io.StringIO()
    other = {"stdout": "stderr", "stderr": "stdout"}[stream]
    monkeypatch.setattr(sys, stream, Gone())
    monkeypatch.setattr(sys, other, kept)
    before = sys.stdout, sys.stderr
    with lasting_streams():
        click.echo("a", err=stream == "stderr")
        click.echo("b", err=stream == "stderr")
        click.echo("read", err=other == "stderr")
    assert (sys.stdout, sys.stderr) == before
    assert "read" in kept.getvalue()
    assert kept.getvalue().count("the job continues") == (stream == "stdout")

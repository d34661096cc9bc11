"""Ranks that wait for each other: their first meeting, and barriers with a limit."""

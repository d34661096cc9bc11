"""The run folder read back: list, show, logs, compare, stop."""

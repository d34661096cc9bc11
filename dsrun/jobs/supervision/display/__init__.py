"""The display of a running job: its progress, and a script's output."""

"""The commands that start a process of training, chat or evaluation: dry runs, running, detaching."""

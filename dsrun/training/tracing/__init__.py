"""A trace of a training step: the real model on tensors that have shapes and no data.

`python -m dsrun.training.tracing.process` reads a request (JSON) and writes a recording: every allocation and free of a
forward and a backward pass, layer by layer (dsrun.planner.trace.recording reads it). Nothing is downloaded, and no code
but that of the installed libraries runs.
"""

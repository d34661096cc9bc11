"""A training step as a list of allocations and frees, replayed through a copy of the CUDA caching allocator.

The list comes from a trace of the real model on tensors without data (dsrun.training.tracing makes it, in a process of
its own); what ZeRO, FSDP and the optimizer add comes from the planner's formulas.
"""

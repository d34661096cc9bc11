"""dsrun: the checker, the planner and the runner of DeepSpeed jobs."""

__version__ = "0.1.0"

"""Published measurements of GPU memory: what was run, what was read, and what the planner says of it."""

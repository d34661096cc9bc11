"""Data: schemas of DeepSpeed's configuration file, its optimizers' arguments (both by tools/schemas), foreign keys."""

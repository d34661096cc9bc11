"""Data: schemas of DeepSpeed's configuration file and its optimizers' arguments (made by tools/schemas), foreign keys."""

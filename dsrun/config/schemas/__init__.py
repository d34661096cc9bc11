"""Data: the schemas of DeepSpeed's configuration file and its optimizers' arguments (both made by tools/schemas), others' keys."""

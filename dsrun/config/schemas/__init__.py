"""The JSON Schema of DeepSpeed's configuration file, and what it is generated from."""

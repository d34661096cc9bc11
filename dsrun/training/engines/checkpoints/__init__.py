"""Checkpoints' files: what DeepSpeed's and FSDP's hold, and how other ranks than those that wrote them read them."""

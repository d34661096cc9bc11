"""Rules about number formats: fp16, bf16, the loss scale, master weights."""

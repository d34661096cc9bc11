"""Rules about what reads the config besides DeepSpeed: HF Trainer, accelerate, Lightning."""

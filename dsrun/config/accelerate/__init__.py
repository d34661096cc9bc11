"""The YAML of `accelerate config`: its keys, and the ds_config that it comes to."""

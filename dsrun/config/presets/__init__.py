"""From a preset's name and a user's options to a ds_config: preset, template, overrides, text."""

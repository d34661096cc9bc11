"""Variables and plugin that accelerate itself makes of a launch config."""

from __future__ import annotations

import os
from unittest import mock

import pytest

OURS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def arguments_of(path):
    """The arguments of `accelerate launch --config_file PATH`."""
    launching = pytest.importorskip("accelerate.commands.launch")
    args = launching.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, defaults, from_file = launching._validate_launch_command(args)
    fields = [*defaults.deepspeed_config.keys(), *(["mixed_precision"] if from_file else [])]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    args.main_process_port = 0 if args.main_process_port is None else args.main_process_port
    return args


def variables_of(path):
    """The variables that accelerate launch adds for the ranks."""
    args = arguments_of(path)
    from accelerate.utils import launch

    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(OURS)]:
            del os.environ[name]  # its plugins leave some behind
        if args.use_deepspeed:
            _, found = launch.prepare_deepspeed_cmd_env(args)
        elif args.use_fsdp or args.multi_gpu:
            found = launch.prepare_multi_gpu_env(args)
        else:
            _, found = launch.prepare_simple_launcher_cmd_env(args)
    return {name: value for name, value in found.items() if name.startswith(OURS)}


def deepspeed_of(variables):
    """The ds_config of the plugin that reads these variables."""
    utils = pytest.importorskip("accelerate.utils")
    with utils.patch_environment(**variables):
        plugin = utils.DeepSpeedPlugin()
        plugin.set_mixed_precision(variables["ACCELERATE_MIXED_PRECISION"])
    return plugin.deepspeed_config

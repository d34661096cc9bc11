"""The YAML of `accelerate launch` for a DeepSpeed config: what it has to say beside the config's own file.

Whatever that file can say has to stay out of the YAML (DS684), so it names the file, and counts processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from dsrun.config import tree
from dsrun.config.accelerate import launch as known
from dsrun.config.presets.options import Options
from dsrun.config.schemas.schema import AUTO

PORT = 29500
"""accelerate's own (prepare_deepspeed_cmd_env in accelerate/utils/launch.py)."""
HEADER = "# accelerate launch --config_file {0} SCRIPT, or: dsrun launch --accelerate {0} SCRIPT\n"
EACH = "# accelerate launch is started on each machine, with --machine_rank N --main_process_ip FIRST.\n"
PRECISION = "# Accelerator(mixed_precision=...) says the precision, else fp32; --precision writes it down.\n"


def for_deepspeed(config: Mapping[str, Any], file: Path, name: Path, options: Options) -> str:
    """The YAML, to be called `name`, that starts the ds_config in `file`: a path from where training starts."""
    section: dict[str, Any] = {
        known.FILE: str(file),
        # from_pretrained then loads each rank's share only (zero.Init).
        "zero3_init_flag": config["zero_optimization"]["stage"] == 3,
    }
    if options.nodes > 1:
        section["deepspeed_multinode_launcher"] = known.STANDARD
    scripts = tree.get(config, "bf16.enabled") == AUTO
    launch = {"distributed_type": known.DEEPSPEED, known.SECTION: section, **_machines(options)}
    return (PRECISION if scripts else "") + _text(launch, name, options)


def _machines(options: Options) -> dict[str, Any]:
    several = {"main_process_port": PORT, "rdzv_backend": "static", "same_network": True}
    return {
        "num_machines": options.nodes,
        "num_processes": options.world_size,
        "machine_rank": 0,
        **(several if options.nodes > 1 else {}),
    }


def _text(launch: Mapping[str, Any], name: Path, options: Options) -> str:
    import yaml

    content = {"compute_environment": "LOCAL_MACHINE", **launch}
    return (
        HEADER.format(quote(str(name)))
        + (EACH if options.nodes > 1 else "")
        + yaml.safe_dump(content, sort_keys=False)
    )

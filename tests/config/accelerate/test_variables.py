"""The ranks' variables of a launch config: those that accelerate itself makes of the same file."""

from __future__ import annotations

import pytest
import yaml
from accelerating import deepspeed_of, variables_of
from needed import since

from dsrun.config.accelerate.launch import LaunchConfig
from dsrun.config.accelerate.variables import STARTED, variables
from dsrun.config.reading import yaml_document

# The usual file of a 70B model on two machines of eight GPUs, as it is published for FSDP, and its FSDP2 twin.
BIG = {
    "distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 2, "num_processes": 16, "machine_rank": 0,
    "main_process_ip": "10.0.0.1", "main_process_port": 29500, "rdzv_backend": "static", "same_network": True,
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": True, "fsdp_forward_prefetch": False, "fsdp_offload_params": False,
        "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_sync_module_states": True, "fsdp_use_orig_params": False,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    },
}  # fmt: skip
SECOND = {
    "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True, "offload_params": True,
    "fsdp_activation_checkpointing": True,
}  # fmt: skip
ONE = {"num_machines": 1, "num_processes": 2}
FILES = {
    "fsdp": BIG,
    "fsdp2": {**BIG, "fsdp_config": SECOND},
    "fsdp2 in two dimensions": {
        **BIG, "fsdp_config": SECOND,
        "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8},
    },
    "fsdp with context": {
        **BIG, "fsdp_config": SECOND,
        "parallelism_config": {"parallelism_config_cp_size": 2, "parallelism_config_dp_shard_size": 8},
    },
    "deepspeed": {
        "distributed_type": "DEEPSPEED", "mixed_precision": "fp16", **ONE, "debug": True,
        "deepspeed_config": {
            "zero_stage": 3, "offload_param_device": "CPU", "gradient_clipping": 1.0, "zero3_init_flag": True,
            "gradient_accumulation_steps": 2, "zero3_save_16bit_model": True,
            "deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock",
        },
    },
    "deepspeed's own file": {
        "distributed_type": "DEEPSPEED", **ONE,
        "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": False},
    },
    "ddp": {
        "distributed_type": "MULTI_GPU", "mixed_precision": "bf16", **ONE, "dynamo_config": {"backend": "INDUCTOR"},
    },
    "cpu": {"distributed_type": "NO", "use_cpu": True, **ONE},
}  # fmt: skip


@since(accelerate="1.15")  # FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD
@pytest.mark.parametrize("name", FILES)
def test_they_are_accelerates(name, tmp_path):
    path = tmp_path / "launch.yaml"
    path.write_text(yaml.safe_dump(FILES[name]))
    launch = LaunchConfig(yaml_document.read(path.read_bytes(), "launch.yaml").value)
    assert launch.kind in STARTED
    assert variables(launch) == variables_of(path)


@pytest.mark.parametrize("name", ["fsdp", "fsdp2"])
def test_the_plugin_reads_them(name):
    utils = pytest.importorskip("accelerate.utils")
    values = variables(LaunchConfig(FILES[name]))
    # The weights of rank 0 are sent by a GPU's own way: version 1 looks for one.
    values |= {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    with utils.patch_environment(**values):
        plugin = utils.FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == (2 if name == "fsdp2" else 1)
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert plugin.reshard_after_forward if name == "fsdp2" else plugin.sharding_strategy.name == "FULL_SHARD"


def test_cores_stay_near_where_a_file_says_so():
    assert (
        variables(LaunchConfig({**FILES["ddp"], "enable_cpu_affinity": True}))["ACCELERATE_CPU_AFFINITY"]
        == "1"
    )


def test_a_path_for_nvme_arrives():
    """accelerate launch itself doesn't hand it on (DS686)."""
    options = {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/x"}
    given = {"distributed_type": "DEEPSPEED", **ONE, "deepspeed_config": options}
    config = deepspeed_of(variables(LaunchConfig(given)))
    assert config["zero_optimization"]["offload_param"]["nvme_path"] == "/x"

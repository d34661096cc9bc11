"""DS70x: how checkpoints are written and read."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config import schema, tree
from dsrun.config.rules.batch import TENSOR
from dsrun.config.rules.common import above_1, removal, setting
from dsrun.config.rules.examples import ZERO_2, tensor, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Hit, rule

WRITER = "checkpoint.writer"
PARALLEL = f"{WRITER}.data_parallel"
LOCAL = "checkpoint.use_node_local_storage"
DATASTATES = "datastates_ckpt"


def writer_type(context: Context) -> str:
    """The writer that is used, in capitals: FAST where none is named (runtime/model_checkpointing/constants.py)."""
    return (context.text(f"{WRITER}.type") or "FAST").upper()


def has_writer(context: Context) -> bool:
    return isinstance(context.get(WRITER), dict)


@rule(
    "DS700",
    "error",
    REFUSED,
    bad=[
        {"checkpoint": {"parallel_write": {"pipeline_stage": "true"}}},
        {"checkpoint": {"parallel_write": {"pipeline_stage": "yes"}}},
    ],
    good=[
        {"checkpoint": {"parallel_write": {"pipeline_stage": True}}},
        {"checkpoint": {"parallel_write": {"pipeline_stage": 0}}},
    ],
)
def flag_that_must_be_a_flag(context: Context) -> Iterator[Hit]:
    """It must be among true and false (get_checkpoint_parallel_write_pipeline in runtime/config.py)."""
    path = "checkpoint.parallel_write.pipeline_stage"
    value = tree.get(context.config, path)
    if isinstance(value, str) and value != schema.AUTO:
        yield Hit(path, f'is "{value}", a text, and DeepSpeed stops at it', "Write true or false.")


@rule(
    "DS701",
    "error",
    FAILS,
    bad=[
        {"checkpoint": {"writer": {"type": "python"}}},
        {"checkpoint": {"writer": {"type": "mock", "data_parallel": None}}, **ZERO_2},
        {"checkpoint": {"writer": {}}, "_device": "cuda"},
    ],
    good=[
        {"checkpoint": {"writer": {"type": "python", "data_parallel": "replica"}}},
        {"checkpoint": {"writer": {"type": "python"}}, **zero(3)},
        {"checkpoint": {"writer": None}},
        {"checkpoint": {"writer": {"type": "python"}}, **tensor(2)},
    ],
    since=(0, 17),
)
def writer_without_its_unit(context: Context) -> Iterator[Hit]:
    """Below stage 3 a writer asks for a rank that its own class hasn't got.

    Source: _get_data_parallel_config in runtime/model_checkpointing/data_parallel_writer_factory.py.
    """
    if not has_writer(context) or context.get(PARALLEL) is not None:
        return
    if context.stage < 3 and not above_1(context, TENSOR):
        fix = setting(context, PARALLEL, "replica")
        yield Hit(
            PARALLEL,
            f"must be given below stage 3: this is stage {context.stage}, and the start fails",
            'Set it to "replica"; "socket" or "machine" let fewer ranks write.',
            fix,
        )


@rule(
    "DS702",
    "error",
    FAILS,
    bad=[
        {"_device": "cpu", "checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}},
        {"_device": "cpu", "checkpoint": {"writer": {"data_parallel": "machine"}}},
    ],
    good=[
        {"_device": "cuda", "checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}},
        {"checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}},
        {"_device": "cpu", "checkpoint": {"writer": {"type": "python", "data_parallel": "replica"}}},
        {"_device": "cpu", "checkpoint": {"tag_validation": "Warn"}},
    ],
    since=(0, 17),
)
def fast_writer_on_the_cpu(context: Context) -> Iterator[Hit]:
    """It pins memory for a GPU (CheckpointWriterFactory in runtime/model_checkpointing/writer_factory.py)."""
    if has_writer(context) and writer_type(context) == "FAST" and context.setting.device == "cpu":
        path = f"{WRITER}.type"
        fix = setting(context, path, "python")
        default = "" if context.has(path) else ", the default"
        yield Hit(
            path, f'"fast"{default}, needs a GPU', 'Set it to "python", or remove checkpoint.writer.', fix
        )


@rule(
    "DS703",
    "warning",
    bad={"checkpoint": {"writer": {"type": "mock", "data_parallel": "replica"}}},
    good={"checkpoint": {"writer": {"type": "python", "data_parallel": "replica"}}},
    since=(0, 17),
)
def writer_that_writes_nothing(context: Context) -> Iterator[Hit]:
    """MockFileWriter counts the bytes and leaves the files empty (deepspeed/io/mock_file_writer.py)."""
    if has_writer(context) and writer_type(context) == "MOCK":
        path = f"{WRITER}.type"
        yield Hit(
            path, '"mock" leaves every checkpoint empty: it is for measuring', 'Set it to "python" or "fast".'
        )


@rule(
    "DS704",
    "warning",
    bad={
        "_device": "cpu",
        "checkpoint": {"writer": {"type": "python", "data_parallel": "replica", "decoupled": True}},
    },
    good=[
        {
            "_device": "cuda",
            "checkpoint": {"writer": {"type": "python", "data_parallel": "replica", "decoupled": True}},
        },
        {
            "_device": "cpu",
            "checkpoint": {"writer": {"type": "python", "data_parallel": "replica", "decoupled": False}},
        },
    ],
    since=(0, 17),
)
def decoupled_writer_on_the_cpu(context: Context) -> Iterator[Hit]:
    """A second process gets the tensors by CUDA (runtime/checkpoint_engine/decoupled_checkpoint_engine.py)."""
    path = f"{WRITER}.decoupled"
    if context.flag(path) and context.setting.device == "cpu":
        fix = setting(context, path, value=False)
        yield Hit(path, "fails on the CPU when the first checkpoint is saved", "Set it to false.", fix)


@rule(
    "DS705",
    "note",
    bad={"checkpoint": {"load_universal": True}},
    good={"checkpoint": {"load_universal": False}},
)
def only_universal_checkpoints(context: Context) -> Iterator[Hit]:
    """load_checkpoint then takes converted folders and no others (runtime/engine.py, checkpoint/ds_to_universal.py)."""
    if context.flag("checkpoint.load_universal"):
        yield Hit(
            "checkpoint.load_universal",
            "resuming works from a universal checkpoint only",
            "Convert the checkpoint with ds_to_universal.py; set it back to false for the runs after that.",
        )


@rule(
    "DS706",
    "note",
    bad=[
        {"_nodes": 1, "checkpoint": {"use_node_local_storage": True}},
        {"_nodes": 2, "checkpoint": {"use_node_local_storage": True}},
    ],
    good=[
        {"_nodes": 2, "checkpoint": {"use_node_local_storage": False}},
        {"checkpoint": {"use_node_local_storage": True}},
    ],
)
def storage_of_each_node(context: Context) -> Iterator[Hit]:
    """Every node then writes its part of a checkpoint by itself (_get_ckpt_name in runtime/engine.py)."""
    nodes = context.setting.nodes
    if not context.flag(LOCAL) or nodes is None:
        return
    if nodes == 1:
        yield Hit(LOCAL, "changes nothing on one node", "Remove it.", removal(context, LOCAL))
    else:
        yield Hit(
            LOCAL,
            f"leaves a part of each checkpoint on each of {nodes} nodes",
            "Save to a disk of the node, and resume on the same nodes; on a shared disk set it to false.",
        )


@rule(
    "DS707",
    "error",
    DIFFERS,
    bad=[
        {"datastates_ckpt": {"enabled": False}},
        {"datastates_ckpt": {"enabled": False, "host_cache_size": 16}},
    ],
    good=[{"datastates_ckpt": False}, {"datastates_ckpt": {"host_cache_size": 16}}],
    since=(0, 18),
)
def datastates_that_stays_on(context: Context) -> Iterator[Hit]:
    """Anything but false turns it on (DeepSpeedDataStatesConfig in datastates/config.py)."""
    if context.section(DATASTATES).get("enabled") is False:
        fix = setting(context, DATASTATES, value=False, safe=True)
        yield Hit(
            DATASTATES,
            "is on, though enabled is false: nothing reads enabled",
            "Remove it, or set it to false.",
            fix,
        )


@rule(
    "DS708",
    "note",
    bad=[{"datastates_ckpt": {"host_cache_size": 16}}, {"datastates_ckpt": {}}, {"datastates_ckpt": True}],
    good=[{"datastates_ckpt": False}, {"steps_per_print": 1}],
    since=(0, 18),
)
def package_of_datastates(context: Context) -> Iterator[Hit]:
    """Without the package the start fails (runtime/checkpoint_engine/datastates_checkpoint_engine.py)."""
    on = context.has(DATASTATES) and context.get(DATASTATES) is not False
    if not on or context.section(DATASTATES).get("enabled") is False:
        return
    if has_writer(context):
        text = "has no effect beside checkpoint.writer"
        yield Hit(DATASTATES, text, "Remove one of the two.", severity="warning")
    else:
        advice = "Install it from https://github.com/DataStates/datastates-llm on every node."
        yield Hit(DATASTATES, "needs the package datastates, or the start fails", advice)


@rule(
    "DS709",
    "note",
    bad={"checkpoint": {"writer": {"type": "python", "data_parallel": "replica"}}},
    good=[{"checkpoint": {"tag_validation": "Fail"}}, {"checkpoint": {"writer": None}}],
    since=(0, 17),
)
def writer_and_its_launcher(context: Context) -> Iterator[Hit]:
    """It reads CROSS_SIZE and CROSS_RANK (runtime/model_checkpointing/utils.py), which launcher/launch.py sets."""
    if has_writer(context):
        yield Hit(
            WRITER,
            "needs CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't",
            "Start with the deepspeed launcher, or set both: the node's number, and how many there are.",
        )

"""DS70x: how checkpoints are written and read."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config import tree
from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import set_to
from dsrun.config.rules.examples import ZERO_2, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, all_of, needs, put, remove, report
from dsrun.config.rules.running.batch import TENSOR
from dsrun.config.schemas import schema

WRITER = "checkpoint.writer"
PARALLEL = f"{WRITER}.data_parallel"
LOCAL = "checkpoint.use_node_local_storage"
DATASTATES = "datastates_ckpt"


def writer_type(context: Context) -> str:
    """The writer that is used, in capitals: FAST where none is named (runtime/model_checkpointing/constants.py)."""
    return (context.text(f"{WRITER}.type") or "FAST").upper()


def has_writer(context: Context) -> bool:
    return isinstance(context.get(WRITER), dict)


def _nodes(context: Context) -> int | None:
    return context.setting.nodes


@rule("DS700", REFUSED)
@bad(
    {"checkpoint": {"parallel_write": {"pipeline_stage": "true"}}},
    {"checkpoint": {"parallel_write": {"pipeline_stage": "yes"}}},
)
@good(
    {"checkpoint": {"parallel_write": {"pipeline_stage": True}}},
    {"checkpoint": {"parallel_write": {"pipeline_stage": 0}}},
)
def string_for_a_flag(context: Context) -> Iterator[Finding]:
    """It must be true or false (get_checkpoint_parallel_write_pipeline in runtime/config.py)."""
    path = "checkpoint.parallel_write.pipeline_stage"
    value = tree.get(context.config, path)
    if isinstance(value, str) and value != schema.AUTO:
        yield Finding(path, f'is "{value}", a string: DeepSpeed stops at it', "Write true or false.")


@rule("DS701", FAILS, since=(0, 17, 1))
@bad(
    {"checkpoint": {"writer": {"type": "python"}}},
    {"checkpoint": {"writer": {"type": "mock", "data_parallel": None}}, **ZERO_2},
)
@good(
    {"checkpoint": {"writer": {"type": "python", "data_parallel": "replica"}}},
    {"checkpoint": {"writer": {"type": "python"}}, **zero(3)},
)
def writer_without_data_parallel() -> Table:
    """Below stage 3 a writer asks for a rank that its own class doesn't have.

    Source: _get_data_parallel_config in runtime/model_checkpointing/data_parallel_writer_factory.py.
    """
    text = (
        "is required below stage 3: at stage {stage} the start fails. "
        'Set it to "replica"; "socket" or "machine" let fewer ranks write.'
    )
    missing = (has_writer, lambda context: context.get(PARALLEL) is None)
    conditions = (*missing, when.below_stage(3), when.unless(when.several(TENSOR)))
    return report(PARALLEL, text, conditions, put(PARALLEL, "replica"))


@rule("DS702", FAILS, since=(0, 17, 1))
@bad(
    {"_device": "cpu", "checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}},
    {"_device": "cpu", "checkpoint": {"writer": {"data_parallel": "machine"}}},
)
@good(
    {"_device": "cuda", "checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}},
    {"checkpoint": {"writer": {"type": "fast", "data_parallel": "replica"}}},
)
def fast_writer_on_the_cpu(context: Context) -> Iterator[Finding]:
    """It pins memory for a GPU (CheckpointWriterFactory in runtime/model_checkpointing/writer_factory.py)."""
    if has_writer(context) and writer_type(context) == "FAST" and context.setting.device == "cpu":
        path = f"{WRITER}.type"
        fix = set_to(context, path, "python")
        default = "" if context.has(path) else ", the default"
        yield Finding(
            path, f'"fast"{default}, needs a GPU', 'Set it to "python", or remove checkpoint.writer.', fix
        )


@rule("DS703", "warning", since=(0, 17, 1))
@bad({"checkpoint": {"writer": {"type": "mock", "data_parallel": "replica"}}})
@good({"checkpoint": {"writer": {"type": "python", "data_parallel": "replica"}}})
def writer_that_writes_nothing() -> Table:
    """MockFileWriter counts the bytes and leaves the files empty (deepspeed/io/mock_file_writer.py)."""
    text = '"mock" leaves every checkpoint empty: it is for benchmarks. Set it to "python" or "fast".'
    return report(f"{WRITER}.type", text, (has_writer, lambda context: writer_type(context) == "MOCK"))


@rule("DS704", "warning", since=(0, 17, 1))
@bad(
    {
        "_device": "cpu",
        "checkpoint": {"writer": {"type": "python", "data_parallel": "replica", "decoupled": True}},
    }
)
@good(
    {
        "_device": "cuda",
        "checkpoint": {"writer": {"type": "python", "data_parallel": "replica", "decoupled": True}},
    },
    {
        "_device": "cpu",
        "checkpoint": {"writer": {"type": "python", "data_parallel": "replica", "decoupled": False}},
    },
)
def decoupled_writer_on_the_cpu() -> Table:
    """A second process gets the tensors by CUDA (runtime/checkpoint_engine/decoupled_checkpoint_engine.py)."""
    path = f"{WRITER}.decoupled"
    text = "fails on the CPU when the first checkpoint is saved. Set it to false."
    return report(path, text, (when.on(path), when.on_cpu), put(path, False))


@rule("DS705", "note")
@bad({"checkpoint": {"load_universal": True}})
@good({"checkpoint": {"load_universal": False}})
def only_universal_checkpoints() -> Table:
    """load_checkpoint then accepts converted folders only (runtime/engine.py, checkpoint/ds_to_universal.py)."""
    text = (
        "resuming works from a universal checkpoint only. "
        "Convert the checkpoint with ds_to_universal.py; set it back to false for later runs."
    )
    return report("checkpoint.load_universal", text, when.on("checkpoint.load_universal"))


@rule("DS706", "note")
@bad(
    {"_nodes": 1, "checkpoint": {"use_node_local_storage": True}},
    {"_nodes": 2, "checkpoint": {"use_node_local_storage": True}},
)
@good(
    {"_nodes": 2, "checkpoint": {"use_node_local_storage": False}},
    {"checkpoint": {"use_node_local_storage": True}},
)
def storage_of_each_node() -> Table:
    """Every node then writes its own part of a checkpoint (_get_ckpt_name in runtime/engine.py)."""
    several = (
        "leaves parts of each checkpoint on all {nodes} nodes. "
        "Save to a disk of the node, and resume on the same nodes; on a shared disk set it to false."
    )
    return all_of(
        report(
            LOCAL,
            "changes nothing on one node. Remove it.",
            lambda context: _nodes(context) == 1,
            remove(LOCAL),
        ),
        report(LOCAL, several, lambda context: _nodes(context) not in (None, 1), nodes=_nodes),
        when=when.on(LOCAL),
    )


@rule("DS707", DIFFERS, since=(0, 18, 1))
@bad({"datastates_ckpt": {"enabled": False}}, {"datastates_ckpt": {"enabled": False, "host_cache_size": 16}})
@good({"datastates_ckpt": False}, {"datastates_ckpt": {"host_cache_size": 16}})
def datastates_stays_on() -> Table:
    """Anything but false turns it on (DeepSpeedDataStatesConfig in datastates/config.py)."""
    path = f"{DATASTATES}.enabled"
    text = "is on although enabled is false: nothing reads enabled. Remove it, or set it to false."
    return report(DATASTATES, text, when.off(path), put(DATASTATES, False, safe=True))


@rule("DS708", "note", since=(0, 18, 1))
@bad({"datastates_ckpt": {"host_cache_size": 16}}, {"datastates_ckpt": {}})
@good({"datastates_ckpt": False}, {"steps_per_print": 1})
def package_datastates_needed(context: Context) -> Iterator[Finding]:
    """Without the package the start fails (runtime/checkpoint_engine/datastates_checkpoint_engine.py)."""
    on = context.has(DATASTATES) and context.get(DATASTATES) is not False
    if not on or context.section(DATASTATES).get("enabled") is False:
        return
    if has_writer(context):
        text = "has no effect with checkpoint.writer"
        yield Finding(DATASTATES, text, "Remove one of the two.", severity="warning")
    else:
        advice = "Install it from https://github.com/DataStates/datastates-llm on every node."
        yield Finding(DATASTATES, "needs the package datastates, or the start fails", advice)


@rule("DS709", "note", since=(0, 17, 1))
@bad({"checkpoint": {"writer": {"type": "python", "data_parallel": "replica"}}})
@good({"checkpoint": {"tag_validation": "Fail"}}, {"checkpoint": {"writer": None}})
def writer_needs_the_deepspeed_launcher() -> Table:
    """It reads CROSS_SIZE and CROSS_RANK (runtime/model_checkpointing/utils.py), which launcher/launch.py sets."""
    text = (
        "CROSS_RANK and CROSS_SIZE, which the deepspeed launcher sets and torchrun doesn't. "
        "Start with the deepspeed launcher, or set both: the node's number and the number of nodes."
    )
    return needs(WRITER, text, given=has_writer)

"""The table of options: declared once, resolved by source, read by something."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from dsrun.errors import DsrunError
from dsrun.options import commands, derived, table
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import entries, select
from dsrun.options.layers import Layer, Origin, Resolved, Source, resolve

PACKAGE = Path(__file__).resolve().parents[2] / "dsrun"
COMMANDS = [
    value
    for name, value in vars(commands).items()
    if inspect.isclass(value) and value.__module__ == commands.__name__ and name != "ConfigOptions"
]
NAMES = {name for command in COMMANDS for name in entries(command)}


def sources(*rooms: str) -> dict[Path, ast.Module]:
    paths = [path for room in rooms for path in sorted((PACKAGE / room).rglob("*.py"))]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_there_are_commands():
    assert {"FinetuneOptions", "LaunchOptions", "PlanOptions", "PresetOptions"} <= {
        one.__name__ for one in COMMANDS
    }
    assert len(NAMES) > 90


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_an_option_is_declared_well(command):
    flags: list[str] = []
    for entry in entries(command).values():
        assert entry.option.help.endswith("."), entry.name
        assert entry.group, entry.name
        assert entry.default is None or entry.default == () or not entry.problem(entry.default), entry.name
        flags += [side for flag in entry.flags for side in flag.split("/")]
    assert len(flags) == len(set(flags)), "a flag that means two things"


def test_every_option_is_read():
    """One that nothing reads would be accepted and dropped."""
    # A script's options and a fine-tune's are passed on as groups: their fields are read where the group is.
    read = {
        node.attr
        for path, tree in sources(
            "cli", "config", "data", "job", "jobs", "models", "options", "training"
        ).items()
        if path.parent.name != "options"
        or path.name == "optimizers.py"  # which reads the optimizer's arguments
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    read |= {
        node.value
        for tree in sources("cli", "job", "jobs", "models").values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    template = "".join(
        path.read_text(encoding="utf-8") for path in (PACKAGE.parent / "templates").glob("*.j2")
    )
    assert not {name for name in NAMES if name not in read and f"options.{name}" not in template}


def test_no_default_stands_elsewhere():
    """A literal beside an option's name, outside of the table, is a second default for one thing."""
    found = []
    for path, tree in sources("cli", "job", "jobs", "planner").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".get") and len(node.args) == 2:
                name, default = node.args
                if isinstance(name, ast.Constant) and name.value in DECIDING and _is_literal(default):
                    found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = node.args
                pairs = [
                    *zip(arguments.args[::-1], arguments.defaults[::-1], strict=False),
                    *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
                ]
                found += [
                    f"{path.name}:{node.lineno} {argument.arg}={ast.unparse(default)}"
                    for argument, default in pairs
                    if default is not None and argument.arg in DECIDING and _is_literal(default)
                ]
            if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and _is_literal(node.values[-1]):
                first = node.values[0]
                if isinstance(first, ast.Attribute) and first.attr in DECIDING:
                    found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not found


DECIDING = {
    name
    for group in (
        table.StepOptions, table.OptimizerOptions, table.ScheduleOptions, table.LengthOptions,
        table.PeftOptions, table.CheckpointOptions, table.EvaluationOptions, table.FormatOptions,
    )
    for name in entries(group)
} - {"optimizer", "method"}  # fmt: skip
"""Options that decide how a model is trained, whose values are no business of a function's signature."""


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is not None and not isinstance(node.value, bool)


# Sources


def test_the_stronger_source_wins_in_any_order():
    def resolved(order):
        known = Resolved.built_in(FinetuneOptions)
        for source, lr in order:
            known = known.filled(source, {"lr": lr}, source.words)
        return known

    layers = [(source, (int(source) + 1) / 1000) for source in Source if source > Source.BUILT_IN]
    for order in (layers, layers[::-1], [*layers[3:], *layers[:3]]):
        known = resolved(order)
        assert known.options.lr == layers[-1][1]
        assert known.origins["lr"] == Origin(Source.COMMAND_LINE, "command line")
    assert resolved(layers[:1]).source("lr") == Source.DERIVED
    assert Resolved.built_in(FinetuneOptions).source("lr") == Source.BUILT_IN


def test_none_says_nothing():
    known = Resolved.built_in(FinetuneOptions).filled(Source.COMMAND_LINE, {"lr": None})
    assert known.options == FinetuneOptions()
    assert not known.said("lr")


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"micro_batch": 0}, "micro_batch"), ({"micro_batch": 1.5}, "micro_batch"), ({"lr": "fast"}, "lr"),
        ({"lr": float("nan")}, "lr"), ({"lr": 0}, "lr"), ({"precision": "fp8"}, "precision"),
        ({"packing": "yes"}, "packing"), ({"packing": 1}, "packing"), ({"preset": ["zero2"]}, "preset"),
        ({"preset": ""}, "preset"), ({"micro_batch": True}, "micro_batch"), ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"data_format": "csv"}, "data_format"),
    ],
)  # fmt: skip
def test_a_value_that_can_not_be(values, where):
    with pytest.raises(DsrunError) as caught:
        Resolved.built_in(FinetuneOptions).filled(Source.RUN_FILE, values, "run.toml")
    (problem,) = caught.value.problems
    assert problem.where == f"run.toml: {where}"
    assert problem.hint


def test_all_that_is_wrong_with_a_source_is_told_together():
    values = {"micro_batch": 0, "micro_bach": 2, "lr": -1}
    with pytest.raises(DsrunError) as caught:
        Resolved.built_in(FinetuneOptions).filled(Source.RUN_FILE, values, "run.toml")
    assert len(caught.value.problems) == 3
    assert "micro_batch" in str(caught.value.problems[1].hint)


def test_two_ways_to_say_how_long():
    known = Resolved.built_in(FinetuneOptions).filled(Source.MODEL_FILE, {"epochs": 2.0})
    steps = known.filled(Source.COMMAND_LINE, {"max_steps": 7})
    assert (steps.options.epochs, steps.options.max_steps) == (None, 7)
    late = Resolved.built_in(FinetuneOptions).filled(Source.COMMAND_LINE, {"max_steps": 7})
    late = late.filled(Source.MODEL_FILE, {"epochs": 2.0})
    assert (late.options.epochs, late.options.max_steps) == (None, 7)
    with pytest.raises(DsrunError, match="--epochs and --max-steps"):
        known.filled(Source.COMMAND_LINE, {"epochs": 1.0, "max_steps": 3})


# Layers


def by_preset(known: Resolved[FinetuneOptions]) -> list[Layer]:
    """Two files, and the stronger one first: the order is that of dependence."""
    lab = Layer(Source.LAB_PRESET, {"lr": 2e-4, "method": "lora"}, "b.toml", note="a lab's")
    return [lab, Layer(Source.SHIPPED_PRESET, {"lr": 1e-4, "epochs": 1.0}, "a.toml")]


def by_method(known: Resolved[FinetuneOptions]) -> Layer:
    return Layer.settled({"lora_rank": 4}, f"--method {known.options.method}")


def test_a_source_sees_what_those_before_it_gave():
    known = Resolved.built_in(FinetuneOptions)
    found = resolve(known, (by_preset, by_method))
    assert (found.known.options.lr, found.known.options.epochs) == (2e-4, 1.0)
    assert found.known.origins["lora_rank"] == Origin(Source.DERIVED, "--method lora")
    assert found.notes == ("a lab's",) and not found.problems
    assert known == Resolved.built_in(FinetuneOptions)


def test_no_source_is_asked_behind_one_that_is_refused():
    def wrong(_: Resolved[FinetuneOptions]) -> Layer:
        return Layer(Source.LAB_PRESET, {"lr": "much"}, "c.toml")

    found = resolve(Resolved.built_in(FinetuneOptions), (by_preset, wrong, by_method))
    assert [problem.where for problem in found.problems] == ["c.toml: lr"]
    assert (found.known.options.lr, found.known.options.lora_rank) == (2e-4, 8)


# Derived


@pytest.mark.parametrize(
    ("method", "lr"), [("full", 1e-4), ("lora", 2e-4), ("qlora", 2e-4), ("ptuning", 2e-2)]
)
def test_the_learning_rate_is_the_methods(method, lr):
    known = Resolved.built_in(FinetuneOptions).filled(Source.COMMAND_LINE, {"method": method})
    known = known.with_layers(derived.by_method(known))
    own = derived.of_model_file({"lr": 3e-3, "epochs": 1.0}, method)
    assert known.options.lr == lr
    assert known.filled(Source.MODEL_FILE, own).options.lr == (3e-3 if method == "full" else lr)


def test_the_recipe_takes_the_place_of_every_default_and_no_more():
    known = Resolved.built_in(FinetuneOptions).filled(
        Source.MODEL_FILE, {"lr": 5e-3, "max_source_length": 512}
    )
    known = known.filled(Source.COMMAND_LINE, {"official": True, "max_steps": 8, "micro_batch": 2})
    options = known.with_layers(derived.by_recipe(known)).options
    assert (options.lr, options.max_source_length, options.grad_clip, options.packing) == (
        1e-4,
        64,
        0.0,
        False,
    )
    assert (options.max_steps, options.epochs, options.micro_batch) == (8, None, 2)


@pytest.mark.parametrize("name", derived.FIXED)
@pytest.mark.parametrize("source", [Source.LAB_PRESET, Source.RUN_FILE, Source.COMMAND_LINE])
def test_the_recipe_refuses_to_be_contradicted(name, source):
    other = {
        "grad_clip": 1.0,
        "lr_schedule": "cosine",
        "warmup_steps": 5,
        "loss": "token-mean",
        "packing": True,
        "train_on_prompt": True,
    }
    known = Resolved.built_in(FinetuneOptions).filled(Source.COMMAND_LINE, {"official": True})
    with pytest.raises(DsrunError, match=entries(FinetuneOptions)[name].flag):
        derived.by_recipe(known.filled(source, {name: other[name]}, "somewhere"))
    derived.by_recipe(known.filled(source, {name: derived.RECIPE[name]}, "somewhere"))


def test_a_group_is_selected_by_name():
    options = FinetuneOptions(micro_batch=3, lr=0.5)
    assert select(table.StepOptions, options).micro_batch == 3
    assert select(table.OptimizerOptions, options, optimizer="x").optimizer == "x"


@pytest.mark.parametrize(
    ("given", "value"), [("all-linear", "all"), ("all-linear,experts", "all,experts"), ("q_proj", "q_proj")]
)
def test_other_tools_words_are_read_as_ours(given, value):
    from dsrun.options.commands import FinetuneOptions
    from dsrun.options.layers import Resolved

    assert Resolved.by_user(FinetuneOptions, {"lora_target": given}).options.lora_target == value

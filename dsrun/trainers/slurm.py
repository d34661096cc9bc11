"""What a batch script's #SBATCH lines say of the variables that Slurm sets in it (sbatch(1), output variables)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from math import ceil

MARK = "#SBATCH"
SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus-per-task"}
"""Options of one letter that say how many."""


def variables(text: str) -> dict[str, str]:
    """The variables of Slurm's that the script's own lines decide; none that they leave open (nodes=2-4)."""
    given = _options(_directives(text))
    nodes, tasks, each = (_number(given.get(name)) for name in ("nodes", "ntasks", "ntasks-per-node"))
    if nodes is None and "nodes" not in given and tasks and each:
        nodes = ceil(tasks / each)
    if tasks is None and nodes and each:
        tasks = nodes * each
    gpus, everywhere = _gpus(given, nodes, each or (tasks // nodes if tasks and nodes else None))
    known = {
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": each, "SLURM_GPUS_ON_NODE": gpus, "SLURM_GPUS_PER_NODE": gpus,
        "SLURM_GPUS": everywhere, "SLURM_CPUS_PER_TASK": _number(given.get("cpus-per-task")),
    }  # fmt: skip
    return {name: str(value) for name, value in known.items() if value}


def _directives(text: str) -> Iterable[str]:
    """The options of the #SBATCH lines; sbatch reads them up to the first command."""
    for line in map(str.strip, text.splitlines()):
        if line and not line.startswith("#"):
            return
        if line.startswith(MARK):
            yield line.removeprefix(MARK)


def _options(directives: Iterable[str]) -> dict[str, str]:
    """Options by their long names; of one that is there twice the last counts."""
    given: dict[str, str] = {}
    for directive in directives:
        try:
            words = shlex.split(re.sub(r"\s#.*", "", directive))
        except ValueError:
            continue  # a quote is open: sbatch refuses the script
        while words:
            word = words.pop(0)
            name, equals, value = word.lstrip("-").partition("=")
            if not word.startswith("--") and word.startswith("-"):
                name, value = SHORT.get(word[1:2], word[1:2]), word[2:].removeprefix("=")
                equals = value
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            given[name] = value
    return given


def _gpus(given: Mapping[str, str], nodes: int | None, tasks: int | None) -> tuple[int | None, int | None]:
    """GPUs of a node, and of all. tasks: of a node."""
    each = _devices(given.get("gpus-per-node", ""))
    each = each or _devices(",".join(re.findall(r"gpu(?:[:=][^,]*)?(?=,|$)", given.get("gres", ""))))
    if of_a_task := _devices(given.get("gpus-per-task", "")):
        each = each or (of_a_task * tasks if tasks else None)
    everywhere = _devices(given.get("gpus", ""))
    if each is None and everywhere and nodes and everywhere % nodes == 0:
        each = everywhere // nodes
    return each, everywhere or (each * nodes if each and nodes else None)


def _devices(text: str) -> int | None:
    """How many 4, a100:4, gpu:a100:4(S:0-1), gpu, and several of those with commas, are."""
    counts = [re.split("[:=]", part.partition("(")[0])[-1] for part in text.split(",") if part]
    if not all(count.isdecimal() or count == "gpu" for count in counts):
        return None
    return sum(1 if count == "gpu" else int(count) for count in counts) or None


def _number(text: str | None) -> int | None:
    """A whole number; also a range whose ends are the same."""
    low, _, high = (text or "").partition("-")
    return int(low) if low.isdecimal() and high in ("", low) else None

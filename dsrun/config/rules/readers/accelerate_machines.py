"""DS687 and DS688: the machines and processes of an accelerate YAML."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.catalog import suggestion
from dsrun.config.accelerate import launch as known
from dsrun.config.accelerate.launch import LaunchConfig, whole
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.readers.accelerate_file import OPTION, TOP, in_yaml, launched, two_machines


@rule("DS687", DIFFERS)
@bad(two_machines({}), two_machines({"deepspeed_multinode_launcher": "nossh"}))
@good(
    two_machines({"deepspeed_hostfile": "hosts"}),
    two_machines({"deepspeed_multinode_launcher": "OpenMPI", "deepspeed_hostfile": "hosts"}),
)
def machines_cannot_find_each_other(context: Context) -> Iterator[Finding]:
    """All launchers except accelerate's own need a hostfile: without it DeepSpeed's trains on one machine.

    It only logs that (fetch_hostfile in launcher/runner.py). accelerate's needs an IP (accelerate/utils/launch.py).
    """
    launch = launched(context)
    if launch is None or launch.machines < 2:
        return
    if launch.launcher == known.STANDARD:
        yield from _standard(launch)
    elif launch.launcher.lower() not in known.LAUNCHERS:
        choices = (known.STANDARD, *known.LAUNCHERS)
        advice = suggestion(launch.launcher, choices, f"Choose from {', '.join(choices)}.")
        text = f"unknown launcher {launch.launcher}: DeepSpeed stops"
        yield Finding(f"{OPTION}.deepspeed_multinode_launcher", text, advice, effect=FAILS)
    elif not launch.text("deepspeed_hostfile"):
        text = f"is missing: {launch.launcher} trains on one machine only, not on {launch.machines}"
        advice = "Name one (a line `host slots=8` for each machine), or set deepspeed_multinode_launcher: standard."
        yield Finding(f"{OPTION}.deepspeed_hostfile", text, advice)


def _standard(launch: LaunchConfig) -> Iterator[Finding]:
    rank = launch.given.get("machine_rank", 0)
    number_of = whole(rank)
    if number_of is None or not 0 <= number_of < launch.machines:
        text = f"is {in_yaml(rank)}, but {launch.machines} machines are numbered 0 to {launch.machines - 1}"
        yield Finding(
            f"{TOP}.machine_rank", text, "Give each machine its own number, 0 for the first.", effect=FAILS
        )
    if not launch.given.get("main_process_ip"):
        text = f"is missing: {launch.machines} machines can't find each other without --main_process_ip"
        yield Finding(f"{TOP}.main_process_ip", text, "Write the address of machine 0.", severity="warning")


@rule("DS688", DIFFERS)
@bad(
    two_machines({"deepspeed_hostfile": "hosts"}, num_processes=7),
    two_machines({"deepspeed_hostfile": "hosts"}, num_processes=1),
)
@good(
    two_machines({"deepspeed_hostfile": "hosts"}, num_processes=8),
    two_machines({"deepspeed_hostfile": "hosts", "deepspeed_inclusion_filter": "a:0,1,2"}, num_processes=3),
)
def processes_do_not_match_machines(context: Context) -> Iterator[Finding]:
    """Each machine starts num_processes // num_machines, each process on a GPU of gpu_ids
    (prepare_deepspeed_cmd_env in accelerate/utils/launch.py).
    """
    launch = launched(context)
    if launch is None or launch.processes is None or launch.filtered:
        return
    processes, machines, path = launch.processes, launch.machines, f"{TOP}.num_processes"
    each = processes // machines
    gpus = launch.given.get("gpu_ids")
    if each == 0:
        text = f"{_many(processes, 'process', 'es')} on {machines} machines leaves none for each"
        yield Finding(
            path, text, f"Write {machines} or more: it counts the GPUs of all machines.", effect=FAILS
        )
    elif processes % machines:
        text = (
            f"{processes} processes on {machines} machines: starts {each} on each, {each * machines} in all"
        )
        yield Finding(path, text, f"Write {each * machines} or {(each + 1) * machines}.")
    elif (
        isinstance(gpus, str)
        and gpus != "all"
        and context.setting.device != "cpu"
        and each > gpus.count(",") + 1
    ):
        count = gpus.count(",") + 1
        text = f"{_many(each, 'process', 'es')} on a machine, but gpu_ids names {_many(count, 'GPU')}"
        yield Finding(path, text, f"Write {count * machines}, or name more GPUs.", effect=FAILS)


def _many(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{ending * (count != 1)}"

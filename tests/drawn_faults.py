"""A fine-tune on two hosts, ended again and again by faults that are drawn, and resumed each time; a table of them.

    python tests/drawn_faults.py [--faults 20] [--seed 7]      writes docs/reference/drawn-faults.md

The hosts are the cluster lab's (cluster_lab/lab.py), so it needs root. Every fault is looked at: how dsrun ended, that
nothing is left of the job on any host, and how many steps were lost. At the end the losses and the exported weights are
held against those of the same fine-tune without faults. Exits with 1 where anything is not as it should be.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from threading import Timer

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/cluster_lab")]

from damage import DAMAGES
from lab import Host, Lab, wait_for
from running import (
    Done,
    full_disk,
    half_written,
    held_at,
    let_go,
    little_data,
    own_disk_at,
    reaches,
    starts_of,
    step_of,
    until,
)
from runs import GONE_S, Cluster

from dsrun.cluster import extensions
from dsrun.job.layout import whole_checkpoints

PAGE = ROOT / "docs" / "reference" / "drawn-faults.md"
SAVE_STEPS = 2
LEAPS = (4, 5, 6)
"""Steps between two faults: two checkpoints at least."""
HANG_S, HOST_S = 30, 15
SUPERVISION = ("--hang-timeout", HANG_S / 60, "--host-timeout", HOST_S / 60)
SHORT_CUT_S, LONG_CUT_S = 5, 60
AGENT, LAUNCHER = "dsrun.jobs.supervision.host_agent", "deepspeed.launcher.launch"
SAME = 1e-6
"""The largest difference that losses and weights may have."""
DISK_BYTES = 400 << 20


@dataclass
class Scene:
    """A job whose ranks are held after a step, and what was drawn for it.

    mending: undoes the fault. stays: ranks that are not let go afterwards. stopped: a process that can't end before it
    goes on. damaged: a checkpoint that can't be used.
    """

    cluster: Cluster
    process: subprocess.Popen[str]
    run_dir: Path
    ranks: dict[int, int]
    rank: int
    rng: random.Random
    mending: ExitStack = field(default_factory=ExitStack)
    stays: set[int] = field(default_factory=set)
    detail: str = ""
    stopped: int | None = None
    damaged: Path | None = None

    @property
    def host(self) -> Host:
        """The host of the drawn rank: there is a rank on each."""
        return self.cluster.lab.hosts[self.rank]

    def first_of(self, module: str) -> int:
        """The first process on the host that runs a module."""
        running = self.host.running(module)
        assert running, f"{module} on {self.host.name}"
        self.detail = self.host.name
        return min(running, key=psutil.Process.create_time).pid

    def left(self) -> list[str]:
        """Processes on the hosts, without those that can't end."""
        return [line for line in self.cluster.left() if f": {self.stopped} " not in line]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# What can happen


def rank_killed(scene: Scene) -> None:
    kill(scene.ranks[scene.rank])
    scene.detail = f"rank {scene.rank}"


def rank_stopped(scene: Scene) -> None:
    os.kill(scene.ranks[scene.rank], signal.SIGSTOP)
    scene.stays.add(scene.rank)
    scene.detail = f"rank {scene.rank}"


def agent_stopped(scene: Scene) -> None:
    """The other host's rank stays, too: the run would come to its end before the host is given up."""
    scene.stopped = scene.first_of(AGENT)
    os.kill(scene.stopped, signal.SIGSTOP)
    scene.stays.add(1 - scene.rank)
    scene.mending.callback(os.kill, scene.stopped, signal.SIGCONT)


def disk_full(scene: Scene) -> None:
    scene.mending.enter_context(full_disk(scene.cluster.folder))


def cut_for(scene: Scene, seconds: float) -> None:
    scene.host.cut()
    timer = Timer(seconds, scene.host.mend)
    timer.start()
    scene.mending.callback(timer.join)
    scene.detail = scene.host.name


def killed_while_saving(scene: Scene) -> None:
    newest = whole_checkpoints(scene.run_dir)[-1].name
    let_go(scene.ranks)
    after = int(newest.removeprefix("step-")) + 1
    scene.damaged = until(
        lambda: half_written(scene.run_dir, scene.ranks, after), "a checkpoint", every=0.0005
    )
    scene.detail = f"both ranks, {scene.damaged.name}"
    for pid in scene.ranks.values():
        kill(pid)


def killed_and_damaged(scene: Scene) -> None:
    rank_killed(scene)
    let_go(scene.ranks)
    scene.cluster.check_nothing_is_left()
    older, scene.damaged = whole_checkpoints(scene.run_dir)[-2:]
    damage = scene.rng.choice(("truncate", "zero", "empty", "missing", "flip"))
    name = scene.rng.choice(sorted(path.name for path in scene.damaged.iterdir()))
    DAMAGES[damage](scene.damaged, name, older)
    scene.detail += f"; {damage}: {scene.damaged.name}/{name}"


def host_lost(scene: Scene) -> None:
    scene.host.cut()
    scene.host.kill_sshd()
    for process in scene.host.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    scene.mending.callback(scene.host.start_sshd)
    scene.mending.callback(scene.host.mend)
    scene.detail = scene.host.name


@dataclass(frozen=True)
class Fault:
    """Something that happens to a job.

    says: a pattern of what dsrun says then, with {host} and {rank} for those that were drawn; empty where it can't say
    anything, None where the job goes on. codes: the exit codes that it may have. intervals: how many save intervals may
    be lost.
    """

    name: str
    strike: Callable[[Scene], None]
    says: str | None
    codes: tuple[int, ...] = (1,)
    intervals: int = 1


LOST = r"no heartbeat from {host}[^\n]*"
GONE = r"(agent on {host} is gone|{host}: ssh ended)[^\n]*"
LAUNCHED = r"launcher on {host}[^\n]*"
PEER = r"rank \d on node\d failed first: [^\n]*"
KILLED = r"rank {rank} on {host} died first: killed \(SIGKILL\)"
FAULTS = (
    Fault("kill -9 of dsrun", lambda scene: scene.process.kill(), "", (-signal.SIGKILL,)),
    Fault("kill -9 of a host agent", lambda scene: kill(scene.first_of(AGENT)), f"{GONE}|{PEER}"),
    Fault("kill -9 of a rank", rank_killed, KILLED, (137,)),
    Fault("kill -9 of a launcher", lambda scene: kill(scene.first_of(LAUNCHER)), f"{LAUNCHED}|{PEER}", (1, 137)),
    Fault("SIGTERM to dsrun", lambda scene: scene.process.terminate(), r"asked to end[^\n;]*", (143,)),
    Fault("SIGSTOP of a rank", rank_stopped, r"[^\n]*hangs[^\n]*"),
    Fault("SIGSTOP of a host agent", agent_stopped, LOST),
    Fault("full disk under the run's folder", disk_full, "the disk is full"),
    Fault(f"cable out for {SHORT_CUT_S} s", lambda scene: cut_for(scene, SHORT_CUT_S), None),
    Fault(f"cable out for {LONG_CUT_S} s", lambda scene: cut_for(scene, LONG_CUT_S), LOST),
    Fault("kill -9 of the ranks while they save", killed_while_saving, r"rank \d on node\d died first: [^\n]*", (137,)),
    Fault("kill -9 of a rank, then a damaged checkpoint", killed_and_damaged, KILLED, (137,), 2),
    Fault("host lost (cable out, all of it killed), back later", host_lost, f"{LOST}|{GONE}|{PEER}"),
)  # fmt: skip


def drawn(count: int, rng: random.Random) -> list[Fault]:
    """Faults in a random order, each kind once before any comes again."""
    faults: list[Fault] = []
    while len(faults) < count:
        faults += rng.sample(FAULTS, len(FAULTS))
    return faults[:count]


@dataclass
class Row:
    """Outcome of a fault. wrong: all that is not as it should be."""

    fault: str
    step: int
    ended: str
    seconds: float
    resumed_from: int | None = None
    lost: int | None = None
    wrong: list[str] = field(default_factory=list)


class Journey:
    """The fine-tune, from fault to fault."""

    def __init__(self, cluster: Cluster, steps: int, rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.run_dir = cluster.folder / "disturbed"
        self.options = (
            "--hostfile", cluster.lab.hostfile(slots=1), "--launcher", "ssh", "--no-check", *SUPERVISION,
            "--max-steps", steps, "--save-steps", SAVE_STEPS, "--keep", 3,
        )  # fmt: skip
        self.attempts = 0

    def undisturbed(self) -> Done:
        process = self.cluster.train("undisturbed", *self.options)
        return self.cluster.finish(process, "undisturbed", 600)

    def begin(self) -> None:
        self.attempts = 1
        self.process = self.cluster.train(self.run_dir.name, *self.options)

    def meet(self, fault: Fault, step: int) -> Row:
        """The fault after that step; then the job goes on."""
        ranks = held_at(self.process, self.run_dir, step)
        scene = Scene(self.cluster, self.process, self.run_dir, ranks, self.rng.randrange(2), self.rng)
        row = Row(fault.name, step_of(self.run_dir), "", 0)
        began = time.monotonic()
        with scene.mending:
            fault.strike(scene)
            let_go({rank: pid for rank, pid in ranks.items() if rank not in scene.stays})
            if fault.says is None:
                reaches(self.process, self.run_dir, row.step + 2)
                row.ended = "went on"
            else:
                wait_for(lambda: not scene.left(), GONE_S, 0.1)
                row.seconds = time.monotonic() - began
                row.wrong += scene.left()
                self.judge(fault, scene, self.cluster.finish(self.process, self.run_dir.name, GONE_S), row)
        if fault.says is not None and not wait_for(lambda: not self.cluster.left(), GONE_S, 0.1):
            row.wrong += self.cluster.left()
        row.fault += f": {scene.detail}" if scene.detail else ""
        if fault.says is not None:
            self.resume(fault, scene, row)
        return row

    def judge(self, fault: Fault, scene: Scene, done: Done, row: Row) -> None:
        """Judge how dsrun ended."""
        row.ended = f"exit {done.code}"
        if done.code not in fault.codes:
            row.wrong.append(f"exit {done.code}, not {fault.codes}")
        if done.own_traceback:
            row.wrong.append("dsrun's own traceback")
        pattern = str(fault.says).format(host=scene.host.name, rank=scene.rank)
        if cause := re.search(pattern, done.err):
            row.ended += f": {cause[0].strip().removeprefix('dsrun: ')}" if cause[0] else ""
        else:
            row.wrong.append(f"{pattern!r} is not in: {done.err}")

    def resume(self, fault: Fault, scene: Scene, row: Row) -> None:
        reached = step_of(self.run_dir)
        usable = [folder for folder in whole_checkpoints(self.run_dir) if folder != scene.damaged]
        newest = int(usable[-1].name.removeprefix("step-"))
        self.attempts += 1
        self.process = self.cluster.dsrun("resume", self.run_dir, "--no-check", *SUPERVISION)

        def trains() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return len(starts_of(self.run_dir)) == self.attempts

        until(trains, "it trains again")
        row.resumed_from = starts_of(self.run_dir)[-1]
        row.lost = reached - row.resumed_from
        if row.resumed_from != newest:
            row.wrong.append(f"went on from {row.resumed_from}, not {newest}")
        if row.lost > fault.intervals * SAVE_STEPS:
            row.wrong.append(f"{row.lost} steps lost")

    def end(self) -> Done:
        return self.cluster.finish(self.process, self.run_dir.name, 600)


def difference(first: Done, second: Done) -> tuple[float, float]:
    """The largest difference of two runs' losses, step by step, and of their exported weights."""
    from safetensors.torch import load_file

    assert list(first.losses) == list(second.losses), (list(first.losses), list(second.losses))
    losses = max(abs(loss - second.losses[step]) for step, loss in first.losses.items())
    weights = [
        {name: tensor for path in sorted((done.run_dir / "model").glob("*.safetensors"))
         for name, tensor in load_file(path).items()}
        for done in (first, second)
    ]  # fmt: skip
    assert weights[0]
    assert weights[0].keys() == weights[1].keys()
    return losses, max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])


@contextmanager
def lab_on_a_disk(place: Path) -> Iterator[Cluster]:
    """Two hosts whose jobs' folders lie on a small disk of their own."""
    disk = place / "disk"
    for folder in (disk, place / "data"):
        folder.mkdir()
    environ = {
        "DSRUN_CACHE": str(place / "cache"), "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/light'}",
        extensions.VARIABLE: str(extensions.folder({}, place / "cache")), "CXX": str(ROOT / "tests/light/c++"),
    }  # fmt: skip
    for name in [name for name in os.environ if name.startswith(("DSRUN_", "SLURM_"))]:
        del os.environ[name]
    os.environ.update(environ)
    with own_disk_at(
        disk, DISK_BYTES
    ) as mounted:  # before the hosts are made, which get copies of all mounts
        if mounted is None:
            sys.exit("a disk can't be mounted here: only root may")
        with Lab() as lab:
            cluster = Cluster(lab, environ, disk, little_data(place / "data"))
            try:
                yield cluster
            finally:
                cluster.end()


def page(rows: list[Row], given: argparse.Namespace, steps: int, losses: float, weights: float) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))
    wrong = sum(bool(row.wrong) for row in rows)
    others = given.faults - len(rows)
    lines = [
        "# Drawn faults",
        "",
        f"Made by `python tests/drawn_faults.py --faults {given.faults} --seed {given.seed}` on {date.today()}: "
        f"{packages}, Python {sys.version.split()[0]}, {os.cpu_count()} CPU cores.",
        "",
        f"One fine-tune of llama-tiny over {steps} steps on two hosts (network namespaces of one machine) with a rank "
        f"each: ZeRO-2 in fp32, `--save-steps {SAVE_STEPS}`, a hang timeout of {HANG_S} s, a host timeout of {HOST_S} "
        "s. The seed decides which faults there are and when, and the rank, host and file that each is about. After "
        "each that ended the run it was gone on with by `dsrun resume`.",
        "",
        *([f"There was no time for {others} of {given.faults} drawn faults.", ""] if others else []),
        f"{len(rows) - wrong} of {len(rows)} faults went as they should: dsrun named the cause, unless it was killed "
        "itself, and ended with a code that fits it, nothing of the job was left on any host, and the run went on from "
        f"the newest whole checkpoint. At the end the losses of all {steps} steps differ by {losses:.1e} at most from "
        f"those of the same run without faults, the exported weights by {weights:.1e}.",
        "",
        "| | fault | after step | dsrun | seconds until nothing was left | went on from | steps lost |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number, row in enumerate(rows, 1):
        ended = (f"**wrong**: {row.wrong[0][:200]}; " if row.wrong else "") + row.ended
        resumed = ("-", "-") if row.resumed_from is None else (row.resumed_from, row.lost)
        seconds = f"{row.seconds:.1f}" if row.resumed_from is not None else "-"
        cells = (number, row.fault, row.step, ended, seconds, *resumed)
        lines.append(
            "| " + " | ".join(" ".join(str(cell).replace("|", "/").split()) for cell in cells) + " |"
        )
    lines += [
        "",
        f"Lost steps had been done and were done again: at most one save interval ({SAVE_STEPS} steps), two where the "
        "newest checkpoint was damaged afterwards. The seconds of a fault that dsrun waits for hold its timeout. A "
        "host agent that is stopped (SIGSTOP) can't end before it goes on: all else had ended by then, and it did "
        "after.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=60, help="no further faults after so many")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    plan = [(fault, rng.choice(LEAPS)) for fault in drawn(given.faults, rng)]
    steps = sum(leap for _, leap in plan) + max(LEAPS)
    rows: list[Row] = []
    step, until_s = 0, time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="drawn-faults-") as text, lab_on_a_disk(Path(text)) as cluster:
        journey = Journey(cluster, steps, rng)
        undisturbed = journey.undisturbed()
        assert undisturbed.code == 0, undisturbed.err
        journey.begin()
        for fault, leap in plan:
            if time.monotonic() > until_s:
                break
            step += leap
            rows.append(journey.meet(fault, step))
            print(len(rows), rows[-1], flush=True)
        done = journey.end()
        assert done.code == 0, done.err
        losses, weights = difference(undisturbed, done)
    given.page.write_text(page(rows, given, steps, losses, weights), encoding="utf-8")
    wrong = sum(bool(row.wrong) for row in rows)
    print(
        f"{len(rows)} faults, {wrong} wrong; largest difference: losses {losses:.1e}, weights {weights:.1e}"
    )
    return int(wrong > 0 or not max(losses, weights) <= SAME)


if __name__ == "__main__":
    sys.exit(main())

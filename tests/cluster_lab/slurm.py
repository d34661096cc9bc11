"""Slurm on a lab's hosts: munged and slurmctld on its controller, one slurmd a host, nothing of the system's own.

Every daemon lives in the lab's networks, so ports meet nobody else's and the lab's keeper ends them in any case.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

from lab import Lab, demand_programs, find_program, wait_for

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")


class Slurm:
    """`with Slurm(lab) as slurm:` starts it. `environ` is what a program needs to reach it, the lab's included.

    Every node claims `cpus` CPUs and `gpus` GPUs, which are files that are no GPUs: Slurm gives them out and sets
    CUDA_VISIBLE_DEVICES as it does for real ones. One partition, "main".

    Raises `lab.UnavailableError` where Slurm is not installed.
    """

    def __init__(self, lab: Lab, cpus: int = 8, gpus: int = 4) -> None:
        self.lab = lab
        self.cpus = cpus
        self.gpus = gpus
        self.environ: dict[str, str] = {}

    def __enter__(self) -> Slurm:
        demand_programs(NEEDED)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for host in self.lab.hosts:
            host.end_daemon("slurmd")
        for name in ("slurmctld", "munged"):
            self.lab.controller.end_daemon(name)

    def states(self) -> dict[str, str]:
        """Every node's state, as sinfo says it ("idle", "down*", ...)."""
        argv = [str(find_program("sinfo")), "--noheader", "--Node", "--format=%N %t"]
        done = subprocess.run(
            argv, check=False, env={**os.environ, **self.environ}, capture_output=True, text=True, timeout=120
        )
        return dict(line.split() for line in done.stdout.splitlines())

    def _build(self) -> None:
        folder = self.lab.folder / "slurm"
        folder.mkdir()
        self.environ = {**self.lab.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        controller = self.lab.controller
        self._start_munged(folder)
        self._write_files(folder)
        controller.start_daemon("slurmctld", [str(find_program("slurmctld")), "-D"], env=self.environ)
        for host in self.lab.hosts:
            host.start_daemon(
                "slurmd", [str(find_program("slurmd")), "-D", "-N", host.name], env=self.environ
            )
        if not wait_for(lambda: list(self.states().values()) == ["idle"] * len(self.lab.hosts), 300, 0.2):
            logs = [controller.log("slurmctld"), *(host.log("slurmd") for host in self.lab.hosts)]
            said = "\n".join(f"{log.name}:\n{log.read_text()}" for log in logs)
            raise RuntimeError(f"Slurm's nodes do not become idle: {self.states()}\n{said}")

    def _start_munged(self, folder: Path) -> None:
        munge = folder / "munge"
        munge.mkdir(mode=0o755)
        key = munge / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        options = {"key-file": key, "socket": munge / "socket", "pid-file": munge / "pid"}
        options |= {"log-file": munge / "log", "seed-file": munge / "seed"}
        argv = [
            str(find_program("munged")),
            "--foreground",
            *(f"--{name}={path}" for name, path in options.items()),
        ]
        self.lab.controller.start_daemon("munged", argv)
        if not wait_for((munge / "socket").exists):
            raise RuntimeError(f"munged does not start\n{self.lab.controller.log('munged').read_text()}")

    def _write_files(self, folder: Path) -> None:
        lab = self.lab
        (folder / "state").mkdir()
        devices = folder / "dev"
        devices.mkdir()
        for number in range(self.gpus):
            os.mknod(devices / f"gpu{number}", 0o20666, os.makedev(1, 3))
        for host in lab.hosts:
            (folder / f"spool.{host.name}").mkdir()
        names = ",".join(host.name for host in lab.hosts)
        nodes = "".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs={self.cpus} RealMemory=8000 Gres=gpu:{self.gpus}\n"
            for host in lab.hosts
        )
        (folder / "slurm.conf").write_text(
            f"""ClusterName={lab.bridge}
SlurmctldHost={lab.controller.name}({lab.controller.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0
MpiDefault=none
ReturnToService=2
KillWait=5
MailProg=/bin/true
# Nodes have what is said here, whatever this machine has.
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
        )
        (folder / "gres.conf").write_text(f"Name=gpu File={devices}/gpu[0-{self.gpus - 1}]\n")
        # Machines with both versions mounted are taken for version 2, which then isn't whole.
        plain_v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        (folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n" if plain_v2 else "CgroupPlugin=cgroup/v1\n"
        )

"""Clusters' files: what they say, and every way in which they can be wrong."""

from __future__ import annotations

import dataclasses

import pytest

from dsrun import catalog
from dsrun.errors import DsrunError
from dsrun.jobs import sites
from dsrun.jobs.launchers.kubernetes import PodSpec
from dsrun.jobs.sites import Site

PODS = "launcher = 'kubernetes'\nkubernetes = { image = 'lab/dsrun', claim = 'runs', mount_path = '/runs' }"
FAULTS = [
    # text of the file, words that the messages hold
    ("partitoin = 'gpu'", ["unknown key 'partitoin'", "Did you mean 'partition'?"]),
    ("zzz = 1", ["unknown key 'zzz'", "A cluster's file holds description, launcher"]),
    ("launcher = 'torchrun'", ["launcher: can't be 'torchrun'", "one of ssh, pdsh"]),
    ("partition = 1", ["partition: can't be 1"]),
    ("partition = 'a b'", ["partition: can't be 'a b'"]),
    ('partition = "gpu\\n#SBATCH --uid=0"', ["partition: can't be"]),
    ('account = "x\\u2028y"', ["account: can't be"]),
    ("account = '-x'", ["account: can't be '-x'"]),
    ("qos = ''", ["qos: can't be ''"]),
    ("constraint = 'a100;rm'", ["constraint: can't be"]),
    ("reservation = 'a,,b'", ["reservation: can't be"]),
    ("time_limit_min = '2:00:00'", ["time_limit_min: can't be '2:00:00'", "minutes, a whole number"]),
    ("time_limit_min = true", ["time_limit_min: can't be True"]),
    ("time_limit_min = 1.5", ["time_limit_min: can't be 1.5"]),
    ("signal_s = 70000", ["signal_s: can't be 70000"]),
    ("requeue = 'yes'", ["requeue: can't be 'yes'"]),
    ("gpus_per_node = 0", ["gpus_per_node: can't be 0"]),
    ("gres = 'gpu:8'", ["gres: can't be 'gpu:8'", "{gpus}"]),
    ("gres = 'gpu:{gpus} --x'", ["gres: can't be"]),
    ("memory_gib = -1", ["memory_gib: can't be -1"]),
    ("modules = 'cuda'", ["modules: can't be 'cuda'", "a list"]),
    ("modules = ['cuda; rm']", ["modules: can't be"]),
    ("modules = ['-x']", ["modules: can't be"]),
    ("setup = ['a\\nb', 1]", ["setup: can't be"]),
    ("environment = 'A=1'", ["environment: can't be 'A=1'"]),
    ("[environment]\nNCCL_DEBUG = 1", ["environment.NCCL_DEBUG: can't be 1", 'as "1"']),
    ('[environment]\n"A B" = "1"', ["environment.A B: is no variable's name"]),
    ("[environment]\nHF_TOKEN = 'x'", ["environment.HF_TOKEN: looks like a secret"]),
    ("[environment]\nMASTER_PORT = '1'", ["environment.MASTER_PORT: is set for each rank by dsrun"]),
    ("launcher = 'ssh'\nhosts = 'gpu[01-04]'", ["hosts: no number of slots"]),
    ("launcher = 'ssh'\nhosts = 'a:1'\nhostfile = 'h'", ["hosts and hostfile both say"]),
    ("hosts = 'a:1'", ["names hosts, and Slurm chooses them"]),
    (f"{PODS}\nhosts = 'a:1'", ["names hosts, and Kubernetes chooses them"]),
    ("launcher = 'kubernetes'", ['has launcher = "kubernetes" and no [kubernetes]']),
    (f"{PODS}".replace("kubernetes'", "ssh'"), ['has [kubernetes] and no launcher = "kubernetes"']),
    ("launcher = 'kubernetes'\nkubernetes = { image = 'x' }", ["kubernetes: lacks claim, mount_path"]),
    (
        PODS.replace("image", "imagge = '', image"),
        ["kubernetes: unknown key 'imagge'", "Did you mean 'image'?"],
    ),
    (PODS.replace("image", "cpu = '8', image"), ["kubernetes.cpu: can't be '8'", "cores, a number"]),
    (PODS.replace("image", "cpu = nan, image"), ["kubernetes.cpu: can't be nan"]),
    (PODS.replace("image", "labels = { a = 1 }, image"), ["kubernetes.labels: has a value that is no text"]),
    (PODS.replace("image", "tolerations = ['x'], image"), ["kubernetes.tolerations: can't be ['x']"]),
    (PODS.replace("image", "shm_gib = 1.5, image"), ["kubernetes.shm_gib: can't be 1.5"]),
    ("interface = 'eth0 eth1'", ["interface: can't be"]),
    ("interface = '^docker0'", ["interface: can't be"]),  # NCCL's own grammar, which Gloo doesn't know
    ("python = ''", ["python: can't be ''"]),
    ("partition = ", ["is not valid TOML"]),
]


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "a lab's 集群.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(path):
    with pytest.raises(DsrunError) as error:
        sites.load(str(path))
    return error.value.problems


@pytest.mark.parametrize(("text", "words"), FAULTS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong(write, text, words):
    path = write(text)
    found = problems(path)
    assert len(found) == 1
    assert found[0].where.startswith(str(path))
    for word in words:
        assert word in str(found[0])


def test_everything_that_is_wrong_is_told_at_once(write):
    found = problems(write("partition = 1\nqos = 2\nwrong = 3\n[environment]\nA = 4\n"))
    assert len(found) == 4


def test_every_field_has_a_key():
    fields = {field.name for field in dataclasses.fields(Site)} - {"name", "path"}
    assert fields == set(sites.KEYS)
    # What the site says for every launcher is not said again for pods, and the folder is the command's.
    pod = {field.name for field in dataclasses.fields(PodSpec)} - {"env", "time_limit_min", "cwd"}
    assert pod | {"python"} == set(sites.PODS)


def test_an_empty_file_says_nothing(write):
    path = write("")
    assert sites.load(str(path)) == Site(name="a lab's 集群", path=path)


def test_all_that_can_be_said(write):
    path = write(
        """
        launcher = "slurm"
        interface = "ib0"
        modules = ["cuda/12.4"]
        setup = ["export A='x  y'"]
        container = ["apptainer", "exec", "--nv", "/images/a b.sif"]
        gres = ""
        [environment]
        NCCL_DEBUG = "WARN"
        GLOO_SOCKET_IFNAME = "eth0"
        """
    )
    site = sites.load(str(path))
    assert site.modules == ("cuda/12.4",)
    assert site.setup == ("export A='x  y'",)
    assert site.container[-1] == "/images/a b.sif"
    assert site.gres == ""
    # What [environment] says of one variable is more exact than `interface`.
    assert site.exports == {
        "NCCL_SOCKET_IFNAME": "ib0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "WARN",
    }


def test_a_hostfile_lies_beside_its_site(write):
    path = write("launcher = 'ssh'\nhostfile = 'hosts/all'")
    assert sites.load(str(path)).hostfile == str(path.parent / "hosts" / "all")
    path = write("launcher = 'ssh'\nhostfile = '/etc/hosts.mpi'")
    assert sites.load(str(path)).hostfile == "/etc/hosts.mpi"


def test_what_ships_is_right_and_introduces_itself():
    shipped = catalog.files(sites.KIND)
    assert len(shipped) >= 3
    found = {name: sites.load(name) for name in shipped}
    assert {"slurm", "ssh", "kubernetes"} <= {site.launcher for site in found.values()}
    for name, site in found.items():
        head = shipped[name].read_text(encoding="utf-8").split("\n\n")[0]
        assert "# For " in head
        assert "# Not for " in head
        assert site.description


def test_a_labs_own_file_is_nearer(lab):
    folder = lab / "launch" / "clusters"
    folder.mkdir(parents=True)
    (folder / "example-slurm.toml").write_text("partition = 'ours'")
    assert sites.load("example-slurm").partition == "ours"


def test_an_unknown_name():
    with pytest.raises(DsrunError, match="unknown cluster 'exmaple-slurm'") as error:
        sites.load("exmaple-slurm")
    assert "Did you mean 'example-slurm'?" in str(error.value)
    with pytest.raises(DsrunError) as error:
        sites.load("zzz")
    assert "There are example-kubernetes, example-slurm, example-ssh" in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DsrunError, match="can't be read"):
        sites.load(str(tmp_path / "no.toml"))


def test_the_command_line_comes_before_the_file():
    site = sites.changed(Site(partition="a", qos="q"), {"partition": "b", "qos": None, "gpus_per_node": 4})
    assert (site.partition, site.qos, site.gpus_per_node) == ("b", "q", 4)
    with pytest.raises(DsrunError, match="--partition: can't be 'a b'"):
        sites.changed(Site(), {"partition": "a b"})

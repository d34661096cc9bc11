"""Clusters' files: what they say, and every way in which they can be wrong."""

from __future__ import annotations

import pytest

from dsrun import catalog
from dsrun.errors import DsrunError
from dsrun.jobs.launchers.common import cluster_files
from dsrun.jobs.launchers.common.cluster_files import ClusterFile

PODS = "launcher = 'kubernetes'\nkubernetes = { image = 'lab/dsrun', claim = 'runs', mount_path = '/runs' }"
FAULTS = [
    # text of the file, what stands behind its path, a word of the message
    ("partitoin = 'gpu'", "", "'partition'"),
    ("zzz = 1", "", "'zzz'"),
    ("launcher = 'torchrun'", "launcher", "pdsh"),
    ("partition = 1", "partition", "1"),
    ("partition = 'a b'", "partition", "'a b'"),
    ('partition = "gpu\\n#SBATCH --uid=0"', "partition", ""),
    ('account = "x\\u2028y"', "account", ""),
    ("account = '-x'", "account", "'-x'"),
    ("qos = ''", "qos", "''"),
    ("constraint = 'a100;rm'", "constraint", ""),
    ("reservation = 'a,,b'", "reservation", ""),
    ("time_limit_min = '2:00:00'", "time_limit_min", "minutes"),
    ("time_limit_min = true", "time_limit_min", "True"),
    ("time_limit_min = 1.5", "time_limit_min", "1.5"),
    ("signal_s = 70000", "signal_s", "65535"),
    ("requeue = 'yes'", "requeue", "true or false"),
    ("gpus_per_node = 0", "gpus_per_node", "0"),
    ("gres = 'gpu:8'", "gres", "{gpus}"),
    ("gres = 'gpu:{gpus} --x'", "gres", ""),
    ("memory_gib = -1", "memory_gib", "-1"),
    ("modules = 'cuda'", "modules", "list"),
    ("modules = ['cuda; rm']", "modules", ""),
    ("modules = ['-x']", "modules", ""),
    ("setup = ['a\\nb', 1]", "setup", ""),
    ("environment = 'A=1'", "environment", "table"),
    ("[environment]\nNCCL_DEBUG = 1", "environment.NCCL_DEBUG", '"1"'),
    ('[environment]\n"A B" = "1"', "environment.A B", "name"),
    ("[environment]\nHF_TOKEN = 'x'", "environment.HF_TOKEN", "secret"),
    ("[environment]\nMASTER_PORT = '1'", "environment.MASTER_PORT", "rank"),
    ('[environment]\nA = "\\u0000"', "environment.A", "NUL"),
    ("launcher = 'ssh'\nhosts = 'gpu[01-04]'", "hosts", "slots"),
    ("launcher = 'ssh'\nhosts = 'a:1'\nhostfile = 'h'", "", "hostfile"),
    ("hosts = 'a:1'", "", "Slurm"),
    (f"{PODS}\nhosts = 'a:1'", "", "Kubernetes"),
    ("launcher = 'kubernetes'", "", "[kubernetes]"),
    (f"{PODS}".replace("kubernetes'", "ssh'"), "", "[kubernetes]"),
    ("launcher = 'kubernetes'\nkubernetes = { image = 'x' }", "kubernetes", "claim, mount_path"),
    (PODS.replace("image", "imagge = '', image"), "kubernetes", "'image'"),
    ("interface = 'eth0 eth1'", "interface", ""),
    ("interface = '^docker0'", "interface", ""),  # NCCL's own grammar, which Gloo doesn't know
    ("python = ''", "python", ""),
    ("partition = ", "", "TOML"),
]
POD_FAULTS = [
    # more of [kubernetes], the place of what is wrong in it
    ("cpu = '8'", "cpu"), ("cpu = nan", "cpu"), ("cpu = 0", "cpu"), ("memory_gib = 0", "memory_gib"),
    ("shm_gib = 1.5", "shm_gib"), ("shm_gib = 0", "shm_gib"), ("shm_gib = 64", "shm_gib"), ("grace_s = -1", "grace_s"),
    ("ttl_s = -1", "ttl_s"), ("labels = { a = 1 }", "labels.a"), ("labels = { 'A_/b' = 'c' }", "labels"),
    ("node_selector = { 'a b' = 'c' }", "node_selector"), ("node_selector = { a = 'b c' }", "node_selector.a"),
    ("namespace = 'Team'", "namespace"), ("namespace = 'a.b'", "namespace"), ("namespace = ''", "namespace"),
    ("claim = 'a_b'", "claim"), ('claim = "a\\n"', "claim"), ("secret = '-a'", "secret"),
    ("image_pull_secret = 'A'", "image_pull_secret"), ("image = ''", "image"), ("image = 'a b'", "image"),
    ("image_pull_policy = 'always'", "image_pull_policy"), ("mount_path = 'runs'", "mount_path"),
    ("mount_path = '/'", "mount_path"), ("mount_path = '/a/../b'", "mount_path"),
    ("mount_path = '/..'", "mount_path"), ("mount_path = '/dev/shm'", "mount_path"),
    ("mount_path = '/proc'", "mount_path"), ("mount_path = '/a:b'", "mount_path"),
    ("gpu_resource = 'gpu'", "gpu_resource"), ("secret_variables = ['A']", "secret"),
    ("secret_variables = ['A B']\nsecret = 's'", "secret_variables"), ("tolerations = ['x']", "tolerations"),
    ("tolerations = [{ keys = 'a' }]", "tolerations[0]"), ("tolerations = [{ }]", "tolerations[0]"),
    ("tolerations = [{ key = 'a', effect = 'noschedule' }]", "tolerations[0].effect"),
    ("tolerations = [{ key = 1 }]", "tolerations[0].key"),
    ("tolerations = [{ key = 'a', operator = 'Exists', value = 'b' }]", "tolerations[0]"),
    ("tolerations = [{ key = 'a', tolerationSeconds = 1 }]", "tolerations[0]"),
]  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "a lab's 集群.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(path):
    with pytest.raises(DsrunError) as error:
        cluster_files.load(str(path))
    return error.value.problems


@pytest.mark.parametrize(("text", "place", "word"), FAULTS, ids=[row[0] for row in FAULTS])
def test_what_is_wrong(write, text, place, word):
    path = write(text)
    (found,) = problems(path)
    assert found.where == (f"{path}: {place}" if place else str(path))
    assert word in f"{found.what} {found.hint}"


@pytest.mark.parametrize(("text", "place"), POD_FAULTS)
def test_what_kubernetes_would_refuse(write, text, place):
    usual = {"image": "'lab/dsrun'", "claim": "'runs'", "mount_path": "'/runs'"}
    given = {name: value for name, value in usual.items() if not text.startswith(name + " ")}
    lines = [f"{name} = {value}" for name, value in given.items()]
    path = write("\n".join(["launcher = 'kubernetes'", "[kubernetes]", *lines, text]))
    assert f"{path}: kubernetes.{place}" in [found.where for found in problems(path)]


def test_everything_that_is_wrong_is_told_at_once(write):
    found = problems(write("partition = 1\nqos = 2\nwrong = 3\n[environment]\nA = 4\n"))
    assert len(found) == 4


def test_an_empty_file_says_nothing(write):
    path = write("")
    assert cluster_files.load(str(path)) == ClusterFile(name="a lab's 集群", path=path)


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
    cluster = cluster_files.load(str(path))
    assert cluster.modules == ("cuda/12.4",)
    assert cluster.setup == ("export A='x  y'",)
    assert cluster.container[-1] == "/images/a b.sif"
    assert cluster.gres == ""
    # What [environment] says of one variable is more exact than `interface`.
    assert cluster.exports == {
        "NCCL_SOCKET_IFNAME": "ib0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "WARN",
    }


def test_a_hostfile_lies_beside_its_site(write):
    path = write("launcher = 'ssh'\nhostfile = 'hosts/all'")
    assert cluster_files.load(str(path)).hostfile == str(path.parent / "hosts" / "all")
    path = write("launcher = 'ssh'\nhostfile = '/etc/hosts.mpi'")
    assert cluster_files.load(str(path)).hostfile == "/etc/hosts.mpi"


def test_what_ships_is_right_and_introduces_itself():
    shipped = catalog.files(cluster_files.KIND)
    assert len(shipped) >= 3
    found = {name: cluster_files.load(name) for name in shipped}
    assert {"slurm", "ssh", "kubernetes"} <= {cluster.launcher for cluster in found.values()}
    for name, cluster in found.items():
        head = shipped[name].read_text(encoding="utf-8").split("\n\n")[0]
        assert "# For " in head
        assert "# Not for " in head
        assert cluster.description


def test_a_labs_own_file_is_nearer(lab):
    folder = lab / "launch" / "clusters"
    folder.mkdir(parents=True)
    (folder / "example-slurm.toml").write_text("partition = 'ours'")
    assert cluster_files.load("example-slurm").partition == "ours"


def test_an_unknown_name():
    with pytest.raises(DsrunError, match="unknown cluster 'exmaple-slurm'") as error:
        cluster_files.load("exmaple-slurm")
    assert "Did you mean 'example-slurm'?" in str(error.value)
    with pytest.raises(DsrunError, match="zzz"):
        cluster_files.load("zzz")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DsrunError, match="can't be read"):
        cluster_files.load(str(tmp_path / "no.toml"))


def test_the_command_line_comes_before_the_file():
    cluster = cluster_files.changed(
        ClusterFile(partition="a", qos="q"), {"partition": "b", "qos": None, "gpus_per_node": 4}
    )
    assert (cluster.partition, cluster.qos, cluster.gpus_per_node) == ("b", "q", 4)
    with pytest.raises(DsrunError, match="--partition"):
        cluster_files.changed(ClusterFile(), {"partition": "a b"})

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needed import since
from running import examples

from dsrun.errors import DsrunError
from dsrun.jobs.launchers.common import forwarded_environment

OWN = str(Path(sys.executable).parent)
PATH = "/usr/bin:/bin"
HOME = {"PATH": PATH, "HOME": "/nowhere"}


def forwarded(environ, **more):
    return forwarded_environment.forwarded({**HOME, **environ}, **{"files": (), **more})


def problems(error) -> str:
    return str(error.value)


# --- what is forwarded ---

GOES = [
    "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "HUGGINGFACE_HUB_CACHE",
    "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "WANDB_MODE", "TORCH_EXTENSIONS_DIR",
    "TORCH_CUDA_ARCH_LIST", "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "CUDA_HOME",
    "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME", "UCX_NET_DEVICES", "MV2_USE_CUDA", "MLFLOW_TRACKING_URI", "COMET_API_KEY",
    "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "KMP_AFFINITY", "FI_PROVIDER", "IBV_FORK_SAFE", "RDMAV_FORK_SAFE", "TRITON_CACHE_DIR",
    "DS_ACCELERATOR", "DS_SKIP_CUDA_CHECK", "DEEPSPEED_TIMEOUT", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM", "DSRUN_CACHE", "ACCELERATE_MIXED_PRECISION", "NVSHMEM_SYMMETRIC_SIZE",
    "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "HTTP_PROXY",
    "https_proxy", "no_proxy", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE", "XDG_CACHE_HOME", "MAX_JOBS", "CC", "CXX", "CUDAHOSTCXX", "NVCC_PREPEND_FLAGS",
    "MALLOC_ARENA_MAX", "NVIDIA_TF32_OVERRIDE",
]  # fmt: skip
STAYS = [
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SSH_AUTH_SOCK",
    "SSH_CONNECTION", "DISPLAY", "HOSTNAME", "PWD", "OLDPWD", "DSRUN_SUPERVISOR_PID", "LOCAL_SIZE",
    "CROSS_RANK", "CROSS_SIZE", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "XDG_RUNTIME_DIR",
    "LD_PRELOAD", "TORCHELASTIC_RUN_ID", "WANDB_SERVICE", "_", "PS1", "EDITOR", "KUBERNETES_SERVICE_HOST",
    "AWS_SECRET_ACCESS_KEY",
]  # fmt: skip


@pytest.mark.parametrize("name", GOES)
def test_it_is_forwarded(name):
    assert forwarded({name: "x y"})[name] == "x y"


@pytest.mark.parametrize("name", STAYS)
def test_it_stays(name):
    assert name not in forwarded({name: "x"})


def test_names_that_no_shell_can_export_stay():
    assert set(forwarded({"NCCL_A-B": "1", "BASH_FUNC_ml%%": "() { }", "HF_ü": "1", "PYTHON.X": ""})) == {
        "PATH"
    }


@since(deepspeed="0.19.7")  # before, with variables of a service that is gone
def test_what_deepspeed_exports_is_forwarded():
    runner = pytest.importorskip("deepspeed.launcher.runner")
    accelerator = pytest.importorskip("deepspeed.accelerator.cuda_accelerator")
    prefixes = runner.EXPORT_ENVS + accelerator.CUDA_Accelerator.export_envs(None)
    assert len(prefixes) > 4
    for prefix in prefixes:
        assert forwarded_environment.is_forwarded(prefix)
        assert forwarded_environment.is_forwarded(f"{prefix}_X")
        assert forwarded_environment.is_forwarded(f"{prefix}X")


def test_the_folder_of_python_is_on_path():
    assert forwarded({})["PATH"] == f"{OWN}:{PATH}"
    assert forwarded({"PATH": f"/a:{OWN}"})["PATH"] == f"/a:{OWN}"
    assert forwarded({"PATH": ""})["PATH"] == f"{OWN}:{os.defpath}"
    assert forwarded({}, add=["PATH=/x"])["PATH"] == f"{OWN}:/x"
    assert forwarded_environment.forwarded({}, files=()) == {"PATH": f"{OWN}:{os.defpath}"}


def test_what_comes_later_wins(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("NCCL_C=one\nNCCL_D=one\nNCCL_E=one\n")
    two.write_text("NCCL_D=two\nNCCL_E=two\n")
    env = forwarded(
        dict.fromkeys(["NCCL_A", "NCCL_B", "NCCL_C", "NCCL_D", "NCCL_E"], "user"),
        cluster=dict.fromkeys(["NCCL_B", "NCCL_C", "NCCL_D", "NCCL_E"], "cluster"),
        files=[one, two],
        add=["NCCL_E=added"],
    )
    assert [env[f"NCCL_{letter}"] for letter in "ABCDE"] == ["user", "cluster", "one", "two", "added"]
    assert list(env) == sorted(env)


def test_what_the_user_adds():
    env = forwarded(
        {"MY_VAR": "mine", "EMPTY": ""}, add=["MY_VAR", "EMPTY", "A=1=2", "B=", "C= a $HOME 'x'\n"]
    )
    env.pop("PATH")
    assert env == {"MY_VAR": "mine", "EMPTY": "", "A": "1=2", "B": "", "C": " a $HOME 'x'\n"}


def test_every_wrong_variable_is_named(tmp_path):
    file = tmp_path / "env"
    file.write_text("nonsense\nRANK=1\n")
    with pytest.raises(DsrunError) as error:
        forwarded(
            {"HF_HOME": "x"},
            add=["A-B=1", "1A", "", "HFHOME", "NOT_SET", "CUDA_VISIBLE_DEVICES=0", "OK=1", "X=\0"],
            files=[file, tmp_path / "missing"],
        )
    assert len(error.value.problems) == 10
    places = [problem.where for problem in error.value.problems]
    assert {"--env", f"{file}:1", f"{file}:2", str(tmp_path / "missing")} <= set(places)
    assert "HF_HOME" in problems(error)


# --- .deepspeed_env ---


def test_a_file():
    text = "\n# NCCL first, a=b\n  NCCL_DEBUG = INFO \r\nexport HF_HOME=/data/h f\n\n\tA=\nA=1\nB==x\nJ={\"a\": 'b\\n'}"
    assert forwarded_environment.parse(text, "f") == {
        "NCCL_DEBUG": "INFO", "HF_HOME": "/data/h f", "A": "1", "B": "=x", "J": "{\"a\": 'b\\n'}",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("NCCL_DEBUG", "NAME=VALUE"), ("source /etc/profile", "NAME=VALUE"), ("=1", "''"), ("A B=1", "'A B'"),
        ("1A=1", "'1A'"), ("if [ a = b ]", "'if [ a'"), ('A="b c"', "quotes"), ("A='b'", "quotes"), ('A=""', "quotes"),
        ("A=$HOME/x", "shell"), ("A=x${B}", "shell"), ("A=$(hostname)", "shell"), ("A=`hostname`", "shell"),
        ("A=1 # one", "#"), ("A=# one", "#"), ("CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES"),
        ("MASTER_ADDR=h", "--master-addr"), ("A=\0", "NUL"),
    ],
)  # fmt: skip
def test_a_line_that_is_wrong(line, word):
    with pytest.raises(DsrunError) as error:
        forwarded_environment.parse(f"# fine\n\nB=1\n{line}\n", "some/file")
    (problem,) = error.value.problems
    assert problem.where == "some/file:4"
    assert word in f"{problem.what} {problem.hint}"


def test_no_value_of_a_file_is_in_a_message():
    text = 'HF_TOKEN="abcdef"\nabcdef\nA=$abcdef\nB=`abcdef`\nC=1 #abcdef\nRANK=abcdef\nD=\0abcdef\n'
    with pytest.raises(DsrunError) as error:
        forwarded_environment.parse(text, "f")
    assert len(error.value.problems) == 7
    assert "abcdef" not in problems(error)


@settings(max_examples=examples(500))
@given(st.text() | st.text(alphabet="AB1_= \n\r\t\"'$`#\\\0é\x0b\u2028"))
def test_any_text_gives_variables_or_a_dsrun_error(text):
    try:
        found = forwarded_environment.parse(text, "f")
    except DsrunError as error:
        assert all(problem.where.startswith("f:") for problem in error.problems)
    else:
        for name, value in found.items():
            assert forwarded_environment.NAME.fullmatch(name)
            assert "\0" not in value
            assert "\n" not in value


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary())
def test_any_file_gives_variables_or_a_dsrun_error(tmp_path, content):
    path = tmp_path / "env"
    path.write_bytes(content)
    try:
        forwarded_environment.read(path)
    except DsrunError as error:
        assert all(problem.where.startswith(str(path)) for problem in error.problems)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(DsrunError, match="can't be read: Is a directory"):
        forwarded_environment.read(tmp_path)


def test_the_files_of_deepspeeds_launcher(tmp_path, monkeypatch):
    home, cwd = tmp_path / "home 家", tmp_path / "cwd"
    for folder in (home, cwd):
        folder.mkdir()
    monkeypatch.chdir(cwd)
    environ = {"HOME": str(home)}
    assert forwarded_environment.env_files(environ) == []
    (home / ".deepspeed_env").write_text("NCCL_A=home\nNCCL_B=home\n")
    (cwd / ".deepspeed_env").write_text("\n# mine\nNCCL_B=cwd\n")
    (cwd / "other").write_text("NCCL_B=other\n")
    before = {path: path.stat() for path in tmp_path.rglob("*")}
    assert forwarded_environment.env_files(environ) == [home / ".deepspeed_env", Path(".deepspeed_env")]
    env = forwarded_environment.forwarded(environ)
    assert (env["NCCL_A"], env["NCCL_B"]) == ("home", "cwd")
    assert forwarded_environment.env_files({**environ, "DS_ENV_FILE": "other"}) == [Path("other")]
    absolute = str(cwd / "other")
    assert forwarded_environment.env_files({**environ, "DS_ENV_FILE": absolute}) == [Path(absolute)]
    assert len(forwarded_environment.env_files({"HOME": str(cwd)})) == 1
    after = {path: path.stat() for path in tmp_path.rglob("*")}
    assert {p: (s.st_mtime_ns, s.st_size) for p, s in before.items()} == {
        p: (s.st_mtime_ns, s.st_size) for p, s in after.items()
    }


@pytest.fixture(scope="module")
def theirs():
    """What arrives on a host: DeepSpeed's reading of the lines, its pdsh command, and a shell that runs it."""
    runners = pytest.importorskip("deepspeed.launcher.multinode_runner")

    def read(text: str) -> dict[str, str]:
        class Runner(runners.PDSHRunner):
            def __init__(self):
                self.exports = {}

        runner = Runner()
        for line in text.splitlines(keepends=True):
            key, value = line.split("=", maxsplit=1)  # runner.py, main
            runner.add_export(key, value)
        command = "".join(f"export {name}={value}; " for name, value in runner.exports.items()) + "env -0"
        done = subprocess.run(
            ["/bin/sh", "-c", command], capture_output=True, text=True, check=True, env={"PATH": PATH}
        )
        return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)

    return read


SIMPLE = st.text(alphabet="azAZ09 _@%+=:,./-~*?[]{}();&|<>!^#$éΩ训'", max_size=12).filter(
    lambda v: v == v.strip()
)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.dictionaries(st.from_regex(r"[A-Z]_[A-Z0-9_]{0,5}", fullmatch=True), SIMPLE, min_size=1, max_size=8)
)
def test_what_is_accepted_arrives_as_deepspeed_brings_it(theirs, values):
    text = "".join(f"{name}={value}\n" for name, value in values.items())
    try:
        ours = forwarded_environment.parse(text, "f")
    except DsrunError:
        return
    assert ours == values
    read = theirs(text)
    assert {name: read[name] for name in ours} == ours


def test_export_and_spaces_arrive_as_deepspeed_brings_them(theirs):
    text = "export A=1\n B = 2 \nA=3\nexport  C=x y\n"
    ours = forwarded_environment.parse(text, "f")
    assert ours == {"A": "3", "B": "2", "C": "x y"}
    read = theirs(text.replace("A=3\n", ""))
    assert {name: read[name] for name in "ABC"} == {**ours, "A": "1"}


@pytest.mark.parametrize("text", ["\n", "# text\n", "NAME\n"])
def test_what_deepspeed_stumbles_over(theirs, text):
    with pytest.raises(ValueError, match="not enough values"):
        theirs(text)


def test_a_comment_with_an_equals_sign_ends_deepspeeds_command(theirs):
    assert "A" not in theirs("# a=b\nA=1\n")

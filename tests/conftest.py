from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
from running import Done, alone, little_data, words_of

from dsrun.cli import main
from dsrun.cluster import extensions
from dsrun.config.presets.build import Options, build_config
from dsrun.job.job import DataSpec, HostDevices, Job, ModelSpec, Prepared, TrainingSpec

ROOT = Path(__file__).resolve().parents[1]
LIGHT = ROOT / "tests/light"
OF_THE_USER = (
    "DSRUN_PATH", "DSRUN_NVME_PATH", "DSRUN_HOSTFILE", "DSRUN_CLUSTER", "SLURM_", "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)  # fmt: skip
"""Variables that begin so would change the answers of a dsrun in this process; a job's environment has its own rule."""


# The same examples for everybody, so that a failure is the change's; `--hypothesis-profile random` looks for new ones.
# Neither fails on a machine that is busy.
patient = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("random", patient)
hypothesis.settings.register_profile("full", patient, derandomize=True)
hypothesis.settings.register_profile("steady", patient, derandomize=True, max_examples=15)
hypothesis.settings.load_profile("steady")

# Tiny models compute sooner without threads, which wait for one another by turning a core that others could use.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell's background jobs ignore Ctrl-C, what nohup starts a hang-up, and so would everything that a test starts.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="whole grids too: every launcher with every stage, ..."
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # ten thousand tests are made, and none of them is garbage
    if config.getoption("--full"):
        hypothesis.settings.load_profile("full")


def pytest_report_header(config: pytest.Config) -> str:
    lane = "full" if config.getoption("--full") else "default, without the grids of --full"
    return f"lane: {config.getoption('-m') or lane}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`fast` is what starts no job; the grids wait for --full.

    Files that start jobs come first, those with the most of them before all: no worker is left alone with one at the
    end, when the others have nothing more to do while its processes wait for one another.
    """
    for item in items:
        if not item.get_closest_marker("slow") and not item.get_closest_marker("full"):
            item.add_marker("fast")
    if not config.getoption("--full"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    jobs = {path: sum("fast" not in item.keywords for item in found) for path, found in files.items()}
    items[:] = [item for path in sorted(files, key=lambda path: -jobs[path]) for item in files[path]]


def pytest_collection_finish() -> None:
    """Collected tests stay to the end: no search for cycles goes through them again."""
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path_factory):
    """No test sees the presets, folders or calibrations of whoever runs it, nor that this machine is offline."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no-config"))
    for name in os.environ:
        if name.startswith(OF_THE_USER):
            monkeypatch.delenv(name)
    monkeypatch.setenv("DSRUN_TRACE", "0")  # a trace takes seconds: tests of traces ask for it


@pytest.fixture
def untouched(tmp_path):
    """Afterwards nothing may have been made or changed in the test's folder."""

    def content():
        return sorted((str(path), path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))

    before = content()
    yield
    assert content() == before


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder that all workers of these tests share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def environ(shared) -> dict[str, str]:
    """The user's environment as far as a job needs it, and a cache that is not the user's.

    $DSRUN_TEST_CACHE may name one that already holds the compiled operators. All workers of a run share it.
    """
    cache = os.environ.get("DSRUN_TEST_CACHE") or str(shared / "cache")
    dropped = ("DSRUN_", "TORCH_EXTENSIONS_DIR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    # Said for what dsrun doesn't start, too, which would compile them once more, into the user's own folder.
    operators = str(extensions.folder({}, Path(cache).absolute()))
    return {
        "CXX": str(LIGHT / "c++"), **kept, "DSRUN_CACHE": cache, "DS_ACCELERATOR": "cpu", "DSRUN_TRACE": "0",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{LIGHT}", extensions.VARIABLE: operators,
    }  # fmt: skip


@pytest.fixture(scope="session")
def data(shared) -> tuple[str, ...]:
    """The options that name a little data, the same for all runs: it is prepared once."""
    with alone(shared / "data"):
        return little_data(shared / "data")


@pytest.fixture(scope="session")
def reference(shared, environ, data) -> Done:
    """One undisturbed run for all workers, two ranks with ZeRO-2; its losses are what the others have to have.

    Tests read its folder, or go on with a copy of it.
    """
    run_dir, record = shared / "reference" / "run", shared / "reference" / "done.json"
    with alone(run_dir.parent):
        if not record.exists():
            command = [sys.executable, "-m", "dsrun", *words_of("llama-tiny", run_dir), *data, "--json"]
            done = subprocess.run(
                command, env=environ, cwd=shared, text=True, capture_output=True, timeout=800, check=False
            )
            assert done.returncode == 0, done.stderr
            record.write_text(json.dumps([done.stdout, done.stderr]), encoding="utf-8")
        out, err = json.loads(record.read_text(encoding="utf-8"))
    return Done(0, out, err, run_dir)


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def dsrun(capsys) -> Callable[..., Said]:
    """`dsrun(*args)`: the command line in this process, with its exit code and what it said."""

    def run(*args: object) -> Said:
        with pytest.raises(SystemExit) as exit_info:
            main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert isinstance(exit_info.value.code, int)
        return Said(exit_info.value.code, out, err)

    return run


@pytest.fixture
def deepspeed():
    """The DeepSpeed that the newest schema was made from."""
    from dsrun.config.schemas import schema

    module = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    made_from = schema.load().root["x-deepspeed-version"]
    if module.__version__ != made_from:
        pytest.skip(f"the schema is that of DeepSpeed {made_from}, installed is {module.__version__}")
    return module


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Path:
    """A lab's own folder, in front of what ships; its name is a hostile one."""
    folder = tmp_path / "a lab's 实验室"
    (folder / "presets").mkdir(parents=True)
    (folder / "templates").mkdir()
    monkeypatch.setenv("DSRUN_PATH", str(folder))
    return folder


@pytest.fixture
def make_job(tmp_path):
    """`make_job(run_dir, ranks=2, **fields)`: a job that was planned well, with other fields where given."""

    def make(run_dir=None, ranks: int = 2, **fields) -> Job:
        config = build_config("zero2", Options(gpus=ranks, precision="fp32", micro_batch=4, grad_accum=2))
        job = Job(
            run_dir=str(run_dir or tmp_path / "run"),
            model=ModelSpec("llama-tiny", "random", "/x/llama-tiny.toml", "llama-2", {"hidden_size": 8}),
            data=DataSpec(train_file="/data/训练.jsonl", eval_file="/data/dev.jsonl", max_target_length=96),
            training=TrainingSpec(
                lr=2e-3, lr_schedule="linear", warmup_steps=0, epochs=1.5, max_steps=None, seed=42,
                eval_steps=None, save_steps=1000, keep_checkpoints=2, generate_rows=100, score_before=False,
                activation_checkpointing="none",
            ),
            preset="zero2",
            precision="fp32",
            accelerator="cpu",
            hosts=(HostDevices("localhost", tuple(range(ranks))),),
            ds_config=config.ds_config,
            prepared=Prepared("/cache/models/x", "/cache/rows/a.arrow", "/cache/rows/b.arrow"),
            dsrun_version="0",
        )  # fmt: skip
        return dataclasses.replace(job, **fields)

    return make


@pytest.fixture
def cpu_build(monkeypatch) -> None:
    """A CPU build of torch, whichever is installed: one for CUDA has no code for some cards that tests plan for."""
    from dsrun.host import toolkit

    monkeypatch.setattr(toolkit, "torch_build", lambda path: {"cuda": None, "cpu_build": True})


@pytest.fixture
def imported() -> Callable[..., set[str]]:
    """`imported(*args)`: the top-level modules that a `dsrun` command loads, in a process of its own."""

    def run(*args: str) -> set[str]:
        code = (
            "import sys, dsrun.cli\n"
            "try: dsrun.cli.main(sys.argv[1:])\n"
            "finally: print(*sys.modules, file=sys.stderr)"
        )
        command = [sys.executable, "-c", code, *args]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        return {name.partition(".")[0] for name in done.stderr.splitlines()[-1].split()}

    return run

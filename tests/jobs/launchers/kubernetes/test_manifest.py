from __future__ import annotations

import copy
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsrun import catalog
from dsrun.errors import DsrunError
from dsrun.jobs.launchers.common.cluster_files import ClusterFile
from dsrun.jobs.launchers.common.submission import Submission
from dsrun.jobs.launchers.kubernetes import manifest as manifests
from dsrun.jobs.launchers.kubernetes.manifest import manifest, render
from dsrun.jobs.launchers.kubernetes.pod_spec import PodSpec

SCHEMA = json.loads(
    (catalog.shipped_root() / "launch/schemas/pytorchjob.v1.schema.json").read_text(encoding="utf-8")
)
COMMAND = ("launch", "/runs/运行 it's", "--alone")
SPEC = PodSpec("registry.lab.org:5000/team/dsrun:1.0", "runs", "/runs")
FULL = PodSpec(
    "dsrun@sha256:abc", "runs-claim", "/data/runs", "team-a", 7.5, 64, 16,
    secret="tokens", secret_variables=("HF_TOKEN", "WANDB_API_KEY"),
    node_selector={"lab.org/pool": "a100"},
    tolerations=(
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "lab", "value": "x", "effect": "NoExecute", "tolerationSeconds": 60},
        {"operator": "Exists"},
    ),
    labels={"kueue.x-k8s.io/queue-name": "gpus"}, image_pull_policy="Always", image_pull_secret="registry.lab",
    ttl_s=3600, gpu_resource="nvidia.com/mig-1g.5gb",
)  # fmt: skip
ENV = {"NCCL_DEBUG": "INFO", "HF_ENDPOINT": "https://m/$x$$(A)", "B": "", "HF_TOKEN": "never shown"}


def submission(name="a", nodes=1, gpus=1, command=COMMAND, spec=SPEC, cwd="/", env=None, **more):
    cluster = ClusterFile(
        "lab", Path("lab.toml"), launcher="kubernetes", kubernetes=spec, environment=env or {}, **more
    )
    return Submission(Path("/runs/x"), tuple(command), cluster, nodes, gpus, name, Path(cwd))


MANIFESTS = [
    manifest(submission("a", 1, 0)),
    manifest(submission("a-1", 2, 8)),
    manifest(submission("llama", 5, 2, spec=FULL, env=ENV, cwd="/data/runs/运行 $(A)", time_limit_min=60)),
]


def validate(made) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(made)


def pods(made):
    for replica in made["spec"]["pytorchReplicaSpecs"].values():
        yield replica["template"]["spec"]


def container(made):
    return next(pods(made))["containers"][0]


def expand(text: str) -> str:
    """What the kubelet makes of a text where no variable is known (k8s.io/kubernetes/third_party/forked/golang)."""
    out, at = "", 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            out, at = out + text[at], at + 1
        elif text[at + 1] == "$":
            out, at = out + "$", at + 2
        elif text[at + 1] == "(" and (end := text.find(")", at)) > 0:
            out, at = out + "<expanded>", end + 1
        else:
            out, at = out + text[at : at + 2], at + 2
    return out


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("made", MANIFESTS)
def test_a_manifest_fits_the_schema(made):
    validate(made)
    validate(yaml.safe_load(render(made)))


@pytest.mark.parametrize("made", MANIFESTS)
def test_the_schema_knows_every_key(made):
    """One more key, or one key less that is needed, at any level that is not the user's own names."""
    free = {"labels", "annotations", "nodeSelector", "requests", "limits"}
    places = []

    def walk(value, path):
        if isinstance(value, dict):
            if not path or path[-1] not in free:
                places.append(path)
            for key, item in value.items():
                walk(item, (*path, key))
        elif isinstance(value, list):
            for number, item in enumerate(value):
                walk(item, (*path, number))

    walk(made, ())
    assert len(places) > 15
    for path in places:
        changed = copy.deepcopy(made)
        target = changed
        for step in path:
            target = target[step]
        target["unknown"] = 1
        with pytest.raises(jsonschema.ValidationError):
            validate(changed)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("apiVersion", "kubeflow.org/v2"), ("kind", "TFJob"), ("metadata.name", "A"), ("metadata.name", "1a"),
        ("spec.nprocPerNode", "8"), ("spec.runPolicy.cleanPodPolicy", "running"), ("spec.runPolicy.backoffLimit", "0"),
        ("spec.pytorchReplicaSpecs.Master.replicas", 2), ("spec.pytorchReplicaSpecs.Worker.replicas", 0),
        ("spec.pytorchReplicaSpecs.Worker.restartPolicy", "never"),
        ("spec.pytorchReplicaSpecs.Worker.template.spec.containers.0.name", "main"),
        ("spec.pytorchReplicaSpecs.Worker.template.spec.containers.0.resources.limits.memory", "64 GB"),
        ("spec.pytorchReplicaSpecs.Worker.template.spec.containers.0.command", "python x"),
    ],
)  # fmt: skip
def test_the_schema_refuses(path, value):
    changed = copy.deepcopy(MANIFESTS[1])
    *steps, last = path.split(".")
    target = changed
    for step in steps:
        target = target[int(step) if step.isdigit() else step]
    target[last] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(changed)


def test_replicas():
    assert list(MANIFESTS[0]["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    counts = {role: spec["replicas"] for role, spec in MANIFESTS[2]["spec"]["pytorchReplicaSpecs"].items()}
    assert counts == {"Master": 1, "Worker": 4}
    for made in MANIFESTS:
        specs = made["spec"]["pytorchReplicaSpecs"].values()
        assert all(spec["restartPolicy"] == "Never" for spec in specs)
        assert len({json.dumps(spec["template"]) for spec in specs}) == 1


def test_what_a_pod_has():
    made = MANIFESTS[1]
    (pod, _) = pods(made)
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in pod["volumes"]
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]
    box = container(made)
    assert box["volumeMounts"] == [
        {"name": "runs", "mountPath": "/runs"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    assert box["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "8"},
    }
    assert box["command"][:4] == ["python3", "-m", "dsrun", COMMAND[0]]
    assert box["command"][-len(COMMAND) + 1 :] == list(COMMAND[1:])
    assert (box["workingDir"], container(MANIFESTS[2])["workingDir"]) == ("/runs", "/data/runs/运行 $(A)")
    assert "args" not in box
    assert container(MANIFESTS[0])["resources"]["limits"] == {"memory": "64Gi"}
    assert container(MANIFESTS[2])["resources"]["requests"]["cpu"] == "7500m"
    assert container(MANIFESTS[2])["resources"]["limits"]["nvidia.com/mig-1g.5gb"] == "2"


def test_what_the_operator_sets_is_left_to_it():
    for made in MANIFESTS:
        assert "nprocPerNode" not in made["spec"]
        names = {variable["name"] for variable in container(made)["env"]}
        assert not names & {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def test_secrets_are_only_referred_to():
    text = render(MANIFESTS[2])
    assert "never shown" not in text
    assert container(MANIFESTS[2])["env"] == [
        {"name": "B", "value": ""},
        {"name": "HF_ENDPOINT", "value": "https://m/$$x$$$$(A)"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "HF_TOKEN"}}},
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "WANDB_API_KEY"}}},
    ]


def test_a_secret_in_the_open_is_refused():
    env = {
        "HF_TOKEN": "hf_abcdef",
        "http_proxy": "http://me:abcdef@proxy",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    }
    with pytest.raises(DsrunError) as error:
        manifest(submission(env=env))
    places = [problem.where for problem in error.value.problems]
    assert places == ["lab.toml: environment.HF_TOKEN", "lab.toml: environment.http_proxy"]
    assert "abcdef" not in str(error.value)
    assert "secret_variables" in str(error.value)


@given(st.text())
def test_kubernetes_expands_nothing(text):
    assert expand(manifests._literal(text)) == text


@pytest.mark.parametrize("env", [{"RANK": "1"}, {"PET_NNODES": "1"}, {"A": "\0"}, {"A": "\udc80"}])
def test_variables_that_no_pod_may_have(env):
    with pytest.raises(DsrunError) as error:
        manifest(submission(env=env))
    (problem,) = error.value.problems
    assert problem.where == f"lab.toml: environment.{next(iter(env))}"


@pytest.mark.parametrize("name", ["A", "1a", "a_b", "a.b", "-a", "a-", "a\n", "训练", "a" * 55])
def test_names_that_no_job_has(name):
    with pytest.raises(DsrunError, match="RFC 1123") as error:
        manifest(submission(name, 3))
    (problem,) = error.value.problems
    assert problem.where == "--job-name"
    validate(manifest(submission(problem.hint.removeprefix("As: "), 3)))


@given(st.text(), st.integers(1, 20000))
def test_any_text_becomes_a_name(text, nodes):
    name = manifests.name_of(text, manifests._longest_suffix(nodes))
    manifest(submission(name, nodes))
    for pod in ("master-0", f"worker-{nodes - 2}"):
        assert len(f"{name}-{pod}") <= 63 or (nodes == 1 and pod.startswith("worker"))


def test_a_name_is_kept_where_it_can_be():
    assert manifests.name_of("llama-tiny-2", "-master-0") == "llama-tiny-2"
    assert manifests.name_of("2026-11-21_Llama 训练", "-master-0") == "run-2026-11-21-llama"
    assert manifests.name_of("训练", "-master-0") == "run"
    assert manifest(submission(None))["metadata"]["name"] == "x"


def test_everything_wrong_is_said_at_once():
    with pytest.raises(DsrunError) as error:
        manifest(submission("A", command=["launch", "\0"], env={"RANK": "1"}))
    places = [problem.where for problem in error.value.problems]
    assert places == ["--job-name", "lab.toml: environment.RANK", "the command"]


HARD = """
    1e3 5e8 1e-3 0o14 0x1F 1_000 y n Y N yes no on off true True null ~ .inf .nan NaN 2026-11-21 12:30:45 1:30 = <<
    !tag &anchor *alias #comment %x @x `x` [a] {a} a:b a: -a - ? , | > 'a' "a" \\n e3 0 010 +1 .5 1.
""".split()  # noqa: SIM905


def with_values(values):
    env = {f"V{number}": value for number, value in enumerate(values)}
    return manifest(submission("a", 2, command=[*COMMAND, *values], env=env))


def test_the_text_is_for_people():
    text = render(MANIFESTS[1])
    assert text.startswith("apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata:\n  name: a-1\n")
    assert "运行 it's" in text
    assert "&id" not in text
    assert render(MANIFESTS[1]) == text


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(st.lists(TEXT, max_size=5))
def test_yaml_reads_what_was_written(values):
    made = with_values(values)
    assert yaml.safe_load(render(made)) == made


@pytest.fixture(scope="module")
def read_by_kubectl(tmp_path_factory):
    """A manifest as Kubernetes' own reader has it; no cluster is asked."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not installed")
    folder = tmp_path_factory.mktemp("kubectl")

    def read(text: str):
        path = folder / "job.yaml"
        path.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [program, "label", "--local", "-f", str(path), "-o", "json", "read=yes"],
            capture_output=True, text=True, check=False, timeout=60, env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["metadata"]["labels"].pop("read") == "yes"
        return found

    return read


@pytest.mark.parametrize("made", [*MANIFESTS, with_values(HARD)])
def test_kubectl_reads_what_was_written(read_by_kubectl, made):
    assert read_by_kubectl(render(made)) == made


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(TEXT, max_size=30))
def test_kubectl_reads_any_text(read_by_kubectl, values):
    made = with_values(values)
    assert read_by_kubectl(render(made)) == made


@pytest.mark.parametrize("made", MANIFESTS)
def test_the_operators_own_classes_have_every_field(made):
    """The classes that are generated from the CustomResourceDefinition: there and back, nothing is lost."""
    models = pytest.importorskip("kubeflow.training.models")
    api = pytest.importorskip("kubeflow.training.api_client").ApiClient()
    body = type("Response", (), {"data": json.dumps(made)})
    job = api.deserialize(body, models.KubeflowOrgV1PyTorchJob)
    assert api.sanitize_for_serialization(job) == made


SECOND = [replace(spec, job="TrainJob") for spec in (SPEC, FULL)]
TRAIN_JOBS = [
    manifest(submission("a", 1, 0, spec=SECOND[0])),
    manifest(submission("llama", 5, 2, spec=SECOND[1], env=ENV, cwd="/data/runs/x", time_limit_min=60)),
]


@pytest.mark.parametrize("made", TRAIN_JOBS)
def test_a_train_job_is_what_trainers_own_classes_hold(made):
    """The classes that are generated from its CustomResourceDefinitions: there and back, nothing is lost."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    runtime, job = made["items"]
    assert models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert yaml.safe_load(render(made)) == made


@pytest.mark.parametrize(("made", "first"), list(zip(TRAIN_JOBS, [MANIFESTS[0], MANIFESTS[2]], strict=True)))
def test_its_pods_are_those_of_a_pytorchjob(made, first):
    runtime, job = made["items"]
    ((replicated,),) = [runtime["spec"]["template"]["spec"]["replicatedJobs"]]
    spec = dict(replicated["template"]["spec"]["template"]["spec"])
    (own,) = spec["containers"]
    assert replicated["name"] == own["name"] == "node", "where Trainer puts its variables"
    assert spec.pop("restartPolicy") == "Never"
    (theirs,) = next(pods(first))["containers"]
    assert {**own, "name": "", "workingDir": ""} == {**theirs, "name": "", "workingDir": ""}
    assert {**spec, "containers": []} == {**next(pods(first)), "containers": []}
    nodes = sum(one["replicas"] for one in first["spec"]["pytorchReplicaSpecs"].values())
    assert runtime["spec"]["mlPolicy"]["numNodes"] == job["spec"]["trainer"]["numNodes"] == nodes
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


def test_a_train_jobs_limits():
    replicated = TRAIN_JOBS[1]["items"][0]["spec"]["template"]["spec"]
    assert replicated["ttlSecondsAfterFinished"] == 3600
    assert replicated["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] == 3600
    assert replicated["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0
    with pytest.raises(DsrunError, match="NAME-node-0-1-xxxxx"):
        manifest(submission("a" * 50, 2, 1, spec=SECOND[0]))
    with pytest.raises(DsrunError, match="set in each pod"):
        manifest(submission("a", 2, 1, spec=SECOND[0], env={"PET_NNODES": "2"}))

"""A recipe becomes manifests that the real schemas take, that the restricted profiles take, and that a person can read.

``UPDATE_GOLDEN=1`` rewrites the golden files.
"""

from __future__ import annotations

import base64
import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from cluster_jobs import CRDS, SYSTEMS, cluster_job, crd_schema
from modelwright.cluster.documents import ManifestSet, YamlComments, dump_documents, parse_manifests
from modelwright.cluster.lint import lint
from modelwright.cluster.manifests import JobKind, build_job, documents, job_name, longest_save_seconds, render
from modelwright.cluster.schema import ANY, QUANTITY, SCHEMAS, ArrayOf, MapOf, ObjectSchema, ScalarType, Schema
from modelwright.errors import ProblemsError, UsageError
from modelwright.recipe.load import load

GOLDEN = Path(__file__).parent / "golden"
TARGETS: tuple[JobKind, ...] = ("trainjob", "pytorchjob")
CODES = ["image", "configmap", "git+https://git.example.com/team/modelwright@v0.1"]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_real_schemas_take_what_is_rendered_of_each_system(shared: Path, system: str, target: JobKind) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the dev extra")
    count = 0
    for code in CODES if system == "survival" else CODES[:1]:
        for document in documents(cluster_job(system, target, f"cluster.code_source={code}")):
            for name in CRDS.get(document["kind"], ()):
                validator = jsonschema.Draft202012Validator(crd_schema(shared, name))
                assert [error.message for error in validator.iter_errors(document)] == []
                count += 1
    assert count == (4 if target == "trainjob" else 1) * (3 if system == "survival" else 1)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("code", CODES)
def test_no_rule_objects_to_what_is_rendered(system: str, target: JobKind, code: str) -> None:
    findings = lint(parse_manifests(render(cluster_job(system, target, f"cluster.code_source={code}")), "job.yaml"))
    assert [str(finding) for finding in findings if finding.is_error] == []


@pytest.mark.parametrize("target", TARGETS)
def test_the_stream_is_the_golden_one(target: JobKind) -> None:
    text = render(cluster_job("survival", target, f"cluster.code_source={CODES[2]}", save_seconds=14.2))
    path = GOLDEN / f"survival-{target}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_two_readers_of_yaml_read_what_was_meant() -> None:
    words = [
        "yes",
        "on",
        "1e3",
        "0x10",
        "12:30",
        "a: b",
        "# no",
        "null",
        "",
        "x\ny\n",
        " lead",
        "tab\tbed",
        "é",
        "None",
    ]
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": dict.fromkeys(words, "x")}
    body["data"] |= {f"k{number}": word for number, word in enumerate(words)}
    body["lists"] = [[1, "2"], [], [{"a": {}, "b": [True, None]}]]
    text = dump_documents([body], YamlComments("top\n", {"ConfigMap": "kind"}, {"data": "key", "a": "first in a list"}))
    assert YAML(typ="safe", pure=True).load(text) == body
    old = YAML(typ="safe", pure=True)
    old.version = (1, 1)  # type: ignore[assignment]
    assert old.load(text) == body


@pytest.mark.parametrize("target", TARGETS)
def test_nodes_gpus_queue_and_token_reach_the_job(target: JobKind) -> None:
    by_kind = {document["kind"]: document for document in documents(cluster_job("survival", target))}
    claims = [each for each in documents(cluster_job("survival", target)) if each["kind"] == "PersistentVolumeClaim"]
    assert [claim["spec"]["accessModes"] for claim in claims] == [["ReadWriteMany"]] * 2
    job = by_kind["TrainJob" if target == "trainjob" else "PyTorchJob"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "default"
    text = json.dumps(by_kind)
    assert '"nvidia.com/gpu.product": "NVIDIA-L40S"' in text
    assert '"secretKeyRef": {"name": "hub-token", "key": "HF_TOKEN"}' in text
    if target == "pytorchjob":
        replicas = job["spec"]["pytorchReplicaSpecs"]
        assert [(role, spec["replicas"]) for role, spec in replicas.items()] == [("Master", 1), ("Worker", 3)]
        assert job["spec"]["nprocPerNode"] == "1"
        assert job["spec"]["runPolicy"]["backoffLimit"] == 13
    else:
        assert job["spec"]["trainer"]["numNodes"] == 4
        assert set(job["spec"]) == {"runtimeRef", "trainer"}, "an override field fits one dialect only"


def test_one_node_needs_no_shared_storage_and_no_worker() -> None:
    rendered = documents(cluster_job("vision", "pytorchjob"))
    assert [each["spec"]["accessModes"] for each in rendered[:3]] == [["ReadWriteOnce"]] * 3
    assert list(rendered[-1]["spec"]["pytorchReplicaSpecs"]) == ["Master"]


NO_CLAIMS = "cluster.volumes={trained-models: null, workspace: null"
DOCUMENT_CLAIMS = (
    f"{NO_CLAIMS}, training-data-pvc: {{mount: /shared/data}}, "
    "trained-models-pvc: {mount: /shared/models}, workspace-pvc: {mount: /workspace}}"
)


@pytest.mark.parametrize("target", TARGETS)
def test_a_volume_is_chosen_by_what_it_is_for(target: JobKind) -> None:
    job = cluster_job("survival", target, DOCUMENT_CLAIMS, "cluster.namespace=lyric-professor")
    text = render(job)
    assert "value: /workspace/huggingface" in text and "value: /shared/models/quickstart" in text
    assert [str(finding) for finding in lint(parse_manifests(text, "job.yaml")) if finding.is_error] == []
    other = NO_CLAIMS + ", a: {mount: /a}, b: {mount: /b, purpose: models}, c: {mount: /c, purpose: workspace}}"
    text = render(cluster_job("survival", target, other))
    assert "value: /c/huggingface" in text and "value: /b/quickstart" in text
    only_models = NO_CLAIMS + ", training-data: {mount: /d}, models-pvc: {mount: /m}}"
    assert "value: /m/huggingface" in render(cluster_job("survival", target, only_models)), "shared by all pods"


SOURCE_DOCUMENTS = {  # recipe, settings as the document words them, variables that must stand in the job
    "resnet": (
        *("resnet18-cifar10-plain", "rhoai-learning", "resnet18-cifar10-git", 1),
        {"DATA_DIR": "/shared/data", "OUTPUT_DIR": "/shared/models"},
        ["cluster.cpu_request=4", "cluster.cpu=6", "cluster.memory_request=16Gi", "cluster.memory=24Gi"],
    ),
    "lyrics": (
        *("lyrics-pythia", "lyric-professor", "lyrics-pythia", 1),
        {"DATA_DIR": "/shared/data", "OUTPUT_DIR": "/shared/models", "EPOCHS": "2", "BATCH_SIZE": "24"},
        ["cluster.cpu=8", "cluster.memory=32Gi"],
    ),
    "survival": (
        *("survival-smollm3", "lyric-professor", "survival-smollm3", 4),
        {"OUTPUT_DIR": "/shared/models", "EPOCHS": "4", "BATCH_SIZE": "8", "NCCL_DEBUG": "INFO"},
        ["cluster.cpu=6", "cluster.memory=20Gi", "cluster.volumes.training-data-pvc=null"],
    ),
    "llama": (*("llama-7b", "llm", "llama-7b", 1), {"OUTPUT_DIR": "/shared/models/checkpoints"}, []),
    "gemma": (
        *("gemma-270m", "gemma", "gemma-270m", 2),
        {"OUTPUT_DIR": "/shared/outputs/gemma-270m"},
        ["cluster.gpus_per_node=2", "cluster.volumes.trained-models-pvc.mount=/shared/outputs"],
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SOURCE_DOCUMENTS)
def test_the_words_of_the_five_documents_are_rendered_as_written(name: str, target: JobKind) -> None:
    recipe, namespace, job_label, nodes, variables, settings = SOURCE_DOCUMENTS[name]
    url = "https://git.example.com/team/training.git"
    claims = ["training-data-pvc", "trained-models-pvc", "workspace-pvc"]
    defaults = "{training-data: null, trained-models: null, workspace: null, training-data-pvc: {mount: /shared/data}, "
    defaults += "trained-models-pvc: {mount: /shared/models}, workspace-pvc: {mount: /workspace}}"
    overrides = [f"name={job_label}", f"cluster.namespace={namespace}", f"cluster.nodes={nodes}"]
    overrides += [f"cluster.code_source=git+{url}@main", f"cluster.volumes={defaults}"]
    loaded = load(recipe, [*overrides, *settings], variables)
    text = render(job := build_job(loaded.recipe, Path.cwd(), target))
    assert [str(finding) for finding in lint(parse_manifests(text, "job.yaml")) if finding.is_error] == []
    *others, rendered = documents(job)
    metadata = [document["metadata"] for document in (*others, rendered)]
    assert {each["namespace"] for each in metadata} == {namespace} and rendered["metadata"]["name"] == job_label
    expected = [claim for claim in claims if f"cluster.volumes.{claim}=null" not in settings]
    assert [each["metadata"]["name"] for each in others if each["kind"] == "PersistentVolumeClaim"] == expected
    for template in ManifestSet(tuple(parse_manifests(text, "job.yaml"))).pod_templates:
        assert template.num_nodes == nodes and template.pvc_names == set(expected)
        (init,) = template.spec["initContainers"]
        assert init["name"] == "code" and init["command"][-2:] == [url, "main"]
        env = {item["name"]: item.get("value") for _, _, item in template.env}
        assert env["HF_HOME"] == "/workspace/huggingface"
        assert {variable: env.get(variable) for variable in variables} == variables
    assert job.run_dir == variables["OUTPUT_DIR"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_job_downloads_cifar10_onto_the_volume_for_data(target: JobKind) -> None:
    assert cluster_job("vision", target).payload.env()["DATA_DIR"] == "/shared/data"
    own = cluster_job("vision", target, "data.data_dir=/shared/models/images")
    assert own.payload.env()["DATA_DIR"] == "/shared/models/images"


@pytest.mark.parametrize("target", TARGETS)
def test_requests_may_be_below_the_limits(target: JobKind) -> None:
    text = render(cluster_job("vision", target, "cluster.cpu_request=4", "cluster.memory_request=16Gi"))
    rendered = text[
        text.index("requests:\n", text.index("nprocPerNode" if target == "pytorchjob" else "numProcPerNode")) :
    ]
    assert [line.strip() for line in rendered.splitlines()[:8]] == [
        *("requests:", 'cpu: "4"', 'memory: "16Gi"', 'nvidia.com/gpu: "1"'),
        *("limits:", 'cpu: "6"', 'memory: "24Gi"', 'nvidia.com/gpu: "1"'),
    ]
    assert [str(finding) for finding in lint(parse_manifests(text, "job.yaml")) if finding.is_error] == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cluster.gpu_product=NVIDIA L40S", "it wants a label value, such as NVIDIA-L40S"),
        ("cluster.volumes={scratch: {mount: /s}}", "has a volume scratch, as every pod has already"),
        ("cluster.volumes={recipe: {mount: /s}}", "has a volume recipe, as every pod has already"),
        ("cluster.env={NCCL_DEBUG=INFO: x}", "it wants a name without ="),
        ("cluster.cpu_request=8", "has cpu_request 8 above cpu 6, the limit"),
        ("cluster.memory_request=32Gi", "has memory_request 32Gi above memory 24Gi, the limit"),
        (
            "cluster.volumes={trained-models: {mount: /m}, trained-models-pvc: {mount: /m/}}",
            "has volumes trained-models and trained-models-pvc at /m/; trained-models: null removes the first",
        ),
    ],
)
def test_a_cluster_section_that_a_server_refuses_is_reported_by_the_recipe(setting: str, message: str) -> None:
    with pytest.raises(ProblemsError) as error:
        cluster_job("vision", "trainjob", setting)
    assert message in str(error.value)


def test_comments_are_on_the_container_that_trains() -> None:
    text = render(cluster_job("survival", "trainjob", f"cluster.code_source={CODES[2]}"))
    assert text.index("# torchrun without flags") > text.index("- name: node\n                  image")


def test_variables_of_the_recipe_stand_in_the_job_under_its_own_names() -> None:
    job = documents(cluster_job("vision", "trainjob", "classify.num_train_epochs=3"))[-1]
    values = {each["name"]: each["value"] for each in job["spec"]["trainer"]["env"]}
    assert values["EPOCHS"] == "3"
    assert values["OUTPUT_DIR"] == "/shared/models/resnet18-cifar10"


def test_the_recipe_in_the_map_loads_and_still_listens_to_the_job(tmp_path: Path) -> None:
    maps = [each for each in documents(cluster_job("vision", "trainjob")) if each["kind"] == "ConfigMap"]
    path = tmp_path / "recipe.yaml"
    path.write_text(maps[0]["data"]["recipe.yaml"], encoding="utf-8")
    recipe = load(path, environ={"EPOCHS": "5"}).recipe
    assert recipe.classify is not None and recipe.classify.num_train_epochs == 5
    assert recipe.output_dir == "/shared/models/resnet18-cifar10"


def test_the_grace_period_follows_the_longest_measured_save(tmp_path: Path) -> None:
    events = [
        {"event": "checkpoint_saved", "seconds": 3.0},
        {"event": "checkpoint_saved", "seconds": 41.5},
        {"event": "step"},
    ]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert longest_save_seconds(tmp_path) == 41.5
    assert longest_save_seconds(tmp_path / "none") is None
    assert cluster_job("vision", "trainjob", save_seconds=41.5).grace_period == 155
    assert cluster_job("vision", "trainjob", save_seconds=0.1).grace_period == 60
    assert "the longest save took 41.5 s" in render(cluster_job("vision", "trainjob", save_seconds=41.5))


def small_recipe(folder: Path, data: str, more: str = "") -> Path:
    path = folder / "mine.yaml"
    path.write_text(f"name: my.recipe_2\nmodel: {{model_name_or_path: org/model}}\ndata: {data}\nsft: {{}}\n{more}")
    return path


def test_small_data_travel_in_the_map_whatever_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    (tmp_path / "held.parquet").write_bytes(b"PAR1\xff\x00PAR1")
    path = small_recipe(tmp_path, "{train_file: rows.jsonl, validation_file: held.parquet}")
    from modelwright.cluster.manifests import build_job

    job = build_job(load(path, (), {}).recipe, tmp_path)
    assert job.name == "my-recipe-2"
    carried = next(each for each in documents(job) if each["kind"] == "ConfigMap")
    assert carried["data"]["rows.jsonl"] == '{"messages": []}\n'
    assert base64.b64decode(carried["binaryData"]["held.parquet"]) == b"PAR1\xff\x00PAR1"


@pytest.mark.parametrize(
    ("data", "sets", "message"),
    [
        ("{train_file: big.jsonl}", [], "big.jsonl has 1,000,001 bytes, and a ConfigMap carries 1,000,000"),
        ("{dataset_name: folder}", [], "data.dataset_name is the folder folder of this machine"),
        (
            "{dataset_name: field-guide}",
            ["output_dir=/elsewhere/run"],
            "output_dir is '/elsewhere/run', which is on no",
        ),
        ("{dataset_name: field-guide}", ["model.model_name_or_path=folder"], "model.model_name_or_path is the folder"),
    ],
)
def test_what_the_pods_cannot_reach_is_reported_before_it_is_sent(
    tmp_path: Path, data: str, sets: list[str], message: str
) -> None:
    from modelwright.cluster.manifests import build_job

    (tmp_path / "big.jsonl").write_bytes(b"x" * 1_000_001)
    (tmp_path / "folder").mkdir()
    recipe = load(small_recipe(tmp_path, data), sets, {}).recipe
    with pytest.raises(UsageError, match=message):
        build_job(recipe, tmp_path)


def test_the_program_in_a_map_is_this_program_and_the_same_bytes_each_time() -> None:
    maps = [
        each
        for each in documents(cluster_job("vision", "trainjob", "cluster.code_source=configmap"))
        if "binaryData" in each
    ]
    content = base64.b64decode(maps[0]["binaryData"]["modelwright.zip"])
    again = [
        each
        for each in documents(cluster_job("vision", "trainjob", "cluster.code_source=configmap"))
        if "binaryData" in each
    ]
    assert again == maps
    names = zipfile.ZipFile(io.BytesIO(content)).namelist()
    assert {"modelwright/cli/main.py", "modelwright/data/embedded/field_guide.jsonl"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.parametrize(
    ("name", "label"),
    [("a.b_c", "a-b-c"), ("7b-llama", "run-7b-llama"), ("x" * 63, "x" * 46), ("end." + "-" * 50, "end")],
)
def test_any_recipe_name_becomes_a_name_that_kubernetes_takes(name: str, label: str) -> None:
    assert job_name(name) == label


def paths(field: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Every field of our schema, lists and free names as a star."""
    yield path, field
    if isinstance(field, ObjectSchema):
        for name, child in field.fields.items():
            yield from paths(child, (*path, name))
    elif isinstance(field, ArrayOf | MapOf):
        yield from paths(field.item if isinstance(field, ArrayOf) else field.value, (*path, "*"))


TYPES = {"text": "string", "a whole number": "integer", "true or false": "boolean"}


@pytest.mark.parametrize("kind", CRDS)
def test_our_small_schema_says_what_the_real_ones_say(shared: Path, kind: str) -> None:
    for name in CRDS[kind]:
        real = crd_schema(shared, name)
        for path, ours in paths(SCHEMAS[kind][1]):
            if "metadata" in path:
                continue
            node = real
            for step in path:
                node = (
                    node["properties"].get(step) if step != "*" else node.get("items") or node["additionalProperties"]
                )
                assert node is not None, f"{name} has no {'.'.join(path)}"
            if isinstance(ours, ScalarType) and ours not in (ANY, QUANTITY) and "type" in node:
                wants = TYPES.get(ours.expected, "integer")
                assert node["type"] == wants, f"{name}: {'.'.join(path)} is {node['type']}, ours {ours.expected}"
            if isinstance(ours, ObjectSchema):
                assert set(ours.required) <= set(node.get("required", [])) | {*OURS_TO_ASK}, ".".join(path)
                unknown = ours.other_fields - set(node["properties"])
                assert unknown <= OF_OTHER_VERSIONS, f"{name}: {'.'.join(path)} has no {unknown}"


OURS_TO_ASK = {"apiVersion", "kind", "metadata", "spec", "name", "template", "containers", "runtimeRef"}
"""What the operators ask for although their schemas do not."""
OF_OTHER_VERSIONS = {
    *("podTemplateOverrides", "runtimePatches", "podSpecOverrides", "activeDeadlineSeconds", "labels", "annotations"),
    *("workloadRef", "hostnameOverride", "restartPolicyRules", "fileKeyRef", "flux", "jax", "xgboost", "resources"),
    *("gitRepo", "image", "onJobFailureMessagePatterns", "seLinuxChangePolicy", "supplementalGroupsPolicy"),
    *("recursiveReadOnly", "appArmorProfile", "preemptionPolicy", "schedulingGates", "status"),
}
"""Names that one version knows and another does not."""

"""Raw text by the flags of the usual script: their names, a gated model, more tokens than the model knew, a first step
from another run's checkpoint."""

from __future__ import annotations

import http.server
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fake_hub import hub
from modelwright.data.chat import Conversation
from modelwright.data.chat_tokens import tokenize_conversations
from modelwright.errors import UsageError
from modelwright.models.pretrained import eos_token_ids, load_model, load_tokenizer, resize_embeddings
from modelwright.recipe.load import load
from modelwright.recipe.stage_specs import ChatConfig
from modelwright.stages.pipeline import run
from tests.data.test_hub_download import environment as hub_environment
from tests.faults.fork_server import free_port
from tiny import tiny_model, tiny_recipe

FLAGS = {
    "model_name_or_path": "some/folder", "dataset_name": "some/set", "dataset_config_name": "wikitext-2-raw-v1",
    "text_column": "body", "max_seq_length": 512, "output_dir": "./outputs", "num_train_epochs": 1,
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, "gradient_accumulation_steps": 4,
    "learning_rate": 1e-5, "weight_decay": 0.02, "warmup_steps": 50, "bf16": "true", "gradient_checkpointing": "true",
    "use_flash_attention": "true", "logging_steps": 5, "save_steps": 50, "eval_steps": 25, "save_total_limit": 2,
    "resume_from_checkpoint": "some/checkpoint", "seed": 7,
}  # fmt: skip


def test_every_flag_of_the_usual_script_is_a_setting_of_that_name() -> None:
    recipe = load("gemma-270m", [f"{name}={value}" for name, value in FLAGS.items()], environ={}).recipe
    pretrain, data = recipe.pretrain, recipe.data
    assert pretrain is not None and data is not None
    assert (recipe.model.model_name_or_path, recipe.model.attn_implementation) == ("some/folder", "flash_attention_2")
    assert (data.dataset_name, data.dataset_config_name, data.text_column) == ("some/set", "wikitext-2-raw-v1", "body")
    assert (recipe.output_dir, recipe.seed) == ("./outputs", 7)
    assert (pretrain.max_length, pretrain.precision, pretrain.gradient_checkpointing) == (512, "bf16", True)
    assert (pretrain.learning_rate, pretrain.weight_decay, pretrain.save_total_limit) == (1e-5, 0.02, 2)
    assert pretrain.resume_from_checkpoint == "some/checkpoint"
    assert load("gemma-270m", ["fp16=true"], environ={}).recipe.stages["pretrain"].precision == "fp16"
    files = load("gemma-270m", ["dataset_name=null", "train_file=a.txt", "validation_file=b.csv"], environ={}).recipe
    assert files.data is not None
    assert (files.data.train_file, files.data.validation_file) == ("a.txt", "b.csv")


@pytest.mark.parametrize("name", ["google/gemma-270m", "google/gemma-270m-it", "google/gemma-3-270m"])
def test_the_document_s_name_of_the_model_is_read_as_the_published_one(name: str) -> None:
    recipe = load("gemma-270m", [f"model_name_or_path={name}"], environ={}).recipe
    assert recipe.model.model_name_or_path == name.replace("gemma-270m", "gemma-3-270m")


def test_the_defaults_of_the_script_are_the_recipe_s() -> None:
    recipe = load("gemma-270m", environ={}).recipe
    settings = recipe.stages["pretrain"].model_dump(mode="json")
    expected = {
        "max_length": 2048, "num_train_epochs": 3, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 8, "learning_rate": 2e-5, "weight_decay": 0.01, "logging_steps": 10,
        "save_total_limit": 3,
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    assert (recipe.model.model_name_or_path, recipe.seed) == ("google/gemma-3-270m", 42)


class Gate(http.server.BaseHTTPRequestHandler):
    """A hub that knows one gated model and gives it to nobody."""

    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to model google/gemma-3-270m is restricted.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Quietly."""


def test_a_gated_model_without_a_token_is_one_error_before_anything_is_downloaded(tmp_path: Path) -> None:
    Gate.requests.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gate)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environ = {
        **{name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hub"),
        "HF_TOKEN_PATH": str(tmp_path / "none"),
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-m", "modelwright", "run", "gemma-270m", "--set", f"output_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    server.shutdown()
    assert done.returncode == 2, done.stderr
    assert (
        "google/gemma-3-270m is gated, and no token that may read it was found; nothing was downloaded" in done.stderr
    )
    assert "HF_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr
    about_it = [path for path in Gate.requests if "gemma" in path]
    assert about_it == ["/api/models/google/gemma-3-270m/auth-check"]
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


DATASET_README = b"""---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - {split: train, path: wikitext-2-raw-v1/train.jsonl}
  - {split: validation, path: wikitext-2-raw-v1/validation.jsonl}
---
"""


@pytest.fixture(scope="module")
def gated_hub(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[dict[str, str]]:
    """The variables of a machine whose hub has the document's gated model and its data set."""
    weights = {path.name: path.read_bytes() for path in model_folder.iterdir() if path.is_file()}
    lines = [
        json.dumps({"text": f"Rope {n} holds the tent, and knot {n % 7} holds the rope. It rains."}) for n in range(80)
    ]
    text = {f"wikitext-2-raw-v1/{split}.jsonl": "\n".join(part).encode() + b"\n"
            for split, part in (("train", lines[:64]), ("validation", lines[64:]))}  # fmt: skip
    name = "google/gemma-3-270m"
    with hub(
        {"Salesforce/wikitext": {"README.md": DATASET_README, **text}}, {name: weights}, {name: "hf_allowed"}
    ) as server:
        yield hub_environment(server.address, tmp_path_factory.mktemp("home"))


def modelwright(*arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelwright", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300)


ASK = """
import json, os
from modelwright.launch.doctor import check_hub
answers = []
for token, model in (("hf_allowed", "gemma-3-270m"), ("hf_other", "gemma-3-270m"), ("hf_allowed", "nothing")):
    os.environ["HF_TOKEN"] = token
    answers.append(check_hub(f"google/{model}", f"google/{model}")[-1].as_json())
print(json.dumps(answers))
"""


def test_the_doctor_asks_the_hub_whether_the_gated_model_may_be_read(gated_hub: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ASK], env=gated_hub, capture_output=True, text=True, check=True)
    allowed, refused, unknown = json.loads(done.stdout)
    assert (allowed["status"], allowed["detail"]) == ("ok", "google/gemma-3-270m may be read with the token at hand")
    assert refused["detail"] == "google/gemma-3-270m is gated, and may not be read with the token at hand"
    assert refused["status"] == "fail" and "/google/gemma-3-270m, then export HF_TOKEN" in refused["fix"]
    assert unknown["detail"] == "the hub shows no model google/nothing with the token at hand"
    env = {**gated_hub, "HF_HOME": str(tmp_path), "HF_TOKEN": ""}
    arguments = ("doctor", "gemma-270m", "--model_name_or_path", "google/gemma-270m")
    output = modelwright(*arguments, cwd=tmp_path, env=env).stdout
    assert "google/gemma-3-270m is gated, and may not be read without a token" in " ".join(output.split())


def test_the_document_s_command_trains_from_the_hub(gated_hub: dict[str, str], tmp_path: Path) -> None:
    arguments = (
        "--model_name_or_path google/gemma-270m --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 "
        "--output_dir ./outputs --max_seq_length 32 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 "
        "--save_steps 2 --eval_steps 2 --report_to none --set pretrain.max_steps=4 --set pretrain.precision=fp32 "
        "--set compare={} --set gates={}"
    )
    env = {**gated_hub, "HF_TOKEN": "hf_allowed"}
    done = modelwright("run", "gemma-270m", *arguments.split(), cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert events(tmp_path / "outputs", "step")[-1]["step"] == 4
    assert events(tmp_path / "outputs", "evaluation"), "the hub's validation split was measured"


NIGHTLY = pytest.mark.skipif(not os.environ.get("NIGHTLY"), reason="starts up to six processes; NIGHTLY=1 runs it")
SHORT = (
    "--max_seq_length 32 --per_device_train_batch_size 1 --gradient_accumulation_steps 1 --save_steps 2 --eval_steps 2 "
    "--report_to none --set pretrain.max_steps=2 --set pretrain.precision=fp32 --output_dir outputs"
)


@NIGHTLY
def test_what_accelerate_launch_started_is_one_command(gated_hub: dict[str, str], tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES=2,3 accelerate launch --num_processes 2 main.py ... --gradient_checkpointing"""
    env = {**gated_hub, "HF_TOKEN": "hf_allowed", "CUDA_VISIBLE_DEVICES": "2,3"}
    words = f"--nproc-per-node 2 --dataset_name wikitext --gradient_checkpointing {SHORT}"
    done = modelwright("launch", "gemma-270m", *words.split(), cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert events(tmp_path / "outputs", "run")[-1]["world"] == 2
    assert events(tmp_path / "outputs", "step")[-1]["step"] == 2


@NIGHTLY
def test_run_node0_and_run_node1_are_the_two_commands_that_launch_prints(
    gated_hub: dict[str, str], tmp_path: Path
) -> None:
    env = {**gated_hub, "HF_TOKEN": "hf_allowed"}
    nodes = f"--on nodes --nnodes 2 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port {free_port()}"
    printed = modelwright("launch", "gemma-270m", *f"{nodes} --dataset_name wikitext {SHORT}".split(),
                          cwd=tmp_path, env=env).stdout  # fmt: skip
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("modelwright launch")]
    assert [command[command.index("--node-rank") + 1] for command in commands] == ["0", "1"]
    processes = [
        subprocess.Popen([sys.executable, "-m", *command], cwd=tmp_path, env=env, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]  # fmt: skip
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert events(tmp_path / "outputs", "run")[-1]["world"] == 4
    assert events(tmp_path / "outputs", "step")[-1]["step"] == 2


def text_recipe(folder: Path, model: Path, **settings: Any) -> Path:
    """A recipe that goes on with raw text in a CSV file, held out by nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f'{number},"Rope {number} holds the tent, and knot {number % 7} holds the rope. It rains."'
        for number in range(60)
    ]
    (folder / "notes.csv").write_text("\n".join(["id,body", *lines]) + "\n", encoding="utf-8")
    stage = {"max_length": 32, "max_steps": 4, "per_device_train_batch_size": 2, "precision": "fp32", "save_steps": 2,
            "learning_rate": 1e-3, **settings}  # fmt: skip
    recipe = {
        "name": "raw", "output_dir": str(folder / "run"), "model": {"model_name_or_path": str(model)},
        "data": {"train_file": "notes.csv", "text_column": "body", "test_size": 0}, "pretrain": stage,
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path


def events(run_folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def test_raw_text_without_validation_data_is_trained_on_and_not_measured(model_folder: Path, tmp_path: Path) -> None:
    folder = run(load(text_recipe(tmp_path, model_folder), environ={})).path
    assert len(events(folder, "step")) == 4
    assert events(folder, "evaluation") == []
    assert (folder / "best_model" / "model.safetensors").exists()


def test_a_new_run_begins_from_the_checkpoint_of_another_and_ends_as_it_does(
    model_folder: Path, tmp_path: Path
) -> None:
    uninterrupted = run(load(text_recipe(tmp_path / "whole", model_folder), environ={})).path
    middle = uninterrupted / "stages" / "pretrain" / "checkpoints" / "step-00000002"
    later = tmp_path / "later"
    folder = run(load(text_recipe(later, model_folder, resume_from_checkpoint=str(middle)), environ={})).path
    assert [event["step"] for event in events(folder, "step")] == [3, 4]
    ends = [json.loads((each / "stages/pretrain/result.json").read_text())["files"] for each in (uninterrupted, folder)]
    assert ends[0] == ends[1]
    (folder / "stages/pretrain/result.json").unlink()  # as after a kill: it goes on by itself, and says so
    run(load(text_recipe(later, model_folder, resume_from_checkpoint=str(middle)), environ={}))
    notes = [event["message"] for event in events(folder, "note")]
    assert any(note.startswith("this run has a checkpoint of its own and continues from its step 4") for note in notes)
    (middle / "state.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a valid checkpoint"):
        run(load(text_recipe(tmp_path / "broken", model_folder, resume_from_checkpoint=str(middle)), environ={}))


def test_a_checkpoint_of_trainer_is_a_start_and_resuming_from_it_says_how(model_folder: Path, tmp_path: Path) -> None:
    trainer = tmp_path / "outputs" / "checkpoint-500"
    shutil.copytree(model_folder, trainer)
    (trainer / "trainer_state.json").write_text('{"global_step": 500}', encoding="utf-8")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"step": 500}, trainer / name)
    started = run(load(text_recipe(tmp_path / "start", trainer, max_steps=1), environ={})).path
    assert events(started, "step")[-1]["step"] == 1
    recipe = text_recipe(tmp_path / "resumed", model_folder, resume_from_checkpoint=str(trainer))
    with pytest.raises(UsageError, match="Trainer wrote it; its weights are a start: model_name_or_path"):
        run(load(recipe, environ={}))


def test_a_tokenizer_that_knows_more_grows_the_embeddings_and_keeps_what_was_there(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    before = model.get_input_embeddings().weight.detach().clone()
    assert resize_embeddings(model, tokenizer) == 0
    tokenizer.add_tokens(["<rope>", "<knot>"])
    assert resize_embeddings(model, tokenizer) == 2
    after = model.get_input_embeddings().weight
    assert torch.equal(after[: len(before)], before)
    assert model.get_output_embeddings().weight.shape[0] == len(tokenizer) == len(before) + 2
    tokenizer.save_pretrained(folder)
    run_folder = run(load(tiny_recipe(tmp_path / "tune", folder, max_steps=1), environ={})).path
    assert any("embeddings resized to" in note["message"] for note in events(run_folder, "note"))


def test_a_tokenizer_without_pad_borrows_eos_and_eos_is_still_trained(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.pad_token_id == again.eos_token_id is not None
    turns = ({"role": "user", "content": "Rope?"}, {"role": "assistant", "content": "Knot."})
    (row,) = tokenize_conversations(
        [Conversation("a:1", turns, "rope")], again, ChatConfig(max_length=64), eos_token_ids(load_model(model_folder))
    ).rows
    assert again.eos_token_id in row.input_ids[np.flatnonzero(row.loss_mask)]

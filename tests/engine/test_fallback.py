"""A step that fails is retried by a fallback with the same global batch, and the run reports it."""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from modelwright.engine.fallback import RECOMPILE_LIMIT, CompiledLayers, _largest_gap, is_compiler_error
from modelwright.errors import UsageError
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import plan_stage
from modelwright.recipe.load import load
from modelwright.recipe.stage_specs import ClassifyConfig, LoraStageConfig, SftConfig, TrainingConfig
from modelwright.stages import pipeline
from modelwright.stages.planning import _train_memory_message
from modelwright.tasks.sft import SftLoss
from tests.faults.fork_server import events_of, run_fingerprint
from tiny import tiny_recipe

CPU = DeviceInfo("cpu", "2 CPU threads", 10**9, False)
BRIEF = {"max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_length": 32}


def run(folder: Path, model: Path, **settings: Any) -> dict[str, Any]:
    recipe = tiny_recipe(folder, model, **BRIEF, **settings)
    pipeline.run(load(recipe, environ={}), lambda event: None)
    return run_fingerprint(folder / "run")


def test_memory_that_is_full_halves_the_rows_and_keeps_the_batch(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_run = run(tmp_path / "whole", model_folder)
    forward = SftLoss.forward

    def forward_without_memory(self: SftLoss, tokens: torch.Tensor, *others: Any, **kwargs: Any) -> torch.Tensor:
        if self.training and len(tokens) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, tokens, *others, **kwargs)

    monkeypatch.setattr(SftLoss, "forward", forward_without_memory)
    reduced = run(tmp_path / "halved", model_folder)
    for step, (loss, *rest) in expected_run["steps"].items():
        assert reduced["steps"][step][0] == pytest.approx(loss, rel=1e-5)
        assert reduced["steps"][step][-1] == rest[-1]
    revisions = events_of(tmp_path / "halved/run", "plan_revised")
    batches = [f"batch 4 = {rows} per device × 1 device × {4 // rows} accumulation" for rows in (4, 2, 1)]
    for rows, before, after, event in zip((4, 2), batches[:2], batches[1:], revisions, strict=True):
        assert event["reason"] == f"micro-batch {rows} runs out of memory; {after} keeps the batch"
        assert event["changes"] == {
            "micro_batch_size": {"from": rows, "to": rows // 2},
            "gradient_accumulation_steps": {"from": 4 // rows, "to": 8 // rows},
            "batch_arithmetic": {"from": before, "to": after},
        }
    plan = json.loads((tmp_path / "halved/run/plan.json").read_text())["sft"]
    assert plan["micro_batch_size"] == 1 and plan["reasons"][-2:] == [event["reason"] for event in revisions]
    assert revisions[-1]["reason"] in (tmp_path / "halved/run/report.html").read_text(encoding="utf-8")


def test_an_evaluation_whose_memory_is_full_takes_fewer_rows(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = SftLoss.forward

    def forward_without_memory(self: SftLoss, tokens: torch.Tensor, *others: Any, **kwargs: Any) -> torch.Tensor:
        if not self.training and len(tokens) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, tokens, *others, **kwargs)

    monkeypatch.setattr(SftLoss, "forward", forward_without_memory)
    run(tmp_path, model_folder, per_device_eval_batch_size=3)
    (revised,) = events_of(tmp_path / "run", "plan_revised")
    assert revised["changes"] == {"eval_micro_batch_size": {"from": 3, "to": 1}}
    assert revised["reason"] == "evaluation micro-batch 3 runs out of memory; 1 from now on"


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (True, "out of memory with 1 row at once; what would do: gradient_checkpointing: selective, or true$"),
        (False, "sft: the device is out of memory measuring one row; shorter rows would do: max_length"),
    ],
)
def test_where_not_even_one_row_fits_the_message_says_what_would_work(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: bool, message: str
) -> None:
    forward = SftLoss.forward

    def out_of_memory(self: SftLoss, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.training is training:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(SftLoss, "forward", out_of_memory)
    with pytest.raises(UsageError, match=message):
        run(tmp_path, model_folder)


@pytest.mark.parametrize(
    ("settings", "would_do"),
    [
        (SftConfig(gradient_checkpointing="selective"), "gradient_checkpointing: true"),
        (SftConfig(gradient_checkpointing=True),
         "trainable: lora, or shorter rows: max_length, or more GPUs: distributed_strategy: fsdp"),
        (LoraStageConfig(gradient_checkpointing=True, quantization="nf4"), "shorter rows: max_length"),
        (ClassifyConfig(), "a smaller model.resnet_width"),
    ],
)  # fmt: skip
def test_the_message_offers_only_what_the_plan_does_not_do_yet(settings: TrainingConfig, would_do: str) -> None:
    plan = plan_stage(settings, 100, 1, CPU)
    assert _train_memory_message(plan, settings).endswith(f"at once; what would do: {would_do}")


def test_one_row_at_once_is_the_least() -> None:
    plan = plan_stage(SftConfig(per_device_train_batch_size=6, gradient_accumulation_steps=2), 100, 1, CPU)
    sizes = []
    while plan is not None:
        sizes.append((plan.micro_batch_size, plan.gradient_accumulation_steps, plan.global_batch_size))
        plan = plan.halve_micro_batch(training=True)
    assert sizes == [(6, 2, 12), (3, 4, 12), (1, 12, 12)]


def test_layers_that_do_not_compile_run_as_they_are(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_run = run(tmp_path / "whole", model_folder)

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    compile_with = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_with(self, backend=broken))
    again = run(tmp_path / "again", model_folder, torch_compile=True)
    assert [loss for loss, *_ in again["steps"].values()] == pytest.approx(
        [loss for loss, *_ in expected_run["steps"].values()], rel=1e-6
    )
    fresh_cache, eager = (event["reason"] for event in events_of(tmp_path / "again/run", "plan_revised"))
    assert "RuntimeError: no compiler here); retrying with a fresh cache" in fresh_cache
    assert "running eagerly" in eager


def test_a_later_stage_finds_room_for_what_it_compiles() -> None:
    traced = []

    def backend_fn(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return graph.forward

    for stage in range(3):
        torch.compile(torch.nn.functional.relu, backend=backend_fn)(torch.ones(3))
        assert len(traced) == stage + 1
        CompiledLayers([torch.nn.Linear(1, 1)], traced.append)
    assert torch._dynamo.config.recompile_limit == RECOMPILE_LIMIT


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_compiler_times_no_alternatives_that_differ_in_bits(deterministic: bool) -> None:
    """Rule 8: without, Gemma's norms are split as was fastest in this process; found on an H200."""
    from torch._inductor import config

    with config.patch(deterministic=not deterministic):
        CompiledLayers([torch.nn.Linear(1, 1)], lambda line: None, deterministic=deterministic)
        assert config.deterministic is deterministic


def test_what_a_compiler_finds_broken_in_its_cache_is_the_compilers_failure() -> None:
    """Triton reads its cache with json, whose error comes out unchanged; only its frame says whose it is."""
    module: dict[str, Any] = {"__name__": "triton.runtime.cache"}
    exec("import json\ndef read(text):\n    return json.loads(text)", module)
    for read, is_theirs in ((module["read"], True), (json.loads, False)):
        with pytest.raises(ValueError, match="Expecting value") as error_info:
            read("broken")
        assert is_compiler_error(error_info.value) is is_theirs


class LogLines(logging.Handler):
    """What would have been printed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def test_a_cache_that_cannot_be_read_is_reported_once_and_without_a_traceback() -> None:
    messages: list[str] = []
    CompiledLayers([torch.nn.Linear(1, 1)], lambda line: pytest.fail("an earlier stage gets no more notes"))
    CompiledLayers([torch.nn.Linear(1, 1)], messages.append)
    reader, handler = logging.getLogger("torch._inductor.codecache"), LogLines()
    reader.addHandler(handler)
    for _ in range(2):
        try:
            raise EOFError("ran out of input")
        except EOFError:
            reader.warning("unable to load compiled graph", exc_info=True)
    reader.warning("something else")
    reader.removeHandler(handler)
    assert messages == ["the compile cache cannot be read; compiling again"]
    assert handler.lines == ["something else"]


def test_a_resumed_run_compiles_on_the_shapes_that_the_first_one_compiled_on(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 8: kernels depend on the shapes that torch sees first; a resumed run sees others, unless it looks back."""
    trained: list[list[torch.Size]] = []
    forward = SftLoss.forward

    def record_shapes(self: SftLoss, tokens: torch.Tensor, *others: Any, **kwargs: Any) -> torch.Tensor:
        if self.training:
            trained[-1].append(tokens.shape)
        return forward(self, tokens, *others, **kwargs)

    monkeypatch.setattr(SftLoss, "forward", record_shapes)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)  # shapes do not need it
    settings = {**BRIEF, "torch_compile": True, "max_steps": 6, "save_steps": 3, "max_length": 128}
    recipe = tiny_recipe(tmp_path, model_folder, **settings)
    for name in ("uninterrupted", "resumed"):
        if name == "resumed":
            shutil.rmtree(tmp_path / "run/stages/sft/checkpoints/step-00000006")
            for done in (tmp_path / "run/stages/sft").glob("*.json"):
                done.unlink()
        trained.append([])
        pipeline.run(load(recipe, environ={}), lambda event: None)
    uninterrupted, resumed = trained
    assert uninterrupted[:4] == resumed[:4]
    assert uninterrupted[0] != uninterrupted[1]
    assert uninterrupted[2:4] == uninterrupted[:2], "sizes are compared, then the layers are compiled"
    assert uninterrupted[4] == uninterrupted[5] == uninterrupted[0], "the check of the gradients, and the first step"
    assert len(uninterrupted) == 5 + 6
    assert len(resumed) == 5 + 3


@pytest.mark.parametrize("short_batch", [False, True])
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_rows_of_every_length_are_compiled_once(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, short_batch: bool
) -> None:
    """DPO compiled three times, the last time in the middle of the run: 8 s of Llama-3.2-1B on an H200.

    Its reference is computed without gradients, which is compiled apart. A last batch of fewer rows is not compiled.
    """
    compiled: dict[bool, list[list[str]]] = {False: [], True: []}

    def count(graph: Any, inputs: Any) -> Any:
        shapes = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        sizes = [str(each.shape) for each in shapes if isinstance(each, torch.Tensor)]
        compiled[torch.is_grad_enabled()].append(sizes)
        return graph.forward

    compile_with = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_with(self, backend=count))
    rng = random.Random(0)

    def text() -> str:
        return " ".join(rng.choices(["coal", "river", "gate", "lamp"], k=rng.randrange(2, 16)))

    rows = [{"prompt": text(), "completion": text(), "chosen": text(), "rejected": text()} for _ in range(64)]
    columns = ("prompt", "completion") if stage == "sft" else ("prompt", "chosen", "rejected")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({key: row[key] for key in columns}) + "\n" for row in rows))
    settings = {**BRIEF, "max_steps": 12, "max_length": 256, "padding_free": True, "torch_compile": True}
    settings |= {"save_steps": 6, "per_device_eval_batch_size": 16}
    settings |= {"max_steps": None, "num_train_epochs": 1, "per_device_train_batch_size": 5} if short_batch else {}
    data = {"train_file": str(tmp_path / "rows.jsonl"), "test_size": 7}  # 57 are eleven batches of 5 and one of 2
    recipe = {
        "model": {"model_name_or_path": str(model_folder)}, "data": data,
        "name": "sizes", "report_to": "none", "output_dir": str(tmp_path / "run"), stage: settings,
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    for _ in range(2):
        pipeline.run(load(tmp_path / "recipe.yaml", environ={}), lambda event: None)
        shutil.rmtree(tmp_path / f"run/stages/{stage}/checkpoints/step-00000012")
        for done in (tmp_path / "run/stages" / stage).glob("*.json"):
            done.unlink()
    first, resumed = compiled[True]  # the layers share what is compiled for one of them
    assert first == resumed, "rule 8: also where references, computed at the first start, were compiled before"
    assert len(compiled[False]) == (stage == "dpo")


def test_evaluations_do_not_compile_the_layers_again(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients they would be compiled once more, for a few rows: 18 s of a 3 B model on an H200."""
    eager, modes = run(tmp_path / "eager", model_folder), set[tuple[bool, bool]]()

    def compile_layer(layer: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            modes.add((layer.training, torch.is_grad_enabled()))
            return layer._call_impl(*args, **kwargs)

        layer.__dict__["_compiled_call_impl"] = call

    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    assert run(tmp_path / "all", model_folder, torch_compile=True) == eager
    run(tmp_path / "lora", model_folder, torch_compile=True, trainable="lora")
    assert modes == {(True, True)}


class Doubled(torch.autograd.Function):
    """The right output with a wrong gradient, as from a kernel with a race."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_gradients_are_compared_where_they_exist_and_are_finite() -> None:
    one, two, nan = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), torch.tensor([math.nan])
    assert _largest_gap([one, None, None], [one, None, one]) == 0.0
    assert _largest_gap([two, None], [one, one]) == 0.25
    assert _largest_gap([one * 1e-6, one], [two * 1e-6, one]) < 1e-3, "rounding of what is nearly zero"
    assert _largest_gap([one, nan], [one, nan]) == 0.0
    assert _largest_gap([one, nan * one], [one, one]) == math.inf


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_model_whose_compiled_gradients_are_wrong_is_trained_eagerly(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    eager = run(tmp_path / "eager", model_folder)

    def compile_layer(layer: Any) -> None:
        def call(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return layer._call_impl(Doubled.apply(hidden) if is_wrong else hidden, *args, **kwargs)

        layer.__dict__["_compiled_call_impl"] = call

    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    compiled = run(tmp_path / "compiled", model_folder, torch_compile=True)
    assert compiled == eager
    reasons = [event["reason"] for event in events_of(tmp_path / "compiled/run", "plan_revised")]
    wrong = "torch.compile gives wrong gradients for this model (100% off); running eagerly: slower, correct"
    assert reasons == ([wrong] if is_wrong else [])

"""The engine on a CUDA device, run by hand on a GPU machine: same loss as the CPU, exact resume, every precision."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from safetensors.torch import load_file

from benchmarks import mixed_lengths, speed, workloads
from benchmarks.common import free_device
from modelwright.engine import checkpoint, precision
from modelwright.engine.bf16_adamw import BF16AdamW
from modelwright.engine.checkpoint import LazyTensor
from modelwright.engine.cuda_graphs import WARMUP_CALLS, GraphedCallable, GraphPool
from modelwright.engine.fallback import CompiledLayers
from modelwright.engine.precision import PARAM_REMAINDER, join_fp32_master, split_fp32_master
from modelwright.engine.trainer import Engine
from modelwright.errors import Diverged, Interrupted
from modelwright.models import attention, pretrained
from modelwright.recipe.load import load
from modelwright.serve.decoder import Decoder
from modelwright.serve.kv_cache import SharedCache
from modelwright.serve.sampling import DecodeRequest, SamplingParams
from modelwright.stages import pipeline, planning
from tests.faults.fork_server import run_fingerprint
from tiny import tiny_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run by hand on a GPU machine"),
]


def run(folder: Path, model: Path, stop_after: int | None = None, **settings: Any) -> Path:
    """Run the tiny recipe in this process, perhaps only to some step."""
    recipe = folder / "recipe.yaml"
    if not recipe.exists():
        tiny_recipe(folder, model, **settings)

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    pipeline.run(load(recipe, environ={}), watch)
    return folder / "run"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optim", ["adamw_torch", "lion"])
def test_a_resumed_run_equals_the_uninterrupted_run_on_the_gpu(
    model_folder: Path, tmp_path: Path, precision: str, optim: str
) -> None:
    settings = {"precision": precision, "optim": optim}
    full = run(tmp_path / "whole", model_folder, **settings)
    with pytest.raises(Interrupted):
        run(tmp_path / "halved", model_folder, stop_after=8, **settings)
    resumed = run(tmp_path / "halved", model_folder)
    assert run_fingerprint(resumed) == run_fingerprint(full)
    losses = [loss for loss, *_ in run_fingerprint(full)["steps"].values()]
    assert losses[-1] < losses[0] - 0.5


def test_the_gpu_computes_the_losses_of_the_cpu(model_folder: Path, tmp_path: Path, cpu_losses: list[float]) -> None:
    full = run(tmp_path, model_folder, precision="fp32", tf32=False)
    losses = [loss for loss, *_ in run_fingerprint(full)["steps"].values()]
    assert losses == pytest.approx(cpu_losses, rel=1e-4)


@pytest.mark.parametrize("settings", [{}, {"torch_compile": True}, {"cuda_graphs": "never"}], ids=str)
def test_tensor_cores_learn_what_exact_products_learn(
    model_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no tf32")
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    exact, rounded = (
        [
            loss
            for loss, *_ in run_fingerprint(run(tmp_path / str(options), model_folder, tf32=options, **settings))[
                "steps"
            ].values()
        ]
        for options in (False, "auto")
    )
    assert rounded == pytest.approx(exact, rel=1e-3) and rounded != exact
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
    assert any("tf32" in line for line in json.loads((tmp_path / "auto/run/plan.json").read_text())["sft"]["reasons"])


@torch.no_grad()
def test_angles_of_far_positions_are_exact_among_rounded_products(model_folder: Path) -> None:
    model = pretrained.load_model(model_folder).cuda()
    precision.disable_tf32_in_rope(model)
    rotary = next(part for part in model.modules() if precision.is_rotary(part))
    stream, positions = torch.ones(1, 1, device="cuda"), torch.arange(4000, 4200, device="cuda").unsqueeze(0)
    exact = rotary(stream, positions)
    with precision.allow_tf32(tf32=True):
        among = rotary(stream, positions)
        numbers = torch.rand(512, 512, device="cuda")
        rounded = numbers @ numbers
    assert all(torch.equal(one, other) for one, other in zip(exact, among, strict=True))
    assert not torch.equal(rounded, numbers @ numbers)


@pytest.mark.parametrize("trainable", ["lora", {"last_layers": 1, "lm_head": True, "untie_lm_head": True}])
def test_parts_train_on_the_gpu(model_folder: Path, tmp_path: Path, trainable: Any) -> None:
    full = run(tmp_path, model_folder, trainable=trainable, packing=True, learning_rate=1e-2)
    losses = [loss for loss, *_ in run_fingerprint(full)["steps"].values()]
    assert losses[-1] < losses[0]
    assert json.loads((full / "plan.json").read_text())["sft"]["precision"] == "fp32"


@pytest.fixture
def cpu_losses(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same run in a process that sees no GPU."""
    folder = tmp_path_factory.mktemp("cpu")
    recipe = tiny_recipe(folder, model_folder)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "modelwright", "run", str(recipe)], env=environ, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return [loss for loss, *_ in run_fingerprint(folder / "run")["steps"].values()]


@pytest.mark.parametrize("packing", [False, True])
def test_bf16_weights_and_our_attention_learn_what_fp32_learns(
    model_folder: Path, tmp_path: Path, packing: bool
) -> None:
    exact, resumed = (
        [
            loss
            for loss, *_ in run_fingerprint(
                run(tmp_path / name, model_folder, packing=packing, precision=name, tf32=False)
            )["steps"].values()
        ]
        for name in ("fp32", "bf16")
    )
    assert resumed == pytest.approx(exact, rel=1e-2)
    assert json.loads((tmp_path / "bf16/run/plan.json").read_text())["sft"]["param_dtype"] == "bf16"


@torch.no_grad()
def test_packed_documents_are_apart_at_full_speed(model_folder: Path) -> None:
    model = pretrained.load_model(model_folder).eval()
    pretrained.prepare_model(model, torch.device("cuda"), "auto")
    assert model.config._attn_implementation == attention.ATTN_NAME
    model.to(torch.bfloat16)
    tokens = torch.arange(3, 27, device="cuda").unsqueeze(0)
    positions = torch.arange(12, device="cuda").repeat(2).unsqueeze(0)
    documents = torch.tensor([0, 12, 24, 24], dtype=torch.int32, device="cuda")
    together = attention.hidden_states(model, tokens, positions, cu_seqlens=documents)[0, 12:]
    alone = attention.hidden_states(model, tokens[:, 12:], positions[:, 12:])[0]
    assert (together - alone).abs().max() < 0.05 * alone.abs().max()
    leaking = attention.hidden_states(model, tokens, positions)[0, 12:]
    assert (leaking - alone).abs().max() > 0.2 * alone.abs().max()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_recorded_steps_compute_what_unrecorded_steps_compute(accumulation: int) -> None:
    work = workloads.Workload(2, 256, 512, 4, 2, rows=2, length=128, vocab_size=1024, accumulation=accumulation)
    plain, recorded = (
        speed.train_modelwright(
            work, workloads.Variant(when, {"precision": "bf16", "cuda_graphs": when}), workloads.token_rows(work, 12)
        )
        for when in ("never", "always")
    )
    assert recorded.losses == pytest.approx(plain.losses, rel=2e-3)
    assert recorded.losses[-1] < recorded.losses[0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_what_is_computed_again_is_recorded_too_and_learns_the_same(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, lora: bool
) -> None:
    recorded: list[bool] = []
    record = GraphedCallable._capture

    def watched(*args: Any) -> bool:
        recorded.append(record(*args))
        return recorded[-1]

    monkeypatch.setattr(GraphedCallable, "_capture", watched)
    work = workloads.Workload(4, 1024, 2816, 8, 4, rows=4, length=512, vocab_size=1024, lora=lora)
    results = {}
    for how, when in ((False, "never"), ("selective", "never"), ("selective", "always"), (True, "always")):
        free_device()
        recorded.clear()
        options = {"precision": "bf16", "cuda_graphs": when, "torch_compile": compiled, "gradient_checkpointing": how}
        results[how, when] = speed.train_modelwright(
            work, workloads.Variant("it", options), workloads.token_rows(work, 12)
        )
        assert all(recorded) and bool(recorded) == (when == "always"), (how, when, recorded)
    plain = results[False, "never"]
    for pace in results.values():
        assert pace.losses == pytest.approx(plain.losses, rel=2e-3)
    assert results["selective", "never"].memory < plain.memory
    assert results[True, "always"].memory < results["selective", "always"].memory


def test_after_a_capture_that_failed_random_numbers_and_other_captures_work() -> None:
    weights, messages = [torch.ones(4, device="cuda", requires_grad=True)], list[str]()
    pool = GraphPool(weights)
    synchronizing = GraphedCallable(lambda x: x * float(torch.dropout(x, 0.5, True).sum()), pool, log=messages.append)
    double = GraphedCallable(lambda x: 2 * torch.dropout(x, 0.5, True), pool, log=messages.append)
    for _ in range(WARMUP_CALLS + 1):  # it fails before the other is captured
        synchronizing(may_replay=True, x=torch.ones(1000, device="cuda"))
    for _ in range(6):
        x = torch.ones(1000, device="cuda")
        synchronizing(may_replay=True, x=x)
        assert not synchronizing.replayed and torch.cuda.current_stream() == torch.cuda.default_stream()
        assert 300 < int(torch.dropout(x, 0.5, True).count_nonzero()) < 700
        torch.randn(5, device="cuda")
        first, second = (double(may_replay=True, x=x).clone() for _ in range(2))
        assert not torch.equal(first, second)
    assert double.replayed and len(messages) == 1 and "not replayed" in messages[0]


def test_a_tensor_comes_to_host_memory_and_into_a_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "STAGING_BYTES", 1 << 10)
    tensors = {"a": torch.randn(100, 37, device="cuda").T, "b": torch.ones((), device="cuda"), "c": torch.ones(0, 3)}
    tensors |= {"d": tensors["a"].bfloat16(), "e": torch.arange(700, dtype=torch.uint8, device="cuda")}
    for tensor in tensors.values():
        assert torch.equal(checkpoint.to_host(tensor), tensor.cpu())
    lazy = [LazyTensor(name, tuple(x.shape), x.dtype, lambda x=x: x) for name, x in tensors.items()]
    checkpoint.write_safetensors(tmp_path / "it.safetensors", lazy)
    written = load_file(tmp_path / "it.safetensors")
    assert all(torch.equal(value, tensors[name].cpu()) for name, value in written.items()) and len(written) == 5
    bad = torch.ones(3000, device="cuda")
    bad[2999] = float("nan")
    with pytest.raises(Diverged, match="bad holds a number that is not finite"):
        checkpoint.write_safetensors(tmp_path / "bad", [LazyTensor("bad", (3000,), bad.dtype, lambda: bad)])


@pytest.mark.parametrize("optim", ["lion", "sgd"])
def test_other_optimizers_are_captured_too_and_learn_the_same(monkeypatch: pytest.MonkeyPatch, optim: str) -> None:
    captured: list[bool] = []
    capture = GraphedCallable._capture

    def watched(*args: Any) -> bool:
        captured.append(capture(*args))
        return captured[-1]

    monkeypatch.setattr(GraphedCallable, "_capture", watched)
    work = workloads.Workload(2, 256, 512, 4, 2, rows=2, length=128, vocab_size=1024)
    options = {"precision": "bf16", "optim": optim, "weight_decay": 0.1}
    plain, recorded = (
        speed.train_modelwright(work, workloads.Variant(when, {**options, "cuda_graphs": when}), rows)
        for rows in [workloads.token_rows(work, 12)]
        for when in ("never", "always")
    )
    assert len(captured) >= 3 and all(captured), "backward, clipping and the optimizer step"
    assert recorded.losses == pytest.approx(plain.losses, rel=2e-3)


@pytest.mark.parametrize("recorded", ["never", "always"])
def test_few_moving_weights_are_moved_without_compiling(model_folder: Path, tmp_path: Path, recorded: str) -> None:
    torch._dynamo.utils.counters.clear()
    settings = {"precision": "bf16", "cuda_graphs": recorded, "trainable": {"norms": True}}
    steps = run_fingerprint(run(tmp_path, model_folder, **settings))["steps"]
    assert len(steps) == 12 and not torch._dynamo.utils.counters["stats"]
    losses = [loss for loss, *_ in steps.values()]
    assert losses[-1] < losses[0], "a weight that is no number makes a loss that is none"


def grad_norm(gradients: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def grads_of(weights: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


@pytest.mark.parametrize("recorded", ["never", "always"])
def test_a_bad_step_moves_nothing(monkeypatch: pytest.MonkeyPatch, recorded: str) -> None:
    work = workloads.Workload(2, 256, 512, 4, 2, rows=2, length=128, vocab_size=1024)
    first_weights: list[torch.Tensor] = []
    step, bad_steps = Engine._step, {6, 8}

    def watched(engine: Any, stop_requested: bool) -> Any:
        known = 64 if engine.cursor.step in bad_steps else 0
        engine.guard.load_state_dict({"losses": [1e-9] * known, "grad_norms": [1e-9] * known})
        first_weights.append(next(iter(engine.trainable_params.values())).detach().clone())
        report = step(engine, stop_requested)
        assert report.health == ("spike" if known else "ok")
        return report

    monkeypatch.setattr(Engine, "_step", watched)
    variant = workloads.Variant("it", {"precision": "bf16", "cuda_graphs": recorded})
    speed.train_modelwright(work, variant, workloads.token_rows(work, 12))
    assert {number for number, (was, now) in enumerate(pairwise(first_weights)) if torch.equal(was, now)} == bad_steps


@pytest.mark.parametrize("mean", [torch.float32, torch.bfloat16], ids=["fp32 mean", "bf16 mean"])
@pytest.mark.parametrize("odd", [0, 3], ids=["even sizes", "odd sizes"])
def test_the_kernel_moves_weights_as_the_formula_does(mean: torch.dtype, odd: int) -> None:
    torch.manual_seed(0)
    sizes = [16 * number + odd for number in range(1, 130)] + [20_480 + odd, 5_000_000 + odd]
    starts = [torch.randn(size) for size in sizes]
    gradients = [[torch.randn(size).bfloat16() for size in sizes] for _ in range(4)]
    ends = []
    for device in ("cpu", "cuda"):
        split = [split_fp32_master(start.to(device)) for start in starts]
        weights = [torch.nn.Parameter(high) for high, _ in split]
        groups = [{"params": weights[1:], "weight_decay": 0.1}, {"params": weights[:1], "weight_decay": 0.0}]
        remainders = {weight: remainder for weight, (_, remainder) in zip(weights, split, strict=True)}
        optimizer = BF16AdamW(groups, remainders, mean, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
        for step, args in enumerate(gradients):
            for weight, gradient in zip(weights, args, strict=True):
                weight.grad = gradient.to(device)
            weights[7].grad = weights[7].grad if step % 2 else None
            assert float(optimizer.clip_grad_norm(1500.0)) == pytest.approx(grad_norm(grads_of(weights)), rel=1e-4)
            if step == 1:  # as by a restart
                weights[3].data = weights[3].data.clone()
                optimizer.state[weights[4]]["exp_avg"] = optimizer.state[weights[4]]["exp_avg"] * 2
                optimizer.zero_grad()
                for weight, gradient in zip(weights, args, strict=True):
                    weight.grad = gradient.to(device)
            optimizer.step()
        ends.append(
            [join_fp32_master(weight.data, optimizer.state[weight][PARAM_REMAINDER]).cpu() for weight in weights]
        )
    tolerance = 1e-5 if mean is torch.float32 else 1e-3
    for formula, kernel in zip(*ends, strict=True):
        torch.testing.assert_close(kernel, formula, rtol=1e-5, atol=tolerance)
    assert all(not torch.equal(start, end) for start, end in zip(starts, ends[1], strict=True))


def test_fp8_learns_what_bf16_learns() -> None:
    pytest.importorskip("torchao")
    work = workloads.Workload(2, 256, 512, 4, 2, rows=8, length=128, vocab_size=1024)
    exact = speed.train_modelwright(
        work, workloads.Variant("bf16", {"precision": "bf16"}), workloads.token_rows(work, 12)
    )
    fp8 = speed.train_modelwright(
        work, workloads.Variant("fp8", {"precision": "fp8", "torch_compile": True}), workloads.token_rows(work, 12)
    )
    assert fp8.losses == pytest.approx(exact.losses, rel=2e-2)


def test_fp8_that_is_kept_trains_on_the_gpu_as_if_it_had_been_forced(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planning, "MIN_FP8_SPEEDUP", 0.0)
    monkeypatch.setattr(planning, "MAX_LOSS_DIFFERENCE", 1.0)
    settings = {"precision": "fp8", "max_steps": 3, "eval_steps": 3}
    validated = run(tmp_path / "kept", model_folder, **settings)
    forced = run(tmp_path / "forced", model_folder, **settings, fp8_validation="off")
    assert json.loads((validated / "plan.json").read_text())["sft"]["reasons"][-1].startswith("fp8 is kept")
    assert run_fingerprint(validated) == run_fingerprint(forced)


@pytest.mark.parametrize("recorded", ["never", "always"])
def test_a_gpu_that_others_have_filled_halves_the_micro_batch_and_keeps_the_batch(
    monkeypatch: pytest.MonkeyPatch, recorded: str
) -> None:
    """The error is the allocator's own: most of the GPU is taken."""
    work = workloads.Workload(4, 1024, 2816, 8, 4, rows=8, length=1024, vocab_size=1024)
    variant, messages = workloads.Variant("it", {"precision": "bf16", "cuda_graphs": recorded}), []
    fallback = Engine._fallback_for

    def logged_fallback(engine: Any, error: Exception) -> Any:
        plan = fallback(engine, error)
        messages.append(plan and plan.reasons[-1])
        return plan

    monkeypatch.setattr(Engine, "_fallback_for", logged_fallback)
    free_device()
    unlimited = speed.train_modelwright(work, variant, workloads.token_rows(work, 8))
    assert not messages
    free_device()
    free, _ = torch.cuda.mem_get_info()
    occupied = torch.empty(free - int(0.75 * unlimited.memory), dtype=torch.uint8, device="cuda")
    limited = speed.train_modelwright(work, variant, workloads.token_rows(work, 8))
    del occupied
    free_device()
    assert messages[0].startswith("micro-batch 8 runs out of memory; batch 8 = 4 per device × 1 device × 2")
    assert limited.losses == pytest.approx(unlimited.losses, rel=2e-3)


def test_compiled_gradients_of_heads_of_256_are_the_eager_ones_each_time() -> None:
    """torch 2.11 makes a kernel for Gemma 3's queries that reads memory before it is written (fallback.py)."""
    kind, shape = mixed_lengths.SHAPES["gemma-3-270m"]
    layer_types = ["sliding_attention", "full_attention"]
    model = workloads.random_model(
        kind, {**shape, "num_hidden_layers": 2, "vocab_size": 1000, "layer_types": layer_types}, "cuda"
    )
    attention.register_attention(model)
    tokens, positions = torch.arange(3001, device="cuda")[None] % 900, torch.arange(3001, device="cuda")[None] % 1001
    starts = torch.tensor([0, 1001, 2002, 3001], dtype=torch.int32, device="cuda")

    def gradients() -> list[torch.Tensor]:
        with precision.deterministic_algorithms(True):
            with torch.autocast("cuda", torch.bfloat16):
                layout = attention.FlatLayout(starts, 1001)
                hidden = attention.hidden_states(model, tokens, positions, cu_seqlens=layout)
            loss = (hidden.float() * torch.linspace(-1, 1, hidden.shape[-1], device="cuda")).square().mean()
            return list(torch.autograd.grad(loss, [*model.model.layers.parameters()]))

    eager = gradients()
    CompiledLayers(list(model.model.layers), lambda line: None)
    compiled = gradients()
    for each, expected in zip(compiled, eager, strict=True):
        assert attention.relative_gap(expected, each) < 0.05
    for _ in range(5):
        assert all(map(torch.equal, gradients(), compiled))


@pytest.mark.parametrize("seconds", [0.5, 2.0, 5.0])
def test_a_group_that_is_stopped_while_it_compiles_can_be_resumed(
    model_folder: Path, tmp_path: Path, seconds: float
) -> None:
    """As batch systems stop a job: the processes that compile are stopped too, and nobody waits for them.

    A checkpoint is there unless the evaluation before the first step was stopped.
    """
    recipe = tiny_recipe(tmp_path, model_folder, precision="auto", torch_compile=True, max_steps=1000)
    cache_dirs = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    with (tmp_path / "output").open("w") as output:
        trial = subprocess.Popen(
            [sys.executable, "-m", "modelwright", "run", str(recipe)], env={**os.environ, **cache_dirs},
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        journal, deadline = tmp_path / "run/journal.jsonl", time.monotonic() + 120
        event = '"name": "load model"'
        while time.monotonic() < deadline and not (journal.exists() and event in journal.read_text()):
            time.sleep(0.1)
        time.sleep(seconds)
        os.killpg(trial.pid, signal.SIGTERM)
        assert trial.wait(60) == Interrupted.exit_code, (tmp_path / "output").read_text()
    finally:
        if trial.poll() is None:
            os.killpg(trial.pid, signal.SIGKILL)
    output_text = (tmp_path / "output").read_text()
    checkpoints = list((tmp_path / "run/stages/sft/checkpoints").glob("step-*"))
    assert checkpoints or "stopped after step 0 of 1000; rerun the same command" in output_text, output_text


def test_answers_are_decoded_while_a_thread_copies_the_weights(
    model_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run ended with "operation not permitted when stream is capturing": the trained model was being written."""
    model = pretrained.load_model(model_folder).cuda().eval()
    ended, errors = threading.Event(), []

    def copy_weights() -> None:
        stream = torch.cuda.Stream()
        try:
            while not ended.is_set():
                with torch.cuda.stream(stream):
                    for weight in model.parameters():
                        weight.detach().cpu()
                        torch.empty_like(weight, device="cpu", pin_memory=True).copy_(weight, non_blocking=True)
                stream.synchronize()
        except RuntimeError as error:
            errors.append(error)

    def answers() -> list[list[int]]:
        decoder = Decoder(model, SharedCache(model, static=True, graphs=True))  # captures its graphs anew
        prompts = [list(range(3, 3 + length)) for length in (5, 17, 30, 9, 2)]
        requests = [DecodeRequest(prompt, SamplingParams(24), frozenset()) for prompt in prompts]
        decoder.submit(*requests)
        while not all(request.finished for request in requests):
            decoder.step()
        assert not any(request.error for request in requests)
        return [request.token_ids for request in requests]

    expected = answers()
    thread = threading.Thread(target=copy_weights)
    thread.start()
    try:
        assert all(answers() == expected for _ in range(10))
    finally:
        ended.set()
        thread.join()
    printed = capfd.readouterr().err
    assert not errors and "without CUDA graphs" not in printed, printed[-3000:]

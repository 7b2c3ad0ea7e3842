"""The same command gives the same bits on every device: deterministic kernels, and what is said without.

What a GPU computes is compared by `python -m tests.faults.gpu`."""

from __future__ import annotations

import inspect
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from modelwright.cli import run as cli_run
from modelwright.engine.precision import deterministic_algorithms, nondeterministic_operation
from modelwright.engine.trainer import Engine
from modelwright.errors import Interrupted, UsageError
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import plan_stage
from modelwright.recipe.load import load
from modelwright.recipe.stage_specs import SftConfig
from modelwright.runs.caches import prepare_environment
from modelwright.stages import context, pipeline, stage_runner
from modelwright.tasks.sft import SftLoss
from tests.faults.fork_server import events_of
from tiny import tiny_recipe

BRIEF = {"max_steps": 3, "save_steps": 1, "per_device_train_batch_size": 4}


def run(folder: Path, model: Path, stop_after: int | None = None) -> Path:
    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    pipeline.run(load(tiny_recipe(folder, model, **BRIEF), environ={}), stop)
    return folder / "run"


def put_without_accumulate() -> None:
    """An operation that torch has no deterministic kernel for."""
    torch.zeros(3).put_(torch.tensor([0, 1]), torch.ones(2))


@pytest.fixture
def sft_with_put(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = SftLoss.forward

    def forward_with_put(self: SftLoss, *args: Any, **kwargs: Any) -> torch.Tensor:
        put_without_accumulate()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(SftLoss, "forward", forward_with_put)


def test_kernels_are_deterministic_inside_and_as_before_outside() -> None:
    with deterministic_algorithms(True):
        assert torch.get_deterministic_debug_mode() == 2, "with warn_only FlashAttention stays as it was"
        assert not torch.utils.deterministic.fill_uninitialized_memory
        with pytest.raises(RuntimeError) as caught:
            put_without_accumulate()
    assert nondeterministic_operation(caught.value) == "put_"
    assert nondeterministic_operation(RuntimeError("shapes do not fit")) is None
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.utils.deterministic.fill_uninitialized_memory
    with deterministic_algorithms(False):
        put_without_accumulate()


def test_indexing_gives_the_same_gradient_with_several_threads() -> None:
    """Without the switch 1 of 30 was equal, with 8 threads on 2 cores, and it took twice as long."""
    generator = torch.Generator().manual_seed(1)
    index, factor = torch.randint(0, 8, (5000,), generator=generator), torch.randn(5000, 64, generator=generator)

    def gradient() -> torch.Tensor:
        values = torch.ones(8, 64, requires_grad=True)
        (values[index] * factor).sum().backward()  # type: ignore[no-untyped-call]
        assert values.grad is not None
        return values.grad

    threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        with deterministic_algorithms(True):
            assert all(torch.equal(gradient(), gradient()) for _ in range(10))
    finally:
        torch.set_num_threads(threads)


def test_switching_in_every_step_does_not_compile_again() -> None:
    """The switch is part of dynamo's guards: forward and backward of every step must see it on."""
    compiled = CompileCounterWithBackend("aot_eager")
    layer = torch.compile(torch.nn.Linear(4, 4), backend=compiled)
    for _ in range(3):
        with deterministic_algorithms(True):
            layer(torch.ones(2, 4)).sum().backward()
    assert compiled.frame_count == 1


def test_cublas_is_deterministic_from_its_first_matmul_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the variable once, at the first matmul: that of `warm_up_cuda`."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    prepare_environment()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    source = inspect.getsource(cli_run.run)
    assert source.index("prepare_environment()") < source.index("warm_up_cuda()")
    assert nondeterministic_operation(RuntimeError("… because it uses CuBLAS and you have CUDA >= 10.2. …"))


def test_it_is_the_default_and_the_alias_of_hugging_face_sets_it(tmp_path: Path, model_folder: Path) -> None:
    cpu = DeviceInfo("cpu", "2 CPU threads", 10**9, False)
    assert plan_stage(SftConfig(), 8, 1, cpu).deterministic
    recipe = load(tiny_recipe(tmp_path, model_folder, full_determinism=False), environ={}).recipe
    assert recipe.sft is not None
    assert not recipe.sft.deterministic
    assert not plan_stage(recipe.sft, 8, 1, cpu).deterministic


@pytest.mark.usefixtures("sft_with_put")
def test_an_operation_without_a_deterministic_kernel_is_named_before_the_first_step(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = run(tmp_path, model_folder)
    (revised,) = events_of(folder, "plan_revised")
    assert revised["reason"] == "put_ has no deterministic kernel: this run cannot be repeated bit for bit"
    assert revised["changes"] == {"deterministic": {"from": True, "to": False}}
    assert [event["step"] for event in events_of(folder, "step")] == [1, 2, 3]
    assert revised["reason"] in (folder / "report.html").read_text(encoding="utf-8")


def test_several_ranks_refuse_an_operation_without_a_deterministic_kernel() -> None:
    engine = SimpleNamespace(world=SimpleNamespace(size=2))
    with pytest.raises(UsageError, match="put_ has no deterministic kernel; deterministic: false trains"):
        Engine._fallback_for(engine, RuntimeError("put_ does not have a deterministic implementation"))  # type: ignore[arg-type]


def test_a_run_that_is_resumed_elsewhere_says_what_differs(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, model_folder, stop_after=1)
    here = context.environment_of
    monkeypatch.setattr(stage_runner, "environment_of", lambda run: {**here(run), "device": "NVIDIA L4"})
    folder = run(tmp_path, model_folder, stop_after=None)
    notes = [event["message"] for event in events_of(folder, "note")]
    (line,) = [note for note in notes if "bit-identical" in note]
    assert line.startswith("resumed with another device (NVIDIA L4, before ")
    assert line in (folder / "report.html").read_text(encoding="utf-8")


def test_a_run_that_is_resumed_on_the_same_machine_says_nothing(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, model_folder, stop_after=1)
    notes = [event["message"] for event in events_of(run(tmp_path, model_folder), "note")]
    assert not [note for note in notes if "bit-identical" in note]

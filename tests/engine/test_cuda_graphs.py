"""Steps replayed as CUDA graphs train as eager steps do; a fake graph here records the torch operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelwright.data.chat import Conversation, ConversationDataset
from modelwright.data.images import ImageDataset, ImageSplits
from modelwright.engine.cuda_graphs import GraphedCallable, GraphPool
from modelwright.engine.distributed import World
from modelwright.engine.task import Cursor
from modelwright.engine.trainer import Engine
from modelwright.models.pretrained import eos_token_ids, load_model, load_tokenizer
from modelwright.models.vision import resnet18
from modelwright.plan import hardware
from modelwright.plan.stage import plan_stage
from modelwright.recipe.stage_specs import ClassifyConfig, SftConfig
from modelwright.tasks.classify import ClassifyTask
from modelwright.tasks.sft import SftTask

EPOCHS, ROWS, BATCH, STEPS = 3, 41, 12, 11
"""41 rows three times are ten batches of 12 and a last one of 3, which fits no graph."""


class Recording(TorchDispatchMode):
    """A fake CUDA graph: capture leaves nothing changed, and replay writes to the same tensors."""

    replays = 0

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or "batch_norm" in str(func):  # it moves its running statistics and does not say so
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self._before.setdefault(id(tensor), (tensor, tensor.detach().clone()))
        output = func(*args, **kwargs)
        self._done.append((func, args, kwargs, output))
        return output

    def undo(self) -> None:
        with torch.no_grad():
            for tensor, before in self._before.values():
                tensor.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        Recording.replays += 1
        for func, args, kwargs, output in self._done:
            for target, value in zip(tree_leaves(output), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(target, Tensor) and target.data_ptr() != value.data_ptr():
                    target.copy_(value)


@contextmanager
def recording(graph: Recording, **options: Any) -> Iterator[None]:
    with graph:
        yield
    graph.undo()


def image_set(count: int, seed: int) -> ImageDataset:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return ImageDataset(images, np.arange(count) % 3, ("a", "b", "c"), "noise")


def train(records: bool, **optimizer: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients' lengths of all steps, and the weights and statistics after them.

    On the way everything held out is measured, a step is found bad, and then what was recorded is forgotten.
    """
    torch.manual_seed(1)
    split = ImageSplits(image_set(ROWS, 0), image_set(6, 1))
    settings = ClassifyConfig(
        num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH // 2, global_batch_size=BATCH, max_grad_norm=0,
        precision="fp32", cutout_size=2, **optimizer,
    )  # fmt: skip
    task = ClassifyTask(resnet18(classes=3, width=4), split, settings, 5)
    plan = plan_stage(settings, ROWS, 1, hardware.probe_device())
    engine = Engine(task, settings, plan, World(), seed=3)
    engine._use_graphs = records
    engine.reset_step_state()
    losses_and_norms: list[float] = []
    for report in engine.steps():
        losses_and_norms += [report.loss, report.grad_norm]
        if report.step == 4:
            engine.evaluate()
            engine.guard.thresholds = lambda: (0.0, 0.0, 0.0)  # type: ignore[method-assign]
        if report.step == 5:
            assert report.health == "spike"
            del engine.guard.thresholds
            engine.reset_step_state()
    assert engine.cursor == Cursor(STEPS, EPOCHS * ROWS, EPOCHS * ROWS)
    return losses_and_norms, {name: value.clone() for name, value in engine._module.state_dict().items()}


@pytest.mark.parametrize(
    "optimizer", [{"optim": "sgd", "learning_rate": 0.05}, {"optim": "lion", "learning_rate": 1e-3}]
)
def test_recorded_steps_learn_what_steps_done_one_by_one_learn(
    monkeypatch: pytest.MonkeyPatch, optimizer: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(Recording, "replays", 0)
    steps, weights = train(records=False, **optimizer)
    assert Recording.replays == 0
    recorded_steps, recorded_weights = train(records=True, **optimizer)
    assert Recording.replays > 8
    assert recorded_steps == pytest.approx(steps, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(recorded_weights[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("rows", "is_short"), [(42, False), (41, True)])
def test_a_last_batch_is_computed_by_the_same_kernels_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, rows: int, is_short: bool
) -> None:
    """Rule 8: 42 rows three times end with one full micro-batch, 41 with a short one, which is not compiled.

    A replayed graph has compiled kernels: a run that ends before it captures must not run uncompiled ones.
    """
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    settings = ClassifyConfig(
        num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH // 2, global_batch_size=BATCH, precision="fp32"
    )
    for start, is_replayed in ((0, not is_short), (STEPS - 2, False)):
        task = ClassifyTask(resnet18(classes=3, width=4), ImageSplits(image_set(rows, 0), image_set(6, 1)), settings, 5)
        engine = Engine(task, settings, plan_stage(settings, rows, 1, hardware.probe_device()), World(), seed=3)
        engine._use_graphs, engine.cursor, uncompiled = True, Cursor(start, 0, 0), list[int]()
        engine.reset_step_state()

        @contextmanager
        def eager(engine: Engine = engine, uncompiled: list[int] = uncompiled) -> Iterator[None]:
            uncompiled.append(engine.cursor.step + 1)
            yield

        engine._compiled.eager = eager  # type: ignore[method-assign]
        reports = list(engine.steps())
        assert reports[-1].step == STEPS
        assert uncompiled == ([STEPS] if is_short else []), f"from step {start}"
        assert engine._first_backward.replayed is is_replayed, f"from step {start}"


def test_a_step_that_cannot_be_captured_stays_eager_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Recording, **options: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(GraphPool, "end_failed_capture", lambda self: None)  # tests/engine/test_gpu.py tests it
    messages: list[str] = []
    double = GraphedCallable(lambda x: 2 * x, GraphPool([]), log=messages.append)
    outputs = [double(may_replay=True, x=torch.tensor(3.0)).item() for _ in range(6)]
    assert outputs == [6.0] * 6 and not double.replayed
    assert messages == [
        "steps are not replayed as CUDA graphs, which is slower: operation not permitted when stream is capturing"
    ]


def train_text(folder: Path, records: bool) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Losses and gradient norms, the weights after them, and how many graphs each part of a step has."""
    settings = SftConfig(
        max_steps=40, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_length=256, optim="sgd",
        learning_rate=0.05, padding_free=True, share_prefix=False,
    )  # fmt: skip
    model = load_model(folder)
    question = {"role": "user", "content": "What is it?"}
    answers = [{"role": "assistant", "content": "a word " * (1 + 7 * row % 40)} for row in range(24)]
    items = [Conversation(str(row), (question, answer), str(row)) for row, answer in enumerate(answers)]
    task = SftTask(model, load_tokenizer(folder), ConversationDataset(items, [], ""), settings, eos_token_ids(model))
    plan = plan_stage(settings, task.rows, 1, hardware.probe_device())
    engine = Engine(task, settings, plan, World(), seed=3)
    engine._use_graphs = records
    engine.reset_step_state()
    values = [value for report in engine.steps() for value in (report.loss, report.grad_norm)]
    parts = (engine._first_backward, engine._next_backward, engine._clip, engine._update)
    return values, {name: value.clone() for name, value in model.state_dict().items()}, [len(p._graphs) for p in parts]


def test_graphs_of_several_sizes_share_the_gradients_that_one_clip_and_update_read(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    values, weights, _ = train_text(model_folder, records=False)
    recorded_values, recorded_weights, graphs = train_text(model_folder, records=True)
    assert graphs[0] >= 2 and graphs[1] >= 1 and graphs[2:] == [1, 1]
    assert recorded_values == pytest.approx(values, rel=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(recorded_weights[name], value, rtol=1e-4, atol=1e-6, msg=name)

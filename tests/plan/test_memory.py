"""The counted memory of a step is that of the tensors a real model makes, traced without weights."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest

from modelwright.plan.architecture import movement, shape_of
from modelwright.plan.memory import Fitted, memory
from modelwright.plan.shapes import KNOWN
from modelwright.plan.work import Work
from modelwright.recipe.schema import Sft

EXACT = Fitted(fixed=0.0)


def traced_peak(config: Any, work: Work, settings: Sft) -> int:
    """The most bytes of tensors in a second step of a model without data, watched operation by operation."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter
    from transformers import AutoModelForCausalLM

    from modelwright.models.trainable import recompute_activations, set_trainable

    class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
        now, peak, seen = 0, 0, dict[int, int]()

        def add(self, tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self.seen:
                self.seen[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.drop, key)

        def drop(self, key: int) -> None:
            self.now -= self.seen.pop(key, 0)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            for tensor in tree_iter(made):
                if isinstance(tensor, torch.Tensor):
                    self.add(tensor)
            self.peak = max(self.peak, self.now)
            return made

    live = Live()
    live.seen = {}
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        set_trainable(model, settings)
        if work.checkpointing:
            recompute_activations(model, work.checkpointing)
        model.train()
        moving = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(moving, fused=True)
        for tensor in (*model.parameters(), *model.buffers()):
            live.add(tensor)
        tokens = torch.zeros(work.rows, work.length, dtype=torch.int64)
        with live:
            for _ in range(2):
                live.peak = 0
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=work.precision == "bf16"):
                    hidden = model.base_model(input_ids=tokens, use_cache=False)[0]
                    logits = model.get_output_embeddings()(hidden.flatten(0, 1))
                    loss = torch.nn.functional.cross_entropy(logits.float(), tokens.flatten(), reduction="sum")
                    del hidden, logits
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return live.peak


@pytest.mark.parametrize(
    ("name", "rows", "length", "way", "more"),
    [
        ("smollm2-135m", 8, 256, "all", {"precision": "fp32"}),
        ("llama-6b", 1, 512, "all", {"checkpointing": True}),
        ("llama-6b", 8, 512, "all", {"checkpointing": "selective"}),
        ("gemma-3-270m", 2, 512, "all", {"checkpointing": "selective"}),
        ("smollm3-3b", 2, 512, {"last_layers": 2, "head": True}, {}),
        ("pythia-410m", 8, 256, {"last_layers": 2}, {}),
        ("gemma-3-270m", 2, 512, "all", {}),
    ],
)
def test_the_counted_peak_is_the_traced_peak(name: str, rows: int, length: int, way: Any, more: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    told = {**KNOWN[name], "num_hidden_layers": 2}
    config = CONFIG_MAPPING[told["model_type"]](**{k: v for k, v in told.items() if k != "model_type"}, pad_token_id=0)
    settings = Sft.model_validate({"trainable": way})
    shape = shape_of(told, name, "a test")
    work = Work(shape, movement(shape, settings), rows, length, chunked_loss=False, on_gpu=False, **more)
    assert memory(work, EXACT).total == pytest.approx(traced_peak(config, work, settings), rel=0.05)


def llama(**more: Any) -> Work:
    shape = shape_of(KNOWN["llama-6b"], "llama-6b", "a test")
    return Work(shape, movement(shape, Sft()), rows=8, length=2048, **more)


def test_fp32_masters_with_adam_need_sixteen_bytes_a_parameter_and_no_80_gb_card_holds_them() -> None:
    found = memory(llama(checkpointing=True))
    states = sum(found.parts[name] for name in ("weights", "optimizer"))
    assert states == pytest.approx(12 * 6.083e9, rel=0.001)
    assert found.moments["backward ends"] > 16 * 6.083e9
    assert found.needed > 80e9


def test_checkpointing_sharding_and_bf16_weights_each_take_less() -> None:
    plain = memory(llama()).total
    assert memory(llama(checkpointing=True)).total < memory(llama(checkpointing="selective")).total < 0.9 * plain
    assert memory(llama(checkpointing=True)).total < 0.8 * plain
    assert memory(llama(weights="bf16")).total < plain
    split = llama(sharding="fsdp", world=8, per_node=8, checkpointing=True)
    assert memory(split).total < 0.3 * memory(llama(checkpointing=True)).total
    assert memory(replace(llama(), accumulation=4)).total >= plain, "gradients stay through accumulation"


def test_quantised_layers_are_a_quarter_of_bf16_and_the_ends_stay() -> None:
    shape = shape_of(KNOWN["llama-7b"], "llama-7b", "a test")
    moves = movement(shape, Sft.model_validate({"trainable": "lora"}))
    plain = Work(shape, moves, 1, 512, weights="bf16", arrives=False)
    saved = memory(plain).parts["weights"] - memory(replace(plain, quantization="nf4")).parts["weights"]
    assert saved == pytest.approx(32 * shape.layer_matrices * (2 - 0.52))


def test_sharding_over_a_machine_holds_more_than_over_all() -> None:
    over_all = memory(llama(sharding="fsdp", world=16, per_node=8)).total
    assert memory(llama(sharding="hsdp", world=16, per_node=8)).total > over_all
    assert memory(llama(sharding="ddp", world=16, per_node=8)).total > memory(llama()).parts["weights"]


def test_recordings_of_a_step_each_keep_what_comes_and_goes() -> None:
    shape = shape_of(KNOWN["smollm2-360m"], "smollm2-360m", "a test")
    plain = Work(shape, movement(shape, Sft()), rows=8, length=1024, weights="bf16", arrives=False)
    recorded = memory(replace(plain, recorded=True))
    assert recorded.total == pytest.approx(memory(plain).total, rel=0.01), "gradients are made anew in each"
    twice = memory(replace(plain, recorded=True, accumulation=2))
    assert twice.needed - recorded.needed > recorded.passing, "those that add to gradients are recorded apart"
    assert memory(replace(plain, recorded=True, recordings=4)).needed > recorded.needed + 3 * recorded.passing

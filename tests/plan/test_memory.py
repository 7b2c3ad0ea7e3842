"""The memory estimate equals the traced tensor memory of real models without weights."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.mixed_lengths import SHAPES
from modelwright.plan.calibrate import calibration_for
from modelwright.plan.hardware import parse_hardware
from modelwright.plan.memory import MemoryCoefficients, StepWorkload, estimate_memory
from modelwright.plan.model_shape import SHIPPED_CONFIGS, count_trainable, shape_from_config
from modelwright.recipe.stage_specs import SftConfig

EXACT = MemoryCoefficients(fixed=0.0)


def traced_peak(config: Any, work: StepWorkload, settings: SftConfig) -> int:
    """The most bytes of tensors in a second step of a model without data, watched operation by operation."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter
    from transformers import AutoModelForCausalLM

    from modelwright.models.activation_checkpoint import enable_activation_checkpointing
    from modelwright.models.trainable import set_trainable

    class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
        now, peak, sizes = 0, 0, dict[int, int]()

        def add(self, tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.drop, key)

        def drop(self, key: int) -> None:
            self.now -= self.sizes.pop(key, 0)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tree_iter(out):
                if isinstance(tensor, torch.Tensor):
                    self.add(tensor)
            self.peak = max(self.peak, self.now)
            return out

    live = Live()
    live.sizes = {}
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        set_trainable(model, settings)
        if work.checkpointing:
            enable_activation_checkpointing(model, work.checkpointing)
        model.train()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        for tensor in (*model.parameters(), *model.buffers()):
            live.add(tensor)
        tokens = torch.zeros(work.micro_batch_size, work.seq_len, dtype=torch.int64)
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
    ("name", "rows", "length", "trainable", "more"),
    [
        ("smollm2-135m", 8, 256, "all", {"precision": "fp32"}),
        ("llama-6b", 1, 512, "all", {"checkpointing": True}),
        ("llama-6b", 8, 512, "all", {"checkpointing": "selective"}),
        ("gemma-3-270m", 2, 512, "all", {"checkpointing": "selective"}),
        ("smollm3-3b", 2, 512, {"last_layers": 2, "lm_head": True}, {}),
        ("pythia-410m", 8, 256, {"last_layers": 2}, {}),
        ("gemma-3-270m", 2, 512, "all", {}),
    ],
)
def test_the_counted_peak_is_the_traced_peak(
    name: str, rows: int, length: int, trainable: Any, more: dict[str, Any]
) -> None:
    from transformers import CONFIG_MAPPING

    values = {**SHIPPED_CONFIGS[name], "num_hidden_layers": 2}
    config = CONFIG_MAPPING[values["model_type"]](
        **{k: v for k, v in values.items() if k != "model_type"}, pad_token_id=0
    )
    settings = SftConfig.model_validate({"trainable": trainable})
    shape = shape_from_config(values, name, "a test")
    work = StepWorkload(shape, count_trainable(shape, settings), rows, length, chunked_loss=False, on_gpu=False, **more)
    assert estimate_memory(work, EXACT).total == pytest.approx(traced_peak(config, work, settings), rel=0.05)


def llama(**more: Any) -> StepWorkload:
    shape = shape_from_config(SHIPPED_CONFIGS["llama-6b"], "llama-6b", "a test")
    return StepWorkload(shape, count_trainable(shape, SftConfig()), micro_batch_size=8, seq_len=2048, **more)


def test_fp32_masters_with_adam_need_sixteen_bytes_a_parameter_and_no_80_gb_gpu_holds_them() -> None:
    estimate = estimate_memory(llama(checkpointing=True))
    states = sum(estimate.components[name] for name in ("weights", "optimizer"))
    assert states == pytest.approx(12 * 6.083e9, rel=0.001)
    assert estimate.phases["backward ends"] > 16 * 6.083e9
    assert estimate.required > 80e9


@pytest.mark.parametrize(
    ("settings", "param_dtype", "state_bytes"),
    [
        ({}, "fp32", 8), ({}, "bf16", 10), ({"exp_avg_dtype": "bf16"}, "bf16", 8),
        ({"optim": "sgd"}, "fp32", 4), ({"optim": "lion"}, "fp32", 4),
    ],
)  # fmt: skip
def test_the_state_of_every_optimizer_is_counted(settings: dict[str, Any], param_dtype: str, state_bytes: int) -> None:
    work = llama(optimizer=SftConfig(**settings), param_dtype=param_dtype)
    assert estimate_memory(work).components["optimizer"] == state_bytes * work.trainable.trained


def test_checkpointing_sharding_and_bf16_weights_each_take_less() -> None:
    plain = estimate_memory(llama()).total
    assert (
        estimate_memory(llama(checkpointing=True)).total
        < estimate_memory(llama(checkpointing="selective")).total
        < 0.9 * plain
    )
    assert estimate_memory(llama(checkpointing=True)).total < 0.8 * plain
    assert estimate_memory(llama(param_dtype="bf16")).total < plain
    split = llama(sharding="fsdp", world_size=8, per_node=8, checkpointing=True)
    assert estimate_memory(split).total < 0.3 * estimate_memory(llama(checkpointing=True)).total
    assert estimate_memory(replace(llama(), gradient_accumulation_steps=4)).total >= plain, (
        "gradients stay through accumulation"
    )


def test_quantised_layers_are_a_quarter_of_bf16_and_the_ends_stay() -> None:
    shape = shape_from_config(SHIPPED_CONFIGS["llama-7b"], "llama-7b", "a test")
    summary = count_trainable(shape, SftConfig.model_validate({"trainable": "lora"}))
    plain = StepWorkload(shape, summary, 1, 512, param_dtype="bf16", counts_loading=False)
    saved = (
        estimate_memory(plain).components["weights"]
        - estimate_memory(replace(plain, quantization="nf4")).components["weights"]
    )
    assert saved == pytest.approx(32 * shape.layer_matrices * (2 - 0.52))


def test_sharding_over_a_machine_holds_more_than_over_all() -> None:
    over_all = estimate_memory(llama(sharding="fsdp", world_size=16, per_node=8)).total
    assert estimate_memory(llama(sharding="hsdp", world_size=16, per_node=8)).total > over_all
    assert (
        estimate_memory(llama(sharding="ddp", world_size=16, per_node=8)).total
        > estimate_memory(llama()).components["weights"]
    )


def test_cuda_graphs_share_their_transient_memory() -> None:
    shape = shape_from_config(SHIPPED_CONFIGS["smollm2-360m"], "smollm2-360m", "a test")
    plain = StepWorkload(
        shape,
        count_trainable(shape, SftConfig()),
        micro_batch_size=8,
        seq_len=1024,
        param_dtype="bf16",
        counts_loading=False,
    )
    recorded = estimate_memory(replace(plain, cuda_graphs=True))
    assert recorded.total == pytest.approx(estimate_memory(plain).total, rel=0.01), "gradients are new in each"
    twice = estimate_memory(replace(plain, cuda_graphs=True, gradient_accumulation_steps=2))
    assert twice.required - recorded.required < 0.1 * recorded.transient_bytes, "those that add to gradients too"
    few, many = (estimate_memory(replace(plain, cuda_graphs=True, graph_shapes=count)) for count in (2, 12))
    assert few == many
    gradients = plain.trainable.trained * 2
    assert many.total == pytest.approx(recorded.total + gradients, rel=0.01), "those of the first graph are kept"
    assert many.required > recorded.required + recorded.transient_bytes, "rare shapes run outside of graphs"


@pytest.mark.parametrize(
    ("name", "measured_gb"),
    [("qwen3-0.6b", 21.10), ("llama-3.2-1b", 29.86), ("gemma-3-270m", 11.99), ("pythia-410m", 13.70)],
)
def test_the_memory_of_compiled_layers_of_models_that_were_not_fitted(name: str, measured_gb: float) -> None:
    """Measured on an H200, 2026-11-18, by `python -m benchmarks.mixed_lengths`; 8,320 tokens are the largest batch."""
    model_type, sizes = SHAPES[name]
    shape = shape_from_config(AutoConfig.for_model(model_type, **sizes).to_dict(), name, "a test")
    work = StepWorkload(
        shape, count_trainable(shape, SftConfig()), micro_batch_size=32, seq_len=260, trained_fraction=0.58,
        param_dtype="bf16", compiled=True, cuda_graphs=True, graph_shapes=12, counts_loading=False,
    )  # fmt: skip
    predicted = estimate_memory(work, calibration_for(parse_hardware("1xH200").gpu).memory).total / 1e9
    assert predicted == pytest.approx(measured_gb, rel=0.1)

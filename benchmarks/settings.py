"""The settings that the planner is judged by: from 0.1 B to 7 B, every way to train, long and short rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LAST_TWO = {"last_layers": 2, "head": True}


@dataclass(frozen=True)
class Setting:
    """One training that is predicted and measured."""

    name: str
    """What it is called in the table."""
    model: str
    """A shape the planner knows, or resnet18."""
    rows: int
    """Rows per device; 0: as many as the planner says that fit, times `beyond`."""
    length: int = 0
    """Tokens in a row."""
    stage: str = "sft"
    """sft, dpo or classify."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the recipe's section says."""
    smaller: dict[str, Any] = field(default_factory=dict)
    """Keys of the shape that differ, for a trial on a small machine."""
    beyond: float = 1.0
    """Where rows is 0: of the rows that fit, so many; above 1 it must run out of memory."""


_HALF_BILLION = {"num_hidden_layers": 14, "hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12,
                 "num_key_value_heads": 4}  # fmt: skip
_ONE_BILLION = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256,
                "tie_word_embeddings": True}  # fmt: skip
_FOUR_BILLION = {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
                 "vocab_size": 151936}  # fmt: skip
GPU_SETTINGS = (
    Setting("135M full 512", "smollm2-135m", 16, 512),
    Setting("135M full 2048 checkpointed", "smollm2-135m", 16, 2048, settings={"gradient_checkpointing": True}),
    Setting("135M full 2048 selective", "smollm2-135m", 16, 2048, settings={"gradient_checkpointing": "selective"}),
    Setting("135M full 2048 fp32", "smollm2-135m", 4, 2048, settings={"precision": "fp32", "tf32": False}),
    Setting("135M full 2048 tf32", "smollm2-135m", 4, 2048, settings={"precision": "fp32"}),
    Setting("0.5B full 1024 tf32", "llama-6b", 4, 1024, settings={"precision": "fp32"}, smaller=_HALF_BILLION),
    Setting("270M full 2048, 262k words", "gemma-3-270m", 4, 2048),
    Setting("360M full 1024", "smollm2-360m", 8, 1024),
    Setting("410M last 2 layers 1024", "pythia-410m", 24, 1024, settings={"trainable": {"last_layers": 2}}),
    Setting("410M last 2 layers 512 fp16", "pythia-410m", 16, 512,
            settings={"trainable": {"last_layers": 2}, "precision": "fp16", "gradient_accumulation_steps": 2}),
    Setting("410M full 1024", "pythia-410m", 16, 1024, settings={"weights": "fp32"}),
    Setting("1.7B full 512 accumulated", "smollm2-1.7b", 8, 512, settings={"gradient_accumulation_steps": 4}),
    Setting("1.7B LoRA 1024 compiled", "smollm2-1.7b", 8, 1024, settings={"trainable": "lora", "torch_compile": True}),
    Setting("1.7B DPO full 1024", "smollm2-1.7b", 4, 1024, "dpo"),
    Setting("3B last 2 + tied head 1024 checkpointed", "smollm3-3b", 8, 1024,
            settings={"trainable": LAST_TWO, "gradient_checkpointing": True}),
    Setting("3B last 2 + own head 1024", "smollm3-3b", 8, 1024,
            settings={"trainable": {**LAST_TWO, "untie_head": True}}),
    Setting("3B LoRA 2048", "smollm3-3b", 4, 2048, settings={"trainable": "lora"}),
    Setting("3B LoRA 2048 selective", "smollm3-3b", 4, 2048,
            settings={"trainable": "lora", "gradient_checkpointing": "selective"}),
    Setting("3B LoRA 2048 selective compiled", "smollm3-3b", 4, 2048,
            settings={"trainable": "lora", "gradient_checkpointing": "selective", "torch_compile": True}),
    Setting("3B full 2048 compiled", "smollm3-3b", 4, 2048, settings={"torch_compile": True}),
    Setting("3B full 4096", "smollm3-3b", 2, 4096),
    Setting("3B full 4096 compiled", "smollm3-3b", 2, 4096, settings={"torch_compile": True}),
    Setting("3B full 4096 checkpointed", "smollm3-3b", 2, 4096, settings={"gradient_checkpointing": True}),
    Setting("3B full 4096 selective", "smollm3-3b", 2, 4096, settings={"gradient_checkpointing": "selective"}),
    Setting("3B full 4096 selective compiled", "smollm3-3b", 2, 4096,
            settings={"gradient_checkpointing": "selective", "torch_compile": True}),
    Setting("3B full 4096 checkpointed compiled", "smollm3-3b", 2, 4096,
            settings={"gradient_checkpointing": True, "torch_compile": True}),
    Setting("3B full 4096 selective compiled fp8", "smollm3-3b", 2, 4096,
            settings={"gradient_checkpointing": "selective", "torch_compile": True, "precision": "fp8"}),
    Setting("3B full 4096 compiled fp8", "smollm3-3b", 2, 4096,
            settings={"torch_compile": True, "precision": "fp8"}),
    Setting("3B DPO LoRA 1024", "smollm3-3b", 4, 1024, "dpo", settings={"trainable": "lora"}),
    Setting("6B last 2 layers 1024", "llama-6b", 8, 1024, settings={"trainable": {"last_layers": 2}}),
    Setting("6B full 2048 checkpointed", "llama-6b", 4, 2048,
            settings={"gradient_checkpointing": True, "weights": "fp32"}),
    Setting("6B full 2048 compiled", "llama-6b", 2, 2048, settings={"torch_compile": True}),
    Setting("6B full 2048 compiled fp8", "llama-6b", 2, 2048,
            settings={"torch_compile": True, "precision": "fp8"}),
    Setting("7B full 1024 checkpointed compiled", "llama-7b", 4, 1024,
            settings={"gradient_checkpointing": True, "torch_compile": True}),
    Setting("7B LoRA 4096 checkpointed", "llama-7b", 2, 4096,
            settings={"trainable": "lora", "gradient_checkpointing": True}),
    Setting("ResNet-18 fp32", "resnet18", 128, stage="classify", settings={"precision": "fp32"}),
    Setting("ResNet-18 bf16", "resnet18", 512, stage="classify"),
    Setting("ResNet-18 bf16 1024", "resnet18", 1024, stage="classify"),
    Setting("0.5B full 512 compiled", "llama-6b", 8, 512, settings={"torch_compile": True}, smaller=_HALF_BILLION),
    Setting("0.5B full 512 compiled, not recorded", "llama-6b", 8, 512,
            settings={"torch_compile": True, "cuda_graphs": "never"}, smaller=_HALF_BILLION),
    Setting("1.2B full 1024", "llama-6b", 6, 1024, smaller=_ONE_BILLION),
    Setting("360M DPO LoRA 512", "smollm2-360m", 16, 512, "dpo", settings={"trainable": "lora"}),
    Setting("2.1B full 512 checkpointed, twice", "smollm2-1.7b", 16, 512, smaller={"num_hidden_layers": 30},
            settings={"gradient_checkpointing": True, "gradient_accumulation_steps": 2}),
    Setting("3B LoRA 1024 compiled", "smollm3-3b", 6, 1024, settings={"trainable": "lora", "torch_compile": True}),
    Setting("4B last 4 layers 1536", "llama-6b", 6, 1536, settings={"trainable": {"last_layers": 4}},
            smaller=_FOUR_BILLION),
    Setting("5B full 1024 fp8", "llama-6b", 4, 1024, settings={"precision": "fp8"},
            smaller={"num_hidden_layers": 26}),
    Setting("7B DPO LoRA 1024 checkpointed", "llama-7b", 4, 1024, "dpo",
            settings={"trainable": "lora", "gradient_checkpointing": True}),
    Setting("ResNet-18 of width 96, 768", "resnet18", 768, stage="classify", smaller={"width": 96}),
    Setting("1.7B full 2048, as many rows as fit", "smollm2-1.7b", 0, 2048),
    Setting("3B full 1024, as many rows as fit", "smollm3-3b", 0, 1024),
    Setting("3B full 1024, an eighth more than fit", "smollm3-3b", 0, 1024, beyond=1.125),
    Setting("7B LoRA 2048, as many rows as fit", "llama-7b", 0, 2048, settings={"trainable": "lora"}),
    Setting("7B LoRA 2048, an eighth more than fit", "llama-7b", 0, 2048, settings={"trainable": "lora"}, beyond=1.125),
    Setting("4B full 2048, 8 rows", "llama-6b", 8, 2048, smaller=_FOUR_BILLION),
    Setting("4B full 2048, 9 rows", "llama-6b", 9, 2048, smaller=_FOUR_BILLION),
    Setting("6B full 2048, fp32 weights, 16 rows", "llama-6b", 16, 2048, settings={"weights": "fp32"}),
)  # fmt: skip
"""The last ones go to the edge of the memory: what is said to fit must run, and what is said not to must run out."""

UNSEEN = (
    Setting("unseen: 4B full 2048, as many rows as fit", "llama-6b", 0, 2048, smaller=_FOUR_BILLION),
    Setting("unseen: 0.9B full 1536", "smollm2-1.7b", 4, 1536, smaller={"num_hidden_layers": 12}),
    Setting("unseen: 2.5B last 3 + own head 2048", "smollm3-3b", 4, 2048, smaller={"num_hidden_layers": 28},
            settings={"trainable": {"last_layers": 3, "head": True, "untie_head": True}}),
    Setting("unseen: 135M DPO full 512", "smollm2-135m", 16, 512, "dpo"),
    Setting("unseen: 5B LoRA 1024 checkpointed", "llama-6b", 8, 1024, smaller={"num_hidden_layers": 26},
            settings={"trainable": "lora", "gradient_checkpointing": True}),
    Setting("unseen: ResNet-18 of width 128, 256", "resnet18", 256, stage="classify", smaller={"width": 128}),
    Setting("unseen: 7B full 2048, as many rows as fit", "llama-7b", 0, 2048),
)  # fmt: skip
"""Never used to fit the coefficients: other shapes, and ways to train them together."""

_TINY = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 2048,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
_LARGER = {**_TINY, "num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512}
_FP32 = {"precision": "fp32"}
CPU_SETTINGS = (
    Setting("tiny full 128", "smollm2-135m", 8, 128, settings=_FP32, smaller=_TINY),
    Setting("tiny full 256 checkpointed", "smollm2-135m", 4, 256,
            settings={**_FP32, "gradient_checkpointing": True}, smaller=_TINY),
    Setting("tiny full 256 selective", "smollm2-135m", 4, 256,
            settings={**_FP32, "gradient_checkpointing": "selective"}, smaller=_TINY),
    Setting("tiny last 2 layers 256", "pythia-410m", 8, 256,
            settings={**_FP32, "trainable": {"last_layers": 2}}, smaller=_TINY),
    Setting("tiny last 2 + tied head 128", "smollm3-3b", 8, 128,
            settings={**_FP32, "trainable": LAST_TWO}, smaller=_TINY),
    Setting("tiny LoRA 256", "smollm3-3b", 4, 256, settings={**_FP32, "trainable": "lora"}, smaller=_TINY),
    Setting("tiny DPO 128", "smollm2-135m", 4, 128, "dpo", settings=_FP32, smaller=_TINY),
    Setting("tiny Gemma 128", "gemma-3-270m", 8, 128, settings=_FP32, smaller=_TINY),
    Setting("larger full 128", "smollm2-135m", 8, 128, settings=_FP32,
            smaller={**_TINY, "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 768}),
    Setting("135M of 3 layers full 64", "smollm2-135m", 4, 64, settings=_FP32, smaller={"num_hidden_layers": 3}),
    Setting("135M of 10 layers full 96", "smollm2-135m", 4, 96, settings=_FP32, smaller={"num_hidden_layers": 10}),
    Setting("135M of 5 layers last 2 96", "smollm2-135m", 4, 96,
            settings={**_FP32, "trainable": {"last_layers": 2}}, smaller={"num_hidden_layers": 5}),
    Setting("wide words 64", "smollm2-135m", 8, 64, settings=_FP32, smaller={**_TINY, "vocab_size": 16384}),
    Setting("ResNet-18 of width 16", "resnet18", 32, stage="classify", settings=_FP32, smaller={"width": 16}),
    Setting("ResNet-18 of width 8", "resnet18", 64, stage="classify", settings=_FP32, smaller={"width": 8}),
    Setting("tiny full 192, twice", "smollm2-135m", 4, 192,
            settings={**_FP32, "gradient_accumulation_steps": 2}, smaller=_TINY),
    Setting("larger LoRA 128", "smollm2-135m", 8, 128, settings={**_FP32, "trainable": "lora"}, smaller=_LARGER),
    Setting("larger LoRA 128 selective", "smollm2-135m", 8, 128,
            settings={**_FP32, "trainable": "lora", "gradient_checkpointing": "selective"}, smaller=_LARGER),
)  # fmt: skip

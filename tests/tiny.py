"""A tiny tokenizer, language model and recipe, created the same way each time, in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelwright.data.sources import EMBEDDED_DATASETS

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 400
"""Vocabulary size, special tokens included."""
SFT = {
    "max_steps": 12,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "max_length": 64,
    "precision": "fp32",
    "save_steps": 3,
    "eval_steps": 6,
}
"""Settings of the recipe's sft section unless overridden."""


def tiny_tokenizer(folder: Path) -> Any:
    """A byte-level BPE tokenizer trained on the field guide, with ChatML; pad is eos on purpose."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(EMBEDDED_DATASETS["field-guide"].read_text(encoding="utf-8").splitlines(), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return tokenizer


def tiny_model(folder: Path, layers: int = 2, tied: bool = True, seed: int = 0) -> Path:
    """A Llama of width 64 with random weights and the tiny tokenizer, as a folder for from_pretrained."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def tiny_rows(count: int) -> list[dict[str, str]]:
    """Different questions with answers of many lengths."""
    kinds = ["rope", "tent", "map", "fire", "knot", "boot", "stove"]
    return [
        {
            "question": f"What is {number} and {number % 7}, in {kinds[number % 7]}s?",
            "answer": f"Sum: {number + number % 7}." + " Count again." * (number % 3),
        }
        for number in range(count)
    ]


def tiny_pairs(count: int) -> list[dict[str, str]]:
    """The same questions with two answers each."""
    return [
        {
            "prompt": row["question"],
            "chosen": row["answer"],
            "rejected": "No idea, count them yourself." + " Go away." * (number % 4),
        }
        for number, row in enumerate(tiny_rows(count))
    ]


def tiny_recipe(folder: Path, model: Path, rows: int = 40, **sft_settings: Any) -> Path:
    """A recipe in the folder that trains the model on rows.jsonl; its run is folder/run."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in tiny_rows(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sections: dict[str, Any] = {
        "name": "tiny",
        "output_dir": str(folder / "run"),
        "model": {"model_name_or_path": str(model)},
        "data": {"train_file": "rows.jsonl", "columns": {"question": "prompt", "answer": "completion"}, "test_size": 4},
        "sft": {**SFT, **sft_settings},
        "compare": {"prompts": ["What is 3 and 4, in tents?"], "max_new_tokens": 4},
    }
    path = folder / "recipe.yaml"
    path.write_text(_as_yaml(sections), encoding="utf-8")
    return path


def tiny_dpo_recipe(folder: Path, model: Path, **dpo_settings: Any) -> Path:
    """A recipe in the folder that trains the model on pairs.jsonl; its run is folder/run."""
    gates = {"eval_reward_accuracy": {"at_least": 0.5}}
    return _tiny_pair_recipe(folder, model, "dpo", tiny_pairs(24), gates, dpo_settings)


def tiny_orpo_recipe(folder: Path, model: Path, **orpo_settings: Any) -> Path:
    """The same with ORPO and the answers swapped, so that the model prefers the rejected ones at first."""
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in tiny_pairs(24)]
    gates = {
        "eval_reward_accuracy": {"at_least": 0.9},
        "eval_nll_loss": {"at_most": 0.98, "times": "base_eval_nll_loss"},
    }
    return _tiny_pair_recipe(folder, model, "orpo", swapped, gates, orpo_settings)


def _tiny_pair_recipe(
    folder: Path, model: Path, stage: str, rows: list[dict[str, str]], gates: dict[str, Any], settings: dict[str, Any]
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in rows]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sections: dict[str, Any] = {
        "name": f"tiny-{stage}",
        "output_dir": str(folder / "run"),
        "model": {"model_name_or_path": str(model)},
        "data": {"train_file": "pairs.jsonl", "test_size": 6},
        stage: {**SFT, "max_length": 128, **settings},
        "compare": {"prompts": ["What is 3 and 4, in tents?"], "max_new_tokens": 4},
        "gates": {stage: gates},
    }
    path = folder / "recipe.yaml"
    path.write_text(_as_yaml(sections), encoding="utf-8")
    return path


def _as_yaml(sections: dict[str, Any]) -> str:
    """Sections as YAML, one setting per line, so that error messages have line numbers."""
    lines: list[str] = []
    for name, value in sections.items():
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {key}: {json.dumps(setting)}" for key, setting in value.items()]
        else:
            lines.append(f"{name}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"

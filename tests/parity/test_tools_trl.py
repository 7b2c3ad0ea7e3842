"""Rows with tools: the tokens and the trained positions are TRL's, with four chat templates of the public shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelwright.data.chat import rows_to_conversations
from modelwright.data.chat_tokens import tokenize_batch
from modelwright.data.readers import Row
from modelwright.models.pretrained import load_model, load_tokenizer
from modelwright.recipe.sections import DataConfig

pytestmark = pytest.mark.slow
CALLS = "{% for call in m.tool_calls or [] %}%s{{ call.function | tojson }}%s{% endfor %}"
HERMES = (
    "{% if tools %}<|im_start|>system\nYou may call: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    + CALLS.replace("%s", "<tool_call>", 1).replace("%s", "</tool_call>", 1)
    + "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<|begin|>{% if tools %}<|header|>system<|end|>\n\nTools: {{ tools | tojson }}<|eot|>{% endif %}"
    "{% for m in messages %}<|header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end|>\n\n"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}{{ {'name': call.function.name, 'parameters': "
    "call.function.arguments} | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|end|>\n\n{% endif %}"
)
QWEN = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{{ m.content or '' }}"
    + CALLS.replace("%s", "\n<tool_call>\n", 1).replace("%s", "\n</tool_call>", 1)
    + "<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}"
    "[/TOOL_RESULTS]{% else %}{% generation %}{% if m.tool_calls %}[TOOL_CALLS]{% for call in m.tool_calls %}"
    "{{ call.function | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endgeneration %}"
    "{% endif %}{% endfor %}"
)
TEMPLATES = {"hermes": HERMES, "llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Questions that are answered at once, by one call, and by two calls with a second question."""
    collected = []
    for number, city in enumerate(("Bern", "Oslo", "Lima", "Rome")):
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        turns: list[dict[str, Any]] = [{"role": "user", "content": f"How is {city}?"}]
        for _ in range(number % 3):
            turns += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": f"{number} degrees in {city}"},
            ]
        turns += [{"role": "assistant", "content": f"{city} has {number} degrees."}]
        if number == 3:
            turns += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
        collected.append({"messages": turns, "tools": [TOOL]})
    return collected


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_trained_positions_of_tool_calls_are_trl_s(name: str, model_folder: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = load_tokenizer(model_folder)
    tokenizer.chat_template = TEMPLATES[name]
    conversations = rows_to_conversations(
        [Row(f"row {n}", row) for n, row in enumerate(rows())], DataConfig(train_file="x")
    )
    ours = tokenize_batch(conversations, tokenizer)
    assert len(ours) == len(rows())
    settings = SFTConfig(
        output_dir=str(tmp_path), max_length=None, assistant_only_loss=True, shuffle_dataset=False, report_to="none",
        use_cpu=True, bf16=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        load_model(model_folder), settings, train_dataset=Dataset.from_list(rows()), processing_class=tokenizer
    )
    prepared: Any = trainer.train_dataset
    for [row], theirs in zip(ours, prepared, strict=True):
        assert theirs["input_ids"] == row.input_ids.tolist()
        mask = (
            theirs["assistant_masks"] if "assistant_masks" in theirs else [label != -100 for label in theirs["labels"]]
        )
        assert [bool(trained) for trained in mask] == row.loss_mask.tolist()
        assert "degrees in" not in tokenizer.decode(row.input_ids[row.loss_mask]), "the output of a tool is not trained"

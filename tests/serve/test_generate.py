"""Text generation uses the training prompt format and is the same alone or in a batch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from modelwright.data.chat import build_prompt_messages
from modelwright.errors import UsageError
from modelwright.models.pretrained import inference_dtype, load_model, load_tokenizer
from modelwright.serve.generate import TextGenerator
from modelwright.serve.kv_cache import SeparateCaches, SharedCache, choose_cache
from zoo import Zoo, reference_model

QUESTIONS = [
    build_prompt_messages("Why?", None),
    build_prompt_messages("How do I dry wet boots after a long day of walking?", "Be brief."),
    build_prompt_messages("When?", None),
]


def test_a_question_in_company_gets_the_answer_it_gets_alone(loud_model: Path) -> None:
    answerer = TextGenerator(loud_model, max_new_tokens=12)
    together = answerer.generate(QUESTIONS)
    assert together == [answerer.generate([question])[0] for question in QUESTIONS]
    assert len(set(together)) == 3


def test_the_same_question_gets_the_same_answer_sampled_or_not(loud_model: Path) -> None:
    for temperature in (0.0, 1.0):
        answers = [TextGenerator(loud_model, 8, temperature, seed=5).generate(QUESTIONS[:1]) for _ in range(2)]
        assert answers[0] == answers[1]


def test_a_gpu_generates_in_bf16_unless_the_recipe_trains_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for has_bf16, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, yes=has_bf16: yes)
        assert inference_dtype(gpu) is inference_dtype(gpu, "bf16") is expected
    assert inference_dtype(gpu, "fp32") is inference_dtype(cpu, "bf16") is inference_dtype(cpu) is torch.float32


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bf16
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_a_model_in_bf16_is_decoded_in_batches_too(loud_model: Path, tmp_path: Path, kind: str) -> None:
    folder = loud_model
    if kind == "adapter":
        folder = tmp_path / "adapter"
        get_peft_model(
            load_model(loud_model), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
        ).save_pretrained(folder)
    model = load_model(folder, dtype=torch.bfloat16).eval()
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert type(choose_cache(model)) is SharedCache


def test_another_seed_samples_another_answer(loud_model: Path) -> None:
    answers = {
        TextGenerator(loud_model, 12, temperature=1.5, seed=seed).generate(QUESTIONS[:1])[0] for seed in range(3)
    }
    assert len(answers) > 1


def test_a_model_is_asked_with_exactly_the_tokens_it_was_trained_on(loud_model: Path) -> None:
    from modelwright.data.chat import Conversation
    from modelwright.data.chat_tokens import tokenize_conversation

    tokenizer = load_tokenizer(loud_model)
    messages = (*build_prompt_messages("Why?", "Be brief."), {"role": "assistant", "content": "So."})
    [row] = tokenize_conversation(Conversation("x", messages, "why?"), tokenizer)
    prompt_tokens = TextGenerator(loud_model)._tokenize(build_prompt_messages("Why?", "Be brief."))
    assert prompt_tokens == row.input_ids[~row.loss_mask].tolist()


def test_a_model_without_a_chat_template_is_asked_plainly(loud_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(loud_model, tmp_path / "plain")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    assert len(TextGenerator(folder, max_new_tokens=4).generate([build_prompt_messages("Why?", None)])) == 1


def test_a_template_that_renders_nothing_for_a_question_is_reported(loud_model: Path) -> None:
    answerer = TextGenerator(loud_model)
    answerer._tokenizer.chat_template = "{{ messages[0].nothing }}"
    with pytest.raises(UsageError, match="renders an empty prompt, so there is nothing to answer"):
        answerer.stream(QUESTIONS[0])


@pytest.mark.parametrize(
    ("name", "expected_cache"),
    [("mamba", SharedCache), ("bamba", SharedCache), ("minimax", SeparateCaches), ("openai-gpt", SeparateCaches)],
)
def test_the_answers_of_other_architectures_are_those_without_a_cache(
    name: str, expected_cache: type, tmp_path: Path
) -> None:
    """Mamba's cache has another name; GPT has none, and MiniMax's is wrong after a prompt longer than a block."""
    zoo = Zoo(name, tmp_path)
    assert zoo.ask() == "equal"
    assert type(choose_cache(reference_model(tmp_path))) is expected_cache

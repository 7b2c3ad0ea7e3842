"""Our SFT loop beside TRL's SFTTrainer: the same small Llama, the same batches in the same order, in one run."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import common
from benchmarks.common import installed

WARM_UP, TIMED, BATCH, ROUNDS = 3, 12, 8, 2
STEPS = WARM_UP + TIMED
WORDS, LENGTH, SEED = 8192, 256, 42
LEARNING_RATE = 1e-4
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Pace:
    """How one training went."""

    tokens: list[int]
    """Tokens in each step, padding not counted."""
    seconds: list[float]
    """Time from the end of one step to the end of the next."""
    loss: float
    """Mean loss over all steps: both sides must come to the same."""

    @property
    def rates(self) -> list[float]:
        """Tokens a second in each timed step."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)][WARM_UP:]


def measure() -> dict[str, Any]:
    """Train both in turn, each round in the other order, and take the median step."""
    from modelwright.data import conversations
    from modelwright.recipe.schema import Data
    from modelwright.recipe.values import Steps

    wish = Data(
        dataset_name="field-guide", columns={"question": "prompt", "answer": "completion"},
        max_rows=STEPS * BATCH + 1, test_size=Steps(1),
    )  # fmt: skip
    data = conversations.load(wish, SEED, Path())
    has_peer = installed("trl") is not None
    ours: list[Pace] = []
    theirs: list[Pace] = []
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place), [message["content"] for item in data.train for message in item.messages])
        for turn in range(ROUNDS):
            for is_ours in (True, False) if turn % 2 == 0 else (False, True):
                if is_ours:
                    ours.append(train_ours(Path(place), data))
                elif has_peer:
                    theirs.append(train_theirs(Path(place), data))
    return _figures(ours, theirs)


def train_ours(folder: Path, data: Any) -> Pace:
    """Our engine on one device in fp32."""
    from modelwright.engine.loop import Engine
    from modelwright.engine.world import World
    from modelwright.models import text
    from modelwright.plan.facts import probe
    from modelwright.plan.stage import plan_stage
    from modelwright.recipe.schema import Sft
    from modelwright.tasks.sft import SftTask

    model = text.load_model(folder)
    settings = Sft(
        max_steps=STEPS, per_device_train_batch_size=BATCH, max_length=LENGTH, precision="fp32",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
    )  # fmt: skip
    task = SftTask(model, text.load_tokenizer(folder), data, settings, text.stop_tokens(model))
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, probe()), World(), SEED)
    marks, reports = [time.perf_counter()], []
    for report in engine.steps():
        marks.append(time.perf_counter())
        reports.append(report)
    seconds = [after - before for before, after in pairwise(marks)]
    return Pace([each.tokens for each in reports], seconds, mean(each.loss for each in reports))


def train_theirs(folder: Path, data: Any) -> Pace:
    """TRL's trainer on the same rows in the order our engine takes them; what it would do besides is turned off."""
    from datasets import Dataset, disable_progress_bars
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from modelwright.data.stream import Order
    from modelwright.models import text

    disable_progress_bars()
    marks: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

    order = Order(len(data.train), BATCH, STEPS * BATCH, SEED)
    turns = [data.train[row].messages for step in range(STEPS) for row in order.at(step)]
    settings = SFTConfig(
        output_dir=str(folder / "trl"), max_steps=STEPS, per_device_train_batch_size=BATCH, max_length=LENGTH,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", train_sampling_strategy="sequential",
        use_cpu=True, bf16=False, gradient_checkpointing=False, optim="adamw_torch_fused", seed=SEED,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=text.load_model(folder),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": list(each[:-1]), "completion": list(each[-1:])} for each in turns]),
        processing_class=text.load_tokenizer(folder),
        callbacks=[Clock()],
    )
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    loss = trainer.train().training_loss
    tokens = [sum(lengths[step * BATCH : (step + 1) * BATCH]) for step in range(STEPS)]
    return Pace(tokens, [after - before for before, after in pairwise(marks)], loss)


def make_tokenizer(folder: Path, texts: list[str], words: int = WORDS) -> Any:
    """A tokenizer learnt from the texts, with ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[2], pad_token=special[0])
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(folder: Path, texts: list[str], layers: int = 8, width: int = 256, words: int = WORDS) -> None:
    """A Llama with random weights, and a tokenizer learnt from the texts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer(folder, texts, words)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=width * 43 // 16, num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=LENGTH, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    ours = figures["modelwright"]
    told = [f"modelwright {ours['tokens_per_second']:,.0f} tokens/s, mean loss {ours['mean_loss']:.4f}"]
    if "trl" not in figures:
        return [*told, "trl is not installed, so there is nothing to hold it against"]
    peer = figures["trl"]
    told.append(f"trl         {peer['tokens_per_second']:,.0f} tokens/s, mean loss {peer['mean_loss']:.4f}")
    return [*told, f"ratio {figures['ratio']:.2f} (above 1: ours is faster), {figures['setting']}"]


def _figures(ours: list[Pace], theirs: list[Pace]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "setting": f"8-layer Llama of width 256, batch {BATCH}, fp32, CPU, median of {TIMED} steps x {ROUNDS} rounds",
        "modelwright": _side(ours),
    }
    if theirs:
        assert ours[0].tokens == theirs[0].tokens, "the two sides did not see the same tokens"
        found["trl"] = _side(theirs)
        found["ratio"] = round(found["modelwright"]["tokens_per_second"] / found["trl"]["tokens_per_second"], 3)
    return found


def _side(paces: list[Pace]) -> dict[str, Any]:
    return {
        "tokens_per_second": round(median(rate for pace in paces for rate in pace.rates), 1),
        "rounds": [round(median(pace.rates), 1) for pace in paces],
        "tokens": sum(paces[0].tokens[WARM_UP:]),
        "mean_loss": round(paces[0].loss, 5),
    }


def main(save: common.Save = False, as_json: common.Json = False) -> None:
    """Tokens per second of our SFT loop, beside TRL's SFTTrainer."""
    common.report("sft", measure, lines, save, as_json)


if __name__ == "__main__":
    common.run(main)

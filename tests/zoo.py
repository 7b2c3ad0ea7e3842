"""Tiny models of many architectures with random weights of a size at which every mistake shows, and what is done with
each: nine ways to use it, compared with the plain forward pass of transformers in eager attention, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelwright.data.chat import Conversation, ConversationDataset
from modelwright.data.chat_tokens import TokenizedRow
from modelwright.data.preferences import PreferenceDataset, PreferencePair
from modelwright.engine.distributed import World
from modelwright.errors import ModelError
from modelwright.models.attention import relative_gap
from modelwright.models.pretrained import CPU, load_model, load_tokenizer, prepare_model
from modelwright.models.save import merge_adapter, save_model
from modelwright.models.trainable import set_trainable
from modelwright.recipe.stage_specs import DpoConfig, SftConfig
from modelwright.serve.generate import TextGenerator
from modelwright.tasks.dpo import DpoTask
from modelwright.tasks.frozen_cache import CacheLocation
from modelwright.tasks.sft import SftTask, find_compute_reuse
from tiny import VOCAB_SIZE, tiny_pairs, tiny_rows, tiny_tokenizer

ARCHITECTURES: dict[str, str] = {
    "llama": "dense", "mistral": "dense", "qwen2": "biases", "qwen3": "dense", "gemma": "tied", "phi": "biases",
    "phi3": "dense", "stablelm": "dense", "starcoder2": "biases", "olmo": "dense", "olmo2": "dense", "glm": "dense",
    "glm4": "dense", "helium": "dense", "nemotron": "dense", "persimmon": "biases", "granite": "scaled logits",
    "cohere": "scaled logits", "smollm3": "layers without positions", "seed_oss": "biases", "apertus": "dense",
    "arcee": "dense", "diffllama": "differential attention", "doge": "dynamic mask", "bitnet": "dense",
    "ernie4_5": "dense", "exaone4": "window", "hunyuan_v1_dense": "dense",
    "gemma2": "window, soft caps", "gemma3_text": "window", "olmo3": "window", "cohere2": "window",
    "ministral": "window", "vaultgemma": "window, soft caps",
    "gpt2": "learned positions", "gpt_neo": "learned positions, window", "gpt_bigcode": "learned positions",
    "opt": "learned positions", "biogpt": "learned positions", "xglm": "sinusoidal positions",
    "openai-gpt": "learned positions", "ctrl": "sinusoidal positions",
    "gpt_neox": "parallel residual", "gptj": "parallel residual", "codegen": "parallel residual",
    "falcon": "parallel residual", "bloom": "ALiBi", "mpt": "ALiBi",
    "mixtral": "MoE", "qwen2_moe": "MoE", "qwen3_moe": "MoE", "olmoe": "MoE", "granitemoe": "MoE", "phimoe": "MoE",
    "gpt_oss": "MoE, window, sinks", "jetmoe": "MoE", "ernie4_5_moe": "MoE", "glm4_moe": "MoE", "deepseek_v3": "MoE",
    "minimax": "MoE, hybrid", "jamba": "MoE, hybrid", "granitemoehybrid": "hybrid", "falcon_h1": "hybrid",
    "lfm2": "hybrid", "bamba": "hybrid", "qwen3_next": "MoE, hybrid", "recurrent_gemma": "hybrid",
    "mamba": "recurrent", "falcon_mamba": "recurrent", "mamba2": "recurrent", "rwkv": "recurrent",
}  # fmt: skip
"""Name of the architecture in transformers, and what is special about it."""
QUICK = ("gemma2", "gpt2", "mixtral", "lfm2")
"""One of each kind, for every run of the tests."""
COLUMNS = ("padded", "packed", "shared prefix", "frozen cache", "LoRA", "DPO", "export", "reload", "ask")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "ffn_dim": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 16, "sliding_window": 16,
    "shared_expert_intermediate_size": 16, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_n_heads": 4,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_ssm": 64, "rotary_dim": 4, "state_size": 8,
    "router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "lru_width": 32, "attention_window_size": 16,
}  # fmt: skip
"""Settings of a tiny model; each config takes those it knows."""
OWN_SIZES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "falcon": {"new_decoder_architecture": False},
    "deepseek_v3": {"n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "head_dim": 8,
                    "num_key_value_heads": 4},
    "glm4_moe": {"n_group": 1, "topk_group": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "mamba_d_conv": 4},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                   "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "jetmoe": {"kv_channels": 8, "num_key_value_heads": 2},
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "vaultgemma": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {"query_pre_attn_scalar": 8}, "granite": {"logits_scaling": 3.0}, "cohere": {"logit_scale": 0.5},
    "falcon_h1": {"lm_head_multiplier": 0.5, "mamba_chunk_size": 16},
    "smollm3": {"no_rope_layer_interval": 2},
}  # fmt: skip
SYSTEM = {"role": "system", "content": "You count ropes and tents for a scout troop. Say the sum first."}
TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 2e-3
"""Largest relative difference of a loss, and of all gradients together; a leak makes 1e-2 and more."""


class Wrong(Exception):
    """A result that is not the reference's."""


def build(name: str, folder: Path, **settings: Any) -> None:
    """Write a tiny model of an architecture and the tiny tokenizer as a folder; settings are those of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(name)
    sizes = {key: value for key, value in SIZES.items() if key in known.to_dict() or key in known.attribute_map}
    sizes |= {key: 0.0 for key, value in known.to_dict().items() if "drop" in key and isinstance(value, float)}
    config = AutoConfig.for_model(name, **{**sizes, **OWN_SIZES.get(name, {}), **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomize(model)
    tiny_tokenizer(folder)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)


@torch.no_grad()
def randomize(model: Any) -> None:
    """Weights of such a size that every layer and every bias matters, where the usual initialization hides both."""
    embeddings = {id(weight) for weight in model.get_input_embeddings().parameters()}
    for weight in model.parameters():
        if id(weight) in embeddings:
            weight.normal_(std=0.5)
        elif weight.ndim > 1:
            weight.normal_(std=1.2 / weight.shape[-1] ** 0.5)
        else:
            weight.add_(torch.randn_like(weight) * 0.1)


def reference_model(folder: Path) -> Any:
    """The model as transformers loads it, with eager attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def reference_logps(model: Any, row: TokenizedRow) -> Tensor:
    """Log-prob of each trained token of a row alone: [count]."""
    tokens = torch.from_numpy(row.input_ids.astype(np.int64))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    logps = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return logps[torch.from_numpy(row.loss_mask[1:])]


def reference_loss(model: Any, rows: Sequence[TokenizedRow]) -> Tensor:
    return -torch.cat([reference_logps(model, row) for row in rows]).sum()


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def compare(loss: Tensor, expected: Tensor, what: str = "loss") -> None:
    gap = float((loss.detach() - expected.detach()).abs().max() / expected.detach().abs().max())
    if not gap <= TOLERANCE:
        raise Wrong(f"{what} {gap:.0e}")


def compare_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    flat = [torch.cat([grads[name].flatten() for name in ours]) for grads in (ours, theirs)]
    gap = float((flat[0] - flat[1]).norm() / flat[1].norm())
    if not gap <= GRADIENT_TOLERANCE:
        raise Wrong(f"gradients {gap:.0e}")


def conversations() -> ConversationDataset:
    rows = tiny_rows(4)
    turns = [
        ({"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}) for row in rows
    ]
    return ConversationDataset([Conversation(str(i), (SYSTEM, *turn), str(i)) for i, turn in enumerate(turns)], [], "")


def pairs() -> PreferenceDataset:
    return PreferenceDataset(
        [
            PreferencePair(
                str(number), ({"role": "user", "content": row["prompt"]},),
                ({"role": "assistant", "content": row["chosen"]},),
                ({"role": "assistant", "content": row["rejected"]},), row["prompt"],
            )
            for number, row in enumerate(tiny_pairs(2))
        ], [], "",
    )  # fmt: skip


class Zoo:
    """One architecture in a folder of its own; each method uses it in one way and returns what to say of it."""

    def __init__(self, name: str, folder: Path, **settings: Any) -> None:
        self.folder = folder
        build(name, folder, **settings)
        self.tokenizer = load_tokenizer(folder)

    def model(self, packed: bool = False) -> Any:
        model = load_model(self.folder)
        prepare_model(model, CPU, "auto", packed)
        return model.eval()

    def sft(self, model: Any, **settings: Any) -> SftTask:
        options = {
            "max_length": 256,
            "precision": "fp32",
            "router_aux_loss_coef": 0.0,
            "share_prefix": False,
            **settings,
        }
        self.settings = SftConfig(**options)
        return SftTask(model, self.tokenizer, conversations(), self.settings, [])

    def check_sft(self, task: SftTask, model: Any) -> None:
        """The loss and the gradients of all rows are the reference's."""
        model.eval()
        loss = task.module(**task.batch(range(task.rows)).inputs)
        ours = gradients(model, loss)
        reference = reference_model(self.folder)
        expected = reference_loss(reference, task.examples)
        compare(loss, expected)
        compare_gradients(ours, gradients(reference, expected))

    def padded(self) -> str:
        model = self.model()
        self.check_sft(self.sft(model), model)
        task = self.sft(model, router_aux_loss_coef=None)
        if task.router_loss.coef:
            self.check_router(task, model)
        return "equal"

    def check_router(self, task: SftTask, model: Any) -> None:
        inputs = task.batch(range(task.rows)).inputs
        loss, aux_loss = task.module(**inputs) / task.batch(range(task.rows)).trained_tokens
        mask = inputs["attention_mask"].long()
        outputs = reference_model(self.folder)(
            inputs["tokens"], attention_mask=mask, output_router_logits=True, use_cache=False
        )
        compare(aux_loss, outputs.aux_loss, "router loss")
        compare(
            loss,
            reference_loss(model, task.examples) / len(inputs["loss_positions"]) + task.router_loss.coef * aux_loss,
        )

    def packed(self) -> str:
        model = self.model(packed=True)
        task = self.sft(model, packing=True)
        assert task.rows < 4
        self.check_sft(task, model)
        return "equal"

    def shared_prefix(self) -> str:
        model = self.model()
        task = self.sft(model, share_prefix=True)
        self.check_sft(task, model)
        return "equal" if task.prefix_length else "off"

    def frozen_cache(self) -> str:
        model = set_trainable(self.model(), SftConfig(trainable={"last_layers": 1}))
        task = self.sft(model, trainable={"last_layers": 1}, share_prefix=True)
        reuse = find_compute_reuse(task, model, self.settings)
        if reuse.frozen_layers is not None:
            cache = task.enable_cache(reuse.frozen_layers, CPU)
            cache.fill(World(), torch.no_grad, CacheLocation("memory", self.folder, "zoo"))
        self.check_sft(task, model)
        return "off" if reuse.frozen_layers is None else "equal"

    def adapted(self) -> Any:
        torch.manual_seed(3)
        model = set_trainable(self.model(), SftConfig(trainable="lora", lora_r=4))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.2)
        return model.eval()

    def lora(self) -> str:
        model = self.adapted()
        merged = self.adapted().merge_and_unload()
        task = self.sft(model, trainable="lora", share_prefix=True)
        compare(task.module(**task.batch(range(4)).inputs), reference_loss(merged, task.examples))
        if relative_gap(self.logits(reference_model(self.folder)), self.logits(merged)) < 0.01:
            raise Wrong("LoRA changes nothing")
        return "equal"

    def dpo(self) -> str:
        model = self.model()
        task = DpoTask(model, self.tokenizer, pairs(), DpoConfig(max_length=256, router_aux_loss_coef=0), [])
        logps = task.module(**task.collate("train", range(2)).inputs)
        reference = reference_model(self.folder)
        expected = [
            reference_logps(reference, TokenizedRow(
                np.concatenate([pair.prompt, answer.input_ids]),
                np.concatenate([np.zeros(len(pair.prompt), dtype=np.bool_), answer.loss_mask])))
            for pair in task.train_set.rows for answer in (pair.chosen, pair.rejected)
        ]  # fmt: skip
        compare(logps, torch.cat(expected), "log-probs")
        return "equal" if task.sharing_blocker is None else "equal, prompt twice"

    @torch.no_grad()
    def logits(self, model: Any) -> Tensor:
        return model.eval()(input_ids=torch.arange(3, 60)[None], use_cache=False).logits  # type: ignore[no-any-return]

    def export(self) -> str:
        model, adapter, merged = self.adapted(), self.folder / "adapter", self.folder / "merged"
        model.save_pretrained(adapter)
        self.tokenizer.save_pretrained(adapter)
        merge_adapter(adapter, merged)
        compare(self.logits(load_model(merged)), self.logits(model), "logits")
        return "equal"

    def reload(self) -> str:
        model, saved = self.model(), self.folder / "saved"
        with torch.no_grad():
            for weight in {id(weight): weight for weight in model.parameters()}.values():
                weight.add_(torch.randn_like(weight) * 0.01)
        save_model(model, self.tokenizer, dict(model.state_dict()), saved)
        compare(self.logits(load_model(saved)), self.logits(model), "logits")
        compare(self.logits(reference_model(saved)), self.logits(model), "logits")
        return "equal"

    @torch.no_grad()
    def ask(self) -> str:
        generator, reference = TextGenerator(self.folder, max_new_tokens=6), reference_model(self.folder)
        chats = [
            [{"role": "user", "content": text}] for text in ("What is 3 and 4?", "Why is the tent wet, in a word?")
        ]
        expected = []
        for chat in chats:
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            tokens = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            start = tokens.shape[1]
            for _ in range(6):
                token = reference(input_ids=tokens, use_cache=False).logits[0, -1].argmax().view(1, 1)
                if int(token) == 2:
                    break
                tokens = torch.cat([tokens, token], 1)
            expected.append(self.tokenizer.decode(tokens[0, start:], skip_special_tokens=True).strip())
        streamed = ["".join(generator.stream(chat)).strip() for chat in chats]
        if streamed != expected:
            raise Wrong(f"streamed {streamed} for {expected}")
        if generator.generate(chats) != expected:
            raise Wrong(f"batch {generator.generate(chats)} for {expected}")
        return "equal"


def cells(name: str, folder: Path) -> dict[str, str]:
    """What every way to use an architecture gives: equal, off (a saving that is not used), refused, or WRONG."""
    zoo, results = Zoo(name, folder), {}
    for column in COLUMNS:
        use: Callable[[], str] = getattr(zoo, column.replace(" ", "_").lower())
        try:
            results[column] = use()
        except ModelError as error:
            results[column] = f"refused: {error}"
        except Wrong as error:
            results[column] = f"WRONG: {error}"
        except Exception as error:  # a crash in the middle of training
            results[column] = f"WRONG: {type(error).__name__}: {str(error)[:200]}"
    return results

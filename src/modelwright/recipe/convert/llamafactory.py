"""Convert a configuration of LLaMA-Factory, as ``llamafactory-cli train`` reads it, with its dataset_info.json."""

from __future__ import annotations

from typing import get_args

from modelwright.recipe.convert.common import (
    NO_TEST_SPLIT,
    OWN_ATTENTION,
    OWN_TEMPLATE,
    Conversion,
    as_float,
    as_str_list,
    convert_dataset,
    convert_datasets,
    convert_eval_and_save,
    convert_lora,
    convert_optimizer,
    convert_report_to,
    convert_scheduler,
    convert_sharding,
    convert_test_split,
)
from modelwright.recipe.diagnostics import ConversionLoss
from modelwright.recipe.fields import ATTENTION_VALUES
from modelwright.recipe.sections import ColumnRole
from modelwright.recipe.source import ConfigNode, make_node

COLUMN_ROLES = {"prompt": "prompt", "query": "context", "response": "completion"}
"""Roles of columns whose name in dataset_info.json differs from ours."""
DEFAULT_COLUMNS = {
    ("alpaca", False): {"prompt": "instruction", "query": "input", "response": "output"},
    ("alpaca", True): {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
    ("sharegpt", False): {"messages": "conversations"},
    ("sharegpt", True): {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
}
"""Columns of the formats, without and with ranking, where dataset_info.json names none."""
KNOWN_TAGS = ("from", "value", "role", "content", "human", "gpt", "user", "assistant", "system", "function_call",
              "observation", "tool")  # fmt: skip


def convert_llamafactory(conversion: Conversion) -> None:
    """Convert the settings that need a rule; shared names are converted afterwards."""
    if not {"do_train", "dataset"} & {*conversion.source}:
        conversion.refuse("no training is in it (do_train, dataset); modelwright ask, serve and export use a model")
    stage = conversion.pop("stage")
    conversion.converted += ["stage"] if stage is not None else []
    convert_eval_and_save(conversion, as_float(conversion.source.get("num_train_epochs"), 3.0))
    _convert_trainable(conversion)
    _convert_data(conversion)
    convert_optimizer(conversion, "optim")
    convert_scheduler(conversion, "lr_scheduler_type")
    convert_sharding(conversion)
    _convert_precision(conversion)
    conversion.rename("full_determinism", ".deterministic")
    loss = conversion.pop("pref_loss")
    if loss is not None and conversion.has("loss_type"):
        conversion.set(".loss_type", loss, source_key="pref_loss")
    elif loss is not None:
        conversion.converted.append("pref_loss")
    report_to = conversion.pop("report_to")
    convert_report_to(conversion, as_str_list(report_to), report_to, "report_to")
    if (revision := conversion.pop("model_revision")) is not None and revision.value != "main":
        conversion.set("model.revision", revision, source_key="model_revision")
    conversion.set_defaults({
        "max_length": 2048, "num_train_epochs": 3, "learning_rate": 5e-5, "lr_scheduler_type": "linear",
        "gradient_checkpointing": True, "load_best_model_at_end": False,
    })  # fmt: skip


def _convert_trainable(conversion: Conversion) -> None:
    kind = conversion.pop("finetuning_type")
    word = "lora" if kind is None else str(kind.value)
    if word not in ("lora", "full", "freeze"):
        conversion.refuse(f"this trains by finetuning_type: {word}, which is not offered; what is: lora, full, freeze")
    conversion.converted += ["finetuning_type"] if kind is not None else []
    bits, method = conversion.pop("quantization_bit"), conversion.pop("quantization_method")
    is_bnb = method is None or str(method.value).lower() in ("bnb", "bitsandbytes")
    if bits is not None and is_bnb and str(bits.value) in ("4", "8"):
        conversion.source[f"load_in_{bits.value}bit"] = make_node(True, bits.origin)
        conversion.converted += ["quantization_bit", "quantization_method"]
    else:
        for name, node in (("quantization_bit", bits), ("quantization_method", method)):
            if node is not None:
                conversion.report(name, node, "unsupported", "quantization is nf4 or int8 by bitsandbytes")
    names = {"lora_rank": "lora_r", "quantization_type": "bnb_4bit_quant_type"}
    for name, ours in names.items():
        if (node := conversion.pop(name)) is not None:
            conversion.source[ours] = node
            conversion.converted.append(name)
    if word == "lora":
        rank = int(as_float(conversion.source.get("lora_r"), 8))
        conversion.set_defaults({"lora_r": 8, "lora_alpha": 2 * rank})
        targets = [name.strip() for name in ",".join(as_str_list(conversion.pop("lora_target")) or ["all"]).split(",")]
        conversion.set(".lora_target_modules", "all-linear" if targets == ["all"] else targets, "lora_target")
    convert_lora(conversion, word == "lora")
    layers = conversion.pop("freeze_trainable_layers")
    if word == "freeze" and as_float(layers, 2) > 0:
        trainable = {"last_layers": int(as_float(layers, 2))}
        conversion.set(".trainable", trainable, "freeze_trainable_layers", "finetuning_type: freeze")
    elif layers is not None:
        reason = "only the last layers can be trained alone" if word == "freeze" else f"finetuning_type is {word}"
        conversion.report("freeze_trainable_layers", layers, "unsupported", reason)


def _convert_precision(conversion: Conversion) -> None:
    if (pure := conversion.pop("pure_bf16")) is not None:
        conversion.set(".param_dtype", "bf16", comment="nearest to pure_bf16")
        conversion.report("pure_bf16", pure, "approximated", "bf16 weights have exact fp32 masters here")
    if conversion.pop("disable_gradient_checkpointing") is not None:
        conversion.set(".gradient_checkpointing", False, source_key="disable_gradient_checkpointing")
    attention = conversion.pop("flash_attn")
    if attention is not None and str(attention.value) in ATTENTION_VALUES:
        ours = ATTENTION_VALUES[str(attention.value)]
        conversion.set("model.attn_implementation", ours, source_key="flash_attn", comment="flash_attn")
    elif attention is not None:
        conversion.report("flash_attn", attention, "approximated", OWN_ATTENTION)
    packing, neat = conversion.pop("packing"), conversion.pop("neat_packing")
    for name, node in (("packing", packing), ("neat_packing", neat)):
        if node is not None and conversion.has("packing"):
            conversion.set(".packing", True, source_key=name)
        elif node is not None:
            conversion.report(name, node, "not_needed", f"{conversion.stage} packs by itself, or has nothing to pack")
    if packing is not None and neat is None and conversion.has("packing"):
        conversion.report("neat_packing", None, "approximated", "packed rows never attend to each other here")


def _convert_data(conversion: Conversion) -> None:
    names, evals = conversion.pop("dataset"), conversion.pop("eval_dataset")
    folder = conversion.pop("dataset_dir")
    home = "data" if folder is None else str(folder.value)
    conversion.converted += ["dataset_dir"] if folder is not None else []
    listed = [name.strip() for name in ",".join(as_str_list(names)).split(",") if name.strip()]
    origin = conversion.tree.origin if names is None else names.origin
    index = conversion.read_named_file(make_node(f"{home}/dataset_info.json", origin))
    nodes = [make_node(name, origin) for name in listed]
    convert_datasets(
        conversion, nodes, "dataset", lambda item, _: _convert_entry(conversion, item, index.get(str(item.value)), home)
    )
    conversion.converted += ["dataset"] if listed else []
    _convert_mixture(conversion, len(listed))
    template = conversion.pop("template")
    if template is not None:
        conversion.report("template", template, "approximated", f"{OWN_TEMPLATE}; model.chat_template sets another")
    conversion.rename("default_system", "data.system_prompt")
    if conversion.has("assistant_only_loss"):
        advice = "all answers of a conversation are trained, not the last alone"
        conversion.report_if_set(["mask_history"], "unsupported", advice)
    held_out = index.get(str(evals.value)) if evals is not None else None
    file = None if held_out is None else held_out.get(("file_name",))
    if file is not None:
        conversion.set("data.validation_file", f"{home}/{file.value}", source_key="eval_dataset")
    elif evals is not None:
        conversion.report("eval_dataset", evals, "approximated", NO_TEST_SPLIT)
        conversion.set("data.test_size", "10%", comment="instead of eval_dataset")
        return
    convert_test_split(conversion, conversion.pop("val_size"), "val_size")


STOPPING_STRATEGIES = {"interleave_under": "first_exhausted", "interleave_over": "all_exhausted"}


def _convert_mixture(conversion: Conversion, listed: int) -> None:
    """Interleaved data sets become a mixture with weights; without probabilities they come in turn, as equals."""
    strategy, probabilities = conversion.pop("mix_strategy"), conversion.pop("interleave_probs")
    word = "concat" if strategy is None else str(strategy.value)
    mix = conversion.get("data.mix")
    texts = [text for part in as_str_list(probabilities) for text in part.split(",")]
    try:
        weights = [float(text) for text in texts] or [1.0] * listed
    except ValueError:
        weights = []
    if mix is None or word not in STOPPING_STRATEGIES:
        reason = ("an epoch has each row of each data set once" if mix is not None else
                  "there is one data set" if listed < 2 else "the data sets are not mixed here")  # fmt: skip
        loss: ConversionLoss = "not_needed" if word == "concat" or listed < 2 else "approximated"
    elif len(weights) != len(mix.mapping) or not all(weight > 0 for weight in weights):
        loss, reason = "unsupported", f"it wants a probability above 0 for each of {len(mix.mapping)} data sets"
    else:
        sources = {name: ConfigNode({**node.mapping, "weight": make_node(weight, node.origin)}, node.origin)
                   for (name, node), weight in zip(mix.mapping.items(), weights, strict=True)}  # fmt: skip
        conversion.set("data.mix", ConfigNode(sources, mix.origin), source_key="interleave_probs")
        conversion.set("data.stopping_strategy", STOPPING_STRATEGIES[word], source_key="mix_strategy")
        return
    for name, node in (("mix_strategy", strategy), ("interleave_probs", probabilities)):
        if node is not None:
            conversion.report(name, node, loss, reason)


def _convert_entry(conversion: Conversion, name: ConfigNode, info: ConfigNode | None, home: str) -> None:
    """The data set of a name, by its entry of dataset_info.json."""
    if info is None and home != "ONLINE":
        advice = f"{home}/dataset_info.json describes it and was not read: set data.train_file and data.columns"
        conversion.report("dataset", name, "unsupported", advice)
        return
    info = info or make_node({"hf_hub_url": name.value}, name.origin)
    entry = {key: node for key, node in info.mapping.items() if node.value not in (None, False)}
    if (file := entry.pop("file_name", None)) is not None:
        entry["path"] = make_node(f"{home}/{file.value}", file.origin)
    names = {"hf_hub_url": "path", "subset": "name"}
    entry = {names.get(key, key): node for key, node in entry.items()}
    convert_dataset(conversion, entry, "dataset_info")
    if (count := entry.pop("num_samples", None)) is not None:
        conversion.set("data.max_rows", count, source_key="dataset_info.num_samples")
    _convert_columns(conversion, entry)
    for key, node in entry.items():
        conversion.report(f"dataset_info.{key}", node, "unsupported", "an entry has no such setting here")


def _convert_columns(conversion: Conversion, entry: dict[str, ConfigNode]) -> None:
    formatting, ranking = entry.pop("formatting", None), entry.pop("ranking", None)
    kind = "alpaca" if formatting is None else str(formatting.value)
    columns, tags = entry.pop("columns", None), entry.pop("tags", None)
    is_pairs = ranking is not None and ranking.value is True
    if is_pairs != (conversion.spec.row_format == "pairs"):
        advice = f"{conversion.stage} wants rows {'without' if is_pairs else 'with'} chosen and rejected answers"
        conversion.report("dataset_info.ranking", ranking, "unsupported", advice)
    if kind not in ("alpaca", "sharegpt", "openai"):
        conversion.report("dataset_info.formatting", formatting, "unsupported", "alpaca and sharegpt are known")
        return
    if conversion.spec.row_format == "text":
        column = columns.get(("prompt",)) if columns is not None else None
        conversion.set("data.text_column", column or "text", source_key="dataset_info.columns")
        return
    default = DEFAULT_COLUMNS["sharegpt" if kind == "openai" else kind, is_pairs]
    nodes = columns.mapping if columns is not None else make_node(default, conversion.tree.origin).mapping
    roles: dict[str, str] = {}
    for name, node in nodes.items():
        role = "prompt" if name == "messages" and is_pairs else COLUMN_ROLES.get(name, name)
        if name == "kto_tag":
            conversion.refuse("this trains by kto (columns.kto_tag in dataset_info.json), which is not offered")
        if role in get_args(ColumnRole):
            roles[str(node.value)] = role
        elif role != "tools" or node.value != "tools":
            advice = f"no column has this role here; the roles are {', '.join(get_args(ColumnRole))}"
            conversion.report(f"dataset_info.columns.{name}", node, "unsupported", advice)
    conversion.set("data.columns", roles, "dataset_info.columns", f"formatting: {kind}")
    for name, node in (tags.mapping if tags is not None else {}).items():
        if str(node.value) not in KNOWN_TAGS:
            advice = "a turn has role and content, or from and value, with the usual names of roles"
            conversion.report(f"dataset_info.tags.{name}", node, "unsupported", advice)

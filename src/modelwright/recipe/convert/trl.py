"""Convert a configuration of TRL's command line, as ``trl sft --config`` reads it, or of the alignment-handbook."""

from __future__ import annotations

from functools import partial
from typing import get_args

from modelwright.recipe.convert.common import (
    NO_LORA,
    NO_TEST_SPLIT,
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
from modelwright.recipe.schema import AttentionName
from modelwright.recipe.source import ConfigNode, make_node
from modelwright.recipe.stage_specs import ChatConfig, PreferenceLoss

DTYPES = {"float32": "fp32", "auto": "auto"}
DATASET_ENTRY_ADVICE = {
    "columns": "columns without a role are not read",
    "fraction": "data.max_rows takes the first rows",
    "data_dir": "name the folder itself: data.dataset_name: FOLDER",
}
LOSSES = get_args(PreferenceLoss)


def convert_trl(conversion: Conversion) -> None:
    """Convert the settings that need a rule; names that both tools share are converted afterwards."""
    convert_eval_and_save(conversion, as_float(conversion.source.get("num_train_epochs"), 3.0))
    _convert_model(conversion)
    _convert_data(conversion)
    convert_optimizer(conversion, "optim")
    convert_scheduler(conversion, "lr_scheduler_type")
    convert_sharding(conversion)
    conversion.rename("full_determinism", ".deterministic")
    _convert_loss(conversion)
    _convert_packing(conversion)
    report_to = conversion.pop("report_to")
    convert_report_to(conversion, as_str_list(report_to), report_to, "report_to")
    max_length = conversion.source.get("max_length")
    if max_length is not None and max_length.value is None:
        del conversion.source["max_length"]
        conversion.report("max_length", max_length, "approximated", "a limit is required; 1024 is written")
    conversion.set_defaults({
        "max_length": 1024, "num_train_epochs": 3, "lr_scheduler_type": "linear", "gradient_checkpointing": True,
        "load_best_model_at_end": False,
    })  # fmt: skip


def convert_handbook(conversion: Conversion) -> None:
    """The alignment-handbook's mixtures as TRL's datasets, then TRL's settings."""
    mixer, mixture = conversion.pop("dataset_mixer"), conversion.pop("dataset_mixture")
    splits, configs = conversion.pop("dataset_splits"), conversion.pop("dataset_configs")
    for name, node in (("mixer", mixer), ("mixture", mixture), ("splits", splits), ("configs", configs)):
        conversion.converted += [f"dataset_{name}"] if node is not None else []
    split = {kind: [each for each in as_str_list(splits) if kind in each] for kind in ("train", "test")}
    items = []
    for number, (name, fraction) in enumerate((mixer.mapping if mixer is not None else {}).items()):
        config = as_str_list(configs)[number : number + 1]
        entry = {"path": name, **({"name": config[0]} if config else {})}
        entry |= {"split": split["train"][0]} if split["train"] else {}
        items.append(make_node(entry, fraction.origin).with_value(["fraction"], fraction))
    names = {"id": "path", "config": "name", "weight": "fraction"}
    for name, node in (mixture.mapping if mixture is not None else {}).items():
        if name == "datasets" and isinstance(node.value, list):
            for item in node.value:
                renamed = {names.get(key, key): child for key, child in item.mapping.items()}
                items.append(ConfigNode(renamed, item.origin))
        elif name == "test_split_size":
            conversion.source["test_split_size"] = node
        else:
            conversion.report(f"dataset_mixture.{name}", node, "not_needed", "the seed of the recipe shuffles")
    if items:
        conversion.source["datasets"] = ConfigNode(items, items[0].origin)
    if split["test"] and splits is not None:
        conversion.source["dataset_test_split"] = make_node(split["test"][0], splits.origin)
    convert_trl(conversion)


def _convert_model(conversion: Conversion) -> None:
    peft, targets = conversion.pop("use_peft"), conversion.pop("lora_target_modules")
    if peft is not None:
        conversion.set_defaults({"lora_dropout": 0.05})
    convert_lora(conversion, peft is not None)
    conversion.converted += ["use_peft"] if peft is not None else []
    if peft is not None and targets is not None:
        conversion.set(".lora_target_modules", targets, source_key="lora_target_modules")
    elif peft is not None:
        advice = "the default of peft is two attention projections in most model families; here it is all-linear"
        conversion.report("lora_target_modules", None, "approximated", advice)
    elif targets is not None:
        conversion.report("lora_target_modules", targets, "not_needed", NO_LORA)
    for name in ("dtype", "torch_dtype"):
        node = conversion.pop(name)
        dtype = "" if node is None else str(node.value)
        if dtype in DTYPES:
            conversion.set(".param_dtype", DTYPES[dtype], source_key=name, comment=f"{name}: {dtype}")
        elif node is not None:
            conversion.set(".param_dtype", "auto", comment=f"nearest to {dtype}")
            advice = "param_dtype: auto is written: on a GPU bf16 with exact fp32 masters"
            conversion.report(name, node, "approximated", advice)
    attention = conversion.pop("attn_implementation")
    implementation = "" if attention is None else str(attention.value)
    if implementation in get_args(AttentionName):
        conversion.set("model.attn_implementation", implementation, source_key="attn_implementation")
    elif attention is not None:
        conversion.set("model.attn_implementation", "auto", comment=f"nearest to {implementation}")
        advice = "PyTorch's own attention is used; no code of the hub is run"
        conversion.report("attn_implementation", attention, "approximated", advice)
    if str(getattr(conversion.source.get("chat_template_path"), "value", "")).endswith(".jinja"):
        conversion.rename("chat_template_path", "model.chat_template")
    revision = conversion.pop("model_revision")
    if revision is not None and str(revision.value) != "main":
        conversion.set("model.revision", revision, source_key="model_revision")
    elif revision is not None:
        conversion.converted.append("model_revision")


def _convert_entry(conversion: Conversion, is_mixture: bool, item: ConfigNode, label: str) -> None:
    entry = dict(item.mapping) if isinstance(item.value, dict) else {"path": item}
    convert_dataset(conversion, entry, label)
    for name, node in entry.items():
        fraction = as_float(node, 1.0) if name == "fraction" else 0.0
        if fraction == 1.0:
            conversion.converted.append(f"{label}.{name}")
        elif is_mixture and 0 < fraction < 1:
            conversion.set("data.max_rows", node, source_key=f"{label}.{name}")
        else:
            advice = DATASET_ENTRY_ADVICE.get(name, "an entry of datasets has no such setting here")
            loss: ConversionLoss = "approximated" if name in DATASET_ENTRY_ADVICE else "unsupported"
            conversion.report(f"{label}.{name}", node, loss, advice)


def _convert_data(conversion: Conversion) -> None:
    mixture = conversion.pop("datasets")
    if mixture is not None and isinstance(mixture.value, list):
        convert_one = partial(_convert_entry, conversion, len(mixture.value) > 1)
        convert_datasets(conversion, mixture.value, "datasets", convert_one)
    elif mixture is not None:
        conversion.report("datasets", mixture, "unsupported", "it wants a list of data sets")
    column = conversion.pop("dataset_text_field")
    if column is not None and conversion.spec.row_format == "text":
        conversion.set("data.text_column", column, source_key="dataset_text_field")
        advice = "raw text is trained by pretrain: documents are packed into rows of max_length, masked from each other"
        conversion.report("dataset_text_field", column, "approximated", advice)
    elif column is not None:
        advice = "conversations have prompts and answers: data.columns"
        conversion.report("dataset_text_field", column, "unsupported", advice)
    test, test_size = conversion.pop("dataset_test_split"), conversion.pop("test_split_size")
    if "eval_strategy" in conversion.converted and test_size is None and conversion.get("data.validation_file") is None:
        conversion.report("dataset_test_split", test, "approximated", NO_TEST_SPLIT)
        conversion.set("data.test_size", "10%", comment="instead of a test split")
        return
    if test is not None:
        conversion.report("dataset_test_split", test, "not_needed", "without an eval_strategy it is not read")
    convert_test_split(conversion, test_size, "test_split_size")


def _convert_loss(conversion: Conversion) -> None:
    kind = conversion.pop("loss_type")
    loss_types = as_str_list(kind)
    if conversion.has("loss_type") and loss_types:
        known = [loss_type for loss_type in loss_types if loss_type in LOSSES]
        if known == loss_types and len(loss_types) == 1:
            conversion.set(".loss_type", known[0], source_key="loss_type")
        else:
            first = known[0] if known else LOSSES[0]
            conversion.set(".loss_type", first, comment=f"nearest to {', '.join(loss_types)}")
            conversion.report("loss_type", kind, "approximated", f"one of {', '.join(LOSSES)}; {first} is written")
    elif loss_types in (["nll"], ["chunked_nll"]):
        advice = "the loss is the mean over trained tokens, computed in chunks"
        conversion.report("loss_type", kind, "not_needed", advice)
    assistant_only = conversion.pop("assistant_only_loss")
    completion_only = conversion.source.pop("completion_only_loss", None)
    if not conversion.has("assistant_only_loss"):
        for name, node in (("assistant_only_loss", assistant_only), ("completion_only_loss", completion_only)):
            if node is not None:
                conversion.report(name, node, "not_needed", f"{conversion.stage} has no prompts to mask")
    elif assistant_only is not None:
        conversion.set(".assistant_only_loss", True, source_key="assistant_only_loss")
    elif completion_only is not None and completion_only.value is not None:
        conversion.set(".assistant_only_loss", completion_only.value is True, source_key="completion_only_loss")
    else:
        advice = "by default TRL trains on all tokens of a conversation; here only on those of the assistant"
        conversion.report("assistant_only_loss", None, "approximated", advice)


def _convert_packing(conversion: Conversion) -> None:
    truncation, strategy, packing = map(conversion.pop, ("truncation_mode", "packing_strategy", "packing"))
    if truncation is not None and str(truncation.value) != "keep_start":
        conversion.report("truncation_mode", truncation, "unsupported", "rows are truncated at the end, and counted")
    elif truncation is not None:
        conversion.converted.append("truncation_mode")
    if strategy is not None and conversion.spec.row_format == "text":
        conversion.report("packing_strategy", strategy, "not_needed", "documents are joined end to end")
    elif strategy is not None and packing is not None and conversion.has("packing"):
        strategies = get_args(ChatConfig.model_fields["packing_strategy"].annotation)
        if str(strategy.value) in strategies:
            conversion.set(".packing_strategy", strategy, source_key="packing_strategy")
        else:
            advice = "rows are packed by best fit; those longer than max_length are truncated"
            conversion.report("packing_strategy", strategy, "approximated", advice)
    elif strategy is not None:
        conversion.report("packing_strategy", strategy, "not_needed", "nothing is packed")
    if packing is not None and conversion.has("packing"):
        conversion.set(".packing", packing, source_key="packing")
    elif packing is not None:
        advice = f"{conversion.stage} packs by itself, or has nothing to pack"
        conversion.report("packing", packing, "not_needed", advice)

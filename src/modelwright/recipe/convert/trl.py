"""Convert a configuration of TRL's command line, as ``trl sft --config`` and ``trl dpo --config`` read it."""

from __future__ import annotations

from modelwright.recipe.convert.common import (
    Conversion,
    as_float,
    as_str_list,
    convert_dataset,
    convert_eval_and_save,
    convert_lora,
    convert_optimizer,
    convert_report_to,
    convert_scheduler,
    convert_sharding,
    convert_test_split,
    report_extra_datasets,
)

DTYPES = {"float32": "fp32", "auto": "auto"}
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flex_attention", "auto")
DATASET_ENTRY_ADVICE = {
    "columns": "columns that play no part are not read",
    "fraction": "data.max_rows takes the first rows",
    "data_dir": "name the folder itself: data.dataset_name: FOLDER",
}
LOSSES = ("sigmoid", "ipo", "hinge")


def convert_trl(conversion: Conversion) -> None:
    """Take what wants a rule of its own; names that both tools share are carried afterwards."""
    stage = conversion.stage
    convert_eval_and_save(conversion, as_float(conversion.source.get("num_train_epochs"), 3.0))
    _model(conversion)
    _data(conversion)
    convert_optimizer(conversion, "optim")
    convert_scheduler(conversion, "lr_scheduler_type")
    convert_sharding(conversion)
    _loss(conversion)
    report_to = conversion.pop("report_to")
    convert_report_to(conversion, as_str_list(report_to), report_to, "report_to")
    max_length = conversion.source.get("max_length")
    if max_length is not None and max_length.value is None:
        conversion.report(
            "max_length",
            conversion.source.pop("max_length"),
            "approximated",
            "every row has a longest; 1024 is written",
        )
    defaults = {
        "max_length": 1024, "num_train_epochs": 3, "lr_scheduler_type": "linear", "gradient_checkpointing": True,
        "load_best_model_at_end": False,
    }  # fmt: skip
    for name, value in defaults.items():
        conversion.set_default(f"{stage}.{name}", value)


def _model(conversion: Conversion) -> None:
    peft = conversion.pop("use_peft")
    targets = conversion.pop("lora_target_modules")
    if peft is not None:
        conversion.set_default(f"{conversion.stage}.lora_dropout", 0.05)
    convert_lora(conversion, peft is not None)
    conversion.converted += ["use_peft"] if peft is not None else []
    if peft is not None and targets is not None:
        conversion.set(f"{conversion.stage}.lora_target_modules", targets, source_key="lora_target_modules")
    elif peft is not None:
        advice = "left to peft, which takes two projections of attention in most families; all-linear stands here"
        conversion.report("lora_target_modules", None, "approximated", advice)
    elif targets is not None:
        conversion.report("lora_target_modules", targets, "not_needed", "no low-rank matrices are trained")
    for name in ("dtype", "torch_dtype"):
        node = conversion.pop(name)
        if node is not None and str(node.value) in DTYPES:
            conversion.set(
                f"{conversion.stage}.param_dtype",
                DTYPES[str(node.value)],
                source_key=name,
                comment=f"{name}: {node.value}",
            )
        elif node is not None:
            advice = "param_dtype: auto is written: on a GPU bf16 with exact masters beside them"
            conversion.set(f"{conversion.stage}.param_dtype", "auto", comment=f"nearest to {node.value}")
            conversion.report(name, node, "approximated", advice)
    attention = conversion.pop("attn_implementation")
    implementation = "" if attention is None else str(attention.value)
    if implementation in ATTENTION:
        conversion.set("model.attn_implementation", implementation, source_key="attn_implementation")
    elif attention is not None:
        conversion.set("model.attn_implementation", "auto", comment=f"nearest to {implementation}")
        conversion.report(
            "attn_implementation",
            attention,
            "approximated",
            "PyTorch's own attention is taken; no code of the hub runs",
        )
    revision = conversion.pop("model_revision")
    if revision is not None and str(revision.value) != "main":
        conversion.set("model.revision", revision, source_key="model_revision")
    elif revision is not None:
        conversion.converted.append("model_revision")


def _data(conversion: Conversion) -> None:
    mixture = conversion.pop("datasets")
    if mixture is not None and isinstance(mixture.value, list):
        entry = dict(mixture.value[0].mapping)
        convert_dataset(conversion, entry, "datasets[0]")
        for name, node in entry.items():
            known = name in DATASET_ENTRY_ADVICE
            advice = DATASET_ENTRY_ADVICE.get(name, "an entry of datasets has no such word here")
            conversion.report(f"datasets[0].{name}", node, "approximated" if known else "unsupported", advice)
        report_extra_datasets(conversion, mixture.value[1:], "datasets")
    column = conversion.pop("dataset_text_field")
    if column is not None and conversion.stage == "pretrain":
        conversion.set("data.text_column", column, source_key="dataset_text_field")
        advice = "raw text is learnt by pretrain: documents joined end to end, cut into rows of max_length, kept apart"
        conversion.report("dataset_text_field", column, "approximated", advice)
    elif column is not None:
        conversion.report(
            "dataset_text_field", column, "unsupported", "conversations have prompts and answers: data.columns"
        )
    test, test_size = conversion.pop("dataset_test_split"), conversion.pop("test_split_size")
    if "eval_strategy" in conversion.converted and test_size is None and conversion.get("data.validation_file") is None:
        advice = "a split of a set is not measured; 10% of the questions are held out, or name data.validation_file"
        conversion.report("dataset_test_split", test, "approximated", advice)
        conversion.set("data.test_size", "10%", comment="in place of a test split")
        return
    if test is not None:
        conversion.report("dataset_test_split", test, "not_needed", "without an eval_strategy it is not read")
    convert_test_split(conversion, test_size, "test_split_size")


def _loss(conversion: Conversion) -> None:
    kind = conversion.pop("loss_type")
    loss_types = as_str_list(kind)
    if conversion.stage == "dpo" and loss_types:
        known = [loss_type for loss_type in loss_types if loss_type in LOSSES]
        if known == loss_types[:1] and len(loss_types) == 1:
            conversion.set("dpo.loss_type", known[0], source_key="loss_type")
        else:
            first = known[0] if known else "sigmoid"
            conversion.set("dpo.loss_type", first, comment=f"nearest to {', '.join(loss_types)}")
            conversion.report("loss_type", kind, "approximated", f"one of {', '.join(LOSSES)}; {first} is written")
    elif loss_types in (["nll"], ["chunked_nll"]):
        conversion.report(
            "loss_type", kind, "not_needed", "the loss is the mean over trained tokens, and never holds all logits"
        )
    elif kind is not None:
        conversion.report("loss_type", kind, "unsupported", "the loss of sft is the mean negative log-likelihood")
    dropout = conversion.source.pop("disable_dropout", None)
    if dropout is not None and dropout.value is False:
        conversion.report("disable_dropout", dropout, "approximated", "dropout is what the model's config says")
    elif dropout is not None:
        conversion.report(
            "disable_dropout", dropout, "not_needed", "dropout is what the model's config says; most have none"
        )
    _packing(conversion)
    assistant_only, completion_only = (
        conversion.pop("assistant_only_loss"),
        conversion.source.pop("completion_only_loss", None),
    )
    if conversion.stage != "sft":
        for name, node in (("assistant_only_loss", assistant_only), ("completion_only_loss", completion_only)):
            if node is not None:
                conversion.report(name, node, "not_needed", f"{conversion.stage} has no prompts to leave out")
    elif assistant_only is not None or (completion_only is not None and completion_only.value is not None):
        mask_prompts = assistant_only is not None or (completion_only is not None and completion_only.value is True)
        conversion.set(
            "sft.assistant_only_loss",
            mask_prompts,
            source_key="assistant_only_loss" if assistant_only else "completion_only_loss",
        )
    else:
        advice = "TRL learns whole conversations of messages unless told; the assistant's words alone are learnt here"
        conversion.report("assistant_only_loss", None, "approximated", advice)


def _packing(conversion: Conversion) -> None:
    truncation, strategy, packing = (
        conversion.pop(name) for name in ("truncation_mode", "packing_strategy", "packing")
    )
    if truncation is not None and str(truncation.value) != "keep_start":
        conversion.report(
            "truncation_mode", truncation, "unsupported", "the end of what is too long is cut, and counted"
        )
    elif truncation is not None:
        conversion.converted.append("truncation_mode")
    if strategy is not None and conversion.stage == "pretrain":
        conversion.report("packing_strategy", strategy, "not_needed", "documents are joined end to end")
    elif strategy is not None and packing is not None:
        advice = "rows are put together by best fit; what is longer than max_length is cut"
        conversion.report(
            "packing_strategy", strategy, "approximated" if str(strategy.value) != "bfd" else "not_needed", advice
        )
    elif strategy is not None:
        conversion.report("packing_strategy", strategy, "not_needed", "nothing is packed")
    if packing is not None and conversion.stage == "sft":
        conversion.set("sft.packing", packing, source_key="packing")
    elif packing is not None:
        conversion.report(
            "packing", packing, "not_needed", f"{conversion.stage} packs by itself, or has nothing to pack"
        )

"""Arguments and options that several commands share, their older spellings, and how results are printed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from modelwright.errors import ModelwrightError, Problem, UsageError, replace_surrogates
from modelwright.report.formatting import strip_control_chars

if TYPE_CHECKING:
    from modelwright.recipe.load import LoadedRecipe

StringList = list[str] | None
RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in recipe.")
]
DataArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe, or data: a file, a folder, a data set.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name under runs/.")]
SetOption = Annotated[StringList, typer.Option("--set", metavar="KEY=VALUE", help="Set KEY=VALUE; repeatable.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
AllowChangedOption = Annotated[
    StringList, typer.Option("--allow-changed", metavar="KEY", help="Resume although this setting changed.")
]
FromStageOption = Annotated[
    str | None,
    typer.Option("--from-stage", metavar="STAGE", help="First stage to run; earlier stages must be finished."),
]
UntilStageOption = Annotated[str | None, typer.Option("--until-stage", metavar="STAGE", help="Last stage to run.")]
AcceptGateOption = Annotated[
    StringList, typer.Option("--accept-gate", metavar="STAGE", help="Continue although its gate is closed.")
]
ReasonOption = Annotated[str | None, typer.Option("--reason", help="Why, for --accept-gate; recorded in the run.")]
TrustFileOption = Annotated[
    StringList, typer.Option("--trust-file", metavar="FILE", help="Run this Python file, a verifier of the recipe.")
]
Fp8Option = Annotated[bool | None, typer.Option("--fp8/--no-fp8", help="Compute in fp8 without a trial, or in bf16.")]
LogFormatOption = Annotated[
    str, typer.Option("--log-format", help="auto (a live panel on a terminal), plain, or json.")
]
NodeRankOption = Annotated[int | None, typer.Option("--node-rank", help="Several nodes: rank of this node, from 0.")]
MasterAddrOption = Annotated[
    str | None, typer.Option("--master-addr", help="Several nodes: address at which the others reach node 0.")
]
MasterPortOption = Annotated[
    int | None, typer.Option("--master-port", help="Several nodes: a free port of node 0; default: 29500.")
]
JobKindOption = Annotated[
    str | None, typer.Option("--job-kind", help="trainjob or pytorchjob; default: as in the recipe.")
]
ContextOption = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig; default: the current one.")
]

OLD_SPELLINGS = {
    "--clone-from": "--git-repo",
    "--count": "--num-samples",
    "--disturb": "--inject-fault",
    "--from": "--from-stage",
    "--full-question": "--prompt-template",
    "--into": "--output",
    "--key": "--api-key",
    "--kind": "--outtype",
    "--machine_rank": "--node-rank",
    "--main-address": "--master-addr",
    "--main_process_ip": "--master-addr",
    "--main_process_port": "--master-port",
    "--max-bad-share": "--max-invalid-fraction",
    "--nodes": "--nnodes",
    "--num_machines": "--nnodes",
    "--on": "--gpus",
    "--override": "--allow-changed",
    "--per-node": "--nproc-per-node",
    "--place": "--work-dir",
    "--port": "--master-port",
    "--rehearse": "--simulate",
    "--target": "--job-kind",
    "--to": "--output",
    "--until": "--until-stage",
}
"""Options of version 0.1 and of accelerate, and ours; each is accepted where a command has ours and not the other."""


SETTING_FLAGS = {
    "model_name_or_path", "use_flash_attention", "dataset_name", "dataset_config_name", "train_file", "validation_file",
    "text_column", "max_seq_length", "output_dir", "num_train_epochs", "per_device_train_batch_size",
    "per_device_eval_batch_size", "gradient_accumulation_steps", "learning_rate", "weight_decay", "warmup_steps",
    "bf16", "fp16", "gradient_checkpointing", "logging_steps", "save_steps", "eval_steps", "save_total_limit",
    "report_to", "resume_from_checkpoint", "seed",
}  # fmt: skip
"""Flags of the usual Transformers script, which commands with --set accept as they are."""
SWITCHES = {"bf16", "fp16", "gradient_checkpointing", "use_flash_attention", "multi_gpu"}  # need no value
SWITCH_VALUES = dict.fromkeys(("true", "yes", *"ty1"), "true") | dict.fromkeys(("false", "no", *"fn0"), "false")
"""What Transformers' argument parser reads after a switch."""
NODE_FLAGS = {"num_machines", "machine_rank", "main_process_ip", "main_process_port"}
ACCELERATE_FLAGS = NODE_FLAGS | {"num_processes", "multi_gpu", "mixed_precision", "nnodes"}
"""Flags of `accelerate launch` that launch accepts, and --nnodes, by which --num_processes is divided."""


def settings_from_flags(args: list[str]) -> list[str]:
    """Arguments with each of `SETTING_FLAGS` written as --set."""
    rest, settings = _take_flags(args, SETTING_FLAGS)
    for pair in (("bf16", "fp16"), ("dataset_name", "train_file")):
        if not {settings.get(name) for name in pair} & {None, "", "null", "false"}:
            raise UsageError(f"--{pair[0]} and --{pair[1]} are both given; give one of them")
    if {settings.get("bf16"), settings.get("fp16")} == {"true", "false"}:  # false alone selects precision: auto
        del settings["bf16" if settings["fp16"] == "true" else "fp16"]
    return [*rest, *(part for name, value in settings.items() for part in ("--set", f"{name}={value}"))]


def args_from_accelerate(args: list[str]) -> list[str]:
    """Arguments of `accelerate launch` as those of launch; --num_processes counts those of all machines."""
    rest, flags = _take_flags(args, ACCELERATE_FLAGS)
    machines, total = flags.get("num_machines") or flags.get("nnodes") or "1", flags.get("num_processes")
    ours = [part for name in flags if name in {*NODE_FLAGS, "nnodes"} for part in (f"--{name}", flags[name])]
    if NODE_FLAGS & flags.keys() and "--on" not in {arg.partition("=")[0] for arg in rest}:
        ours += ["--on", "nodes"] + ["--node-rank", "0"] * (machines == "1" and "machine_rank" not in flags)
    if total is not None:
        if not all(re.fullmatch(r"[1-9]\d{0,5}", each) for each in (total, machines)) or int(total) % int(machines):
            raise UsageError(f"--num_processes is {total}; it wants a multiple of the number of machines, {machines}")
        ours += ["--nproc-per-node", str(int(total) // int(machines))]
    return [*ours, *(["--set", f"precision={flags['mixed_precision']}"] if "mixed_precision" in flags else []), *rest]


def _take_flags(args: list[str], names: set[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments without the flags of these names, and the values of these flags."""
    rest, flags = list[str](), dict[str, str]()
    while args:
        arg, *args = args
        flag, equals, value = arg.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not arg.startswith("--") or name not in names:
            rest.append(arg)
            continue
        following = args[0] if args else "-o"
        if not (equals or name in SWITCHES) and re.match("-[-A-Za-z]", following):
            from modelwright.recipe.explain import resolve_key
            from modelwright.recipe.fields import get_field

            setting = get_field(tuple(resolve_key(name).split("."))) if name in SETTING_FLAGS else None
            wants = f", {setting.expected}: {setting.description}" if setting else ""
            raise UsageError(f"{flag} wants a value{wants}")
        if not equals:
            value = args.pop(0) if name not in SWITCHES or following.lower() in SWITCH_VALUES else "true"
        flags[name] = SWITCH_VALUES.get(value.lower(), value) if name in SWITCHES else value
    return rest, flags


def drop_config_name(params: dict[str, Any]) -> None:
    """Clear the recipe's dataset_config_name where a command names another data set than the recipe."""
    settings = dict(each.removeprefix("data.").split("=", 1) for each in params.get("overrides") or () if "=" in each)
    if settings.keys() & {"dataset_name", "dataset_config_name"} != {"dataset_name"} or not params.get("recipe"):
        return
    from modelwright.data.sources import hub_id
    from modelwright.recipe.load import load

    with suppress(ModelwrightError, OSError):  # the command reports it
        data = load(params["recipe"], environ={}).recipe.data
        name = settings["dataset_name"]
        if not data or not data.dataset_config_name or Path(name).exists():
            return
        if hub_id(name) != hub_id(data.dataset_name or ""):
            params["overrides"] = [*params["overrides"], "dataset_config_name=null"]


ARGUMENT_HINTS = {
    "RECIPE": "a recipe file or a name that modelwright recipes lists, such as quickstart",
    "RUN": "a run folder, such as runs/quickstart",
}
OTHER_OPTIONS = {
    **dict.fromkeys(("--config", "--recipe", "--config_file", "--config-file", "--yaml"), "RECIPE, the first argument"),
    **dict.fromkeys(("--model", "--model-name", "--base-model"), "--set model_name_or_path=NAME"),
    **dict.fromkeys(("--data", "--dataset", "--data-path"), "--set dataset_name=NAME"),
    **dict.fromkeys(("--epochs", "--num-epochs"), "--set num_train_epochs=N"),
    **dict.fromkeys(("--batch-size", "--batch_size", "--bs"), "--set per_device_train_batch_size=N"),
    **dict.fromkeys(("--gpus", "--num-gpus", "--num_gpus", "--nproc_per_node"), "launch RECIPE --nproc-per-node N"),
    **dict.fromkeys(("--num_processes", "--multi_gpu", "--num_machines"), "launch RECIPE --num_processes N"),
}
"""Options of other tools, and what does the same here."""


def option_hint(name: str, options: set[str]) -> str:
    """What an unknown option was probably meant to be."""
    from modelwright.recipe.diagnostics import closest_match

    if hint := OTHER_OPTIONS.get(name):
        return f"did you mean {hint}?"
    if "--set" in options:
        from modelwright.recipe.explain import resolve_key

        options = options | {"--output"}
        with suppress(UsageError):
            key = resolve_key(name.lstrip("-").replace("-", "_"))
            return f"it is a setting: --set {key.rpartition('.')[2]}=VALUE"
    close = closest_match(name, [option for option in options if option.startswith("--")], cutoff=0.7)
    return f"did you mean {close}?" if close else "--help lists the options"


class AliasCommand(TyperCommand):
    """A command that accepts `OLD_SPELLINGS` and `SETTING_FLAGS` without showing them in --help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace old spellings, then parse."""
        if self.name == "launch":  # 0.1: launch RECIPE -- OPTIONS-OF-RUN
            args = args_from_accelerate([arg for arg in args if arg != "--"])
        options = {name for parameter in self.params for name in parameter.opts}
        end = args.index("--") if "--" in args else len(args)
        for index, arg in enumerate(args[:end]):
            old, equals, value = arg.partition("=")
            # torchrun takes --nproc_per_node too
            if old not in options and (new := OLD_SPELLINGS.get(old, old.replace("_", "-"))) in options:
                args[index] = f"{new}{equals}{value}"
        if "--set" in options:
            args = [*settings_from_flags(_expand_output(args[:end], options)), *args[end:]]
        self._check_options(args, options)
        try:
            rest = super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ != "MissingParameter":  # of click, which newer releases of typer contain
                raise
            param = getattr(error, "param", None)
            wanted = str(param.metavar or param.opts[0].upper()) if param else "an argument"
            hint = ARGUMENT_HINTS.get(wanted, f"modelwright {self.name} --help shows how it is called")
            raise UsageError(f"{self.name} wants {wanted}: {hint}") from None
        drop_config_name(ctx.params)
        return rest

    def _check_options(self, args: list[str], options: set[str]) -> None:
        """Refuse an unknown long option with the one that was probably meant."""
        valued = {name for each in self.params if not getattr(each, "is_flag", False) for name in each.opts}
        known = options | {name for each in self.params for name in each.secondary_opts} | {"--help", "-h"}
        for previous, arg in zip(["", *args], args, strict=False):
            name = arg.partition("=")[0]
            if arg == "--":
                return
            if re.fullmatch(r"--[A-Za-z][\w-]*", name) and name not in known and previous not in valued:
                raise UsageError(f"{self.name} has no option {name[:60]}; {option_hint(name, known)}")


def _expand_output(args: list[str], options: set[str]) -> list[str]:
    """Arguments with --output FOLDER as --set output_dir=FOLDER, for commands that take a recipe and write a run."""
    if "--output" in options:
        return args
    args = [re.sub(r"^(--output|-o)=", "--output_dir=", arg) for arg in args]
    return ["--output_dir" if arg in ("--output", "-o") else arg for arg in args]


def add_commands(app: typer.Typer, commands: dict[str, Callable[..., Any]], hidden: bool = False) -> None:
    """Add functions as commands, by name."""
    for name, function in commands.items():
        app.command(name, cls=AliasCommand, hidden=hidden)(function)


def print_json(value: Any) -> None:
    """Print one JSON value on stdout."""
    typer.echo(replace_surrogates(json.dumps(value, indent=2, ensure_ascii=False)))


def print_notes(loaded: LoadedRecipe) -> None:
    """Print what loading a recipe noticed on stderr."""
    for note in loaded.notes:
        print(strip_control_chars(note), file=sys.stderr)


def find_template_problems(loaded: LoadedRecipe, stage: str, rows: Sequence[Any]) -> list[Problem]:
    """Why the model's chat template does not render some of these rows; torch is loaded only if there are any."""
    if not rows:
        return []
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    from modelwright.stages import specs

    return specs.find_template_problems(loaded, stage, rows)

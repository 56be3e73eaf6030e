"""The commands `megalite config init|from|show|explain|schema`. No torch here."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cli.options import AsJson, ConfigPath, OutputFile, Overrides, OverwriteFile
from launch.errors import LaunchError
from launch.output import Table, check_writable, console, print_json, write_file
from launch.runtime.logs import get_logger
from launch.runtime.printing import print_result, say
from launch.trainer.start.run_config import load_run_config
from megalite.config import Config
from megalite.config.deepspeed import check_pass_through
from megalite.config.suggestions import NAME, NUMBER, OptionPath, dotted, option_paths
from megalite.training.learning_rate import rate_lines

if TYPE_CHECKING:
    from megalite.config.documentation.option_docs import OptionFacts

log = get_logger(__name__)
DEEPSPEED_KEYS = "https://www.deepspeed.ai/docs/config-json/"

config_app = typer.Typer(no_args_is_help=True)


@config_app.command()
def init(
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="HF_DIR",
            help="Hugging Face folder or hub id whose weights to start from; or the name of a published model, such as "
            "llama3-8b, to train its sizes from random weights.",
        ),
    ] = None,
    output: OutputFile = None,
    overwrite: OverwriteFile = False,
) -> None:
    """Write a commented config with the options that most runs set; it loads as it is.

    Without --from it describes a small model, which trains from random weights. With it, the run starts from the
    weights of a Hugging Face model, whose sizes need not be given.

    Example: `megalite config init -o config.yaml`
    """
    from megalite.config.documentation.starter import SourceOfWeights, starter_config

    weights = None
    if source is not None:
        from launch.conversion.huggingface.folder_lookup import hub_config, is_hub_model
        from megalite.config.known_models import names_near, run_text

        if not Path(source).exists() and (text := run_text(source)) is not None:
            _write(text, output, overwrite)
            return
        if not is_hub_model(Path(source)):
            near = " or ".join(names_near(source))
            meant = f", nor the name of a published model: did you mean {near}?" if near else ""
            raise LaunchError(
                f"--from {source}: {Path(source).absolute()} is no folder with a config.json, nor is it a hub id "
                f"(organisation/name){meant}"
            )
        folder, model = hub_config(Path(source))
        weights = SourceOfWeights(source, folder, model.max_position_embeddings)
    _write(starter_config(weights), output, overwrite)
    if output is not None:
        say(f"wrote {output}; its first lines say how to go on")


@config_app.command("from")
def from_(
    files: Annotated[
        list[str],
        typer.Argument(help="Files of one stack, then section.option=value ...", metavar="FILE... [OVERRIDES]"),
    ],
    kind: Annotated[
        str | None, typer.Option(help="deepspeed, megatron, neox or torchtitan; default: as recognised.")
    ] = None,
    output: OutputFile = None,
    overwrite: OverwriteFile = False,
    as_json: AsJson = False,
) -> None:
    """Write a config from the files of another stack, with a table of what became of each word.

    Reads a DeepSpeed JSON; a script with flags of Megatron-LM or Megatron-DeepSpeed, its log or arguments as JSON; YAML
    files of GPT-NeoX, merged; or a TOML file of torchtitan. Nothing is run. Contradictions are all told at once.

    Example: `megalite config from pretrain_gpt.sh model.vocab_size=50257 -o config.yaml`
    """
    from launch.migration.reading import kind_named, read_files
    from launch.migration.report import config_text, table_of
    from launch.migration.translation import migrate

    paths = [Path(word) for word in files if "=" not in word or Path(word).exists()]
    overrides = [word for word in files if Path(word) not in paths]
    if not paths:
        raise LaunchError("no file is given: `megalite config from FILE... [section.option=value]...`")
    _check_output(output, overwrite)
    found, settings, notes = read_files(paths, kind_named(kind))
    migrated = migrate(found, settings, overrides)
    if as_json:
        print_json({"config": migrated.values(), "words": [line._asdict() for line in migrated.lines], "notes": notes})
        return
    table = table_of(migrated)
    _write(config_text(found, paths, migrated), output, overwrite)
    table.print(console(stderr=output is None))
    for note in notes:
        log.warning(note)
    if migrated.filled:
        log.warning(f"not in the files, so a first value stands there: {', '.join(migrated.filled)}")
    if output is not None:
        say(f"wrote {output}; check it with `megalite train {quote(str(output))} --dry-run`")


def _check_output(output: Path | None, overwrite: bool) -> None:
    if output is not None:
        if output.exists() and not overwrite:
            raise LaunchError(f"{output} is there already: give --overwrite, or write another file")
        check_writable(output)


def _write(text: str, output: Path | None, overwrite: bool) -> None:
    """Prints the text of a config, or writes it to a file that is not there yet."""
    if output is None:
        print_result(text, end="")
        return
    _check_output(output, overwrite)
    write_file(output, text)


@config_app.command()
def show(config_path: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the config with all defaults filled in, and below it the learning rate at the steps where it turns.

    Example: `megalite config show configs/quickstart.yaml training.steps=20`
    """
    config = load_run_config(config_path, overrides or [])
    if as_json:
        print_json(config.model_dump(mode="json"))
    else:
        lines = ["learning rate", *(f"  {line}" for line in rate_lines(config))]
        print_result(config.to_yaml() + "".join(f"# {line}\n" for line in lines), end="")


def _names_from(incomplete: str) -> list[str]:
    """Completes a name on the command line."""
    return [name for path in option_paths(Config) if (name := dotted(path)).startswith(incomplete)]


@config_app.command()
def explain(
    option: Annotated[
        str | None, typer.Argument(help="Option or section; default: all sections.", autocompletion=_names_from)
    ] = None,
) -> None:
    """Explain an option: its values, default, meaning and an example; of a section, all its options.

    Example: `megalite config explain training.steps`
    """
    from megalite.config.documentation.option_docs import facts_of, options_in
    from megalite.config.errors import unknown_option

    path = tuple(option.split(".")) if option else ()
    if path and path not in option_paths(Config):
        if path[0] == "deepspeed":
            _explain_deepspeed(path)
            return
        raise LaunchError(unknown_option(path, None, Config)[0])
    if path:
        _print_facts(facts_of(path))
    inner = [one for at in (path, (*path, NAME), (*path, NUMBER)) for one in options_in(at)]
    if inner:
        rows = [(one.path[-1], one.values.replace("`", ""), one.default, one.description) for one in inner]
        columns = ("option" if path else "section", "values", "default", "meaning")
        Table(columns, rows, text_columns=range(len(columns))).print()


def _print_facts(about: OptionFacts) -> None:
    is_word = about.default in ("required", "derived")
    default = "" if not about.default else f"; {about.default if is_word else f'default {about.default}'}"
    say(f"{dotted(about.path)}: {about.values.replace('`', '')}{default}\n{about.details or about.description}")
    if about.example is not None:
        say(f"\non the command line:\n  {about.override}\nin a config:\n{indent(about.in_file, '  ')}", end="")


def _explain_deepspeed(path: OptionPath) -> None:
    """Says of an option of DeepSpeed's own whether it may be set, as loading a config does."""
    options: Any = {}
    for name in reversed(path[1:]):
        options = {name: options}
    try:
        check_pass_through(options)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    say(f"{dotted(path)} is passed on to DeepSpeed as it is, which explains it at {DEEPSPEED_KEYS}")


@config_app.command()
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/options.md instead, with all options in words.")
    ] = False,
) -> None:
    """Print the JSON Schema (2020-12) of all options, for editors and other programs.

    Example: `megalite config schema > megalite.schema.json`
    """
    if markdown:
        from megalite.config.documentation.option_docs import options_page

        print_result(options_page(), end="")
        return
    from megalite.config.documentation.schema import json_schema

    print_json(json_schema())

"""The `pedigree` command. Commands import everything except typer lazily, so help, completion and usage errors are instant."""

import codecs
import locale
import os
import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pedigree.pipelines.cli import artifact_commands, init, looking, recipes, rows, running, schedules
from pedigree.pipelines.cli.console import echo, interrupt_on_sigterm
from pedigree.pipelines.telemetry import no_telemetry

HELP = """Run LLM post-training recipes as graphs of versioned stages, with the full lineage of every model.

A recipe is one YAML file: a graph of stages (prepare data, SFT, DPO, RLVR, evaluate, ...). Each stage produces one artifact: a
folder with a payload and a provenance record. A stage whose configuration, code version and inputs are unchanged does not run
again, so re-running the same command after a crash resumes where it stopped.

\b
Examples:
  pedigree init my-project                     start a project
  pedigree recipes                             list the recipes
  pedigree new mine --from dpo                 write a recipe to start from
  pedigree import config.yaml                  translate a config of TRL
  pedigree plan tiny                           show what would run, and why
  pedigree rehearse tiny                       test-run it with tiny models
  pedigree run tiny                            run it, or resume it
  pedigree run tiny --set dpo_2.loss.beta=2.0  run a variant
  pedigree run tiny --commit                   commit the results to git
  pedigree report tiny                         write an HTML report
  pedigree lineage tiny/rlvr                   show a model's full ancestry
  pedigree diff tiny/dpo_1 tiny/dpo_2          compare two artifacts
  pedigree trace arithmetic-3f2a               find a row and its models
  pedigree export tiny/rlvr ./my-model         export to Hugging Face format
  pedigree verify                              rehash and check everything
  pedigree reproduce ./my-model                rebuild a model and compare
  pedigree deploy tiny --cron "0 3 * * *" --work-pool here  run it every night
  pedigree push tiny                           upload to the DVC remote

\b
Terms:
  recipe    a YAML file in configs/recipes
  variant   a recipe changed with --set: RECIPE+HASH
  stage     a node of the graph
  artifact  a stage's output: artifacts/RECIPE/STAGE
  profile   how and where to run (configs/execution); never affects what a
            result means
"""

GROUPS = {
    "Start": ("init", "new", "import"),
    "Run": ("run", "join", "cancel", "rehearse", "plan"),
    "Look": ("status", "jobs", "logs", "report", "models"),
    "Recipes": ("recipes", "show", "validate", "pin", "compile"),
    "Artifacts": ("lineage", "diff", "verify", "export", "reproduce", "push", "pull"),
    "Rows": ("trace", "forget"),
    "Schedules": ("deploy", "serve", "schedules"),
    "Maintenance": ("doctor", "variants", "scratch", "gc"),
}
"""Section of the help → its commands."""


class Grouped(TyperGroup):
    """Lists commands by section."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:  # typer passes on how pydantic begins a message
            error.message = error.message.removeprefix("Value error, ")
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            rows = [(name.ljust(width), self.commands[name].get_short_help_str(formatter.width - width - 6)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    cls=Grouped, help=HELP, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 130},
)  # fmt: skip
for part in (init, running, looking, schedules, recipes, artifact_commands, rows):
    app.add_typer(part.commands)


def _show_version(wanted: bool) -> None:
    if wanted:
        from pedigree.pipelines.cli.errors import version_text

        echo(version_text())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show version, commit and Python version, and exit.")
    ] = False,
) -> None:
    """Define the global options."""


def _restart_in_utf8() -> None:
    """Restart in Python's UTF-8 mode in a locale with another encoding: recipes, templates and records are UTF-8 on every machine."""
    if not sys.flags.utf8_mode and codecs.lookup(locale.getencoding()).name != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # for child processes
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def main() -> None:
    """Run the command.

    Exit codes: 0 success, 1 failure, 2 usage error (in the command or in a file), 70 bug in Pedigree, 130 interrupted.
    """
    _restart_in_utf8()
    try:
        interrupt_on_sigterm()
        for stream in (sys.stdout, sys.stderr):  # a file or pipe gets UTF-8, as JSON needs; a terminal what it can show
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="backslashreplace")
        no_telemetry()
        app(prog_name="pedigree")
    except KeyboardInterrupt:  # before the command has begun, while typer builds it
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output is gone, e.g. `| head`
        sys.exit(1)
    except Exception as error:  # PedigreeError becomes one message; anything else is a bug
        from pedigree.pipelines.cli.errors import end

        sys.exit(end(error))


if __name__ == "__main__":
    main()

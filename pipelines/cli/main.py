"""The command `pedigree`. Everything but typer is imported inside the commands: help, completion and errors are instant."""

import sys
from typing import Annotated

import typer

from pipelines.cli import artifacts, git, looking, recipes, rehearsing, rows, running, schedules, scratch
from pipelines.cli.console import say
from pipelines.cli.quiet import no_telemetry

HELP = """Every model with its pedigree: whole post-training recipes as chains of versioned stages.

A recipe is one YAML file: a graph of stages (prepare data, SFT, DPO, RLVR, evaluate, ...). Each stage makes one artifact, a
folder with a payload and the record of what it was made from. A stage whose configuration, code version and inputs have not
changed is not run again, so typing the same command after a crash goes on where it stopped.

\b
An example:
  pedigree recipes                                   what there is
  pedigree plan tiny                                 what would run, and why
  pedigree rehearse tiny                             run it small, on the CPU, with made rows and tiny models
  pedigree run tiny                                  run it; again after Ctrl-C or a crash
  pedigree run tiny --set dpo_2.loss.beta=2.0        a variant: shares every stage that the change does not touch
  pedigree run tiny --commit                         commit its results to git, with ids and scores in the message
  pedigree report tiny                               one page: scores, curves, samples, data, lineage
  pedigree lineage tiny/rlvr                         all that a model was made from
  pedigree diff tiny/dpo_1 tiny/dpo_2                how two artifacts differ, and where their ancestry first did
  pedigree trace arithmetic-3f2a                     where a row stands, and which models were given it
  pedigree export tiny/rlvr ./my-model               a Hugging Face folder with its pedigree inside
  pedigree verify                                    hash every byte again and check the chain of records
  pedigree reproduce ./my-model                      make it again from its records, and compare
  pedigree deploy tiny --cron "0 3 * * *" --work-pool here   every night; what has not changed is not run again
  pedigree push tiny                                 send artifacts to the DVC remote; `pull` brings them

\b
Words:
  recipe    a YAML file in configs/recipes        variant  a recipe with --set, RECIPE+HASH
  stage     one box of the graph                  artifact its result, artifacts/RECIPE/STAGE
  profile   how and where to run: configs/execution; never changes what the result means
"""

app = typer.Typer(
    help=HELP, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 130},
)  # fmt: skip
for part in (running, rehearsing, looking, schedules, recipes, scratch, artifacts, rows, git):
    app.add_typer(part.commands)


def _show_version(wanted: bool) -> None:
    if wanted:
        from pipelines.cli.version import version_text

        say(version_text())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show version, commit and Python, and exit.")
    ] = False,
) -> None:
    """Options of `pedigree` itself."""


def main() -> None:
    """Runs the command.

    Exit codes: 0 done, 1 failed, 2 wrong usage (in the command or in a file), 70 a bug of Pedigree, 130 interrupted.
    """
    no_telemetry()
    try:
        app(prog_name="pedigree")
    except BrokenPipeError:  # whoever read the output has gone, e.g. `| head`
        sys.exit(1)
    except Exception as error:  # the boundary of the command: our own errors become one message, all others are bugs
        from pipelines.cli.errors import end

        sys.exit(end(error))


if __name__ == "__main__":
    main()

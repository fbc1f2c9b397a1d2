"""Arguments and options that several commands take."""

from typing import Annotated

import typer

from pedigree.pipelines.cli import completion

Recipe = Annotated[
    str,
    typer.Argument(
        help="Recipe name in configs/recipes, a variant RECIPE+HASH, or a path.", show_default=False, autocompletion=completion.recipes
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="STAGE.FIELD=VALUE", help="Override a recipe field, which makes a variant. Repeatable.")
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="STAGE", help="Only this stage. Repeatable.", autocompletion=completion.stages),
]
From = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="STAGE", help="This stage and all its descendants. Repeatable.", autocompletion=completion.stages),
]
Until = Annotated[
    list[str] | None,
    typer.Option("--until", metavar="STAGE", help="This stage and all its ancestors. Repeatable.", autocompletion=completion.stages),
]
Force = Annotated[
    list[str] | None,
    typer.Option(
        "--force", metavar="STAGE", help="Re-run this stage even if it is up to date. Repeatable.", autocompletion=completion.stages
    ),
]
Profile = Annotated[
    str | None,
    typer.Option("--execution", "--profile", metavar="PROFILE", help="Execution profile (name or path); defaults to the recipe's.",
                 autocompletion=completion.profiles),
]  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document (see docs/cli.md) on stdout and everything else on stderr.")]

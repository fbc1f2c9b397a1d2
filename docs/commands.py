"""The reference page of the command line, from the commands themselves: `python -m docs.generate` writes `docs/cli.md`."""

import inspect
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from pipelines.cli.main import app

HEAD = """# The command line

<!-- Written by `python -m docs.generate`; do not edit. -->

`pedigree COMMAND --help` says the same in the terminal. `pedigree --version` tells version, commit and Python.
`pedigree --install-completion` makes the shell complete commands, recipes, stages, profiles and artifacts after TAB (bash, zsh, fish,
PowerShell); `pedigree --show-completion` prints the script, to install it by hand.

| exit code | |
|---|---|
| 0 | done |
| 1 | something failed, differs or was interrupted on the way; what was finished is kept |
| 2 | wrong usage: an option, a recipe, a profile or a file that the message names |
| 70 | a bug of Pedigree: the message says where its traceback is (`.pedigree/bugs/`); please report it with that file |
| 130 | interrupted by Ctrl-C or SIGTERM |
"""
DOCUMENTS = """## Output for programs

`run`, `rehearse`, `plan`, `status`, `jobs`, `trace` and `forget` take `--json`: stdout holds one JSON document, printed at the end, and
everything else goes to stderr. Exit codes stay the same. Where a command ends with 2 or 70, stdout is empty. `schema_version` is raised
when a field changes its name or meaning; new fields may come without that.

All begin with `schema_version` (1) and `command`, and all but `jobs`, `trace` and `forget` go on with `recipe` (for a variant
`RECIPE+HASH`), `source` (what was typed) and `overrides` (a list of `STAGE.FIELD=JSON`). Sizes are bytes, times seconds, `address` is
`RECIPE/STAGE`.

| `plan` | |
|---|---|
| `stages` | each with `address`, `kind`, `state`, `reasons` (list of texts), `disk_bytes` (estimate, or null), `batch` (text or null) |
| `state` | `up_to_date`, `in_the_remote`, `cached` (it will be restored), `will_run`, `depends` (on a stage that will run) |
| `to_run` | how many stages are neither `up_to_date` nor `in_the_remote` |
| `disk` | `needed_bytes` (of artifacts: without reflinks DVC's cache takes as much again), `stages_of_unknown_size`, `free_bytes` |
| `time` | of the stages to run: `seconds` one after another, `wall_seconds` with those side by side that have room, `gpu_hours`, |
| | `stages_of_unknown_time` |
| `slots` | that the profile has, here: how many stages may run side by side |
| `published` | what the recipe says of the work that it follows (`sources`, `harness`, `scores`, `hardware`, `differs`, `lacks`), or null |
| `fits` | whether no stage to run needs more memory than the profile's machine has; else the exit code is 1 |
| `estimate` of a stage | `parameters`, `memory` (where a model takes part, unless `unknown` says why not), `amounts`, `time`, `gpus`, |
| | `gpu_hours`, `checkpoint_bytes`, `misfit` (what is lacking, and `remedies`, or null); formulas: [plan.md](plan.md) |
| `memory` | `per_rank` and `loading` (term → bytes), `peak_bytes`, `bound_bytes`, `ranks`, `host_bytes_per_rank`, `tokens_a_pass`; |
| | `engine` of stages with vLLM: `ranks`, `weights`, `overhead`, `kv_cache`, `least_kv_cache`, `share_bytes`, `room_for_kv_cache` |
| `amounts` | `rows`, `document_tokens`, `steps`, `tokens`: null, or `value` and `how` (`counted`, `estimated`, `at_most`) |

| `status` | |
|---|---|
| `stages` | each with `address`, `kind`, `state`, `reasons`, `changed_code` (files changed since), `job` (as in `jobs`, or null) |
| `state` | `done`, `in_the_remote`, `stale`, `not_built`, `running` |
| `uncommitted` | files of the ledger that git has not committed |

| `jobs` | |
|---|---|
| `jobs` | each with `address`, `kind`, `pid`, `step`, `total_steps`, `numbers`, `seconds_since_heartbeat`, `waited_for_by` (or null) |
| | `elsewhere`: it runs on another machine, or in another container; `pid` is null then, and `host` names it where it is known |
| | `alive`: true, or null where a job elsewhere has given no sign of life for `seconds_since_heartbeat`, and may be alive all the same |

| `run` | |
|---|---|
| `outcome` | `done`, `failed`, `interrupted` |
| `seconds` | how long the command took |
| `stages` | each with `address`, `kind`, `outcome`; empty where the run was interrupted |
| `outcome` of a stage | `unchanged`, `remote` (done, its files are in the remote), `restored`, `ran`, `attached` (job of an earlier run) |
| | or `failed`, `not_run` |
| | with `seconds`, `id` and `content` where it is done; `cause`, `message` and `log` where it failed; `message` where it was not run |
| `scores` | evaluation → scores, as in `payload/scores.json` |
| `waived` | evaluation → its scores that a waiver touches: `policy`, `task`, `contaminated` and `clean` (`n`, `mean`, `low`, `high`, or |
| | null), `waivers` (each with `stage`, `benchmark`, `because`, `rows`) |
| `report`, `commit`, `notes` | path of the report or null; `id` and `title` of the commit that `--commit` made, or null; list of texts |

| `rehearse` | what `run` says of the rehearsal, and |
|---|---|
| `recipe`, `source`, `overrides` | those of the real recipe |
| `project`, `profile` | folder of the rehearsal's project; name of its profile |
| `proved` | `rows`, `decontamination`, `models`, `training`, `suites` (lists), `verifiers` (name → `right`, `wrong`, `unknown`) |
| `not_proved` of `proved` | each with `what` and `changes`: `where` (address or profile), `setting`, `real`, `rehearsed`, `reason` |

| `trace` | |
|---|---|
| `ids` | of the rows, without the numbers of copies; `looked_in`: how many artifacts of rows |
| `places` | each with `address`, `kind`, `type`, `content`, `ids` (of its rows), `policies` (who answered: `label`, `address`, `content`) |
| | and `scores` (`task`, `policy`, `score`, null where unknown), `handed_on` (all its rows are those of other stages), `given` |
| | (contents of the sets that it takes rows from) |
| `brought_in` | by which stage: `address`, `source`, `origins` (each a `name` with `licences` and `generators`; several: one of them) |
| `dropped` | each with `address`, `kind`, `id` (empty: it never had one), `reason`, `detail`, `by` (for whose sake, if this was traced) |
| `reached` | each with `id`, `address`, `kind`, `type`, `content`, `how` (`trained on it`, `goes back to it`), `way`, `certain` |
| `not_looked_in` | address → why |

| `forget` | `ids` and `not_looked_in` as above, and |
|---|---|
| `changes` | each with `recipe`, `stage`, `filters` (all that should stand there) |
| `again` | each with `address`, `kind`, `part` (`data`, `models`, `scores`), `why`, `names`, `seconds`, `gpu_hours` (or null) |
| `unmade`, `strays` | addresses below that are not made, or not here; of what no recipe makes any more |
| `unread` | recipe or variant that cannot be read → why |
| `missing` | where no stage is known to have brought it in: addresses of those that may have, and are not here or could not be looked in |
| `copies` | what evidence says of other rows, for whose sake these went elsewhere |

## Commands
"""


def page() -> str:
    """Exit codes, documents, and every command that is not hidden."""
    commands: dict[str, Any] = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    parts = [HEAD, DOCUMENTS]
    parts += ["\n".join(_command(name, command)) for name, command in commands.items() if not command.hidden]
    return "\n".join(parts).rstrip() + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join(["pedigree", name, *(_argument(argument) for argument in arguments), "[OPTIONS]"])
    yield from (f"### {name}", "", f"`{usage}`", "", inspect.cleandoc(command.help or ""), "")
    rows = [(_argument(argument), argument.help or "") for argument in arguments]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    rows += [(_option(option), option.help or "") for option in options if not option.hidden and option.name != "help"]
    if rows:
        yield from ("| | |", "|---|---|")
        yield from (f"| `{shown}` | {help_text} |".replace("\n", " ") for shown, help_text in rows)
        yield ""


def _argument(argument: Any) -> str:
    name = (argument.metavar or str(argument.name).upper()).strip("[].")
    many = "..." if argument.nargs == -1 or argument.multiple else ""
    return f"{name}{many}" if argument.required else f"[{name}{many}]"


def _option(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or 'VALUE'}".replace("|", "\\|")
    return ", ".join(option.opts) + value

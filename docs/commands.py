"""Command line reference generated from the commands: `python -m docs.generate` writes `docs/cli.md`."""

import inspect
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from pedigree.pipelines.cli.main import GROUPS, app

HEAD = """# The command line

<!-- Written by `python -m docs.generate`; do not edit. -->

`pedigree COMMAND --help` shows the same in the terminal. `pedigree --version` prints the version, commit and Python version.
`pedigree --install-completion` enables tab completion of commands, recipes, stages, profiles and artifacts (bash, zsh, fish, PowerShell);
`pedigree --show-completion` prints the script for manual installation.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | something failed, differs or was interrupted; finished work is kept |
| 2 | usage error in an option, recipe, profile or file; the message names it |
| 70 | a bug in Pedigree: the message gives the path of the traceback (in `.pedigree/bugs/`); please report it with that file |
| 130 | interrupted by Ctrl-C or SIGTERM |
"""
DOCUMENTS = """## Output for programs

`run`, `rehearse`, `plan`, `status`, `jobs`, `trace` and `forget` accept `--json`: one JSON document is printed to stdout at the end, and
everything else goes to stderr. Exit codes do not change. If a command exits with 2 or 70, stdout is empty. `schema_version` is raised when
a field changes its name or meaning; new fields may appear without a new version.

All documents begin with `schema_version` (1) and `command`; all but `jobs`, `trace` and `forget` continue with `recipe` (for a variant,
`RECIPE+HASH`), `source` (as typed) and `overrides` (a list of `STAGE.FIELD=JSON`). Sizes are in bytes, times in seconds, and `address` is
`RECIPE/STAGE`.

| `plan` | |
|---|---|
| `stages` | each with `address`, `kind`, `state`, `reasons` (list of strings), `disk_bytes` (estimate, or null), `batch` (string or null) |
| `state` | `up_to_date`, `in_the_remote`, `cached` (will be restored), `will_run`, `depends` (on a stage that will run) |
| `to_run` | number of stages that are neither `up_to_date` nor `in_the_remote` |
| `disk` | `needed_bytes` (artifacts only; without reflinks, DVC's cache takes the same again), `stages_of_unknown_size`, `free_bytes` |
| `time` | of the stages to run: `seconds` sequentially, `wall_seconds` with as much parallelism as fits, `gpu_hours`, |
| | `stages_of_unknown_time` |
| `slots` | the profile's slots on this machine: how many stages can run in parallel |
| `published` | the recipe's account of the work it follows (`sources`, `harness`, `scores`, `hardware`, `differs`, `lacks`), or null |
| `fits` | true if every stage to run fits the memory of the profile's machine; otherwise the exit code is 1 |
| `estimate` of a stage | `parameters`, `memory` (if a model is involved, unless `unknown` gives the reason), `amounts`, `time`, `gpus`, |
| | `gpu_hours`, `checkpoint_bytes`, `misfit` (the shortfall and `remedies`, or null); formulas: [plan.md](plan.md) |
| `memory` | `per_rank` and `loading` (term → bytes), `peak_bytes`, `bound_bytes`, `ranks`, `host_bytes_per_rank`, `tokens_a_pass`; |
| | `engine` of stages with vLLM: `ranks`, `weights`, `overhead`, `kv_cache`, `least_kv_cache`, `share_bytes`, `room_for_kv_cache` |
| `amounts` | `rows`, `document_tokens`, `steps`, `tokens`: null, or `value` and `how` (`counted`, `estimated`, `at_most`) |

| `status` | |
|---|---|
| `stages` | each with `address`, `kind`, `state`, `reasons`, `changed_code` (files changed since it ran), `job` (as in `jobs`, or null) |
| `state` | `done`, `in_the_remote`, `stale`, `not_built`, `running` |
| `uncommitted` | ledger files not committed to git |

| `jobs` | |
|---|---|
| `jobs` | each with `address`, `kind`, `pid`, `step`, `total_steps`, `numbers`, `seconds_since_heartbeat`, `waited_for_by` (or null) |
| | `elsewhere`: runs on another machine or in another container; `pid` is then null, and `host` names it if known |
| | `alive`: true, or null if a job elsewhere has sent no heartbeat for `seconds_since_heartbeat` but may still be alive |

| `run` | |
|---|---|
| `outcome` | `done`, `failed`, `interrupted` |
| `seconds` | duration of the command |
| `stages` | each with `address`, `kind`, `outcome`; empty if the run was interrupted |
| `outcome` of a stage | `unchanged`, `remote` (done, files in the remote), `restored`, `ran`, `attached` (job of an earlier run) |
| | or `failed`, `not_run` |
| | with `seconds`, `id` and `content` if done; `cause`, `message` and `log` if failed; `message` if not run |
| `scores` | evaluation → scores, as in `payload/scores.json` |
| `waived` | evaluation → its scores affected by a waiver: `policy`, `task`, `contaminated` and `clean` (`n`, `mean`, `low`, `high`, or |
| | null), `waivers` (each with `stage`, `benchmark`, `because`, `rows`) |
| `report`, `commit`, `notes` | path of the report or null; `id` and `title` of the commit made by `--commit`, or null; list of strings |

| `rehearse` | the fields of `run` for the rehearsal, and |
|---|---|
| `recipe`, `source`, `overrides` | those of the real recipe |
| `project`, `profile` | folder of the rehearsal project; name of its profile |
| `proved` | `rows`, `decontamination`, `models`, `training`, `suites` (lists), `verifiers` (name → `right`, `wrong`, `unknown`) |
| `not_proved` of `proved` | each with `what` and `changes`: `where` (address or profile), `setting`, `real`, `rehearsed`, `reason` |

| `trace` | |
|---|---|
| `ids` | of the rows, without copy numbers; `looked_in`: number of row artifacts searched |
| `places` | each with `address`, `kind`, `type`, `content`, `ids` (of its rows), `policies` (the authors: `label`, `address`, `content`) |
| | and `scores` (`task`, `policy`, `score`, null where unknown), `handed_on` (all its rows come from other stages), `given` |
| | (contents of the datasets it takes rows from) |
| `brought_in` | the importing stage: `address`, `source`, `origins` (each a `name` with `licences` and `generators`; |
| | if there are several, one of them applies) |
| `dropped` | each with `address`, `kind`, `id` (empty if it had none), `reason`, `detail`, |
| | `by` (the item or kept copy that caused it, if that was traced) |
| `reached` | each with `id`, `address`, `kind`, `type`, `content`, `how` (`trained on it`, `goes back to it`), `way`, `certain` |
| `not_looked_in` | address → reason |

| `forget` | `ids` and `not_looked_in` as above, and |
|---|---|
| `changes` | each with `recipe`, `stage`, `filters` (the complete new list) |
| `again` | to rebuild: each with `address`, `kind`, `part` (`data`, `models`, `scores`), `why`, `names`, `seconds`, `gpu_hours` (or null) |
| `unmade`, `strays` | addresses of descendants that are not built or not here; of artifacts that no recipe makes anymore |
| `unread` | recipe or variant that cannot be read → reason |
| `missing` | if the importing stage is unknown: addresses of candidates that are not here or could not be searched |
| `copies` | evidence about other rows that were kept where these were dropped as their copies |
"""


def page() -> str:
    """The page: exit codes, JSON documents, and every visible command."""
    commands: dict[str, Any] = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    parts = [HEAD, DOCUMENTS]
    for title, names in GROUPS.items():
        parts += [f"## {title}\n", *("\n".join(_command(*one)) for name in names for one in _with_subcommands(name, commands[name]))]
    return "\n".join(parts).rstrip() + "\n"


def _with_subcommands(name: str, command: Any) -> list[tuple[str, Any]]:
    inner: dict[str, Any] = getattr(command, "commands", {})
    return [(f"{name} {word}", one) for word, one in inner.items()] or [(name, command)]


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

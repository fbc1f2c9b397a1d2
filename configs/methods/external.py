"""Config of the stage that runs a command of other software."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field, field_validator

from pedigree.configs.base.frozen import Arrived, Many
from pedigree.configs.base.mistakes import nearest
from pedigree.configs.base.paths import RelativePath
from pedigree.configs.rows.row_sources import Licensed

OUTPUT, CHECKPOINT = "output", "checkpoint"
ENDED = "command.json"
"""In the scratch folder of a stage whose command has ended with success: what it wrote is complete."""
NAME = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
"""A name that a folder replaces if it is `{output}` or an input's label. `${HOME}` is left to the shell, and `{print}` to awk."""


class External(Licensed):
    """Runs a command of other software; what it writes becomes an artifact of this recipe."""

    command: Many[str] = Field(min_length=1)
    """The program and its arguments; no shell reads them. In each, `{output}` is replaced by the folder to write to, and `{LABEL}` by the
    folder of the input with this label: a model as transformers saves it, or rows in `rows.jsonl`. Other names in braces are left to the
    program, except misspelled ones, which are refused."""
    files: Many[RelativePath] = ()
    """Files and folders of the project that the command reads: scripts, configs. It runs in a folder with copies of them, at the same
    paths, and nothing else of the project. Their content is part of identity."""
    output: Literal["policy", "conversation", "prompt", "preference", "report"]
    """What it writes to `{output}`: a model folder with safetensors, tokenizer and chat template; JSONL, JSON or Parquet files in a
    [layout](../layouts.md) of these rows; or, for `report`, a file `metrics.json` with numbers by name, which may be nested."""
    resume: Many[str] | None = None
    """For programs that resume from checkpoints in `{output}`: arguments to append to the command after an attempt that ended early, in
    whose output it then continues. `{checkpoint}` is replaced by the newest folder `checkpoint-N` there with a `trainer_state.json`, which
    transformers' trainer writes last. `[]` if the program looks for checkpoints by itself. By default, and without such a checkpoint, an
    attempt starts with an empty folder."""
    rehearse: Many[str] = Field(default=(), exclude=True)
    """Arguments to append to the command in rehearsals, e.g. `[--max_steps, "2"]`."""

    @field_validator("files")
    @classmethod
    def _check_files(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for place, name in enumerate(value):
            if name in value[:place] or any(name.startswith(f"{other}/") for other in value):
                raise ValueError(f"files names {name} twice: name each file once, by itself or by its folder")
        return value


def title_of(config: Mapping[str, Any]) -> str:
    """What people see as the origin of the output, from a recorded config: the first file, else the program."""
    words = [*(config.get("files") or ()), *(PurePosixPath(word).name for word in (config.get("command") or ())[:1])]
    return next(iter(words), "unknown")


def filled(words: Sequence[str], folders: Mapping[str, str]) -> list[str]:
    """Arguments with the folders of inputs and output in place of their names."""
    return [NAME.sub(lambda found: folders.get(found[1], found[0]), word) for word in words]


def left_by_command(scratch: Path, resume: Sequence[str] | None) -> Path | None:
    """What an earlier attempt has left to continue from: the output of a command that has ended; with `resume`, otherwise, the newest
    complete checkpoint in it, or the output if the command looks for checkpoints itself.
    """
    output = scratch / OUTPUT
    if not any(output.glob("*")):
        return None
    if resume is None or (scratch / ENDED).exists():
        return output if (scratch / ENDED).exists() else None
    found = [path.parent for path in output.glob("checkpoint-*/trainer_state.json") if path.parent.name.rpartition("-")[2].isdigit()]
    needed = any(CHECKPOINT in NAME.findall(word) for word in resume)
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None if needed else output)


def search_path(environment: Path | None) -> str:
    """`PATH` for a command: the programs of a Python environment, by default of the one that runs Pedigree, come first."""
    programs = Path(sys.executable).parent if environment is None else environment / "bin"
    return os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)])


def missing_program(config: External, environment: Path | None) -> str | None:
    """Why this machine cannot start the command; None also for a program among its `files`."""
    program = config.command[0]
    if environment is not None and not (environment / "bin").is_dir():
        return f"placement.environment {environment} has no folder bin: name the folder of a Python environment"
    if ("/" in program and not program.startswith("/")) or NAME.search(program) or shutil.which(program, path=search_path(environment)):
        return None
    where = "the environment of Pedigree" if environment is None else environment
    return f"{program} is neither in {where} nor on PATH: install it, or name an environment that has it in placement.environment"


def external_problem(config: External, arrived: Arrived) -> str | None:
    """Why the command and the inputs do not go together."""
    labels = [label for given in arrived.values() for label in given]
    known = [*labels, OUTPUT]
    named = {name for word in (*config.command, *config.rehearse) for name in NAME.findall(word)}
    resumed = {name for word in config.resume or () for name in NAME.findall(word)} - {CHECKPOINT}
    for label in labels:
        if known.count(label) > 1 or label == CHECKPOINT:
            return f"two folders of the command would be {{{label}}}: give the input another label, `{{LABEL: STAGE}}`"
        if not NAME.fullmatch(f"{{{label}}}"):
            return f"{{{label}}} is no name in a command: give the input another label, of letters, digits and `_`, `{{LABEL: STAGE}}`"
    for name in sorted((named | resumed) - {*known}):
        if nearest(name, [*known, CHECKPOINT]):  # others are the program's
            folders = ", ".join(f"{{{one}}}" for one in known)
            return f"the command names {{{name}}}, which is not an input: write one of {folders}{nearest(name, known)}"
    for label in labels:
        if label not in named:
            return f"the command does not use the input {label}: write {{{label}}} where it expects the folder, or remove the input"
    if not any(OUTPUT in NAME.findall(word) for word in config.command):
        return f"the command {shlex.join(config.command):.80} does not say where to write: write {{{OUTPUT}}} where it expects the folder"
    return None

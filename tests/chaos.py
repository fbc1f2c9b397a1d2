"""Kills and disturbs a recipe's run again and again, at named points and at random instants, and compares what comes out with a
quiet run.

    python tests/chaos.py --kills 100 --seed 1 --launcher slurm

A kill is SIGKILL: of the orchestrator, of a job, of one process of a job (a rank, the engine), of everything at once (a reboot),
or of whichever process comes by a named point (`data/host/faults.py`). A change is what else happens to a project that is at work: the
functions in `CHANGES` or, where a cluster runs the jobs, what happens in it (`chaos_clusters.py`). After it the same command is typed
again. Ends with exit code 1 if any artifact's content differs from the quiet run's, whose jobs are local, or DVC finds anything stale.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import waiting
from chaos_clusters import CLUSTERS, Slurm
from chaos_prefect import PrefectServer
from projects import BIN, CODE, call, contents, environment, fresh_project

from pedigree.configs.language.recipe import load_recipe
from pedigree.data.host.faults import FAULTS
from pedigree.pipelines.jobs.processes import MARK

RECIPE = "tiny"
POINTS = (
    "job started", "record.json written", "publish set aside", "publish renamed", "commit cached", "lock written", "lock replaced",
    "job finished", "checkpoint written", "checkpoint renamed", "answers kept",
)  # fmt: skip
TRAINED, CHUNKED = {"sft", "reward_model", "preference_train", "rlvr"}, {"sample", "evaluate", "reference_logprobs"}
ONLY_IN = {"checkpoint written": TRAINED, "checkpoint renamed": TRAINED, "answers kept": CHUNKED}
"""Points that only these kinds of stages come by."""
VICTIMS = ("orchestrator", "job", "one process of a job", "everything")
LONGEST_S = 25.0
"""A random instant lies at most so long after the start of the command."""
POINT_S = 8.0
"""So long somebody is waited for who comes by a named point; then the next disturbance of the plan has its turn."""
PATIENCE_S = 600.0
MOST_FAILURES = 10
"""So often in a row the command may fail without having been disturbed in between."""
PROFILE = "\nplacement: {slots: 1"
PLACEMENT = "checkpoint_every_steps: 2, retries: 100"
EDIT = ("    epochs: 2\n", "    epochs: 3\n")
"""What the recipe says, and what it says for a while."""
DISK = "1500m"
"""Of the file system that a chain lies on, where one may be mounted."""


@dataclass
class Tally:
    """What the kills did."""

    kills: Counter[str] = field(default_factory=Counter)
    resumed_after_s: list[float] = field(default_factory=list)
    redone: list[float] = field(default_factory=list)
    """Per resumed job: share of its steps that had been done and were done again."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Changes that this machine does not allow."""
    chains: int = 0
    equal: int = 0
    """Artifacts of the chains with the content that the quiet run gave them."""
    different: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        found = ["", "| disturbance | times |", "|---|---|", *(f"| {name} | {count} |" for name, count in sorted(self.kills.items())), ""]
        found.append(f"{self.kills.total()} kills and changes in {self.chains} chains, {self.equal} artifacts equal to the quiet run's")
        if self.left_out:
            found.append(f"not possible on this machine: {', '.join(f'{count} x {name}' for name, count in self.left_out.items())}")
        if self.resumed_after_s:
            found.append(f"seconds from a kill to a working job: median {statistics.median(self.resumed_after_s):.1f}")
        if self.redone:
            found.append(f"work redone per resumed job: mean {100 * statistics.mean(self.redone):.1f} % of its steps")
        return found


class Run:
    """The command `pedigree run` in a project, and all its processes."""

    def __init__(self, project: Path, until: str | None, server: str | None = None) -> None:
        """`server` is the URL of a Prefect server that the run uses."""
        self.project, self.until, self.faults = project, until, project / "faults"
        self.faults.mkdir(exist_ok=True)
        chosen = [*(["--until", until] if until else []), "--prefect", "always" if server else "never"]
        env = environment() | {FAULTS: str(self.faults)} | ({"PREFECT_API_URL": server} if server else {})
        with (project / "chaos.log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(BIN / "pedigree"), "run", RECIPE, "--execution", "chaos", *chosen],
                cwd=project, env=env, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def jobs(self) -> list[int]:
        mark = f"{MARK}={self.project}/.pedigree/scratch/".encode()
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and any(item.startswith(mark) for item in (folder / "environ").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
            except OSError:
                continue
        return sorted(found)

    def deaths(self) -> list[str]:
        """The named points at which processes have died, in order."""
        log = self.faults / "died.log"
        return log.read_text().splitlines() if log.exists() else []

    def progress(self) -> dict[str, tuple[float, int, int]]:
        """Key of each unfinished stage → (time, step, total) of its job's last sign of life."""
        found = {}
        for path in self.project.glob(".pedigree/scratch/*/progress.json"):
            try:
                beat = json.loads(path.read_text())
            except OSError:
                continue
            found[path.parent.name] = (beat["time"], beat["step"], beat["total"])
        return found

    def kill(self, victim: str, rng: random.Random) -> bool:
        """Whether there was anything to kill."""
        jobs = self.jobs()
        chosen = {
            "orchestrator": [self.process.pid],
            "job": jobs,
            "one process of a job": [rng.choice(jobs)] if jobs else [],
            "everything": [self.process.pid, *jobs],
        }[victim]
        send(chosen, signal.SIGKILL)
        return bool(chosen)


def send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


# --- what happens to a project at work ---------------------------------------------------------------------------------


class NotHere(Exception):
    """This machine does not allow it."""


class NotNow(Exception):
    """Nothing is there that it could happen to."""


Change = Callable[[Run, random.Random], Run]
"""Returns the run to go on with."""


def pause(rng: random.Random, shortest: float, longest: float) -> None:
    """What is disturbed goes on for a random while, which is the point of it."""
    time.sleep(rng.uniform(shortest, longest))  # nothing is waited for


def edit_the_recipe(run: Run, rng: random.Random) -> Run:
    """Somebody tries another value, looks at the plan, and takes it back."""
    path = run.project / "configs" / "recipes" / f"{RECIPE}.yaml"
    text = path.read_text()
    assert EDIT[0] in text
    path.write_text(text.replace(EDIT[0], EDIT[1], 1))
    call(run.project, "pedigree", "plan", RECIPE, check=False)
    pause(rng, 1.0, 6.0)
    path.write_text(text)
    return run


def check_out_a_branch(run: Run, rng: random.Random) -> Run:
    """Somebody goes to another branch, on which the recipe says something else, and comes back."""
    for branch in ("other", "-"):
        subprocess.run(["git", "checkout", "-q", branch], cwd=run.project, check=True)
        pause(rng, 1.0, 6.0)
    return run


def run_twice(run: Run, rng: random.Random) -> Run:
    """The same command in a second terminal; one of the two is killed."""
    second = Run(run.project, run.until)
    pause(rng, 1.0, 8.0)
    killed, left = rng.sample([run, second], 2)
    send([killed.process.pid], signal.SIGKILL)
    killed.process.wait()
    return left


def run_another_clone(run: Run, rng: random.Random) -> Run:
    """A second clone of the same project wants the same cores; it is killed with its jobs after a while."""
    folder = run.project.with_name(f"{run.project.name}-clone")
    shutil.rmtree(folder, ignore_errors=True)
    clone = Run(chaos_project(folder), run.until)
    pause(rng, 4.0, 12.0)
    send([clone.process.pid], signal.SIGKILL)
    send(clone.jobs(), signal.SIGKILL)
    clone.process.wait()
    return run


def fill_the_disk(run: Run, rng: random.Random) -> Run:
    """Something else fills the disk, until somebody frees it again."""
    if not os.path.ismount(run.project.parent):
        raise NotHere
    filler = run.project.parent / "filler"
    left = rng.choice([0, 1 << 20, 8 << 20])
    with suppress(OSError), filler.open("wb") as stream:  # it is full
        stream.write(bytes(max(0, shutil.disk_usage(filler.parent).free - left)))
    with suppress(subprocess.TimeoutExpired):
        run.process.wait(rng.uniform(4.0, 12.0))
    filler.unlink(missing_ok=True)
    return run


def stop_and_go_on(run: Run, rng: random.Random) -> Run:
    """The machine sleeps, or somebody presses Ctrl-Z: everything or a part of it stands still for a while."""
    jobs = run.jobs()
    chosen = rng.choice([[run.process.pid], jobs, jobs[:1], [run.process.pid, *jobs]])
    send(chosen, signal.SIGSTOP)
    pause(rng, 2.0, 8.0)
    send(chosen, signal.SIGCONT)
    return run


def lose_the_server(run: Run, rng: random.Random) -> Run:
    """A run with a Prefect server goes on while that is away."""
    try:
        server = PrefectServer(run.project / ".pedigree" / "prefect-server")
    except AssertionError as error:
        raise NotHere from error
    try:
        send([run.process.pid], signal.SIGKILL)  # its jobs go on, and the next run finds them
        run.process.wait()
        again = Run(run.project, run.until, server.url)
        waiting.until(lambda: again.jobs() or again.process.poll() is not None)
        server.kill()
        pause(rng, 2.0, 8.0)
        return again
    finally:
        if server.process.poll() is None:
            server.kill()


def happens(harm: Callable[[random.Random], bool]) -> Change:
    """What happens in a cluster."""

    def change(run: Run, rng: random.Random) -> Run:
        if not harm(rng):
            raise NotNow
        return run

    return change


CHANGES: dict[str, Change] = {
    "recipe edit": edit_the_recipe,
    "branch checkout": check_out_a_branch,
    "two runners": run_twice,
    "another clone": run_another_clone,
    "full disk": fill_the_disk,
    "stopped and continued": stop_and_go_on,
    "server away": lose_the_server,
}


def chaos(
    folder: Path,
    planned: Sequence[str],
    seed: int,
    until: str | None,
    quiet: dict[str, str] | None,
    say: Callable[[str], None],
    cluster: Slurm | None = None,
) -> Tally:
    """Runs as many chains as it takes to place all disturbances.

    Args:
        folder: a new folder for the projects.
        planned: see `disturbances`.
        seed: of points, instants and victims.
        until: a stage at which the chains end; None for whole chains.
        quiet: contents by stage of an undisturbed run; None to make one.
        say: called with lines on what happens.
        cluster: runs the chains' jobs; those of the quiet run are local.
    """
    rng, tally = random.Random(seed), Tally()
    changes: Mapping[str, Change] = CHANGES if cluster is None else {name: happens(harm) for name, harm in cluster.harms.items()}
    if quiet is None:
        project = chaos_project(folder / "quiet")
        began = time.monotonic()
        call(project, "pedigree", "run", RECIPE, "--execution", "chaos", *(["--until", until] if until else []))
        quiet = contents(project)
        say(f"quiet run: {len(quiet)} artifacts in {time.monotonic() - began:.0f} s")
    plan = list(planned)
    rng.shuffle(plan)
    placed = [-1, -1]
    while plan:
        if placed[-2] == tally.kills.total():
            raise RuntimeError(f"two whole chains did not come by any of {sorted(set(plan))}")
        placed.append(tally.kills.total())
        tally.chains += 1
        with small_disk(folder / f"disk-{tally.chains}") as disk:
            project = chaos_project(disk / f"chain-{tally.chains}", cluster)
            one_chain(project, plan, rng, until, tally, say, changes)
            made = contents(project)
            wrong = sorted(name for name in quiet.keys() & made.keys() if made[name] != quiet[name])
            missing = sorted(set() if until else quiet.keys() - made.keys())
            stale = stale_stages(project, made.keys())
            tally.equal += len(made) - len(wrong)
            tally.different += [f"{project.name}/{name}" for name in sorted({*wrong, *missing, *stale})]
            say(f"chain {tally.chains}: {len(made) - len(wrong)} of {len(made)} artifacts equal; {len(stale)} stale for DVC {stale or ''}")
    return tally


def disturbances(count: int, until: str | None, changes: Iterable[str] = CHANGES) -> list[str]:
    """So many of them, of every kind in turn: each once before any comes again."""
    kinds = (
        [f"point: {name}" for name in points_before(until)],
        [f"instant: {name}" for name in VICTIMS],
        [f"change: {name}" for name in changes],
    )
    once = [name for row in zip_longest(*kinds) for name in row if name]
    return [*once, *(kind[i % len(kind)] for i in range(count) for kind in kinds)][:count]


def points_before(until: str | None) -> list[str]:
    """Those that a chain which ends at this stage comes by; None for a whole chain."""
    graph = load_recipe(CODE / "configs" / "recipes", RECIPE)
    made = graph.nodes if until is None else graph.ancestors([graph.find(until).address])
    kinds = {graph.nodes[address].kind for address in made}
    return [name for name in POINTS if name not in ONLY_IN or kinds & ONLY_IN[name]]


def stale_stages(project: Path, names: Iterable[str]) -> list[str]:
    """Those of the stages that DVC calls changed. (`dvc status -q` prints nothing, whatever it finds.)"""
    targets = [f"artifacts/{RECIPE}/dvc.yaml:{name}" for name in sorted(names)]
    said = call(project, "dvc", "status", "--json", *targets)
    return sorted(name.rpartition(":")[2] for name in json.loads(said[said.index("{") :]))


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own for a chain, where mounting one is allowed; else an ordinary folder."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def one_chain(
    project: Path,
    plan: list[str],
    rng: random.Random,
    until: str | None,
    tally: Tally,
    say: Callable[[str], None],
    changes: Mapping[str, Change],
) -> None:
    """Types the command until the chain is whole, and kills it while the plan says so."""
    run, failures, placed = Run(project, until), 0, tally.kills.total()
    while True:
        if run.process.poll() is not None:
            if run.process.returncode == 0:
                return
            failures, placed = (failures + 1, placed) if placed == tally.kills.total() else (1, tally.kills.total())
            if failures > MOST_FAILURES:
                raise RuntimeError(f"nothing disturbs it, and it fails again and again:\n{(project / 'chaos.log').read_text()[-3000:]}")
            run = Run(project, until)
        if not plan:
            run.process.wait(timeout=PATIENCE_S)
        elif plan[0].startswith("change: "):
            run = disturb(run, plan, rng, tally, say, changes)
        elif struck := strike(run, plan, rng):
            for planned in struck:
                plan.remove(planned)
                tally.kills[planned] += 1
                say(f"{tally.kills.total():3d}  {planned}")
            run = resume(run, tally, until)
        else:
            plan.append(plan.pop(0))  # what this chain did not come by, the next one may


def disturb(run: Run, plan: list[str], rng: random.Random, tally: Tally, say: Callable[[str], None], changes: Mapping[str, Change]) -> Run:
    """Makes the next change of the plan, at a random instant while a job is at work; returns the run to go on with."""
    if not comes_to_a_random_instant(run, rng, run.jobs):
        plan.append(plan.pop(0))
        return run
    planned = plan.pop(0)
    try:
        run = changes[planned.removeprefix("change: ")](run, rng)
    except NotHere:
        tally.left_out[planned] += 1
        return run
    except NotNow:
        plan.append(planned)
        return run
    tally.kills[planned] += 1
    say(f"{tally.kills.total():3d}  {planned}")
    return run


def strike(run: Run, plan: list[str], rng: random.Random) -> list[str]:
    """Kills as the plan says next; returns what of it came about: nothing when the command had ended by itself before."""
    kind, _, name = plan[0].partition(": ")
    if kind == "point":
        return strike_at_a_point(run, plan, rng)
    there = comes_to_a_random_instant(run, rng, lambda: name == "orchestrator" or run.jobs())
    return [plan[0]] if there and run.kill(name, rng) else []


def comes_to_a_random_instant(run: Run, rng: random.Random, when: Callable[[], object]) -> bool:
    """Waits for it, and for the condition; False if the command ends before."""
    instant = time.monotonic() + rng.uniform(1.0, LONGEST_S)
    waiting.until(lambda: run.process.poll() is not None or (time.monotonic() >= instant and when()), PATIENCE_S)
    return run.process.poll() is None


def strike_at_a_point(run: Run, plan: list[str], rng: random.Random) -> list[str]:
    """Kills whoever comes by any point that the plan still has: which is next hangs on how far the chain is."""
    before = len(run.deaths())
    asked = [run.faults / planned.removeprefix("point: ") for planned in sorted(set(plan)) if planned.startswith("point: ")]
    for path in asked:
        half = path.with_name(f".{path.name}")
        half.write_text(str(rng.randrange(2)))
        half.rename(path)
    with suppress(AssertionError):  # nobody comes by
        waiting.until(lambda: len(run.deaths()) > before, POINT_S, alive=lambda: run.process.poll() is None or run.jobs())
    for path in asked:
        path.unlink(missing_ok=True)
    time.sleep(0.2)  # who read one just before is dying
    died = Counter(f"point: {name}" for name in run.deaths()[before:])
    return list((died & Counter(plan)).elements())


def resume(run: Run, tally: Tally, until: str | None) -> Run:
    """Waits until a job works again, under the same command if it lives, else under a new one."""
    killed, before, began = time.time(), run.progress(), time.monotonic()
    time.sleep(0.2)  # a process takes a moment to die
    again = run if run.process.poll() is None else Run(run.project, until)

    def working() -> dict[str, tuple[float, int, int]]:
        return {key: beat for key, beat in again.progress().items() if beat[0] > killed and beat[2] > 0}

    with suppress(AssertionError):  # it may end before
        jobs = waiting.until(working, PATIENCE_S, alive=lambda: again.process.poll() is None)
        tally.resumed_after_s.append(time.monotonic() - began)
        known = [(before[key][1], *beat[1:]) for key, beat in jobs.items() if before.get(key, (0, 0, 0))[2] == beat[2]]
        tally.redone += [max(0, reached - step) / total for reached, step, total in known]
    return again


def chaos_project(folder: Path, cluster: Slurm | None = None) -> Path:
    """A project whose profile `chaos` is `cpu`, or the cluster's, with a checkpoint every other step and no pauses for long."""
    project = fresh_project(folder)
    profile = (project / "configs/execution" / f"{cluster.name if cluster else 'cpu'}.yaml").read_text()
    assert PROFILE in profile
    (project / "configs/execution/chaos.yaml").write_text(profile.replace(PROFILE, f"{PROFILE}, {PLACEMENT}"))
    recipe = project / "configs/recipes" / f"{RECIPE}.yaml"
    commit = "git add -A && git -c user.name=t -c user.email=t@t commit -qm"
    text = recipe.read_text()
    recipe_of_other = text.replace(EDIT[0], EDIT[1], 1)
    subprocess.run(f"{commit} chaos && git checkout -qb other", shell=True, cwd=project, check=True)
    recipe.write_text(recipe_of_other)
    subprocess.run(f"{commit} other && git checkout -q -", shell=True, cwd=project, check=True)
    assert recipe.read_text() == text
    return project


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--until", help="stage at which the chains end")
    parser.add_argument("--launcher", choices=["local", *CLUSTERS], default="local", help="of the jobs; it gets a cluster of its own")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, ExitStack() as started:
        os.environ["PEDIGREE_SLOTS"] = f"{folder}/slots"  # the clones share these, and nobody else does
        cluster = CLUSTERS[asked.launcher](Path(folder)) if asked.launcher in CLUSTERS else None
        if cluster:
            started.callback(cluster.stop)
        planned = disturbances(asked.kills, asked.until, cluster.harms if cluster else CHANGES)
        tally = chaos(Path(folder), planned, asked.seed, asked.until, None, lambda line: print(line, flush=True), cluster)
    print("\n".join(tally.lines()))
    if tally.different:
        print(f"different from the quiet run, missing or stale: {', '.join(tally.different)}")
    return 1 if tally.different else 0


if __name__ == "__main__":
    sys.exit(main())

"""Jobs of Kubernetes, by a real kubectl and an API in memory (`kubernetes_cluster.py`)."""

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import InProcessCommand
from kubernetes_cluster import Cluster, problems
from running_lab import PROFILE, RANKS, Lab, outcomes, read, running_scratch
from sites import at_work
from waiting import until

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Kubernetes, Numerics, Placement
from pedigree.data.artifacts.artifacts import write_json
from pedigree.pipelines.jobs import job_environment, kubernetes_launcher
from pedigree.pipelines.jobs.kubernetes_client import Answer, create
from pedigree.pipelines.jobs.kubernetes_launcher import KubernetesLauncher
from pedigree.pipelines.jobs.kubernetes_manifest import job_name, preview
from pedigree.pipelines.jobs.launcher import Deferred, Status
from pedigree.pipelines.jobs.live import live_jobs
from pedigree.pipelines.jobs.scratch_state import Handle, read_job, write_spec
from pedigree.stages.job.spec import JobSpec

DONE = dict.fromkeys(("suite", "raw", "clean", "cleaner"), "ran")
UNSCHEDULABLE = "in Kubernetes's queue as Job {name} (Unschedulable: 0/2 nodes are available: 2 Insufficient cpu.)"


@pytest.fixture
def cluster(kubernetes: Cluster) -> Cluster:
    return kubernetes


class Jobs:
    """A launcher and a stage whose job nobody runs: the cluster has no free node."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        cluster.full = True
        self.cluster, self.launcher, self.scratch = cluster, KubernetesLauncher(Project(folder)), folder / "scratch"
        self.scratch.mkdir()
        spec = JobSpec(address="lab/raw", kind="prepare_data", version=1, key="k", config={}, inputs={}, source_files={}, code="c",
                       numerics=Numerics(), placement=Placement())  # fmt: skip
        write_spec(self.scratch, spec)

    def submit(self, attempt: int = 1, **settings: Any) -> Handle:
        place = Kubernetes.model_validate({"type": "kubernetes", "image": "pedigree"} | settings)
        return self.launcher.submit(self.scratch, Numerics(), attempt, place)

    def becomes(self, handle: Handle, **status: Any) -> None:
        """The status of its pod and, if that has ended, of the job."""
        job = self.cluster.jobs[handle.told["name"]]
        (pod,) = (pod for pod in self.cluster.pods if pod["metadata"]["job"] == handle.told["name"])
        pod["status"] |= status
        if pod["status"]["phase"] == "Failed":
            job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}

    def reports(self, **done: Any) -> None:
        write_json(self.scratch / "done.json", {"ok": False, "cause": "preempted", "message": "asked to stop"} | done)


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.setattr(kubernetes_launcher, "ASK_S", 0.0)
    return Jobs(cluster, tmp_path)


def container(state: str, **details: Any) -> list[dict[str, Any]]:
    return [{"state": {state: details}}]


def disrupted(reason: str) -> list[dict[str, str]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "why"}]


def test_a_profile_decides_a_manifest_that_kubernetes_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "type": "kubernetes", "image": "lab/pedigree:1", "python": "/venv/bin/python", "volumes": {"shared": "/shared"}, "queue": "gpus",
        "resources": {"memory": "900Gi", "cpu": 96}, "node_selector": {"gpu": "h100"}, "priority_class": "high",
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "service_account": "trainer", "labels": {"team": "post"},
        "env": {"NCCL_DEBUG": "WARN", "HOME": "/shared/me"}, "secrets": ["hub"],
    }  # fmt: skip
    placement = Placement.model_validate({"slots": 8, "grace_s": 900, "timeout_s": 3600.5, "launcher": settings})
    monkeypatch.setattr(job_environment, "_compiler", lambda: {"CUDA_HOME": "/here", "PATH": "/here"})  # which the image has elsewhere
    job = preview(Project(tmp_path), "lab/sft", Numerics(device="cuda", world_size=8), placement)
    assert not problems(job)
    assert (job["kind"], job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]) == ("Job", "gpus")
    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["backoffLimit"] == 0 and pod["restartPolicy"] == "Never" and job["metadata"]["labels"]["team"] == "post"
    assert (pod["terminationGracePeriodSeconds"], pod["activeDeadlineSeconds"], pod["serviceAccountName"]) == (900, 3601, "trainer")
    assert (pod["nodeSelector"], pod["tolerations"], pod["priorityClassName"]) == ({"gpu": "h100"}, settings["tolerations"], "high")
    (one,) = pod["containers"]
    assert one["resources"]["limits"] == {"memory": "900Gi", "cpu": "96", "nvidia.com/gpu": "8"}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"} and one["volumeMounts"][0]["mountPath"] == "/shared"
    variables = {variable["name"]: variable["value"] for variable in one["env"]}
    assert variables.items() >= settings["env"].items() and one["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert not {"PATH", "CUDA_HOME"} & variables.keys()
    assert one["command"][-1].startswith("PATH=/venv/bin:$$PATH; ") and "exec /venv/bin/python -m pedigree.stages" in one["command"][-1]


def test_environment_variables_of_this_machine_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody who may read the cluster's jobs would see its keys."""
    monkeypatch.setenv("HF_TOKEN", "hf_key")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # as the job's own, which it needs nevertheless
    placement = Placement.model_validate({"launcher": {"type": "kubernetes", "image": "x"}})
    text = yaml.safe_dump(preview(Project(tmp_path), "lab/raw", Numerics(threads=2), placement))
    assert "hf_key" not in text and "OMP_NUM_THREADS" in text


@pytest.mark.parametrize("name", ["PYTHONPATH", "PEDIGREE_FENCE"])
def test_a_variable_that_pedigree_sets_is_refused(tmp_path: Path, name: str) -> None:
    placement = Placement.model_validate({"launcher": {"type": "kubernetes", "image": "x", "env": {name: "/elsewhere"}}})
    with pytest.raises(PedigreeError, match=rf"placement\.launcher\.env sets {name}, which Pedigree sets itself: remove it"):
        preview(Project(tmp_path), "lab/raw", Numerics(), placement)


def test_several_nodes_are_a_jobset_that_meets_at_the_host_name_of_its_first_pod(tmp_path: Path) -> None:
    placement = Placement.model_validate({"slots": 4, "launcher": {"type": "kubernetes", "image": "x", "queue": "gpus"}})
    found = preview(Project(tmp_path), "lab/sft", Numerics(world_size=8, nodes=2), placement)
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet") and not problems(found)
    name, ((job,), network) = found["metadata"]["name"], (found["spec"]["replicatedJobs"], found["spec"]["network"])
    assert job["template"]["spec"]["parallelism"] == 2 and network == {"enableDNSHostnames": True, "subdomain": name}
    script = job["template"]["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    assert f" lead {name}-nodes-0-0.{name} >> " in script and " join >> " in script


def test_names_are_dns_labels_that_leave_room_for_a_pods_suffix() -> None:
    for address in ("lab/raw", "Lab_2/--Lengthy.stage_" + "x" * 80, "_/_", "größer/Ä"):
        name = job_name(address, "0a" * 16)
        assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(f"{name}-nodes-0-1000-abcde") <= 63
    assert job_name("lab/raw", "0a" * 16) == job_name("lab/raw", "0a" * 16) != job_name("lab/raw", "0b" * 16)


def test_a_job_whose_answer_was_lost_is_found_again_and_another_submission_is_another_job(jobs: Jobs) -> None:
    jobs.cluster.loses_answers = 1
    first = jobs.submit()
    assert [*jobs.cluster.jobs] == [first.told["name"]] and jobs.cluster.asked.count("POST /apis/batch/v1/namespaces/team/jobs") == 2
    assert jobs.submit().token != first.token and len(jobs.cluster.jobs) == 2


def test_a_job_whose_answers_were_all_lost_is_deleted_before_another_is_submitted(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(*given: Any) -> Answer:
        create(*given)
        return Answer(reason=None, message="timed out")

    monkeypatch.setattr(kubernetes_launcher, "create", unanswered)
    with pytest.raises(Deferred):
        jobs.submit()
    handle = read_job(jobs.scratch)
    assert handle and [*jobs.cluster.jobs] == [handle.told["name"]]
    jobs.launcher.cancel(handle, grace_s=0.0)
    assert not jobs.cluster.jobs


ENDS: list[tuple[dict[str, Any], str, str]] = [
    ({"containerStatuses": container("waiting", reason="ImagePullBackOff", message="not found")}, "refused", "ImagePullBackOff: not found"),
    ({"containerStatuses": container("waiting", reason="CreateContainerConfigError", message='secret "hub" not found')},
     "refused", 'secret "hub" not found: correct placement.launcher'),
    ({"phase": "Failed", "containerStatuses": container("terminated", exitCode=2, message="sh: cannot create /shared/log.txt\n")},
     "refused", "could not start the job: sh: cannot create /shared/log.txt"),
    ({"phase": "Running", "conditions": disrupted("DeletionByTaintManager")}, "lost", "DeletionByTaintManager"),
    ({"phase": "Failed", "containerStatuses": container("terminated", reason="OOMKilled", exitCode=137)}, "out_of_memory", "OOMKilled"),
    ({"phase": "Failed", "reason": "DeadlineExceeded"}, "timeout", "deadline"),
    ({"phase": "Failed", "conditions": disrupted("PreemptionByScheduler")}, "preempted", "PreemptionByScheduler: why"),
    ({"phase": "Failed", "containerStatuses": container("terminated", exitCode=137, reason="ContainerStatusUnknown", message="not found")},
     "lost", "is gone: not found"),
    ({"phase": "Failed", "reason": "Evicted", "conditions": disrupted("TerminationByKubelet")}, "preempted", "TerminationByKubelet"),
]  # fmt: skip


def test_one_query_shows_the_states_of_all_jobs_and_the_causes_of_their_ends(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_launcher, "ASK_S", 60.0)
    handles = [jobs.submit(attempt) for attempt in range(len(ENDS) + 1)]
    jobs.cluster.configure("elsewhere", "other")  # as `kubectl config use-context` does
    for handle, (status, _, _) in zip(handles[1:], ENDS, strict=True):
        jobs.becomes(handle, **status)
    before = len(jobs.cluster.asked)
    assert jobs.launcher.poll(handles[0]) == Status("queued", waiting=UNSCHEDULABLE.format(**handles[0].told))
    for handle, (_, cause, text) in zip(handles[1:], ENDS, strict=True):
        found = jobs.launcher.poll(handle)
        assert found.state == "failed" and found.end and found.end[0] == cause and text in found.end[1] and "pod p-lab-raw-" in found.end[1]
    jobs.reports()  # what a job itself reports counts more, unless it was asked to stop because of the cause
    assert [(end := jobs.launcher.poll(handle).end) and end[0] for handle in handles[-5:]] == ["out_of_memory", "timeout", None, None, None]
    assert [line.rpartition("/")[2] for line in jobs.cluster.asked[before:]] == ["jobs", "pods"]


@pytest.mark.nightly
def test_a_pod_that_is_disrupted_has_its_grace_period(jobs: Jobs) -> None:
    handle = jobs.submit()
    jobs.becomes(handle, phase="Running", conditions=disrupted("EvictionByEvictionAPI"))
    assert jobs.launcher.poll(handle).state == "running"
    jobs.reports()
    jobs.becomes(handle, phase="Failed", containerStatuses=container("terminated", exitCode=75))
    assert jobs.launcher.poll(handle) == Status("failed", 75)


def test_a_taint_of_a_node_that_works_leaves_its_pod_the_grace_period(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = jobs.submit()
    jobs.becomes(handle, phase="Running", conditions=disrupted("DeletionByTaintManager"))
    (pod,) = jobs.cluster.pods
    pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 900}  # past, by this machine's clock
    assert jobs.launcher.poll(handle).state == "running"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 901)
    assert jobs.launcher.poll(handle).end == ("lost", f"Kubernetes ended pod {pod['metadata']['name']}: DeletionByTaintManager: why")


def test_a_pod_that_is_gone_after_its_preemption_was_preempted(jobs: Jobs) -> None:
    handle = jobs.submit()
    jobs.becomes(handle, phase="Running", conditions=disrupted("PreemptionByScheduler"))
    assert jobs.launcher.poll(handle).state == "running"
    jobs.cluster.things["pod"].clear()
    jobs.cluster.jobs[handle.told["name"]]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    end = jobs.launcher.poll(handle).end
    assert end and end[0] == "preempted"


@pytest.mark.nightly
def test_a_job_that_was_killed_or_whose_pods_are_gone(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = jobs.submit()
    jobs.becomes(handle, phase="Failed", containerStatuses=container("terminated", exitCode=137, reason="Error"))
    assert jobs.launcher.poll(handle) == Status("failed", -9)
    jobs.cluster.things["pod"].clear()
    assert jobs.launcher.poll(handle).state == "running"  # its report may be on its way
    monkeypatch.setattr(kubernetes_launcher, "SILENCE_S", 0.0)
    assert jobs.launcher.poll(handle).state == "lost"


@pytest.mark.nightly
def test_a_job_that_somebody_deletes_is_canceled_unless_it_has_succeeded(jobs: Jobs) -> None:
    handle = jobs.submit()
    assert jobs.launcher.poll(handle).state == "queued"
    (pod,) = jobs.cluster.pods
    pod["status"]["phase"] = "Running"
    jobs.cluster.jobs.clear()
    assert jobs.launcher.poll(handle).state == "running"  # in its grace period
    jobs.cluster.things["pod"].clear()
    end = jobs.launcher.poll(handle).end
    assert end and end[0] == "cancelled" and "was deleted in Kubernetes; its checkpoints are kept" in end[1]
    assert KubernetesLauncher(jobs.launcher.project).poll(handle).state == "unknown"


@pytest.mark.nightly
def test_kueue_admits_a_job_and_withdraws_it(jobs: Jobs) -> None:
    handle = jobs.submit(queue="gpus")
    assert jobs.launcher.poll(handle).waiting.endswith(" (suspended, in queue gpus)")
    jobs.cluster.admit()
    jobs.becomes(handle, phase="Running")
    status = jobs.launcher.poll(handle)
    assert status.state == "running" and status.place.startswith("Kubernetes pod p-lab-raw-")
    jobs.cluster.withdraw()
    jobs.cluster.things["pod"].clear()
    end = jobs.launcher.poll(handle).end
    assert end and end[0] == "preempted"
    jobs.launcher.cancel(handle, grace_s=0.0)
    assert not jobs.cluster.jobs


@pytest.mark.nightly
def test_a_job_without_pods_shows_why(jobs: Jobs) -> None:
    handle = jobs.submit()
    jobs.cluster.things["pod"].clear()
    event = {"involvedObject": {"name": handle.told["name"]}, "reason": "FailedCreate", "message": "exceeded quota: team"}
    jobs.cluster.things["event"]["e"] = event
    assert jobs.launcher.poll(handle).waiting.endswith(" (FailedCreate: exceeded quota: team)")


def test_what_kubernetes_refuses_for_now_is_submitted_again_and_what_it_refuses_for_good_is_not(jobs: Jobs) -> None:
    for reason, message in (("ServiceUnavailable", "etcd"), ("Forbidden", "jobs.batch is forbidden: exceeded quota: team")):
        jobs.cluster.refuses = (reason, message)
        with pytest.raises(Deferred, match=f"for Kubernetes to accept its job: {message}"):
            jobs.submit()
    for reason in ("jobs.batch is forbidden: User cannot create", 'admission webhook "vjob" denied the request'):
        jobs.cluster.refuses = ("Forbidden" if "User" in reason else "", reason)
        with pytest.raises(PedigreeError, match=f"Kubernetes rejects the job of lab/raw: .*{reason}"):
            jobs.submit()
    assert not (jobs.scratch / "job.json").exists()
    jobs.cluster.refuses = None
    handle = jobs.submit()
    jobs.cluster.refuses = ("Forbidden", "jobs.batch is forbidden: User cannot delete resource jobs")
    with pytest.raises(PedigreeError, match=f"Kubernetes does not end job {handle.told['name']}: jobs.batch is forbidden"):
        jobs.launcher.cancel(handle)


@pytest.mark.nightly
def test_an_api_that_does_not_answer_says_nothing_about_a_job(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = jobs.submit()
    monkeypatch.setattr(kubernetes_launcher, "AWAY_S", 0)
    with jobs.cluster.away():
        assert jobs.launcher.poll(handle) == Status("queued", waiting=f"for Kubernetes to answer: {jobs.launcher._problem}")
        assert "connection" in jobs.launcher._problem
        with pytest.raises(PedigreeError, match=r"Kubernetes does not answer, so its job in .* may go on"):
            jobs.launcher.cancel(handle)
    jobs.becomes(handle, phase="Running")
    assert jobs.launcher.poll(handle).state == "running"
    with jobs.cluster.away():
        assert jobs.launcher.poll(handle).state == "running"
        jobs.reports()
        assert jobs.launcher.poll(handle).state == "failed"
    monkeypatch.setenv("PATH", "/nowhere")
    assert KubernetesLauncher(jobs.launcher.project).poll(handle).state == "failed"
    (jobs.scratch / "done.json").unlink()
    assert KubernetesLauncher(jobs.launcher.project).poll(handle).state == "unknown"
    with pytest.raises(PedigreeError, match=r"kubectl is not in PATH: install it, or remove placement\.launcher from the profile"):
        jobs.submit()


# --- jobs that run ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lab(tmp_path: Path, cluster: Cluster) -> Lab:
    """All its stages but one are jobs of Kubernetes."""
    lab = Lab(tmp_path / "lab", processes=True)
    profile = lab.root / "configs" / "execution" / "lab.yaml"
    lab.edit("configs/execution/lab.yaml", "slots: 1,", "slots: 1, launcher: {type: kubernetes, image: pedigree}, grace_s: 20,")
    profile.write_text(profile.read_text() + "stages: {suite: {placement: {launcher: {type: local}}}}\n")
    return lab


def causes(lab: Lab, stage: str) -> list[str]:
    """Causes of the attempts, from the stage's record."""
    return [one["cause"] for one in read(lab, stage, "run.json")["attempts"]]


def test_a_job_waits_runs_is_listed_and_resumes_after_its_node_was_drained(lab: Lab, cluster: Cluster) -> None:
    lab.knobs(raw={"seconds": 60})
    cluster.full = True
    with at_work(lab) as work:
        until(lambda: work.shows("(Unschedulable: 0/2 nodes are available"))
        cluster.free()
        until(lambda: running_scratch(lab, "raw"))
        (job,) = live_jobs(lab.project)
        (pod,) = cluster.pods
        assert job.scheduled == f"Kubernetes pod {pod['metadata']['name']} on n1" and not job.elsewhere
        lab.knobs()
        cluster.disrupt("EvictionByEvictionAPI")
        assert work.outcome() == "ran"
    assert causes(lab, "raw") == ["preempted", "succeeded"]
    assert read(lab, "raw", "run.json")["attempts"][1]["resumed_from"] and "launcher" not in read(lab, "raw", "run.json")["placement"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_recipe_runs_in_pods_and_beside_them_and_leaves_the_same_bytes(lab: Lab, cluster: Cluster, tmp_path: Path) -> None:
    assert outcomes(lab) == DONE
    assert sorted(job["status"]["conditions"][0]["type"] for job in cluster.jobs.values()) == ["Complete"] * 3
    local = Lab(tmp_path / "local", processes=True)
    assert outcomes(local) == DONE
    for stage in DONE:
        assert read(local, stage, "record.json")["content"] == read(lab, stage, "record.json")["content"]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="host names of pods take bubblewrap")
def test_ranks_run_in_two_pods(lab: Lab, cluster: Cluster) -> None:
    lab.write("configs/recipes/lab.yaml", RANKS)
    lab.edit("configs/execution/lab.yaml", "threads: 1", "threads: 1, world_size: 2, nodes: 2")
    assert outcomes(lab)["sft"] == "ran" and lab.runs().count("sft") == 2
    (jobset,) = cluster.things["jobset"].values()
    assert jobset["status"]["conditions"][0]["type"] == "Completed"


def test_the_command_line_prints_manifests_checks_the_cluster_and_names_the_remedy(lab: Lab, cluster: Cluster) -> None:
    typed = InProcessCommand(lab)
    lab.processes = False
    jobs = [*yaml.safe_load_all(typed("run", "lab", "--dry-run"))]
    assert [job["kind"] for job in jobs] == ["Job"] * 3 and not any(map(problems, jobs)) and not cluster.asked
    lab.edit("configs/execution/lab.yaml", "image: pedigree", "image: pedigree, tolerations: [{kee: a}]")
    said = typed("run", "lab", code=2)
    assert "lab: stages raw, clean, cleaner: Kubernetes would reject this job: job in version v1 cannot be handled" in said
    assert not cluster.jobs and not lab.runs()
    lab.edit("configs/execution/lab.yaml", "launcher: {type: kubernetes", "launcher: {type: kubernetes, context: nowhere")
    assert "kubectl has no context" in typed("run", "lab", code=2)
    lab.write("configs/execution/lab.yaml", PROFILE)
    assert "--dry-run prints manifests, but no stage that is due has" in typed("run", "lab", "--dry-run", code=2)


@pytest.mark.slow
@pytest.mark.nightly
def test_doctor_finds_what_is_wrong_with_a_cluster(lab: Lab, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def examined(code: int) -> list[str]:
        return InProcessCommand(lab)("doctor", "--execution", "lab", code=code).splitlines()

    jobs, pod = examined(0)
    assert "jobs of stages" in jobs and jobs.endswith("Kubernetes v1.33.0, context lab, namespace team")
    assert "pod for stages" in pod and pod.endswith(": sees project, environment and cache")
    assert not list(lab.project.private.glob("probe-*"))
    cluster.jobs.clear()
    cluster.full = True
    monkeypatch.setattr("pedigree.pipelines.cli.kubernetes_doctor.PROBE_S", 1.0)
    assert "none within 1 s: in Kubernetes's queue as Job p-pedigree-doctor-" in "\n".join(examined(0))
    cluster.full = False
    for image, finding in (("missing", "cannot start: ImagePullBackOff"), ("bare", "could not start the job: sh: ")):
        lab.edit("configs/execution/lab.yaml", "image: pedigree", f"image: {image}")
        assert finding in "\n".join(examined(1))
        lab.edit("configs/execution/lab.yaml", f"image: {image}", "image: pedigree")
    with cluster.away():
        assert "The connection to the server" in "\n".join(examined(1))

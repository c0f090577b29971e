"""`rayjob.yaml`: the plan as a job of KubeRay. Pure."""

from __future__ import annotations

import math
from typing import Any

from palestra.cli.planner.export.training import train_env, train_words, wall_clock_s
from palestra.cli.planner.export.types import Export, ExportError, Files, Fleet
from palestra.cli.planner.export.words import comment, filled, shell, shell_line
from palestra.cli.planner.export.yamls import dumped

IMAGE, CLAIM = "PALESTRA_IMAGE", "palestra-shared"
WEEK_S = 7 * 86_400
GIB = 2**30
SHARED = "/shared"
ENGINES = "palestra-engines"
NOTES = (
    f"Put an image with palestra[train,cluster] in place of {IMAGE}; the claim {CLAIM} (read and written by all pods) holds this",
    "folder's configuration, the model in its folder `model`, and new weights.",
)
ENGINE_NOTES = (
    f"Put an image with palestra and the engines' environment (palestra engine install --cuda --into /opt/engine) in place of {IMAGE}; the",
    f"claim {CLAIM} holds this folder's engines.sh beside the model. Apply it before rayjob.yaml, which looks for these engines.",
)


def rayjob(export: Export) -> Files:
    """A head without GPUs and a worker for each machine that trains; the engines, where they stand apart, as pods with fixed names.

    Raises:
        ExportError: the plan has no GPUs.
    """
    if not export.gpus:
        raise ExportError("a Ray job asks for GPUs, and this plan has none: see launch.sh")
    shared = export.case.input.hardware.shared_dir or SHARED
    fleet = export.fleet if export.apart else None
    gpus = export.gpus if fleet is None else export.gpus - export.case.rollout_gpus
    each = min(gpus, export.case.input.hardware.gpus_per_node)
    hosts = {} if fleet is None else {f"NODE_{node}": _host(node) for node in range(fleet.nodes)}
    words = [filled(word, hosts) for word in train_words(export, f"{shared}/", f"{shared}/model")]
    files = {"rayjob.yaml": _text(export, NOTES, _job(export, shared, words, gpus, each))}
    if fleet is not None:
        files["engines.k8s.yaml"] = _text(export, ENGINE_NOTES, _service(), _engine_pods(export, fleet, shared))
    return files


def _job(export: Export, shared: str, words: list[str], gpus: int, each: int) -> dict[str, Any]:
    workers = -(-gpus // max(each, 1))
    spec: dict[str, Any] = {
        "entrypoint": shell_line(words),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "activeDeadlineSeconds": wall_clock_s(export) or WEEK_S,
        "runtimeEnvYAML": dumped({"env_vars": train_env(export)}),
        "rayClusterSpec": {
            "headGroupSpec": {
                "rayStartParams": {"num-gpus": "0"},
                "template": _pod({"cpu": "8", "memory": "64Gi"}, shared),
            },
            "workerGroupSpecs": [
                {
                    "groupName": "gpu",
                    "replicas": workers,
                    "minReplicas": workers,
                    "maxReplicas": workers,
                    "rayStartParams": {},
                    "template": _pod(_limits(export, each), shared),
                }
            ],
        },
    }
    if workers == 1:
        # The head has no GPU: the run has to begin where they are.
        spec["entrypointNumGpus"] = gpus
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "palestra-run"}, "spec": spec}


def _service() -> dict[str, Any]:
    """Names for the engines' pods, also before they are ready: engines of several machines look for each other while they start."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": ENGINES},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": ENGINES}},
    }


def _engine_pods(export: Export, fleet: Fleet, shared: str) -> dict[str, Any]:
    pod = _pod(_limits(export, _gpus_of(fleet)), shared)
    (container,) = pod["spec"]["containers"]
    container |= {
        "name": "engines",
        # The number that ends a pod's name is its place among the machines.
        "command": ["bash", "-c", f'NODE_RANK="${{HOSTNAME##*-}}" exec bash {shell(shared + "/engines.sh")}'],
        "env": [
            {"name": "NODES", "value": " ".join(map(_host, range(fleet.nodes)))},
            {"name": "MODEL", "value": f"{shared}/model"},
            {"name": "ENGINE_ENV", "value": "/opt/engine"},
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": ENGINES},
        "spec": {
            "serviceName": ENGINES,
            "replicas": fleet.nodes,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": ENGINES}},
            "template": {"metadata": {"labels": {"app": ENGINES}}, **pod},
        },
    }


def _host(node: int) -> str:
    return f"{ENGINES}-{node}.{ENGINES}"


def _gpus_of(fleet: Fleet) -> int:
    """Of one pod: those of the fullest machine, since all pods are alike."""
    held = [0] * fleet.nodes
    for command in fleet.commands:
        held[command.node] += len(command.env["CUDA_VISIBLE_DEVICES"].split(","))
    return max(held)


def _text(export: Export, notes: tuple[str, ...], *documents: dict[str, Any]) -> str:
    return comment([*export.head, *notes]) + dumped(*documents)


def _limits(export: Export, gpus: int) -> dict[str, str]:
    """Of a pod: its GPUs, and as large a share of what is known of a machine, less a tenth for the machine's own use."""
    given = export.case.input.hardware
    share = 0.9 * gpus / given.gpus_per_node
    limits = {"nvidia.com/gpu": str(gpus)}
    if given.host_cores:
        limits["cpu"] = str(max(1, math.floor(given.host_cores * share)))
    if given.host_mem_bytes:
        limits["memory"] = f"{max(1, math.floor(given.host_mem_bytes * share / GIB))}Gi"
    return limits


def _pod(limits: dict[str, str], shared: str) -> dict[str, Any]:
    return {
        "spec": {
            "containers": [
                {
                    "name": "ray",
                    "image": IMAGE,
                    "resources": {"limits": dict(limits), "requests": dict(limits)},
                    "volumeMounts": [{"name": "shared", "mountPath": shared}, {"name": "shm", "mountPath": "/dev/shm"}],
                }
            ],
            "volumes": [
                {"name": "shared", "persistentVolumeClaim": {"claimName": CLAIM}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
            ],
        }
    }

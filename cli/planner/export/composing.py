"""`compose.yaml`, `prometheus.yml` and `.env.example`. Pure.

All services use the network of their machine and listen on its loopback where the plan has one machine, so nothing is published. With more
machines each service has its machine's profile: `COMPOSE_PROFILES=node-1 docker compose up` starts what belongs on the second one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from palestra.cli.engines.types import EngineCommand
from palestra.cli.planner.export.engines import FIND_ROUTER
from palestra.cli.planner.export.fleet import MODEL, ROUTER_FIGURES_PORT
from palestra.cli.planner.export.training import TRAIN, train_env, train_words
from palestra.cli.planner.export.types import Export, Files, Fleet
from palestra.cli.planner.export.words import comment, compose, filled, var, variables
from palestra.cli.planner.export.yamls import dumped

IMAGES = {"PALESTRA_IMAGE": "an image with palestra[train]", "SGLANG_IMAGE": "an image with SGLang 0.5.23"}
FROM_IMAGE = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONNOUSERSITE", "CUDA_VISIBLE_DEVICES")
"""Variables of an engine that a container has of its own."""
ALIVE = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"
WAIT = """\
import sys, time, urllib.request
end = time.monotonic() + 1800
for url in sys.argv[1:]:
    while True:
        try:
            urllib.request.urlopen(url, timeout=5)
            break
        except OSError as error:
            if time.monotonic() > end:
                sys.exit(f"{url} did not answer in time: {error}")
            time.sleep(2)
"""
FIGURES = "127.0.0.1:9090"


def compose_yaml(export: Export) -> Files:
    """Engines, their router, what waits for them, the run, and figures on request."""
    services: dict[str, Any] = {}
    fleet = export.fleet if export.apart else None
    if fleet is not None:
        services |= {each.name.replace(".", "-"): _engine(export, fleet, each) for each in fleet.commands}
        if fleet.router is not None:
            services["router"] = _router(export, fleet, fleet.router)
        services["ready"] = _ready(export, fleet)
    services["train"] = _train(export, fleet)
    if fleet is not None:
        services["prometheus"] = _prometheus()
    document = {"name": "palestra", "services": services, "volumes": {"state": {}}}
    text = dumped(document)
    return {"compose.yaml": comment([*export.head, *_about(export)]) + text}


def env_example(export: Export) -> Files:
    """Names of what a machine has to say; no secret is among them."""
    lines = [f"# {about}\n{name}=" for name, about in _names(export)]
    return {".env.example": comment([*export.head, "Copy to .env and fill in."]) + "\n".join(lines) + "\n"}


def prometheus_yml(export: Export) -> Files:
    """Engines and router as targets; empty where the plan starts none of its own."""
    groups = []
    if export.fleet is not None:
        for number, command in enumerate(each for each in export.fleet.commands if each.url):
            labels = {"engine": str(number), "kind": str(command.kind)}
            groups.append({"targets": [_target(export.fleet, command.url)], "labels": labels})
    jobs: list[dict[str, Any]] = [{"job_name": "engines", "metrics_path": "/metrics", "static_configs": groups}]
    if export.fleet is not None and export.fleet.router is not None:
        router = {"targets": [f"127.0.0.1:{ROUTER_FIGURES_PORT}"]}
        jobs.append({"job_name": "router", "metrics_path": "/metrics", "static_configs": [router]})
    document = {"global": {"scrape_interval": "15s"}, "scrape_configs": jobs if groups else []}
    notes = (
        ["Put addresses in place of NODE_0 and so on."] if export.fleet is not None and export.fleet.nodes > 1 else []
    )
    text = dumped(document)
    return {"prometheus.yml": comment([*export.head, *notes]) + text}


def _engine(export: Export, fleet: Fleet, command: EngineCommand) -> dict[str, Any]:
    gpus = [gpu for gpu in command.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    service = _base(export, "SGLANG_IMAGE", fleet.first_node + command.node) | {
        "command": _words(export, ["python3", *command.argv[1:]]),
        "environment": {name: compose(value) for name, value in sorted(command.env.items()) if name not in FROM_IMAGE},
        "volumes": [compose(f"{var(MODEL)}:/model:ro"), "state:/state:ro", *_shared(export)],
    }
    if command.url:
        service["healthcheck"] = _alive(export, f"{command.url}/model_info", retries=180)
    return service | _gpus(gpus)


def _router(export: Export, fleet: Fleet, router: EngineCommand) -> dict[str, Any]:
    script = 'router="$(python3 -c "$1")"; shift; exec "$PALESTRA_ENGINE_ENV/bin/python" "$router" "$@"'
    words: tuple[str, ...] = (FIND_ROUTER, *router.argv[2:])
    if router.argv[1] == "-m":
        script, words = 'exec "$PALESTRA_ENGINE_ENV/bin/python" "$@"', router.argv[1:]
    service = _base(export, "PALESTRA_IMAGE", fleet.first_node) | {
        "command": _words(export, ["sh", "-c", script, "router", *words]),
        "healthcheck": _alive(export, f"{router.url}/health", retries=60),
    }
    if fleet.nodes == 1:
        service["depends_on"] = {each.name: {"condition": "service_healthy"} for each in fleet.commands}
    return service


def _ready(export: Export, fleet: Fleet) -> dict[str, Any]:
    """Ends when all engines answer: a condition cannot name services of another machine."""
    urls = [f"{url}/model_info" for url in fleet.urls]
    if fleet.router is not None:
        urls.append(f"{fleet.router.url}/health")
    return _base(export, "PALESTRA_IMAGE", 0) | {"command": _words(export, ["python3", "-c", WAIT, *urls])}


def _train(export: Export, fleet: Fleet | None) -> dict[str, Any]:
    words = [*train_words(export, "/plan/", "/model"), "--run.save_dir=/state/runs"]
    service = _base(export, "PALESTRA_IMAGE", 0) | {
        "command": _words(export, words),
        "environment": train_env(export),
        "volumes": [
            compose(f"{var(MODEL)}:/model:ro"),
            f"./{TRAIN}:/plan/{TRAIN}:ro",
            "state:/state",
            *_shared(export),
        ],
        "stop_grace_period": "120s",
    }
    if fleet is not None:
        service["depends_on"] = {"ready": {"condition": "service_completed_successfully"}}
    return service | _gpus(_training_gpus(export, fleet))


def _prometheus() -> dict[str, Any]:
    return {
        "image": "${PROMETHEUS_IMAGE:-prom/prometheus}",
        "profiles": ["figures"],
        "network_mode": "host",
        "command": ["--config.file=/etc/prometheus/prometheus.yml", f"--web.listen-address={FIGURES}"],
        "volumes": ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro"],
    }


def _base(export: Export, image: str, node: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        "image": compose(var(image)),
        "network_mode": "host",
        "init": True,
        "shm_size": "16g",
        "ulimits": {"memlock": -1, "nofile": 65536},
    }
    return told | ({"profiles": [f"node-{node}"]} if export.nodes > 1 else {})


def _alive(export: Export, url: str, retries: int) -> dict[str, Any]:
    (address,) = _words(export, [url])
    return {"test": ["CMD", "python3", "-c", ALIVE, address], "interval": "10s", "timeout": "10s", "retries": retries}


def _words(export: Export, words: list[str]) -> list[str]:
    known = {MODEL: "/model"}
    if export.fleet is not None and export.nodes == 1:
        known["NODE_0"] = "127.0.0.1"
    return [compose(filled(word, known)) for word in words]


def _shared(export: Export) -> list[str]:
    """Folders that the plan names are the same inside and outside."""
    given = (export.case.input.hardware.shared_dir, export.case.input.weights.shared_dir)
    return [compose(f"{path}:{path}") for path in dict.fromkeys(given) if path]


def _gpus(ids: list[str]) -> dict[str, Any]:
    if not ids:
        return {}
    device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _training_gpus(export: Export, fleet: Fleet | None) -> list[str]:
    """Of the first machine: those that no engine beside the training has."""
    taken = set()
    for command in () if fleet is None else fleet.commands:
        if fleet is not None and fleet.first_node + command.node == 0:
            taken |= set(command.env.get("CUDA_VISIBLE_DEVICES", "").split(","))
    wanted = export.gpus if fleet is None else export.case.train_gpus + export.case.reference_gpus
    if not export.gpus:
        return []
    return [str(gpu) for gpu in range(export.case.input.hardware.gpus_per_node) if str(gpu) not in taken][:wanted]


def _about(export: Export) -> Iterator[str]:
    if export.nodes > 1:
        yield f"For {export.nodes} machines: on the k-th, COMPOSE_PROFILES=node-K docker compose up (K from 0), with the same .env."
        yield "The run is on the first machine. Addresses NODE_0 and so on are those of the machines with engines, in order."
    else:
        yield "docker compose up, with a .env beside it (see .env.example)."
    yield "Figures: the profile `figures` adds Prometheus on " + FIGURES + "."


def _names(export: Export) -> Iterator[tuple[str, str]]:
    yield MODEL, "folder of the model, in Hugging Face form"
    yield "PALESTRA_IMAGE", IMAGES["PALESTRA_IMAGE"]
    if export.fleet is None or not export.apart:
        return
    yield "SGLANG_IMAGE", IMAGES["SGLANG_IMAGE"]
    if export.nodes > 1:
        for name in variables([var(f"NODE_{node}") for node in range(export.fleet.nodes)]):
            yield name, "address of a machine with engines"


def _target(fleet: Fleet, url: str) -> str:
    known = (
        {"NODE_0": "127.0.0.1"} if fleet.nodes == 1 else {f"NODE_{node}": f"NODE_{node}" for node in range(fleet.nodes)}
    )
    return filled(url.removeprefix("http://"), known)

#!/usr/bin/env python3
"""The measurements of scripts/bench-controllers: our controllers and scheduler beside kube-controller-manager and
kube-scheduler, on our API server. The nodes are simulated: their pods run as soon as they are bound."""
import json, os, subprocess, time

from peers import ADDRESS, CORACLE, QUICK, TOKEN, WORK, Program, median, our_plane, row, sh, title, wait
from scheduler import NAMESPACE, STOCK, grow, scheduler

DEPLOYMENTS, REPLICAS = (20, 100) if QUICK else (100, 100)
PODS = DEPLOYMENTS * REPLICAS
NODES = 100
ROUNDS = 2 if QUICK else 1
CONTROLLERS = "deployment-controller,replicaset-controller"
COLLECTION = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
NOW = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def deployment(image):
    container = {"name": "c", "image": image, "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}}}
    labels = {"app": "d{n}"}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d{n}"},
            "spec": {"replicas": REPLICAS, "selector": {"matchLabels": labels},
                     "template": {"metadata": {"labels": labels},
                                  "spec": {"automountServiceAccountToken": False, "containers": [container]}}}}


def running():
    """Status of a pod whose container runs and is ready."""
    conditions = ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady"]
    container = {"name": "c", "image": "registry.example/program:1", "imageID": "", "ready": True, "started": True,
                 "restartCount": 0, "state": {"running": {"startedAt": NOW}}}
    return {"phase": "Running", "podIP": "192.0.2.2", "startTime": NOW, "containerStatuses": [container],
            "conditions": [{"type": kind, "status": "True", "lastTransitionTime": NOW} for kind in conditions]}


class Nodes:
    """The load generator in the role of all nodes."""

    def __init__(self, api):
        command = api.load("nodes", "--namespace", NAMESPACE, "--status", json.dumps(running()), "--clients", 32)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self.process.stdout.readline() != b"ready\n":
            raise SystemExit("the simulated nodes did not start")

    def stop(self):
        if self.process.poll() is not None:
            raise SystemExit("the simulated nodes ended early")
        self.process.stdin.close()
        self.process.wait()


def complete(item):
    """Whether all pods of a deployment have its template and are available, and no other pod is left."""
    status = item.get("status", {})
    counts = [status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")]
    return status.get("observedGeneration") == item["metadata"]["generation"] and counts == [item["spec"]["replicas"]] * 3


def until_complete(api):
    for _ in range(3600):
        if all(map(complete, api.items(COLLECTION))):
            return
        time.sleep(0.25)
    raise SystemExit(f"{PODS} pods of {DEPLOYMENTS} deployments were not available in time")


def clients(kind, api, pki):
    """Controllers and scheduler as clients of the API server, whose keys are in `pki`."""
    path = lambda name: os.path.join(WORK, name)
    config = api.kubeconfig(path("kubeconfig"))
    if kind == "ours":
        return [Program(kind, [CORACLE, "controlplane", "--kubeconfig", config, "--pki-dir", pki, "--state-dir",
                               path("client"), "--run-dir", path("client.run"), f"--controllers={CONTROLLERS}"])]
    # Its own limit of requests would be 20 a second.
    manager = [os.path.join(STOCK, "kube-controller-manager"), f"--kubeconfig={config}", "--leader-elect=false",
               f"--controllers={CONTROLLERS}", "--kube-api-qps=100000", "--kube-api-burst=100000", "--bind-address=127.0.0.1",
               f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}"]
    return [Program("kube-controller-manager", manager), scheduler(kind, api)]


def measure_once(kind):
    """Seconds until all pods of new deployments are available, and until they are replaced after a change of the template;
    memory and processor time of the clients."""
    built_in = kind == "built in"
    name = f"plane-{time.monotonic_ns()}"
    controllers = "serviceaccount-controller" + (f",{CONTROLLERS}" if built_in else "")
    plane, api = our_plane(f"--controllers={controllers}", f"--scheduler={str(built_in).lower()}", name=name)
    plane.start()
    wait("the API server", 60, api.ready)
    api("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    wait("the service account", 30, lambda: api.send("GET", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default")[0] == 200)
    grow(api, 0, NODES)
    nodes = Nodes(api)
    programs = [] if built_in else clients(kind, api, os.path.join(WORK, name, "pki"))
    for program in programs:
        program.start()
    time.sleep(3)
    begin, used = time.monotonic(), plane.cpu()
    api.requests("POST", COLLECTION, deployment("registry.example/program:1"), count=DEPLOYMENTS, clients=4)
    until_complete(api)
    created = time.monotonic() - begin
    patch = {"spec": {"template": {"spec": {"containers": [{"name": "c", "image": "registry.example/program:2"}]}}}}
    begin = time.monotonic()
    media = "application/strategic-merge-patch+json"
    api.requests("PATCH", COLLECTION + "/d{n}", patch, media=media, count=DEPLOYMENTS, clients=4)
    until_complete(api)
    result = {"created": created, "rolled": time.monotonic() - begin, "plane": plane.cpu() - used,
              "pss": sum(program.pss() for program in programs), "cpu": sum(program.cpu() for program in programs)}
    for program in [*programs, nodes, plane]:
        program.stop()
    return result


def measure():
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "addr", "add", f"{ADDRESS}/32", "dev", "lo")
    title(f"{PODS} pods of {DEPLOYMENTS} deployments, {NODES} simulated nodes, {ROUNDS} rounds in turn", "stock")
    kinds = ["built in", "ours", "stock"]
    results = {kind: [] for kind in kinds}
    for number in range(ROUNDS):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            results[kind].append(measure_once(kind))
    middle = lambda kind, key: median(result[key] for result in results[kind])
    for kind, name in [("built in", "built in"), ("ours", "as clients")]:
        row(f"{name}: created → all available, s", middle(kind, "created"), middle("stock", "created"))
        row("… new template → all replaced, s", middle(kind, "rolled"), middle("stock", "rolled"))
        row("… processor time of the API server's process, s", middle(kind, "plane"), middle("stock", "plane"))
    row("as clients: PSS, MB", middle("ours", "pss"), middle("stock", "pss"))
    row("… processor time, s", middle("ours", "cpu"), middle("stock", "cpu"))


if __name__ == "__main__":
    measure()

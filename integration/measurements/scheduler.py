#!/usr/bin/env python3
"""The measurements of scripts/bench-scheduler: our scheduler beside kube-scheduler, on our API server."""
import os, threading, time

from peers import ADDRESS, CORACLE, QUICK, TOKEN, WORK, Program, median, our_plane, row, sh, title, wait

STOCK = os.environ["PEERS"]
PODS = 1000 if QUICK else 3000
ROUNDS = 2 if QUICK else 3
SINGLE = 20 if QUICK else 50
NAMESPACE = "bench"
COLLECTION = f"/api/v1/namespaces/{NAMESPACE}/pods"
CONTROLLERS = "--controllers=serviceaccount-controller"


class Bindings:
    """Watches the pods that are bound to a node, and records when each event arrives. The watch begins with the pods that
    have a node already: a watch after a separate list can be too late, because the scheduler binds many pods meanwhile."""

    def __init__(self, api):
        self.api, self.before, self.times, self.changed = api, 0, [], threading.Condition()
        self.wanted, self.ready = 0, threading.Event()
        threading.Thread(target=self.follow, daemon=True).start()
        if not self.ready.wait(60):
            raise SystemExit("the watch of the pods did not begin")
        self.begin = time.monotonic()

    def follow(self):
        connection = self.api.connection()
        path = f"{COLLECTION}?watch=1&fieldSelector=spec.nodeName%21%3D&allowWatchBookmarks=true"
        path += "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        try:
            while line := answer.readline():
                if b'"k8s.io/initial-events-end":"true"' in line[:1000]:
                    self.ready.set()
                elif not line.startswith(b'{"type":"ADDED"'):
                    continue
                elif not self.ready.is_set():
                    self.before += 1
                else:
                    with self.changed:
                        self.times.append(time.monotonic())
                        # A wake-up for each event would take processor time from the measured programs.
                        if len(self.times) == self.wanted:
                            self.changed.notify()
        except (OSError, ValueError):
            pass

    def wait(self, count, seconds):
        with self.changed:
            self.wanted = count
            if not self.changed.wait_for(lambda: len(self.times) >= count, seconds):
                raise SystemExit(f"{len(self.times)} of {count} pods were scheduled in {seconds} s")


def pod(name):
    container = {"name": "c", "image": "registry.example/program:1", "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": "web"}},
            "spec": {"automountServiceAccountToken": False, "containers": [container]}}


def grow(api, first, last):
    """Creates the nodes with the numbers from `first` to `last` - 1, which are ready."""
    count = last - first
    flags = {"first": first, "count": count, "clients": 4}
    api.requests("POST", "/api/v1/nodes", {"metadata": {"name": "node-{n}", "labels": {"kubernetes.io/hostname": "node-{n}"}}}, **flags)
    media = "application/merge-patch+json"
    room = {"cpu": "64", "memory": "256Gi", "pods": "500", "ephemeral-storage": "100Gi"}
    status = {"capacity": room, "allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]}
    api.requests("PATCH", "/api/v1/nodes/node-{n}/status", {"status": status}, media=media, **flags)
    api.requests("PATCH", "/api/v1/nodes/node-{n}", {"spec": {"taints": None}}, media=media, **flags)


def clear(api):
    api("DELETE", f"{COLLECTION}?gracePeriodSeconds=0")
    wait("the removal of the pods", 60, lambda: not api.items(COLLECTION + "?limit=1"))


def scheduler(kind, api):
    """A scheduler as a client of the API server: ours, or kube-scheduler."""
    path = lambda name: os.path.join(WORK, name)
    config = api.kubeconfig(path("kubeconfig"))
    if kind == "ours":
        return Program(kind, [CORACLE, "controlplane", "--kubeconfig", config, "--pki-dir", path("plane/pki"), "--state-dir", path("client"),
                              "--run-dir", path("client.run"), "--controllers=-*"])
    # By default, kube-scheduler sends at most 50 requests per second.
    return Program(kind, [os.path.join(STOCK, "kube-scheduler"), f"--kubeconfig={config}", "--leader-elect=false",
                          "--kube-api-qps=100000", "--kube-api-burst=100000", "--bind-address=127.0.0.1",
                          f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}"])


def plane_with(scheduling):
    """The API server, with or without the built-in scheduler."""
    plane, api = our_plane(CONTROLLERS, f"--scheduler={str(scheduling).lower()}")
    plane.start()
    wait("the API server", 60, api.ready)
    return plane, api


def measure_once(kind):
    """Pods scheduled per second, of pods that exist before the scheduler starts; then milliseconds from the creation of one
    pod until a client sees that it is bound; and the scheduler's memory and processor time, and its memory while it is idle."""
    plane, api = plane_with(False)
    clear(api)
    api.requests("POST", COLLECTION, pod("p{n}"), count=PODS, clients=4)
    other = None
    if kind == "built in":
        plane.stop()
        plane, api = plane_with(True)
        bindings = Bindings(api)
        first = bindings.begin
    else:
        bindings = Bindings(api)
        other = scheduler(kind, api).start()
        bindings.wait(1, 60)
        first = bindings.times[0]
    count = PODS - bindings.before
    bindings.wait(count, 300)
    result = {"rate": count / (bindings.times[-1] - first), "single": single(api)}
    if other:
        result.update(pss=other.pss(), cpu=other.cpu())
        # Our scheduler releases memory three seconds after its last request, and kube-scheduler in the background.
        time.sleep(5)
        result["idle_pss"] = other.pss()
        other.stop()
    plane.stop()
    return result


def single(api):
    """Median time in milliseconds until one pod is bound, on a cluster that is otherwise idle."""
    time.sleep(1)
    bindings, took = Bindings(api), []
    for number in range(SINGLE):
        begin = time.monotonic()
        api("POST", COLLECTION, pod(f"single-{number}"))
        bindings.wait(number + 1, 30)
        took.append((bindings.times[-1] - begin) * 1000)
        time.sleep(0.02)
    return median(took)


def measure():
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "addr", "add", f"{ADDRESS}/32", "dev", "lo")
    plane, api = plane_with(False)
    api("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    wait("the service account", 30, lambda: api.send("GET", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default")[0] == 200)
    plane.stop()
    title(f"{PODS} pods, {ROUNDS} rounds in turn", "kube-scheduler")
    kinds, done = ["built in", "ours", "kube-scheduler"], 0
    for nodes in (100, 1000):
        plane, api = plane_with(False)
        grow(api, done, nodes)
        plane.stop()
        done = nodes
        results = {kind: [] for kind in kinds}
        for number in range(ROUNDS):
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                results[kind].append(measure_once(kind))
        middle = lambda kind, key: median(result[key] for result in results[kind])
        theirs = lambda key: middle("kube-scheduler", key)
        row(f"{nodes} nodes: pods scheduled per second", middle("built in", "rate"), theirs("rate"), "{:.0f}")
        # The plots have the larger cluster, and both schedulers as clients.
        plot = lambda what: f"{what}, {nodes:,} nodes" if nodes == 1000 else None
        row("… ours as a client of the API server, too", middle("ours", "rate"), theirs("rate"), "{:.0f}", plot("pods scheduled"))
        row(f"{nodes} nodes: created → bound, seen by a client, ms, p50", middle("built in", "single"), theirs("single"), "{:.2f}")
        row("… ours as a client of the API server, too", middle("ours", "single"), theirs("single"), "{:.2f}")
        row(f"{nodes} nodes: PSS of the scheduler as a client, MB", middle("ours", "pss"), theirs("pss"), plot=plot("scheduler"))
        row("… five seconds later, idle", middle("ours", "idle_pss"), theirs("idle_pss"))
        row("… its processor time, s", middle("ours", "cpu"), theirs("cpu"), "{:.2f}")


if __name__ == "__main__":
    measure()

#!/usr/bin/env python3
"""The measurements of scripts/bench-api: our API server beside kube-apiserver and etcd."""
import json, os, subprocess, sys, time

from peers import ADDRESS, QUICK, WORK, Api, Program, idle, median, our_plane, row, sh, title, wait

ETCD, APISERVER = os.environ["PEERS"].split()
PODS = 2000 if QUICK else 5000
MANY = 5000 if QUICK else 30000
ROUNDS = 3
CHUNKS = 5
CLIENTS = 8
WATCHES = 1000
NAMESPACE = "bench"
COLLECTION = f"/api/v1/namespaces/{NAMESPACE}/pods"


def pod():
    """A pod of about 1 kB. `{n}` is the number of the request."""
    environment = [{"name": f"VARIABLE_{number}", "value": "some value of a usual length"} for number in range(6)]
    container = {"name": "main", "image": "registry.example/team/program:1.2.3", "env": environment,
                 "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}}, "ports": [{"containerPort": 8080}]}
    labels = {"app": "web", "pod-template-hash": "5d59d67564", "group": "g{n}"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p{n}", "labels": labels},
            "spec": {"nodeName": "node-0", "automountServiceAccountToken": False, "containers": [container]}}


class Side:
    """An API server with its store: the programs, and the client of the API."""

    def __init__(self, programs, api):
        self.programs, self.api = programs, api

    def start(self):
        for program in self.programs:
            program.start()
        wait("an API server", 120, lambda: self.api.ready() or [program.check() for program in self.programs] and False)
        self.api("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        self.api.send("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": "default"}})

    def pss(self):
        return sum(program.pss() for program in self.programs)

    def stop(self):
        for program in reversed(self.programs):
            program.stop()


def their_side():
    path = lambda name: os.path.join(WORK, name)
    client, peer = "http://127.0.0.1:12379", "http://127.0.0.1:12380"
    sh("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path("sa.key"))
    sh("openssl", "ec", "-in", path("sa.key"), "-pubout", "-out", path("sa.pub"))
    etcd = [ETCD, "--data-dir", path("etcd"), "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    server = [APISERVER, f"--etcd-servers={client}", f"--cert-dir={path('certs')}", "--secure-port=17443", f"--bind-address={ADDRESS}",
              f"--token-auth-file={path('tokens')}", f"--service-account-key-file={path('sa.pub')}",
              f"--service-account-signing-key-file={path('sa.key')}", "--service-account-issuer=https://kubernetes.default.svc",
              "--service-cluster-ip-range=10.43.0.0/16", "--authorization-mode=Node,RBAC", f"--advertise-address={ADDRESS}",
              "--endpoint-reconciler-type=none"]
    programs = [Program("etcd", etcd), Program("kube-apiserver", server)]
    return Side(programs, Api(f"{ADDRESS}:17443", path("certs/apiserver.crt")))


def in_turn(sides, rounds, measure):
    """The medians of each side's reports. The sides are measured in turn, and the first side changes with every round."""
    reports = [[] for _ in sides]
    for number in range(rounds):
        order = list(enumerate(sides))
        for at, side in order if number % 2 == 0 else reversed(order):
            reports[at].append(measure(side, number))
    return [{key: median(report[key] for report in each) for key in each[0]} for each in reports]


def rate(what, reports, plot):
    row(f"{what}, per second", *[report["per_second"] for report in reports], form="{:.0f}", plot=plot)
    row(f"{what}, µs, p50", *[report["p50"] for report in reports], form="{:.0f}")
    row(f"{what}, µs, p99", *[report["p99"] for report in reports], form="{:.0f}")


def requests(sides):
    size = PODS // CHUNKS
    flags = {"clients": CLIENTS, "count": size}
    create = lambda side, number: side.api.requests("POST", COLLECTION, pod(), first=number * size, **flags)
    rate("create", in_turn(sides, CHUNKS, create), "create of an object")
    get = lambda side, _: side.api.requests("GET", COLLECTION + "/p{n}", clients=CLIENTS, seconds=2, modulo=PODS)
    rate("get", in_turn(sides, ROUNDS, get), "get")
    patch = {"metadata": {"annotations": {"changed": "{n}"}}}
    media = "application/merge-patch+json"
    change = lambda side, number: side.api.requests("PATCH", COLLECTION + "/p{n}", patch, media=media, first=number * size, **flags)
    rate("merge patch", in_turn(sides, CHUNKS, change), "merge patch")
    by_label = lambda side, _: side.api.requests("GET", COLLECTION + "?labelSelector=group%3Dg{n}", clients=1, seconds=2, modulo=PODS)
    one_of = f"list by label, one of {PODS:,} pods"
    rate(f"{one_of}, one client", in_turn(sides, ROUNDS, by_label), one_of)
    everything = lambda side, _: side.api.requests("GET", COLLECTION, clients=1, count=10)
    row(f"list of {PODS} pods, ms, p50", *[report["p50"] / 1000 for report in in_turn(sides, ROUNDS, everything)])
    row(f"PSS with {PODS} pods, MB (kube-apiserver + etcd)", *[side.pss() for side in sides], plot=f"API server, {PODS:,} pods")
    fan_out(sides)
    delete = lambda side, number: side.api.requests("DELETE", COLLECTION + "/p{n}?gracePeriodSeconds=0", first=number * size, **flags)
    rate("delete", in_turn(sides, CHUNKS, delete), "delete")


def fan_out(sides):
    """Time from a write until each of 1,000 watches has its event. The client decrypts all events on the same processors."""
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps"

    def measure(side, number):
        name = f"shared-{number}"
        side.api("POST", path, {"metadata": {"name": name}})
        version = side.api("GET", path)["metadata"]["resourceVersion"]
        command = side.api.load("watches", "--count", WATCHES, "--path", f"{path}?watch=1&resourceVersion={version}",
                                "--object", f"{path}/{name}", "--writes", 30)
        report = json.loads(sh(*command).splitlines()[-1])
        if report["failed"]:
            raise SystemExit(f"{report['failed']} events were not delivered")
        return report

    reports = in_turn(sides, 2, measure)
    row(f"a write reaches {WATCHES} watches, ms, p50", *[report["p50"] / 1000 for report in reports])
    row(f"a write reaches {WATCHES} watches, ms, p99", *[report["p99"] / 1000 for report in reports])


def still():
    """Measures the idle control plane without nodes and pods, with all controllers."""
    plane, api = our_plane(port=6444, name="idle")
    plane.start()
    wait("the API server", 60, api.ready)
    time.sleep(15)
    share, wakes, written = idle([plane], 10 if QUICK else 60)
    row("idle control plane, PSS in MB", plane.pss())
    row("… percent of a core", share, form="{:.2f}")
    row("… wake-ups per second", wakes)
    row("… bytes written", written, form="{:.0f}")
    plane.stop()


def many():
    """30,000 pods on 1,000 nodes, each of which watches its pods."""
    flags = ["--controllers=*,-node-lifecycle-controller,-taint-eviction-controller"]
    plane, api = our_plane(*flags, port=6445, name="many")
    plane.start()
    wait("the API server", 60, api.ready)
    api("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    wait("the service account", 30, lambda: api.send("GET", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default")[0] == 200)
    api.requests("POST", "/api/v1/nodes", {"metadata": {"name": "node-{n}"}}, count=WATCHES, clients=4)
    # Pod n is on node n modulo 1,000.
    for first in range(0, MANY, WATCHES):
        content = pod()
        content["metadata"]["name"] = f"p{first}-{{n}}"
        content["spec"]["nodeName"] = "node-{n}"
        api.requests("POST", COLLECTION, content, count=WATCHES, clients=4)
    row(f"PSS with {MANY} pods and {WATCHES} nodes, MB", plane.pss())
    version = api("GET", "/api/v1/namespaces")["metadata"]["resourceVersion"]
    path = f"/api/v1/pods?watch=1&allowWatchBookmarks=true&resourceVersion={version}&fieldSelector=spec.nodeName%3Dnode-{{n}}"
    watches = subprocess.Popen(api.load("watches", "--count", WATCHES, "--path", path), stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    if watches.stdout.readline() != "ready\n":
        raise SystemExit("the watches did not start")
    time.sleep(3)
    row(f"PSS with {MANY} pods and {WATCHES} watches of nodes' pods, MB", plane.pss())
    watches.stdin.close()
    watches.wait()
    fan_out_alone(api)
    starts, cpu = [], []
    for _ in range(3):
        plane.stop()
        begin = time.monotonic()
        plane.start()
        wait("the API server", 60, api.ready)
        starts.append(time.monotonic() - begin)
        cpu.append(plane.cpu())
    row(f"start with {MANY} pods → ready, s (median of 3)", median(starts), form="{:.2f}")
    row("… processor time until then, s", median(cpu), form="{:.2f}")
    time.sleep(5)
    row(f"PSS after a start with {MANY} pods, MB", plane.pss())
    share, wakes, written = idle([plane], 10)
    row(f"idle with {MANY} pods, bytes written in 10 s", written, form="{:.0f}")
    row("… wake-ups per second", wakes)
    plane.stop()


def fan_out_alone(api):
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
    api("POST", path, {"metadata": {"name": "shared"}})
    version = api("GET", path)["metadata"]["resourceVersion"]
    command = api.load("watches", "--count", WATCHES, "--path", f"{path}?watch=1&resourceVersion={version}",
                       "--object", f"{path}/shared", "--writes", 50)
    report = json.loads(sh(*command).splitlines()[-1])
    row(f"with {MANY} pods a write reaches {WATCHES} watches, ms, p50", report["p50"] / 1000)
    row(f"with {MANY} pods a write reaches {WATCHES} watches, ms, p99", report["p99"] / 1000)
    for name in ("response", "first_event", "last_event"):
        row(f"… {name.replace('_', ' ')} of the slowest write, ms", report["slowest"][name] / 1000)


def beside():
    """Measures the requests to both servers in turn."""
    plane, api = our_plane("--controllers=-*", "--scheduler=false")
    sides = [Side([plane], api), their_side()]
    for side in sides:
        side.start()
    requests(sides)
    for side in sides:
        side.stop()


def measure():
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "addr", "add", f"{ADDRESS}/32", "dev", "lo")
    parts = {"requests": beside, "idle": still, "many": many}
    title(f"{CLIENTS} clients, pods of 1 kB, in turn", "kube-apiserver, etcd")
    for part in [word for word in sys.argv[1:] if word in parts] or parts:
        parts[part]()


if __name__ == "__main__":
    measure()

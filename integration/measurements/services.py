#!/usr/bin/env python3
"""The measurements of scripts/bench-services: our node beside kube-proxy and CoreDNS."""
import errno, json, os, random, shutil, socket, struct, subprocess, threading, time

from peers import CORACLE, CGROUP, LOAD, ROOT, WORK, QUICK, ADDRESS, Program, idle, inside, median, our_plane, row, sh, title, wait

STOCK, COREDNS = os.environ["PEERS"].split()
COUNT = 1000 if QUICK else 5000
ROUNDS = 2 if QUICK else 3
NAMESPACE = "bench"
ENDPOINTS = 10
PODS = 50
DNS = "10.43.0.10"


class Machine:
    """A network namespace on the bridge."""

    def __init__(self, name, number):
        self.address = f"192.0.2.{number}"
        self.dir = os.path.join(WORK, name)
        os.makedirs(self.dir)
        self.holder = Program(f"{name}-holder", ["unshare", "--net", "sleep", "infinity"]).start()
        own = os.readlink("/proc/self/ns/net")
        net = f"/proc/{self.holder.process.pid}/ns/net"
        wait("the machine's namespace", 10, lambda: os.readlink(net) != own)
        self.enter = ["nsenter", f"--net={net}", "--"]
        sh("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(self.holder.process.pid))
        sh("ip", "link", "set", name, "master", "fabric0", "up")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", ADDRESS)
        # Connections that were reset leave the kernel's table soon, so that it does not fill up.
        self.run("sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_timeout_close=1")

    def run(self, *words):
        return sh(*self.enter, *words)

    def load(self, *words):
        return json.loads(self.run(LOAD, *map(str, words)))


class Side:
    """The programs of one machine that serve its Services and names."""

    def __init__(self, machine, programs, server):
        self.machine, self.programs, self.server = machine, programs, server

    def start(self):
        for program in self.programs:
            program.start()

    def stop(self):
        for program in self.programs:
            program.stop()

    def programmed(self, addresses):
        """Waits until connections to all these Services succeed."""
        def connect():
            for program in self.programs:
                program.check()
            return all(connects(address) for address in addresses)

        inside(self.machine.holder, lambda: wait(f"the services of {self.machine.dir}", 300, connect))

    def pss(self):
        return sum(program.pss() for program in self.programs)


def connects(address):
    with socket.socket() as stream:
        stream.settimeout(2)
        return stream.connect_ex((address, 80)) == 0


class Commits:
    """Times at which the kernel committed changes of nftables in a network namespace."""

    def __init__(self, machine):
        self.socket = inside(machine.holder, lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_NETFILTER
                                                                   if hasattr(socket, "NETLINK_NETFILTER") else 12))
        self.socket.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        self.socket.bind((0, 0))
        self.socket.setsockopt(270, 1, 7)  # SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, NFNLGRP_NFTABLES
        self.times = []
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self):
        while True:
            try:
                data = self.socket.recv(1 << 20)
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    continue
                return
            now, at = time.monotonic(), 0
            while at + 16 <= len(data):
                length, kind = struct.unpack_from("=IH", data, at)
                if kind == 10 << 8 | 15:  # NFNL_SUBSYS_NFTABLES, NFT_MSG_NEWGEN: the end of a transaction
                    self.times.append(now)
                at += (length + 3) & ~3


def endpoint(number, index):
    at = number * ENDPOINTS + index
    return f"10.244.{at // 250}.{at % 250 + 1}"


def slice_of(number, name="", addresses=None):
    addresses = addresses or [endpoint(number, index) for index in range(ENDPOINTS)]
    return {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": f"s{number}-a", "labels": {"kubernetes.io/service-name": f"s{number}"}},
            "ports": [{"port": 8080, "protocol": "TCP", "name": ""}],
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}, "nodeName": name} for address in addresses]}


def grow(api, first, last):
    """Creates services with ten endpoints each. The slice comes first, so that a service is complete when it appears."""
    def create(number):
        api("POST", f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices", slice_of(number, "far"))
        service = {"metadata": {"name": f"s{number}"}, "spec": {"ports": [{"port": 80, "targetPort": 8080}]}}
        api("POST", f"/api/v1/namespaces/{NAMESPACE}/services", service)

    api.each(create, range(first, last))
    services = api.items(f"/api/v1/namespaces/{NAMESPACE}/services")
    return {int(item["metadata"]["name"][1:]): item["spec"]["clusterIP"] for item in services}


def our_side(api, machine):
    token = sh(CORACLE, "token", "--state-dir", os.path.join(WORK, "plane"), "create").split()
    path = lambda name: os.path.join(machine.dir, name)
    flags = ["--state-dir", path("state"), "--run-dir", path("run"), "--pod-log-dir", path("logs"), "--cgroup-root", CGROUP,
             "--node-name", "ours", "--node-ip", machine.address, "--overlay", "none", "--disk-free-percent", "0",
             "--image-gc-high-threshold", "100"]
    return Side(machine, [Program("agent", [CORACLE, *token[1:], *flags], machine.enter)], f"{DNS}:53")


def their_side(api, machine):
    api("POST", "/api/v1/nodes", {"metadata": {"name": "theirs"}})
    api.patch("/api/v1/nodes/theirs/status", {"status": {"addresses": [{"type": "InternalIP", "address": machine.address}]}})
    config = api.kubeconfig(os.path.join(machine.dir, "kubeconfig"))
    with open(os.path.join(machine.dir, "Corefile"), "w") as f:
        f.write(f""".:53 {{
    bind {machine.address}
    errors
    health {machine.address}:8080
    ready {machine.address}:8181
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {config}
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }}
    prometheus {machine.address}:9153
    forward . {ADDRESS}
    cache 30
}}
""")
    proxy = [os.path.join(STOCK, "kube-proxy"), f"--kubeconfig={config}", "--proxy-mode=nftables", "--hostname-override=theirs",
             "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
             "--cluster-cidr=10.42.0.0/16"]
    dns = [COREDNS, "-conf", os.path.join(machine.dir, "Corefile")]
    programs = [Program("kube-proxy", proxy, machine.enter), Program("coredns", dns, machine.enter)]
    return Side(machine, programs, f"{machine.address}:53")


def in_turn(sides, measure):
    """Medians of each side: the sides alternate, and the first one changes with every round."""
    values = {side: [] for side in sides}
    for number in range(ROUNDS):
        for side in sides if number % 2 == 0 else reversed(sides):
            values[side].append(measure(side))
    keys = values[sides[0]][0].keys()
    return [{key: median(value[key] for value in values[side]) for key in keys} for side in sides]


def connections(sides, addresses):
    some = random.Random(1).sample(sorted(addresses.values()), min(200, len(addresses)))
    to = [f"{address}:80" for address in some]
    alone = in_turn(sides, lambda side: side.machine.load("connect", *to, "--clients", 1, "--seconds", 1.5))
    both = in_turn(sides, lambda side: side.machine.load("connect", *to, "--clients", 4, "--seconds", 1.5))
    count = len(addresses)
    if any(value["failed"] for value in alone + both):
        raise SystemExit(f"connections failed: {alone} {both}")
    row(f"{count} services: new connections per second", *[value["per_second"] for value in both], form="{:.0f}")
    row(f"{count} services: time of a connection, µs, p50", *[value["p50"] for value in alone])
    row(f"{count} services: time of a connection, µs, p99", *[value["p99"] for value in alone])


def names(sides, count):
    flags = ["--names", count, "--namespace", NAMESPACE, "--clients", 4, "--seconds", 3]
    for side in sides:  # CoreDNS' cache, and ours
        side.machine.load("dns", side.server, *flags)
    values = in_turn(sides, lambda side: side.machine.load("dns", side.server, *flags))
    if any(value["failed"] for value in values):
        raise SystemExit(f"queries failed: {values}")
    row("DNS queries per second", *[value["per_second"] for value in values], form="{:.0f}", plot="DNS queries")
    row("time of a DNS query, µs, p50", *[value["p50"] for value in values])
    row("time of a DNS query, µs, p99", *[value["p99"] for value in values])


def changes(sides, work, count, pause=2):
    """Milliseconds from a request until the kernel of each side has the change: median and maximum for each side. Then the
    median until the API server's response. Each change follows a pause: kube-proxy programs at most once a second."""
    commits = [Commits(side.machine) for side in sides]
    took, answered = [[] for _ in sides], []
    for number in range(count):
        time.sleep(pause)
        for commit in commits:
            commit.times.clear()
        begin = time.monotonic()
        work(number)
        answered.append((time.monotonic() - begin) * 1000)
        wait("the changes", 60, lambda: all(commit.times for commit in commits))
        for samples, commit in zip(took, commits):
            samples.append((commit.times[0] - begin) * 1000)
    return [(median(samples), max(samples)) for samples in took], median(answered)


def timed(work, count=50, pause=0.02):
    """Median of the milliseconds of a call. Each call follows a pause."""
    samples = []
    for number in range(count):
        time.sleep(pause)
        begin = time.monotonic()
        work(number)
        samples.append((time.monotonic() - begin) * 1000)
    return median(samples)


def parts(api, dry_run):
    """The parts of a change, measured apart with the same pauses: a request that changes nothing, the change without its commit, and
    a sync of the API server's disk. On a machine without an idle processor, a sync takes until the next tick of the kernel's timer."""
    path = os.path.join(WORK, "sync")
    with open(path, "wb") as file:
        def sync(_):
            os.write(file.fileno(), b"x" * 4096)
            os.fdatasync(file.fileno())

        row("… a request that changes nothing, ms, p50", timed(lambda _: api("GET", "/version")), form="{:.2f}")
        row("… the change without its commit (dry run), ms, p50", timed(dry_run), form="{:.2f}")
        row("… a sync of 4 KiB to the disk, ms, p50", timed(sync), form="{:.2f}")
    os.remove(path)


def set_endpoints(api, number, addresses, query=""):
    path = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices/s{number}-a{query}"
    api.patch(path, {"endpoints": slice_of(number, "far", addresses)["endpoints"]})


def change_endpoint(api, number, address, query=""):
    """Replaces the last endpoint of a service."""
    set_endpoints(api, number, [endpoint(number, index) for index in range(ENDPOINTS - 1)] + [address], query)


def resize(api, number):
    """Removes the last endpoint of a service at even numbers, and adds it again at odd numbers."""
    set_endpoints(api, number // 2, [endpoint(number // 2, index) for index in range(ENDPOINTS - 1 + number % 2)])


def one_endpoint(api, sides):
    change = lambda number: change_endpoint(api, number, f"10.244.250.{number + 1}")
    medians, answered = changes(sides, change, 5 if QUICK else 15)
    row("change of one endpoint: request → the API server's response, ms, p50", answered, form="{:.2f}")
    row("change of one endpoint: request → kernel, ms, p50", *[value[0] for value in medians], form="{:.2f}")
    row("change of one endpoint: request → kernel, ms, max", *[value[1] for value in medians], form="{:.2f}")


def endpoints_alone(api, side):
    """Changes endpoints one after the other while only our node watches them. So the times do not include the work of kube-proxy
    and CoreDNS, and the processor does not become idle before each change."""
    change = lambda number: change_endpoint(api, number, f"10.244.251.{number + 1}")
    [(middle, most)], answered = changes([side], change, 50, pause=0.02)
    row("change of one endpoint, without a pause, our node alone: request → the API server's response, ms, p50", answered, form="{:.2f}")
    row("… request → kernel, ms, p50", middle, form="{:.2f}")
    row("… request → kernel, ms, max", most, form="{:.2f}")
    [(middle, most)], answered = changes([side], lambda number: resize(api, number), 50, pause=0.02)
    row("one endpoint more or less, without a pause, our node alone: request → the API server's response, ms, p50", answered, form="{:.2f}")
    row("… request → kernel, ms, p50", middle, form="{:.2f}")
    row("… request → kernel, ms, max", most, form="{:.2f}")
    parts(api, lambda number: change_endpoint(api, number, f"10.244.251.{number + 101}", "?dryRun=All"))


def query(name):
    """A DNS query for the IPv4 addresses of a name."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">6H", 1, 0x100, 1, 0, 0, 0) + labels + struct.pack(">BHH", 0, 1, 1)


def endpoint_in_dns(api, side):
    """Milliseconds from a request that makes an endpoint ready until our DNS answers with it. CoreDNS is not measured: its
    cache keeps an answer for up to 30 s."""
    headless = slice_of("h", "far", ["10.244.252.255"])
    api("POST", f"/api/v1/namespaces/{NAMESPACE}/services",
        {"metadata": {"name": "sh"}, "spec": {"clusterIP": "None", "ports": [{"port": 8080}]}})
    api("POST", f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices", headless)
    stream = inside(side.machine.holder, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    host, port = side.server.split(":")
    stream.connect((host, int(port)))
    stream.settimeout(5)
    question, samples = query(f"sh.{NAMESPACE}.svc.cluster.local"), []
    for number in range(5 if QUICK else 15):
        time.sleep(0.2)
        address = f"10.244.252.{number + 1}"
        begin = time.monotonic()
        api.patch(f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices/sh-a",
                  {"endpoints": slice_of("h", "far", [address])["endpoints"]})
        answer = b""
        while socket.inet_aton(address) not in answer:
            if time.monotonic() - begin > 30:
                raise SystemExit("DNS does not answer with a new endpoint")
            stream.send(question)
            answer = stream.recv(4096)
        samples.append((time.monotonic() - begin) * 1000)
    row("a ready endpoint: request → DNS answers with it, ms, p50", median(samples), form="{:.2f}")
    row("a ready endpoint: request → DNS answers with it, ms, max", max(samples), form="{:.2f}")


def starts(sides, addresses):
    """Seconds from the start of the programs, with an empty table, until the services can be reached."""
    some = random.Random(2).sample(sorted(addresses.values()), min(50, len(addresses)))

    def start(side):
        side.stop()
        side.machine.run("nft", "flush", "ruleset")
        begin = time.monotonic()
        side.start()
        side.programmed(some)
        took = time.monotonic() - begin
        # Waits for the end of the start, which would disturb the next measurement.
        time.sleep(5)
        return {"seconds": took, "cpu": sum(program.cpu() for program in side.programs)}

    values = in_turn(sides, start)
    row(f"start → {len(addresses)} services reachable, s", *[value["seconds"] for value in values], form="{:.2f}")
    row("… processor time after 5 s more, s", *[value["cpu"] for value in values], form="{:.2f}")


def policies(api, side):
    """Changes one of 1,000 policies: each pod of this node has 20 of them. kube-proxy has nothing like it."""
    layout, image = os.path.join(ROOT, "target/images/busybox"), "docker.io/library/busybox:1"
    if not os.path.isdir(layout):
        raise SystemExit("target/images/busybox is missing; run scripts/image")
    sh(CORACLE, "image", "import", layout, "--name", image, "--run-dir", os.path.join(side.machine.dir, "run"))
    for number in range(PODS):
        container = {"name": "c", "image": image, "command": ["sleep", "100000"]}
        api("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", {"metadata": {"name": f"p{number}", "labels": {"app": f"p{number}"}}, "spec": {
            "nodeName": "ours", "terminationGracePeriodSeconds": 0, "enableServiceLinks": False, "containers": [container]}})
    running = lambda: all(pod["status"].get("podIP") for pod in api.items(f"/api/v1/namespaces/{NAMESPACE}/pods")) or time.sleep(0.2)
    wait("the pods", 120, running)
    path = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"

    def policy(number, block):
        peers = [{"ipBlock": {"cidr": block}}, {"podSelector": {"matchLabels": {"app": f"p{(number + 1) % PODS}"}}}]
        return {"metadata": {"name": f"n{number}"}, "spec": {"podSelector": {"matchLabels": {"app": f"p{number % PODS}"}},
                "policyTypes": ["Ingress"], "ingress": [{"from": peers, "ports": [{"port": 8080}]}]}}

    api.each(lambda number: api("POST", path, policy(number, f"10.250.{number // 250}.{number % 250}/32")), range(1000))
    time.sleep(5)
    change = lambda number: api.patch(f"{path}/n{number}", {"spec": policy(number, f"10.251.0.{number}/32")["spec"]})
    [(middle, most)], answered = changes([side], change, 5 if QUICK else 15)
    row("change of one of 1,000 policies: request → the API server's response, ms, p50", answered, form="{:.2f}")
    row("change of one of 1,000 policies: request → kernel, ms, p50", middle, form="{:.2f}")
    row("change of one of 1,000 policies: request → kernel, ms, max", most, form="{:.2f}")
    again = lambda number: api.patch(f"{path}/n{number}", {"spec": policy(number, f"10.252.0.{number}/32")["spec"]})
    [(middle, most)], answered = changes([side], again, 50, pause=0.02)
    row("… without a pause: request → the API server's response, ms, p50", answered, form="{:.2f}")
    row("… without a pause: request → kernel, ms, p50", middle, form="{:.2f}")
    parts(api, lambda number: api.patch(f"{path}/n{number}?dryRun=All", {"spec": policy(number, f"10.253.0.{number}/32")["spec"]}))
    api("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods")
    wait("the removal of the pods", 60, lambda: not api.items(f"/api/v1/namespaces/{NAMESPACE}/pods") or time.sleep(0.2))


def network():
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "link", "add", "fabric0", "type", "bridge")
    sh("ip", "addr", "add", f"{ADDRESS}/24", "dev", "fabric0")
    sh("ip", "link", "set", "fabric0", "up")
    machines = [Machine(name, number) for name, number in (("far", 20), ("ours", 11), ("theirs", 12))]
    far = machines[0]
    # The far machine has all endpoints. It refuses connections to services that a node does not translate.
    for ranges in ("10.244.0.0/16", "10.43.0.0/16"):
        far.run("ip", "route", "add", "local", ranges, "dev", "lo")
        for machine in machines[1:]:
            machine.run("ip", "route", "add", ranges, "via", far.address)
    Program("endpoints", [LOAD, "listen", "0.0.0.0:8080"], far.enter).start()
    return machines[1:]


def measure():
    machines = network()
    plane, api = our_plane("--controllers=*,-node-lifecycle-controller")
    plane.start()
    wait("the API server", 60, api.ready)
    api("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    sides = [our_side(api, machines[0]), their_side(api, machines[1])]
    for side in sides:
        side.start()
    title(f"{ENDPOINTS} endpoints each, {ROUNDS} rounds in turn", "kube-proxy, CoreDNS")
    done = 0
    for count in (1, 1000, COUNT) if not QUICK else (1, COUNT):
        addresses = grow(api, done, count)
        done = count
        for side in sides:
            side.programmed([addresses[0], *random.Random(3).sample(sorted(addresses.values()), min(20, count)), addresses[count - 1]])
        time.sleep(3)
        if count == 1:
            time.sleep(5)
            small = [[program.pss() for program in side.programs] for side in sides]
        connections(sides, addresses)
    time.sleep(10)
    names(sides, COUNT)
    one_endpoint(api, sides)
    large = [[program.pss() for program in side.programs] for side in sides]
    row("PSS with one service, MB (node with runtime; kube-proxy + CoreDNS)", sum(small[0]), sum(small[1]))
    row(f"PSS with {COUNT} services, MB", sum(large[0]), sum(large[1]), plot=f"node with {COUNT:,} services")
    row("… kube-proxy alone, CoreDNS alone", large[1][0], large[1][1])
    seconds = 10 if QUICK else 30
    still = [idle(side.programs, seconds) for side in sides]
    row("idle: wake-ups per second", still[0][1], still[1][1])
    row("idle: percent of a core", still[0][0], still[1][0], form="{:.2f}")
    starts(sides, addresses)
    row(f"PSS after a start with {COUNT} services, MB", *[side.pss() for side in sides])
    sides[1].stop()
    endpoint_in_dns(api, sides[0])
    endpoints_alone(api, sides[0])
    policies(api, sides[0])
    sides[0].stop()
    shutil.rmtree(os.path.join(sides[0].machine.dir, "logs"), ignore_errors=True)
    subprocess.run([CORACLE, "down", "--state-dir", f"{sides[0].machine.dir}/state", "--run-dir", f"{sides[0].machine.dir}/run",
                    "--cgroup-root", CGROUP, "--purge"], check=False, capture_output=True)
    plane.stop()


if __name__ == "__main__":
    measure()

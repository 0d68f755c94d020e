#!/usr/bin/env python3
"""The measurements of scripts/bench. They run in a network namespace of their own, and end all processes that they start."""
import http.client, json, os, re, shutil, signal, ssl, statistics, subprocess, sys, tempfile, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CORACLE = os.path.join(ROOT, "target/coracle")
KUBECTL = os.path.join(ROOT, "target/tools/kubectl-1.37")
QUICK = "quick" in sys.argv[1:]


def sh(*words, **options):
    return subprocess.run(words, check=True, capture_output=True, text=True, **options).stdout


def wait(what, seconds, done):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = done()
        if value:
            return value
        time.sleep(0.002)
    raise SystemExit(f"bench: timed out after {seconds} s: {what}")


def quantile(samples, q):
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def pss(pids):
    """Proportional set size in kB, summed."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as f:
                total += int(re.search(r"^Pss:\s+(\d+)", f.read(), re.M).group(1))
        except (OSError, AttributeError):
            pass
    return total


def processes(word):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")
        except OSError:
            continue
        if command and any(word.encode() in part for part in command) and int(pid) != os.getpid():
            found.append((int(pid), command))
    return found


def volatile():
    """A tmpfs for run directories, as /run is on users' machines: creating a file on a disk takes several times as long."""
    mounts = [line.split()[1:3] for line in open("/proc/mounts")]
    return next((place for place in ("/run", "/dev/shm") if [place, "tmpfs"] in mounts), tempfile.gettempdir())


class Cluster:
    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="coracle-bench-")
        self.name = os.path.basename(self.dir)
        self.run = os.path.join(volatile(), self.name + "-run")
        self.cgroup = "/" + self.name
        path = lambda name: os.path.join(self.dir, name)
        self.places = ["--state-dir", path("state"), "--run-dir", self.run]
        # A /24 has too few addresses for 1,000 pods.
        self.flags = ["--pod-log-dir", path("logs"), "--cgroup-root", self.cgroup, "--node-name", "bench", "--max-pods", "1010"]
        self.range = ["--node-cidr-mask-size-ipv4", "22"]
        self.environment = dict(os.environ, KUBECONFIG=path("state/admin.kubeconfig"), HOME=self.dir)
        self.process = None

    def start(self):
        """Seconds from the command to the first response in which the node is Ready."""
        log = open(os.path.join(self.dir, "log"), "a")
        begin = time.monotonic()
        self.process = subprocess.Popen([CORACLE, "up", *self.places, *self.flags, *self.range], stdout=log, stderr=log)
        wait("the node", 60, self.ready)
        return time.monotonic() - begin

    def ready(self):
        if not os.path.exists(self.environment["KUBECONFIG"]):
            return False
        jsonpath = 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}'
        answer = subprocess.run([KUBECTL, "get", "nodes", "-o", jsonpath], env=self.environment, capture_output=True, text=True)
        return answer.stdout.strip() == "True"

    def kubectl(self, *words):
        return sh(KUBECTL, *words, env=self.environment)

    def pods(self):
        return json.loads(self.kubectl("get", "pods", "-o", "json"))["items"]

    def deploy(self, name, replicas):
        """Seconds from the command until the deployment's status has all replicas as ready."""
        begin = time.monotonic()
        self.kubectl("create", "deployment", name, "--image=nginx:1.22", f"--replicas={replicas}")
        self.kubectl("wait", f"deployment/{name}", f"--for=jsonpath={{.status.readyReplicas}}={replicas}", "--timeout=120s")
        return time.monotonic() - begin

    def scale(self, name, replicas):
        """Seconds from the command until the deployment's status has all replicas as ready."""
        begin = time.monotonic()
        self.kubectl("scale", f"deployment/{name}", f"--replicas={replicas}")
        self.kubectl("wait", f"deployment/{name}", f"--for=jsonpath={{.status.readyReplicas}}={replicas}", "--timeout=600s")
        return time.monotonic() - begin

    def cpu(self):
        """Seconds of processor time that coracle itself has used."""
        stat = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def delete(self, name):
        self.kubectl("delete", "deployment", name)
        # Lists only names, with pauses, because a list of 1,000 pods takes processor time too.
        wait("the removal of the pods", 600, lambda: not self.kubectl("get", "pods", "-o", "name", "--chunk-size=0") or time.sleep(0.2))

    def stop(self):
        if self.process:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()
            self.process = None

    def down(self):
        self.stop()
        subprocess.run([CORACLE, "down", *self.places, *self.flags, "--purge"], check=False)
        for left in (self.dir, self.run):
            shutil.rmtree(left, ignore_errors=True)


def journal(place):
    """Whether the file system of a directory has a journal, or None if it is not ext4."""
    device = os.stat(place).st_dev
    name = os.path.basename(os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))
    try:
        return open(f"/sys/fs/ext4/{name}/journal_task").read().strip() != "<none>"
    except OSError:
        return None


def row(what, value):
    print(f"| {what} | {value} |", flush=True)


def ms(seconds):
    return f"{seconds * 1000:.0f} ms"


def idle(cluster, seconds):
    """Percent of a core, wake-ups per second and written bytes of all processes of the cluster while it is idle."""
    pids = [pid for pid, _ in processes(cluster.name)]

    def look():
        cpu, written, wakes = 0, 0, {}
        for pid in pids:
            stat = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
            cpu += int(stat[11]) + int(stat[12])
            written += int(re.search(r"^write_bytes: (\d+)", open(f"/proc/{pid}/io").read(), re.M).group(1))
            for task in os.listdir(f"/proc/{pid}/task"):
                status = open(f"/proc/{pid}/task/{task}/status").read()
                wakes[task] = int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.M).group(1))
        return cpu, written, wakes

    # Threads for blocking calls exit after ten idle seconds; their exit is not measured.
    time.sleep(11)
    before = look()
    time.sleep(seconds)
    after = look()
    woken = sum(count - before[2].get(task, 0) for task, count in after[2].items())
    cpu = (after[0] - before[0]) / os.sysconf("SC_CLK_TCK") / seconds * 100
    return cpu, woken / seconds, after[1] - before[1]


def memory(cluster, label):
    everything = processes(cluster.name)
    shims = [pid for pid, command in everything if b"shim" in command]
    others = [pid for pid, command in everything if b"shim" not in command]
    text = f"{pss(others) / 1000:.1f} MB"
    if shims:
        text += f" + {len(shims)} shims of {pss(shims) / len(shims):.0f} kB"
    row(f"PSS, {label}", text)


def one_cluster():
    cluster = Cluster()
    try:
        row("coracle up (first start: keys, store) → node Ready", ms(cluster.start()))
        cluster.stop()
        again = []
        for last in (False, False, True):
            again.append(cluster.start())
            if not last:
                cluster.stop()
        row("coracle up (again) → node Ready", ms(statistics.median(again)))
        layout = os.path.join(ROOT, "target/images/nginx")
        sh(CORACLE, "image", *cluster.places, "import", layout, "--name", "docker.io/library/nginx:1.22")
        cluster.kubectl("create", "namespace", "warm")
        memory(cluster, "idle, no pods")
        cpu, wakes, written = idle(cluster, 10 if QUICK else 60)
        row("idle, no pods", f"{cpu:.2f} % of a core, {wakes:.1f} wake-ups/s, {written} bytes written")
        for replicas, rounds in [(1, 5 if QUICK else 20), (10, 2 if QUICK else 5), (100, 1)]:
            took = []
            for number in range(rounds):
                took.append(cluster.deploy(f"d{number}", replicas))
                if (replicas, number) not in ((10, rounds - 1), (100, rounds - 1)):
                    cluster.delete(f"d{number}")
            row(f"kubectl create deployment → {replicas} Ready", f"p50 {ms(quantile(took, .5))}, max {ms(max(took))}")
            if replicas > 1:
                memory(cluster, f"{replicas} pods")
                if replicas == 100:
                    cpu, wakes, written = idle(cluster, 10 if QUICK else 60)
                    row("idle, 100 pods", f"{cpu:.2f} % of a core, {wakes:.1f} wake-ups/s, {written} bytes written")
                    cluster.process.kill()
                    cluster.process.wait()
                    row("kill -9 with 100 pods, coracle up → node Ready", ms(cluster.start()))
                cluster.delete(f"d{rounds - 1}")
    finally:
        cluster.down()


def many_pods(most):
    """Pods in batches of 100 on one node, in a new cluster. The time per batch must not grow with the number of pods."""
    cluster = Cluster()
    try:
        cluster.start()
        layout = os.path.join(ROOT, "target/images/nginx")
        sh(CORACLE, "image", *cluster.places, "import", layout, "--name", "docker.io/library/nginx:1.22")
        cluster.kubectl("create", "deployment", "many", "--image=nginx:1.22", "--replicas=0")
        took, used = [], []
        for replicas in range(100, most + 1, 100):
            before = cluster.cpu()
            took.append(cluster.scale("many", replicas))
            used.append(cluster.cpu() - before)
        each = lambda samples: " ".join(f"{sample:.1f}" for sample in samples)
        row(f"{most} pods in batches of 100 → Ready", f"{sum(took):.1f} s: {each(took)}")
        row(f"{most} pods, processor time per batch", f"{sum(used):.1f} s: {each(used)}")
        memory(cluster, f"{most} pods, at once")
        # A node without changes returns the pages of its program and free memory after three seconds.
        time.sleep(6)
        memory(cluster, f"{most} pods, at rest")
        before, begin = cluster.cpu(), time.monotonic()
        cluster.delete("many")
        row(f"{most} pods deleted", f"{time.monotonic() - begin:.1f} s, {cluster.cpu() - before:.1f} s of processor time")
        time.sleep(20)
        memory(cluster, f"20 s after {most} pods were deleted")
    finally:
        cluster.down()


class Plane:
    """A control plane without a node, on a bridge to which nodes can be connected."""

    ADDRESS = "192.0.2.1"

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="coracle-bench-")
        self.state = os.path.join(self.dir, "state")
        self.process = None

    def start(self):
        sh("ip", "link", "add", "fabric0", "type", "bridge")
        sh("ip", "addr", "add", f"{self.ADDRESS}/24", "dev", "fabric0")
        sh("ip", "link", "set", "fabric0", "up")
        places = ["--state-dir", self.state, "--run-dir", os.path.join(self.dir, "run")]
        log = open(os.path.join(self.dir, "log"), "a")
        addresses = ["--listen", "0.0.0.0:6443", "--advertise-address", self.ADDRESS]
        self.process = subprocess.Popen([CORACLE, "controlplane", *places, *addresses], stdout=log, stderr=log)
        wait("the control plane", 60, self.answers)

    def get(self, path):
        pki = lambda name: os.path.join(self.state, "pki", name)
        context = ssl.create_default_context(cafile=pki("ca.crt"))
        context.load_cert_chain(pki("admin.crt"), pki("admin.key"))
        connection = http.client.HTTPSConnection(self.ADDRESS, 6443, context=context, timeout=60)
        connection.request("GET", path)
        return connection.getresponse()

    def answers(self):
        try:
            return self.get("/readyz").status == 200
        except OSError:
            return False

    def stop(self):
        if self.process:
            self.process.terminate()
            self.process.wait()
            self.process = None

    def join(self, number):
        """Seconds from the start of `coracle agent --join` to the watch event in which its node is Ready."""
        host = Host(self, number)
        try:
            return host.join()
        finally:
            host.remove()

    def down(self):
        self.stop()
        subprocess.run(["ip", "link", "del", "fabric0"], capture_output=True, check=False)
        shutil.rmtree(self.dir, ignore_errors=True)


class Host:
    """A machine with an agent: network and mount namespaces, connected to the bridge of the control plane."""

    def __init__(self, plane, number):
        self.plane, self.name = plane, f"join-{number}"
        self.cgroup = f"{os.path.basename(plane.dir)}-{number}"
        self.run = os.path.join(volatile(), f"{self.cgroup}-run")
        self.places = ["--state-dir", self.path("state"), "--run-dir", self.run]
        self.flags = [*self.places, "--pod-log-dir", self.path("logs"), "--cgroup-root", f"/{self.cgroup}", "--node-name", self.name]
        self.agent = None
        os.makedirs(self.path("state"))
        self.holder = subprocess.Popen(["unshare", "--net", "--mount", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        pid = self.holder.pid
        self.enter = ["nsenter", f"--net=/proc/{pid}/ns/net", f"--mount=/proc/{pid}/ns/mnt", "--"]
        try:
            namespace = lambda pid: os.readlink(f"/proc/{pid}/ns/mnt")
            wait("the machine's namespaces", 10, lambda: namespace(pid) != namespace("self"))
            sh("ip", "link", "add", "port0", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            sh("ip", "link", "set", "port0", "master", "fabric0", "up")
            self.sh("ip", "link", "set", "lo", "up")
            self.sh("ip", "addr", "add", f"192.0.2.{10 + number}/24", "dev", "eth0")
            self.sh("ip", "link", "set", "eth0", "up")
        except BaseException:
            self.remove()
            raise

    def path(self, place):
        return os.path.join(self.plane.dir, self.name, place)

    def sh(self, *words):
        return sh(*self.enter, *words)

    def start(self, *more):
        log = open(self.path("log"), "a")
        self.agent = subprocess.Popen([*self.enter, CORACLE, "agent", *more, *self.flags], stdout=log, stderr=log)

    def join(self):
        """Seconds from the start of `coracle agent --join` to the watch event in which its node is Ready."""
        command = sh(CORACLE, "token", "--state-dir", self.plane.state, "create").split()
        # The watch is established when the response begins.
        events = self.plane.get(f"/api/v1/nodes?watch=1&fieldSelector=metadata.name={self.name}")
        begin = time.monotonic()
        self.start(*command[2:])
        while True:
            node = json.loads(events.readline())["object"]
            conditions = node.get("status", {}).get("conditions", [])
            if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
                return time.monotonic() - begin

    def processes(self):
        """The shims, and all processes in the cgroups of the node's pods."""
        found = [pid for pid, command in processes(self.run) if b"shim" in command]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                groups = open(f"/proc/{pid}/cgroup").read()
                os.readlink(f"/proc/{pid}/exe")
            except OSError:  # it has ended, or is a zombie
                continue
            if f"/{self.cgroup}/" in groups:
                found.append(int(pid))
        return found

    def cut_power(self):
        """Ends every process of the node, and removes its mounts and its run directory, as a power cut does."""
        self.agent.kill()
        self.agent.wait()

        def ended():
            left = self.processes()
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            return not left

        wait("the end of the node's processes", 60, ended)
        below = f"awk '{{print $5}}' /proc/self/mountinfo | grep -E '^({self.run}|{self.path('state')})(/|$)'"
        self.sh("sh", "-c", f"{below} | tac | xargs -r -n1 umount -l")
        shutil.rmtree(self.run)

    def ready(self):
        """Number of Ready pods of the node, as its kubelet API reports them."""
        pki = lambda name: os.path.join(self.plane.state, "pki", name)
        curl = ["curl", "-sk", "--max-time", "2", "--cert", pki("admin.crt"), "--key", pki("admin.key")]
        answer = subprocess.run([*self.enter, *curl, "https://127.0.0.1:10250/pods"], capture_output=True, check=False)
        pods = json.loads(answer.stdout or "{}").get("items") or []
        of = lambda pod: pod.get("status", {}).get("conditions") or []
        return sum(any(c["type"] == "Ready" and c["status"] == "True" for c in of(pod)) for pod in pods)

    def remove(self):
        if self.agent:
            self.agent.terminate()
            self.agent.wait()
            subprocess.run([*self.enter, CORACLE, "down", *self.flags, "--purge"], check=False)
        self.holder.kill()
        self.holder.wait()
        # The kernel removes the veth pair some time after the namespace.
        subprocess.run(["ip", "link", "del", "port0"], capture_output=True, check=False)
        shutil.rmtree(self.run, ignore_errors=True)


# A deployment whose pods need a config map, a secret, the token of their service account and the environment of services.
ALONE = """
{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"color": "blue"}}
---
{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "password"}, "stringData": {"word": "hunter2"}}
---
{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "alone"}, "spec": {"replicas": 0,
 "selector": {"matchLabels": {"app": "alone"}}, "template": {"metadata": {"labels": {"app": "alone"}}, "spec": {
  "containers": [{"name": "c", "image": "nginx:1.22", "envFrom": [{"configMapRef": {"name": "settings"}}],
   "volumeMounts": [{"name": "secret", "mountPath": "/secret"}],
   "readinessProbe": {"httpGet": {"port": 80}, "periodSeconds": 1}}],
  "volumes": [{"name": "secret", "secret": {"secretName": "password"}}]}}}}
"""


def boot_alone(replicas):
    """The time in which a node that boots without a control plane makes its pods Ready."""
    plane = Plane()
    try:
        plane.start()
        host = Host(plane, 20)
        try:
            host.join()
            layout = os.path.join(ROOT, "target/images/nginx")
            host.sh(CORACLE, "image", *host.places, "import", layout, "--name", "docker.io/library/nginx:1.22")
            environment = dict(os.environ, KUBECONFIG=os.path.join(plane.state, "admin.kubeconfig"), HOME=plane.dir)
            sh(KUBECTL, "apply", "-f", "-", env=environment, input=ALONE)
            sh(KUBECTL, "scale", "deployment/alone", f"--replicas={replicas}", env=environment)
            wait("the pods", 120, lambda: host.ready() == replicas or time.sleep(0.2))
            host.cut_power()
            plane.stop()
            begin = time.monotonic()
            host.start()
            wait("the pods without a control plane", 60, lambda: host.ready() == replicas or time.sleep(0.02))
            row(f"boot without a control plane → {replicas} pods Ready", ms(time.monotonic() - begin))
        finally:
            host.remove()
    finally:
        plane.down()


def joins():
    plane = Plane()
    try:
        plane.start()
        took = [plane.join(number) for number in range(5)]
        row("coracle agent --join → node Ready", f"p50 {ms(quantile(took, .5))}, max {ms(max(took))}")
    finally:
        plane.down()


def main():
    sh("ip", "link", "set", "lo", "up")
    size = os.path.getsize(CORACLE)
    if journal(tempfile.gettempdir()) is False:
        print(f"bench: {tempfile.gettempdir()} is on ext4 without a journal, which is slow after many files were removed; "
              "set TMPDIR to a directory of another file system", file=sys.stderr)
    print("| what | measured |\n|---|---|")
    row("binary", f"{size / 1e6:.1f} MB, static")
    joins()
    for replicas in (5, 100):
        boot_alone(replicas)
    one_cluster()
    many_pods(200 if QUICK else 1000)


if __name__ == "__main__":
    main()

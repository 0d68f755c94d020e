"""Programs, API clients and tables of the measurements that compare Coracle with Kubernetes' own components."""
import concurrent.futures, ctypes, http.client, json, math, os, ssl, statistics, subprocess, sys, threading, time, types

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import bench  # noqa: E402
from bench import pss, sh, wait  # noqa: E402

CORACLE, LOAD, WORK, CGROUP = (os.environ[name] for name in ("CORACLE", "LOAD", "WORK", "CGROUP"))
QUICK = "quick" in sys.argv[1:]
TOKEN = "measure"
ADDRESS = "192.0.2.1"


class Program:
    """A process with a log in the work directory. `where` is a command that enters namespaces."""

    def __init__(self, name, command, where=()):
        self.name, self.command, self.where, self.process = name, command, list(where), None

    def start(self):
        with open(os.path.join(WORK, f"{self.name}.log"), "a") as log:
            self.process = subprocess.Popen([*self.where, *self.command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self

    def stop(self):
        """Ends the process and returns the seconds that this took."""
        begin = time.monotonic()
        self.process.terminate()
        self.process.wait()
        return time.monotonic() - begin

    def pss(self):
        """Megabytes."""
        return pss([self.process.pid]) / 1000

    def cpu(self):
        """Seconds of processor time."""
        return bench.Cluster.cpu(self)

    def check(self):
        if self.process.poll() is not None:
            log = open(os.path.join(WORK, f"{self.name}.log")).read()
            raise SystemExit(f"{self.name} exited with {self.process.returncode}:\n{log[-3000:]}")


def idle(programs, seconds):
    """Percent of a core, wake-ups a second and written bytes of idle programs."""
    saved = bench.processes
    try:
        bench.processes = lambda _: [(program.process.pid, []) for program in programs]
        return bench.idle(types.SimpleNamespace(name=""), seconds)
    finally:
        bench.processes = saved


class Api:
    """An API server: its address, and requests to it on one connection for each thread."""

    def __init__(self, address, ca):
        self.address, self.ca, self.local = address, ca, threading.local()

    def connection(self):
        """The connection of this thread. A server closes idle ones, so a connection is not used again after ten seconds."""
        now = time.monotonic()
        if now - getattr(self.local, "used", -math.inf) > 10:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            host, port = self.address.split(":")
            self.local.connection = http.client.HTTPSConnection(host, int(port), context=context, timeout=120)
        self.local.used = now
        return self.local.connection

    def send(self, method, path, body=None, media="application/json"):
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": media}
        try:
            connection = self.connection()
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null") if path != "/readyz" else answer.read()
        except (OSError, http.client.HTTPException):
            self.local.used = -math.inf
            raise

    def __call__(self, method, path, body=None, media="application/json"):
        status, answer = self.send(method, path, body, media)
        if status >= 300:
            raise SystemExit(f"{method} {path}: {status} {answer}")
        return answer

    def patch(self, path, body):
        return self("PATCH", path, body, "application/merge-patch+json")

    def ready(self):
        try:
            return self.send("GET", "/readyz")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def items(self, path):
        return self("GET", path)["items"]

    def each(self, work, numbers):
        """Runs work(number) on a few threads."""
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(work, numbers))

    def load(self, kind, *flags):
        """A command of the load generator."""
        return [LOAD, kind, "--server", self.address, "--ca", self.ca, "--token", TOKEN, *map(str, flags)]

    def requests(self, method, path, body=None, **flags):
        """The report of the load generator about these requests. A failed request ends the measurement."""
        words = ["--method", method, "--path", path]
        if body is not None:
            words += ["--body", json.dumps(body)]
        for name, value in flags.items():
            words += [f"--{name}", value]
        report = json.loads(sh(*self.load("requests", *words)))
        if report["failed"]:
            raise SystemExit(f"{method} {path}: {report['failed']} requests failed")
        return report

    def kubeconfig(self, file):
        cluster = {"server": f"https://{self.address}", "insecure-skip-tls-verify": True}
        content = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {"token": TOKEN}}],
                   "clusters": [{"name": "c", "cluster": cluster}], "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}
        with open(file, "w") as f:
            json.dump(content, f)
        return file


def our_plane(*flags, port=6443, name="plane"):
    """Our control plane as a program, and its API."""
    with open(os.path.join(WORK, "tokens"), "w") as f:
        f.write(f'{TOKEN},admin,1,"system:masters"\n')
    state = os.path.join(WORK, name)
    command = [CORACLE, "controlplane", "--state-dir", state, "--run-dir", state + ".run", "--listen", f"{ADDRESS}:{port}",
               "--advertise-address", ADDRESS, "--token-auth-file", os.path.join(WORK, "tokens"), *flags]
    return Program(name, command), Api(f"{ADDRESS}:{port}", os.path.join(state, "pki/ca.crt"))


def inside(program, work):
    """Runs `work` on a thread in the network namespace of a program."""
    def enter():
        with open(f"/proc/{program.process.pid}/ns/net") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), "setns")
        return work()

    # The thread ends with the pool, so no other work runs in the namespace.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result()


def row(what, ours, theirs=None, form="{:.1f}", plot=None):
    """A line of the table with the ratio of ours to theirs. `plot` is the name of its row in docs/plots/results.tsv."""
    if plot:
        with open(os.path.join(WORK, "plotted"), "a") as file:
            file.write(f"{plot}\t{ours}\t{theirs}\n")
    if theirs is None:
        print(f"| {what} | {form.format(ours)} | | |", flush=True)
    else:
        print(f"| {what} | {form.format(ours)} | {form.format(theirs)} | {ours / theirs if theirs else 0:.3g} |", flush=True)


def title(what, theirs):
    load = os.getloadavg()[0]
    print(f"| {what}; load {load:.1f} at the start | coracle | {theirs} | ratio |\n|---|---|---|---|", flush=True)


median = statistics.median
__all__ = [name for name in globals() if not name.startswith("_")]

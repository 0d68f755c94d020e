"""A local cluster of three nodes, with a registry on its bridge."""
import glob, json, os, signal, subprocess, time
import urllib.request

from checks import check, output, run, succeeds

HERE = os.path.dirname(os.path.abspath(__file__))
IMAGES = os.path.join(HERE, "../../target/charts")
HOST = "charts.example.com"  # registry in the images' names; hosts.toml redirects the nodes to the local one


class Cluster:
    def __init__(self, tools, name, work):
        self.tools, self.name, self.work = tools, name, work
        self.state, self.run_dir, self.mirrors = work + "/state", work + "/run", work + "/mirrors"
        self.environment = {**os.environ, "KUBECONFIG": work + "/kubeconfig", "HOME": work}
        self.registry = None

    def coracle(self, *words):
        places = ("--state-dir", self.state, "--run-dir", self.run_dir)
        return run(os.environ["CORACLE"], "cluster", *words, *places, env=self.environment)

    def kubectl(self, *words, **options):
        return run(self.tools["kubectl"], *words, env=self.environment, **options)

    def get(self, *words):
        """An object or list as a dictionary; empty if the request fails."""
        done = self.kubectl("get", *words, "-o", "json")
        return json.loads(done.stdout) if done.returncode == 0 and done.stdout else {}

    def create(self, images):
        os.makedirs(self.mirrors, exist_ok=True)
        done = self.start("--nodes", "3", "--registry-config-dir", self.mirrors)
        if not check("coracle cluster create: three nodes are ready", done.returncode == 0, output(done)):
            raise SystemExit(1)
        server = self.kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}").stdout
        self.network = server.split("//")[1].split(":")[0].rpartition(".")[0]
        self.serve(images)

    def start(self, *words):
        """Creates the cluster. If it exists, starts the nodes that do not run."""
        return self.coracle("create", self.name, "--kubeconfig", self.environment["KUBECONFIG"], *words)

    def serve(self, images):
        """Starts a registry on the bridge, and copies the images into it."""
        address = f"{self.network}.1:5000"
        with open(self.work + "/registry.yml", "w") as file:
            json.dump({"version": 0.1, "log": {"level": "warn"}, "http": {"addr": address},
                       "storage": {"filesystem": {"rootdirectory": self.work + "/registry"}}}, file)
        with open(self.work + "/registry.log", "w") as log:
            self.registry = subprocess.Popen(["docker-registry", "serve", self.work + "/registry.yml"], stdout=log, stderr=log)
        os.makedirs(f"{self.mirrors}/{HOST}")
        with open(f"{self.mirrors}/{HOST}/hosts.toml", "w") as file:
            file.write(f'server = "https://{HOST}"\n[host."http://{address}"]\n  capabilities = ["pull", "resolve"]\n')
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://{address}/v2/", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        for image in images:
            done = run("skopeo", "--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false",
                       f"oci:{IMAGES}/{image}:latest", f"docker://{address}/{image}:1")
            if done.returncode:
                raise SystemExit(f"cannot copy the image {image}: {output(done)}")

    def number(self, node):
        return int(node.rpartition("-")[2])

    def address(self, node):
        return f"{self.network}.{self.number(node) + 1}"

    def nodes(self):
        return [f"{self.name}-{number}" for number in (1, 2, 3)]

    def processes(self, node):
        """Ids of the processes of a node, its shims and its pods. Those outside of the pods' cgroups come first."""
        number = self.number(node)
        group, places = f"/coracle-cluster-{node}", [f"{base}/{self.name}/{number}/" for base in (self.state, self.run_dir)]
        namespace = os.stat(f"{self.run_dir}/{self.name}/{number}.net").st_ino
        own, found = {os.getpid(), os.getppid()}, []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    ended = file.read().rpartition(")")[2].split()[0] in "ZX"
                with open(f"/proc/{pid}/cmdline") as file:
                    command = file.read()
                with open(f"/proc/{pid}/cgroup") as file:
                    groups = [line.strip().partition(":")[2].partition(":")[2] + "/" for line in file]
                network = os.stat(f"/proc/{pid}/ns/net").st_ino
            except OSError:
                continue
            is_member = any(path.startswith(group + "/") for path in groups)
            if not ended and int(pid) not in own and (
                    is_member or network == namespace or any(place in command for place in places)):
                found.append((is_member, int(pid)))
        return [pid for _, pid in sorted(found)]

    def kill(self, node):
        """Kills all processes of a node, as a power failure does. First it stops all of them, so that no process reacts to
        the end of another one."""
        count = 0
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.processes(node):
                try:
                    os.kill(pid, number)
                    count += number == signal.SIGKILL
                except ProcessLookupError:
                    pass
        end = time.monotonic() + 60
        while (left := self.processes(node)) and time.monotonic() < end:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.1)
        check(f"all {count} processes of {node} are killed", count > 2 and not left, left)

    def delete(self):
        """Deletes the cluster, and checks that nothing of it is left."""
        succeeds("coracle cluster delete", self.coracle("delete", self.name))
        self.end_registry()
        left = []
        with open("/proc/mounts") as file:
            left += [line for line in file if self.work in line]
        left += glob.glob(f"/sys/fs/cgroup/*/coracle-cluster-{self.name}-*") + glob.glob(f"/sys/fs/cgroup/coracle-cluster-{self.name}-*")
        if hasattr(self, "network"):
            bridge = "coracle-c" + self.network.split(".")[2]
            links = run("ip", "-brief", "link").stdout.splitlines()
            left += [link for link in links if link.split()[0].split("@")[0] in [bridge] + [f"{bridge}-{n}" for n in (1, 2, 3)]]
            left += [table for table in run("nft", "list", "tables").stdout.splitlines() if table.split()[-1] == bridge]
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                with open(path) as file:
                    command = file.read()
            except OSError:
                continue
            if self.state + "/" in command or self.run_dir + "/" in command:
                left.append(path + ": " + command.replace("\0", " "))
        for base in (self.state, self.run_dir):
            left += glob.glob(base + "/*")
        contexts = self.kubectl("config", "get-contexts", "-o", "name").stdout
        check("nothing is left of the cluster", not left and "coracle-" not in contexts, "\n".join(left) + contexts)

    def end_registry(self):
        if self.registry:
            self.registry.terminate()
            self.registry.wait()
            self.registry = None

    def report(self, namespace):
        """Prints pods, events, nodes and the end of the nodes' logs."""
        for words in (("get", "pods", "-A", "-o", "wide"), ("get", "events", "-n", namespace, "--sort-by=.lastTimestamp"),
                      ("get", "nodes", "-o", "wide")):
            print("-- kubectl " + " ".join(words) + "\n" + self.kubectl(*words).stdout[-4000:], flush=True)
        for node in self.nodes():
            log = f"{self.state}/{self.name}/{self.number(node)}/node.log"
            print(f"-- {log}\n" + run("tail", "-n", "15", log).stdout[-3000:], flush=True)

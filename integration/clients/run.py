#!/usr/bin/env python3
"""run.py TOOLS [PART…]: drives unmodified clients against the API server of $KUBECONFIG, for scripts/test-clients.
TOOLS is a JSON object with the paths of the programs. Prints each check; fails if one fails."""
import base64, json, os, subprocess, sys, tempfile, threading, time

import compare

HERE = os.path.dirname(os.path.abspath(__file__))
TOOLS = json.loads(sys.argv[1])
PARTS = sys.argv[2:] or ["helm", "operators", "certmanager", "watches", "aggregator"]
OURS = "https://127.0.0.1:16443"
failures = []


def run(*words, **options):
    return subprocess.run(words, capture_output=True, text=True, **options)


def kubectl(*words, **options):
    return run(TOOLS["kubectl"], *words, **options)


def check(text, holds, why=""):
    print(("ok      " if holds else "FAILED  ") + text, flush=True)
    if not holds:
        failures.append(text)
        print("        " + str(why)[-3000:].replace("\n", "\n        "), flush=True)


def succeeds(text, done):
    check(text, done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:])
    return done.stdout


def becomes(text, wanted, *words, seconds=60):
    """Waits until the output of kubectl is the wanted one. A timeout is a failed check."""
    end = time.monotonic() + seconds
    while True:
        done = kubectl(*words)
        if done.stdout.strip() == wanted:
            return check(text, True)
        if time.monotonic() > end:
            return check(text, False, f"wanted {wanted!r}: {done.stdout} {done.stderr}")
        time.sleep(0.2)


def eventually(text, holds, seconds=60):
    """Waits until a condition holds. A timeout is a failed check."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return check(text, False, "timeout")
        time.sleep(0.2)


class Kubelet(threading.Thread):
    """Sets the phase of each pending pod of a namespace to Succeeded, because there are no nodes."""

    def __init__(self, namespace):
        super().__init__(daemon=True)
        self.namespace, self.stopped = namespace, threading.Event()
        self.start()

    def run(self):
        path = "{range .items[?(@.status.phase==\"Pending\")]}{.metadata.name} {end}"
        while not self.stopped.wait(0.2):
            pods = kubectl("get", "pods", "-n", self.namespace, "-o", "jsonpath=" + path).stdout.split()
            for pod in pods:
                kubectl("patch", "pod", pod, "-n", self.namespace, "--subresource=status", "-p",
                        '{"status":{"phase":"Succeeded"}}')


def helm_part():
    for version in ("3", "4"):
        program, namespace = TOOLS["helm" + version], "helm" + version
        kubectl("create", "namespace", namespace)
        kubelet = Kubelet(namespace)
        with tempfile.TemporaryDirectory() as home:
            # The dependency is packed into the chart: work on a copy.
            run("cp", "-r", HERE + "/chart", HERE + "/part", home)
            environment = {**os.environ, "HOME": home, "HELM_NAMESPACE": namespace}
            helm = lambda *words: run(program, *words, env=environment, cwd=home)
            title = helm("version", "--short").stdout.split("+")[0].strip()
            succeeds(f"helm {title} packs a dependency", helm("dependency", "build", "chart"))
            succeeds(f"helm {title} installs the chart, with a CRD and hooks", helm("install", "demo", "chart", "--wait", "--timeout", "90s"))
            becomes("the custom resource exists", "1", "get", "cup/demo", "-n", namespace, "-o", "jsonpath={.spec.size}")
            becomes("the dependency's Secret exists", "secret/demo-part", "get", "secret/demo-part", "-n", namespace, "-o", "name")
            becomes("the hook's job was removed", "", "get", "jobs", "-n", namespace, "-o", "name")
            succeeds(f"helm {title} upgrades the release", helm("upgrade", "demo", "chart", "--set", "size=2,part.enabled=false", "--wait", "--timeout", "90s"))
            becomes("the custom resource has the new value", "2", "get", "cup/demo", "-n", namespace, "-o", "jsonpath={.spec.size}")
            becomes("a disabled dependency is removed", "", "get", "secret/demo-part", "-n", namespace, "-o", "name", "--ignore-not-found")
            succeeds(f"helm {title} rolls the release back", helm("rollback", "demo", "1", "--wait", "--timeout", "90s"))
            becomes("the values are the former ones", "1 1", "get", "cup/demo", "deploy/demo", "-n", namespace, "-o",
                    "jsonpath={.items[0].spec.size} {.items[1].spec.template.spec.containers[0].env[0].value}")
            succeeds(f"helm {title} tests the release", helm("test", "demo", "--timeout", "60s"))
            history = helm("history", "demo", "-o", "json").stdout
            states = [entry["status"] for entry in json.loads(history or "[]")]
            check(f"helm {title} shows the history of the release", states == ["superseded", "superseded", "deployed"], history)
            values = helm("get", "values", "demo", "--revision", "2", "-o", "json").stdout
            check(f"helm {title} stores the values of the release", json.loads(values or "{}").get("size") in (2, "2"), values)
            succeeds(f"helm {title} uninstalls the release", helm("uninstall", "demo", "--wait", "--timeout", "60s"))
            becomes("nothing of the release is left", "", "get", "cups,deployments,services,secrets", "-n", namespace, "-o", "name")
            becomes("the CRD stays", "customresourcedefinition.apiextensions.k8s.io/cups.charts.example.com", "get", "crd",
                    "cups.charts.example.com", "-o", "name")
        kubelet.stopped.set()
        succeeds("the namespace of the release is deleted", kubectl("delete", "namespace", namespace, "--timeout=60s"))
        succeeds("the CRD of the chart is deleted", kubectl("delete", "crd", "cups.charts.example.com", "--timeout=60s"))


def bucket(size):
    body = {"apiVersion": "clients.example.com/v1", "kind": "Bucket", "metadata": {"name": "b"}, "spec": {"size": size}}
    return kubectl("apply", "-f", "-", input=json.dumps(body))


def operators_part():
    succeeds("a CRD for operators", kubectl("apply", "-f", HERE + "/bucket.yaml"))
    kubectl("wait", "--for=condition=Established", "crd/buckets.clients.example.com", "--timeout=30s")
    logs = tempfile.mkdtemp()
    commands = {
        "go": [TOOLS["operator-go"]],
        "kopf": [TOOLS["python"], "-m", "kopf", "run", "--all-namespaces", HERE + "/operator.py"],
        "rust": [TOOLS["operator-rs"]],
    }
    running = {}
    for name, command in commands.items():
        log = open(f"{logs}/{name}", "w")
        running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        succeeds("a Bucket is created", bucket("1"))
        for size in ("1", "2"):
            for name in commands:
                becomes(f"{name}: the status has size {size}", size, "get", "bucket/b", "-o", "jsonpath={.status." + name + "}")
            becomes(f"go: the owned ConfigMap has size {size}", size, "get", "cm/b-go", "-o", "jsonpath={.data.size}")
            succeeds("the Bucket is changed", bucket("2"))
        lease = kubectl("get", "lease/operator-go", "-o", "jsonpath={.spec.holderIdentity}").stdout
        check("go: the operator is elected by its lease", lease != "", lease)
        finalizers = kubectl("get", "bucket/b", "-o", "jsonpath={.metadata.finalizers}").stdout
        check("every operator has its finalizer", len(json.loads(finalizers or "[]")) == 3, finalizers)
        kubectl("delete", "bucket/b", "--wait=false")
        becomes("the Bucket is deleted after its finalizers", "", "get", "bucket/b", "--ignore-not-found", "-o", "name")
        becomes("the owned ConfigMap is deleted", "", "get", "cm/b-go", "--ignore-not-found", "-o", "name")
        running["go"].terminate()
        becomes("go: the lease is released", "", "get", "lease/operator-go", "-o", "jsonpath={.spec.holderIdentity}")
        for name in ("kopf", "rust"):
            check(f"{name}: the operator still runs", running[name].poll() is None)
    finally:
        for name, process in running.items():
            process.kill()
            process.wait()
            if failures:
                print(f"-- {name}\n{open(f'{logs}/{name}').read()[-2500:]}")
        kubectl("delete", "-f", HERE + "/bucket.yaml", "--timeout=60s")


def certmanager_part():
    folder = TOOLS["cert-manager"]
    files = [word for name in sorted(os.listdir(folder)) if name.endswith(".yaml") for word in ("-f", f"{folder}/{name}")]
    count = len(files) // 2
    succeeds(f"cert-manager's {count} CRDs are applied by the client", kubectl("apply", *files))
    succeeds("the CRDs are established", kubectl("wait", "--for=condition=Established", *files, "--timeout=60s"))
    again = succeeds("the CRDs are applied a second time", kubectl("apply", *files))
    check("each CRD is unchanged", again.count(" unchanged") == count, again)
    succeeds("the CRDs are applied by the server", kubectl("apply", "--server-side", "--force-conflicts", *files))
    difference = kubectl("diff", "--server-side", "--force-conflicts", *files)
    check("kubectl diff shows no difference", difference.returncode == 0, difference.stdout + difference.stderr)
    issuer = {"apiVersion": "cert-manager.io/v1", "kind": "Issuer", "metadata": {"name": "i"}, "spec": {"selfSigned": {}}}
    succeeds("an issuer is accepted", kubectl("apply", "-f", "-", input=json.dumps(issuer)))
    issuer["spec"] = {"acme": {"server": 3}}
    check("an invalid issuer is refused", kubectl("apply", "-f", "-", input=json.dumps(issuer)).returncode != 0)
    explained = kubectl("explain", "certificates.spec.privateKey", "--recursive")
    check("kubectl explain shows the fields of the CRDs", "rotationPolicy" in explained.stdout, explained.stdout + explained.stderr)
    succeeds("the CRDs are deleted", kubectl("delete", *files, "--timeout=60s"))


def watches_of_buckets():
    """Number of watches in the metrics of the API server."""
    metrics = kubectl("get", "--raw", "/metrics").stdout.splitlines()
    lines = [line for line in metrics if line.startswith("apiserver_longrunning_requests{") and '"buckets"' in line]
    return sum(float(line.split()[-1]) for line in lines)


def watches_part():
    """A definition that changes during 100 watches: no watch loses or repeats a change."""
    succeeds("a CRD for watches", kubectl("apply", "-f", HERE + "/bucket.yaml"))
    kubectl("wait", "--for=condition=Established", "crd/buckets.clients.example.com", "--timeout=30s")
    bucket("0")
    path = "/apis/clients.example.com/v1/namespaces/default/buckets"
    version = json.loads(kubectl("get", "--raw", path).stdout)["metadata"]["resourceVersion"]
    path = f"{path}?watch=true&resourceVersion={version}&timeoutSeconds=60"
    proxy = subprocess.Popen([TOOLS["kubectl"], "proxy", "--port=18001"], stdout=subprocess.DEVNULL)
    address = "http://127.0.0.1:18001"
    eventually("kubectl proxy serves requests", lambda: run("curl", "-sf", address + "/version").returncode == 0)
    watches = [subprocess.Popen(["curl", "-sN", address + path], stdout=subprocess.PIPE, text=True) for _ in range(100)]
    eventually("100 watches are active", lambda: watches_of_buckets() >= 100)
    for size in range(1, 21):
        bucket(str(size))
        if size % 4 == 0:
            patch = [{"op": "add", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/f%d" % size,
                      "value": {"type": "string"}}]
            kubectl("patch", "crd", "buckets.clients.example.com", "--type=json", "-p", json.dumps(patch))
    kubectl("delete", "bucket/b")
    wrong = []
    wanted = [("MODIFIED", str(size)) for size in range(1, 21)] + [("DELETED", "20")]
    for number, watch in enumerate(watches):
        seen = []
        for line in watch.stdout:
            event = json.loads(line)
            if event["type"] == "BOOKMARK":
                continue
            seen.append((event["type"], event["object"].get("spec", {}).get("size")))
            if event["type"] in ("DELETED", "ERROR"):
                break
        watch.kill()
        if seen != wanted:
            wrong.append((number, seen))
    check("100 watches see each change once while the CRD changes", not wrong, f"{len(wrong)} wrong: {wrong[:2]}")
    proxy.kill()
    kubectl("delete", "-f", HERE + "/bucket.yaml", "--timeout=60s")


def far_server(folder, only_server=False):
    """Starts sample-apiserver at 192.0.2.2, with its own etcd."""
    only_server or run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-subj", "/CN=sample-api.far.svc", "-addext", "subjectAltName=DNS:sample-api.far.svc", "-keyout", folder + "/tls.key",
        "-out", folder + "/tls.crt")
    client, peer = "http://127.0.0.1:22379", "http://127.0.0.1:22380"
    etcd = [TOOLS["etcd"], "--data-dir", folder + "/etcd", "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer]
    kubeconfig = os.environ["KUBECONFIG"]
    server = [TOOLS["sample-apiserver"], "--etcd-servers=" + client, "--secure-port=8443", "--bind-address=192.0.2.2",
              f"--tls-cert-file={folder}/tls.crt", f"--tls-private-key-file={folder}/tls.key", "--kubeconfig=" + kubeconfig,
              "--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig, "--audit-log-path=-"]
    logs = [open(f"{folder}/{name}.log", "a") for name in ("etcd", "server")]
    programs = list(zip((etcd, server), logs))[1 if only_server else 0:]
    return [subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT) for words, log in programs]


def api_service(folder):
    authority = base64.b64encode(open(folder + "/tls.crt", "rb").read()).decode()
    port = {"port": 443, "targetPort": 8443, "protocol": "TCP"}
    objects = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "far"}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "sample-api", "namespace": "far"}, "spec": {"ports": [port]}},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
         "metadata": {"name": "sample-api", "namespace": "far", "labels": {"kubernetes.io/service-name": "sample-api"}},
         "endpoints": [{"addresses": ["192.0.2.2"]}], "ports": [{"port": 8443, "protocol": "TCP", "name": ""}]},
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": "v1alpha1.wardle.example.com"},
         "spec": {"group": "wardle.example.com", "version": "v1alpha1", "groupPriorityMinimum": 2000, "versionPriority": 200,
                  "caBundle": authority, "service": {"namespace": "far", "name": "sample-api", "port": 443}}},
    ]
    return "\n".join(json.dumps(one) + "\n---" for one in objects)


def aggregator_part():
    """An aggregated server: the API server merges its documents, and other groups work while it is absent."""
    folder = tempfile.mkdtemp()
    servers = far_server(folder)
    flunder = {"apiVersion": "wardle.example.com/v1alpha1", "kind": "Flunder", "metadata": {"name": "f"}, "spec": {}}
    service = "apiservice/v1alpha1.wardle.example.com"
    available = ("get", service, "-o", "jsonpath={.status.conditions[?(@.type=='Available')].status}")
    try:
        succeeds("an APIService is created", kubectl("apply", "-f", "-", input=api_service(folder)))
        becomes("the APIService is available", "True", *available, seconds=90)
        succeeds("an object is created on the aggregated server", kubectl("apply", "-f", "-", "--validate=ignore", input=json.dumps(flunder)))
        owner = json.loads(kubectl("get", "flunder/f", "-o", "json").stdout or "{}").get("metadata", {})
        end = time.monotonic() + 60
        while "wardle" not in kubectl("get", "--raw", "/openapi/v3").stdout and time.monotonic() < end:
            time.sleep(1)
        root = json.loads(kubectl("get", "--raw", "/openapi/v3").stdout)["paths"].get("apis/wardle.example.com/v1alpha1", {})
        check("the index has the OpenAPI v3 document of the aggregated server, with a hash", "?hash=" in root.get("serverRelativeURL", ""), root)
        document = kubectl("get", "--raw", root.get("serverRelativeURL", "/openapi/v3")).stdout
        check("this OpenAPI v3 document has the kinds of the aggregated server", "v1alpha1.Flunder" in document, document[:300])
        merged = json.loads(kubectl("get", "--raw", "/openapi/v2").stdout)
        check("the paths of the aggregated server are in the OpenAPI v2 document", any("flunders" in path for path in merged["paths"]))
        names = set(merged["definitions"])
        missing = {name for name in json.dumps(merged).split('"#/definitions/')[1:]}
        missing = {name.split('"')[0] for name in missing} - names
        check("every reference of the merged document resolves", not missing, missing)
        explained = kubectl("explain", "flunders", "--api-version=wardle.example.com/v1alpha1")
        check("kubectl explain shows the kinds of the aggregated server", "Flunder" in explained.stdout, explained.stdout + explained.stderr)
        succeeds("kubectl validates an object of the aggregated server", kubectl("apply", "-f", "-", input=json.dumps(flunder)))
        dependent = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "dependent", "ownerReferences": [
            {"apiVersion": flunder["apiVersion"], "kind": "Flunder", "name": "f", "uid": owner.get("uid", "")}]}}
        succeeds("a ConfigMap with this object as owner is created", kubectl("apply", "-f", "-", input=json.dumps(dependent)))
        kubectl("create", "namespace", "short")
        servers[1].kill()
        becomes("the APIService is unavailable without its server", "False", *available, seconds=90)
        start = time.monotonic()
        resources = kubectl("api-resources")
        discovery = run("curl", "-sk", "-H", "Authorization: Bearer clients", "-H",
                        "Accept: application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList", OURS + "/apis").stdout
        groups = [group for group in json.loads(discovery)["items"] if group["metadata"]["name"] == "wardle.example.com"]
        check("discovery marks the group version as stale", "Stale" in json.dumps(groups), groups)
        check("discovery finds all other groups without delay", "deployments" in resources.stdout and time.monotonic() - start < 20)
        kubectl("delete", "namespace", "short", "--wait=false")
        becomes("a namespace that may have objects on the aggregated server is not deleted, with a condition", "True DiscoveryFailed", "get", "namespace/short", "-o",
                "jsonpath={.status.conditions[?(@.type=='NamespaceDeletionDiscoveryFailure')].status} "
                "{.status.conditions[?(@.type=='NamespaceDeletionDiscoveryFailure')].reason}")
        succeeds("a deployment is created meanwhile", kubectl("create", "deployment", "gone", "--image=i", "--replicas=1"))
        becomes("the deployment has a replica set", "1", "get", "rs", "-l", "app=gone", "-o", "jsonpath={.items[*].spec.replicas}")
        kubectl("delete", "deployment/gone")
        becomes("the replica set is collected meanwhile", "", "get", "rs,pods", "-l", "app=gone", "-o", "name")
        becomes("the dependent stays", "configmap/dependent", "get", "cm/dependent", "-o", "name")
        servers += far_server(folder, only_server=True)
        becomes("the APIService is available again", "True", *available, seconds=90)
        becomes("the namespace is deleted", "", "get", "namespace/short", "--ignore-not-found", "-o", "name", seconds=120)
        kubectl("delete", "flunder/f")
        becomes("the dependent is collected", "", "get", "cm/dependent", "--ignore-not-found", "-o", "name")
    finally:
        for server in servers:
            server.kill()
            server.wait()
        if failures:
            print(open(folder + "/server.log").read()[-2500:])
        kubectl("delete", service)
        kubectl("delete", "namespace", "far", "--timeout=60s")
        run("rm", "-rf", folder)


def kubectl_part():
    kubectls = [(name.removeprefix("kubectl-"), path) for name, path in TOOLS.items() if name.startswith("kubectl-")]
    compare.compare(check, [*kubectls, ("1.37", TOOLS["kubectl"])], os.environ["KUBECONFIG"], os.environ["THEIRS"])


for part in PARTS:
    print(f"== {part}", flush=True)
    globals()[part + "_part"]()
print(f"{len(failures)} checks failed")
sys.exit(1 if failures else 0)

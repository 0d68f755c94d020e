"""Output of kubectl for our API server and for kube-apiserver: each command runs with both, and the texts are compared."""
import difflib, json, os, re, subprocess, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
# Parts of the output that depend on the time, on the object or on the server.
VARYING = [
    (r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UID"),
    (r'("?resourceVersion"?: ?)"?\d+"?', r"\1N"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ [+-]\d{4}", "TIME"),
    (r"(?m)^([IWE])\d{4} [\d:.]+ +\d+ ", r"\1 "),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "TIME"),
    (r"/tmp/[A-Za-z]+-\d+/", "/tmp/"),
    (r"\b\d+(s|ms)\b", "AGE"),
]
# Intended differences: the name of the command, and the line with its sign (- for kube-apiserver, + for us).
INTENDED = [(re.compile(name), re.compile(line)) for name, line in [
    # docs/limitations.md lists the two kinds. Our API server serves metrics without metrics-server.
    ("^api-resources$", r"^-(bindings|componentstatuses) "),
    ("^api-(resources|versions)$", r"^\+.*\bmetrics\.k8s\.io/v1beta1\b"),
    # Upstream repeats the patch.
    ("^apply, an unknown field$", r'^[-+]The request is invalid: patch: Invalid value: ("map.*": )?strict decoding error: unknown field "dta"$'),
]]
OBJECT = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "labels": {"app": "compare"}}, "data": {"a": "1"}}
DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d", "labels": {"app": "compare"}},
              "spec": {"replicas": 0, "selector": {"matchLabels": {"app": "d"}},
                       "template": {"metadata": {"labels": {"app": "d"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}}}


def shown(text):
    for pattern, name in VARYING:
        text = re.sub(pattern, name, text)
    return text


def differences(name, ours, theirs):
    """Lines of the comparison that are not intended."""
    lines = difflib.unified_diff(shown(theirs).splitlines(), shown(ours).splitlines(), "kube-apiserver", "coracle",
                                 lineterm="", n=0)
    changes = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return [line for line in changes if not any(of.search(name) and intended.search(line) for of, intended in INTENDED)]


def commands():
    """Names and words of the commands, and their input."""
    changed = {**OBJECT, "data": {"a": "2"}}
    yield "api-resources", ["api-resources", "-o", "wide", "--sort-by=name"], None
    yield "api-versions", ["api-versions"], None
    for kind in ("pods", "deployments", "services", "horizontalpodautoscalers", "customresourcedefinitions", "ingresses", "nodes"):
        yield f"explain {kind}", ["explain", kind, "--recursive"], None
    yield "explain a field", ["explain", "pod.spec.containers.securityContext"], None
    yield "auth can-i --list", ["auth", "can-i", "--list"], None
    yield "auth can-i --list as a user", ["auth", "can-i", "--list", "--as=someone", "-n", "default"], None
    yield "auth can-i", ["auth", "can-i", "create", "pods", "--as=someone"], None
    yield "auth whoami", ["auth", "whoami"], None
    yield "apply", ["apply", "-f", "-"], OBJECT
    yield "apply a deployment", ["apply", "-f", "-"], DEPLOYMENT
    yield "diff", ["diff", "-f", "-"], changed
    yield "diff --server-side", ["diff", "--server-side", "--force-conflicts", "-f", "-"], changed
    yield "apply --server-side, a conflict", ["apply", "--server-side", "-f", "-"], changed
    yield "get -o yaml --show-managed-fields", ["get", "cm", "c", "-o", "yaml", "--show-managed-fields"], None
    yield "get deployment -o yaml", ["get", "deploy", "d", "-o", "jsonpath={.spec}"], None
    yield "wait for a field", ["wait", "--for=jsonpath={.data.a}=1", "cm/c", "--timeout=5s"], None
    yield "wait, timeout", ["wait", "--for=jsonpath={.data.a}=9", "cm/c", "--timeout=1s"], None
    yield "wait for a deletion", ["wait", "--for=delete", "cm/none", "--timeout=1s"], None
    yield "apply --prune", ["apply", "--prune", "-l", "app=compare", "-f", "-"], OBJECT
    yield "apply, an unknown field", ["apply", "-f", "-"], {**OBJECT, "dta": {}}
    yield "create, a wrong name", ["create", "-f", "-"], {**OBJECT, "metadata": {"name": "A_b"}}
    yield "create what exists", ["create", "-f", "-"], OBJECT
    yield "get what does not exist", ["get", "cm", "none"], None
    yield "get an unknown kind", ["get", "nothings"], None
    yield "delete", ["delete", "cm", "c"], None


def watch(kubectl, config):
    """Types, names and data of the events of `get --watch -o json`."""
    environment = {**os.environ, "KUBECONFIG": config}

    def run(*words, **options):
        subprocess.run([kubectl, *words], env=environment, capture_output=True, text=True, **options)

    with tempfile.NamedTemporaryFile() as output:
        def wait_for(event):
            """Waits, up to a time limit, for an event in the output. A missing event is a difference of the outputs."""
            end = time.monotonic() + 30
            while f'"{event}"' not in open(output.name).read() and time.monotonic() < end:
                time.sleep(0.1)

        watching = subprocess.Popen([kubectl, "get", "cm", "-l", "watched=yes", "--watch", "--output-watch-events", "-o", "json"],
                                    stdout=output, stderr=subprocess.STDOUT, env=environment)
        for data, event in (("1", "ADDED"), ("2", "MODIFIED")):
            body = {**OBJECT, "metadata": {"name": "w", "labels": {"watched": "yes"}}, "data": {"a": data}}
            run("apply", "-f", "-", input=json.dumps(body))
            wait_for(event)
        run("delete", "cm", "w")
        wait_for("DELETED")
        watching.terminate()
        watching.wait()
        return open(output.name).read()


def compare(check, kubectls, ours, theirs):
    """Compares each command of each kubectl."""
    for version, kubectl in kubectls:
        home = tempfile.mkdtemp()
        for name, words, body in commands():
            found = []
            for config in (ours, theirs):
                environment = {**os.environ, "KUBECONFIG": config, "HOME": f"{home}/{os.path.basename(config)}"}
                done = subprocess.run([kubectl, *words], input=json.dumps(body) if body else None, capture_output=True,
                                      text=True, env=environment)
                found.append(f"{done.stdout}{done.stderr}exit {done.returncode}\n")
            different = differences(name, *found)
            check(f"kubectl {version} {name}", not different, "\n".join(different[:60]))
        different = differences("get --watch", *(watch(kubectl, config) for config in (ours, theirs)))
        check(f"kubectl {version} get --watch -o json", not different, "\n".join(different[:60]))
        for config in (ours, theirs):
            subprocess.run([kubectl, "delete", "cm,deploy", "--all"], env={**os.environ, "KUBECONFIG": config}, capture_output=True)

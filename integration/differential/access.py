"""Requests of other users, and objects that admission changes or refuses. Users are impersonated."""

GROUP, SPACE = "rbac.authorization.k8s.io", "access"
CORE = f"/api/v1/namespaces/{SPACE}"
RULES = f"/apis/{GROUP}/v1/namespaces/{SPACE}"
PODS, DRY = CORE + "/pods", CORE + "/pods?dryRun=All"
SECURED = "/api/v1/namespaces/secured"
MERGE = "application/merge-patch+json"
# The impersonated user and group of a request. The administrator is not impersonated.
NODE = ("system:node:n1", "system:nodes")
USER = ("u", None)
ADMIN = (None, None)


def pod(*containers, name="p", **spec):
    containers = [{"name": f"c{number}", "image": "x", **fields} for number, fields in enumerate(containers or ({},))]
    return {"metadata": {"name": name}, "spec": {"containers": containers, **spec}}


def resources(limits, requests):
    return {"resources": {"limits": limits, "requests": requests}}


def role(name, *rules):
    return {"metadata": {"name": name}, "rules": list(rules)}


def rule(resources, verbs, group="", **more):
    return {"apiGroups": [group], "resources": resources, "verbs": verbs, **more}


def binding(name, kind, role_name):
    return {"metadata": {"name": name}, "subjects": [{"kind": "User", "name": "u"}],
            "roleRef": {"apiGroup": GROUP, "kind": kind, "name": role_name}}


def deployment(**spec):
    labels = {"a": "b"}
    template = {"metadata": {"labels": labels}, "spec": pod(**spec)["spec"]}
    return {"metadata": {"name": "d"}, "spec": {"selector": {"matchLabels": labels}, "template": template}}


def review(**spec):
    return "POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec}


def requests():
    """User with group, method, path, body and media type of each request, in order."""
    for name in (SPACE, "secured"):
        labels = {f"pod-security.kubernetes.io/{mode}": level for mode, level in (
            ("enforce", "baseline"), ("warn", "restricted"))} if name == "secured" else {}
        yield ADMIN, "POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}}
        yield ADMIN, "POST", f"/api/v1/namespaces/{name}/serviceaccounts", {"metadata": {"name": "default"}}
    yield ADMIN, "POST", RULES + "/roles", role("r", rule(["pods"], ["get", "list"]), rule(["roles", "rolebindings"], ["*"], GROUP))
    yield ADMIN, "POST", RULES + "/rolebindings", binding("b", "Role", "r")
    # Authorization.
    for path in (PODS, PODS + "/x", CORE + "/secrets", "/api/v1/namespaces", "/api/v1/pods", "/healthz/ping", "/metrics",
                 f"/apis/apps/v1/namespaces/{SPACE}/deployments/x/scale", CORE + "/pods/x/log"):
        yield USER, "GET", path
    yield USER, "POST", PODS, pod()
    yield USER, "DELETE", PODS + "?labelSelector=a"
    yield ADMIN, *review(user="u", resourceAttributes={"verb": "get", "resource": "pods", "namespace": SPACE})
    yield ADMIN, *review(user="u", resourceAttributes={"verb": "delete", "resource": "pods", "namespace": SPACE})
    yield ADMIN, *review(groups=["system:masters"], nonResourceAttributes={"verb": "get", "path": "/x"})
    yield ("u", "g"), "POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", {}
    yield ("u", "system:masters"), "GET", PODS
    # Escalation.
    for name, more in (("more", {}), ("one", {"resourceNames": ["a"]})):
        yield USER, "POST", RULES + "/roles", role(name, rule(["secrets", "pods/exec"], ["get", "create"], **more))
    yield USER, "POST", RULES + "/roles", role("less", rule(["pods"], ["get"]))
    yield USER, "PATCH", RULES + "/roles/less", {"rules": [rule(["*"], ["*"], "*")]}, MERGE
    yield USER, "POST", RULES + "/rolebindings", binding("more", "ClusterRole", "view")
    yield USER, "POST", f"/apis/{GROUP}/v1/clusterroles", role("c")
    # Limits of a namespace.
    limits = [{"type": "Container", "default": {"cpu": "200m"}, "defaultRequest": {"cpu": "100m"}, "min": {"cpu": "50m"},
               "max": {"cpu": "1", "memory": "1Gi"}, "maxLimitRequestRatio": {"cpu": "4"}}, {"type": "Pod", "max": {"cpu": "2"}}]
    yield ADMIN, "POST", CORE + "/limitranges", {"metadata": {"name": "l"}, "spec": {"limits": limits}}
    yield ADMIN, "POST", DRY, pod()
    yield ADMIN, "POST", DRY, pod(resources({"cpu": "3", "memory": "2Gi"}, {"cpu": "10m"}))
    yield ADMIN, "POST", DRY, pod(*[resources({"cpu": "900m"}, {"cpu": "900m"})] * 3)
    yield ADMIN, "DELETE", CORE + "/limitranges/l"
    # Objects that a pod names.
    for spec in ({"priorityClassName": "none"}, {"priorityClassName": "system-node-critical"}, {"priority": 5},
                 {"runtimeClassName": "none"}, {"serviceAccountName": "none"}):
        yield ADMIN, "POST", DRY, pod(**spec)
    # Pod security.
    secured = SECURED + "/pods?dryRun=All"
    privileged = {"securityContext": {"privileged": True, "capabilities": {"add": ["SYS_ADMIN"]}},
                  "ports": [{"containerPort": 80, "hostPort": 80}]}
    yield ADMIN, "POST", secured, pod()
    yield ADMIN, "POST", secured, pod(hostNetwork=True, hostPID=True)
    yield ADMIN, "POST", secured, pod(privileged, volumes=[{"name": "h", "hostPath": {"path": "/"}}])
    yield ADMIN, "POST", "/apis/apps/v1/namespaces/secured/deployments?dryRun=All", deployment(hostNetwork=True)
    for label, value in (("enforce", "none"), ("enforce-version", "v1.99")):
        yield ADMIN, "PATCH", SECURED, {"metadata": {"labels": {"pod-security.kubernetes.io/" + label: value}}}, MERGE
    # Evictions and tokens.
    yield ADMIN, "POST", PODS, pod(name="e")
    budget = {"metadata": {"name": "b"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {}}}}
    yield ADMIN, "POST", f"/apis/policy/v1/namespaces/{SPACE}/poddisruptionbudgets", budget
    for name in ("e", "other"):
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        yield ADMIN, "POST", PODS + "/e/eviction?dryRun=All", eviction
    for spec in ({"boundObjectRef": {"kind": "Pod", "name": "none", "apiVersion": "v1"}}, {"expirationSeconds": 1 << 33},
                 {"boundObjectRef": {"kind": "Pod", "name": "e", "apiVersion": "v1", "uid": "bad"}}):
        yield ADMIN, "POST", CORE + "/serviceaccounts/default/token", {"spec": spec}
    # A node.
    nodes = "/api/v1/nodes"
    for name in ("n1", "n2"):
        yield NODE, "POST", nodes, {"metadata": {"name": name}}
    yield NODE, "PATCH", nodes + "/n1", {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}, MERGE
    yield NODE, "DELETE", nodes + "/n1"
    yield NODE, "DELETE", PODS + "/e"
    yield NODE, "PATCH", PODS + "/e/status", {"status": {"phase": "Running"}}, MERGE
    # A namespace that is being deleted.
    yield ADMIN, "DELETE", CORE
    yield ADMIN, "POST", CORE + "/configmaps", {"metadata": {"name": "late"}}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "e"}}
    yield ADMIN, "POST", PODS + "/e/eviction", eviction
    yield ADMIN, "POST", CORE + "/serviceaccounts/default/token", {"spec": {}}
    yield ADMIN, "GET", CORE


def access(test):
    for number, ((user, group), method, path, *rest) in enumerate(requests()):
        body, media = rest[0] if rest else None, rest[1] if len(rest) > 1 else "application/json"
        more = {name: value for name, value in (("Impersonate-User", user), ("Impersonate-Group", group)) if value}
        case = f"{number} {user or 'admin'} {method} {path} {str(body)[:90]}"
        test.both("access", case, method, path, body, media, more=more)

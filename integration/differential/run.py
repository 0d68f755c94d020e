#!/usr/bin/env python3
"""Sends the same requests to the real kube-apiserver and to ours, and compares the responses field by field.

scripts/differential calls it: run.py OURS THEIRS FIXTURES [PART…]. OURS and THEIRS are URLs; both servers accept the
token `differential` for a cluster administrator. FIXTURES is the folder of upstream's serialized objects, one of each
kind with all fields set. PART is bootstrap, discovery, tables, schemas, paths, fixtures, protobuf, objects, mutations,
requests, custom, access, lists or watches.

A difference is a line `part<TAB>case<TAB>place<TAB>theirs<TAB>ours`. Intended differences are left out: each line of
intended.txt is a regular expression of the whole line of a difference, a tab, `# ` and the reason.
"""

import collections
import copy
import http.client
import json
import pathlib
import re
import ssl
import sys
import urllib.parse

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from access import access  # noqa: E402
from bases import BASES, META  # noqa: E402
from custom import custom  # noqa: E402
from watches import lists, watches  # noqa: E402

NAMESPACE = "diff"
# Fields that differ between any two servers.
VOLATILE = {"uid", "creationTimestamp", "resourceVersion", "time", "lastTransitionTime", "clusterIP", "clusterIPs", "selfLink",
            "lastPhaseTransitionTime"}
# Mutations of a value of each type: values that validation may refuse.
TEXTS = ["", "x" * 300, "A b/c", "-a", "1", "a.b", "*"]
NUMBERS = [-1, 0, 65536, 2**31, "x"]
ABSENT = object()


class Server:
    """One API server."""

    def __init__(self, url):
        parts = urllib.parse.urlsplit(url)
        self.host, self.port = parts.hostname, parts.port
        self.connection = None

    def send(self, method, path, body=None, media="application/json", accept="application/json", more=None):
        """Code and body of the response. `more` is further headers."""
        headers = {"Authorization": "Bearer differential", "Accept": accept, "User-Agent": "differential/1", **(more or {})}
        if body is not None:
            headers["Content-Type"] = media
            if not isinstance(body, (bytes, str)):
                body = json.dumps(body)
        for attempt in range(2):
            if self.connection is None:
                context = ssl._create_unverified_context()
                self.connection = http.client.HTTPSConnection(self.host, self.port, context=context, timeout=90)
            try:
                self.connection.request(method, path, body=body, headers=headers)
                answer = self.connection.getresponse()
                text = answer.read()
                break
            except (http.client.HTTPException, OSError) as error:
                self.connection = None
                if attempt:
                    # A server that panics in a handler closes the connection.
                    return 0, f"no response: {type(error).__name__}"
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text.decode(errors="replace")


def clean(value, key=""):
    """The value without the fields that differ between any two servers."""
    if isinstance(value, dict):
        return {name: clean(one, name) for name, one in value.items() if name not in VOLATILE}
    if isinstance(value, list):
        return [clean(one) for one in value]
    return value


def differences(theirs, ours, place=""):
    """Yields (place, theirs, ours) where two values differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted(set(theirs) | set(ours)):
            yield from differences(theirs.get(name, ABSENT), ours.get(name, ABSENT), f"{place}.{name}")
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, (one, other) in enumerate(zip(theirs, ours)):
            yield from differences(one, other, f"{place}[{index}]")
    elif place == ".causes" and isinstance(theirs, list) and isinstance(ours, list):
        yield place, [one for one in theirs if one not in ours], [one for one in ours if one not in theirs]
    elif type(theirs) is not type(ours) or theirs != ours:
        yield place, theirs, ours


def summary(answer):
    """The compared parts of a response."""
    code, body = answer
    if isinstance(body, dict) and body.get("kind") == "Status":
        details = body.get("details") or {}
        causes = details.get("causes") or []
        # Upstream reports some causes twice, from two validations.
        causes = sorted({(c.get("field", ""), c.get("reason", ""), c.get("message", "")) for c in causes})
        shown = {"code": code, "reason": body.get("reason", ""), "status": body.get("status"), "causes": [list(c) for c in causes],
                 "details": {k: v for k, v in details.items() if k not in ("causes", "uid")}}
        # The message repeats the causes, in an order that upstream does not define.
        if not causes:
            shown["message"] = body.get("message", "")
        return shown
    return {"code": code, "body": clean(body)}


class Comparison:
    def __init__(self, ours, theirs):
        self.ours, self.theirs = ours, theirs
        self.found = []
        self.cases = collections.Counter()
        self.equal = collections.Counter()
        lines = (HERE / "intended.txt").read_text().splitlines()
        self.intended = [re.compile(line.split("\t# ")[0]) for line in lines if line and not line.startswith("#")]

    def compare(self, part, case, theirs, ours):
        self.cases[part] += 1
        if isinstance(theirs, dict) and theirs.get("code") == 0:
            # A panic in a handler of upstream. There is no response to compare with.
            self.equal[part] += 1
            return
        rows = []
        for place, one, other in differences(theirs, ours):
            row = (part, case, place, show(one), show(other))
            if not any(pattern.search("\t".join(row)) for pattern in self.intended):
                rows.append(row)
        self.equal[part] += not rows
        self.found += rows

    def both(self, part, case, *request, **more):
        """Sends one request to both servers and compares the responses."""
        theirs = self.theirs.send(*request, **more)
        ours = self.ours.send(*request, **more)
        self.compare(part, case, summary(theirs), summary(ours))
        return theirs, ours


def show(value):
    if value is ABSENT:
        return "(absent)"
    return json.dumps(value, sort_keys=True, default=str)


def shorten(text):
    return text if len(text) < 300 else text[:300] + "…"


def collection(api_version, resource, namespaced):
    base = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
    return f"{base}/namespaces/{NAMESPACE}/{resource}" if namespaced else f"{base}/{resource}"


def built(base):
    """The whole object of a base."""
    api_version, kind, _, _, fields = base
    made = {"apiVersion": api_version, "kind": kind, "metadata": copy.deepcopy(META)}
    fields = copy.deepcopy(fields)
    made["metadata"].update(fields.pop("metadata", {}))
    made.update(fields)
    if kind == "CertificateSigningRequest":
        made["spec"]["request"] = (HERE / "request.csr.base64").read_text().strip()
    # Bases share values. The copy has a separate value at each place, so that a mutation changes one place only.
    return json.loads(json.dumps(made))


def leaves(value, path=()):
    """Paths of all values in an object, maps and lists included."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield path + (name,)
            yield from leaves(one, path + (name,))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield path + (index,)
            yield from leaves(one, path + (index,))


def at(value, path):
    for step in path:
        value = value[step]
    return value


def mutations(value):
    """Yields (name, object): one value is absent, of another type, or of another size."""
    for path in leaves(value):
        if path[0] in ("apiVersion", "kind") or path in (("metadata",), ("metadata", "name")):
            continue
        old = at(value, path)
        if isinstance(old, bool):
            new = [not old, "x"]
        elif isinstance(old, str):
            new = TEXTS + [7]
        elif isinstance(old, (int, float)):
            new = NUMBERS
        elif isinstance(old, dict):
            new = [{}, "x", {"unknown": 1}]
        else:
            new = [[], "x", old + old]
        name = ".".join(map(str, path))
        changed = copy.deepcopy(value)
        parent = at(changed, path[:-1])
        del parent[path[-1]]
        yield f"{name} absent", changed
        for number, one in enumerate(new):
            if one == old:
                continue
            changed = copy.deepcopy(value)
            at(changed, path[:-1])[path[-1]] = one
            yield f"{name} = {json.dumps(one)[:40]} ({number})", changed


def discovery(test):
    groups = {}
    for name, server in (("theirs", test.theirs), ("ours", test.ours)):
        versions = {"v1": server.send("GET", "/api/v1")[1]}
        for group in server.send("GET", "/apis")[1]["groups"]:
            for version in group["versions"]:
                versions[version["groupVersion"]] = server.send("GET", "/apis/" + version["groupVersion"])[1]
            versions[group["name"] + " preferred"] = {"resources": [{"name": "", **group["preferredVersion"]}]}
        groups[name] = {version: {one["name"]: {k: sorted(v) if isinstance(v, list) else v for k, v in one.items()}
                                  for one in answer["resources"]} for version, answer in versions.items()}
    for version in sorted(set(groups["theirs"]) | set(groups["ours"])):
        test.compare("discovery", version, groups["theirs"].get(version, {}), groups["ours"].get(version, {}))
    for path in ("/version", "/api", "/healthz", "/livez?verbose", "/openid/v1/jwks", "/nope", "/apis/nope", "/apis/apps/v9",
                 "/api/v1/nope", "/apis/apps", "/.well-known/openid-configuration"):
        test.both("discovery", path, "GET", path)


def tables(test):
    accept = "application/json;as=Table;g=meta.k8s.io;v=v1"
    seen = set()
    for api_version, _, resource, namespaced, _ in BASES:
        path = collection(api_version, resource, namespaced) + "?limit=1"
        if path in seen:
            continue
        seen.add(path)
        columns = []
        for server in (test.theirs, test.ours):
            _, body = server.send("GET", path, accept=accept)
            columns.append(body.get("columnDefinitions", body) if isinstance(body, dict) else body)
        test.compare("tables", f"{api_version} {resource}", *columns)


def openapi(server):
    """The document of version 2, and all documents of version 3."""
    _, root = server.send("GET", "/openapi/v3")
    urls = {path: one["serverRelativeURL"] for path, one in root["paths"].items()}
    return server.send("GET", "/openapi/v2")[1], {path: server.send("GET", url)[1] for path, url in urls.items()}


def compare_entries(test, part, prefix, theirs, ours):
    for name in sorted(theirs):
        test.compare(part, prefix + name, theirs[name], ours.get(name, ABSENT))


def schemas(test):
    (old_theirs, theirs), (old_ours, ours) = openapi(test.theirs), openapi(test.ours)
    compare_entries(test, "schemas", "v2 ", old_theirs["definitions"], old_ours["definitions"])
    for path in sorted(set(theirs) & set(ours)):
        found = [document.get("components", {}).get("schemas", {}) for document in (theirs[path], ours[path])]
        compare_entries(test, "schemas", "", *found)


def paths(test):
    """Compares the operations and parameters of documents."""
    (old_theirs, theirs), (old_ours, ours) = openapi(test.theirs), openapi(test.ours)
    for section in ("paths", "parameters", "securityDefinitions"):
        compare_entries(test, "paths", "v2 ", old_theirs[section], old_ours[section])
    compare_entries(test, "paths", "documents ", *({path: True for path in all_} for all_ in (theirs, ours)))
    for path in sorted(set(theirs) & set(ours)):
        compare_entries(test, "paths", "", theirs[path]["paths"], ours[path]["paths"])
        test.compare("paths", f"info of {path}", theirs[path]["info"], ours[path]["info"])


def kinds(server):
    """Kinds that clients can create: apiVersion and kind → resource and whether it is namespaced."""
    found = {}
    versions = ["/api/v1"]
    for group in server.send("GET", "/apis")[1]["groups"]:
        versions += ["/apis/" + version["groupVersion"] for version in group["versions"]]
    for path in versions:
        body = server.send("GET", path)[1]
        for one in body.get("resources", []):
            if "/" not in one["name"] and "create" in one["verbs"]:
                found[(path.removeprefix("/apis/").removeprefix("/api/"), one["kind"])] = (one["name"], one["namespaced"])
    return found


def fixtures(test, folder, suffix, part, media):
    known = kinds(test.theirs)
    ours = kinds(test.ours)
    for path in sorted(folder.glob("*." + suffix)):
        text = path.with_suffix(".json").read_text()
        value = json.loads(text)
        key = (value.get("apiVersion"), value.get("kind"))
        if key not in known or key not in ours:
            continue
        resource, namespaced = known[key]
        target = collection(key[0], resource, namespaced) + "?dryRun=All"
        if suffix == "json":
            value["metadata"].update({"name": "a", "namespace": NAMESPACE if namespaced else ""})
            for name in ("generateName", "resourceVersion", "ownerReferences", "deletionTimestamp", "managedFields", "finalizers"):
                value["metadata"].pop(name, None)
            body = value
        else:
            body = path.read_bytes()
        test.both(part, f"{key[0]} {key[1]}", "POST", target, body, media)


def objects(test):
    for number, base in enumerate(BASES):
        value = built(base)
        path = collection(base[0], base[2], base[3])
        name = f"{base[0]} {base[1]} {number}"
        test.both("objects", name + " dry run", "POST", path + "?dryRun=All", value)
        test.both("objects", name + " strict", "POST", path + "?dryRun=All&fieldValidation=Strict", {**value, "unknown": 1})
        theirs, ours = test.both("objects", name + " create", "POST", path, value)
        if theirs[0] != 201 or ours[0] != 201:
            for server, answer in ((test.theirs, theirs), (test.ours, ours)):
                if answer[0] == 201:
                    remove(server, f"{path}/{value['metadata']['name']}")
            continue
        one = f"{path}/{value['metadata']['name']}"
        test.both("objects", name + " again", "POST", path, value)
        test.both("objects", name + " merge", "PATCH", one, {"metadata": {"labels": {"more": "x"}}}, "application/merge-patch+json")
        test.both("objects", name + " strategic", "PATCH", one, {"metadata": {"labels": {"less": "x"}}},
                  "application/strategic-merge-patch+json")
        test.both("objects", name + " json", "PATCH", one, [{"op": "remove", "path": "/metadata/labels/more"}],
                  "application/json-patch+json")
        applied = {"apiVersion": base[0], "kind": base[1], "metadata": {"labels": {"applied": "x", "less": "y"}}}
        test.both("objects", name + " apply", "PATCH", one + "?fieldManager=m", json.dumps(applied), "application/apply-patch+yaml")
        test.both("objects", name + " apply by force", "PATCH", one + "?fieldManager=m&force=true", json.dumps(applied),
                  "application/apply-patch+yaml")
        test.both("objects", name + " status", "PATCH", one + "/status", {"status": {"x": 1}}, "application/merge-patch+json")
        test.both("objects", name + " put", "PUT", one, value)
        # The mutations are updates, because some fields are immutable after the creation.
        for case, changed in mutations(value):
            if changed["metadata"].get("name") != value["metadata"]["name"] or "metadata" in case.split(" ")[0]:
                continue
            if not (case.endswith("absent") or "(1)" in case or "(4)" in case):
                continue
            test.both("objects", f"{name} update: {case}", "PUT", one + "?dryRun=All", changed)
        for server in (test.theirs, test.ours):
            remove(server, one)


def remove(server, path):
    server.send("PATCH", path, {"metadata": {"finalizers": None}}, "application/merge-patch+json")
    server.send("DELETE", path + "?gracePeriodSeconds=0")
    if path.startswith("/api/v1/namespaces/") and path.count("/") == 4:
        # No controller removes the finalizer of a namespace.
        server.send("PUT", path + "/finalize", {"metadata": {"name": path.rsplit("/", 1)[1]}, "spec": {"finalizers": []}})
    server.send("PATCH", path, {"metadata": {"finalizers": None}}, "application/merge-patch+json")


def mutated(test):
    for number, base in enumerate(BASES):
        path = collection(base[0], base[2], base[3]) + "?dryRun=All"
        for case, changed in mutations(built(base)):
            test.both("mutations", f"{base[0]} {base[1]} {number}: {case}", "POST", path, changed)


def requests(test):
    space = f"/api/v1/namespaces/{NAMESPACE}"
    maps, pods, bindings = space + "/configmaps", space + "/pods", space + "/bindings"
    statuses = "/api/v1/componentstatuses"
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "x"}]}}
    deployments = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
    deployment = built(next(base for base in BASES if base[1] == "Deployment"))
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
    scalers = f"/apis/autoscaling/{{}}/namespaces/{NAMESPACE}/horizontalpodautoscalers/h?fieldManager={{}}"
    both = {"metadata": {"name": "both", "generateName": "b-"}}
    owner = {"apiVersion": "v1", "kind": "K", "name": "n", "uid": "u"}

    def scaler(version, least):
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"}
        return {"apiVersion": "autoscaling/" + version, "kind": "HorizontalPodAutoscaler", "metadata": {"name": "h"},
                "spec": {"minReplicas": least, "maxReplicas": 5, "scaleTargetRef": target}}

    merge, strategic = "application/merge-patch+json", "application/strategic-merge-patch+json"
    jsonp, apply = "application/json-patch+json", "application/apply-patch+yaml"
    script = [
        ("POST", maps, {"metadata": {"name": "m"}, "data": {"a": "b"}}), ("GET", maps + "/m"), ("GET", maps + "/none"),
        ("GET", maps + "?limit=abc"), ("GET", maps + "?labelSelector=a%20in"), ("GET", maps + "?labelSelector=a=b,c!=d,!e,f"),
        ("GET", maps + "?fieldSelector=metadata.name=m"), ("GET", maps + "?fieldSelector=spec.x=m"),
        ("GET", maps + "?resourceVersion=x"), ("GET", maps + "?resourceVersionMatch=Exact"),
        ("GET", maps + "?resourceVersion=1&resourceVersionMatch=Nope"), ("GET", maps + "?continue=nope"),
        ("GET", maps + "?watch=1&timeoutSeconds=1&resourceVersion=x"), ("GET", maps + "?watch=1&timeoutSeconds=1&sendInitialEvents=true"),
        ("GET", maps + "?watch=1&timeoutSeconds=x"), ("GET", maps + "/m/status"), ("GET", maps + "/m/scale"),
        ("POST", maps + "/m"), ("PUT", maps), ("DELETE", maps + "/none"), ("PATCH", maps + "/none", {}, merge),
        ("PATCH", maps + "/m", "{", merge), ("PATCH", maps + "/m", [], merge), ("PATCH", maps + "/m", {}, jsonp),
        ("PATCH", maps + "/m", [{"op": "test", "path": "/data/a", "value": "z"}], jsonp),
        ("PATCH", maps + "/m", [{"op": "remove", "path": "/data/none"}], jsonp),
        ("PATCH", maps + "/m", [{"op": "nope", "path": "/data/a"}], jsonp),
        ("PATCH", maps + "/m", {"data": {"a": None, "c": "d"}}, merge), ("PATCH", maps + "/m", {"data": 5}, merge),
        ("PATCH", maps + "/m", {"metadata": {"name": "other"}}, merge), ("PATCH", maps + "/m", {"kind": "Secret"}, merge),
        ("PATCH", maps + "/m", {"metadata": {"uid": "x"}}, merge), ("PATCH", maps + "/m", {"metadata": {"resourceVersion": "1"}}, merge),
        ("PATCH", maps + "/m", {"metadata": {"generation": 9, "creationTimestamp": None}}, merge),
        ("PATCH", maps + "/m", "x", "text/plain"), ("PATCH", maps + "/m", "a: [", apply),
        ("PATCH", maps + "/m", {"metadata": {}}, apply), ("PATCH", maps + "/m?fieldManager=x", {"metadata": {}}, apply),
        ("PATCH", maps + "/m?fieldManager=x&force=true", {"apiVersion": "v1", "kind": "ConfigMap", "data": {"c": "e"}}, apply),
        ("PATCH", maps + "/m?fieldManager=y", {"apiVersion": "v1", "kind": "ConfigMap", "data": {"c": "f"}}, apply),
        ("PATCH", maps + "/m?fieldManager=y", {"apiVersion": "v1", "kind": "Secret", "data": {"c": "f"}}, apply),
        ("PATCH", maps + "/m?fieldManager=y&force=maybe", {"apiVersion": "v1", "kind": "ConfigMap"}, apply),
        ("PATCH", maps + "/new?fieldManager=y", {"apiVersion": "v1", "kind": "ConfigMap", "data": {"c": "f"}}, apply),
        ("PUT", maps + "/m", {"metadata": {"name": "m", "resourceVersion": "1"}}), ("PUT", maps + "/m", {"metadata": {"name": "n"}}),
        ("PUT", maps + "/m", {"metadata": {"name": "m", "namespace": "other"}}), ("PUT", maps + "/none", {"metadata": {"name": "none"}}),
        ("POST", maps, {"metadata": {"name": "m"}}), ("POST", maps, {"metadata": {}}), ("POST", maps, {"metadata": {"name": "A b"}}),
        ("POST", maps, {"metadata": {"generateName": "A b"}}), ("POST", maps, {"kind": "Secret", "metadata": {"name": "x"}}),
        ("POST", maps, {"apiVersion": "v2", "metadata": {"name": "x"}}), ("POST", maps, "{"), ("POST", maps, ""), ("POST", maps, "[]"),
        ("POST", maps, "null"), ("POST", maps, '{"metadata":{"name":"x"},"data":{"a":1}}'),
        ("POST", maps, '{"metadata":{"name":"x"},"data":{"a":"1","a":"2"},"z":1,"z":2}'),
        ("POST", maps + "?fieldValidation=Strict", '{"metadata":{"name":"x"},"data":{"a":"1","a":"2"},"z":1}'),
        ("POST", maps + "?fieldValidation=Nope", {"metadata": {"name": "x"}}), ("POST", maps + "?dryRun=Some", {"metadata": {"name": "x"}}),
        ("POST", maps + "?fieldManager=" + "x" * 200, {"metadata": {"name": "x"}}),
        ("POST", maps + "?dryRun=All", {"metadata": {"name": "x", "namespace": "other"}}),
        ("POST", maps + "?dryRun=All", {"metadata": {"name": "x", "labels": {"a b": "c d"}, "annotations": {"a b": "c"}}}),
        ("POST", maps + "?dryRun=All", {"metadata": {"name": "x", "finalizers": ["a"]}}),
        ("POST", maps + "?dryRun=All", {"metadata": {"name": "x", "ownerReferences": [{"kind": "K"}]}}),
        ("POST", maps + "?dryRun=All", {"metadata": {"name": "x", "ownerReferences": [
            {"apiVersion": "v1", "kind": "K", "name": "n", "uid": "u", "controller": True},
            {"apiVersion": "v1", "kind": "K", "name": "m", "uid": "v", "controller": True}]}}),
        ("DELETE", maps + "/m", {"preconditions": {"uid": "x"}}), ("DELETE", maps + "/m", {"preconditions": {"resourceVersion": "1"}}),
        ("DELETE", maps + "/m?propagationPolicy=Nope"), ("DELETE", maps + "/m", {"propagationPolicy": "Orphan", "orphanDependents": True}),
        ("DELETE", maps + "/m?dryRun=All"), ("DELETE", maps + "/m", {"kind": "ConfigMap"}), ("DELETE", maps + "/m?gracePeriodSeconds=x"),
        ("DELETE", maps + "/m"), ("DELETE", maps + "/new"), ("POST", pods, pod), ("GET", pods + "/p"), ("GET", pods + "/p/status"),
        ("GET", pods + "?fieldSelector=spec.nodeName="), ("GET", pods + "?fieldSelector=status.phase!=Pending"),
        ("PATCH", pods + "/p", {"spec": {"containers": [{"name": "c", "image": "y"}]}}, strategic),
        ("PATCH", pods + "/p", {"spec": {"containers": [{"name": "d", "image": "y"}]}}, strategic),
        ("PATCH", pods + "/p", {"spec": {"nodeName": "n"}}, merge), ("PATCH", pods + "/p", {"spec": {"tolerations": [{"operator": "Exists"}]}}, merge),
        ("PATCH", pods + "/p", {"spec": {"activeDeadlineSeconds": 5}}, merge), ("PATCH", pods + "/p", {"spec": {"activeDeadlineSeconds": 9}}, merge),
        ("PATCH", pods + "/p/status", {"status": {"phase": "Running", "podIP": "10.0.0.1"}}, merge),
        ("PATCH", pods + "/p/status", {"status": {"qosClass": "Guaranteed"}}, merge),
        ("PATCH", pods + "/p/status", {"status": {"podIPs": [{"ip": "x"}]}}, merge),
        ("PATCH", pods + "/p/ephemeralcontainers", {"spec": {"ephemeralContainers": [{"name": "e", "image": "x"}]}}, strategic),
        ("PATCH", pods + "/p/ephemeralcontainers", {"spec": {"ephemeralContainers": [{"name": "e", "image": "y"}]}}, strategic),
        ("POST", pods + "/p/binding", {"target": {"kind": "Node", "name": "n"}}),
        ("POST", pods + "/p/binding", {"target": {"kind": "Node", "name": "m"}}), ("POST", pods + "/none/binding", {"target": {"name": "n"}}),
        ("POST", pods + "/p/binding", {"target": {"kind": "Pod", "name": "n"}}),
        ("POST", pods + "/none/eviction", {"metadata": {"name": "none"}}), ("GET", pods + "/p/log?tailLines=-1"),
        ("GET", pods + "/p/log?container=z"), ("GET", pods + "/p/exec"), ("GET", pods + "/p/attach?container=z"),
        ("GET", pods + "/p/nope"), ("DELETE", pods + "/p?gracePeriodSeconds=0"),
        ("POST", deployments, deployment), ("GET", deployments + "/a/scale"), ("PUT", deployments + "/a/scale", {"spec": {"replicas": -1}}),
        ("PUT", deployments + "/a/scale", {"metadata": {"name": "a", "namespace": NAMESPACE}, "spec": {"replicas": 5}}),
        ("PATCH", deployments + "/a/scale", {"spec": {"replicas": 7}}, merge), ("PATCH", deployments + "/a/status", {"status": {"replicas": 7}}, merge),
        ("PATCH", deployments + "/a/status", {"status": {"readyReplicas": 9}}, merge),
        ("PATCH", deployments + "/a", {"spec": {"selector": {"matchLabels": {"x": "y"}}}}, merge),
        ("PATCH", deployments + "/a", {"spec": {"template": {"spec": {"containers": [{"name": "c", "$patch": "delete"}]}}}}, strategic),
        ("PATCH", deployments + "/a", {"spec": {"template": {"spec": {"containers": [{"image": "no-name"}]}}}}, strategic),
        ("PATCH", deployments + "/a", {"spec": {"template": {"spec": {"containers": [
            {"name": "c", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}]}}}}, strategic),
        ("PATCH", deployments + "/a", {"spec": {"template": {"spec": {"containers": [
            {"name": "c", "env": [{"name": "A", "$patch": "delete"}]}]}}}}, strategic),
        ("PATCH", deployments + "/a", {"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}}, strategic),
        ("PATCH", deployments + "/a?fieldManager=z", {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"replicas": 1}}, apply),
        ("PATCH", deployments + "/a/scale?fieldManager=z&force=true", {"apiVersion": "autoscaling/v1", "kind": "Scale", "spec": {"replicas": 1}}, apply),
        ("GET", deployments + "/a"), ("DELETE", deployments + "?labelSelector=none%3Dx"), ("DELETE", deployments + "/a?propagationPolicy=Foreground"),
        ("GET", deployments + "/a"), ("PATCH", deployments + "/a", {"metadata": {"finalizers": []}}, merge),
        ("GET", "/api/v1/namespaces/none/configmaps"), ("POST", "/api/v1/namespaces/none/configmaps", {"metadata": {"name": "x"}}),
        ("DELETE", "/api/v1/namespaces/kube-system"), ("DELETE", "/api/v1/namespaces/default"), ("GET", "/api/v1/namespaces?limit=0"),
        ("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", {"spec": {"resourceAttributes": {"verb": "get", "resource": "pods"}}}),
        ("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", {"spec": {}}),
        ("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": {"user": "u", "resourceAttributes": {"verb": "get", "resource": "pods"}}}),
        ("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": {"resourceAttributes": {"verb": "get"}, "nonResourceAttributes": {"path": "/"}}}),
        ("POST", f"/apis/authorization.k8s.io/v1/namespaces/{NAMESPACE}/localsubjectaccessreviews", {"spec": {"user": "u", "resourceAttributes": {"verb": "get", "namespace": "x"}}}),
        ("POST", "/apis/authentication.k8s.io/v1/tokenreviews", {"spec": {"token": "nope"}}), ("POST", "/apis/authentication.k8s.io/v1/tokenreviews", {"spec": {}}),
        ("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", {}),
        ("POST", space + "/serviceaccounts/none/token", {"spec": {}}), ("POST", space + "/serviceaccounts/default/token", {"spec": {"expirationSeconds": 1}}),
        ("POST", pods, pod), ("GET", bindings), ("GET", bindings + "/p"), ("DELETE", bindings), ("GET", "/api/v1/bindings"),
        ("POST", bindings, {"target": {"name": "n"}}), ("POST", bindings, {"metadata": {"name": "none"}, "target": {"name": "n"}}),
        ("POST", bindings, {"metadata": {"name": "p", "namespace": "other"}, "target": {"name": "n"}}),
        ("POST", "/api/v1/namespaces/none/bindings", {"metadata": {"name": "p"}, "target": {"name": "n"}}),
        ("POST", bindings + "?dryRun=All", {"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n"}}),
        ("POST", bindings, {"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n"}}),
        ("POST", bindings, {"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "m"}}),
        ("DELETE", pods + "/p?gracePeriodSeconds=0"), ("GET", statuses + "/etcd-0"), ("GET", statuses + "/none"), ("DELETE", statuses),
        ("GET", statuses + "?labelSelector=a%3Db"), ("GET", statuses + "?fieldSelector=metadata.name%3Detcd-0"),
        ("GET", statuses + "?fieldSelector=a%3Db"), ("POST", statuses, {"metadata": {"name": "x"}}),
        ("PUT", leases + "/put", {"metadata": {"name": "put", "resourceVersion": "5"}, "spec": {"holderIdentity": "h"}}),
        ("PUT", maps + "/put", {"metadata": {"name": "put"}}), ("POST", maps, both), ("POST", maps, both), ("DELETE", maps + "/both"),
        ("POST", maps + "?dryRun=All", {"metadata": {"name": "x", "ownerReferences": [owner, owner, {**owner, "name": "m"}]}}),
        ("PATCH", scalers.format("v2", "a"), scaler("v2", 2), apply), ("PATCH", scalers.format("v1", "b"), scaler("v1", 3), apply),
        ("PATCH", scalers.format("v1", "b"), scaler("v1", 2), apply), ("PATCH", scalers.format("v2", "c") + "&force=true", scaler("v2", 4), apply),
        ("GET", scalers.format("v2", "")), ("DELETE", scalers.format("v2", "")), ("DELETE", leases + "/put"),
    ]
    for number, (method, path, *rest) in enumerate(script):
        body = rest[0] if rest else None
        media = rest[1] if len(rest) > 1 else "application/json"
        test.both("requests", f"{number} {method} {path[:90]} {json.dumps(body)[:90]}", method, path, body, media)


def bootstrap(test):
    """Compares the objects that a new cluster has. Objects that only our server has, and the owners of fields, are left out."""
    rbac, flow = "rbac.authorization.k8s.io", "flowcontrol.apiserver.k8s.io"
    lists = [(rbac, kind) for kind in ("clusterroles", "clusterrolebindings", "roles", "rolebindings")]
    lists += [(flow, "flowschemas"), (flow, "prioritylevelconfigurations"), ("scheduling.k8s.io", "priorityclasses"),
              ("apiregistration.k8s.io", "apiservices")]
    for group, resource in lists:
        found = []
        for server in (test.theirs, test.ours):
            items = server.send("GET", f"/apis/{group}/v1/{resource}")[1]["items"]
            for item in items:
                item["metadata"].pop("managedFields", None)
                if "aggregationRule" in item:
                    del item["rules"]  # kube-controller-manager writes them
            found.append({(item["metadata"].get("namespace", ""), item["metadata"]["name"]): clean(item) for item in items})
        for name, item in found[0].items():
            test.compare("bootstrap", f"{resource} {' '.join(name)}", item, found[1].get(name, ABSENT))


def main():
    ours, theirs, folder, *parts = sys.argv[1:]
    test = Comparison(Server(ours), Server(theirs))
    for server in (test.theirs, test.ours):
        server.send("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        server.send("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": "default"}})
    folder = pathlib.Path(folder)
    all_parts = {
        "bootstrap": lambda: bootstrap(test), "discovery": lambda: discovery(test), "tables": lambda: tables(test), "schemas": lambda: schemas(test),
        "paths": lambda: paths(test),
        "fixtures": lambda: fixtures(test, folder, "json", "fixtures", "application/json"),
        "protobuf": lambda: fixtures(test, folder, "pb", "protobuf", "application/vnd.kubernetes.protobuf"),
        "requests": lambda: requests(test), "custom": lambda: custom(test, clean),
        "access": lambda: access(test), "lists": lambda: lists(test, clean), "watches": lambda: watches(test, clean),
        "objects": lambda: objects(test), "mutations": lambda: mutated(test)}
    for name, run in all_parts.items():
        if not parts or name in parts:
            run()
            print(f"{name}: {test.equal[name]} of {test.cases[name]} cases are equal", file=sys.stderr)
    for row in test.found:
        print("\t".join(map(shorten, row)))
    return bool(test.found)


if __name__ == "__main__":
    sys.exit(main())

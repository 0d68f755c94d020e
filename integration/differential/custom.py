"""Requests for custom resources: the definition, valid and invalid objects, patches, applies, subresources, lists."""
import time

GROUP, NAMESPACE = "d.example.com", "diff"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
THINGS = f"/apis/{GROUP}/v1/namespaces/{NAMESPACE}/things"
SECOND = THINGS.replace("/v1/", "/v2/")
MERGE, JSON, STRATEGIC = (f"application/{name}patch+json" for name in ("merge-", "json-", "strategic-merge-"))
APPLY = "application/apply-patch+yaml"
SPEC = {
    "type": "object", "required": ["size"],
    "properties": {
        "size": {"type": "integer", "minimum": 1, "maximum": 10, "multipleOf": 2},
        "replicas": {"type": "integer", "default": 3},
        "mode": {"type": "string", "enum": ["a", "b"], "default": "a"},
        "name": {"type": "string", "minLength": 2, "maxLength": 5, "pattern": "^[a-z]+$"},
        "when": {"type": "string", "format": "date-time"},
        "ip": {"type": "string", "format": "ipv4"},
        "float": {"type": "number", "exclusiveMinimum": True, "minimum": 0.5},
        "list": {"type": "array", "maxItems": 2, "items": {"type": "string"}},
        "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
        "map": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
                "items": {"type": "object", "required": ["k"],
                          "properties": {"k": {"type": "string"}, "v": {"type": "integer", "default": 7}}}},
        "any": {"x-kubernetes-preserve-unknown-fields": True},
        "port": {"x-kubernetes-int-or-string": True},
        "texts": {"type": "object", "maxProperties": 2, "additionalProperties": {"type": "string"}},
        "null": {"type": "string", "nullable": True},
        "embedded": {"type": "object", "x-kubernetes-embedded-resource": True, "x-kubernetes-preserve-unknown-fields": True},
        "one": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "atomic": {"type": "object", "x-kubernetes-map-type": "atomic",
                   "properties": {"x": {"type": "string"}, "y": {"type": "string"}}},
        "fixed": {"type": "string", "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "is immutable"}]},
        "bytes": {"type": "string", "format": "byte"},
    },
    "x-kubernetes-validations": [
        {"rule": "!has(self.ip) || self.size < 8", "messageExpression": "self.size > 7 ? 'too large' : 'no'",
         "reason": "FieldValueForbidden", "fieldPath": ".size"},
        {"rule": "self.replicas <= 5"}],
}
SCHEMA = {"type": "object", "required": ["spec"], "properties": {
    "spec": SPEC,
    "status": {"type": "object", "properties": {
        "replicas": {"type": "integer"}, "selector": {"type": "string"}, "phase": {"type": "string"}}}}}
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": f"things.{GROUP}"},
    "spec": {
        "group": GROUP, "scope": "Namespaced",
        "names": {"plural": "things", "kind": "Thing", "singular": "thing", "listKind": "ThingList", "shortNames": ["th"],
                  "categories": ["all"]},
        "versions": [
            {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": SCHEMA},
             "subresources": {"status": {}, "scale": {
                 "specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas",
                 "labelSelectorPath": ".status.selector"}},
             "selectableFields": [{"jsonPath": ".spec.mode"}],
             "additionalPrinterColumns": [
                 {"name": "Size", "type": "integer", "jsonPath": ".spec.size"},
                 {"name": "When", "type": "date", "jsonPath": ".spec.when", "priority": 1},
                 {"name": "List", "type": "string", "jsonPath": ".spec.list"},
                 {"name": "Keys", "type": "string", "jsonPath": ".spec.map[*].k"},
                 {"name": "None", "type": "boolean", "jsonPath": ".spec.none"}]},
            # The schema differs from the first version's. If all schemas are equal, upstream moves the schema to a
            # place where selectable fields are invalid.
            {"name": "v2", "served": True, "storage": False, "deprecated": True,
             "schema": {"openAPIV3Schema": {**SCHEMA, "description": "another"}}, "subresources": {"status": {}}}]}}
POD = {"apiVersion": "v1", "kind": "Pod"}
# Values of single fields of a new object.
VALUES = [
    {"size": value} for value in (0, 12, 3, "2", 2.5, 2.0, None)] + [
    {"mode": value} for value in ("c", None)] + [
    {"name": value} for value in ("x", "xxxxxx", "ABC", 5)] + [
    {"when": value} for value in ("x", "2024-01-01T00:00:00Z")] + [
    {"ip": "1.2.3"}, {"ip": "1.2.3.4", "size": 8}] + [
    {"float": value} for value in (0.5, 1, "1")] + [
    {"list": value} for value in (["a", "b", "c"], "a", [1], None, [None])] + [
    {"set": ["a", "a"]}] + [
    {"map": value} for value in ([{"k": "a"}, {"k": "a"}], [{"v": 1}], [{"k": "a", "z": 1}])] + [
    {"any": value} for value in ({"x": [1, {"y": None}]}, None)] + [
    {"port": value} for value in ("x", 5, True, 1.5)] + [
    {"texts": value} for value in ({"a": "b", "c": "d", "e": "f"}, {"a": 1})] + [
    {"null": value} for value in (None, 3)] + [
    {"embedded": value} for value in ({}, POD, {**POD, "metadata": {"name": "A b", "labels": {"x": "1"}, "zz": 1}})] + [
    {"one": value} for value in ({}, {"a": 1, "b": 2}, {"a": 1})] + [
    {"bytes": value} for value in ("!!", "YQ==")] + [
    {"replicas": 6}, {"unknown": 1}, {"atomic": {"x": "1", "z": "2"}}, {"fixed": "x"}]


def thing(name, /, **spec):
    return {"apiVersion": f"{GROUP}/v1", "kind": "Thing", "metadata": {"name": name}, "spec": {"size": 2, **spec}}


def part(name, spec):
    """An apply configuration with some fields."""
    return {"apiVersion": f"{GROUP}/v1", "kind": "Thing", "metadata": {"name": name}, "spec": spec}


def requests():
    """Method, path, body and media type of each request, in order."""
    one, dry = THINGS + "/a", THINGS + "?dryRun=All"
    yield from [("GET", THINGS), ("POST", THINGS, thing("a")), ("POST", THINGS, thing("a"))]
    yield from (("POST", dry, thing("b", **spec)) for spec in VALUES)
    yield from [
        ("POST", dry + "&fieldValidation=Strict", thing("b", unknown=1, map=[{"k": "a", "z": 1}])),
        ("POST", dry + "&fieldValidation=Warn", thing("b", unknown=1)), ("POST", dry, {**thing("b"), "spec": None}),
        ("POST", dry, thing("X y")), ("POST", dry, {**thing("b"), "apiVersion": GROUP + "/v2"}), ("POST", dry, "{"),
        ("POST", dry, {"metadata": {"name": "b"}, "spec": {"size": 2}}),
        ("GET", one), ("GET", SECOND + "/a"), ("GET", THINGS + "/none"), ("GET", one + "/status"), ("GET", one + "/scale"),
        ("PUT", one + "/scale", {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {
            "name": "a", "namespace": NAMESPACE}, "spec": {"replicas": 4}}),
        ("PUT", one + "/scale", {"metadata": {"name": "a"}, "spec": {"replicas": 9}}),
        ("PATCH", one + "/scale", {"spec": {"replicas": 2}}, MERGE), ("PATCH", one, {"spec": {"size": 4}}, MERGE),
        ("PATCH", one, {"spec": {"size": 5}}, MERGE), ("PATCH", one, {"spec": {"mode": None}}, MERGE),
        ("PATCH", one, {"spec": {"size": 4}}, STRATEGIC),
        ("PATCH", one, [{"op": "replace", "path": "/spec/size", "value": 6}], JSON),
        ("PATCH", one, {"status": {"phase": "x"}}, MERGE),
        ("PATCH", one + "/status", {"status": {"phase": "Ready", "replicas": 3, "selector": "a=b"}, "spec": {"size": 8}}, MERGE),
        ("PATCH", one + "/status", {"status": {"unknown": 1}}, MERGE), ("GET", one + "/scale"),
        ("PATCH", one, {"spec": {"fixed": "x"}}, MERGE), ("PATCH", one, {"spec": {"fixed": "y"}}, MERGE),
        ("PATCH", one, {"spec": {"fixed": None}}, MERGE),
        ("PATCH", one + "?fieldManager=m", thing("a", map=[{"k": "a", "v": 1}], atomic={"x": "1"}), APPLY),
        ("PATCH", one + "?fieldManager=m&force=true", thing("a", map=[{"k": "a", "v": 1}], atomic={"x": "1"}), APPLY),
        ("PATCH", one + "?fieldManager=n", part("a", {"map": [{"k": "a", "v": 2}, {"k": "b"}]}), APPLY),
        ("PATCH", one + "?fieldManager=n&force=true", part("a", {"map": [{"k": "a", "v": 2}, {"k": "b"}]}), APPLY),
        ("PATCH", one + "?fieldManager=n", part("a", {"map": [{"k": "b"}], "atomic": {"y": "2"}}), APPLY),
        ("PATCH", one + "?fieldManager=n", {**part("a", {"set": ["q"]}), "apiVersion": GROUP + "/v2"}, APPLY),
        ("PATCH", one + "?fieldManager=o", part("a", {"unknown": 1}), APPLY),
        ("PATCH", THINGS + "/new?fieldManager=o", part("new", {"size": 2}), APPLY), ("GET", THINGS),
        ("GET", THINGS + "?fieldSelector=spec.mode=a"), ("GET", THINGS + "?fieldSelector=spec.mode=b"),
        ("GET", THINGS + "?fieldSelector=spec.size=2"), ("GET", THINGS + "?labelSelector=x"),
        ("PUT", one, {**thing("a"), "metadata": {"name": "a", "resourceVersion": "1"}}), ("PUT", one, thing("a")),
        ("PUT", THINGS + "/none", {**thing("none"), "metadata": {"name": "none", "resourceVersion": "5"}}),
        ("PUT", THINGS + "/other", thing("other")),
        ("PATCH", one, {"metadata": {"finalizers": ["d.example.com/x"]}}, MERGE),
        ("PATCH", one, {"metadata": {"finalizers": ["plain"]}}, MERGE), ("DELETE", one), ("GET", one),
        ("PATCH", one, {"metadata": {"finalizers": ["e.example.com/x"]}}, MERGE),
        ("PATCH", one, {"metadata": {"finalizers": []}}, MERGE), ("GET", one), ("DELETE", THINGS + "?labelSelector=none"),
        ("DELETE", THINGS), ("GET", f"/apis/{GROUP}"), ("GET", f"/apis/{GROUP}/v3"),
    ]
    definition = f"{DEFINITIONS}/things.{GROUP}"
    yield from (("PATCH", definition, {"spec": spec}, MERGE) for spec in (
        {"scope": "Cluster"}, {"group": "x.example.com"}, {"versions": []}))


def custom(test, clean):
    """Compares the responses to all requests, tables, and the published schema. `clean` removes what always differs."""
    test.both("custom", "the definition", "POST", DEFINITIONS, DEFINITION)
    for server in (test.theirs, test.ours):
        # Upstream answers 429 until its storage is ready.
        end = time.monotonic() + 30
        while server.send("GET", THINGS)[0] != 200 and time.monotonic() < end:
            time.sleep(0.1)
    for number, (method, path, *rest) in enumerate(requests()):
        body, media = rest[0] if rest else None, rest[1] if len(rest) > 1 else "application/json"
        test.both("custom", f"{number} {method} {path.removeprefix(THINGS)} {str(body)[:90]}", method, path, body, media)
    for form in ("Table", "PartialObjectMetadataList"):
        found = []
        for server in (test.theirs, test.ours):
            server.send("POST", THINGS, thing("t", list=["x", "y"], map=[{"k": "1"}, {"k": "2"}], when="2024-01-01T00:00:00Z"))
            accept = f"application/json;as={form};g=meta.k8s.io;v=v1"
            found.append(clean(server.send("GET", THINGS + "?includeObject=None", accept=accept)[1]))
        test.compare("custom", form, *found)
    published = []
    for server in (test.theirs, test.ours):
        path, end = None, time.monotonic() + 30
        while path is None and time.monotonic() < end:
            path = server.send("GET", "/openapi/v3")[1]["paths"].get(f"apis/{GROUP}/v1", {}).get("serverRelativeURL")
        published.append(server.send("GET", path)[1])
    for kind in ("Thing", "ThingList"):
        schemas = [document["components"]["schemas"][f"com.example.d.v1.{kind}"] for document in published]
        test.compare("custom", f"the published schema of {kind}", *schemas)
    test.compare("custom", "the published paths", *(document["paths"] for document in published))
    for server in (test.theirs, test.ours):
        server.send("DELETE", f"{DEFINITIONS}/things.{GROUP}")

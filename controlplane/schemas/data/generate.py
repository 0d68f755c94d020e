#!/usr/bin/env python3
"""Writes definitions.json.deflate, operations.json.deflate, messages.json.deflate, presence.json.deflate and
types.json.deflate, the data behind the crate's schemas.

Run by hand when Kubernetes has a new minor version or the crate a new kind (add it to ROOTS or OPTIONAL):

    generate.py definitions FOLDER PATH/k8s.io@VERSION
    (cd integration/differential && go run ./fields) | generate.py fields

FOLDER has the OpenAPI v3 documents of a running kube-apiserver, each in a file `*.json`, and `/openapi/v2` in `v2.json`.
The server must serve the kinds in OPTIONAL, so it runs with `--runtime-config=api/all=true` and
`--feature-gates=AllAlpha=true,AllBeta=true`. The definitions are those of the documents. The last argument is where the
Go modules of that server are, without the names of the modules, for example `~/go/pkg/mod/k8s.io@v0.36.0`. Their files
generated.proto have the field numbers of protobuf, which are joined with the JSON names in the definitions.

operations.json.deflate has what only documents need: the definitions of lists, events of watches, patches and discovery,
the parameters of operations, and the names of these parameters by action, or by resource and subresource for streams.
`generate.py operations FOLDER` writes only this file. For it FOLDER may have the published documents of a release:
`v3/*.json` of `api/openapi-spec`, and `swagger.json` as `v2.json`. They have no `enum`, but these definitions need none.

The second form writes presence.json.deflate and types.json.deflate. The former has for each definition one letter for
each field, in the order of their names; integration/differential/fields describes the letters. The latter has the fields
whose Go type does not follow from their schema, or that are in an embedded struct: the type, a space, and the path of the
embedded structs.
"""

import json
import pathlib
import re
import sys
import zlib

CORE = "io.k8s.api.core.v1."
META = "io.k8s.apimachinery.pkg.apis.meta.v1."
EXTENSIONS = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1."
ROOTS = [
    *(CORE + name for name in (
        "Namespace Node Pod Service Endpoints Secret ConfigMap ServiceAccount Event Binding PodTemplate "
        "ReplicationController PersistentVolume PersistentVolumeClaim ObjectReference LimitRange ResourceQuota "
        "ComponentStatus").split()),
    *("io.k8s.api.apps.v1." + name for name in (
        "Deployment ReplicaSet ControllerRevision StatefulSet DaemonSet").split()),
    *("io.k8s.api.batch.v1." + name for name in "Job CronJob".split()),
    "io.k8s.api.autoscaling.v1.HorizontalPodAutoscaler",
    "io.k8s.api.autoscaling.v2.HorizontalPodAutoscaler",
    "io.k8s.api.certificates.v1.CertificateSigningRequest",
    "io.k8s.api.coordination.v1.Lease",
    "io.k8s.api.discovery.v1.EndpointSlice",
    *("io.k8s.api.networking.v1." + name for name in (
        "NetworkPolicy Ingress IngressClass ServiceCIDR IPAddress").split()),
    *("io.k8s.api.rbac.v1." + name for name in "Role RoleBinding ClusterRole ClusterRoleBinding".split()),
    "io.k8s.api.autoscaling.v1.Scale",
    *("io.k8s.api.storage.v1." + name for name in (
        "CSINode StorageClass VolumeAttachment CSIDriver CSIStorageCapacity VolumeAttributesClass").split()),
    *("io.k8s.api.resource.v1." + name for name in (
        "DeviceClass ResourceClaim ResourceClaimTemplate ResourceSlice").split()),
    *("io.k8s.api.flowcontrol.v1." + name for name in "FlowSchema PriorityLevelConfiguration".split()),
    "io.k8s.kube-aggregator.pkg.apis.apiregistration.v1.APIService",
    *("io.k8s.api.policy.v1." + name for name in "Eviction PodDisruptionBudget".split()),
    *("io.k8s.api.authentication.v1." + name for name in "TokenRequest TokenReview SelfSubjectReview".split()),
    *("io.k8s.api.authorization.v1." + name for name in (
        "SelfSubjectAccessReview SubjectAccessReview LocalSubjectAccessReview SelfSubjectRulesReview").split()),
    *("io.k8s.api.admissionregistration.v1." + name for name in (
        "MutatingWebhookConfiguration ValidatingWebhookConfiguration ValidatingAdmissionPolicy "
        "ValidatingAdmissionPolicyBinding MutatingAdmissionPolicy MutatingAdmissionPolicyBinding").split()),
    "io.k8s.api.events.v1.Event",
    "io.k8s.api.scheduling.v1.PriorityClass",
    "io.k8s.api.node.v1.RuntimeClass",
    EXTENSIONS + "CustomResourceDefinition",
    *(META + name for name in "DeleteOptions Status ObjectMeta LabelSelector".split()),
]
# Kinds that are served only with --runtime-config.
OPTIONAL = [
    *("io.k8s.api.scheduling.v1alpha2." + name for name in "Workload PodGroup".split()),
    "io.k8s.api.storagemigration.v1beta1.StorageVersionMigration",
]
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
KINDS = "x-kubernetes-group-version-kind"

# Further definitions of documents, besides the lists of kinds.
OTHERS = [
    *(META + name for name in "WatchEvent Patch APIResourceList APIGroup APIGroupList APIVersions".split()),
    "io.k8s.apimachinery.pkg.version.Info",
]
# Parameters that each operation repeats, because clients look for them there.
INLINE = {"dryRun", "fieldValidation"}

# Messages whose JSON form is not an object of their fields. The decoder has a rule for each of these names.
SPECIAL = {
    META + "Time", META + "MicroTime", META + "Duration", META + "FieldsV1", QUANTITY, INT_OR_STRING,
    "io.k8s.apimachinery.pkg.runtime.RawExtension", EXTENSIONS + "JSON",
}
# Messages whose JSON form is the value of the one field that is set, and their fields.
CHOICES = {EXTENSIONS + "JSONSchemaPropsOr" + name: dict.fromkeys(fields) for name, fields in {
    "Bool": ("allows", "schema"), "Array": ("schema", "jSONSchemas"), "StringArray": ("schema", "property")}.items()}
# One-field messages that stand for a list.
WRAPPED = {"ExtraValue", "Verbs"}
# The modules that have a file generated.proto, by the start of their definitions' names.
MODULES = {f"io.k8s.{name}.": name for name in "api apimachinery apiextensions-apiserver kube-aggregator".split()}
PROTO_MESSAGE = re.compile(r"^message (\w+) \{(.*?)^\}", re.S | re.M)
PROTO_FIELD = re.compile(r"^\s*(?:(?:optional|(repeated)) ([\w.]+)|map<string, ?([\w.]+)>) (\w+) = (\d+);", re.M)
PROTO_SCALARS = {"string": "s", "int32": "i", "int64": "i", "bool": "b", "bytes": "y", "double": "d"}


def published(folder):
    """The version and the definitions. The list of kinds is that of OpenAPI v2, because each v3 document has a part."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        found |= json.loads(path.read_text()).get("components", {}).get("schemas", {})
    whole = json.loads(pathlib.Path(folder, "v2.json").read_text())
    for name, schema in found.items():
        if KINDS in schema and name in whole["definitions"]:
            schema[KINDS] = whole["definitions"][name][KINDS]
    return whole["info"]["version"], found


def operations(folder, definitions):
    """The definitions, parameters and actions that operations.json.deflate has."""
    roots = ROOTS + OPTIONAL
    lists = [name + "List" for name in roots if name + "List" in definitions]
    known = reachable(definitions, roots)
    found = {name: schema for name, schema in reachable(definitions, lists + OTHERS).items() if name not in known}
    whole = json.loads(pathlib.Path(folder, "v2.json").read_text())
    parameters, actions = dict(whole["parameters"]), {}

    def keys(item):
        """The names of the parameters of an operation or a path, without those that follow from its path."""
        names = []
        for one in item["parameters"]:
            name = one["$ref"].rsplit("/", 1)[1] if "$ref" in one else one["name"]
            if name in INLINE:
                parameters[name] = one
            if name in parameters and name.split("-")[0] not in ("body", "namespace", "pretty"):
                names.append(name)
        return names

    collection = whole["paths"]["/api/v1/namespaces/{namespace}/configmaps"]
    actions["list"], actions["post"] = keys(collection["get"]), keys(collection["post"])
    actions["deletecollection"] = keys(collection["delete"])
    # Only custom resources have parameters of a read.
    actions["get"] = [name for name in actions["list"] if name.startswith("resourceVersion-")]
    object_ = whole["paths"]["/api/v1/namespaces/{namespace}/configmaps/{name}"]
    actions |= {method: keys(object_[method]) for method in ("put", "patch", "delete")}
    for path, item in whole["paths"].items():
        is_stream = item.get("get", {}).get("x-kubernetes-action") == "connect" and "{path}" not in path
        if is_stream or path.endswith("/log"):
            resource, _, subresource = path.split("/")[-3:]
            actions[f"{resource}/{subresource}"] = keys(item)
    return {"definitions": found, "parameters": dict(sorted(parameters.items())), "actions": actions}


def references(node):
    """Names of the definitions that a schema refers to."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref" and isinstance(value, str):
                yield value.rsplit("/", 1)[1]
            else:
                yield from references(value)
    elif isinstance(node, list):
        for item in node:
            yield from references(item)


def reachable(definitions, roots):
    """The roots and all that they refer to."""
    found, waiting = {}, list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = definitions[name]
            waiting += references(found[name])
    return dict(sorted(found.items()))


def plain(text):
    return re.sub("[-_$]", "", text).lower().replace("xkubernetes", "x")


class Messages:
    """The table of messages: field numbers, JSON names and types."""

    def __init__(self, definitions, modules):
        self.definitions, self.table, self.files = definitions, {}, {}
        self.modules, self.version = modules.rsplit("@", 1)

    def fields(self, name):
        """The fields of a message in its file generated.proto."""
        package, short = name.rsplit(".", 1)
        if package not in self.files:
            start = next(start for start in MODULES if name.startswith(start))
            folders = package.removeprefix(start).split(".")
            path = pathlib.Path(self.modules, f"{MODULES[start]}@{self.version}", *folders, "generated.proto")
            self.files[package] = dict(PROTO_MESSAGE.findall(path.read_text()))
        return PROTO_FIELD.findall(self.files[package][short])

    def add(self, name, properties=None):
        """Adds a message and those that it refers to. `properties` are those of the message that it is embedded in."""
        if name in self.table or name in SPECIAL:
            return
        if properties is None:
            properties = CHOICES.get(name) or self.definitions.get(name, {}).get("properties", {})
        self.table[name] = rows = []
        names = {plain(field): field for field in properties}
        for repeated, single, element, field, number in self.fields(name):
            of, prefix = single or element, "%" if element else "*" if repeated else ""
            known = names.get(plain(field))
            if name.rsplit(".", 1)[1] in WRAPPED:
                rows.append([int(number), "", "*" + PROTO_SCALARS[of]])
            elif of in PROTO_SCALARS and known is not None:
                rows.append([int(number), known, prefix + PROTO_SCALARS[of]])
            elif of not in PROTO_SCALARS:
                message = "io.k8s." + of.removeprefix(".k8s.io.") if "." in of else f"{name.rsplit('.', 1)[0]}.{of}"
                if known is None and not self.is_embedded(message, properties):
                    print(f"dropped: {name}.{field}", file=sys.stderr)
                    continue
                self.add(message, properties if known is None and message not in self.definitions else None)
                rows.append([int(number), known or "", f"{prefix}m{message}"])
            else:
                print(f"dropped: {name}.{field}", file=sys.stderr)

    def is_embedded(self, message, properties):
        """Whether the fields of a message are fields of the message that has it."""
        return bool({plain(row[3]) for row in self.fields(message)} & {plain(field) for field in properties})


def write(path, value):
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(text) + packer.flush()
    path.write_bytes(packed)
    print(f"{path.name}: {len(text)} bytes, {len(packed)} deflated", file=sys.stderr)


def follows(schema, of):
    """Whether a Go type follows from a schema: lists and maps have no names, and neither have scalars."""
    for key, prefix in ("items", "[]"), ("additionalProperties", "map[string]"):
        if key in schema:
            return of.startswith(prefix) and follows(schema[key], of.removeprefix(prefix))
    return of != "v1.JSON" and ("$ref" in schema or "allOf" in schema or "." not in of)


def write_fields(here, fields):
    """Presence and Go types of fields. Fields that the Go module does not have count as pointers."""
    text = zlib.decompress((here / "definitions.json.deflate").read_bytes(), -15)
    letters, types = {}, {}
    for name, definition in json.loads(text)["definitions"].items():
        known = {field: words.split(" ") for field, words in fields.get(name, {}).items()}
        properties = definition.get("properties", {})
        row = "".join(known.get(field, "p")[0] for field in sorted(properties))
        if row.strip("p"):
            letters[name] = row
        found = {field: f"{of} {within}" for field, (_, of, within) in known.items()
                 if field in properties and (within or not follows(properties[field], of))}
        if found:
            types[name] = found
    write(here / "presence.json.deflate", letters)
    write(here / "types.json.deflate", types)


def write_definitions(here, folder, modules):
    """Definitions and messages of all kinds."""
    version, all_definitions = published(folder)
    found = reachable(all_definitions, ROOTS + OPTIONAL)
    messages = Messages(found, modules)
    write(here / "definitions.json.deflate", {"version": version, "definitions": found})
    write(here / "operations.json.deflate", operations(folder, all_definitions))
    for name in ROOTS + OPTIONAL:
        messages.add(name)
    write(here / "messages.json.deflate", dict(sorted(messages.table.items())))


def main():
    here = pathlib.Path(__file__).parent
    if sys.argv[1:] == ["fields"]:
        return write_fields(here, json.load(sys.stdin))
    if sys.argv[1:2] == ["definitions"]:
        return write_definitions(here, *sys.argv[2:])
    if sys.argv[1:2] == ["operations"]:
        return write(here / "operations.json.deflate", operations(sys.argv[2], published(sys.argv[2])[1]))
    sys.exit(__doc__)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes definitions.json.deflate, messages.json.deflate, presence.json.deflate and types.json.deflate, the data behind
the crate's schemas.

Run by hand when Kubernetes has a new minor version or the crate a new kind (add it to ROOTS):

    generate.py PATH/kubernetes_validate-*.whl VERSION PATH/k8s-pb-*/src PATH/k8s.io/kubernetes@VERSION/api/openapi-spec/v3
    generate.py earlier PATH/k8s.io/kubernetes@VERSION/api/openapi-spec/v3 PATH/k8s.io/api@VERSION
    (cd integration/differential && go run ./fields) | generate.py fields
    generate.py values FOLDER
    generate.py published PATH/k8s.io/kubernetes@VERSION/api/openapi-spec/v3

The first is the Python wheel "kubernetes-validate", whose JSON schemas keep every marker of upstream's OpenAPI
definitions; its rewrites for JSON Schema are undone here. The third is the source of the Rust crate "k8s-pb", whose
attributes carry upstream's protobuf field numbers; they are joined with the properties of the definitions, which
carry the JSON names. Names and numbers that are in neither are listed below. The last argument is the folder of
upstream's OpenAPI v3 documents, a part of its Go module. They mark the fields that are always there (`default: {}`).

The second form adds the kinds in EARLIER, which belong to an earlier version than the others: their definitions come from
that version's OpenAPI v3 documents, and their field numbers from the files generated.proto of its API module.

The third form writes presence.json.deflate and types.json.deflate, for the definitions of both. The former has
for each definition one letter for each field, in the order of their names; integration/differential/fields describes the
letters. The latter has the fields whose Go type does not follow from their schema, or that are in an embedded struct: the
type, a space, and the path of the embedded structs.

The fourth form completes the definitions of the other forms by what only a running kube-apiserver publishes: the values of
fields, and the scalars of quantities and of IntOrString. FOLDER has its OpenAPI v3 documents, each in a file `*.json`.

The last form takes from upstream's documents what the wheel lacks or has otherwise: the defaults of fields and elements, the
required fields, and the form of references. Fields that are younger than the documents follow the rules of upstream's
generator.
"""

import json
import pathlib
import re
import sys
import zipfile
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
# Kinds of versions that the first form's version does not have.
EARLIER = [
    *("io.k8s.api.scheduling.v1alpha2." + name for name in "Workload PodGroup".split()),
    "io.k8s.api.storagemigration.v1beta1.StorageVersionMigration",
]
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
DEFAULTS = {(CORE + "ContainerPort", "protocol"): "TCP", (CORE + "ServicePort", "protocol"): "TCP"}

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
ADMISSION = "io.k8s.api.admissionregistration.v1."
# Fields younger than the crate: definition → (number, name, type).
YOUNGER = {ADMISSION + name: rows for name, rows in {
    "ApplyConfiguration": [(1, "expression", "s")],
    "JSONPatch": [(1, "expression", "s")],
    "MutatingAdmissionPolicy": [
        (1, "metadata", "m" + META + "ObjectMeta"), (2, "spec", "m" + ADMISSION + "MutatingAdmissionPolicySpec")],
    "MutatingAdmissionPolicyBinding": [
        (1, "metadata", "m" + META + "ObjectMeta"),
        (2, "spec", "m" + ADMISSION + "MutatingAdmissionPolicyBindingSpec")],
    "MutatingAdmissionPolicyBindingSpec": [
        (1, "policyName", "s"), (2, "paramRef", "m" + ADMISSION + "ParamRef"),
        (3, "matchResources", "m" + ADMISSION + "MatchResources")],
    "MutatingAdmissionPolicySpec": [
        (1, "paramKind", "m" + ADMISSION + "ParamKind"), (2, "matchConstraints", "m" + ADMISSION + "MatchResources"),
        (3, "variables", "*m" + ADMISSION + "Variable"), (4, "mutations", "*m" + ADMISSION + "Mutation"),
        (5, "failurePolicy", "s"), (6, "matchConditions", "*m" + ADMISSION + "MatchCondition"),
        (7, "reinvocationPolicy", "s")],
    "Mutation": [
        (2, "patchType", "s"), (3, "applyConfiguration", "m" + ADMISSION + "ApplyConfiguration"),
        (4, "jsonPatch", "m" + ADMISSION + "JSONPatch")],
}.items()} | {CORE + name: rows for name, rows in {
    "ClusterTrustBundleProjection": [(6, "user", "i")],
    "ConfigMapVolumeSource": [(5, "defaultUser", "i")],
    "DownwardAPIVolumeFile": [(5, "user", "i")],
    "DownwardAPIVolumeSource": [(3, "defaultUser", "i")],
    "EmptyDirVolumeSource": [(3, "mode", "i")],
    "EvictionResponder": [(1, "name", "s"), (2, "priority", "i")],
    "GRPCAction": [(3, "mode", "s")],
    "HTTPGetAction": [(6, "protocol", "s")],
    "ImageVolumeStatus": [(1, "imageRef", "s")],
    "KeyToPath": [(4, "user", "i")],
    "NodePodPreemptionPolicy": [(1, "disableResizePreemption", "*s")],
    "NodeSpec": [(8, "podPreemptionPolicy", "m" + CORE + "NodePodPreemptionPolicy")],
    "PodCertificateProjection": [(8, "user", "i")],
    "PodSchedulingGroup": [(1, "podGroupName", "s")],
    "PodStatus": [(22, "volumeHealth", "*m" + CORE + "PodVolumeHealth")],
    "PodVolumeHealth": [
        (1, "name", "s"), (2, "healthConditions", "*m" + CORE + "VolumeHealthCondition"),
        (3, "lastTransitionTime", "m" + META + "Time")],
    "PodSpec": [
        (43, "schedulingGroup", "m" + CORE + "PodSchedulingGroup"),
        (44, "evictionResponders", "*m" + CORE + "EvictionResponder")],
    "ProjectedVolumeSource": [(3, "defaultUser", "i")],
    "ResourceHealth": [(6, "message", "s")],
    "SecretVolumeSource": [(5, "defaultUser", "i")],
    "ServiceAccountTokenProjection": [(4, "user", "i")],
    "VolumeHealthCondition": [(1, "status", "s"), (2, "reason", "s"), (3, "message", "s")],
    "VolumeMount": [(8, "bindMountOptions", "*s")],
    "VolumeMountStatus": [(5, "volumeStatus", "m" + CORE + "VolumeStatus")],
    "VolumeStatus": [(1, "image", "m" + CORE + "ImageVolumeStatus")],
}.items()}


def load(wheel, version):
    """The definitions of one Kubernetes version, by name."""
    path = f"kubernetes_validate/kubernetes-json-schema/v{version}-local/_definitions.json"
    with zipfile.ZipFile(wheel) as archive:
        return json.loads(archive.read(path))["$defs"]


def restore(node):
    """Undoes the rewrites for JSON Schema."""
    if isinstance(node, list):
        return [restore(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {}
    for key, value in node.items():
        if key == "type" and isinstance(value, list):
            out[key] = next(name for name in value if name != "null")
        elif key == "$ref" and isinstance(value, str):
            out[key] = "#/components/schemas/" + value.rsplit("/", 1)[1]
        elif key == "properties":
            out[key] = {name: restore(child) for name, child in value.items()}
        else:
            out[key] = restore(value)
    if "$ref" in out and len(out) > 1:
        # Beside a reference other keys do not count in OpenAPI 3.0.
        out["allOf"] = [{"$ref": out.pop("$ref")}]
    return out


def definition(name, raw):
    """One definition as OpenAPI has it."""
    out = restore(raw)
    properties = out.get("properties", {})
    if "x-kubernetes-group-version-kind" in out:
        for field in ("apiVersion", "kind"):
            properties.get(field, {}).pop("enum", None)
    if name == QUANTITY:
        out = {"type": "string"}
    if name == INT_OR_STRING:
        out = {"type": "string", "format": "int-or-string"}
    for (owner, field), value in DEFAULTS.items():
        if owner == name:
            properties[field]["default"] = value
    return out


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
            found[name] = definition(name, definitions[name])
            waiting += references(found[name])
    return dict(sorted(found.items()))


FIELD = re.compile(r"#\[prost\(([^]]*)\)\]\s*pub (r#)?(\w+):\s*([^;{}]*?),(?=\s*(?:#\[|///|\Z))", re.S)
STRUCT = re.compile(r"pub struct (\w+) \{(?:\}|(.*?)\n\})", re.S)


class Named(dict):
    """Keys in the spelling of the definitions: Rust writes HttpGetAction for HTTPGetAction."""

    def __init__(self, spelling):
        super().__init__()
        self.spelling = spelling

    def spell(self, name):
        return self.spelling.get(name.lower(), name)


def messages(source, definitions):
    """message → [(number, rust name, prost kind, rust type)], named as the definitions are."""
    found = Named({name.lower(): name for name in definitions})
    for path in pathlib.Path(source).rglob("*.rs"):
        module = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".mod").replace("_", "-")
        for name, body in STRUCT.findall(path.read_text()):
            fields = []
            for attribute, _, field, rust in FIELD.findall(body):
                number = int(re.search(r'tag = "(\d+)"', attribute)[1])
                fields.append((number, field, attribute, " ".join(rust.split())))
            found[found.spell("io.k8s." + module + "." + name)] = fields
    return found


def target(module, rust, known):
    """The message that a Rust type names."""
    path = re.findall(r"[\w:]+(?=[>,\s]*$)", rust.replace("r#", ""))[-1].split("::")
    here = module.split(".")
    while path[0] in ("super", ""):
        path, here = path[1:], here[:-1]
    full = known.spell("io.k8s." + ".".join([part for part in here + path if part]).replace("_", "-"))
    if full not in known:
        raise SystemExit(f"no message {full} ({rust})")
    return full


def plain(text):
    return re.sub("[-_$]", "", text).lower().replace("xkubernetes", "x")


class Join:
    """Joins field numbers with JSON names, from the roots on."""

    def __init__(self, definitions, found):
        self.definitions, self.found, self.table = definitions, found, {}

    def add(self, name, properties=None):
        if name in self.table or name in SPECIAL:
            return
        if properties is None:
            properties = CHOICES.get(name) or self.definitions.get(name, {}).get("properties", {})
        self.table[name] = rows = []
        names = {plain(field): field for field in properties}
        for number, field, attribute, rust in self.found.get(name, []):
            rows.append(self.row(name, properties, names.get(plain(field)), (number, field, attribute, rust)))
        for number, field, kind in YOUNGER.get(name, []):
            rows.append([number, field, kind])
            if "m" in kind[:2]:
                self.add(kind.split("m", 1)[1])
        self.table[name] = [row for row in rows if row]

    def row(self, name, properties, json_name, raw):
        number, field, attribute, rust = raw
        module = name.removeprefix("io.k8s.").rsplit(".", 1)[0]
        kind, prefix = re.match(r"\w+", attribute)[0], ""
        if kind == "btree_map":
            prefix = "%"
            kind = re.search(r'"string, (\w+)"', attribute)[1]
        elif "repeated" in attribute:
            prefix = "*"
        short = name.rsplit(".", 1)[1]
        if short in WRAPPED:
            return [number, "", "*" + {"string": "s"}[kind]]
        if kind == "message":
            message = target(module, rust, self.found)
            if json_name is None:
                return self.inlined(message, properties, number, field, name)
            self.add(message)
            return [number, json_name, prefix + "m" + message]
        if json_name is None:
            print(f"dropped: {name}.{field}", file=sys.stderr)
            return None
        letter = {"string": "s", "int32": "i", "int64": "i", "bool": "b", "bytes": "y", "double": "d"}[kind]
        return [number, json_name, prefix + letter]

    def inlined(self, message, properties, number, field, name):
        own = {plain(f) for _, f, _, _ in self.found[message]}
        if not own <= {plain(f) for f in properties}:
            if not own & {plain(f) for f in properties}:
                print(f"dropped: {name}.{field}", file=sys.stderr)
                return None
        self.add(message, properties if message not in self.definitions else None)
        return [number, "", "m" + message]


def mark_structs(definitions, folder):
    """Sets `default: {}` on fields that are structs and not pointers in Go. An absent one is the same as `{}`."""
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        for name, schema in json.loads(path.read_text()).get("components", {}).get("schemas", {}).items():
            for field, property in schema.get("properties", {}).items():
                known = definitions.get(name, {}).get("properties", {})
                if property.get("default") == {} and field in known:
                    known[field]["default"] = {}


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
    return "$ref" in schema or "allOf" in schema or "." not in of


def write_fields(here, fields):
    """Presence and Go types of fields. Fields that the Go module does not have yet count as pointers."""
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


POSSIBLE = "\n\nPossible enum values:\n"


def add_values(definition, published):
    """Adds the values of the fields, with their descriptions."""
    for field, property in published.get("properties", {}).items():
        known = definition.get("properties", {}).get(field)
        if known is None:
            continue
        for inner in (None, "items", "additionalProperties"):
            source, target = (property, known) if inner is None else (property.get(inner), known.get(inner))
            if isinstance(source, dict) and isinstance(target, dict) and "enum" in source:
                target["enum"] = source["enum"]
        _, found, values = property.get("description", "").partition(POSSIBLE)
        if found:
            known["description"] = known.get("description", "").partition(POSSIBLE)[0] + found + values


def write_values(here, folder):
    """Completes the definitions by those that a server publishes."""
    path = here / "definitions.json.deflate"
    file = json.loads(zlib.decompress(path.read_bytes(), -15))
    for document in sorted(pathlib.Path(folder).glob("*.json")):
        for name, published in json.loads(document.read_text())["components"]["schemas"].items():
            if name in (QUANTITY, INT_OR_STRING):
                file["definitions"][name] = published
            elif name in file["definitions"]:
                add_values(file["definitions"][name], published)
    write(path, file)


# Definitions that stand for a scalar or for any value: an element of such a type has no default.
WITHOUT_DEFAULT = {
    QUANTITY, INT_OR_STRING, META + "Time", META + "MicroTime", EXTENSIONS + "JSON",
    EXTENSIONS + "JSONSchemaPropsOrStringArray"}
ZERO = {"string": "", "integer": 0, "number": 0, "boolean": False}


def add_element_defaults(schema):
    """Sets the defaults of elements: their zero value, as in Go. A reference with a default is wrapped."""
    for key in ("items", "additionalProperties"):
        element = schema.get(key)
        if not isinstance(element, dict):
            continue
        reference = element.get("$ref")
        if reference and reference.rsplit("/", 1)[1] not in WITHOUT_DEFAULT:
            schema[key] = {"allOf": [{"$ref": reference}], "default": {}}
        elif element.get("type") in ZERO and element.get("format") != "byte":
            element["default"] = ZERO[element["type"]]
        add_element_defaults(element)


def copy_form(known, published):
    """Copies the default and the form of the reference, of a field and of its elements."""
    for key in ("$ref", "allOf", "default"):
        known.pop(key, None)
        if key in published:
            known[key] = published[key]
    for key in ("items", "additionalProperties"):
        if isinstance(known.get(key), dict) and isinstance(published.get(key), dict):
            copy_form(known[key], published[key])


def write_published(here, folder):
    """Takes defaults, required fields and the form of references from upstream's documents."""
    path = here / "definitions.json.deflate"
    file = json.loads(zlib.decompress(path.read_bytes(), -15))
    published = {}
    for document in sorted(pathlib.Path(folder).glob("*.json")):
        published |= json.loads(document.read_text()).get("components", {}).get("schemas", {})
    for name, definition in file["definitions"].items():
        properties, upstream = definition.get("properties", {}), published.get(name)
        if upstream is not None:
            required = [field for field in upstream.get("required", []) if field in properties]
            definition.pop("required", None)
            if required:
                definition["required"] = required
        for field, property in properties.items():
            source = (upstream or {}).get("properties", {}).get(field)
            if source is not None:
                copy_form(property, source)
                continue
            add_element_defaults(property)
            if field in definition.get("required", []) and "enum" not in property and property.get("type") in ZERO:
                property["default"] = ZERO[property["type"]]
    write(path, file)


PROTO_MESSAGE = re.compile(r"^message (\w+) \{(.*?)^\}", re.S | re.M)
PROTO_FIELD = re.compile(r"^\s*(optional|repeated) ([\w.]+) (\w+) = (\d+);", re.M)
PROTO_SCALARS = {"string": "s", "int32": "i", "int64": "i", "bool": "b", "bytes": "y", "double": "d"}


def proto_rows(api, name, table):
    """Adds the rows of a message of a file generated.proto, and of the messages that it refers to."""
    if name in table or name in SPECIAL:
        return
    package, short = name.rsplit(".", 1)
    if not package.startswith("io.k8s.api."):
        raise SystemExit(f"no file for the message {name}")
    path = pathlib.Path(api, *package.removeprefix("io.k8s.api.").split("."), "generated.proto")
    table[name] = rows = []
    for kind, of, field, number in PROTO_FIELD.findall(dict(PROTO_MESSAGE.findall(path.read_text()))[short]):
        prefix = "*" if kind == "repeated" else ""
        if of in PROTO_SCALARS:
            rows.append([int(number), field, prefix + PROTO_SCALARS[of]])
            continue
        message = "io.k8s." + of.removeprefix(".k8s.io.") if "." in of else f"{package}.{of}"
        proto_rows(api, message, table)
        rows.append([int(number), field, f"{prefix}m{message}"])


def write_earlier(here, openapi, api):
    """Adds the definitions and messages of EARLIER. Known definitions stay as they are."""
    path, messages_path = here / "definitions.json.deflate", here / "messages.json.deflate"
    file = json.loads(zlib.decompress(path.read_bytes(), -15))
    table = json.loads(zlib.decompress(messages_path.read_bytes(), -15))
    published = {}
    for document in sorted(pathlib.Path(openapi).glob("*.json")):
        published |= json.loads(document.read_text()).get("components", {}).get("schemas", {})
    added = reachable(published, EARLIER)
    file["definitions"] = dict(sorted({**added, **file["definitions"]}.items()))
    table.update({META + "GroupResource": [[1, "group", "s"], [2, "resource", "s"]]})
    for name in EARLIER:
        proto_rows(api, name, table)
    write(path, file)
    write(messages_path, dict(sorted(table.items())))


def main():
    if sys.argv[1:2] == ["earlier"]:
        return write_earlier(pathlib.Path(__file__).parent, *sys.argv[2:])
    if sys.argv[1:2] == ["values"]:
        return write_values(pathlib.Path(__file__).parent, sys.argv[2])
    if sys.argv[1:2] == ["published"]:
        return write_published(pathlib.Path(__file__).parent, sys.argv[2])
    if sys.argv[1:] == ["fields"]:
        return write_fields(pathlib.Path(__file__).parent, json.load(sys.stdin))
    wheel, version, source, openapi = sys.argv[1:]
    here = pathlib.Path(__file__).parent
    definitions = reachable(load(wheel, version), ROOTS)
    mark_structs(definitions, openapi)
    write(here / "definitions.json.deflate", {"version": version, "definitions": definitions})
    join = Join(definitions, messages(source, definitions))
    for name in ROOTS:
        join.add(name)
    write(here / "messages.json.deflate", dict(sorted(join.table.items())))


if __name__ == "__main__":
    main()

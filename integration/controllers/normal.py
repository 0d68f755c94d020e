"""Replaces values that differ between any two runs: uids, times, revisions, random names, addresses, hashes."""

import hashlib
import json
import re
import threading

from cluster import CLUSTER_SCOPED, RESOURCES

DROPPED = {"uid", "resourceVersion", "managedFields", "selfLink", "clusterIP", "clusterIPs", "podCIDR", "podCIDRs",
           "nodePort", "healthCheckNodePort"}
TIMES = re.compile(r"^(.*(Time|Timestamp|timeAdded|startedAt|finishedAt)|time)$")
# The end of a generated name. Names of stateful sets' pods end with an ordinal.
RANDOM = re.compile(r"[bcdfghjklmnpqrstvwxz2456789]{5}$")
TOKEN_VOLUME = re.compile(r"^kube-api-access-\w{5}$")
# Lists without an order.
UNORDERED = {"conditions", "endpoints", "addresses", "notReadyAddresses", "ownerReferences", "taints", "subsets", "finalizers",
             "active", "ports", "containerStatuses", "secrets"}
HASHES = ["pod-template-hash", "controller-revision-hash", "controller.kubernetes.io/hash"]


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:6]


class Names:
    """Replacements for the random texts of one history on one cluster."""

    def __init__(self, scope):
        self.scope = scope
        # Hashes; generated names with their prefixes; texts that stand for an object, with its resource and name.
        self.hashes, self.generated, self.identities = {}, {}, {}
        self.tokens, self.pattern, self.lock = {}, None, threading.Lock()

    def learn(self, resource, item):
        """Reads the random texts of an object."""
        metadata = item["metadata"]
        name, uid = metadata["name"], metadata.get("uid")
        owner = next((one for one in metadata.get("ownerReferences", []) if one.get("controller")), None)
        if resource == "replicasets" and owner and name.startswith(owner["name"] + "-"):
            self.add(self.hashes, name[len(owner["name"]) + 1:], f"#{digest(self.template(item['spec']['template']))}")
        elif resource == "controllerrevisions" and owner and name.startswith(owner["name"] + "-"):
            self.add(self.hashes, name[len(owner["name"]) + 1:], f"#{digest(item.get('data'))}")
        elif name.startswith(metadata.get("generateName", "\0")) and RANDOM.search(name):
            self.add(self.generated, name, metadata["generateName"])
        if uid:
            self.add(self.identities, uid, ("uid", f"{resource}/", name))
        if resource == "pods":
            for address in item.get("status", {}).get("podIPs", []):
                self.add(self.identities, address["ip"], ("ip", "", name))

    @staticmethod
    def template(template):
        copy = json.loads(json.dumps(template))
        copy.get("metadata", {}).get("labels", {}).pop("pod-template-hash", None)
        return copy

    def add(self, known, text, token):
        with self.lock:
            if known.get(text) != token:
                known[text] = token
                self.pattern = None

    @staticmethod
    def compiled(tokens):
        words = sorted(tokens, key=len, reverse=True)
        return re.compile(r"(?<![a-z0-9])(" + "|".join(map(re.escape, words)) + r")(?![a-z0-9])") if words else re.compile(r"(?!)")

    def replace(self, text):
        with self.lock:
            if self.pattern is None:
                hashes = self.compiled(self.hashes)
                tokens = dict(self.hashes)
                for name, prefix in self.generated.items():
                    tokens[name] = hashes.sub(lambda match: self.hashes[match[1]], prefix) + "*"
                for one, (kind, resource, name) in self.identities.items():
                    tokens[one] = f"{kind}:{resource}" + (tokens.get(name) or hashes.sub(lambda match: self.hashes[match[1]], name))
                self.tokens, self.pattern = tokens, self.compiled(tokens)
            return self.pattern.sub(lambda match: self.tokens[match[1]], text)

    def clean(self, value, key=""):
        """The comparable form of a value."""
        if isinstance(value, dict):
            result = {}
            for name, one in value.items():
                if name in DROPPED and not (name == "clusterIP" and one == "None"):
                    continue
                if one == [] or one is None:
                    continue  # Go writes null for an absent list.
                if TIMES.match(name) and isinstance(one, str):
                    result[name] = "T"
                else:
                    result[self.replace(name)] = self.clean(one, name)
            return result
        if isinstance(value, list):
            items = [self.clean(one) for one in value]
            return sorted(items, key=lambda one: json.dumps(one, sort_keys=True)) if key in UNORDERED else items
        if isinstance(value, str):
            return "kube-api-access-*" if TOKEN_VOLUME.match(value) else self.replace(value)
        return value


def event_line(names, item):
    about = item.get("involvedObject", {})
    return (f"{about.get('kind')}/{names.replace(about.get('name', ''))}", item.get("type"), item.get("reason"),
            names.replace(item.get("message", "")), item.get("source", {}).get("component") or item.get("reportingComponent"))


def snapshot(cluster, names):
    """Comparable objects by resource and normal name. Several objects can have one normal name: they are a sorted list. Events
    are a set."""
    result = {}
    for _, resource in RESOURCES:
        for item in cluster.all(resource, names.scope):
            if resource == "events":
                result.setdefault("events", set()).add(event_line(names, item))
                continue
            clean = names.clean({part: value for part, value in item.items() if part not in ("apiVersion", "kind")})
            if resource == "nodes":
                clean["status"] = {"conditions": clean.get("status", {}).get("conditions")}
            if resource == "secrets" or resource == "configmaps" and item["metadata"]["name"] == "kube-root-ca.crt":
                clean["data"] = sorted(clean.get("data", {}))
            name = names.replace(item["metadata"]["name"]) if resource not in CLUSTER_SCOPED else item["metadata"]["name"]
            if resource == "endpointslices":
                clean["metadata"].pop("generation", None)  # how many writes a change takes depends on time
                clean["metadata"]["name"] = name = clean["metadata"].get("generateName", name)
            result.setdefault(f"{resource}/{name}", []).append(clean)
    for key, items in result.items():
        if key != "events":
            items.sort(key=lambda one: json.dumps(one, sort_keys=True))
    return result


ABSENT = object()


def differences(theirs, ours, place=""):
    """Yields (place, theirs, ours) where two values differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted(set(theirs) | set(ours)):
            yield from differences(theirs.get(name, ABSENT), ours.get(name, ABSENT), f"{place}.{name}")
    elif isinstance(theirs, list) and isinstance(ours, list):
        if place.endswith(".conditions"):
            theirs, ours = ({one.get("type"): one for one in side} for side in (theirs, ours))
            yield from differences(theirs, ours, place)
        elif len(theirs) == len(ours):
            for index, (one, other) in enumerate(zip(theirs, ours)):
                yield from differences(one, other, f"{place}[{index}]")
        else:
            yield place, theirs, ours
    elif type(theirs) is not type(ours) or theirs != ours:
        yield place, theirs, ours


def rows(theirs, ours):
    """Yields (object, place, theirs, ours) of two snapshots."""
    for key in sorted(set(theirs) | set(ours)):
        if key == "events":
            one, other = theirs.get(key, set()), ours.get(key, set())
            yield from (("events", line[0], show(line[1:]), "(absent)") for line in sorted(one - other, key=str))
            yield from (("events", line[0], "(absent)", show(line[1:])) for line in sorted(other - one, key=str))
            continue
        one, other = theirs.get(key, []), ours.get(key, [])
        if len(one) != len(other):
            yield key, "count", str(len(one)), str(len(other))
            continue
        for index, (left, right) in enumerate(zip(one, other)):
            for place, theirs_value, ours_value in differences(left, right):
                yield key, place, show(theirs_value), show(ours_value)


def show(value):
    text = "(absent)" if value is ABSENT else json.dumps(value, sort_keys=True)
    return text if len(text) < 600 else text[:600] + "…"

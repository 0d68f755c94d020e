"""A client of a control plane: sends requests, and keeps copies of the objects by watches."""

import http.client
import json
import ssl
import threading
import time
import urllib.parse

# Group and version, resource. Objects of these are compared; writes to others (leases) do not count as activity.
RESOURCES = [
    ("api/v1", "pods"), ("api/v1", "services"), ("api/v1", "endpoints"), ("api/v1", "replicationcontrollers"),
    ("api/v1", "resourcequotas"), ("api/v1", "persistentvolumeclaims"), ("api/v1", "serviceaccounts"),
    ("api/v1", "configmaps"), ("api/v1", "secrets"), ("api/v1", "events"), ("api/v1", "nodes"), ("api/v1", "namespaces"),
    ("api/v1", "persistentvolumes"), ("apis/apps/v1", "deployments"), ("apis/apps/v1", "replicasets"),
    ("apis/apps/v1", "statefulsets"), ("apis/apps/v1", "daemonsets"), ("apis/apps/v1", "controllerrevisions"),
    ("apis/batch/v1", "jobs"), ("apis/batch/v1", "cronjobs"), ("apis/policy/v1", "poddisruptionbudgets"),
    ("apis/autoscaling/v2", "horizontalpodautoscalers"), ("apis/discovery.k8s.io/v1", "endpointslices"),
]
CLUSTER_SCOPED = {"nodes", "namespaces", "persistentvolumes"}
GROUPS = {resource: group for group, resource in RESOURCES} | {"leases": "apis/coordination.k8s.io/v1"}
MERGE = "application/merge-patch+json"


def scope_of(resource, metadata):
    """The history that the object belongs to: its namespace, or the first part of its name."""
    if resource not in CLUSTER_SCOPED:
        return metadata.get("namespace", "")
    return metadata["name"].split("-")[0]


class Cluster:
    """One control plane."""

    def __init__(self, name, url, token):
        self.name, self.token = name, token
        parts = urllib.parse.urlsplit(url)
        self.host, self.port = parts.hostname, parts.port
        self.local = threading.local()
        self.lock = threading.Lock()
        # By resource, then by (namespace, name).
        self.objects = {resource: {} for _, resource in RESOURCES}
        # Time of the last change, by scope.
        self.changed = {}
        self.listeners = {}

    def connect(self, timeout=60):
        context = ssl._create_unverified_context()
        return http.client.HTTPSConnection(self.host, self.port, context=context, timeout=timeout)

    def headers(self, media):
        return {"Authorization": f"Bearer {self.token}", "Content-Type": media, "User-Agent": "differential/1"}

    def send(self, method, path, body=None, media="application/json"):
        """Code and body of the response."""
        text = None if body is None else json.dumps(body)
        for attempt in range(3):
            connection = getattr(self.local, "connection", None) or self.connect()
            self.local.connection = connection
            try:
                connection.request(method, "/" + path, body=text, headers=self.headers(media))
                answer = connection.getresponse()
                data = answer.read()
                return answer.status, json.loads(data) if data[:1] == b"{" else data.decode(errors="replace")
            except (http.client.HTTPException, OSError):
                self.local.connection = None
                if attempt == 2:
                    raise

    @staticmethod
    def path(resource, namespace=None, name=None, part=None):
        words = [GROUPS[resource]]
        if namespace and resource not in CLUSTER_SCOPED:
            words += ["namespaces", namespace]
        return "/".join(words + [word for word in (resource, name, part) if word])

    # --- watches ---

    def follow(self):
        """Starts one watch for each resource. Returns after the first lists."""
        ready = []
        for group, resource in RESOURCES:
            listed = threading.Event()
            ready.append(listed)
            threading.Thread(target=self.watch, args=(group, resource, listed), daemon=True).start()
        for listed in ready:
            if not listed.wait(60):
                raise RuntimeError(f"{self.name}: a list takes longer than 60 s")

    def watch(self, group, resource, listed):
        while True:
            code, answer = self.send("GET", f"{group}/{resource}")
            if code != 200:
                raise RuntimeError(f"{self.name}: cannot list {resource}: {answer}")
            current = {}
            for item in answer["items"]:
                current[self.key(item)] = item
            with self.lock:
                self.objects[resource] = current
            for item in answer["items"]:
                self.notice(resource, item, item)
            listed.set()
            try:
                self.stream(f"{group}/{resource}?watch=1&resourceVersion={answer['metadata']['resourceVersion']}", resource)
            except (http.client.HTTPException, OSError, ValueError):
                pass

    def stream(self, path, resource):
        connection = self.connect(timeout=3600)
        connection.request("GET", "/" + path, headers=self.headers("application/json"))
        answer = connection.getresponse()
        while line := answer.readline():
            event = json.loads(line)
            item = event["object"]
            if event["type"] == "ERROR":
                return
            key = self.key(item)
            with self.lock:
                old = self.objects[resource].get(key)
                if event["type"] == "DELETED":
                    self.objects[resource].pop(key, None)
                else:
                    self.objects[resource][key] = item
            self.notice(resource, item, old)

    @staticmethod
    def key(item):
        return item["metadata"].get("namespace", ""), item["metadata"]["name"]

    def notice(self, resource, item, old):
        scope = scope_of(resource, item["metadata"])
        # A heartbeat of a node does not count as activity.
        self.changed[scope] = time.monotonic()
        listener = self.listeners.get(scope)
        if listener:
            listener(resource, item)

    def all(self, resource, scope):
        """The objects of a history."""
        with self.lock:
            items = list(self.objects[resource].values())
        return [item for item in items if scope_of(resource, item["metadata"]) == scope]

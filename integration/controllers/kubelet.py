"""Acts as the scheduler and the kubelets: binds pods, writes their statuses, removes terminated pods."""

import datetime
import json
import re

from cluster import MERGE


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(kind, status, reason=None):
    result = {"type": kind, "status": status, "lastTransitionTime": now()}
    return result | ({"reason": reason} if reason else {})


def container(pod, state, ready, restarts=0):
    return [{"name": one["name"], "image": one["image"], "imageID": "", "ready": ready, "started": ready,
             "restartCount": restarts, "state": state} for one in pod["spec"]["containers"]]


class Kubelet:
    """Acts for the nodes of one history on one cluster."""

    def __init__(self, cluster, names, number):
        self.cluster, self.names, self.scope = cluster, names, names.scope
        self.number, self.addresses = number, 1

    def pods(self, step):
        """The pods of a step, in the same order on both clusters."""
        found = []
        for pod in self.cluster.all("pods", self.scope):
            owner = pod["metadata"].get("labels", {}).get("app")
            if step.get("app") and owner != step["app"]:
                continue
            clean = self.names.clean(pod)
            found.append((self.names.replace(pod["metadata"]["name"]), json.dumps(clean, sort_keys=True), pod))
        return [pod for _, _, pod in sorted(found, key=lambda one: one[:2])]

    def run(self, step):
        getattr(self, step["act"])(step)

    def write(self, pod, status):
        name = pod["metadata"]["name"]
        self.cluster.send("PATCH", self.cluster.path("pods", self.scope, name, "status"), {"status": status}, MERGE)

    def chosen(self, step, pods):
        """As many pods as the step selects."""
        first = step.get("first", 0)
        return pods[first:first + step["count"]] if "count" in step else pods

    def node_of(self, pod):
        fields = (pod["spec"].get("affinity", {}).get("nodeAffinity", {})
                  .get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [{}]))
        for one in fields[0].get("matchFields", []):
            return one["values"][0]
        ordinal = re.search(r"-(\d)$", pod["metadata"]["name"])
        index = pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index")
        return f"{self.scope}-w{int(index or (ordinal[1] if ordinal else 0)) % 2}"

    def bind(self, step):
        """Binds and runs the pods that are pending."""
        nodes = {node["metadata"]["name"] for node in self.cluster.all("nodes", self.scope)}
        waiting = [pod for pod in self.pods(step) if pod.get("status", {}).get("phase") == "Pending"
                   and not pod["metadata"].get("deletionTimestamp") and not pod["spec"].get("schedulingGates")]
        for pod in self.chosen(step, waiting):
            name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
            if not node:
                node = self.node_of(pod)
                if node not in nodes:
                    continue
                binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
                           "target": {"apiVersion": "v1", "kind": "Node", "name": node}}
                self.cluster.send("POST", self.cluster.path("pods", self.scope, name, "binding"), binding)
            self.running(pod, step.get("ready", True))

    def running(self, pod, ready, restarts=0):
        address = (pod.get("status", {}).get("podIP")
                   or f"10.{self.number % 250}.{self.addresses // 250}.{self.addresses % 250 + 1}")
        self.addresses += 1
        value = "True" if ready else "False"
        conditions = [condition("PodScheduled", "True"), condition("Initialized", "True"), condition("Ready", value),
                      condition("ContainersReady", value)]
        self.write(pod, {"phase": "Running", "conditions": conditions, "podIP": address, "podIPs": [{"ip": address}],
                         "hostIP": "192.0.2.9", "hostIPs": [{"ip": "192.0.2.9"}], "startTime": now(),
                         "containerStatuses": container(pod, {"running": {"startedAt": now()}}, ready, restarts)})

    def live(self, step):
        return self.chosen(step, [pod for pod in self.pods(step) if pod.get("status", {}).get("phase") == "Running"
                                  and not pod["metadata"].get("deletionTimestamp")])

    def ready(self, step):
        """Makes running pods ready, or not."""
        for pod in self.live(step):
            self.running(pod, step["value"], step.get("restarts", 0))

    def end(self, step):
        """Ends running pods: with an exit code, or evicted."""
        for pod in self.live(step):
            self.ended(pod, step)

    def ended(self, pod, step):
        code, reason = step.get("code", 0), step.get("reason")
        state = {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else "Error", "startedAt": now(),
                                "finishedAt": now()}}
        conditions = [condition("PodScheduled", "True"), condition("Initialized", "True"),
                      condition("Ready", "False", "PodCompleted"), condition("ContainersReady", "False", "PodCompleted")]
        conditions += [condition(step["target"], "True", "EvictionByEvictionAPI")] if step.get("target") else []
        status = {"phase": "Succeeded" if code == 0 else "Failed", "conditions": conditions,
                  "containerStatuses": container(pod, state, False)}
        self.write(pod, status | ({"reason": reason, "message": "low on memory"} if reason else {}))

    def reap(self, step):
        """Ends and removes the pods that are being deleted."""
        for pod in self.pods(step):
            if pod["metadata"].get("deletionTimestamp"):
                if pod.get("status", {}).get("phase") in ("Pending", "Running"):
                    self.ended(pod, {"code": step.get("code", 137)})
                self.cluster.send("DELETE", self.cluster.path("pods", self.scope, pod["metadata"]["name"]),
                                  {"gracePeriodSeconds": 0})

    def delete(self, step):
        """Deletes some pods, as a user."""
        for pod in self.chosen(step, [pod for pod in self.pods(step) if not pod["metadata"].get("deletionTimestamp")]):
            self.cluster.send("DELETE", self.cluster.path("pods", self.scope, pod["metadata"]["name"]),
                              {"gracePeriodSeconds": 0} if step.get("force") else None)

    def evict(self, step):
        """Asks for the eviction of some pods, which a disruption budget can refuse."""
        answers = []
        for pod in self.live(step):
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod["metadata"]["name"]}}
            answers.append(self.cluster.send("POST", self.cluster.path("pods", self.scope, pod["metadata"]["name"], "eviction"),
                                             body)[0])
        return answers

    def relabel(self, step):
        """Changes labels of some pods, so that their controller releases them."""
        for pod in self.live(step):
            self.cluster.send("PATCH", self.cluster.path("pods", self.scope, pod["metadata"]["name"]),
                              {"metadata": {"labels": step["labels"]}}, MERGE)

    def node(self, step):
        """Makes a node ready, or not."""
        kind = condition("Ready", step["value"], "KubeletReady" if step["value"] == "True" else "KubeletNotReady")
        kind |= {"lastHeartbeatTime": now(), "message": "kubelet"}
        status = {"conditions": [kind], "capacity": {"pods": "110", "cpu": "8", "memory": "16Gi"},
                  "allocatable": {"pods": "110", "cpu": "8", "memory": "16Gi"}}
        self.cluster.send("PATCH", self.cluster.path("nodes", None, step["node"], "status"), {"status": status}, MERGE)

    def heartbeat(self):
        """Renews the leases of the nodes."""
        for node in self.cluster.all("nodes", self.scope):
            name = node["metadata"]["name"]
            time = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": time}
            path = self.cluster.path("leases", "kube-node-lease", name)
            if self.cluster.send("PATCH", path, {"spec": spec}, MERGE)[0] == 404:
                lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}
                self.cluster.send("POST", self.cluster.path("leases", "kube-node-lease"), lease)

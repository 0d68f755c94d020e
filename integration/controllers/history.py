"""Random histories of a cluster: requests of users, and actions of nodes and pods. A seed determines a history."""

import random

THEMES = ["deployment", "replicaset", "statefulset", "daemonset", "job", "cronjob", "disruption", "service", "garbage",
          "storage", "deployment", "job", "statefulset", "daemonset", "policy"]
RESOURCES = {
    "Deployment": ("apps/v1", "deployments"), "ReplicaSet": ("apps/v1", "replicasets"), "StatefulSet": ("apps/v1", "statefulsets"),
    "DaemonSet": ("apps/v1", "daemonsets"), "Job": ("batch/v1", "jobs"), "CronJob": ("batch/v1", "cronjobs"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"), "ReplicationController": ("v1", "replicationcontrollers"),
    "Service": ("v1", "services"), "Endpoints": ("v1", "endpoints"), "ResourceQuota": ("v1", "resourcequotas"),
    "HorizontalPodAutoscaler": ("autoscaling/v2", "horizontalpodautoscalers"), "ServiceAccount": ("v1", "serviceaccounts"),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims"), "PersistentVolume": ("v1", "persistentvolumes"),
    "Pod": ("v1", "pods"), "Node": ("v1", "nodes"), "Namespace": ("v1", "namespaces"), "ConfigMap": ("v1", "configmaps"),
    "Secret": ("v1", "secrets"),
}


def template(app, image="i:1", **spec):
    containers = [{"name": "c", "image": image, "resources": {"requests": {"cpu": "10m"}}}]
    return {"metadata": {"labels": {"app": app}}, "spec": {"containers": containers, "terminationGracePeriodSeconds": 30} | spec}


def selector(app):
    return {"selector": {"matchLabels": {"app": app}}}


class History:
    """Makes the steps of one seed. A step is a dict with `text`, and either `act` (see kubelet.py) or a request."""

    def __init__(self, seed):
        self.seed, self.scope = seed, f"h{seed}"
        self.random = random.Random(seed)
        self.theme = THEMES[seed % len(THEMES)]
        self.image = 1

    # --- steps ---

    def create(self, kind, name, spec=None, status=None, **more):
        api, resource = RESOURCES[kind]
        body = {"apiVersion": api, "kind": kind, "metadata": {"name": name} | more.pop("metadata", {})} | more
        if spec is not None:
            body["spec"] = spec
        if status is not None:
            body["status"] = status
        return {"text": f"create {kind} {name}", "method": "POST", "resource": resource, "body": body}

    def patch(self, kind, name, body, part=None):
        return {"text": f"patch {kind} {name}: {body}", "method": "PATCH", "resource": RESOURCES[kind][1], "name": name,
                "body": body, "part": part}

    def spec(self, kind, name, **spec):
        return self.patch(kind, name, {"spec": spec})

    def delete(self, kind, name, policy=None):
        policy = policy or self.random.choice(["Foreground", "Background", "Orphan"])
        return {"text": f"delete {kind} {name} ({policy})", "method": "DELETE", "resource": RESOURCES[kind][1], "name": name,
                "body": {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": policy}}

    @staticmethod
    def act(name, **more):
        return {"text": f"{name} {more}", "act": name} | more

    def node(self, name, labels=None):
        name = f"{self.scope}-{name}"
        status = {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]}
        yield self.create("Node", name, {}, status, metadata={"labels": {"history": self.scope} | (labels or {})})
        yield self.act("node", node=name, value="True")

    def pick(self, *choices):
        return self.random.choice(choices)

    def steps(self, length):
        """All steps: the theme's objects, random steps, deletion of the namespace and the nodes."""
        yield self.create("Namespace", self.scope)
        yield from self.node("w0")
        yield from self.node("w1")
        yield from getattr(self, f"{self.theme}_begin")()
        for _ in range(length):
            yield from self.random.choice([self.progress, self.progress, getattr(self, f"{self.theme}_step")])()
        yield from self.settle()
        yield self.delete("Namespace", self.scope, "Background")
        yield self.act("reap")
        for name in ("w0", "w1"):
            yield self.delete("Node", f"{self.scope}-{name}", "Background")

    def settle(self):
        for _ in range(2):
            yield self.act("reap")
            yield self.act("bind")

    def progress(self):
        """Actions of nodes: pods start, become ready, end, are removed."""
        yield self.random.choice([
            lambda: self.act("bind"), lambda: self.act("bind", count=1), lambda: self.act("bind", ready=False, count=1),
            lambda: self.act("reap"), lambda: self.act("ready", value=True), lambda: self.act("bind"),
            lambda: self.act("reap"), lambda: self.act("ready", value=False, count=1, restarts=1),
        ])()

    def pod_trouble(self):
        yield self.random.choice([
            lambda: self.act("delete", count=1), lambda: self.act("delete", count=1, force=True),
            lambda: self.act("end", count=1, code=3), lambda: self.act("end", count=1, code=137, reason="Evicted"),
            lambda: self.act("end", count=1, code=0),
            lambda: self.act("relabel", count=1, labels={"app": "other"}),
        ])()

    def new_image(self):
        self.image += 1
        return f"i:{self.image}"

    # --- deployments ---

    def rolling(self):
        return {"type": "RollingUpdate", "rollingUpdate": self.pick(
            {"maxSurge": 1, "maxUnavailable": 0}, {"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": "50%", "maxUnavailable": "25%"},
            {"maxSurge": 2, "maxUnavailable": 2})}

    def deployment_begin(self):
        strategy = self.pick({"type": "Recreate"}, self.rolling(), self.rolling())
        yield self.create("Deployment", "web", selector("web") | {
            "replicas": self.pick(1, 3, 4), "strategy": strategy, "template": template("web"),
            "revisionHistoryLimit": self.pick(0, 1, 10),
            # With Recreate it depends on the times of the last pods whether upstream notices that the deadline passed.
            "progressDeadlineSeconds": 600 if strategy["type"] == "Recreate" else self.pick(600, 600, 5)})
        yield self.act("bind")

    def deployment_step(self):
        image = self.new_image()
        changes = [
            {"replicas": self.pick(0, 2, 3, 5)}, {"replicas": self.pick(1, 4, 6)},
            {"template": {"spec": {"containers": [{"name": "c", "image": image}]}}},
            {"template": {"spec": {"containers": [{"name": "c", "image": image}]}}, "replicas": self.pick(2, 4)},
            {"template": {"spec": {"containers": [{"name": "c", "image": f"i:{self.random.randint(1, self.image)}"}]}}},
            {"paused": True}, {"paused": None}, {"strategy": self.rolling()}, {"minReadySeconds": self.pick(0, 1)},
            {"revisionHistoryLimit": self.pick(0, 2)},
        ]
        if self.random.random() < 0.2:
            yield from self.pod_trouble()
        else:
            yield self.spec("Deployment", "web", **self.random.choice(changes))
            if self.random.random() < 0.6:
                yield self.act("bind")

    # --- replica sets and replication controllers ---

    def replicaset_begin(self):
        yield self.create("ReplicaSet", "set", selector("set") | {"replicas": self.pick(2, 3), "template": template("set")})
        yield self.create("ReplicationController", "rc", {"replicas": 2, "selector": {"app": "rc"}, "template": template("rc"),
                                                         "minReadySeconds": self.pick(0, 1)})
        yield self.act("bind")

    def replicaset_step(self):
        kind, name = self.pick(("ReplicaSet", "set"), ("ReplicationController", "rc"))
        yield from self.random.choice([
            lambda: [self.spec(kind, name, replicas=self.pick(0, 1, 3, 5))],
            lambda: [self.spec(kind, name, replicas=self.pick(0, 1, 3, 5))],
            self.pod_trouble, self.pod_trouble,
            lambda: [self.create("Pod", f"bare-{self.new_image()[2:]}", template(name)["spec"], metadata={"labels": {"app": name}})],
            lambda: [self.act("relabel", app="other", labels={"app": name})],
            lambda: [self.spec(kind, name, minReadySeconds=self.pick(0, 1))],
            lambda: [self.delete(kind, name), self.act("reap")],
        ])()

    # --- stateful sets ---

    def statefulset_begin(self):
        spec = selector("db") | {
            "replicas": self.pick(2, 3), "serviceName": "db", "template": template("db"),
            "podManagementPolicy": self.pick("OrderedReady", "Parallel"),
            "updateStrategy": self.pick({"type": "OnDelete"}, {"type": "RollingUpdate", "rollingUpdate": {"partition": 1}},
                                        {"type": "RollingUpdate"}),
            "revisionHistoryLimit": self.pick(0, 2, 10), "minReadySeconds": self.pick(0, 0, 1)}
        if self.random.random() < 0.5:
            spec["persistentVolumeClaimRetentionPolicy"] = {"whenDeleted": self.pick("Retain", "Delete"),
                                                            "whenScaled": self.pick("Retain", "Delete")}
            claim = {"accessModes": ["ReadWriteOnce"], "storageClassName": "none", "resources": {"requests": {"storage": "1Mi"}}}
            spec["volumeClaimTemplates"] = [{"metadata": {"name": "data"}, "spec": claim}]
        if self.random.random() < 0.3:
            spec["ordinals"] = {"start": self.pick(1, 2)}
        yield self.create("Service", "db", {"clusterIP": "None", "selector": {"app": "db"}, "ports": [{"port": 80}]})
        yield self.create("StatefulSet", "db", spec)
        for _ in range(2):
            yield self.act("bind")

    def statefulset_step(self):
        image = self.new_image()
        changes = [
            {"replicas": self.pick(0, 1, 2, 4)}, {"replicas": self.pick(1, 3, 4)},
            {"template": {"spec": {"containers": [{"name": "c", "image": image}]}}},
            {"template": {"spec": {"containers": [{"name": "c", "image": image}]}}},
            {"template": {"spec": {"containers": [{"name": "c", "image": f"i:{self.random.randint(1, self.image)}"}]}}},
            {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": self.pick(0, 1, 2)}}},
            {"minReadySeconds": self.pick(0, 1)},
            {"persistentVolumeClaimRetentionPolicy": {"whenDeleted": self.pick("Retain", "Delete"),
                                                      "whenScaled": self.pick("Retain", "Delete")}},
        ]
        chance = self.random.random()
        if chance < 0.25:
            yield from self.pod_trouble()
        elif chance < 0.3:
            yield self.delete("StatefulSet", "db")
        else:
            yield self.spec("StatefulSet", "db", **self.random.choice(changes))
        for _ in range(self.pick(0, 1, 2)):
            yield self.act("reap")
            yield self.act("bind")

    # --- daemon sets ---

    def daemonset_begin(self):
        strategy = self.pick({"type": "OnDelete"}, {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
                             {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                             {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "50%", "maxUnavailable": 0}})
        pod = template("each", nodeSelector={"history": self.scope})
        yield self.create("DaemonSet", "each", selector("each") | {"template": pod, "updateStrategy": strategy,
                                                                   "revisionHistoryLimit": self.pick(1, 10)})
        yield self.act("bind")

    def counted(self, step):
        """Changes the daemon set with a node: upstream counts the nodes of a set only at the set's next event."""
        self.image += 1
        return [step | {"hasty": True}, self.patch("DaemonSet", "each", {"metadata": {"annotations": {"n": str(self.image)}}})]

    def daemonset_step(self):
        image = self.new_image()
        node = f"{self.scope}-w{self.pick(0, 1)}"
        taint = {"key": "k", "value": "v", "effect": self.pick("NoSchedule", "NoExecute")}
        yield from self.random.choice([
            lambda: [self.spec("DaemonSet", "each", template={"spec": {"containers": [{"name": "c", "image": image}]}})],
            lambda: [self.spec("DaemonSet", "each", template={"spec": {"containers": [
                {"name": "c", "image": f"i:{self.random.randint(1, self.image)}"}]}})],
            lambda: self.node(f"w{self.image + 1}"),
            lambda: self.counted(self.patch("Node", node, {"spec": {"taints": [taint]}})),
            lambda: self.counted(self.patch("Node", node, {"spec": {"taints": None}})),
            lambda: self.counted(self.patch("Node", node, {"spec": {"unschedulable": self.pick(True, None)}})),
            lambda: self.counted(self.patch("Node", node, {"metadata": {"labels": {
                "history": self.pick(self.scope, "none")}}})),
            lambda: self.counted(self.act("node", node=node, value=self.pick("False", "True"))),
            lambda: [self.spec("DaemonSet", "each", minReadySeconds=self.pick(0, 1))],
            self.pod_trouble, self.pod_trouble,
            lambda: [self.delete("DaemonSet", "each"), self.act("reap")],
        ])()
        if self.random.random() < 0.5:
            yield self.act("reap")
            yield self.act("bind")

    # --- jobs ---

    def job_begin(self):
        indexed = self.random.random() < 0.6
        # With nine active pods, a suspension deletes more of them than any limit of failures.
        spec = {"parallelism": self.pick(1, 2, 3, 9), "completions": self.pick(1, 3, 4, 9), "backoffLimit": self.pick(0, 1, 6),
                "template": template("task", restartPolicy="Never")}
        if indexed:
            spec |= {"completionMode": "Indexed"}
            if self.random.random() < 0.5:
                spec |= {"backoffLimitPerIndex": self.pick(0, 1), "maxFailedIndexes": self.pick(1, 2)}
                del spec["backoffLimit"]
            if self.random.random() < 0.4:
                spec["successPolicy"] = {"rules": [self.pick({"succeededCount": 2} if spec["completions"] > 1 else
                                                             {"succeededCount": 1}, {"succeededIndexes": "0"})]}
        elif self.random.random() < 0.3:
            del spec["completions"]
        if self.random.random() < 0.5:
            spec["podFailurePolicy"] = {"rules": self.random.sample([
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [3]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Count", "onExitCodes": {"operator": "NotIn", "values": [7]}}], 2)}
        spec |= self.pick({}, {}, {"suspend": True}, {"podReplacementPolicy": "Failed"},
                          {"ttlSecondsAfterFinished": 2})
        yield self.create("Job", "task", spec)
        yield self.act("bind")

    def job_step(self):
        yield from self.random.choice([
            lambda: [self.act("end", app="task", count=1, code=0), self.act("bind")],
            lambda: [self.act("end", app="task", count=2, code=0)],
            lambda: [self.act("end", app="task", count=1, code=self.pick(3, 7))],
            lambda: [self.act("end", app="task", count=1, code=137, target="DisruptionTarget")],
            lambda: [self.act("delete", app="task", count=1)],
            lambda: [self.spec("Job", "task", suspend=self.pick(True, False))],
            lambda: [self.spec("Job", "task", parallelism=self.pick(0, 1, 2, 4))],
            lambda: [self.spec("Job", "task", completions=self.pick(2, 3), parallelism=self.pick(2, 3))],
            lambda: [self.spec("Job", "task", activeDeadlineSeconds=4)],
            lambda: [self.spec("Job", "task", ttlSecondsAfterFinished=1)],
            lambda: [self.act("bind"), self.act("end", app="task", code=0)],
            lambda: [self.delete("Job", "task"), self.act("reap")],
        ])()

    # --- cron jobs: two months were missed ---

    def cronjob_begin(self):
        spec = {"schedule": "0 0 1 * *", "timeZone": self.pick(None, "Etc/UTC"), "suspend": True,
                "concurrencyPolicy": self.pick("Allow", "Forbid", "Replace"), "successfulJobsHistoryLimit": self.pick(0, 1),
                "failedJobsHistoryLimit": self.pick(0, 1),
                "jobTemplate": {"metadata": {"labels": {"cron": "tick"}},
                                "spec": {"backoffLimit": 0, "template": template("tick", restartPolicy="Never")}}}
        yield self.create("CronJob", "tick", {name: value for name, value in spec.items() if value is not None})

    def cronjob_step(self):
        past = self.pick("2026-09-15T00:00:00Z", "2026-10-15T00:00:00Z", "2026-06-15T00:00:00Z")
        yield from self.random.choice([
            lambda: [self.patch("CronJob", "tick", {"status": {"lastScheduleTime": past}}, "status"),
                     self.spec("CronJob", "tick", suspend=False)],
            lambda: [self.patch("CronJob", "tick", {"status": {"lastScheduleTime": past}}, "status")],
            lambda: [self.spec("CronJob", "tick", suspend=self.pick(True, False))],
            lambda: [self.spec("CronJob", "tick", schedule=self.pick("0 0 1 * *", "0 0 15 * *"))],
            lambda: [self.spec("CronJob", "tick", startingDeadlineSeconds=self.pick(100, 10000000, None))],
            lambda: [self.spec("CronJob", "tick", concurrencyPolicy=self.pick("Allow", "Forbid", "Replace"))],
            lambda: [self.act("bind"), self.act("end", app="tick", code=self.pick(0, 1))],
            lambda: [self.delete("CronJob", "tick"), self.act("reap")],
        ])()

    # --- disruption budgets ---

    def disruption_begin(self):
        yield self.create("Deployment", "web", selector("web") | {"replicas": 4, "template": template("web")})
        yield self.create("PodDisruptionBudget", "pdb", selector("web") | self.pick(
            {"minAvailable": 2}, {"maxUnavailable": 1}, {"minAvailable": "50%"}, {"maxUnavailable": "30%"}))
        yield self.act("bind")

    def disruption_step(self):
        yield from self.random.choice([
            lambda: [self.act("evict", count=1)], lambda: [self.act("evict", count=2), self.act("reap")],
            lambda: [self.patch("PodDisruptionBudget", "pdb", {"spec": self.pick(
                {"minAvailable": 3, "maxUnavailable": None}, {"maxUnavailable": 2, "minAvailable": None},
                {"minAvailable": "75%", "maxUnavailable": None}, {"unhealthyPodEvictionPolicy": "AlwaysAllow"},
                {"selector": {"matchLabels": {"app": "other"}}})})],
            lambda: [self.create("PodDisruptionBudget", "second", selector("web") | {"minAvailable": 1})],
            lambda: [self.spec("Deployment", "web", replicas=self.pick(2, 4, 5))],
            lambda: [self.create("Pod", "bare", template("web")["spec"], metadata={"labels": {"app": "web"}})],
            self.pod_trouble,
        ])()

    # --- services ---

    def service_begin(self):
        yield self.create("Deployment", "web", selector("web") | {"replicas": 3, "template": template("web")})
        ports = [{"name": "a", "port": 80, "targetPort": self.pick(80, "http")}, {"name": "b", "port": 81, "protocol": "UDP"}]
        yield self.create("Service", "web", {"selector": {"app": "web"}, "ports": ports[:self.pick(1, 2)],
                                             "publishNotReadyAddresses": self.pick(True, False)})
        yield self.create("Service", "bare", {"ports": [{"port": 80}]})
        yield self.act("bind", count=2)

    def service_step(self):
        ports = [{"name": "http", "containerPort": 8080}]
        subsets = [{"addresses": [{"ip": "192.0.2.3"}, {"ip": "192.0.2.4"}], "ports": [{"port": 80}]}]
        yield from self.random.choice([
            lambda: [self.spec("Service", "web", selector=self.pick({"app": "web"}, {"app": "none"}))],
            lambda: [self.spec("Service", "web", publishNotReadyAddresses=self.pick(True, False))],
            lambda: [self.spec("Service", "web", ports=[{"port": self.pick(80, 8080)}])],
            lambda: [self.spec("Service", "web", type=self.pick("ClusterIP", "NodePort"))],
            lambda: [self.spec("Deployment", "web", replicas=self.pick(0, 2, 4), template={"spec": {"containers": [
                {"name": "c", "image": "i:1", "ports": ports}]}}), self.act("bind")],
            lambda: [self.create("Endpoints", "bare", subsets=subsets)],
            lambda: [self.patch("Endpoints", "bare", {"subsets": self.pick(subsets, None)})],
            lambda: [self.delete("Endpoints", "bare", "Background")],
            lambda: [self.patch("Service", "web", {"metadata": {"labels": {"l": self.pick("1", None)}}})],
            lambda: [self.delete("Service", self.pick("web", "bare"), "Background")],
            self.pod_trouble, self.pod_trouble,
        ])()

    # --- owner references ---

    def garbage_begin(self):
        yield from self.deployment_begin()
        yield self.create("Job", "task", {"completions": 2, "parallelism": 2, "template": template("task", restartPolicy="Never")})
        yield self.create("StatefulSet", "db", selector("db") | {"replicas": 2, "serviceName": "db", "template": template("db")})
        yield self.act("bind")

    def garbage_step(self):
        kind, name, app = self.pick(("Deployment", "web", "web"), ("Job", "task", "task"), ("StatefulSet", "db", "db"))
        yield self.delete(kind, name)
        yield self.act("reap")
        if self.random.random() < 0.5:
            extra = {"serviceName": app} if kind == "StatefulSet" else {}
            yield (self.create("Job", "task", {"template": template("task", restartPolicy="Never")}) if kind == "Job" else
                   self.create(kind, name, selector(app) | {"replicas": 2, "template": template(app)} | extra))

    # --- claims and volumes ---

    def storage_begin(self):
        yield self.volume("a", "1Gi")
        yield self.create("PersistentVolumeClaim", "a", self.claim())
        yield self.create("Pod", "user", template("user", volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "a"}}])
                          ["spec"], metadata={"labels": {"app": "user"}})
        yield self.act("bind")

    def volume(self, name, size, storage_class=None):
        return self.create("PersistentVolume", f"{self.scope}-{name}", {
            "capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"], "storageClassName": storage_class or self.scope,
            "persistentVolumeReclaimPolicy": "Retain", "hostPath": {"path": "/tmp/none"}})

    def claim(self, **more):
        return {"accessModes": ["ReadWriteOnce"], "storageClassName": self.scope, "resources": {"requests": {
            "storage": self.pick("1Gi", "1Mi")}}} | more

    def storage_step(self):
        yield from self.random.choice([
            lambda: [self.create("PersistentVolumeClaim", "b", self.claim())],
            lambda: [self.volume("b", self.pick("1Gi", "1Mi"))],
            lambda: [self.volume("c", self.pick("1Gi", "1Mi"), "other")],
            lambda: [self.create("PersistentVolumeClaim", "c", self.claim(volumeName=f"{self.scope}-c", storageClassName="other"))],
            lambda: [self.delete("PersistentVolumeClaim", self.pick("a", "b"), "Background")],
            lambda: [self.delete("PersistentVolume", f"{self.scope}-{self.pick('a', 'b')}", "Background")],
            lambda: [self.act("end", app="user", count=1, code=0)],
            lambda: [self.delete("Pod", "user", "Background"), self.act("reap")],
            lambda: [self.patch("PersistentVolume", f"{self.scope}-a", {"spec": {"claimRef": None}})],
        ])()

    # --- quotas, autoscalers, service accounts ---

    def policy_begin(self):
        yield self.create("Deployment", "web", selector("web") | {"replicas": 2, "template": template("web")})
        yield self.create("ResourceQuota", "all", {"hard": {"pods": "5", "requests.cpu": "1", "count/deployments.apps": "2",
                                                            "services": "1", "configmaps": "9"}})
        yield self.act("bind")

    def policy_step(self):
        yield from self.random.choice([
            lambda: [self.spec("Deployment", "web", replicas=self.pick(1, 3, 7))],
            lambda: [self.patch("ResourceQuota", "all", {"spec": {"hard": {"pods": self.pick("2", "8")}}})],
            lambda: [self.delete("ServiceAccount", "default", "Background")],
            lambda: [self.delete("ConfigMap", "kube-root-ca.crt", "Background")],
            lambda: [self.create("ServiceAccount", "robot"), self.create("Secret", "token", None, metadata={"annotations": {
                "kubernetes.io/service-account.name": "robot"}}, type="kubernetes.io/service-account-token")],
            lambda: [self.delete("ServiceAccount", "robot", "Background")],
            lambda: [self.create("HorizontalPodAutoscaler", "hpa", {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": self.pick("web", "none")},
                "minReplicas": self.pick(1, 3), "maxReplicas": 4,
                "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization",
                                                                                      "averageUtilization": 50}}}]})],
            lambda: [self.delete("Deployment", "web")],
            self.pod_trouble,
        ])()

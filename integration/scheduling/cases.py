"""Random clusters for the differential test of the scheduler. A seed determines a case."""

import random

from extras import Extras

NAMESPACES = ["red", "green", "blue"]
APPS = ["web", "db", "queue", "batch"]
ZONES = ["z1", "z2", "z3", "z4"]
HOSTNAME, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
REGION = "topology.kubernetes.io/region"
KEYS = [HOSTNAME, ZONE, ZONE, "rack"]
MIB = 1 << 20
IMAGES = [(f"registry.example/app{number}:{tag}", size * MIB)
          for number, (tag, size) in enumerate([("1", 10), ("latest", 50), ("v2", 300), ("3", 900), ("4", 2500)])]


class Generator:
    """Makes one case."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        large = seed % 25 == 24
        self.node_count = self.random.randint(100, 200) if large else self.random.randint(1, 24)
        self.pod_count = self.random.randint(400, 1000) if large else self.random.randint(0, 6 * self.node_count)
        self.pending_count = 40 if large else self.random.randint(4, 16)
        # Each case uses only some kinds of constraints, so that pods stay schedulable.
        features = ["affinity", "anti", "preferred", "spread", "soft", "taints", "ports", "selector", "node-affinity",
                    "volumes", "priority", "init", "overhead", "pod-level", "extended", "services", "full", "terminating",
                    "cordoned", "names", "nominated", "sparse"]
        self.features = {one for one in features if self.random.random() < 0.35}
        self.claims, self.others = [], []
        # A separate generator, so that the other parts of a case are the same as in earlier versions.
        self.declaring = random.Random(f"declared features {seed}")
        self.declares = self.declaring.random() < 0.2
        self.extras = Extras(seed, with_devices="volumes" not in self.features)
        self.kinds = self.extras.kinds

    def has(self, feature, chance=0.5):
        return feature in self.features and self.random.random() < chance

    def pick(self, options):
        return self.random.choice(options)

    def case(self):
        self.nodes = [self.node(number) for number in range(self.node_count)]
        self.names = [node["metadata"]["name"] for node in self.nodes]
        self.others += [self.namespace(name) for name in NAMESPACES]
        self.workloads()
        self.storage()
        pods, used, ports = [], set(), {}
        exclusive = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in self.others
                     if one["kind"] == "PersistentVolumeClaim" and "ReadWriteOncePod" in one["spec"]["accessModes"]}
        for number in range(self.pod_count):
            pod = self.pod(f"old{number}")
            # A claim of this mode has at most one user.
            claims = {(pod["metadata"]["namespace"], one["persistentVolumeClaim"]["claimName"])
                      for one in pod["spec"].get("volumes", [])} & exclusive
            if claims & used:
                del pod["spec"]["volumes"]
            used |= claims
            node = pod["spec"]["nodeName"] = self.pick(self.names)
            # A host port has at most one user.
            own = {port["hostPort"] for one in pod["spec"]["containers"] for port in one.get("ports", []) if "hostPort" in port}
            if own & ports.setdefault(node, set()):
                pod["spec"].pop("hostNetwork", None)
                for one in pod["spec"]["containers"]:
                    one.pop("ports", None)
            ports[node] |= own
            start = self.random.randint(0, 59)
            pod["status"] = {"phase": "Running", "startTime": f"2026-01-01T00:{start:02}:00Z"}
            # Not with spread constraints: during preemption, upstream subtracts terminating pods that it has not counted.
            if "spread" not in self.features and self.has("terminating", 0.2):
                pod["metadata"]["deletionTimestamp"] = "2026-01-01T02:00:00Z"
                pod["metadata"]["deletionGracePeriodSeconds"] = 30
            pods.append(pod)
        pending = [self.pod(f"new{number}") for number in range(self.pending_count)]
        for pod in pending:
            if self.has("nominated", 0.3):
                pod["status"] = {"nominatedNodeName": self.pick(self.names)}
        self.budgets()
        self.others += self.extras.apply(self.names, pods, pending)
        return {"nodes": self.nodes, "pods": pods, "pending": pending, "others": self.others, "config": self.extras.config()}

    def meta(self, name, namespace=None, labels=None):
        meta = {"name": name, "uid": f"uid-{namespace or ''}-{name}", "creationTimestamp": "2026-01-01T00:00:00Z"}
        if namespace:
            meta["namespace"] = namespace
        if labels:
            meta["labels"] = labels
        return meta

    def namespace(self, name):
        labels = {"kubernetes.io/metadata.name": name, "team": self.pick(["x", "y"])}
        return {"apiVersion": "v1", "kind": "Namespace", "metadata": self.meta(name, labels=labels)}

    def node(self, number):
        name = f"n{number:03}"
        labels = {HOSTNAME: name, "disk": self.pick(["ssd", "hdd"]), "cores": str(self.pick([2, 8, 64]))}
        if not self.has("sparse", 0.3):
            labels[ZONE] = self.pick(ZONES)
            labels[REGION] = "r1" if labels[ZONE] in ("z1", "z2") else "r2"
        if not self.has("sparse", 0.3):
            labels["rack"] = f"rack{self.random.randint(1, 5)}"
        small = "full" in self.features
        has = {"cpu": self.pick(["1", "2", "3500m"] if small else ["4", "8", "16", "64"]),
               "memory": self.pick(["1Gi", "3000Mi"] if small else ["8Gi", "31Gi", "128Gi"]),
               "ephemeral-storage": self.pick(["10Gi", "100Gi"]), "pods": self.pick(["4", "8", "110"] if small else ["40", "110"])}
        if self.has("extended"):
            has["example.com/gpu"] = str(self.random.randint(0, 4))
        if self.has("extended"):
            has["hugepages-2Mi"] = self.pick(["0", "64Mi"])
        taints = []
        for key in ["dedicated", "maintenance"]:
            if self.has("taints", 0.4):
                effect = self.pick(["NoSchedule", "PreferNoSchedule", "PreferNoSchedule", "NoExecute"])
                taints.append({"key": key, "value": self.pick(["a", "b", ""]), "effect": effect})
        spec = {}
        if taints:
            spec["taints"] = taints
        if self.has("cordoned", 0.3):
            spec["unschedulable"] = True
            spec.setdefault("taints", []).append({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"})
        images = [{"names": [image], "sizeBytes": size} for image, size in IMAGES if self.random.random() < 0.3]
        return {"apiVersion": "v1", "kind": "Node", "metadata": self.meta(name, labels=labels), "spec": spec,
                "status": {"allocatable": has, "capacity": has, "images": images, **self.declared()}}

    def declared(self):
        if not self.declares or self.declaring.random() < 0.4:
            return {}
        return {"declaredFeatures": self.declaring.choice([["RestartAllContainersOnContainerExits"], ["Another"]])}

    def workloads(self):
        for namespace in NAMESPACES:
            for app in APPS:
                selector = {"matchLabels": {"app": app}}
                if self.random.random() < 0.3:
                    selector = {"matchExpressions": [{"key": "app", "operator": "In", "values": [app, "other"]}]}
                for version, kind in [("apps/v1", "ReplicaSet"), ("apps/v1", "StatefulSet"), ("v1", "ReplicationController")]:
                    plain = kind == "ReplicationController"
                    spec = {"selector": {"app": app} if plain else selector,
                            "template": {"metadata": {"labels": {"app": app}}, "spec": {"containers": []}}}
                    self.others.append({"apiVersion": version, "kind": kind, "metadata": self.meta(app, namespace), "spec": spec})
                if self.has("services"):
                    spec = {"selector": {"app": app}, "ports": [{"port": 80}]}
                    self.others.append({"apiVersion": "v1", "kind": "Service", "metadata": self.meta(app, namespace), "spec": spec})
            self.others.append({"apiVersion": "v1", "kind": "Service", "metadata": self.meta("none", namespace), "spec": {"ports": [{"port": 80}]}})

    def budgets(self):
        for namespace in NAMESPACES:
            if self.has("priority", 0.6):
                self.others.append({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": self.meta("budget", namespace),
                                    "spec": {"selector": {"matchLabels": {"app": self.pick(APPS)}}},
                                    "status": {"disruptionsAllowed": self.random.randint(0, 2), "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1}})

    def storage(self):
        if "volumes" not in self.features:
            return
        add = self.others.append
        for name, provisioner, mode in [("wait", "csi.example.com", "WaitForFirstConsumer"),
                                        ("static", "kubernetes.io/no-provisioner", "WaitForFirstConsumer"),
                                        ("zonal", "zonal.example.com", "WaitForFirstConsumer"),
                                        ("now", "csi.example.com", "Immediate")]:
            one = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": self.meta(name),
                   "provisioner": provisioner, "volumeBindingMode": mode}
            if name == "zonal":
                one["allowedTopologies"] = [{"matchLabelExpressions": [{"key": ZONE, "values": ["z1", "z2"]}]}]
            add(one)
        add({"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": self.meta("csi.example.com"),
             "spec": {"storageCapacity": self.random.random() < 0.6}})
        for number, zone in enumerate(ZONES):
            if self.random.random() < 0.7:
                one = {"apiVersion": "storage.k8s.io/v1", "kind": "CSIStorageCapacity", "metadata": self.meta(f"c{number}", "red"),
                       "storageClassName": "wait", "nodeTopology": {"matchLabels": {ZONE: zone}}, "capacity": self.pick(["1Gi", "6Gi", "1Ti"])}
                if self.random.random() < 0.3:
                    one["maximumVolumeSize"] = "3Gi"
                add(one)
        for node in self.names:
            if self.random.random() < 0.7:
                driver = {"name": "csi.example.com", "nodeID": node}
                if self.random.random() < 0.8:
                    driver["allocatable"] = {"count": self.random.randint(1, 4)}
                add({"apiVersion": "storage.k8s.io/v1", "kind": "CSINode", "metadata": self.meta(node), "spec": {"drivers": [driver]}})
        for number in range(self.random.randint(2, 20)):
            self.volume(number)
        for namespace in NAMESPACES:
            for number in range(self.random.randint(2, 8)):
                self.claim(namespace, number)

    def volume(self, number):
        source = self.pick([{"csi": {"driver": "csi.example.com", "volumeHandle": f"h{number}"}}, {"local": {"path": "/data"}}])
        spec = {"capacity": {"storage": self.pick(["1Gi", "2Gi", "5Gi", "10Gi"])}, "accessModes": self.pick([["ReadWriteOnce"], ["ReadWriteOnce", "ReadWriteMany"]]),
                "storageClassName": self.pick(["static", "static", "wait"]), "persistentVolumeReclaimPolicy": "Retain", "volumeMode": "Filesystem", **source}
        labels = {}
        if "local" in source or self.random.random() < 0.4:
            key = self.pick([HOSTNAME, ZONE])
            values = [self.pick(self.names)] if key == HOSTNAME else self.random.sample(ZONES, 2)
            spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": key, "operator": "In", "values": values}]}]}}
        elif self.random.random() < 0.4:
            labels[self.pick([ZONE, "failure-domain.beta.kubernetes.io/zone"])] = self.pick(["z1", "z2__z3"])
        if self.random.random() < 0.5:
            labels["tier"] = self.pick(["gold", "silver"])
        self.others.append({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": self.meta(f"pv{number}", labels=labels),
                            "spec": spec, "status": {"phase": "Available"}})

    def claim(self, namespace, number):
        # The name is unique: during preemption, upstream ignores the namespace of the users of a ReadWriteOncePod claim.
        name = f"{namespace}-claim{number}"
        modes = self.pick([["ReadWriteOnce"], ["ReadWriteMany"], ["ReadWriteOncePod"]])
        spec = {"accessModes": modes, "resources": {"requests": {"storage": self.pick(["1Gi", "2Gi", "4Gi"])}},
                "storageClassName": self.pick(["wait", "static", "zonal", "now"]), "volumeMode": "Filesystem"}
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": self.meta(name, namespace), "spec": spec, "status": {"phase": "Pending"}}
        free = [one for one in self.others if one["kind"] == "PersistentVolume" and "claimRef" not in one["spec"]]
        kind = self.random.random()
        reference = {"kind": "PersistentVolumeClaim", "namespace": namespace, "name": name, "uid": claim["metadata"]["uid"]}
        if free and kind < 0.45:
            volume = self.pick(free)
            spec["volumeName"], spec["storageClassName"] = volume["metadata"]["name"], volume["spec"]["storageClassName"]
            claim["metadata"]["annotations"] = {"pv.kubernetes.io/bind-completed": "yes"}
            claim["status"]["phase"] = volume["status"]["phase"] = "Bound"
            volume["spec"]["claimRef"] = reference
        elif free and kind < 0.55:
            volume = self.pick(free)
            volume["spec"]["claimRef"] = reference
        elif kind < 0.6:
            spec["volumeName"] = "missing"
            claim["metadata"]["annotations"] = {"pv.kubernetes.io/bind-completed": "yes"}
            claim["status"]["phase"] = self.pick(["Bound", "Lost"])
        elif kind < 0.65 and spec["storageClassName"] == "wait":
            claim["metadata"]["annotations"] = {"volume.kubernetes.io/selected-node": self.pick(self.names)}
        elif kind < 0.75:
            spec["selector"] = {"matchLabels": {"tier": "gold"}}
        self.others.append(claim)

    def requests(self):
        requests = {}
        if self.random.random() < 0.7:
            requests["cpu"] = self.pick(["0", "50m", "100m", "333m", "1", "1500m"])
        if self.random.random() < 0.7:
            requests["memory"] = self.pick(["0", "64Mi", "100M", "500Mi", "1Gi"])
        if self.random.random() < 0.1:
            requests["ephemeral-storage"] = self.pick(["1Gi", "20Gi"])
        if self.has("extended", 0.15):
            requests["example.com/gpu"] = "1"
        if self.has("extended", 0.1):
            requests["hugepages-2Mi"] = "4Mi"
        return requests

    def container(self, name, host_network=False):
        requests = self.requests()
        one = {"name": name, "image": self.pick([image for image, _ in IMAGES] + ["registry.example/app1", "other"])}
        if requests:
            limits = {key: value for key, value in requests.items() if "/" in key or key.startswith("huge")}
            one["resources"] = {"requests": requests, **({"limits": limits} if limits else {})}
        if host_network or self.has("ports", 0.4):
            port = {"containerPort": self.pick([80, 443, 8080, 9090]), "protocol": self.pick(["TCP", "TCP", "UDP"])}
            if host_network:
                port["hostPort"] = port["containerPort"]
            elif self.random.random() < 0.7:
                port["hostPort"] = self.pick([80, 443])
                if self.random.random() < 0.4:
                    port["hostIP"] = self.pick(["10.0.0.1", "10.0.0.2", "0.0.0.0"])
            one["ports"] = [port]
        if self.declares and self.declaring.random() < 0.2:
            action = self.declaring.choice(["Restart", "RestartAllContainers", "RestartAllContainers"])
            one["restartPolicyRules"] = [{"action": action, "exitCodes": {"operator": "In", "values": [1]}}]
        return one

    def expression(self):
        key = self.pick(["disk", "cores", ZONE, "absent", "rack"])
        operator = self.pick(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"])
        if operator in ("Gt", "Lt"):
            return {"key": "cores", "operator": operator, "values": [str(self.pick([1, 8, 32]))]}
        if operator in ("Exists", "DoesNotExist"):
            return {"key": key, "operator": operator}
        values = {"disk": ["ssd"], "cores": ["8", "64"], ZONE: self.random.sample(ZONES, 2), "absent": ["a"], "rack": ["rack1", "rack2"]}[key]
        return {"key": key, "operator": operator, "values": values}

    def node_affinity(self):
        found = {}
        if self.random.random() < 0.6:
            terms = []
            for _ in range(self.random.randint(1, 2)):
                term = {"matchExpressions": [self.expression() for _ in range(self.random.randint(1, 2))]}
                if self.has("names", 0.7):
                    term["matchFields"] = [{"key": "metadata.name", "operator": self.pick(["In", "In", "NotIn"]), "values": [self.pick(self.names)]}]
                    if self.random.random() < 0.6:
                        del term["matchExpressions"]
                terms.append(term)
            found["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
        if self.random.random() < 0.6:
            found["preferredDuringSchedulingIgnoredDuringExecution"] = [
                {"weight": self.random.randint(1, 100), "preference": {"matchExpressions": [self.expression()]}} for _ in range(self.random.randint(1, 3))]
        return found

    def pod_term(self):
        selector = self.pick([{"matchLabels": {"app": self.pick(APPS)}}, {"matchLabels": {"app": self.pick(APPS)}},
                              {"matchExpressions": [{"key": "tier", "operator": self.pick(["Exists", "DoesNotExist"])}]}, {}])
        term = {"labelSelector": selector, "topologyKey": self.pick(KEYS)}
        kind = self.random.random()
        if kind < 0.15:
            term["namespaces"] = self.random.sample(NAMESPACES, 2)
        elif kind < 0.3:
            term["namespaceSelector"] = self.pick([{}, {"matchLabels": {"team": "x"}}])
        elif kind < 0.35:
            del term["labelSelector"]
        return term

    def affinity(self):
        found = {}
        required, preferred = "requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution"
        weighted = lambda: [{"weight": self.random.randint(1, 100), "podAffinityTerm": self.pod_term()} for _ in range(self.random.randint(1, 2))]
        if self.has("node-affinity"):
            found["nodeAffinity"] = self.node_affinity()
        if self.has("affinity", 0.25):
            found.setdefault("podAffinity", {})[required] = [self.pod_term()]
        if self.has("anti", 0.12):
            found.setdefault("podAntiAffinity", {})[required] = [self.pod_term() for _ in range(self.random.randint(1, 2))]
        if self.has("preferred", 0.4):
            found.setdefault("podAffinity", {})[preferred] = weighted()
        if self.has("preferred", 0.4):
            found.setdefault("podAntiAffinity", {})[preferred] = weighted()
        return found

    def spread(self, app):
        found = []
        for way, feature in [("DoNotSchedule", "spread"), ("ScheduleAnyway", "soft")]:
            for key in self.random.sample([HOSTNAME, ZONE, "rack"], 2):
                if not self.has(feature, 0.4):
                    continue
                one = {"maxSkew": self.random.randint(1, 3), "topologyKey": key, "whenUnsatisfiable": way,
                       "labelSelector": self.pick([{"matchLabels": {"app": app}}] * 4 + [{"matchLabels": {"app": self.pick(APPS)}}])}
                # An empty selector counts no pod, but upstream counts nominated and preempted pods.
                if not {"nominated", "priority"} & self.features and self.random.random() < 0.15:
                    one["labelSelector"] = {}
                if self.random.random() < 0.1:
                    del one["labelSelector"]
                elif self.random.random() < 0.2:
                    one["matchLabelKeys"] = ["version"]
                if way == "DoNotSchedule" and self.random.random() < 0.3:
                    one["minDomains"] = self.random.randint(1, 5)
                if self.random.random() < 0.3:
                    one["nodeAffinityPolicy"] = self.pick(["Honor", "Ignore"])
                if self.random.random() < 0.3:
                    one["nodeTaintsPolicy"] = self.pick(["Honor", "Ignore"])
                found.append(one)
        return found

    def tolerations(self):
        found = []
        for key in ["dedicated", "maintenance", "node.kubernetes.io/unschedulable", None]:
            if self.random.random() < 0.25:
                one = {"operator": "Exists"} if key is None or self.random.random() < 0.5 else {"operator": "Equal", "value": self.pick(["a", "b"])}
                if key:
                    one["key"] = key
                if self.random.random() < 0.5:
                    one["effect"] = self.pick(["NoSchedule", "PreferNoSchedule", "NoExecute"])
                found.append(one)
        return found

    def pod(self, name):
        app, namespace = self.pick(APPS), self.pick(NAMESPACES)
        labels = {"app": app}
        for key, values in [("tier", ["front", "back"]), ("version", ["1", "2"])]:
            if self.random.random() < 0.5:
                labels[key] = self.pick(values)
        meta = self.meta(name, namespace, labels)
        owner = self.random.random()
        if owner < 0.5:
            version, kind = self.pick([("apps/v1", "ReplicaSet"), ("apps/v1", "StatefulSet"), ("v1", "ReplicationController"), ("batch/v1", "Job")])
            meta["ownerReferences"] = [{"apiVersion": version, "kind": kind, "name": app, "uid": f"uid-{app}", "controller": True}]
        spec = {"schedulerName": "default-scheduler", "restartPolicy": "Always"}
        host_network = self.has("ports", 0.2)
        if host_network:
            spec["hostNetwork"] = True
        spec["containers"] = [self.container(f"c{number}", host_network) for number in range(self.random.randint(1, 2))]
        if self.has("init"):
            spec["initContainers"] = [self.container(f"i{number}") for number in range(self.random.randint(1, 3))]
            for one in spec["initContainers"]:
                one.pop("ports", None)
                if self.random.random() < 0.4:
                    one["restartPolicy"] = "Always"
        if self.has("overhead", 0.3):
            spec["overhead"] = {"cpu": "250m", "memory": "120Mi"}
        if self.has("pod-level", 0.4):
            spec["resources"] = {"requests": {key: value for key, value in [("cpu", "3"), ("memory", "2Gi")] if self.random.random() < 0.8}}
        if self.has("priority", 0.8):
            spec["priority"] = self.pick([-10, 0, 5, 1000])
            spec["preemptionPolicy"] = self.pick(["PreemptLowerPriority"] * 4 + ["Never"])
        if self.has("selector", 0.4):
            spec["nodeSelector"] = self.pick([{"disk": "ssd"}, {"disk": "hdd", ZONE: "z1"}, {"absent": "x"}])
        affinity = self.affinity()
        if affinity:
            spec["affinity"] = affinity
        if "taints" in self.features or "cordoned" in self.features:
            spec["tolerations"] = self.tolerations()
        spread = self.spread(app)
        if spread:
            spec["topologySpreadConstraints"] = spread
        if self.has("volumes", 0.5):
            volumes = [{"name": f"v{number}", "persistentVolumeClaim": {"claimName": f"{namespace}-claim{number}"}}
                       for number in sorted(set(self.random.sample([0, 0, 1, 1, 2, 3, 8], self.random.randint(1, 2))))]
            spec["volumes"] = volumes
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": {}}

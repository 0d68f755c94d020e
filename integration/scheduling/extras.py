"""Parts of the random clusters that have a random generator of their own, so that the other parts of a case stay the same as
in earlier versions: a configuration, scheduling gates, disks, and claims of devices."""

import random

DRIVER = "gpu.example.com"
SELECTED = 'device.attributes["gpu.example.com"].model == "b"'
PLUGINS = ["NodeUnschedulable", "TaintToleration", "NodePorts", "ImageLocality", "PodTopologySpread", "InterPodAffinity"]
SCORES = ["TaintToleration", "NodeAffinity", "PodTopologySpread", "InterPodAffinity", "NodeResourcesFit",
          "NodeResourcesBalancedAllocation", "ImageLocality"]


def selectors(expression):
    return [{"cel": {"expression": expression}}]


class Extras:
    """Makes these parts of one case."""

    def __init__(self, seed, with_devices):
        self.random = random.Random(f"extras {seed}")
        chances = [("configuration", 0.3), ("gates", 0.1), ("disks", 0.15), ("devices", 0.25)]
        self.kinds = {kind for kind, chance in chances if self.random.random() < chance}
        # The program of kube-scheduler's side reserves volumes only for pods with claims of devices.
        if not with_devices:
            self.kinds.discard("devices")

    def pick(self, options):
        return self.random.choice(options)

    def chance(self, chance):
        return self.random.random() < chance

    def apply(self, nodes, pods, pending):
        """Changes the pods. Returns further objects."""
        if "gates" in self.kinds:
            for pod in pending:
                if self.chance(0.3):
                    pod["spec"]["schedulingGates"] = [{"name": f"example.com/{name}"} for name in ["a", "b"][:self.random.randint(1, 2)]]
                    pod["status"] = {}
        if "disks" in self.kinds:
            for pod in pods + pending:
                if self.chance(0.3):
                    pod["spec"].setdefault("volumes", []).append({"name": "disk", **self.disk()})
        return self.devices(nodes, pods, pending) if "devices" in self.kinds else []

    def disk(self):
        name, read_only = f"disk{self.random.randint(0, 3)}", self.chance(0.5)
        return self.pick([
            {"gcePersistentDisk": {"pdName": name, "readOnly": read_only}},
            {"awsElasticBlockStore": {"volumeID": name, "readOnly": read_only}},
            {"iscsi": {"targetPortal": "10.0.0.9:3260", "iqn": f"iqn.2026-01.example:{name}", "lun": 0, "readOnly": read_only}},
            {"rbd": {"monitors": self.random.sample(["m1", "m2", "m3"], 2), "pool": self.pick(["p", "q"]), "image": name, "readOnly": read_only}},
        ])

    # Devices

    def devices(self, nodes, pods, pending):
        found = [self.device_class("gpu", f'device.driver == "{DRIVER}"'), self.device_class("large", SELECTED)]
        free = {}
        for node in nodes:
            if self.chance(0.7):
                found.append(self.slice(node, self.random.randint(1, 4)))
                free[node] = [device["name"] for device in found[-1]["spec"]["devices"]]
        number = 0
        for pod in pods:
            devices = free.get(pod["spec"]["nodeName"])
            if devices and self.chance(0.15):
                claim = self.claim(f"used{number}", pod["metadata"]["namespace"], [self.exactly(None)])
                claim["status"] = self.allocation(pod, devices.pop())
                self.use(pod, claim)
                found.append(claim)
                number += 1
        for pod in pending:
            namespace = pod["metadata"]["namespace"]
            known = [one for one in found if one["kind"] == "ResourceClaim" and one["metadata"]["namespace"] == namespace]
            if self.chance(0.5):
                # Most pods have a claim of their own. Some use the claim of another pod, or a claim that does not exist.
                if known and self.chance(0.15):
                    self.use(pod, self.pick(known))
                else:
                    claim = self.claim(f"new{number}", namespace, self.requests())
                    self.use(pod, claim)
                    number += 1
                    if not self.chance(0.05):
                        found.append(claim)
        return found

    def device_class(self, name, expression):
        return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": self.meta(name), "spec": {"selectors": selectors(expression)}}

    def meta(self, name, namespace=None):
        meta = {"name": name, "uid": f"uid-device-{namespace or ''}-{name}", "creationTimestamp": "2026-01-01T00:00:00Z"}
        return {**meta, "namespace": namespace} if namespace else meta

    def slice(self, node, count):
        devices = [{"name": f"d{number}", "attributes": {"model": {"string": self.pick(["a", "b"])}, "index": {"int": number}}} for number in range(count)]
        spec = {"driver": DRIVER, "nodeName": node, "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}, "devices": devices}
        return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": self.meta(f"slice-{node}"), "spec": spec}

    def claim(self, name, namespace, requests):
        devices = {"requests": requests}
        if self.chance(0.2):
            devices["constraints"] = [{"requests": [], "matchAttribute": f"{DRIVER}/model"}]
        return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": self.meta(name, namespace), "spec": {"devices": devices}}

    def exactly(self, selected):
        exactly = {"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1}
        if selected:
            exactly["selectors"] = selectors(selected)
        return {"name": "r", "exactly": exactly}

    def requests(self):
        kind = self.random.random()
        one = self.exactly(self.pick([None, None, SELECTED]))
        if kind < 0.15:
            one = {"name": "r", "firstAvailable": [
                {"name": "large", "deviceClassName": "large", "allocationMode": "ExactCount", "count": 2},
                {"name": "any", "deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1}]}
        elif kind < 0.25:
            one["exactly"]["allocationMode"] = "All"
            del one["exactly"]["count"]
        elif kind < 0.3:
            one["exactly"]["deviceClassName"] = "absent"
        elif kind < 0.6:
            one["exactly"]["count"] = 2
        return [one, {**self.exactly(None), "name": "s"}] if self.chance(0.15) else [one]

    def allocation(self, pod, device):
        node, meta = pod["spec"]["nodeName"], pod["metadata"]
        field = {"key": "metadata.name", "operator": "In", "values": [node]}
        return {"allocation": {"devices": {"results": [{"request": "r", "driver": DRIVER, "pool": node, "device": device}]},
                               "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]}},
                "reservedFor": [{"resource": "pods", "name": meta["name"], "uid": meta["uid"]}]}

    def use(self, pod, claim):
        pod["spec"]["resourceClaims"] = [{"name": "devices", "resourceClaimName": claim["metadata"]["name"]}]
        pod["spec"]["containers"][0].setdefault("resources", {})["claims"] = [{"name": "devices"}]

    # Configuration

    def config(self):
        """A configuration of the scheduler, or None for the default profile."""
        if "configuration" not in self.kinds:
            return None
        plugins = {}
        if self.chance(0.3):
            plugins["multiPoint"] = {"disabled": [{"name": self.pick(PLUGINS)}]}
        elif self.chance(0.6):
            weighted, without = self.random.sample(SCORES, 2)
            plugins["score"] = {"enabled": [{"name": weighted, "weight": self.random.randint(1, 9)}],
                                "disabled": [{"name": weighted}, {"name": without}]}
        arguments = [("NodeAffinity", self.node_affinity), ("NodeResourcesFit", self.fit), ("InterPodAffinity", self.pod_affinity),
                     ("PodTopologySpread", self.spread), ("NodeResourcesBalancedAllocation", self.balanced)]
        made = [(name, make()) for name, make in arguments if self.chance(0.5)]
        api = "kubescheduler.config.k8s.io/v1"
        configs = [{"name": name, "args": {"apiVersion": api, "kind": f"{name}Args", **args}} for name, args in made]
        profile = {"schedulerName": "default-scheduler", "plugins": plugins, "pluginConfig": configs}
        return {"apiVersion": api, "kind": "KubeSchedulerConfiguration", "profiles": [profile]}

    def node_affinity(self):
        term = lambda: {"matchExpressions": [{"key": "disk", "operator": self.pick(["In", "NotIn"]), "values": [self.pick(["ssd", "hdd"])]}]}
        affinity = {}
        if self.chance(0.7):
            affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": [term()]}
        if not affinity or self.chance(0.5):
            affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [{"weight": self.random.randint(1, 100), "preference": term()}]
        return {"addedAffinity": affinity}

    def fit(self):
        resources = [{"name": name, "weight": self.random.randint(1, 5)} for name in ["cpu", "memory", "example.com/gpu"]
                     if name == "cpu" or self.chance(0.6)]
        strategy = {"type": self.pick(["LeastAllocated", "MostAllocated", "RequestedToCapacityRatio"]), "resources": resources}
        if strategy["type"] == "RequestedToCapacityRatio":
            shape = [{"utilization": at, "score": self.random.randint(0, 10)} for at in sorted(self.random.sample(range(101), 3))]
            strategy["requestedToCapacityRatio"] = {"shape": shape}
        args = {"scoringStrategy": strategy}
        if self.chance(0.3):
            args |= self.pick([{"ignoredResources": ["example.com/gpu"]}, {"ignoredResourceGroups": ["example.com"]}])
        return args

    def pod_affinity(self):
        return {"hardPodAffinityWeight": self.random.randint(0, 100), "ignorePreferredTermsOfExistingPods": self.chance(0.5)}

    def spread(self):
        if self.chance(0.2):
            return {"defaultingType": "System"}
        keys = self.random.sample(["kubernetes.io/hostname", "topology.kubernetes.io/zone", "rack"], self.random.randint(1, 2))
        return {"defaultingType": "List", "defaultConstraints": [
            {"maxSkew": self.random.randint(1, 3), "topologyKey": key, "whenUnsatisfiable": self.pick(["DoNotSchedule", "ScheduleAnyway", "ScheduleAnyway"])}
            for key in keys]}

    def balanced(self):
        names = ["cpu", "memory"] + ["ephemeral-storage"] * self.chance(0.5)
        return {"resources": [{"name": name, "weight": 1} for name in names]}

"""Valid objects of every kind that a default cluster serves. The differential test sends them and their mutations."""

META = {"name": "a", "labels": {"l": "v"}, "annotations": {"n": "w"}}


def template(labels=None, **spec):
    """A pod template."""
    spec.setdefault("containers", [{"name": "c", "image": "nginx"}])
    return {"metadata": {"labels": labels or {"app": "a"}}, "spec": spec}


RICH_CONTAINER = {
    "name": "c", "image": "registry.example/nginx:1.2", "command": ["/bin/sh"], "args": ["-c", "true"],
    "workingDir": "/tmp", "imagePullPolicy": "IfNotPresent",
    "ports": [{"name": "http", "containerPort": 80, "hostPort": 8080}, {"name": "dns", "containerPort": 53, "protocol": "UDP"}],
    "env": [
        {"name": "A", "value": "b"},
        {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k", "optional": True}}},
        {"name": "D", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "E", "valueFrom": {"resourceFieldRef": {"containerName": "c", "resource": "limits.cpu", "divisor": "1m"}}}],
    "envFrom": [{"prefix": "P_", "configMapRef": {"name": "m"}}, {"secretRef": {"name": "s", "optional": True}}],
    "resources": {"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "500m", "memory": "100M"}},
    "volumeMounts": [
        {"name": "empty", "mountPath": "/e", "subPath": "x"}, {"name": "map", "mountPath": "/m", "readOnly": True},
        {"name": "all", "mountPath": "/all"}, {"name": "host", "mountPath": "/h", "mountPropagation": "HostToContainer"}],
    "livenessProbe": {"httpGet": {"path": "/l", "port": "http", "httpHeaders": [{"name": "X", "value": "y"}]}, "periodSeconds": 5},
    "readinessProbe": {"tcpSocket": {"port": 80}, "initialDelaySeconds": 1},
    "startupProbe": {"exec": {"command": ["true"]}, "failureThreshold": 30},
    "lifecycle": {"preStop": {"exec": {"command": ["sleep", "1"]}}, "postStart": {"httpGet": {"path": "/", "port": 80}}},
    "terminationMessagePath": "/dev/term", "terminationMessagePolicy": "FallbackToLogsOnError",
    "securityContext": {
        "runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": True, "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
        "seccompProfile": {"type": "RuntimeDefault"}},
    "stdin": True, "tty": True,
}
RICH_POD = {
    "containers": [RICH_CONTAINER], "initContainers": [
        {"name": "i", "image": "busybox:1", "command": ["true"]},
        {"name": "side", "image": "busybox:1", "restartPolicy": "Always"}],
    "volumes": [
        {"name": "empty", "emptyDir": {"sizeLimit": "1Gi", "medium": "Memory"}},
        {"name": "map", "configMap": {"name": "m", "defaultMode": 256, "items": [{"key": "k", "path": "p", "mode": 288}]}},
        {"name": "sec", "secret": {"secretName": "s", "optional": True}},
        {"name": "host", "hostPath": {"path": "/var", "type": "Directory"}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "c"}},
        {"name": "nfs", "nfs": {"server": "10.0.0.1", "path": "/x"}},
        {"name": "csi", "csi": {"driver": "d.example.com", "volumeAttributes": {"a": "b"}}},
        {"name": "image", "image": {"reference": "nginx", "pullPolicy": "IfNotPresent"}},
        {"name": "eph", "ephemeral": {"volumeClaimTemplate": {"spec": {
            "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}}},
        {"name": "all", "projected": {"sources": [
            {"serviceAccountToken": {"path": "t", "expirationSeconds": 3600, "audience": "x"}},
            {"configMap": {"name": "m"}}, {"secret": {"name": "s"}},
            {"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}}]}}],
    "restartPolicy": "Always", "terminationGracePeriodSeconds": 5, "dnsPolicy": "None",
    "dnsConfig": {"nameservers": ["10.0.0.1"], "searches": ["a.b"], "options": [{"name": "ndots", "value": "2"}]},
    "nodeSelector": {"k": "v"}, "serviceAccountName": "default", "automountServiceAccountToken": False,
    "hostname": "h", "subdomain": "sub", "hostAliases": [{"ip": "10.0.0.2", "hostnames": ["x"]}],
    "affinity": {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}],
             "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}]},
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}}]},
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "zone", "namespaces": ["x"]}]},
        "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 100, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {
                "matchExpressions": [{"key": "a", "operator": "Exists"}]}}}]}},
    "tolerations": [{"key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute", "tolerationSeconds": 10},
                    {"operator": "Exists"}],
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
                                   "labelSelector": {"matchLabels": {"a": "b"}}, "minDomains": 2}],
    "securityContext": {"fsGroup": 2000, "supplementalGroups": [1, 2], "runAsUser": 1, "fsGroupChangePolicy": "OnRootMismatch",
                        "sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]},
    "imagePullSecrets": [{"name": "p"}], "enableServiceLinks": False, "shareProcessNamespace": True,
    "readinessGates": [{"conditionType": "example.com/x"}], "schedulerName": "default-scheduler",
    "setHostnameAsFQDN": False, "os": {"name": "linux"}, "activeDeadlineSeconds": 100,
    "resources": {"limits": {"cpu": "4"}, "requests": {"cpu": "1"}},
}
WEBHOOK = {
    "name": "w.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"],
    "clientConfig": {"service": {"name": "s", "namespace": "n", "path": "/p"}},
    "rules": [{"apiGroups": ["apps"], "apiVersions": ["v1"], "resources": ["deployments"], "operations": ["CREATE"]}],
    "matchConditions": [{"name": "m", "expression": "object.metadata.name != 'x'"}],
    "namespaceSelector": {"matchLabels": {"a": "b"}}, "timeoutSeconds": 5,
}
SELECTOR = {"matchLabels": {"app": "a"}, "matchExpressions": [{"key": "x", "operator": "NotIn", "values": ["y"]}]}
MATCH = {"resourceRules": [{"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"],
                            "resources": ["deployments"]}]}
HPA_TARGET = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"}

# (apiVersion, kind, resource, namespaced, object without apiVersion, kind and metadata)
BASES = [
    ("v1", "ConfigMap", "configmaps", True, {"data": {"k": "v"}, "binaryData": {"b": "aGk="}, "immutable": True}),
    ("v1", "Secret", "secrets", True, {"data": {"k": "aGk="}, "stringData": {"s": "t"}}),
    ("v1", "Secret", "secrets", True, {"type": "kubernetes.io/tls", "data": {"tls.crt": "aGk=", "tls.key": "aGk="}}),
    ("v1", "Secret", "secrets", True, {"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": "e30="}}),
    ("v1", "Secret", "secrets", True, {"type": "kubernetes.io/basic-auth", "data": {"username": "aGk="}}),
    ("v1", "Namespace", "namespaces", False, {}),
    ("v1", "Node", "nodes", False, {"spec": {
        "podCIDR": "10.9.0.0/24", "podCIDRs": ["10.9.0.0/24"], "unschedulable": True, "providerID": "x://y",
        "taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}}),
    ("v1", "ServiceAccount", "serviceaccounts", True, {
        "secrets": [{"name": "s"}], "imagePullSecrets": [{"name": "p"}], "automountServiceAccountToken": False}),
    ("v1", "Service", "services", True, {"spec": {"ports": [{"port": 80}], "selector": {"a": "b"}}}),
    ("v1", "Service", "services", True, {"spec": {
        "type": "LoadBalancer", "ports": [
            {"name": "http", "port": 80, "targetPort": "web", "protocol": "TCP", "appProtocol": "http"},
            {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 5353}],
        "selector": {"a": "b"}, "sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 100}},
        "externalTrafficPolicy": "Cluster", "internalTrafficPolicy": "Local", "loadBalancerClass": "x.example/y",
        "loadBalancerSourceRanges": ["10.0.0.0/8"], "externalIPs": ["203.0.113.7"], "publishNotReadyAddresses": True,
        "trafficDistribution": "PreferClose", "allocateLoadBalancerNodePorts": False}}),
    ("v1", "Service", "services", True, {"spec": {"type": "ExternalName", "externalName": "x.example.com"}}),
    ("v1", "Service", "services", True, {"spec": {"clusterIP": "None", "selector": {"a": "b"}, "ports": [{"port": 80}]}}),
    ("v1", "Endpoints", "endpoints", True, {"subsets": [{
        "addresses": [{"ip": "10.1.1.1", "hostname": "h", "nodeName": "n", "targetRef": {"kind": "Pod", "name": "p"}}],
        "notReadyAddresses": [{"ip": "10.1.1.2"}], "ports": [{"name": "p", "port": 80, "protocol": "TCP"}]}]}),
    ("v1", "Pod", "pods", True, {"spec": {"containers": [{"name": "c", "image": "nginx"}]}}),
    ("v1", "Pod", "pods", True, {"spec": RICH_POD}),
    ("v1", "Pod", "pods", True, {"spec": {
        "hostNetwork": True, "hostPID": True, "hostIPC": True, "nodeName": "n", "priorityClassName": "system-node-critical",
        "containers": [{"name": "c", "image": "nginx", "ports": [{"containerPort": 80}],
                        "securityContext": {"privileged": True}}]}}),
    ("v1", "PodTemplate", "podtemplates", True, {"template": template()}),
    ("v1", "ReplicationController", "replicationcontrollers", True, {"spec": {
        "replicas": 2, "minReadySeconds": 1, "selector": {"app": "a"}, "template": template()}}),
    ("v1", "PersistentVolume", "persistentvolumes", False, {"spec": {
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce", "ReadOnlyMany"],
        "hostPath": {"path": "/x", "type": "DirectoryOrCreate"}, "storageClassName": "sc", "volumeMode": "Filesystem",
        "persistentVolumeReclaimPolicy": "Delete", "mountOptions": ["ro"],
        "claimRef": {"namespace": "n", "name": "c"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
            {"key": "k", "operator": "In", "values": ["v"]}]}]}}}}),
    ("v1", "PersistentVolume", "persistentvolumes", False, {"spec": {
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"],
        "csi": {"driver": "d.example.com", "volumeHandle": "h", "fsType": "ext4", "readOnly": True,
                "volumeAttributes": {"a": "b"}, "nodeStageSecretRef": {"name": "s", "namespace": "n"}}}}),
    ("v1", "PersistentVolumeClaim", "persistentvolumeclaims", True, {"spec": {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}, "limits": {"storage": "2Gi"}},
        "storageClassName": "sc", "volumeMode": "Block", "selector": SELECTOR,
        "dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "x"}}}),
    ("v1", "LimitRange", "limitranges", True, {"spec": {"limits": [
        {"type": "Container", "max": {"cpu": "2"}, "min": {"cpu": "100m"}, "default": {"cpu": "1"},
         "defaultRequest": {"cpu": "200m"}, "maxLimitRequestRatio": {"cpu": "10"}},
        {"type": "Pod", "max": {"memory": "1Gi"}}, {"type": "PersistentVolumeClaim", "max": {"storage": "10Gi"}}]}}),
    ("v1", "ResourceQuota", "resourcequotas", True, {"spec": {
        "hard": {"pods": "10", "requests.cpu": "1", "count/configmaps": "5", "services.nodeports": "1"},
        "scopeSelector": {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}]}}}),
    ("v1", "ResourceQuota", "resourcequotas", True, {"spec": {"hard": {"pods": "10"}, "scopes": ["BestEffort"]}}),
    ("v1", "Event", "events", True, {
        "involvedObject": {"kind": "Pod", "namespace": "diff", "name": "p", "apiVersion": "v1"}, "reason": "R",
        "message": "m", "type": "Normal", "count": 1, "source": {"component": "c", "host": "h"},
        "firstTimestamp": "2026-01-01T00:00:00Z", "lastTimestamp": "2026-01-01T00:00:00Z"}),
    ("events.k8s.io/v1", "Event", "events", True, {
        "eventTime": "2026-01-01T00:00:00.000001Z", "reportingController": "example.com/c", "reportingInstance": "i",
        "action": "A", "reason": "R", "type": "Warning", "note": "n",
        "regarding": {"kind": "Pod", "namespace": "default", "name": "p"}, "series": {
            "count": 2, "lastObservedTime": "2026-01-01T00:00:00.000001Z"}}),
    ("apps/v1", "Deployment", "deployments", True, {"spec": {"selector": {"matchLabels": {"app": "a"}}, "template": template()}}),
    ("apps/v1", "Deployment", "deployments", True, {"spec": {
        "replicas": 3, "selector": SELECTOR, "minReadySeconds": 1, "progressDeadlineSeconds": 10, "revisionHistoryLimit": 2,
        "paused": True, "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 1}},
        "template": template(nodeSelector={"a": "b"}, terminationGracePeriodSeconds=1)}}),
    ("apps/v1", "ReplicaSet", "replicasets", True, {"spec": {
        "replicas": 2, "minReadySeconds": 1, "selector": {"matchLabels": {"app": "a"}}, "template": template()}}),
    ("apps/v1", "StatefulSet", "statefulsets", True, {"spec": {
        "replicas": 2, "serviceName": "s", "selector": {"matchLabels": {"app": "a"}}, "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 1, "maxUnavailable": 1}},
        "ordinals": {"start": 3}, "minReadySeconds": 1, "revisionHistoryLimit": 3,
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {
            "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}],
        "template": template(containers=[{"name": "c", "image": "nginx", "volumeMounts": [{"name": "data", "mountPath": "/d"}]}])}}),
    ("apps/v1", "DaemonSet", "daemonsets", True, {"spec": {
        "selector": {"matchLabels": {"app": "a"}}, "template": template(), "minReadySeconds": 1, "revisionHistoryLimit": 2,
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}}}),
    ("apps/v1", "ControllerRevision", "controllerrevisions", True, {"revision": 3, "data": {"a": "b"}}),
    ("batch/v1", "Job", "jobs", True, {"spec": {"template": {"spec": {
        "restartPolicy": "Never", "containers": [{"name": "c", "image": "x"}]}}}}),
    ("batch/v1", "Job", "jobs", True, {"spec": {
        "parallelism": 2, "completions": 4, "completionMode": "Indexed", "backoffLimitPerIndex": 1, "maxFailedIndexes": 2,
        "activeDeadlineSeconds": 100, "ttlSecondsAfterFinished": 10, "suspend": True, "podReplacementPolicy": "Failed",
        "successPolicy": {"rules": [{"succeededIndexes": "0-1", "succeededCount": 1}]},
        "podFailurePolicy": {"rules": [
            {"action": "FailIndex", "onExitCodes": {"containerName": "c", "operator": "In", "values": [1, 2]}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]},
        "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "x"}]}}}}),
    ("batch/v1", "CronJob", "cronjobs", True, {"spec": {
        "schedule": "*/5 * * * *", "timeZone": "Europe/Berlin", "concurrencyPolicy": "Forbid", "suspend": True,
        "startingDeadlineSeconds": 10, "successfulJobsHistoryLimit": 1, "failedJobsHistoryLimit": 2,
        "jobTemplate": {"metadata": {"labels": {"x": "y"}}, "spec": {"template": {"spec": {
            "restartPolicy": "OnFailure", "containers": [{"name": "c", "image": "x"}]}}}}}}),
    ("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", True, {"spec": {
        "minReplicas": 1, "maxReplicas": 5, "scaleTargetRef": HPA_TARGET, "metrics": [
            {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}},
            {"type": "Pods", "pods": {"metric": {"name": "m", "selector": SELECTOR}, "target": {
                "type": "AverageValue", "averageValue": "10"}}},
            {"type": "Object", "object": {"metric": {"name": "m"}, "describedObject": HPA_TARGET, "target": {
                "type": "Value", "value": "10"}}},
            {"type": "External", "external": {"metric": {"name": "m"}, "target": {"type": "Value", "value": "1"}}},
            {"type": "ContainerResource", "containerResource": {"name": "cpu", "container": "c", "target": {
                "type": "Utilization", "averageUtilization": 5}}}],
        "behavior": {"scaleUp": {"stabilizationWindowSeconds": 1, "selectPolicy": "Min", "policies": [
            {"type": "Pods", "value": 1, "periodSeconds": 10}]}, "scaleDown": {"policies": [
                {"type": "Percent", "value": 10, "periodSeconds": 10}]}}}}),
    ("autoscaling/v1", "HorizontalPodAutoscaler", "horizontalpodautoscalers", True, {"spec": {
        "minReplicas": 1, "maxReplicas": 5, "scaleTargetRef": HPA_TARGET, "targetCPUUtilizationPercentage": 50}}),
    ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", True, {"spec": {
        "minAvailable": "50%", "selector": SELECTOR, "unhealthyPodEvictionPolicy": "AlwaysAllow"}}),
    ("networking.k8s.io/v1", "Ingress", "ingresses", True, {"spec": {
        "ingressClassName": "c", "defaultBackend": {"service": {"name": "s", "port": {"number": 80}}},
        "tls": [{"hosts": ["x.example.com"], "secretName": "t"}], "rules": [{"host": "x.example.com", "http": {"paths": [
            {"path": "/a", "pathType": "Prefix", "backend": {"service": {"name": "s", "port": {"name": "http"}}}},
            {"path": "/b", "pathType": "Exact", "backend": {"resource": {
                "apiGroup": "g.example.com", "kind": "K", "name": "n"}}}]}}]}}),
    ("networking.k8s.io/v1", "IngressClass", "ingressclasses", False, {"spec": {
        "controller": "example.com/c", "parameters": {"kind": "K", "name": "n", "scope": "Namespace", "namespace": "x"}}}),
    ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies", True, {"spec": {
        "podSelector": SELECTOR, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": {}, "namespaceSelector": SELECTOR}, {
            "ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}],
            "ports": [{"port": 80, "endPort": 90, "protocol": "TCP"}]}],
        "egress": [{"to": [{"namespaceSelector": {}}], "ports": [{"port": "http", "protocol": "UDP"}]}]}}),
    ("discovery.k8s.io/v1", "EndpointSlice", "endpointslices", True, {
        "addressType": "IPv4", "endpoints": [{
            "addresses": ["10.1.1.1"], "conditions": {"ready": True, "serving": True, "terminating": False},
            "hostname": "h", "nodeName": "n", "zone": "z", "hints": {"forZones": [{"name": "z"}]},
            "targetRef": {"kind": "Pod", "name": "p"}}],
        "ports": [{"name": "p", "port": 80, "protocol": "TCP", "appProtocol": "http"}]}),
    ("rbac.authorization.k8s.io/v1", "Role", "roles", True, {"rules": [
        {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get"], "resourceNames": ["x"]}]}),
    ("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", False, {
        "rules": [{"nonResourceURLs": ["/x/*"], "verbs": ["get"]}, {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}],
        "aggregationRule": {"clusterRoleSelectors": [SELECTOR]}}),
    ("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings", True, {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"},
        "subjects": [{"kind": "User", "name": "u"}, {"kind": "Group", "name": "g"}, {
            "kind": "ServiceAccount", "name": "s", "namespace": "n"}]}),
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "clusterrolebindings", False, {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "r"},
        "subjects": [{"kind": "User", "name": "u", "apiGroup": "rbac.authorization.k8s.io"}]}),
    ("storage.k8s.io/v1", "StorageClass", "storageclasses", False, {
        "provisioner": "p.example.com", "parameters": {"a": "b"}, "reclaimPolicy": "Retain", "mountOptions": ["ro"],
        "volumeBindingMode": "WaitForFirstConsumer", "allowVolumeExpansion": True,
        "allowedTopologies": [{"matchLabelExpressions": [{"key": "k", "values": ["v"]}]}]}),
    ("storage.k8s.io/v1", "CSIDriver", "csidrivers", False, {"spec": {
        "attachRequired": False, "podInfoOnMount": True, "volumeLifecycleModes": ["Persistent", "Ephemeral"],
        "storageCapacity": True, "fsGroupPolicy": "File", "requiresRepublish": True, "seLinuxMount": True,
        "tokenRequests": [{"audience": "a", "expirationSeconds": 3600}]}}),
    ("storage.k8s.io/v1", "CSINode", "csinodes", False, {"spec": {"drivers": [
        {"name": "d", "nodeID": "n", "topologyKeys": ["k"], "allocatable": {"count": 3}}]}}),
    ("storage.k8s.io/v1", "VolumeAttachment", "volumeattachments", False, {"spec": {
        "attacher": "a", "nodeName": "n", "source": {"persistentVolumeName": "p"}}}),
    ("storage.k8s.io/v1", "CSIStorageCapacity", "csistoragecapacities", True, {
        "storageClassName": "sc", "capacity": "1Gi", "maximumVolumeSize": "1Gi", "nodeTopology": SELECTOR}),
    ("storage.k8s.io/v1", "VolumeAttributesClass", "volumeattributesclasses", False, {
        "driverName": "d.example.com", "parameters": {"a": "b"}}),
    ("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", False, {
        "value": 5, "description": "d", "globalDefault": False, "preemptionPolicy": "Never"}),
    ("node.k8s.io/v1", "RuntimeClass", "runtimeclasses", False, {
        "handler": "h", "overhead": {"podFixed": {"cpu": "1m"}}, "scheduling": {
            "nodeSelector": {"a": "b"}, "tolerations": [{"key": "k", "operator": "Exists"}]}}),
    ("coordination.k8s.io/v1", "Lease", "leases", True, {"spec": {
        "holderIdentity": "h", "leaseDurationSeconds": 10, "leaseTransitions": 1,
        "acquireTime": "2026-01-01T00:00:00.000000Z", "renewTime": "2026-01-01T00:00:00.000000Z"}}),
    ("certificates.k8s.io/v1", "CertificateSigningRequest", "certificatesigningrequests", False, {"spec": {
        "signerName": "example.com/s", "usages": ["client auth"], "expirationSeconds": 3600, "request": "@csr"}}),
    ("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations", False, {
        "webhooks": [WEBHOOK]}),
    ("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations", False, {
        "webhooks": [{**WEBHOOK, "reinvocationPolicy": "IfNeeded"}]}),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies", False, {"spec": {
        "failurePolicy": "Fail", "matchConstraints": MATCH, "variables": [{"name": "v", "expression": "object.spec.replicas"}],
        "matchConditions": [{"name": "m", "expression": "true"}],
        "auditAnnotations": [{"key": "k", "valueExpression": "'x'"}],
        "validations": [{"expression": "variables.v < 5", "message": "m", "reason": "Forbidden",
                         "messageExpression": "'x'"}]}}),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings", False, {
        "spec": {"policyName": "p.example.com", "validationActions": ["Warn", "Audit"], "matchResources": MATCH,
                 "paramRef": {"name": "x", "namespace": "n", "parameterNotFoundAction": "Deny"}}}),
    ("admissionregistration.k8s.io/v1", "MutatingAdmissionPolicy", "mutatingadmissionpolicies", False, {"spec": {
        "failurePolicy": "Ignore", "matchConstraints": MATCH, "reinvocationPolicy": "Never", "mutations": [
            {"patchType": "JSONPatch", "jsonPatch": {"expression": "[]"}}]}}),
    ("admissionregistration.k8s.io/v1", "MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings", False, {
        "spec": {"policyName": "p.example.com"}}),
    ("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", False, {
        "metadata": {"name": "foos.example.com"}, "spec": {
            "group": "example.com", "scope": "Namespaced", "names": {
                "plural": "foos", "singular": "foo", "kind": "Foo", "listKind": "FooList", "shortNames": ["fo"],
                "categories": ["all"]},
            "versions": [{"name": "v1", "served": True, "storage": True, "subresources": {
                "status": {}, "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas",
                                        "labelSelectorPath": ".status.selector"}},
                "additionalPrinterColumns": [{"name": "R", "type": "integer", "jsonPath": ".spec.replicas"}],
                "selectableFields": [{"jsonPath": ".spec.color"}],
                "schema": {"openAPIV3Schema": {"type": "object", "required": ["spec"], "properties": {
                    "spec": {"type": "object", "properties": {
                        "replicas": {"type": "integer", "minimum": 0, "default": 1}, "color": {"type": "string", "enum": ["a", "b"]},
                        "list": {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set", "maxItems": 5},
                        "any": {"x-kubernetes-preserve-unknown-fields": True},
                        "port": {"x-kubernetes-int-or-string": True}},
                        "x-kubernetes-validations": [{"rule": "self.replicas < 10", "message": "m"}]},
                    "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}}}]}}),
    ("apiregistration.k8s.io/v1", "APIService", "apiservices", False, {
        "metadata": {"name": "v1.foo.example.com"}, "spec": {
            "group": "foo.example.com", "version": "v1", "groupPriorityMinimum": 100, "versionPriority": 10,
            "service": {"name": "s", "namespace": "n", "port": 443}, "insecureSkipTLSVerify": True}}),
    ("flowcontrol.apiserver.k8s.io/v1", "FlowSchema", "flowschemas", False, {"spec": {
        "priorityLevelConfiguration": {"name": "global-default"}, "matchingPrecedence": 500,
        "distinguisherMethod": {"type": "ByUser"}, "rules": [{
            "subjects": [{"kind": "Group", "group": {"name": "g"}}, {"kind": "ServiceAccount", "serviceAccount": {
                "name": "*", "namespace": "n"}}],
            "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"],
                               "clusterScope": True}],
            "nonResourceRules": [{"verbs": ["get"], "nonResourceURLs": ["/x"]}]}]}}),
    ("flowcontrol.apiserver.k8s.io/v1", "PriorityLevelConfiguration", "prioritylevelconfigurations", False, {"spec": {
        "type": "Limited", "limited": {"nominalConcurrencyShares": 10, "lendablePercent": 10, "borrowingLimitPercent": 20,
                                       "limitResponse": {"type": "Queue", "queuing": {
                                           "queues": 16, "handSize": 4, "queueLengthLimit": 10}}}}}),
    ("networking.k8s.io/v1", "ServiceCIDR", "servicecidrs", False, {"spec": {"cidrs": ["10.77.0.0/24"]}}),
    ("networking.k8s.io/v1", "IPAddress", "ipaddresses", False, {
        "metadata": {"name": "10.77.0.9"}, "spec": {"parentRef": {"resource": "services", "namespace": "n", "name": "s"}}}),
    ("resource.k8s.io/v1", "DeviceClass", "deviceclasses", False, {"spec": {
        "selectors": [{"cel": {"expression": "device.driver == 'x'"}}]}}),
    ("resource.k8s.io/v1", "ResourceClaim", "resourceclaims", True, {"spec": {"devices": {"requests": [
        {"name": "r", "exactly": {"deviceClassName": "c", "allocationMode": "ExactCount", "count": 1}}]}}}),
    ("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates", True, {"spec": {"spec": {"devices": {
        "requests": [{"name": "r", "exactly": {"deviceClassName": "c"}}]}}}}),
    ("resource.k8s.io/v1", "ResourceSlice", "resourceslices", False, {"spec": {
        "driver": "d.example.com", "nodeName": "n", "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "d0", "attributes": {"a": {"string": "b"}}, "capacity": {"memory": {"value": "1Gi"}}}]}}),
]

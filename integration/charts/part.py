"""The steps of each part: install, upgrade, a killed node, roll back, uninstall."""
import os

from checks import becomes, check, run, succeeds
from cluster import HERE


class Part:
    """A chart and its checks. A subclass has `chart`, `images`, `helm_version` and the methods below."""
    chart, images, helm_version = "", (), "4"
    install_flags, upgrade_flags = (), ()

    def __init__(self, cluster):
        self.cluster = cluster

    def prepare(self):
        """Before the installation."""

    def verify(self, step):
        """Checks the data after each step."""

    def upgrade(self):
        return self.helm("upgrade", self.chart, f"{HERE}/{self.chart}", *self.install_flags, *self.upgrade_flags,
                         "--wait", "--timeout", "5m")

    def roll_back(self):
        return self.helm("rollback", self.chart, "1", "--wait", "--timeout", "5m")

    def upgraded(self, is_upgraded):
        """Checks that the values of the upgrade apply if `is_upgraded`, else those of the installation."""

    def victims(self):
        """The nodes to kill, one after the other."""
        return []

    def while_down(self, node):
        """Checks while the node does not run."""

    def uninstalled(self):
        """Checks what the chart leaves, and removes it."""

    def kubectl(self, *words, **options):
        return self.cluster.kubectl("-n", self.chart, *words, **options)

    def get(self, *words):
        return self.cluster.get("-n", self.chart, *words)

    def exec(self, pod, *words):
        return self.kubectl("exec", pod, "--", *words)

    def helm(self, *words):
        environment = {**self.cluster.environment, "HELM_NAMESPACE": self.chart}
        return run(self.cluster.tools["helm" + self.helm_version], *words, env=environment, cwd=self.cluster.work)

    def node_of(self, pod):
        return self.get("pod", pod).get("spec", {}).get("nodeName", "")

    def lifecycle(self):
        release = f"helm {self.helm_version} "
        succeeds("a namespace is created", self.cluster.kubectl("create", "namespace", self.chart))
        self.prepare()
        installed = self.helm("install", self.chart, f"{HERE}/{self.chart}", *self.install_flags, "--wait", "--timeout", "5m")
        succeeds(release + "installs the chart", installed)
        if installed.returncode:
            return
        self.upgraded(False)
        self.verify("the installation")
        succeeds(release + "upgrades it", self.upgrade())
        self.upgraded(True)
        self.verify("the upgrade")
        for node in self.victims():
            self.fail_node(node)
            self.verify("the failure of " + node)
        succeeds(release + "rolls it back", self.roll_back())
        self.upgraded(False)
        self.verify("the rollback")
        succeeds(release + "uninstalls it", self.helm("uninstall", self.chart, "--wait", "--timeout", "3m"))
        self.uninstalled()
        succeeds("the namespace is deleted", self.cluster.kubectl("delete", "namespace", self.chart, "--timeout=120s"))

    def fail_node(self, node):
        before = self.containers(node)
        self.cluster.kill(node)
        self.while_down(node)
        succeeds(f"{node} starts again", self.cluster.start())

        def restarted():
            """Whether each container of the node was replaced and is ready."""
            now = self.containers(node)
            kept = {key for key, state in now.items() if before.get(key, ("", ""))[0] == state[0]}
            ready = (bool(now) or not before) and all(state[1] for state in now.values())
            return ready and not kept, f"before: {before}\nnow: {now}"

        becomes(f"the pods of {node} run again", restarted, seconds=240)

    def containers(self, node):
        """Ids of the containers on a node, and whether they are ready; without pods of jobs and pods that ended."""
        pods = self.get("pods", "--field-selector", "spec.nodeName=" + node).get("items", [])
        return {pod["metadata"]["name"] + "/" + status["name"]: (status.get("containerID", ""), status.get("ready", False))
                for pod in pods if "job-name" not in pod["metadata"].get("labels", {})
                and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
                for status in pod.get("status", {}).get("containerStatuses", [])}

    def claims(self):
        return sorted(claim["metadata"]["name"] for claim in self.get("pvc").get("items", []))

    def delete_claims(self, wanted):
        """The claims of a StatefulSet outlive the release. Their volumes are removed with them."""
        check(f"{len(wanted)} claims are left", self.claims() == wanted, self.claims())
        succeeds("the claims are deleted", self.kubectl("delete", "pvc", "--all", "--timeout=60s"))
        folders = f"{self.cluster.state}/{self.cluster.name}"

        def removed():
            volumes = self.cluster.get("pv").get("items", [])
            left = [os.path.join(root, name) for root, names, _ in os.walk(folders) if os.path.basename(root) == "local-volumes"
                    for name in names if name.startswith("pvc-")]
            return not volumes and not left, f"{len(volumes)} volumes; {left}"

        becomes("their volumes and directories are removed", removed)

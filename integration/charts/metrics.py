"""prometheus-operator: its objects lead to scraped targets, and no sample is lost."""
import json, time, urllib.parse

from cluster import IMAGES
from checks import becomes, check, output, succeeds
from part import Part

POD = "prometheus-main-0"
# Targets by job: node exporters, and both paths of each kubelet.
WANTED = {"node-exporter": 3, "kubelet": 6}


class Metrics(Part):
    chart, images, helm_version = "metrics", ("operator", "prometheus"), "3"
    upgrade_flags = ("--set", "retention=36h")

    def prepare(self):
        definitions = IMAGES + "/crds"
        apply = ("apply", "--server-side", "-f", definitions)
        succeeds("the operator's definitions are applied by the server", self.kubectl(*apply))
        succeeds("they are established", self.kubectl("wait", "--for=condition=Established", "-f", definitions, "--timeout=60s"))
        self.since = {}

    def query(self, expression, at=None):
        words = {"query": expression, **({"time": at} if at else {})}
        url = "http://127.0.0.1:9090/api/v1/query?" + urllib.parse.urlencode(words)
        done = self.kubectl("exec", POD, "-c", "prometheus", "--", "wget", "-qO-", url)
        try:
            return {one["metric"].get("job", ""): float(one["value"][1]) for one in json.loads(done.stdout)["data"]["result"]}
        except (ValueError, KeyError):
            return {"error": output(done)[-500:]}

    def verify(self, step):
        def scraped():
            found = self.query("sum by (job) (up)")
            return found == WANTED, found

        becomes(f"after {step} all targets are scraped", scraped, seconds=180)

        def recorded():
            found = self.query("job:up:sum")
            return found == WANTED, found

        becomes(f"after {step} the rule is evaluated", recorded)
        self.compare(step)
        # Samples of this time are compared after each later step. Scrapes until now are complete in some seconds.
        now = time.time()
        time.sleep(5)
        self.since[step] = (now, self.samples(now))

    def samples(self, at):
        return self.query("sum by (job) (count_over_time(up[30s]))", at)

    def compare(self, step):
        for former, (at, samples) in self.since.items():
            found = self.samples(at)
            check(f"after {step} the samples from {former} are there", samples.keys() == WANTED.keys() and found == samples, f"{found}, not {samples}")

    def upgraded(self, is_upgraded):
        wanted = "36h" if is_upgraded else "24h"

        def retains():
            done = self.kubectl("exec", POD, "-c", "prometheus", "--", "wget", "-qO-", "http://127.0.0.1:9090/api/v1/status/flags")
            return f'"storage.tsdb.retention.time":"{wanted}"' in done.stdout.replace("1d12h", "36h").replace("1d\"", "24h\""), output(done)[-800:]

        becomes(f"Prometheus has the retention {wanted}", retains)
        available = ("wait", "prometheus/main", "--for=condition=Available", "--timeout=120s")
        succeeds("the operator reports that Prometheus is available", self.kubectl(*available))

    def victims(self):
        return [self.node_of(POD)]

    def uninstalled(self):
        def ended():
            found = [pod["metadata"]["name"] for pod in self.get("pods").get("items", [])]
            return not found, found

        becomes("all pods of the release end", ended)
        self.delete_claims(["prometheus-main-db-" + POD])
        succeeds("the definitions are deleted", self.kubectl("delete", "-f", IMAGES + "/crds", "--timeout=90s"))

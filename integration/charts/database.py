"""PostgreSQL: no acknowledged row is lost, and backups can be restored."""
import json, re

from checks import becomes, check, output, succeeds
from cluster import HERE
from part import Part


class Database(Part):
    chart, images, helm_version = "database", ("postgres",), "4"
    install_flags = ("--set", "password=3e7f-test")
    upgrade_flags = ("--set", "maxConnections=80")

    def prepare(self):
        self.logged = set()

    def acknowledged(self):
        """All rows that the writer's log has shown as acknowledged. A restart of the writer hides the earlier log."""
        self.logged |= set(re.findall(r"^ack (\S+)$", self.kubectl("logs", "deploy/writer", "--tail=-1").stdout, re.M))
        return set(self.logged)

    def sql(self, text):
        return self.exec("database-0", "psql", "-At", "-c", text)

    def verify(self, step):
        before = self.acknowledged()
        becomes(f"after {step} the writer writes", lambda: (len(self.acknowledged()) > len(before) + 5, f"{len(before)} rows before"))
        acknowledged = self.acknowledged()
        done = self.sql("select id from entries")
        missing = acknowledged - set(done.stdout.split())
        check(f"after {step} each of {len(acknowledged)} acknowledged rows is there",
              acknowledged and done.returncode == 0 and not missing, f"{len(missing)} missing: {sorted(missing)[:9]} {output(done)}")
        self.rows = len(acknowledged)
        if step == "the installation":
            self.refuse_eviction()
        self.back_up(step)
        if step == "the rollback":
            becomes("a backup of the schedule is complete", self.schedule_fired)

    def refuse_eviction(self):
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "database-0", "namespace": "database"}}
        path = "/api/v1/namespaces/database/pods/database-0/eviction"
        done = self.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(eviction))
        check("the budget refuses an eviction", done.returncode != 0 and "disruption budget" in output(done), output(done))

    def back_up(self, step):
        """Starts a backup job in addition to those of the schedule, and restores the backup with `helm test`."""
        acknowledged = len(self.acknowledged())
        name = "by-hand-" + step.split()[-1]
        succeeds("a job is created from the CronJob", self.kubectl("create", "job", name, "--from=cronjob/backup"))
        done = self.kubectl("wait", "--for=condition=Complete", "job/" + name, "--timeout=180s")
        if not check(f"after {step} the backup completes", done.returncode == 0, output(done)):
            return
        done = self.helm("test", "database", "--logs", "--timeout", "3m")
        restored = re.search(r"restored (\d+)", done.stdout)
        check(f"after {step} the backup has the {acknowledged} rows from before it",
              done.returncode == 0 and restored and int(restored[1]) >= acknowledged, output(done))

    def upgraded(self, is_upgraded):
        wanted = "80" if is_upgraded else "50"
        done = self.sql("show max_connections")
        check(f"PostgreSQL has max_connections {wanted}", done.stdout.strip() == wanted, output(done))

    def victims(self):
        """The node with the database, and the one with the control plane."""
        return list(dict.fromkeys([self.node_of("database-0"), self.cluster.nodes()[0]]))

    def schedule_fired(self):
        """Whether a job of the schedule is complete: it has no annotation of `kubectl create job`."""
        jobs = [job for job in self.get("jobs").get("items", [])
                if "cronjob.kubernetes.io/instantiate" not in job["metadata"].get("annotations", {})]
        return any(job.get("status", {}).get("succeeded") for job in jobs), [job.get("status") for job in jobs]

    def uninstalled(self):
        """Claims outlive the release, so a release of that name finds its data again."""
        installed = self.helm("install", self.chart, f"{HERE}/{self.chart}", *self.install_flags, "--wait", "--timeout", "5m")
        succeeds("the chart is installed again", installed)
        done = self.sql("select count(*) from entries")
        rows = int(done.stdout) if done.stdout.strip().isdigit() else 0
        check(f"it has the {self.rows} rows of the former release", rows >= self.rows, output(done))
        succeeds("it is uninstalled again", self.helm("uninstall", self.chart, "--wait", "--timeout", "3m"))
        # The pod of a test outlives the release, and protects the claim that it used.
        succeeds("the pod of the tests is deleted", self.kubectl("delete", "pod", "restore", "--timeout=60s"))
        self.delete_claims(["backups", "data-database-0"])

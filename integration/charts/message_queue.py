"""NATS: no acknowledged message is lost, and none is stored twice."""
import re

from checks import becomes, check, output
from part import Part


class Queue(Part):
    chart, images, helm_version = "queue", ("nats",), "3"
    upgrade_flags = ("--set", "maxPayload=131072")

    def acknowledged(self):
        return set(re.findall(r"^ack (\S+)$", self.kubectl("logs", "deploy/producer", "--tail=-1").stdout, re.M))

    def verify(self, step):
        before = self.acknowledged()
        becomes(f"after {step} the producer publishes", lambda: (len(self.acknowledged()) > len(before) + 10, f"{len(before)} messages before"))
        acknowledged = self.acknowledged()
        for number in range(3):
            # Each server answers for the stream, also if it does not lead it.
            done = self.list(number)
            messages = done.stdout.split()
            missing = acknowledged - set(messages)
            check(f"after {step} queue-{number} has each of {len(acknowledged)} acknowledged messages once",
                  acknowledged and done.returncode == 0 and not missing and len(set(messages)) == len(messages),
                  f"{len(missing)} missing: {sorted(missing)[:9]}; {len(messages)} messages {output(done)[-800:]}")

    def list(self, number):
        return self.kubectl("exec", f"queue-{number}", "--", "env", f"NATS_URL=nats://queue-{number}.queue:4222", "queue-client", "list")

    def upgraded(self, is_upgraded):
        wanted = "131072" if is_upgraded else "65536"
        for number in range(3):
            done = self.exec(f"queue-{number}", "wget", "-qO-", "http://127.0.0.1:8222/varz")
            check(f"queue-{number} has max_payload {wanted}", re.search(rf'"max_payload": {wanted}\b', done.stdout), output(done)[-300:])

    def victims(self):
        """A node with a server, and without the producer, whose log shows what the others acknowledge."""
        pods = self.get("pods", "-l", "app=producer").get("items", [{}])
        other = pods[0].get("spec", {}).get("nodeName")
        return [node for node in (self.node_of(f"queue-{number}") for number in range(3)) if node != other][:1]

    def while_down(self, node):
        before = len(self.acknowledged())
        becomes(f"while {node} is down the other servers acknowledge messages",
                lambda: (len(self.acknowledged()) > before + 10, f"{before} messages before"))

    def uninstalled(self):
        self.delete_claims([f"data-queue-{number}" for number in range(3)])

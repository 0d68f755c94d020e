"""Traefik: TLS from a Secret, the address in the status, and no failed request during upgrades of the backend."""
import collections, http.client, socket, ssl, threading, time

from checks import becomes, check, run
from part import Part

HOST = "app.example.com"


class Client(threading.Thread):
    """Sends requests to a node, each on a new connection, until it is stopped."""

    def __init__(self, part, node):
        super().__init__(daemon=True)
        self.part, self.node = part, node
        self.stopped, self.answers, self.longest = threading.Event(), collections.Counter(), 0
        self.start()

    def run(self):
        while not self.stopped.wait(0.02):
            start = time.monotonic()
            self.answers[self.part.request(self.node)] += 1
            self.longest = max(self.longest, time.monotonic() - start)

    def stop(self):
        self.stopped.set()
        self.join()
        return self.answers


class Ingress(Part):
    chart, images, helm_version = "ingress", ("traefik", "nginx"), "4"
    upgrade_flags = ("--set-string", "version=2")

    def prepare(self):
        work = self.cluster.work
        run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj",
            "/CN=" + HOST, "-addext", "subjectAltName=DNS:" + HOST, "-keyout", work + "/tls.key", "-out", work + "/tls.crt")
        self.install_flags = ("--set-file", f"certificate={work}/tls.crt", "--set-file", f"key={work}/tls.key")
        self.trust = ssl.create_default_context(cafile=work + "/tls.crt")

    def request(self, node):
        """The body that the application sends through a node's address, or the error."""
        try:
            with socket.create_connection((self.cluster.address(node), 443), timeout=10) as plain:
                with self.trust.wrap_socket(plain, server_hostname=HOST) as secure:
                    secure.sendall(f"GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
                    answer = http.client.HTTPResponse(secure)
                    answer.begin()
                    body = answer.read(1000).decode(errors="replace").strip()
                    return body if answer.status == 200 else f"status {answer.status}"
        except (OSError, http.client.HTTPException) as error:
            return repr(error)

    def verify(self, step):
        def answers():
            found = [self.request(node) for node in self.cluster.nodes()]
            return all(body.startswith("version ") for body in found), found

        becomes(f"after {step} each node answers over TLS", answers)
        balancers = lambda of, name: sorted(at["ip"] for at in of.get("status", {}).get("loadBalancer", {}).get(name, []))

        def published():
            service = balancers(self.get("service", "traefik"), "ingress")
            found = balancers(self.get("ingress", "application"), "ingress")
            return found == service == sorted(map(self.cluster.address, self.cluster.nodes())), f"{found} {service}"

        becomes(f"after {step} Ingress and Service have the addresses of the nodes", published)

    def unanswered(self, change):
        """Makes a change while requests run, until Traefik serves the new version. None of them may fail."""
        clients = [Client(self, node) for node in self.cluster.nodes()]
        done = change()
        # helm waits for the Deployment. Traefik may see its endpoints a moment later.
        end = time.monotonic() + 20
        while len({answer for client in clients for answer in list(client.answers)}) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        answers = sum((client.stop() for client in clients), collections.Counter())
        longest = max(client.longest for client in clients)
        failed = {answer: count for answer, count in answers.items() if not answer.startswith("version ")}
        both = {answer for answer in answers if answer.startswith("version ")}
        title = f"none of {sum(answers.values())} requests during the change failed; the longest took {longest:.1f} s"
        check(title, not failed and len(both) == 2, dict(answers))
        return done

    def upgrade(self):
        return self.unanswered(super().upgrade)

    def roll_back(self):
        return self.unanswered(super().roll_back)

    def upgraded(self, is_upgraded):
        wanted = "version 2" if is_upgraded else "version 1"

        def answers():
            found = {self.request(node) for node in self.cluster.nodes() for _ in range(5)}
            return found == {wanted}, found

        becomes(f"all answers are {wanted}", answers)

    def victims(self):
        """A node with a pod of Traefik, and without the control plane."""
        pods = self.get("pods", "-l", "app=traefik").get("items", [])
        return sorted(pod["spec"]["nodeName"] for pod in pods)[-1:]

    def while_down(self, node):
        others = [other for other in self.cluster.nodes() if other != node]

        def answers():
            found = [self.request(other) for other in others for _ in range(10)]
            return all(body.startswith("version ") for body in found), found

        # Until the node counts as down, its pods still get requests.
        becomes(f"while {node} is down the other nodes answer each request", answers, seconds=180)

    def uninstalled(self):
        def refused():
            found = [self.request(node) for node in self.cluster.nodes()]
            return not any(body.startswith("version ") for body in found), found

        becomes("the nodes serve nothing any more", refused)

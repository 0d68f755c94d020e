"""etcd in a process, and requests to it over its HTTP gateway."""
import base64, collections, json, os, signal, subprocess, sys, time, urllib.error, urllib.request


class Etcd:
    """An etcd with one member."""

    url = "http://127.0.0.1:2379"

    def __init__(self, program, directory):
        os.makedirs(directory)
        self.log = open(os.path.join(directory, "log"), "ab")
        self.words = [program, "--data-dir", os.path.join(directory, "data"), "--log-level", "error"]
        self.process = None

    def start(self):
        """Starts etcd, and waits until it serves requests."""
        self.process = subprocess.Popen(self.words, stdout=self.log, stderr=self.log)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                self.revision()
                return
            except (OSError, ValueError):
                if self.process.poll() is not None:
                    sys.exit(f"etcd ended with {self.process.returncode}")
                time.sleep(0.01)
        sys.exit("etcd is not ready after 60 s")

    def kill(self):
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self, seconds):
        """Stops etcd for a time. As with a broken network, connections stay open, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)
        self.revision(timeout=30)

    def compact(self):
        """Removes the history before the current revision."""
        try:
            self.request("compaction", {"revision": str(self.revision())}, 10)
        except urllib.error.HTTPError as error:
            # 400: the revision is compacted already.
            if error.code != 400:
                raise

    def revision(self, timeout=5):
        """The newest revision. A linearizable read, which needs a leader."""
        key = base64.b64encode(b"/").decode()
        return int(self.request("range", {"key": key, "count_only": True}, timeout)["header"]["revision"])

    def request(self, name, body, timeout):
        request = urllib.request.Request(f"{self.url}/v3/kv/{name}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def print_log(self):
        print(f"end of {self.log.name}:", file=sys.stderr)
        with open(self.log.name, errors="replace") as file:
            sys.stderr.writelines(collections.deque(file, 20))

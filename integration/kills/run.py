#!/usr/bin/env python3
"""run.py CORACLE DIRECTORY KILLS [ETCD]: kills a control plane again and again while clients write and watch.

With ETCD, the path of etcd's program, two control planes share one etcd. Then etcd is killed, stopped and compacted, too.

The history of each client is recorded and replayed afterwards:
- An acknowledged write is never lost, and a refused one never takes effect. A write without a response may do either.
- Revisions of acknowledged writes never go back.
- A watch that goes on at its last revision gets each change once, in the order of the revisions.
"""
import collections, http.client, json, os, random, shutil, signal, ssl, subprocess, sys, threading, time

from etcd import Etcd

PORT, TOKEN = 16443, "kills"
# The addresses of the control planes. Clients use them in turn.
HOSTS = ["127.0.0.1"]
MAPS = "/api/v1/namespaces/default/configmaps"
WRITERS, WATCHERS, OBJECTS = 4, 4, 8
# Time between the end of a fault and the next fault, in seconds: with the embedded store, and with etcd.
LIFE, LIFE_ON_ETCD = (0.0, 0.25), (0.2, 1.0)
# Time after the last fault, in seconds, in which a write that was sent before may still take effect on etcd.
LATE = 15
TLS = ssl._create_unverified_context()
GONE = (OSError, http.client.HTTPException, ValueError)
stopped = threading.Event()
problems = []


def connect(timeout=10, host=None):
    return http.client.HTTPSConnection(host or random.choice(HOSTS), PORT, context=TLS, timeout=timeout)


def connected():
    """A connection that is established, so that the first request on it is sent to a living server."""
    while True:
        connection = connect()
        try:
            connection.connect()
            return connection
        except GONE:
            connection.close()
            time.sleep(0.005)


def send(connection, method, path, body=None):
    """Code and body of the response."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def ask(method, path, body=None):
    """Sends a request until there is a response. Only for requests that may be repeated."""
    until = time.monotonic() + 120
    while True:
        connection = connect()
        try:
            return send(connection, method, path, body)
        except GONE as error:
            if time.monotonic() > until:
                raise TimeoutError(f"{method} {path}: no response for 120 s") from error
            time.sleep(0.005)
        finally:
            connection.close()


def thread_ended(failure):
    """Records a client thread that ended with an error, because its checks are then missing."""
    problems.append(f"{failure.thread.name} ended with {failure.exc_type.__name__}: {failure.exc_value}")
    threading.__excepthook__(failure)


class Writer(threading.Thread):
    """Creates, replaces and deletes objects that no other client writes."""

    def __init__(self, number, seed, late):
        super().__init__()
        self.name, self.random = f"writer-{number}", random.Random(seed)
        self.names = [f"{self.name}-{index}" for index in range(OBJECTS)]
        self.count = 0
        # Whether a write without a response may take effect later. Then its object is not written any more, and the
        # list at the end shows the outcome.
        self.late = late
        # (type, name, text, object before) of each write whose outcome is not known yet.
        self.pending = []
        # Name → (revision, text) of each object that exists on the server.
        self.known = {}
        # Revision → (type, name, text) of each change that took effect.
        self.changes = {}
        self.acknowledged = self.uncertain = self.applied = 0

    def run(self):
        connection = connected()
        while not stopped.is_set():
            name = self.random.choice(self.names)
            self.count += 1
            text = str(self.count)
            kind = "ADDED" if name not in self.known else self.random.choice(["MODIFIED", "MODIFIED", "DELETED"])
            try:
                code, body = self.write(connection, kind, name, text)
            except GONE:
                connection.close()
                connection = connected()
                self.doubt(kind, name, text)
                continue
            if code in (200, 201):
                self.acknowledged += 1
                self.record(kind, name, text, body)
            elif code < 500 and code != 429:
                problems.append(f"{kind} of {name} was answered with {code}: {body.get('message')}")
            else:
                self.doubt(kind, name, text)

    def write(self, connection, kind, name, text):
        value = {"metadata": {"name": name}, "data": {"text": text}}
        if kind == "ADDED":
            return send(connection, "POST", MAPS, value)
        if kind == "DELETED":
            condition = {"resourceVersion": self.known[name][0]}
            return send(connection, "DELETE", f"{MAPS}/{name}", {"preconditions": condition})
        value["metadata"]["resourceVersion"] = self.known[name][0]
        return send(connection, "PUT", f"{MAPS}/{name}", value)

    def record(self, kind, name, text, body):
        if kind == "DELETED":
            # The response has no revision of the deletion. The watches show it.
            del self.known[name]
            return
        revision = body["metadata"]["resourceVersion"]
        if int(revision) <= max((int(known) for known, _ in self.known.values()), default=0):
            problems.append(f"the revision of {name} went back to {revision}")
        self.known[name] = (revision, text)
        self.changes[int(revision)] = (kind, name, text)

    def doubt(self, kind, name, text):
        """Handles a write without a response."""
        self.uncertain += 1
        if not self.late:
            self.resolve(kind, name, text)
            return
        self.pending.append((kind, name, text, self.known.pop(name, None)))
        self.names[self.names.index(name)] = f"{self.name}-{OBJECTS + self.uncertain}"
        # While etcd is away, every write fails at once.
        time.sleep(0.05)

    def resolve(self, kind, name, text):
        """Finds out whether a write without a response took effect."""
        code, body = ask("GET", f"{MAPS}/{name}")
        if code == 404:
            now = None
        elif code == 200:
            now = (body["metadata"]["resourceVersion"], body["data"]["text"])
        else:
            problems.append(f"reading {name} was answered with {code}: {body.get('message')}")
            return
        self.learn(kind, name, text, self.known.get(name), now)

    def settle(self, found):
        """Finds out which pending writes took effect, in the objects at the end."""
        for kind, name, text, before in self.pending:
            self.learn(kind, name, text, before, found.get(name))

    def learn(self, kind, name, text, before, now):
        """Records the object after a write without a response: `before`, or the result of the write."""
        if now != before:
            self.applied += 1
            after = None if kind == "DELETED" else text
            if (None if now is None else now[1]) != after:
                problems.append(f"{name} is {now} after {kind} of {text}; it was {before}")
            if now is not None:
                self.changes[int(now[0])] = (kind, name, text)
        if now is None:
            self.known.pop(name, None)
        else:
            self.known[name] = now


class Watcher(threading.Thread):
    """Watches all objects. Each watch resumes at the last revision. If the server has no history from there, lists again."""

    def __init__(self, number):
        super().__init__()
        self.name = f"watcher-{number}"
        self.until = None
        # Spans of revisions without a gap: [first, last, events, objects at the first]. None: the next step is a list.
        self.spans = []
        self.resumed = 0

    def run(self):
        while not self.has_all():
            if not self.spans or self.spans[-1] is None:
                code, body = ask("GET", MAPS)
                if code != 200:
                    time.sleep(0.01)
                    continue
                revision = int(body["metadata"]["resourceVersion"])
                objects = {item["metadata"]["name"]: item for item in body["items"]}
                if self.spans:
                    self.spans.pop()
                self.spans.append([revision, revision, [], objects])
            connection = connect(timeout=5)
            try:
                self.follow(connection, self.spans[-1])
            except GONE:
                pass
            finally:
                connection.close()

    def has_all(self):
        return bool(self.until and self.spans and self.spans[-1] and self.spans[-1][1] >= self.until)

    def follow(self, connection, span):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        query = f"?watch=1&allowWatchBookmarks=true&resourceVersion={span[1]}"
        connection.request("GET", MAPS + query, headers=headers)
        answer = connection.getresponse()
        if answer.status != 200:
            answer.read()
            if answer.status == 410:
                self.spans.append(None)
            time.sleep(0.01)
            return
        self.resumed += 1
        while line := answer.readline():
            if not line.endswith(b"\n"):
                return
            event = json.loads(line)
            if event["type"] == "ERROR":
                if event["object"].get("code") == 410:
                    self.spans.append(None)
                return
            revision = int(event["object"]["metadata"]["resourceVersion"])
            if event["type"] != "BOOKMARK":
                if revision <= span[1]:
                    problems.append(f"{self.name}: revision {revision} after {span[1]}")
                text = event["object"].get("data", {}).get("text")
                span[2].append((event["type"], event["object"]["metadata"]["name"], revision, text))
            span[1] = max(span[1], revision)
            if self.has_all():
                return


def check(writers, watchers, final):
    """Compares the histories of the clients with each other and with the objects at the end."""
    found = {item["metadata"]["name"]: (item["metadata"]["resourceVersion"], item["data"]["text"])
             for item in final["items"] if item["metadata"]["name"].startswith("writer-")}
    changes, known = {}, {}
    for writer in writers:
        writer.settle(found)
        changes.update(writer.changes)
        known.update(writer.known)
    if found != known:
        problems.append(f"objects at the end differ: {set(found.items()) ^ set(known.items())}")
    for watcher in watchers:
        for first, last, events, objects in filter(None, watcher.spans):
            for name, item in objects.items():
                revision, text = int(item["metadata"]["resourceVersion"]), item.get("data", {}).get("text")
                if name.startswith("writer-") and changes.get(revision, ())[1:] != (name, text):
                    problems.append(f"{watcher.name}: a list at {first} has {name} of {revision} with {text}")
            events = [event for event in events if event[1].startswith("writer-")]
            seen = {revision: (kind, name, text) for kind, name, revision, text in events if kind != "DELETED"}
            wanted = {revision: change for revision, change in changes.items() if first < revision <= last}
            if seen != wanted:
                wrong = sorted(set(seen.items()) ^ set(wanted.items()))
                problems.append(f"{watcher.name} from {first} to {last}: {wrong[:4]}")
            state = {name for name in objects if name.startswith("writer-")}
            for kind, name, revision, _ in events:
                if (kind == "ADDED") == (name in state):
                    before = "existed" if name in state else "did not exist"
                    problems.append(f"{watcher.name}: {kind} of {name} at {revision}, which {before}")
                (state.discard if kind == "DELETED" else state.add)(name)
            if last == watcher.until and state != set(known):
                problems.append(f"{watcher.name} has {sorted(state ^ set(known))} too much or too little")


class Server:
    """A control plane, without controllers and scheduler, which would write too."""

    def __init__(self, program, directory, host, flags=()):
        self.directory, self.host = directory, host
        os.makedirs(directory, exist_ok=True)
        tokens = os.path.join(directory, "tokens")
        with open(tokens, "w") as file:
            file.write(f'{TOKEN},admin,1,"system:masters"\n')
        self.log = open(os.path.join(directory, "log"), "ab")
        places = ["--state-dir", directory + "/state", "--run-dir", directory + "/run", "--token-auth-file", tokens]
        self.words = [program, "controlplane", "--controllers=-*", "--scheduler=false", *places, *flags]
        self.words += ["--listen", f"{host}:{PORT}"]
        self.process = None

    def copy_keys(self, other):
        """Uses the authority and the key file of another control plane of the cluster."""
        shutil.copytree(other.directory + "/state/pki", self.directory + "/state/pki")
        shutil.copy2(other.directory + "/state/sealing.key", self.directory + "/state/sealing.key")

    def start(self):
        self.process = subprocess.Popen(self.words, stdout=self.log, stderr=self.log)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            connection = connect(host=self.host)
            try:
                if send(connection, "GET", MAPS + "?limit=1")[0] == 200:
                    return
            except GONE:
                pass
            finally:
                connection.close()
            if self.process.poll() is not None:
                sys.exit(f"the control plane ended with {self.process.returncode}")
            time.sleep(0.005)
        sys.exit("the control plane is not ready after 60 s")

    def kill(self):
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def print_log(self):
        print(f"end of {self.log.name}:", file=sys.stderr)
        with open(self.log.name, errors="replace") as file:
            sys.stderr.writelines(collections.deque(file, 20))


class Embedded:
    """A control plane with its own store."""

    late, life = False, LIFE

    def __init__(self, program, directory):
        self.server = Server(program, directory, HOSTS[0])
        self.processes = [self.server]

    def start(self):
        self.server.start()

    def fail(self, chance):
        self.server.kill()
        self.server.start()


class OnEtcd:
    """Two control planes that share one etcd."""

    late, life = True, LIFE_ON_ETCD

    def __init__(self, program, directory, etcd):
        HOSTS.append("127.0.0.2")
        self.etcd = Etcd(etcd, directory + "/etcd")
        # Only this program compacts the history.
        flags = ["--etcd-servers", self.etcd.url, "--etcd-compaction-interval", "0"]
        self.servers = [Server(program, f"{directory}/{host}", host, flags) for host in HOSTS]
        self.processes = [*self.servers, self.etcd]

    def start(self):
        self.etcd.start()
        first, second = self.servers
        first.start()
        second.copy_keys(first)
        second.start()

    def fail(self, chance):
        """One fault. Afterwards all processes run, and etcd serves requests."""
        kind, server = chance.choice(["server", "server", "etcd", "both", "stop", "compact"]), chance.choice(self.servers)
        if kind == "server":
            server.kill()
            server.start()
        elif kind == "stop":
            # After 8 s the control planes end their requests.
            self.etcd.stop(chance.choice([chance.uniform(0.1, 3)] * 9 + [10]))
        elif kind == "compact":
            self.etcd.compact()
        else:
            self.etcd.kill()
            if kind == "both":
                server.kill()
            time.sleep(chance.uniform(0, 1))
            self.etcd.start()
            if chance.random() < 0.5:
                # The watches of the control planes are not connected again, and miss the compacted revisions.
                self.etcd.compact()
            if kind == "both":
                server.start()


def main():
    program, directory, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
    seed = int(os.environ.get("KILLS_SEED", time.time_ns() % 1_000_000))
    threading.excepthook = thread_ended
    cluster = OnEtcd(program, directory, sys.argv[4]) if len(sys.argv) > 4 else Embedded(program, directory)
    is_right = False
    try:
        is_right = run(cluster, kills, seed)
    finally:
        # After an error too: the processes would outlive this program.
        for process in cluster.processes:
            process.kill()
        if not is_right:
            print(f"seed {seed}", file=sys.stderr)
            for process in cluster.processes:
                process.print_log()
    return not is_right


def run(cluster, kills, seed):
    """Whether the histories of all clients are right."""
    chance = random.Random(seed)
    cluster.start()
    writers = [Writer(number, seed + number, cluster.late) for number in range(WRITERS)]
    watchers = [Watcher(number) for number in range(WATCHERS)]
    for client in writers + watchers:
        client.daemon = True
        client.start()
    for _ in range(kills):
        time.sleep(chance.uniform(*cluster.life))
        cluster.fail(chance)
    stopped.set()
    for writer in writers:
        writer.join(60)
        if writer.is_alive():
            problems.append(f"{writer.name} does not end")
    if cluster.late:
        time.sleep(LATE)
    # One more change, so that each watch reaches a revision after all others.
    last = ask("POST", MAPS, {"metadata": {"name": "last"}})[1]
    revision = last["metadata"]["resourceVersion"]
    for watcher in watchers:
        watcher.until = int(revision)
    for watcher in watchers:
        watcher.join(60)
        if watcher.is_alive():
            problems.append(f"{watcher.name} did not get the last change")
    check(writers, watchers, ask("GET", f"{MAPS}?resourceVersion={revision}")[1])
    writes = [sum(getattr(writer, name) for writer in writers) for name in ("acknowledged", "uncertain", "applied")]
    spans = [span for watcher in watchers for span in watcher.spans if span]
    print(f"seed {seed}, {kills} faults: {writes[0]} acknowledged writes; {writes[1]} writes without a response, of which "
          f"{writes[2]} took effect; {sum(len(span[2]) for span in spans)} events in "
          f"{sum(watcher.resumed for watcher in watchers)} watches after {len(spans)} lists")
    for problem in problems[:20]:
        print(f"problem: {problem}")
    return not problems


if __name__ == "__main__":
    sys.exit(main())

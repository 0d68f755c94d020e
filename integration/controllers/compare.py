#!/usr/bin/env python3
"""Compares the objects that our controllers and kube-controller-manager create in the same random histories.

compare.py THEIRS OURS TOKEN FIRST LAST PARALLEL: URLs of two API servers of the same program, a token of an administrator,
and the seeds. A difference is a line: seed, theme, object, place, theirs, ours, separated by tabs; the steps so far are
above it. Intended differences are left out: each line of intended.txt is a regular expression of the part of such a line
behind the seed, a tab, `# ` and the reason. Fails if there is a difference.
"""

import collections
import concurrent.futures
import pathlib
import re
import sys
import threading
import time
import traceback

from cluster import MERGE, Cluster
from history import THEMES, History
from kubelet import Kubelet
from normal import Names, rows, snapshot

HERE = pathlib.Path(__file__).resolve().parent
LENGTH = 14
# Seconds without a write after which a history counts as quiet, and after which a difference counts as final.
QUIET = 0.8
FINAL = 14
# Autoscalers are reconciled every 15 s.
FINAL_OF_AUTOSCALERS = 32
# Pods of an absent node are deleted after upstream's quarantine of 40 s, in a loop of 20 s.
FINAL_OF_NODES = 80
STOP = threading.Event()


def intended():
    lines = (HERE / "intended.txt").read_text().splitlines()
    return [re.compile(line.split("\t# ")[0]) for line in lines if line and not line.startswith("#")]


class Run:
    """One history on both clusters."""

    def __init__(self, seed, clusters, patterns):
        self.history, self.clusters, self.patterns = History(seed), clusters, patterns
        self.names = [Names(self.history.scope) for _ in clusters]
        self.kubelets = [Kubelet(cluster, names, seed) for cluster, names in zip(clusters, self.names)]
        for cluster, names in zip(clusters, self.names):
            cluster.listeners[self.history.scope] = names.learn
        self.known, self.found, self.steps, self.done = set(), [], [], 0

    def request(self, cluster, step):
        path = cluster.path(step["resource"], self.history.scope, step.get("name"), step.get("part"))
        media = MERGE if step["method"] == "PATCH" else "application/json"
        code, answer = cluster.send(step["method"], path, step["body"], media)
        return code, answer.get("message", "") if isinstance(answer, dict) and code >= 400 else ""

    def apply(self, step):
        """Does the step on both clusters at the same time. The codes of the responses are compared too."""
        def one(side):
            if "act" in step:
                return self.kubelets[side].run(step)
            return self.request(self.clusters[side], step)[0]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, (0, 1)))

    def differences(self):
        theirs, ours = (snapshot(cluster, names) for cluster, names in zip(self.clusters, self.names))
        for row in rows(theirs, ours):
            if row not in self.known:
                line = "\t".join((self.history.theme, *row))
                if not any(pattern.search(line) for pattern in self.patterns):
                    yield row

    def settle(self, limit):
        """Waits until both clusters are quiet and equal. Returns the differences that remain."""
        start = time.monotonic()
        while True:
            last = max(cluster.changed.get(self.history.scope, 0) for cluster in self.clusters)
            idle = time.monotonic() - max(last, start)
            if idle < QUIET:
                time.sleep(QUIET - idle)
                continue
            found = list(self.differences())
            if not found or time.monotonic() - start > limit:
                return found
            time.sleep(0.4)

    def run(self):
        away = False
        for step in self.history.steps(LENGTH):
            if STOP.is_set():
                return
            codes = self.apply(step)
            self.steps.append(f"{step['text']} -> {codes[0]}")
            self.done += 1
            away |= step.get("method") == "DELETE" and step["resource"] in ("nodes", "namespaces")
            found = [("response", step["text"], *map(str, codes))] if codes[0] != codes[1] else []
            if step.get("hasty"):
                time.sleep(1)
                continue
            usual = FINAL_OF_AUTOSCALERS if self.history.theme == "policy" else FINAL
            found += self.settle(FINAL_OF_NODES if away else usual)
            if found:
                self.report(found)
                if len(self.known) > 60:
                    return

    def report(self, found):
        self.known |= set(found)
        self.found += found
        text = [f"-- seed {self.history.seed}, theme {self.history.theme}, after:"]
        text += [f"     {number}: {step[:200]}" for number, step in enumerate(self.steps)]
        text += ["\t".join((str(self.history.seed), self.history.theme, *row)) for row in found]
        print("\n".join(text), flush=True)


def heartbeats(runs):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        while not STOP.wait(6):
            list(pool.map(Kubelet.heartbeat, [kubelet for run in list(runs) for kubelet in run.kubelets]))


def main():
    theirs, ours, token, first, last, parallel = sys.argv[1:7]
    clusters = [Cluster("kube-controller-manager", theirs, token), Cluster("coracle", ours, token)]
    for cluster in clusters:
        cluster.follow()
    patterns, runs, totals, failed = intended(), [], collections.Counter(), []
    threading.Thread(target=heartbeats, args=(runs,), daemon=True).start()

    def one(seed):
        run = Run(seed, clusters, patterns)
        runs.append(run)
        try:
            run.run()
        except Exception:
            traceback.print_exc()
            failed.append(seed)
        runs.remove(run)
        totals["steps"] += run.done
        totals[f"theme {run.history.theme}"] += 1
        totals["different"] += bool(run.found)
        print(f"seed {seed} ({run.history.theme}): {run.done} steps, {len(run.found)} differences", flush=True)

    with concurrent.futures.ThreadPoolExecutor(int(parallel)) as pool:
        list(pool.map(one, range(int(first), int(last) + 1)))
    STOP.set()
    count = int(last) - int(first) + 1
    print(f"{count} histories, {totals['steps']} steps, {totals['different']} histories with differences;",
          ", ".join(f"{theme} {totals[f'theme {theme}']}" for theme in dict.fromkeys(THEMES)))
    sys.exit(bool(totals["different"] or failed))


main()

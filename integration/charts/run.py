#!/usr/bin/env python3
"""run.py TOOLS PART…: the charts in local clusters, for scripts/test-charts. TOOLS is a JSON object with the paths of the
programs. Prints each check; fails if one fails."""
import json, os, shutil, signal, sys, tempfile, time

import checks
from cluster import Cluster
from database import Database
from ingress import Ingress
from message_queue import Queue
from metrics import Metrics

PARTS = {"database": Database, "queue": Queue, "ingress": Ingress, "metrics": Metrics}


def run_part(tools, name):
    """Whether all checks of a part passed."""
    start, before = time.monotonic(), len(checks.failures)
    print(f"== {name}", flush=True)
    # Not below the checkout: the state of containers needs a file system that overlayfs can stand on.
    work = tempfile.mkdtemp(prefix="charts-")
    cluster, done = Cluster(tools, "charts", work), False
    part = PARTS[name](cluster)
    try:
        cluster.create(part.images)
        part.lifecycle()
        done = True
    finally:
        failed = not done or len(checks.failures) > before
        if failed:
            cluster.report(part.chart)
        if failed and os.environ.get("KEEP"):
            print(f"kept: {work}; `coracle cluster delete charts --state-dir {work}/state --run-dir {work}/run` removes the cluster")
            cluster.end_registry()
        else:
            cluster.delete()
            shutil.rmtree(work)
    print(f"-- {name}: {time.monotonic() - start:.0f} s", flush=True)
    return not failed


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tools, parts = json.loads(sys.argv[1]), sys.argv[2:]
    for name in parts:
        if not run_part(tools, name) and os.environ.get("KEEP"):
            break
    print(f"{len(checks.failures)} checks failed" if checks.failures else "all checks passed")
    sys.exit(1 if checks.failures else 0)


main()

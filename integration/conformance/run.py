#!/usr/bin/env python3
"""Runs specs of Kubernetes' conformance suite against the cluster that `cluster start` created, and compares the outcome
with the recorded one (specs.txt). scripts/conformance calls it; `run.py --help` lists the options."""

import argparse
import collections
import hashlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / "target/conformance"
RECORD = {suite: HERE / name for suite, name in (("conformance", "specs.txt"), ("other", "other-specs.txt"), ("serial", "serial-specs.txt"))}
EXCEPTIONS = HERE / "exceptions.txt"
CI = HERE / "ci.txt"

# FEATURES: features whose specs outside the conformance suite run. LEFT_OUT: marks of specs that do not run. These need a
# cloud, a driver or a feature gate that is off by default, or they change the machine.
FEATURES = ("IPv6DualStack|NetworkPolicy|SCTPConnectivity|Networking-IPv4|Networking-DNS|HPA|Ingress|PodPriority|NodeAuthorizer|"
            "BootstrapTokens|PodLevelResources|EnvFiles|InPlacePodVerticalScaling|SupplementalGroupsPolicy|UserNamespacesSupport|"
            "HostAccess|Example|ContainerRestartRules|RuntimeHandler|SchedulerAsyncPreemption|VolumeAttributesClass|"
            "DynamicResourceAllocation|LoadBalancer")
LEFT_OUT = re.compile(r"\[(Conformance|Disruptive|Flaky|Deprecated|Alpha|BetaOffByDefault|"
                            r"sig-(windows|cloud-provider|cloud-provider-gcp|autoscaling)|Driver:|"
                            fr"Feature:(?!({FEATURES})\]))|CSI Mock")

# Marks of the specs of the suite `serial`. ginkgo runs serial specs one at a time, after the others. Slow specs take minutes.
ONE_AT_A_TIME = re.compile(r"\[(Serial|Slow)\]")

# Retries of a failed spec that should pass.
ATTEMPTS = 3

# Number of specs in one call of ginkgo. After an interruption at most these run again.
CHUNK = 40


def lines(path):
    """The lines of a text file without comments and empty lines."""
    text = path.read_text() if path.exists() else ""
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def reports(path):
    """Yields (name, report) of each spec in a JSON report of ginkgo."""
    for suite in json.loads(path.read_text()):
        for spec in suite["SpecReports"] or []:
            if spec["LeafNodeType"] == "It":
                yield " ".join((spec["ContainerHierarchyTexts"] or []) + [spec["LeafNodeText"]]), spec


def all_specs(binaries, suite):
    """The names of the specs of `conformance`, `other` or `serial`, from a dry run of the suite."""
    path = binaries / "dry-all.json"
    if not path.exists():
        dry = ["--provider=skeleton", "--ginkgo.dry-run", f"--ginkgo.json-report={path}"]
        subprocess.run([binaries / "e2e.test", *dry], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    names = {name for name, _ in reports(path)}
    if suite == "conformance":
        return sorted(name for name in names if "[Conformance]" in name)
    names = {name for name in names if name.startswith("[sig-") and not LEFT_OUT.search(name)}
    return sorted(name for name in names if (suite == "serial") == bool(ONE_AT_A_TIME.search(name)))


def group(name):
    """The group of a spec: `node` for `[sig-node] …`."""
    return re.match(r"\[sig-([a-z-]+)\]", name).group(1)


def recorded(suite):
    """The recorded state of each spec: `passed`, `failed` or `skipped`."""
    return {name: state for state, name in (line.split("\t")[:2] for line in lines(RECORD[suite]))}


def recorded_skips(suite):
    """The recorded reason of each spec that skipped itself."""
    rows = (line.split("\t") for line in lines(RECORD[suite]))
    return {row[1]: row[2] for row in rows if row[0] == "skipped"}


def may_lower_oom_score():
    """Whether processes here may get a negative oom_score_adj, as the containers of Guaranteed pods have."""
    path = pathlib.Path("/proc/self/oom_score_adj")
    before = path.read_text()
    try:
        path.write_text("-1")
    except PermissionError:
        return False
    path.write_text(before)
    return True


def exceptions(specs):
    """The specs that are not run, with the reason. A line of exceptions.txt holds for all specs with its text."""
    texts = dict(line.split("\t", 1) for line in lines(EXCEPTIONS))
    skipped = {name: reason for text, reason in texts.items() for name in specs if text in name}
    if os.environ.get("STOCK"):
        skipped.update({name: "kube-controller-manager has no controller of load balancers" for name in specs
                        if "[Feature:LoadBalancer]" in name})
    try:
        # The kernel loads the module for the first socket. 132 is the protocol number of SCTP.
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132).close()
    except OSError:
        skipped.update({name: "this kernel has no SCTP sockets" for name in specs if "[Feature:SCTPConnectivity]" in name})
    if subprocess.run(["unshare", "--net", "ip", "link", "add", "dummy1", "type", "dummy"], capture_output=True).returncode:
        skipped.update({name: "this kernel has no dummy interfaces" for name in specs
                        if "should enable privileged commands" in name})
    if not may_lower_oom_score():
        skipped.update({name: "this machine permits no negative oom_score_adj, which the spec reads after a restart"
                        for name in specs if re.search(r"guaranteed qos - .*(cpu|mem) restart", name)})
    try:
        os.readlink("/proc/1/ns/mnt")
    except PermissionError:
        skipped.update({name: "programs here cannot enter the namespaces of process 1" for name in specs
                        if "PersistentVolumes-local" in name or "Mount propagation" in name})
    return skipped


class Results:
    """Results of one binary, kept on disk, so that an interrupted run continues where it stopped. Results with
    STOCK=1 have their own file."""

    def __init__(self, coracle):
        digest = hashlib.sha256(pathlib.Path(coracle).read_bytes()).hexdigest()[:16]
        stock = "-stock" if os.environ.get("STOCK") else ""
        self.path = WORK / f"results-{digest}{stock}.json"
        self.of = json.loads(self.path.read_text()) if self.path.exists() else {}

    def add(self, results):
        self.of.update(results)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.of, indent=1, sort_keys=True))
        new.rename(self.path)


def ginkgo(binaries, names, processes, minutes, title):
    """Runs these specs and returns the result of each: state, seconds and message. A spec has the state `lost` when
    the suite ended without a report of it."""
    folder = WORK / "reports"
    folder.mkdir(parents=True, exist_ok=True)
    report, log = folder / f"{title}.json", folder / f"{title}.log"
    report.unlink(missing_ok=True)
    focus = "(" + "|".join(re.escape(name) for name in names) + ")$"
    path = f"{WORK / 'path'}:{os.environ['PATH']}"
    command = [
        HERE / "cluster", "run", binaries / "ginkgo", "run", f"--procs={processes}", f"--timeout={minutes}m", "--no-color",
        f"--focus={focus}", "--seed=1", f"--output-dir={folder}", f"--json-report={title}.json", binaries / "e2e.test", "--",
        f"--kubeconfig={WORK / 'cluster/plane/admin.kubeconfig'}", "--provider=skeleton", f"--kubectl-path={WORK / 'path/kubectl'}",
        # Each process of the suite needs this number, because only the first process counts the nodes itself.
        f"--num-nodes={os.environ.get('NODES') or 2}",
        "--minStartupPods=0", "--allowed-not-ready-nodes=0", "--system-pods-startup-timeout=30s", "--node-schedulable-timeout=1m",
        "--system-daemonsets-startup-timeout=1s", "--dump-logs-on-failure=true", "--disable-log-dump=true",
    ]
    with open(log, "w") as output:
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                       env={**os.environ, "PATH": path}, cwd=folder)
    results = {name: {"state": "lost", "seconds": 0, "message": f"no report; see {log}"} for name in names}
    for name, spec in reports(report) if report.exists() else []:
        failure = spec.get("Failure") or {}
        # A spec that the focus leaves out is reported as skipped, without a message.
        if name in results and (spec["State"] != "skipped" or failure.get("Message")):
            message = re.sub(r"\s+", " ", failure.get("Message", ""))[:300]
            place = failure.get("Location") or {}
            if message:
                message += f" ({place.get('FileName', '').split('kubernetes@')[-1]}:{place.get('LineNumber')})"
            results[name] = {"state": spec["State"], "seconds": round(spec["RunTime"] / 1e9), "message": message}
    return results


def chunks(names, options):
    """Yields (title, specs) of each call of ginkgo. The slice of CI is one chunk, because a call takes ten seconds before its
    first spec begins. Other chunks have specs of one group."""
    if options.groups == ["ci"]:
        yield "ci", names
        return
    by_group = collections.defaultdict(list)
    for name in names:
        by_group[group(name)].append(name)
    for title, members in sorted(by_group.items()):
        for start in range(0, len(members), CHUNK):
            yield f"{title}-{start // CHUNK}", members[start:start + CHUNK]


def run(binaries, names, results, options):
    """Runs the specs that have no result yet, in chunks."""
    missing = [name for name in names if options.again or name not in results.of]
    for title, chunk in chunks(missing, options):
        if chunk:
            print(f"{title}: {len(chunk)} specs", flush=True)
            results.add(ginkgo(binaries, chunk, options.processes, options.minutes, title))


def failures(names, results, record, suite):
    """The specs that are recorded as passed and fail. Outside conformance, a spec may skip itself where the machine or
    the cluster lacks what it needs."""
    accepted = ("passed",) if suite == "conformance" else ("passed", "skipped")
    return [name for name in names if record.get(name) == "passed" and results.of[name]["state"] not in accepted]


def retry(binaries, names, results, record, options):
    """Runs failed specs that should have passed again, without other specs. Some specs race with the node: `lifecycle of Pods
    and PodStatus` expects a pod to be ready a few milliseconds after its image changed."""
    for _ in range(ATTEMPTS):
        suspects = failures(names, results, record, options.suite)
        if not suspects:
            return
        print(f"again, one at a time: {len(suspects)} specs", flush=True)
        again = ginkgo(binaries, suspects, 1, options.minutes, "again")
        for name, result in again.items():
            if result["state"] == "passed":
                print(f"FLAKY {name}\n    first: {results.of[name]['message']}")
        results.add(again)


def table(names, results, specs, skipped):
    """Prints a row for each group: specs of the suite, run now, passed, failed, not run by decision."""
    print("\n| group | specs | run | passed | failed | exceptions |\n|---|---|---|---|---|---|")
    rows = collections.OrderedDict((title, [0] * 5) for title in sorted({group(name) for name in names}) + ["total"])
    for name in specs:
        for title in (group(name), "total"):
            if title in rows:
                rows[title][0] += 1
                rows[title][4] += name in skipped
    for name in names:
        for title in (group(name), "total"):
            passed = results.of[name]["state"] == "passed"
            rows[title][1] += 1
            rows[title][2] += passed
            rows[title][3] += not passed
    for title, row in rows.items():
        print(f"| {title} | " + " | ".join(str(count) for count in row) + " |")


def write_record(specs, record, skips, suite):
    """Writes the record of these specs; a spec that never ran is recorded as failed. Outside conformance,
    only passed specs and skipped specs (with the reason) are recorded. Many specs need features that no cluster here has."""
    flag = "" if suite == "conformance" else f" --{suite}"
    head = (f"# Outcome of each {suite} spec of Kubernetes v1.36.0. `scripts/conformance{flag} --record` writes this file;\n"
            "# a spec that is `passed` here and does not pass fails the run.\n")
    kept = []
    for name in specs:
        state = record.get(name, "failed")
        if suite == "conformance" or state == "passed":
            kept.append(f"{state}\t{name}\n")
        elif name in skips:
            kept.append(f"skipped\t{name}\t{skips[name]}\n")
    RECORD[suite].write_text(head + "".join(kept))


def selected(specs, options, record):
    """The names to run: those of the groups, or of CI, without exceptions."""
    chosen = set()
    for title in options.groups or sorted({group(name) for name in specs}):
        members = set(lines(CI)) if title == "ci" else {name for name in specs if group(name) == title}
        if not members:
            sys.exit(f"conformance: no group {title}; there are: ci {' '.join(sorted({group(name) for name in specs}))}")
        chosen |= members
    unknown = chosen - set(specs)
    if unknown:
        sys.exit(f"conformance: ci.txt names specs that the suite does not have: {sorted(unknown)}")
    if options.spec:
        chosen = {name for name in chosen if any(text in name for text in options.spec)}
    if options.recorded:
        chosen = {name for name in chosen if record.get(name) == "passed"}
    return sorted(chosen - set(exceptions(specs)))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binaries", type=pathlib.Path, help="the folder that `build` prints")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="ci, or groups of the suite; default: all")
    suites = parser.add_mutually_exclusive_group()
    suites.add_argument("--other", dest="suite", action="store_const", const="other", default="conformance",
                        help="specs outside conformance that can run in parallel and take less than minutes")
    suites.add_argument("--serial", dest="suite", action="store_const", const="serial",
                        help="specs outside conformance that run alone or take minutes")
    parser.add_argument("--recorded", action="store_true", help="only specs that passed when the record was written")
    parser.add_argument("--spec", action="append", metavar="TEXT", help="only specs with this text in their name; repeatable")
    parser.add_argument("--record", action="store_true", help="write the outcome to the record of the suite")
    parser.add_argument("--again", action="store_true", help="also specs that have a result of this binary")
    parser.add_argument("--processes", type=int, default=6, help="specs at the same time; default 6")
    parser.add_argument("--minutes", type=int, default=60, help="time limit of a chunk of specs; default 60")
    return parser.parse_intermixed_args()


def main():
    options = arguments()
    coracle = os.environ.get("CORACLE", ROOT / "target/coracle")
    specs, record = all_specs(options.binaries, options.suite), recorded(options.suite)
    skipped = exceptions(specs)
    names, results = selected(specs, options, record), Results(coracle)
    run(options.binaries, names, results, options)
    retry(options.binaries, names, results, record, options)
    for name in names:
        result = results.of[name]
        if result["state"] != "passed":
            print(f"{result['state'].upper()} {result['seconds']}s {name}\n    {result['message']}")
    table(names, results, specs, skipped)
    regressions = failures(names, results, record, options.suite)
    news = [name for name in names if record.get(name) != "passed" and results.of[name]["state"] == "passed"]
    for name in news:
        print(f"passes now: {name}")
    for name in regressions:
        print(f"REGRESSION {name}")
    if options.record:
        skipped_now = {} if options.suite == "conformance" else {
            name: results.of[name]["message"] for name in names if results.of[name]["state"] == "skipped"}
        outcome = {name: "passed" if results.of[name]["state"] == "passed" else "failed"
                   for name in names if name not in skipped_now}
        # A spec that ran now has no reason for a skip.
        skips = {name: reason for name, reason in recorded_skips(options.suite).items() if name not in outcome}
        write_record(specs, {**record, **outcome}, {**skips, **skipped_now}, options.suite)
    passed = sum(results.of[name]["state"] == "passed" for name in names)
    others = len(names) - passed - len(regressions)
    print(f"{passed} passed, {len(regressions)} failed that are recorded as passed, {others} others did not pass")
    sys.exit(1 if regressions and not options.record else 0)


if __name__ == "__main__":
    main()

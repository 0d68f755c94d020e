#!/usr/bin/env python3
"""Compares the decisions of our scheduler with those of kube-scheduler's plugins on random clusters.

compare.py OURS THEIRS FIRST COUNT: the programs that decide, the first seed, and the number of cases. Prints a line for
each difference: seed, pod, place, theirs, ours. A case ends at its first difference, because the later decisions depend
on the earlier ones. Fails if there is a difference. Also fails if many cases do not exercise a part of the scheduler.
"""

import collections
import json
import subprocess
import sys

from cases import Generator

# Code paths that the cases must exercise.
PARTS = ["bound", "refused", "made room", "pre-filter", "gated"]
# Kinds of cases that must occur.
KINDS = ["configuration", "devices", "disks", "gates"]
# The number of cases from which a part or kind must occur. Cases with devices are rare.
NEEDED_FROM = collections.defaultdict(lambda: 100, devices=300)


def start(command):
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def differences(theirs, ours):
    """Yields (place, theirs, ours) of two decisions."""
    one, other = theirs.get("scores", {}), ours.get("scores", {})
    if one.keys() != other.keys():
        yield "feasible", sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())
        return
    for node in one:
        for plugin in one[node].keys() | other[node].keys():
            if one[node].get(plugin, 0) != other[node].get(plugin, 0):
                yield f"{node} {plugin}", one[node].get(plugin, 0), other[node].get(plugin, 0)
    if "victims" in theirs or "victims" in ours:
        # Upstream picks one of the nodes with the least harm at random.
        if theirs.get("victims") != ours.get("victims"):
            yield "victims", theirs.get("victims"), ours.get("victims")
        elif not set(theirs["nominated"]) <= set(ours["nominated"]):
            yield "nominated", theirs["nominated"], ours["nominated"]
        return
    if theirs.get("message", "") != ours.get("message", ""):
        yield "message", theirs.get("message"), ours.get("message")


def part(decision):
    if "scores" in decision:
        return "bound"
    if "victims" in decision:
        return "made room"
    if decision["message"] == "gated":
        return "gated"
    reason = decision["message"].split("available: ")[-1]
    return "refused" if reason[:1].isdigit() else "pre-filter"


def main():
    ours, theirs, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    programs = [start([theirs]), start([ours])]
    counts, different, pods = collections.Counter(), 0, 0
    for seed in range(first, first + count):
        generator = Generator(seed)
        case = generator.case()
        counts.update(generator.kinds)
        text = json.dumps(case)
        for program in programs:
            program.stdin.write(text + "\n")
            program.stdin.flush()
        decisions = [json.loads(program.stdout.readline()) for program in programs]
        for one, other in zip(*decisions, strict=True):
            pods += 1
            counts[part(one)] += 1
            found = list(differences(one, other))
            for place, theirs, ours in found:
                print(seed, one["pod"], place, json.dumps(theirs), json.dumps(ours), sep="\t")
            if found:
                different += 1
                break
    for program in programs:
        program.stdin.close()
        program.wait()
    print(f"{count} cases, {pods} pods:", ", ".join(f"{name} {counts[name]}" for name in PARTS + KINDS))
    missing = [name for name in PARTS + KINDS if not counts[name] and count >= NEEDED_FROM[name]]
    if different or missing:
        print(f"{different} cases differ", f"not exercised: {missing}" if missing else "")
        sys.exit(1)


main()

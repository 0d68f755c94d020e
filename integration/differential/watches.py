"""Lists in pages, and watches: events, bookmarks, initial events, tables, objects that leave a selector."""
import concurrent.futures
import http.client
import json
import re
import ssl

SPACE = "watches"
CORE = f"/api/v1/namespaces/{SPACE}"
MAPS, PODS = CORE + "/configmaps", CORE + "/pods"
MERGE = "application/merge-patch+json"
TABLE, PARTIAL = (f"application/json;as={form};g=meta.k8s.io;v=v1" for form in ("Table", "PartialObjectMetadata"))
PARTIAL_LIST = PARTIAL.replace("Metadata;", "MetadataList;")
# The objects that exist when a watch begins. Their initial events have no defined order.
FIRST = [f"first-{number}" for number in range(3)]
# Annotation of the bookmark after the initial events.
INITIAL_END = "k8s.io/initial-events-end"
# Duration of a watch in seconds. Upstream sends a bookmark two seconds before the end.
SECONDS = 5


def labelled(name, **labels):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}, "data": {"a": "b"}}


def pod(name):
    spec = {"automountServiceAccountToken": False, "containers": [{"name": "c", "image": "x"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def label(name, value):
    return ("PATCH", f"{MAPS}/{name}", {"metadata": {"labels": {"in": value}}}, MERGE)


# An object in the selector `in=yes` is created, changed, leaves, changes outside, comes back, and is deleted in it.
CHANGES = [
    ("POST", MAPS, labelled("changed", **{"in": "yes"})), ("POST", MAPS, labelled("other")),
    ("PATCH", MAPS + "/changed", {"data": {"a": "c"}}, MERGE), label("changed", "no"),
    ("PATCH", MAPS + "/changed", {"data": {"a": "d"}}, MERGE), label("changed", "yes"), ("DELETE", MAPS + "/other"),
    ("DELETE", MAPS + "/changed"),
]
# A pod leaves the selector `status.phase=Pending`.
POD_CHANGES = [
    ("POST", PODS, pod("leaves")), ("PATCH", PODS + "/leaves/status", {"status": {"phase": "Running"}}, MERGE),
    ("DELETE", PODS + "/leaves?gracePeriodSeconds=0"),
]
POD_DELETION = [("POST", PODS, pod("deleted")), ("DELETE", PODS + "/deleted?gracePeriodSeconds=0")]
INITIAL = "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
# Name, path, query, changes and Accept header of each watch. REVISION is that of a list before the changes.
WATCHES = [
    ("from a revision", MAPS, "&resourceVersion=REVISION", CHANGES, None),
    ("a label selector", MAPS, "&resourceVersion=REVISION&labelSelector=in%3Dyes", CHANGES, None),
    ("a label selector that others leave", MAPS, "&resourceVersion=REVISION&labelSelector=in!%3Dyes", CHANGES, None),
    ("a field selector", MAPS, "&resourceVersion=REVISION&fieldSelector=metadata.name%3Dchanged", CHANGES, None),
    ("a field selector of a status", PODS, "&resourceVersion=REVISION&fieldSelector=status.phase%3DPending", POD_CHANGES, None),
    ("a deletion of a pod", PODS, "&resourceVersion=REVISION", POD_DELETION, None),
    ("revision 0", MAPS, "&resourceVersion=0", CHANGES, None),
    ("no revision", MAPS, "", CHANGES, None),
    ("bookmarks", MAPS, "&resourceVersion=REVISION&allowWatchBookmarks=true", CHANGES, None),
    ("initial events", MAPS, INITIAL, CHANGES, None),
    ("initial events of a selector", MAPS, INITIAL + "&labelSelector=in%3Dyes", CHANGES, None),
    ("initial events from a revision", MAPS, INITIAL + "&resourceVersion=REVISION", CHANGES, None),
    ("initial events as a table", MAPS, INITIAL, CHANGES, TABLE),
    ("initial events without bookmarks", MAPS, INITIAL.replace("&allowWatchBookmarks=true", ""), CHANGES, None),
    ("initial events without a match", MAPS, "&sendInitialEvents=true&allowWatchBookmarks=true", [], None),
    ("a table", MAPS, "&resourceVersion=REVISION", CHANGES, TABLE),
    ("a table without objects", MAPS, "&resourceVersion=REVISION&includeObject=None", CHANGES, TABLE),
    ("a table of whole objects", MAPS, "&resourceVersion=REVISION&includeObject=Object", CHANGES, TABLE),
    ("metadata", MAPS, "&resourceVersion=REVISION", CHANGES, PARTIAL),
    ("the path of watches", MAPS.replace("/api/v1/", "/api/v1/watch/"), "&resourceVersion=REVISION", CHANGES, None),
    ("the path of a watch of one object", MAPS.replace("/api/v1/", "/api/v1/watch/") + "/changed", "&resourceVersion=REVISION",
     CHANGES, None),
    ("all namespaces", "/api/v1/configmaps", "&resourceVersion=REVISION&labelSelector=in", CHANGES, None),
    ("an old revision", MAPS, "&resourceVersion=1", [], None),
    ("a limit", MAPS, "&resourceVersion=REVISION&limit=1", CHANGES, None),
    ("a continue token", MAPS, "&resourceVersion=REVISION&continue=x", [], None),
]
# Name, path, query and Accept header of each list. Its pages are followed to the end.
LISTS = [
    ("pages", MAPS, "?limit=3", None), ("a page of all", MAPS, "?limit=7", None), ("a page of more", MAPS, "?limit=500", None),
    ("no limit", MAPS, "?limit=0", None), ("pages of one", MAPS, "?limit=1", None),
    ("pages of a label selector", MAPS, "?limit=2&labelSelector=odd%3Dyes", None),
    ("pages of a field selector", MAPS, "?limit=2&fieldSelector=metadata.name!%3Dpage-3", None),
    ("pages without a match", MAPS, "?limit=2&labelSelector=odd%3Dnever", None),
    ("pages of a table", MAPS, "?limit=3", TABLE), ("pages of metadata", MAPS, "?limit=3", PARTIAL_LIST),
    ("pages of all namespaces", "/api/v1/configmaps", "?limit=3&labelSelector=odd", None),
    ("pages of revision 0", MAPS, "?limit=3&resourceVersion=0", None),
    ("pages of an exact revision", MAPS, "?limit=3&resourceVersionMatch=Exact&resourceVersion=REVISION", None),
    ("pages not older than a revision", MAPS, "?limit=3&resourceVersionMatch=NotOlderThan&resourceVersion=REVISION", None),
]


def reduced(value, clean):
    """The value without owners of fields, which other parts compare, and without what always differs."""
    value = clean(value)
    if isinstance(value, dict):
        return {name: [aged(cell) for cell in one] if name == "cells" else reduced(one, clean)
                for name, one in value.items() if name != "managedFields"}
    if isinstance(value, list):
        return [reduced(one, clean) for one in value]
    return value


def aged(cell):
    """A cell of a table without its age."""
    return "age" if isinstance(cell, str) and re.fullmatch(r"\d+[sm]\w*", cell) else cell


def revision(server, path):
    return server.send("GET", path + "?limit=1")[1]["metadata"]["resourceVersion"]


# === lists ===

def pages(server, path, query, accept, clean):
    """The pages of a list. An object that is created after the first page must not be in the others."""
    query = query.replace("REVISION", revision(server, MAPS))
    more = {} if accept is None else {"accept": accept}
    found, token, revisions = [], None, set()
    while len(found) < 20:
        # A revision beside a token is an error, which another case compares.
        rest = "&".join(word for word in query.lstrip("?").split("&") if not word.startswith("resourceVersion"))
        url = path + query if token is None else f"{path}?{rest}&continue={token}"
        code, body = server.send("GET", url, **more)
        page = {"code": code, "body": reduced(body, clean)}
        found.append(page)
        meta = body.get("metadata", {}) if isinstance(body, dict) else {}
        token = meta.get("continue")
        if code != 200:
            break
        revisions.add(meta.get("resourceVersion"))
        page["body"]["metadata"]["continue"] = bool(token)
        if not token:
            break
        if len(found) == 1:
            server.send("POST", MAPS, labelled("page-25", odd="yes"))
    server.send("DELETE", MAPS + "/page-25")
    return {"pages": found, "is of one revision": len(revisions) == 1}


def lists(test, clean):
    """Compares lists in pages: the objects of each page, `remainingItemCount`, and whether there is a token."""
    for server in (test.theirs, test.ours):
        prepare(server)
        for number in range(7):
            server.send("POST", MAPS, labelled(f"page-{number}", odd="yes" if number % 2 else "no"))
    for name, path, query, accept in LISTS:
        found = [pages(server, path, query, accept, clean) for server in (test.theirs, test.ours)]
        test.compare("lists", name, *found)
    for name, query in (("another limit", "limit=1"), ("no limit", ""), ("a revision", "resourceVersion=5"),
                        ("another selector", "labelSelector=odd%3Dno"), ("a match", "resourceVersionMatch=Exact")):
        found = []
        for server in (test.theirs, test.ours):
            token = server.send("GET", MAPS + "?limit=3")[1]["metadata"]["continue"]
            code, body = server.send("GET", f"{MAPS}?continue={token}&{query}")
            if isinstance(body.get("metadata"), dict) and "continue" in body["metadata"]:
                body["metadata"]["continue"] = True
            found.append({"code": code, "body": reduced(body, clean)})
        test.compare("lists", "the second page with " + name, *found)
    for server in (test.theirs, test.ours):
        server.send("DELETE", MAPS + "?labelSelector=odd")


# === watches ===

def events_of(text, clean):
    """The events of a watch. Bookmarks are reduced to their kind, and whether their revision is not before other events."""
    events, newest, bookmark = [], 0, None
    for line in text.splitlines():
        event = json.loads(line)
        value = event["object"]
        if event["type"] == "ERROR":
            events.append({"type": "ERROR", **{name: value.get(name) for name in ("kind", "code", "reason", "status")}})
            continue
        if event["type"] == "BOOKMARK":
            rows = value.get("rows")
            meta = rows[0]["object"]["metadata"] if rows else value["metadata"]
            is_end = meta.get("annotations", {}).get(INITIAL_END)
            shown = {"type": "BOOKMARK", "object": reduced(value, clean), "is newest": int(meta["resourceVersion"]) >= newest}
            if is_end:
                events.append(shown)
            else:
                # The number of these bookmarks and their places depend on timers.
                bookmark = shown
            continue
        meta = value.get("metadata", {})
        if meta.get("resourceVersion"):
            newest = max(newest, int(meta["resourceVersion"]))
        events.append({"type": event["type"], "object": reduced(value, clean)})
    initial = sum(is_first(event) for event in events)
    if initial and all(map(is_first, events[:initial])) and "Table" not in text:
        events[:initial] = sorted(events[:initial], key=lambda event: event["object"]["metadata"]["name"])
    return events, bookmark


def is_first(event):
    return event["type"] == "ADDED" and event["object"].get("metadata", {}).get("name") in FIRST


def follow(server, path, query, changes, accept, clean):
    """Watches while the changes are made, until the server ends the watch."""
    query = query.replace("REVISION", revision(server, PODS if path == PODS else MAPS))
    context = ssl._create_unverified_context()
    connection = http.client.HTTPSConnection(server.host, server.port, context=context, timeout=60)
    headers = {"Authorization": "Bearer differential", "Accept": accept or "application/json", "User-Agent": "differential/1"}
    try:
        connection.request("GET", f"{path}?watch=1&timeoutSeconds={SECONDS}{query}", headers=headers)
        answer = connection.getresponse()
        if answer.status != 200:
            body = json.loads(answer.read())
            return {"code": answer.status, "reason": body.get("reason"), "details": reduced(body.get("details"), clean)}
        codes = [server.send(*change)[0] for change in changes]
        events, bookmark = events_of(answer.read().decode(), clean)
    except (OSError, http.client.HTTPException) as error:
        return {"code": type(error).__name__}
    finally:
        connection.close()
    media = answer.headers.get("Content-Type")
    return {"code": 200, "media": media, "changes": codes, "events": events, "bookmark": bookmark}


def prepare(server):
    server.send("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
    server.send("POST", CORE + "/serviceaccounts", {"metadata": {"name": "default"}})


def watches(test, clean):
    """Compares the events of watches. Both servers get each watch at the same time, because it takes seconds."""
    servers = (test.theirs, test.ours)
    for server in servers:
        prepare(server)
        for name in FIRST:
            server.send("POST", MAPS, labelled(name, **{"in": "yes"}))
    with concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
        for name, path, query, changes, accept in WATCHES:
            watched = [pool.submit(follow, server, path, query, changes, accept, clean) for server in servers]
            test.compare("watches", name, *(one.result() for one in watched))
    for server in servers:
        server.send("DELETE", MAPS + "?labelSelector=in")

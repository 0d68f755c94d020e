//! Requests whose audit events are larger than the limit of the audit log.

use std::fs;
use std::path::Path;

use coracle_integration::{eventually, on_a_machine};
use serde_json::{Value, json};

use super::client::{EVE, Plane};
use super::make_eve_a_tenant;

/// Records the requests of the tenant with all details.
const POLICY: &str =
    "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: RequestResponse, users: [eve]}]\n";
const PODS: &str = "/api/v1/namespaces/default/pods";
const SECRET: &str = "/api/v1/namespaces/default/secrets/s";

/// A pod whose containers have long names. Pod Security lists them in an annotation of the event, for each violation.
fn pod_of_many_containers() -> String {
    let containers: Vec<Value> =
        (0..500).map(|number| json!({"name": format!("c{number:062}"), "image": "busybox"})).collect();
    json!({"metadata": {"name": "p"}, "spec": {"containers": containers}}).to_string()
}

/// The recorded responses to requests with this verb and status code. The last line of the log may be incomplete.
fn responses(log: &Path, verb: &str, code: u16) -> Vec<Value> {
    let text = fs::read_to_string(log).unwrap_or_default();
    let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let is_wanted = |event: &Value| {
        let status = &event["responseStatus"]["code"];
        event["stage"] == "ResponseComplete" && event["verb"] == verb && *status == code
    };
    events.filter(is_wanted).collect()
}

/// The log had no event of a request that was too large without its objects: a user could hide any request.
#[test]
fn long_texts_do_not_hide_a_request_from_the_audit_log() {
    on_a_machine(|machine| {
        let (policy, log) = (machine.path("audit-policy.yaml"), machine.path("audit.log"));
        fs::write(&policy, POLICY).unwrap();
        let [policy, path] = [&policy, &log].map(|path| path.to_str().unwrap());
        let files = ["--audit-policy-file", policy, "--audit-log-path", path];
        let flags = [&files[..], &["--audit-log-truncate-enabled"]].concat();
        let plane = Plane::start_with(machine, None, &flags);
        // JSON escapes these characters, so the event is twice as long as the request. The second request is permitted.
        let query = format!("{SECRET}?a={}", "\\".repeat(60_000));
        assert_eq!(plane.get(EVE, &query).0, 403);
        let kubectl = make_eve_a_tenant(machine);
        kubectl.kubectl(&["label", "namespace", "default", "pod-security.kubernetes.io/audit=restricted"]);
        eventually("the role and the default service account", 20, || {
            let (code, answer) =
                plane.by(EVE).send("POST", PODS, "application/json", pod_of_many_containers());
            assert!([201, 403].contains(&code), "{code}: {answer}");
            code == 201
        });
        assert_eq!(plane.get(EVE, &query).0, 404);
        for (verb, code, path) in [("get", 403, SECRET), ("create", 201, PODS), ("get", 404, SECRET)] {
            let event = eventually("the event", 20, || responses(&log, verb, code).pop());
            assert_eq!(event["user"]["username"], "eve", "{event}");
            assert_eq!(event["annotations"]["audit.k8s.io/truncated"], "true", "{event}");
            assert!(event["requestURI"].as_str().unwrap().starts_with(path), "{event}");
        }
    });
}

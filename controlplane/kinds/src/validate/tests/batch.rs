//! Jobs, cron jobs, stateful sets, daemon sets, claims.

use super::*;

#[test]
fn jobs_are_checked() {
    let cases = [
        (
            "/spec/parallelism",
            json!(-1),
            "spec.parallelism: Invalid value: -1: must be greater than or equal to 0",
        ),
        (
            "/spec/template/spec/restartPolicy",
            json!("Always"),
            "spec.template.spec.restartPolicy: Required value: valid values: \"OnFailure\", \"Never\"",
        ),
        (
            "/spec/backoffLimitPerIndex",
            json!(1),
            "spec.backoffLimitPerIndex: Invalid value: 1: requires indexed",
        ),
        (
            "/spec/podFailurePolicy",
            json!({"rules": [{"action": "FailJob"}]}),
            "spec.podFailurePolicy.rules[0]: Invalid value: specifying one of",
        ),
        (
            "/spec/podFailurePolicy",
            json!({"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [0]}}]}),
            "spec.podFailurePolicy.rules[0].onExitCodes.values[0]: Invalid value: 0: must not be 0 for the In operator",
        ),
    ];
    for (pointer, value, cause) in cases {
        check("Job", pointer, value, &[cause]);
    }
}

#[test]
fn a_jobs_template_changes_only_while_it_is_suspended() {
    let immutable = "spec.template: Invalid value: ";
    check_update("Job", "/spec/template/spec/nodeSelector", json!({"a": "b"}), &[immutable]);
    check_update(
        "Job",
        "/spec/completions",
        json!(5),
        &["spec.completions: Invalid value: 5: field is immutable"],
    );
    check_update("Job", "/spec/parallelism", json!(5), &[]);
}

#[test]
fn cron_jobs_are_checked() {
    let cases = [
        ("/spec/schedule", json!(""), "spec.schedule: Required value"),
        (
            "/spec/schedule",
            json!("* * *"),
            "spec.schedule: Invalid value: \"* * *\": expected exactly 5 fields, found 3: [* * *]",
        ),
        (
            "/spec/schedule",
            json!("TZ=UTC * * * * *"),
            "spec.schedule: Invalid value: \"TZ=UTC * * * * *\": cannot use TZ or CRON_TZ in schedule",
        ),
        (
            "/spec/schedule",
            json!("* * * * 7"),
            "spec.schedule: Invalid value: \"* * * * 7\": end of range (7) above maximum (6): 7",
        ),
        (
            "/spec/timeZone",
            json!("Mars/Base"),
            "spec.timeZone: Invalid value: \"Mars/Base\": unknown time zone",
        ),
        ("/spec/concurrencyPolicy", json!("x"), "spec.concurrencyPolicy: Unsupported value: \"x\""),
    ];
    for (pointer, value, cause) in cases {
        check("CronJob", pointer, value, &[cause]);
    }
    check("CronJob", "/spec/timeZone", json!("Europe/Berlin"), &[]);
}

#[test]
fn stateful_sets_and_daemon_sets_are_checked() {
    check(
        "StatefulSet",
        "/spec/updateStrategy",
        json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0}}),
        &["spec.updateStrategy.rollingUpdate.maxUnavailable: Invalid value: 0: cannot be 0"],
    );
    check(
        "StatefulSet",
        "/spec/podManagementPolicy",
        json!("x"),
        &["spec.podManagementPolicy: Invalid value: \"x\": must be 'OrderedReady' or 'Parallel'"],
    );
    check_update(
        "StatefulSet",
        "/spec/serviceName",
        json!("other"),
        &["spec: Forbidden: updates to statefulset spec"],
    );
    check_update("StatefulSet", "/spec/replicas", json!(3), &[]);
    check(
        "DaemonSet",
        "/spec/updateStrategy",
        json!({"rollingUpdate": {"maxSurge": 1}}),
        &[
            "spec.updateStrategy.rollingUpdate.maxSurge: Invalid value: 1: may not be set when maxUnavailable is non-zero",
        ],
    );
    check(
        "DaemonSet",
        "/spec/template/spec/restartPolicy",
        json!("Never"),
        &["spec.template.spec.restartPolicy: Unsupported value: \"Never\": supported values: \"Always\""],
    );
}

#[test]
fn claims_are_checked() {
    check(
        "PersistentVolumeClaim",
        "/spec/accessModes",
        json!([]),
        &["spec.accessModes: Required value: at least 1 access mode is required"],
    );
    check(
        "PersistentVolumeClaim",
        "/spec/resources",
        json!({}),
        &["spec.resources[storage]: Required value"],
    );
    check_update("PersistentVolumeClaim", "/spec/volumeName", json!("v"), &[]);
    check_update(
        "PersistentVolumeClaim",
        "/spec/accessModes",
        json!(["ReadOnlyMany"]),
        &["spec: Forbidden: spec is immutable"],
    );
}

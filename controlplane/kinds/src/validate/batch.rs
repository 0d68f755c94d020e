//! Jobs and cron jobs.

use serde_json::Value;

use super::selector::label_selector;
use super::workload::selected_template;
use super::{Causes, Path, batch_policy, format, fully_qualified_name, items, pod, text};
use coracle_schedule::{Schedule, TimeZone};
use coracle_values::label_selector::LabelSelector;

/// Maximum parallelism of a job with the completion mode Indexed.
const MAX_INDEXED_PARALLELISM: i64 = 100_000;
const MAX_FAILED_INDEXES: i64 = 100_000;
/// Number of completions above which back-off per index has narrower limits.
const MANY_COMPLETIONS: i64 = 100_000;
/// Maximum parallelism and failed indexes of a job with more than [`MANY_COMPLETIONS`] and back-off per index.
const MANY_COMPLETIONS_LIMIT: i64 = 10_000;
/// Maximum size of the name in `managedBy`, in bytes.
const MAX_MANAGED_BY: usize = 63;
/// Maximum length of a cron job's name. The names of its jobs are eleven characters longer.
const MAX_CRON_JOB_NAME: usize = 52;

pub(crate) fn job(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    if old.is_none() {
        generated_selector(causes, object);
    }
    job_spec(causes, &path, spec);
    if spec["selector"].is_null() {
        causes.required(&path.field("selector"), "");
    } else {
        label_selector(causes, &path.field("selector"), &spec["selector"]);
    }
    selected_template(causes, &path, spec);
    let completions = spec["completions"].as_i64().unwrap_or(0);
    if spec["completionMode"] == "Indexed" && completions > 0 {
        let host = format!("{}-{}", text(&object["metadata"]["name"]), completions - 1);
        if !format::dns1123_label(&host).is_empty() {
            let detail = format!("will not able to create pod with invalid DNS label: {host}");
            causes.invalid(&Path::root("metadata").field("name"), &object["metadata"]["name"], &detail);
        }
    }
    if let Some(old) = old {
        job_update(causes, &path, spec, old);
    }
}

pub(crate) fn cron_job(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    if text(&spec["schedule"]).is_empty() {
        causes.required(&path.field("schedule"), "");
    } else {
        schedule(causes, &path.field("schedule"), spec, old);
    }
    causes.not_negative(&path.field("startingDeadlineSeconds"), &spec["startingDeadlineSeconds"]);
    if old.is_none_or(|old| old["spec"]["timeZone"] != spec["timeZone"]) {
        time_zone(causes, &path.field("timeZone"), &spec["timeZone"]);
    }
    let policies = &["Allow", "Forbid", "Replace"];
    causes.one_of(&path.field("concurrencyPolicy"), &spec["concurrencyPolicy"], policies);
    let here = path.field("jobTemplate").field("spec");
    let job = &spec["jobTemplate"]["spec"];
    job_spec(causes, &here, job);
    if !job["selector"].is_null() {
        causes.invalid(&here.field("selector"), &job["selector"], "`selector` will be auto-generated");
    }
    if job["manualSelector"] == true {
        causes.unsupported(&here.field("manualSelector"), &job["manualSelector"], &["nil", "false"]);
    }
    for name in ["successfulJobsHistoryLimit", "failedJobsHistoryLimit"] {
        causes.not_negative(&path.field(name), &spec[name]);
    }
    let name = &object["metadata"]["name"];
    if old.is_none() && text(name).len() > MAX_CRON_JOB_NAME {
        causes.invalid(&Path::root("metadata").field("name"), name, "must be no more than 52 characters");
    }
}

fn schedule(causes: &mut Causes, path: &Path, spec: &Value, old: Option<&Value>) {
    let schedule = text(&spec["schedule"]);
    if let Err(error) = schedule.parse::<Schedule>() {
        causes.invalid(path, &schedule.into(), &error.to_string());
    }
    let had_zone = old.is_some_and(|old| text(&old["spec"]["schedule"]).contains("TZ"));
    if schedule.contains("TZ") {
        let detail = match (had_zone, spec["timeZone"].is_null()) {
            (true, true) => return,
            (true, false) => "cannot use both timeZone field and TZ or CRON_TZ in schedule",
            (false, _) => "cannot use TZ or CRON_TZ in schedule, use timeZone field instead",
        };
        causes.invalid(path, &schedule.into(), detail);
    }
}

fn time_zone(causes: &mut Causes, path: &Path, zone: &Value) {
    let Some(name) = zone.as_str() else { return };
    if name.is_empty() {
        causes.invalid(path, zone, "timeZone must be nil or non-empty string");
    } else if name.eq_ignore_ascii_case("local") {
        let detail = "timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones";
        causes.invalid(path, zone, detail);
    } else if name.parse::<TimeZone>().is_err() {
        causes.invalid(path, zone, &format!("unknown time zone {name}"));
    }
}

/// Checks that template and selector carry the generated labels, unless `manualSelector` is set.
fn generated_selector(causes: &mut Causes, object: &Value) {
    let spec = &object["spec"];
    if spec["manualSelector"] == true || spec["selector"].is_null() {
        return;
    }
    let (uid, name) = (&object["metadata"]["uid"], &object["metadata"]["name"]);
    if text(uid).is_empty() {
        causes.required(&Path::root("metadata").field("uid"), "");
    }
    let here = Path::root("spec").field("template").field("metadata").field("labels");
    let labels = &spec["template"]["metadata"]["labels"];
    let expected = [
        ("controller-uid", uid),
        ("job-name", name),
        ("batch.kubernetes.io/controller-uid", uid),
        ("batch.kubernetes.io/job-name", name),
    ];
    for (label, value) in expected {
        match labels.get(label) {
            None => causes.required(&here.key(label), &format!("must be '{}'", text(value))),
            Some(found) if found != value => {
                causes.invalid(&here.key(label), labels, &format!("must be '{}'", text(value)));
            }
            Some(_) => {}
        }
    }
    let own =
        |key: &str| expected.iter().find(|(label, _)| *label == key).and_then(|(_, value)| value.as_str());
    if LabelSelector::from_object(&spec["selector"]).is_ok_and(|selector| !selector.matches_by(own)) {
        let path = Path::root("spec").field("selector");
        causes.invalid(&path, &spec["selector"], "`selector` not auto-generated");
    }
}

fn job_spec(causes: &mut Causes, path: &Path, spec: &Value) {
    for name in [
        "parallelism",
        "completions",
        "activeDeadlineSeconds",
        "backoffLimit",
        "ttlSecondsAfterFinished",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
    ] {
        causes.not_negative(&path.field(name), &spec[name]);
    }
    if !spec["maxFailedIndexes"].is_null() && spec["backoffLimitPerIndex"].is_null() {
        causes.required(&path.field("backoffLimitPerIndex"), "when maxFailedIndexes is specified");
    }
    managed_by(causes, &path.field("managedBy"), &spec["managedBy"]);
    match spec["completionMode"].as_str() {
        Some("Indexed") => indexed(causes, path, spec),
        mode => {
            if mode.is_some_and(|mode| mode != "NonIndexed") {
                let modes = &["NonIndexed", "Indexed"];
                causes.unsupported(&path.field("completionMode"), &spec["completionMode"], modes);
            }
            let is_known = mode.is_none_or(|mode| mode == "NonIndexed");
            for name in ["backoffLimitPerIndex", "maxFailedIndexes", "successPolicy"] {
                if !spec[name].is_null() && (is_known || name == "successPolicy") {
                    causes.invalid(&path.field(name), &spec[name], "requires indexed completion mode");
                }
            }
        }
    }
    batch_policy::failure(causes, path, spec);
    if spec["completionMode"] == "Indexed" && !spec["successPolicy"].is_null() {
        batch_policy::success(causes, &path.field("successPolicy").field("rules"), spec);
    }
    replacement(causes, &path.field("podReplacementPolicy"), spec);
    template(causes, &path.field("template"), spec);
}

fn managed_by(causes: &mut Causes, path: &Path, value: &Value) {
    let Some(name) = value.as_str() else { return };
    fully_qualified_name::prefixed_path(causes, path, name);
    if name.len() > MAX_MANAGED_BY {
        causes.too_long(path, MAX_MANAGED_BY);
    }
}

fn indexed(causes: &mut Causes, path: &Path, spec: &Value) {
    let number = |name: &str| spec[name].as_i64();
    let mut at_most = |name: &str, limit: i64, detail: String| {
        if number(name).is_some_and(|number| number > limit) {
            causes.invalid(&path.field(name), &spec[name], &detail);
        }
    };
    let bound =
        format!("must be less than or equal to {MAX_INDEXED_PARALLELISM} when completion mode is Indexed");
    at_most("parallelism", MAX_INDEXED_PARALLELISM, bound);
    if let Some(completions) = number("completions") {
        at_most("maxFailedIndexes", completions, "must be less than or equal to completions".to_owned());
    }
    let bound = format!("must be less than or equal to {MAX_FAILED_INDEXES}");
    at_most("maxFailedIndexes", MAX_FAILED_INDEXES, bound);
    let many = number("completions").is_some_and(|completions| completions > MANY_COMPLETIONS);
    if many && number("backoffLimitPerIndex").is_some() {
        let bound = format!(
            "must be less than or equal to {MANY_COMPLETIONS_LIMIT} when completions are above \
             {MANY_COMPLETIONS} and used with backoff limit per index"
        );
        at_most("parallelism", MANY_COMPLETIONS_LIMIT, bound.clone());
        at_most("maxFailedIndexes", MANY_COMPLETIONS_LIMIT, bound);
        if number("maxFailedIndexes").is_none() {
            let detail = format!("must be specified when completions is above {MANY_COMPLETIONS}");
            causes.required(&path.field("maxFailedIndexes"), &detail);
        }
    }
    if number("completions").is_none() {
        causes.required(&path.field("completions"), "when completion mode is Indexed");
    }
}

fn replacement(causes: &mut Causes, path: &Path, spec: &Value) {
    let policy = &spec["podReplacementPolicy"];
    match (policy.as_str(), spec["podFailurePolicy"].is_null()) {
        (None | Some("Failed"), _) | (Some("TerminatingOrFailed"), true) => {}
        (Some(_), true) => causes.unsupported(path, policy, &["Failed", "TerminatingOrFailed"]),
        (Some(_), false) => causes.unsupported(path, policy, &["Failed"]),
    }
}

fn template(causes: &mut Causes, path: &Path, spec: &Value) {
    let template = &spec["template"];
    let here = path.field("spec");
    pod::template(causes, path, template);
    let policy = &template["spec"]["restartPolicy"];
    let here = here.field("restartPolicy");
    match text(policy) {
        "Always" | "" => causes.required(&here, "valid values: \"OnFailure\", \"Never\""),
        "OnFailure" if !spec["podFailurePolicy"].is_null() => {
            causes.invalid(&here, policy, "only \"Never\" is supported when podFailurePolicy is specified");
        }
        "OnFailure" | "Never" => {}
        _ => causes.unsupported(&here, policy, &["OnFailure", "Never"]),
    }
}

fn job_update(causes: &mut Causes, path: &Path, spec: &Value, job: &Value) {
    let old = &job["spec"];
    let indexed = spec["completionMode"] == "Indexed";
    if spec["completions"] != old["completions"] {
        let here = path.field("completions");
        if !indexed {
            causes.invalid(&here, &spec["completions"], "field is immutable");
        } else if !spec["completions"].is_null() && spec["completions"] != spec["parallelism"] {
            let detail = "can only be modified in tandem with spec.parallelism";
            causes.invalid(&here, &spec["completions"], detail);
        }
    }
    for name in [
        "selector",
        "completionMode",
        "podFailurePolicy",
        "backoffLimitPerIndex",
        "managedBy",
        "successPolicy",
    ] {
        if spec[name] != old[name] {
            causes.invalid(&path.field(name), &spec[name], "field is immutable");
        }
    }
    let (here, template) = (path.field("template"), &spec["template"]);
    let mut before = old["template"].clone();
    if is_stopped(job) {
        unfreeze(&mut before, template);
        if before["spec"] != template["spec"] {
            causes.invalid(&here.field("spec"), &template["spec"], "field is immutable");
        }
    } else if before != *template {
        causes.invalid(&here, template, "field is immutable");
    }
}

/// Whether a job is suspended, and the controller has ended its pods.
fn is_stopped(job: &Value) -> bool {
    let mut conditions = items(&job["status"]["conditions"]);
    job["spec"]["suspend"] == true
        && conditions.any(|(_, condition)| condition["type"] == "Suspended" && condition["status"] == "True")
        && job["status"]["active"].as_i64().unwrap_or(0) == 0
}

/// Copies the fields that may change in the template of a suspended job: labels, annotations, most scheduling fields,
/// and the resources of containers. The affinity to other pods may not change.
fn unfreeze(before: &mut Value, new: &Value) {
    fn copy(before: &mut Value, new: &Value, name: &str) {
        if let Some(map) = before.as_object_mut() {
            match new.get(name) {
                Some(value) => map.insert(name.to_owned(), value.clone()),
                None => map.remove(name),
            };
        }
    }
    for name in ["labels", "annotations"] {
        copy(&mut before["metadata"], &new["metadata"], name);
    }
    for name in ["nodeSelector", "tolerations", "schedulingGates"] {
        copy(&mut before["spec"], &new["spec"], name);
    }
    let others = |affinity: &Value| ["podAffinity", "podAntiAffinity"].map(|name| affinity[name].clone());
    if others(&before["spec"]["affinity"]) == others(&new["spec"]["affinity"]) {
        copy(&mut before["spec"], &new["spec"], "affinity");
    }
    for list in ["containers", "initContainers"] {
        for (index, container) in items(&new["spec"][list]) {
            let same = before["spec"][list][index]["name"] == container["name"];
            if same && !before["spec"][list][index].is_null() {
                copy(&mut before["spec"][list][index], container, "resources");
            }
        }
    }
}

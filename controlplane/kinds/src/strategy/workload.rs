//! Workloads: the generated selector of jobs, the template generation of daemon sets.

use serde_json::{Value, json};

use crate::Resource;

/// The annotation with the number of a daemon set's template.
pub(crate) const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";

/// The labels with a job's uid and name, each in its current and in its old form.
const UID_LABELS: [&str; 2] = ["batch.kubernetes.io/controller-uid", "controller-uid"];
const NAME_LABELS: [&str; 2] = ["batch.kubernetes.io/job-name", "job-name"];

/// Prepares a new daemon set: sets a status with zeros, and the template generation 1.
pub(crate) fn new_daemon_set(object: &mut Value) {
    object["status"] = json!({
        "currentNumberScheduled": 0, "numberMisscheduled": 0, "desiredNumberScheduled": 0, "numberReady": 0,
    });
    set_template_generation(object, 1);
}

/// Increases the template generation if the template changed. Clients cannot set the generation.
pub(super) fn update_daemon_set(new: &mut Value, old: &Value) {
    let before = &old["metadata"]["annotations"][TEMPLATE_GENERATION];
    let before: i64 = before.as_str().and_then(|text| text.parse().ok()).unwrap_or(0);
    let changed = new["spec"]["template"] != old["spec"]["template"];
    set_template_generation(new, before + i64::from(changed));
}

fn set_template_generation(object: &mut Value, generation: i64) {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        let annotations = metadata.entry("annotations").or_insert(Value::Null);
        if annotations.is_null() {
            *annotations = json!({});
        }
        if let Some(annotations) = annotations.as_object_mut() {
            annotations.insert(TEMPLATE_GENERATION.to_owned(), generation.to_string().into());
        }
    }
}

/// Prepares a new object whose name is known: a job without `manualSelector` gets a selector for its uid.
pub fn prepare_named(kind: &Resource, object: &mut Value) {
    let manual = object["spec"]["manualSelector"] == true;
    if !kind.is("batch", "Job") || manual || !object["spec"]["template"]["metadata"].is_object() {
        return;
    }
    let metadata = &object["metadata"];
    let (uid, name) = (metadata["uid"].clone(), metadata["name"].clone());
    let own = &metadata["labels"];
    let inherits = !own.is_object() || *own == object["spec"]["template"]["metadata"]["labels"];
    let labels = &mut object["spec"]["template"]["metadata"]["labels"];
    if !labels.is_object() {
        *labels = json!({});
    }
    for (names, value) in [(UID_LABELS, &uid), (NAME_LABELS, &name)] {
        for label in names {
            labels[label] = value.clone();
        }
    }
    if inherits {
        object["metadata"]["labels"] = object["spec"]["template"]["metadata"]["labels"].clone();
    }
    if object["spec"]["selector"].is_null() {
        object["spec"]["selector"] = json!({});
    }
    if !object["spec"]["selector"]["matchLabels"].is_object() {
        object["spec"]["selector"]["matchLabels"] = json!({});
    }
    object["spec"]["selector"]["matchLabels"][UID_LABELS[0]] = uid;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::by_kind;

    #[test]
    fn the_pods_of_a_job_are_selected_by_its_uid() {
        let mut job = json!({"metadata": {"name": "j", "uid": "u", "labels": {"a": "b"}},
            "spec": {"template": {"metadata": {"labels": {"a": "b"}}}}});
        let kind = by_kind("batch/v1", "Job").unwrap();
        prepare_named(kind, &mut job);
        assert_eq!(
            job["spec"]["selector"],
            json!({"matchLabels": {"batch.kubernetes.io/controller-uid": "u"}})
        );
        let labels = json!({"a": "b", "controller-uid": "u", "batch.kubernetes.io/controller-uid": "u",
            "job-name": "j", "batch.kubernetes.io/job-name": "j"});
        assert_eq!(job["spec"]["template"]["metadata"]["labels"], labels);
        assert_eq!(job["metadata"]["labels"], labels);
        let mut manual = json!({"metadata": {"name": "j", "uid": "u"}, "spec": {"manualSelector": true,
            "template": {"metadata": {}}}});
        prepare_named(kind, &mut manual);
        assert!(manual["spec"]["selector"].is_null());
    }

    #[test]
    fn the_template_generation_counts_templates() {
        let mut old = json!({"metadata": {}, "spec": {"template": {"a": 1}}});
        new_daemon_set(&mut old);
        assert_eq!(old["metadata"]["annotations"][TEMPLATE_GENERATION], "1");
        let mut new = json!({"metadata": {}, "spec": {"template": {"a": 1}}});
        update_daemon_set(&mut new, &old);
        assert_eq!(new["metadata"]["annotations"][TEMPLATE_GENERATION], "1");
        new["spec"]["template"]["a"] = 2.into();
        update_daemon_set(&mut new, &old);
        assert_eq!(new["metadata"]["annotations"][TEMPLATE_GENERATION], "2");
    }
}

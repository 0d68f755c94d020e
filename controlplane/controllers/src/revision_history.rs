//! The revisions of stateful sets and daemon sets: finds the current revision, and plans the changes.
//!
//! A revision contains a patch of the workload's pod template, which `kubectl rollout undo` applies.

mod run;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{Value, json};

use crate::object::{ControllerRevision, ObjectExt};
use crate::template::{Template, name_with_hash};

pub(crate) use run::{Current, current, delete};

/// Label of a pod with the name of its revision.
pub(crate) const POD_REVISION: &str = "controller-revision-hash";

/// Maximum bytes of a workload's name in the names of its revisions. Source: `ControllerRevisionName`.
const MAX_NAME: usize = 223;

/// A workload with revisions.
#[derive(Debug)]
pub(crate) struct Workload<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    pub(crate) uid: &'a str,
    pub(crate) owner: OwnerReference,
    pub(crate) template: &'a Template,
    /// Annotations that are copied to the revisions, because `kubectl rollout history` shows one of them.
    pub(crate) annotations: Option<&'a BTreeMap<String, String>>,
    /// Label for the hash of a revision.
    pub(crate) hash_label: &'static str,
    pub(crate) collisions: i32,
}

/// The action for the revision of the current template.
#[derive(Debug)]
pub(crate) enum Step {
    /// The kept revision: it has the current template and the highest number.
    Keep(Arc<ControllerRevision>),
    /// The revision with the current template, and its new number.
    Renumber(Arc<ControllerRevision>, i64),
    /// No revision has the current template.
    Create(i64),
}

/// Plans the step. `revisions` are all revisions of the workload.
pub(crate) fn plan(workload: &Workload<'_>, revisions: &[Arc<ControllerRevision>]) -> Step {
    let sorted = sorted(revisions);
    let highest = sorted.last().map_or(0, |last| last.revision);
    let mut equal =
        sorted.iter().rev().filter(|revision| template_of(revision).equals_ignoring_hash(workload.template));
    match equal.next() {
        Some(found) if found.revision == highest => Step::Keep(found.clone()),
        Some(found) => Step::Renumber(found.clone(), highest + 1),
        None => Step::Create(highest + 1),
    }
}

/// Sorts revisions by number, then by age and name.
pub(crate) fn sorted(revisions: &[Arc<ControllerRevision>]) -> Vec<Arc<ControllerRevision>> {
    let mut sorted = revisions.to_vec();
    sorted.sort_by(|one, other| {
        let key = |revision: &ControllerRevision| {
            (revision.revision, revision.metadata.creation_timestamp.clone(), revision.name().to_owned())
        };
        key(one).cmp(&key(other))
    });
    sorted
}

/// The pod template of a revision.
pub(crate) fn template_of(revision: &ControllerRevision) -> Template {
    // The data of a revision may be any JSON.
    let mut template = revision.data.value().pointer("/spec/template").cloned().unwrap_or_default();
    if let Some(template) = template.as_object_mut() {
        template.remove("$patch");
    }
    Template::new(&template)
}

/// The oldest revisions above the limit. Used revisions are excluded.
pub(crate) fn to_clean(
    revisions: &[Arc<ControllerRevision>],
    limit: Option<i32>,
    is_used: impl Fn(&ControllerRevision) -> bool,
) -> Vec<Arc<ControllerRevision>> {
    let limit = usize::try_from(limit.unwrap_or(10)).unwrap_or_default();
    let mut unused = sorted(revisions);
    unused.retain(|revision| !is_used(revision) && !revision.is_being_deleted());
    unused.truncate(unused.len().saturating_sub(limit));
    unused
}

/// A new revision of the current template.
fn new_revision(workload: &Workload<'_>, number: i64, collisions: i32) -> Value {
    let hash = workload.template.hash(Some(collisions));
    let mut template = workload.template.value();
    let mut labels = template.pointer("/metadata/labels").cloned().unwrap_or_default();
    if !labels.is_object() {
        labels = json!({});
    }
    labels[workload.hash_label] = hash.clone().into();
    template["$patch"] = "replace".into();
    json!({
        "metadata": {
            "name": name_with_hash(workload.name, MAX_NAME, &hash),
            "labels": labels,
            "annotations": workload.annotations,
            "ownerReferences": [workload.owner],
        },
        "data": {"spec": {"template": template}},
        "revision": number,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn revision(name: &str, number: i64, image: &str) -> Arc<ControllerRevision> {
        let template = json!({"spec": {"containers": [{"image": image}]}, "$patch": "replace"});
        let value =
            json!({"metadata": {"name": name}, "revision": number, "data": {"spec": {"template": template}}});
        Arc::new(serde_json::from_value(value).unwrap())
    }

    fn decide(revisions: &[Arc<ControllerRevision>], image: &str) -> String {
        let template = Template::new(&json!({"spec": {"containers": [{"image": image}]}}));
        let owner = OwnerReference::default();
        let workload = Workload {
            namespace: "n",
            name: "w",
            uid: "u",
            owner,
            template: &template,
            annotations: None,
            hash_label: POD_REVISION,
            collisions: 0,
        };
        match plan(&workload, revisions) {
            Step::Keep(found) => format!("keep {}", found.name()),
            Step::Renumber(found, number) => format!("renumber {} {number}", found.name()),
            Step::Create(number) => format!("create {number}"),
        }
    }

    #[test]
    fn a_revision_with_foreign_data_has_no_template() {
        for data in
            [json!("text"), json!(1), json!([1]), json!(null), json!({"spec": 1}), json!({"spec": [1]})]
        {
            let value = json!({"metadata": {"name": "a"}, "revision": 1, "data": data});
            let revision: Arc<ControllerRevision> = Arc::new(serde_json::from_value(value).unwrap());
            assert_eq!(template_of(&revision).value(), json!({}), "{data}");
            assert_eq!(decide(&[revision], "c:3"), "create 2", "{data}");
        }
    }

    #[test]
    fn a_new_revision_has_the_annotations_of_its_workload() {
        let (template, annotations) =
            (Template::new(&json!({})), [("note".to_owned(), "x".to_owned())].into());
        let workload = Workload {
            namespace: "n",
            name: "w",
            uid: "u",
            owner: OwnerReference::default(),
            template: &template,
            annotations: Some(&annotations),
            hash_label: POD_REVISION,
            collisions: 0,
        };
        assert_eq!(new_revision(&workload, 1, 0)["metadata"]["annotations"], json!({"note": "x"}));
    }

    #[test]
    fn the_name_of_a_revision_has_at_most_223_characters_of_its_workload() {
        let (template, name) = (Template::new(&json!({})), "a".repeat(253));
        let workload = Workload {
            namespace: "n",
            name: &name,
            uid: "u",
            owner: OwnerReference::default(),
            template: &template,
            annotations: None,
            hash_label: POD_REVISION,
            collisions: 0,
        };
        let expected = format!("{}-{}", "a".repeat(223), template.hash(Some(0)));
        assert_eq!(new_revision(&workload, 1, 0)["metadata"]["name"], expected);
    }

    #[test]
    fn an_old_template_gets_a_new_number_and_a_new_one_a_revision() {
        let revisions = [revision("b", 2, "b:2"), revision("a", 1, "a:1")];
        assert_eq!(decide(&revisions, "b:2"), "keep b");
        assert_eq!(decide(&revisions, "a:1"), "renumber a 3");
        assert_eq!(decide(&revisions, "c:3"), "create 3");
        assert_eq!(decide(&[], "c:3"), "create 1");
    }

    #[test]
    fn unused_revisions_above_the_limit_are_cleaned_oldest_first() {
        let revisions = [revision("c", 3, "c"), revision("a", 1, "a"), revision("b", 2, "b")];
        let clean = |limit| {
            let found = to_clean(&revisions, Some(limit), |revision| revision.name() == "c");
            found.iter().map(|revision| revision.name().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(clean(1), ["a"]);
        assert_eq!(clean(0), ["a", "b"]);
        assert_eq!(clean(2), Vec::<String>::new());
    }
}

//! Approval of definitions in groups of the Kubernetes community.

use crate::definition::Definition;
use crate::violation::{Path, Violations};

const ANNOTATION: &str = "api-approved.kubernetes.io";

#[derive(PartialEq, Eq)]
enum Approval {
    Missing,
    Bypassed,
    Approved,
    Invalid,
}

/// Checks the annotation. An update that does not change the state of the approval is accepted.
pub(super) fn validate(definition: &Definition, old: Option<&Definition>, violations: &mut Violations) {
    let group = &definition.spec.group;
    let protected = group == "k8s.io"
        || group.ends_with(".k8s.io")
        || group == "kubernetes.io"
        || group.ends_with(".kubernetes.io");
    let state = approval(definition);
    if !protected || old.is_some_and(|old| approval(old) == state) {
        return;
    }
    let path = Path::root("metadata").field("annotations").key(ANNOTATION);
    let text = definition.metadata.annotations.get(ANNOTATION).cloned().unwrap_or_default();
    let link = "see https://github.com/kubernetes/enhancements/pull/1111";
    match state {
        Approval::Missing => {
            let detail = format!("protected groups must have approval annotation {ANNOTATION:?}, {link}");
            violations.required(&path, &detail);
        }
        Approval::Invalid => {
            let detail = format!(
                "protected groups must have approval annotation {ANNOTATION:?} with either a URL or a reason starting \
                 with \"unapproved\", {link}"
            );
            violations.invalid(&path, &text.into(), &detail);
        }
        Approval::Bypassed | Approval::Approved => {}
    }
}

fn approval(definition: &Definition) -> Approval {
    match definition.metadata.annotations.get(ANNOTATION).map(String::as_str) {
        None | Some("") => Approval::Missing,
        Some(text) if text.starts_with("unapproved") => Approval::Bypassed,
        Some(text) => match url::Url::parse(text) {
            Ok(url) if url.has_host() => Approval::Approved,
            _ => Approval::Invalid,
        },
    }
}

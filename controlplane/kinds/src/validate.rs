//! Validation of objects. Each violation is one cause with its field path and upstream's text.

pub(crate) mod admission;
pub(crate) mod admission_policy;
pub(crate) mod aggregation;
pub(crate) mod attachment;
pub(crate) mod autoscaling;
pub(crate) mod batch;
mod batch_policy;
mod batch_status;
pub(crate) mod certificate;
mod condition;
pub(crate) mod config;
mod container_status;
pub(crate) mod daemon;
pub(crate) mod devices;
pub(crate) mod disruption;
pub(crate) mod event;
pub(crate) mod extension;
pub(crate) mod flow_control;
pub(crate) mod initializer_configuration;
mod kind_metadata;
pub(crate) mod migration;
pub(crate) mod networking;
pub(crate) mod node;
pub(crate) mod object;
pub(crate) mod persistent_volume;
pub(crate) mod pod_group;
mod pod_status;
pub(crate) mod policy;
pub(crate) mod quota;
pub(crate) mod rbac;
mod review;
pub(crate) mod service;
pub(crate) mod stateful;
pub(crate) mod storage;
pub(crate) mod workload;

use coracle_pod_rules::cause;
use coracle_pod_rules::validate::value::{entries, items, text};
use coracle_pod_rules::validate::{
    claim_spec, file_path, format, fully_qualified_name, meta, pod_annotations, port, resources, restart,
    scheduling, selector, standard_resource, value, volume_source,
};
use serde_json::Value;

pub use self::service::service_addresses;
use crate::{Resource, defaults};

pub use coracle_pod_rules::cause::{Cause, Causes, Path};
pub(crate) use coracle_pod_rules::validate::pod;
pub use coracle_pod_rules::validate::{ephemeral_containers, initializers, resize};

/// Validates a new object, after defaulting and name generation.
pub fn create(kind: &Resource, object: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    if kind.is_stored() {
        // A review is not stored, so it needs no name.
        kind_metadata::every_write(&mut causes, kind, object);
    }
    kind.strategy().validate(&mut causes, object, None);
    causes.into_list()
}

/// Validates an update of the resource itself, after `strategy` and defaulting.
pub fn update(kind: &Resource, new: &Value, old: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    kind_metadata::every_write(&mut causes, kind, new);
    meta::update(&mut causes, new, old);
    // Initializers may change fields of a pod that are immutable later. Source: `isUpdatingUninitializedPod`, v1.9.
    let is_changeable = kind.is("", "Pod") && crate::initialization::is_pending(old);
    kind.strategy().validate(&mut causes, new, (!is_changeable).then_some(old));
    causes.into_list()
}

/// Validates an update of `/status`.
pub fn status_update(kind: &Resource, new: &Value, old: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    kind_metadata::every_write(&mut causes, kind, new);
    meta::update(&mut causes, new, old);
    kind.strategy().validate_status(&mut causes, new, old);
    causes.into_list()
}

/// The violation of a request that updates the status of an uninitialized pod. Source: `podStatusStrategy` of upstream,
/// v1.9.
pub fn uninitialized_status() -> Vec<Cause> {
    let mut causes = Causes::default();
    let detail = "must not update status when the object is uninitialized";
    causes.forbidden(&Path::root("status"), detail);
    causes.into_list()
}

/// Validates an update with `rules`: [`update`] or [`status_update`]. Violations that the stored object already has are
/// omitted. An earlier version accepted them, and without this rule no update could remove the object's finalizers.
///
/// Custom resources get all violations: their expressions may compare the new object with the old object.
pub fn ratcheted(
    kind: &Resource,
    new: &Value,
    old: &Value,
    rules: fn(&Resource, &Value, &Value) -> Vec<Cause>,
) -> Vec<Cause> {
    let mut causes = rules(kind, new, old);
    if causes.is_empty() || !kind.is_built_in {
        return causes;
    }
    // The new object has the defaults of this version, the stored object may lack them. A default does not count as a
    // change.
    let mut stored = old.clone();
    defaults::apply(kind, &mut stored);
    if stored != *old {
        let remaining = rules(kind, new, &stored);
        causes.retain(|cause| remaining.contains(cause));
    }
    // Metadata is checked first, so a truncated list of violations may lack violations of other fields. If the list is
    // truncated, only metadata may change.
    if cause::are_cut(&causes) && changes_more_than_metadata(new, &stored) {
        return causes;
    }
    let known = rules(kind, &stored, &stored);
    causes.retain(|cause| !known.iter().any(|known| is_same(known, cause)));
    causes
}

/// Whether two causes are the same violation. An address or a prefix in an old form may have moved in its list. So only
/// the messages are compared: they contain the address or the prefix. Source: `IsValidIPForLegacyField`, which accepts
/// all old values.
fn is_same(one: &Cause, other: &Cause) -> bool {
    one == other || (one.message == other.message && format::is_about_old_form(&one.message))
}

fn changes_more_than_metadata(new: &Value, old: &Value) -> bool {
    let names = entries(new).chain(entries(old)).map(|(name, _)| name.as_str());
    names.filter(|name| *name != "metadata").any(|name| new[name] != old[name])
}

/// Rules for the status of a built-in kind.
pub(crate) fn built_in_status(causes: &mut Causes, group: &str, kind: &str, new: &Value, old: &Value) {
    match (group, kind) {
        ("", "Namespace") => object::namespace_status(causes, new),
        ("", "Node") => node::status(causes, &new["status"], true),
        ("", "PersistentVolumeClaim") => storage::claim_status(causes, &new["status"]),
        ("apps", "Deployment") => workload::deployment_status(causes, &new["status"], &old["status"]),
        ("apps", "ReplicaSet") | ("", "ReplicationController") => {
            workload::replica_status(causes, &new["status"]);
        }
        ("storage.k8s.io", "VolumeAttachment") => attachment::attachment_status(causes, &new["status"]),
        ("apps", "StatefulSet") => stateful::status(causes, &new["status"], &old["status"]),
        ("apps", "DaemonSet") => daemon::status(causes, &new["status"], &old["status"]),
        ("", "Pod") => pod_status::update(causes, new, old),
        ("", "Service") => service::status(causes, new),
        ("", "ResourceQuota") => quota::status(causes, &new["status"]),
        ("autoscaling", _) => autoscaling::status(causes, &new["status"]),
        ("flowcontrol.apiserver.k8s.io", _) => flow_control::status(causes, &new["status"]),
        ("resource.k8s.io", _) => devices::status(causes, new, old),
        ("scheduling.k8s.io", "PodGroup") => pod_group::status(causes, new),
        ("storagemigration.k8s.io", _) => migration::status(causes, new, old),
        ("apiregistration.k8s.io", _) => aggregation::status(causes, &new["status"]),
        ("batch", "Job") => batch_status::job(causes, new, old),
        ("certificates.k8s.io", "CertificateSigningRequest") => certificate::status(causes, new, Some(old)),
        ("apiextensions.k8s.io", "CustomResourceDefinition") => extension::status(causes, new),
        ("networking.k8s.io", "Ingress") => networking::ingress_status(causes, &new["status"]),
        ("policy", "PodDisruptionBudget") => disruption::status(causes, &new["status"]),
        _ => {}
    }
}

/// Adds the violations of a definition or of a custom resource.
pub fn add_violations(causes: &mut Causes, violations: coracle_custom_resources::Violations) {
    extension::add(causes, violations);
}

/// Validates a Binding.
pub fn binding(binding: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    let target = Path::root("target");
    let kind = &binding["target"]["kind"];
    if !matches!(kind.as_str(), None | Some("" | "Node")) {
        causes.unsupported(&target.field("kind"), kind, &["Node", "<empty>"]);
    }
    if binding["target"]["name"].as_str().unwrap_or_default().is_empty() {
        causes.required(&target.field("name"), "");
    }
    // The pod gets the labels of its binding without another validation.
    meta::labels(&mut causes, &Path::root("metadata").field("labels"), &binding["metadata"]["labels"]);
    causes.into_list()
}

/// Validates the tolerations of a configuration file. `field` is their field.
pub fn tolerations(field: &str, list: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    scheduling::tolerations(&mut causes, &Path::root(field), list);
    causes.into_list()
}

/// Validates an access review of this kind. `namespace` is the namespace of the request. Reviews of other kinds are
/// always valid. Source: `pkg/apis/authorization/validation`.
pub fn review(kind: &str, review: &Value, namespace: &str) -> Vec<Cause> {
    review::causes(kind, review, namespace)
}

/// Validates a TokenRequest, after defaulting.
pub fn token_request(request: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    let path = Path::root("spec").field("expirationSeconds");
    let seconds = &request["spec"]["expirationSeconds"];
    match seconds.as_i64().unwrap_or(0) {
        ..600 => causes.invalid(&path, seconds, "may not specify a duration less than 10 minutes"),
        4_294_967_297.. => {
            causes.invalid(&path, seconds, "may not specify a duration larger than 2^32 seconds")
        }
        _ => {}
    }
    causes.into_list()
}

/// `Deployment.apps "x" is invalid: spec.selector: Required value` or, with several causes, a bracketed list.
pub fn message(kind: &Resource, name: &str, causes: &[Cause]) -> String {
    let mut texts: Vec<String> = Vec::new();
    for cause in causes {
        let text = format!("{}: {}", cause.field, cause.message);
        if !texts.contains(&text) {
            texts.push(text);
        }
    }
    let all = if let [one] = texts.as_slice() { one.clone() } else { format!("[{}]", texts.join(", ")) };
    format!("{} \"{name}\" is invalid: {all}", kind.qualified_kind())
}

#[cfg(test)]
mod tests;

//! CRI configurations of pods and containers. Pure, except [`files`], which writes files of a pod.

pub(crate) mod container;
pub(crate) mod dns;
pub(crate) mod files;
pub(crate) mod sandbox;

use std::collections::HashMap;

use k8s_openapi::api::core::v1::Pod;

pub(crate) const POD_NAME: &str = "io.kubernetes.pod.name";
pub(crate) const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
pub(crate) const POD_UID: &str = "io.kubernetes.pod.uid";
pub(crate) const CONTAINER_NAME: &str = "io.kubernetes.container.name";
pub(crate) const MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
pub(crate) const MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
pub(crate) const GRACE: &str = "io.kubernetes.pod.terminationGracePeriod";
/// Annotation of a container: the resources that it was created with, as JSON.
pub(crate) const RESOURCES: &str = "io.coracle.container.resources";

/// Labels that identify a pod's sandboxes and containers.
pub(crate) fn identity(pod: &Pod) -> HashMap<String, String> {
    let meta = &pod.metadata;
    [(POD_NAME, &meta.name), (POD_NAMESPACE, &meta.namespace), (POD_UID, &meta.uid)]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value.clone().unwrap_or_default()))
        .collect()
}

/// Host name in the pod, and its domain if it has one.
pub(crate) fn hostname(pod: &Pod, cluster_domain: &str) -> (String, Option<String>) {
    let meta = &pod.metadata;
    let spec = pod.spec.as_ref();
    let own = spec.and_then(|s| s.hostname_override.as_deref().or(s.hostname.as_deref()));
    let name = own.filter(|h| !h.is_empty()).or(meta.name.as_deref()).unwrap_or_default();
    let short = name.get(..63).unwrap_or(name).trim_end_matches(['-', '.']).to_owned();
    let overridden = spec.is_some_and(|s| s.hostname_override.is_some());
    let domain =
        spec.and_then(|s| s.subdomain.as_deref()).filter(|s| !s.is_empty() && !overridden).map(|sub| {
            let namespace = meta.namespace.as_deref().unwrap_or_default();
            format!("{sub}.{namespace}.svc.{cluster_domain}")
        });
    (short, domain)
}

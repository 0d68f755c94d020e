//! Reads the manifest of a static pod: decodes it, sets defaults, validates it, and assigns it to this node. Source:
//! `applyDefaults` and `tryDecodeSinglePod` of `pkg/kubelet/config/common.go`.

mod references;
mod yaml;

use std::io;
use std::path::Path;

use coracle_pod_rules::Cause;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::bounded;

/// Maximum bytes of a manifest. Upstream reads 10 MiB, but its API server stores no pod above 1.5 MiB.
const MAX_SIZE: u64 = 1 << 20;
/// Maximum pods in a list.
const MAX_PODS: usize = 500;
/// Maximum violations in an error.
const MAX_CAUSES: usize = 8;
/// Annotation with the hash of the manifest.
const HASH: &str = "kubernetes.io/config.hash";
/// Annotation with the kind of the source.
const SOURCE: &str = "kubernetes.io/config.source";
/// Annotation with the time at which the agent first read the manifest.
const SEEN: &str = "kubernetes.io/config.seen";
/// Metadata that the API server or the agent sets.
const SYSTEM_FIELDS: [&str; 10] = [
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "managedFields",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
];

/// The reason why a manifest cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ManifestError {
    #[error("cannot read the manifest")]
    Read(#[source] io::Error),
    #[error("cannot decode the manifest: {0}")]
    Decode(String),
    #[error("the manifest is not a Pod of v1")]
    NotAPod,
    #[error("metadata.name is required")]
    NoName,
    #[error("the manifest is invalid: {0}")]
    Invalid(String),
    #[error("static pods may not reference {0}")]
    Reference(&'static str),
    #[error("the manifest has more than {MAX_PODS} pods")]
    TooMany,
}

/// The origin of a manifest, and its node.
struct Place<'a> {
    origin: Origin<'a>,
    node: &'a str,
}

/// The origin of a manifest.
#[derive(Clone, Copy)]
enum Origin<'a> {
    File(&'a Path),
    Url(&'a str),
}

// === impl ManifestError ===

impl ManifestError {
    /// Whether the file does not exist.
    pub(super) fn is_absent(&self) -> bool {
        matches!(self, Self::Read(error) if error.kind() == io::ErrorKind::NotFound)
    }

    /// Whether a later read can succeed without a change of the file.
    pub(super) fn is_temporary(&self) -> bool {
        let is_final =
            |kind: io::ErrorKind| matches!(kind, io::ErrorKind::InvalidInput | io::ErrorKind::FileTooLarge);
        matches!(self, Self::Read(error) if !is_final(error.kind()))
    }
}

/// Reads the static pod of a file. A symbolic link is followed, as upstream.
pub(super) fn read(path: &Path, node: &str) -> Result<Pod, ManifestError> {
    let bytes = path.canonicalize().and_then(|file| bounded::read(&file, MAX_SIZE));
    let place = Place { origin: Origin::File(path), node };
    static_pod(&bytes.map_err(ManifestError::Read)?, &place, Timestamp::now())
}

/// Decodes the static pods in the response of a URL: one Pod, or a list of pods. As upstream, one invalid pod makes the
/// whole list invalid.
pub(super) fn of_url(bytes: &[u8], url: &str, node: &str) -> Result<Vec<Pod>, ManifestError> {
    let mut value = yaml::parse(bytes).map_err(ManifestError::Decode)?;
    let (place, seen) = (Place { origin: Origin::Url(url), node }, Timestamp::now());
    if value["apiVersion"] != "v1" || value["kind"] != "PodList" {
        return Ok(vec![decode(value, &place, seen)?]);
    }
    let Value::Array(items) = value["items"].take() else { return Ok(Vec::new()) };
    if items.len() > MAX_PODS {
        return Err(ManifestError::TooMany);
    }
    let pods = items.into_iter().map(|mut item| {
        // The pods of a list need no version and kind.
        if let Some(fields) = item.as_object_mut() {
            fields.insert("apiVersion".to_owned(), "v1".into());
            fields.insert("kind".to_owned(), "Pod".into());
        }
        decode(item, &place, seen)
    });
    pods.collect()
}

fn static_pod(bytes: &[u8], place: &Place<'_>, seen: Timestamp) -> Result<Pod, ManifestError> {
    decode(yaml::parse(bytes).map_err(ManifestError::Decode)?, place, seen)
}

fn decode(value: Value, place: &Place<'_>, seen: Timestamp) -> Result<Pod, ManifestError> {
    if value["apiVersion"] != "v1" || value["kind"] != "Pod" {
        return Err(ManifestError::NotAPod);
    }
    let mut pod =
        coracle_pod_rules::decode(value).map_err(|error| ManifestError::Decode(error.to_string()))?;
    if pod["metadata"]["name"].as_str().is_none_or(str::is_empty) {
        return Err(ManifestError::NoName);
    }
    let uid = hash(&pod, place);
    set_metadata(&mut pod["metadata"], place, &uid, seen);
    set_node(&mut pod["spec"], place.node);
    // The schema defines spec as an object, so the assignments above cannot fail.
    pod["status"] = json!({"phase": "Pending"});
    coracle_pod_rules::apply_defaults(&mut pod);
    let causes = coracle_pod_rules::violations(&pod);
    if !causes.is_empty() {
        return Err(ManifestError::Invalid(listed(&causes)));
    }
    if let Some(what) = references::first(&pod) {
        return Err(ManifestError::Reference(what));
    }
    // Parse the text form: the binary already contains the code that reads pods from text. A conversion of the value
    // would add this code a second time.
    serde_json::from_str(&pod.to_string()).map_err(|error| ManifestError::Decode(error.to_string()))
}

/// The uid of the pod: 32 hexadecimal digits, a hash of its content, its origin and its node. A pod with changed
/// content is another pod. A uid in the manifest is only a part of the content.
fn hash(pod: &Value, place: &Place<'_>) -> String {
    let mut hasher = Sha256::new();
    hasher.update(pod.to_string());
    hasher.update(format!("\0host:{}", place.node));
    match place.origin {
        Origin::File(path) => {
            hasher.update("\0file:");
            hasher.update(path.as_os_str().as_encoded_bytes());
        }
        Origin::Url(url) => hasher.update(format!("\0url:{url}")),
    }
    let digest: [u8; 32] = hasher.finalize().into();
    hex::encode(&digest[..16])
}

fn set_metadata(metadata: &mut Value, place: &Place<'_>, uid: &str, seen: Timestamp) {
    if let Some(fields) = metadata.as_object_mut() {
        SYSTEM_FIELDS.iter().for_each(|field| drop(fields.remove(*field)));
    }
    let name = format!("{}-{}", metadata["name"].as_str().unwrap_or_default(), place.node.to_lowercase());
    metadata["name"] = name.into();
    if metadata["namespace"].as_str().is_none_or(str::is_empty) {
        metadata["namespace"] = "default".into();
    }
    metadata["uid"] = uid.into();
    let annotations = &mut metadata["annotations"];
    annotations[HASH] = uid.into();
    // The names of upstream's sources.
    annotations[SOURCE] = match place.origin {
        Origin::File(_) => "file".into(),
        Origin::Url(_) => "http".into(),
    };
    annotations[SEEN] = seen.to_string().into();
    if let Some(annotations) = annotations.as_object_mut() {
        annotations.remove(super::mirror::MIRROR);
    }
}

/// Places the pod on the node, and adds the toleration of all `NoExecute` taints.
fn set_node(spec: &mut Value, node: &str) {
    spec["nodeName"] = node.into();
    let mut tolerations = spec["tolerations"].as_array().cloned().unwrap_or_default();
    let is_general = |toleration: &Value| {
        let absent = |field: &str| toleration[field].as_str().is_none_or(str::is_empty);
        toleration["operator"] == "Exists"
            && toleration["effect"] == "NoExecute"
            && absent("key")
            && absent("value")
    };
    tolerations.retain(|toleration| !is_general(toleration));
    tolerations.push(json!({"operator": "Exists", "effect": "NoExecute"}));
    spec["tolerations"] = tolerations.into();
}

fn listed(causes: &[Cause]) -> String {
    let texts = causes.iter().take(MAX_CAUSES).map(|cause| format!("{}: {}", cause.field, cause.message));
    texts.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTAINERS: &str = "containers: [{name: c, image: busybox, resources: {limits: {cpu: 100m}}}]";

    fn read(text: &str) -> Result<Pod, ManifestError> {
        static_pod(
            text.as_bytes(),
            &Place { origin: Origin::File(Path::new("/m/a.yaml")), node: "node-1" },
            Timestamp::UNIX_EPOCH,
        )
    }

    fn with_spec(spec: &str) -> String {
        format!("apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\nspec:\n  {CONTAINERS}\n{spec}")
    }

    #[test]
    fn a_manifest_becomes_a_pod_of_the_node() {
        let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: web, labels: {a: b}, uid: x, finalizers: [a.b/c], \
                    annotations: {kubernetes.io/config.mirror: x, kubernetes.io/config.source: api}}\n\
                    spec: {containers: [{name: c, image: i}], nodeName: other, unknown: 1}\n";
        let pod = read(text).unwrap();
        let metadata = &pod.metadata;
        assert_eq!(
            (metadata.name.as_deref(), metadata.namespace.as_deref()),
            (Some("web-node-1"), Some("default"))
        );
        let uid = metadata.uid.as_deref().unwrap();
        assert!(super::super::is_static(uid) && metadata.finalizers.is_none());
        let annotations = serde_json::to_value(&metadata.annotations).unwrap();
        let seen = "1970-01-01T00:00:00Z";
        assert_eq!(annotations, json!({HASH: uid, SOURCE: "file", SEEN: seen}));
        let spec = serde_json::to_value(&pod.spec).unwrap();
        assert_eq!(
            (&spec["nodeName"], &spec["restartPolicy"]),
            (&json!("node-1"), &json!("Always")),
            "{spec}"
        );
        assert_eq!(spec["tolerations"], json!([{"operator": "Exists", "effect": "NoExecute"}]));
        assert_eq!(pod.status.unwrap().phase.as_deref(), Some("Pending"));
    }

    #[test]
    fn the_uid_changes_with_content_file_and_node_only() {
        let text = with_spec("");
        let uid = |text: &str, path: &str, node: &str, seen: i64| {
            let place = Place { origin: Origin::File(Path::new(path)), node };
            static_pod(text.as_bytes(), &place, Timestamp::from_second(seen).unwrap()).unwrap().metadata.uid
        };
        let first = uid(&text, "/a", "n", 0);
        assert_eq!(first, uid(&format!("# comment\n{text}"), "/a", "n", 5));
        for other in [
            uid(&text, "/b", "n", 0),
            uid(&text, "/a", "m", 0),
            uid(&with_spec("  priority: 1\n"), "/a", "n", 0),
        ] {
            assert_ne!(first, other);
        }
    }

    #[test]
    fn invalid_manifests_and_references_to_objects_are_refused() {
        let error = |text: &str| read(text).unwrap_err().to_string();
        assert_eq!(error("apiVersion: v1\nkind: Secret\n"), "the manifest is not a Pod of v1");
        assert_eq!(error("apiVersion: v1\nkind: Pod\nspec: {}\n"), "metadata.name is required");
        assert!(error("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n").contains("spec.containers"));
        let cpu = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: 5}\n";
        assert!(error(cpu).starts_with("cannot decode the manifest"), "{}", error(cpu));
        let policy = error(&with_spec("  restartPolicy: Sometimes\n"));
        assert!(policy.contains("spec.restartPolicy"), "{policy}");
        for (spec, what) in [
            ("  serviceAccountName: default\n", "serviceaccounts"),
            ("  imagePullSecrets: [{name: s}]\n", "secrets"),
            ("  volumes: [{name: v, configMap: {name: m}}]\n", "configmaps"),
            ("  volumes: [{name: v, persistentVolumeClaim: {claimName: c}}]\n", "persistentvolumeclaims"),
        ] {
            let error = error(&with_spec(spec));
            assert_eq!(error, format!("static pods may not reference {what}"));
        }
        assert!(read(&with_spec("  volumes: [{name: v, hostPath: {path: /etc}}]\n")).is_ok());
    }

    #[test]
    fn the_pods_of_a_url_are_one_pod_or_a_list_that_is_valid_as_a_whole() {
        let of = |text: &str| of_url(text.as_bytes(), "http://h/", "n").map_err(|error| error.to_string());
        let pod = of(&with_spec("")).unwrap().pop().unwrap();
        assert_eq!(pod.metadata.annotations.unwrap()[SOURCE], "http");
        assert_ne!(pod.metadata.uid, read(&with_spec("")).unwrap().metadata.uid);
        let item = |name: &str| json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
        let list =
            |items: &[Value]| json!({"apiVersion": "v1", "kind": "PodList", "items": items}).to_string();
        assert_eq!(of(&list(&[item("a"), item("b")])).unwrap().len(), 2);
        assert!(of(&list(&[])).unwrap().is_empty());
        assert_eq!(of(&list(&[item("a"), json!("b")])).unwrap_err(), "the manifest is not a Pod of v1");
        assert_eq!(of(&list(&[item("a"), item("")])).unwrap_err(), "metadata.name is required");
        let many = vec![json!(null); MAX_PODS + 1];
        assert_eq!(of(&list(&many)).unwrap_err(), "the manifest has more than 500 pods");
    }

    #[test]
    fn a_large_manifest_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.yaml");
        std::fs::write(&path, format!("# {}\n{}", "x".repeat(1 << 20), with_spec(""))).unwrap();
        let error = super::read(&path, "n").unwrap_err();
        assert!(!error.is_temporary() && !error.is_absent(), "{error:?}");
        assert!(super::read(&dir.path().join("absent"), "n").unwrap_err().is_absent());
    }
}

//! Containers: pull policy, termination message, ports, probes, hooks, environment.

use serde_json::{Map, Value};

use super::{child_of, each, fill, present};

/// Maximum length of an image's name in bytes.
const MAX_IMAGE_NAME: usize = 255;

/// Sets the defaults of a container, an init container or an ephemeral container.
pub(super) fn container(container: &mut Map<String, Value>) {
    let policy = pull_policy(container.get("image").and_then(Value::as_str).unwrap_or_default());
    fill(container, "imagePullPolicy", policy);
    fill(container, "terminationMessagePath", "/dev/termination-log");
    fill(container, "terminationMessagePolicy", "File");
    child_of(container, "resources");
    for port in each(container, "ports") {
        fill(port, "protocol", "TCP");
    }
    for variable in each(container, "env") {
        let Some(from) = present(variable, "valueFrom") else { continue };
        if let Some(field) = present(from, "fieldRef") {
            fill(field, "apiVersion", "v1");
        }
        if let Some(key) = present(from, "fileKeyRef") {
            fill(key, "optional", false);
        }
    }
    for name in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if let Some(probe) = present(container, name) {
            fill_probe(probe);
        }
    }
    if let Some(lifecycle) = present(container, "lifecycle") {
        for hook in ["postStart", "preStop"] {
            if let Some(get) = present(lifecycle, hook).and_then(|hook| present(hook, "httpGet")) {
                http_get(get);
            }
        }
    }
}

/// A resource with a limit but without a request gets the limit as its request.
pub(super) fn requests_from_limits(container: &mut Map<String, Value>) {
    let Some(resources) = present(container, "resources") else { return };
    let Some(limits) = resources.get("limits").and_then(Value::as_object).cloned() else { return };
    let Some(requests) = child_of(resources, "requests") else { return };
    for (name, limit) in limits {
        requests.entry(name).or_insert(limit);
    }
}

/// The default pull policy: `Always` for the tag `latest`, `IfNotPresent` for other tags, for digests and for invalid
/// references.
pub(super) fn pull_policy(image: &str) -> &'static str {
    let (tagged, digest) =
        image.split_once('@').map_or((image, None), |(tagged, digest)| (tagged, Some(digest)));
    let name_end = tagged.rfind('/').map_or(0, |slash| slash + 1);
    let colon = tagged[name_end..].find(':').map(|at| name_end + at);
    let (name, tag) = colon.map_or((tagged, None), |at| (&tagged[..at], Some(&tagged[at + 1..])));
    let is_latest = tag.map_or(digest.is_none(), |tag| tag == "latest");
    if is_latest && is_image_name(name) { "Always" } else { "IfNotPresent" }
}

/// Whether a text is an image's name: an optional registry, and components in lower case.
/// Source: `ParseNormalizedNamed` of github.com/distribution/reference.
fn is_image_name(name: &str) -> bool {
    let (registry, path) = match name.split_once('/') {
        Some((first, rest))
            if first.contains(['.', ':']) || first == "localhost" || first.to_lowercase() != first =>
        {
            (Some(first), rest)
        }
        _ => (None, name),
    };
    name.len() <= MAX_IMAGE_NAME
        && registry.is_none_or(|registry| {
            registry.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte))
        })
        && path.split('/').all(is_image_component)
}

/// Whether a text is lower-case letters and digits, with separators between them: a dot, one or two underscores, or
/// dashes.
fn is_image_component(text: &str) -> bool {
    let is_word = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    let separators = bytes.split(is_word).filter(|separator| !separator.is_empty());
    bytes.first().is_some_and(is_word)
        && bytes.last().is_some_and(is_word)
        && separators.into_iter().all(|separator| {
            matches!(separator, b"." | b"_" | b"__") || separator.iter().all(|byte| *byte == b'-')
        })
}

fn fill_probe(probe: &mut Map<String, Value>) {
    for (name, value) in
        [("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1), ("failureThreshold", 3)]
    {
        // Go clients write 0 for an absent value.
        if probe.get(name).is_none_or(|old| old.is_null() || old == 0) {
            probe.insert(name.to_owned(), value.into());
        }
    }
    if let Some(get) = present(probe, "httpGet") {
        http_get(get);
    }
    if let Some(grpc) = present(probe, "grpc") {
        grpc.entry("service").or_insert_with(|| "".into());
    }
}

fn http_get(get: &mut Map<String, Value>) {
    fill(get, "path", "/");
    fill(get, "scheme", "HTTP");
}

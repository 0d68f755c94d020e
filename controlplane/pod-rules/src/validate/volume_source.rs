//! Sources of volumes: the check for exactly one source, and the rules of sources that pods and persistent volumes
//! share. Source: `pkg/apis/core/validation`.

use serde_json::Value;

use super::file_path::{has_backstep, host_path_type, relative};
use super::{Causes, Path, entries, format, items, text};

/// Maximum length of the name of a volume, a colon and the address of an iSCSI target together, in bytes.
const MAX_TARGET: usize = 64;
/// Maximum length of an iSCSI name in bytes. The standard allows 223.
const MAX_ISCSI_NAME: usize = 1024;
/// Maximum size of the name of a storage driver, in bytes.
const MAX_DRIVER: usize = 63;

/// The volume that a source belongs to.
#[derive(Clone, Copy)]
pub struct Owner<'a> {
    /// Name of the volume.
    pub name: &'a str,
    /// Whether the volume belongs to a pod. False for a persistent volume.
    pub is_of_pod: bool,
}

/// A source of a volume.
pub struct GivenSource<'a> {
    /// Name of the source's field in the object, such as `hostPath`.
    pub kind: &'static str,
    /// Path of the source in upstream's errors.
    pub path: Path,
    /// The source itself.
    pub value: &'a Value,
}

/// Checks that an object has exactly one of the sources `kinds`, which are in upstream's order. Returns the first
/// source.
pub fn one<'a>(
    causes: &mut Causes,
    path: &Path,
    object: &'a Value,
    kinds: &[&'static str],
) -> Option<GivenSource<'a>> {
    let mut given = kinds.iter().copied().filter(|kind| !object[*kind].is_null());
    let Some(first) = given.next() else {
        causes.required(path, "must specify a volume type");
        return None;
    };
    for kind in given {
        // The spelling in upstream's errors.
        let name = match kind {
            "cephfs" => "cephFS",
            "downwardAPI" => "downwarAPI",
            _ => kind,
        };
        causes.forbidden(&path.field(name), "may not specify more than 1 volume type");
    }
    let name = if first == "gcePersistentDisk" { "persistentDisk" } else { first };
    Some(GivenSource { kind: first, path: path.field(name), value: &object[first] })
}

/// Checks a source that pods and persistent volumes share.
pub fn shared(causes: &mut Causes, path: &Path, kind: &str, source: &Value, owner: Owner<'_>) {
    match kind {
        "hostPath" => host_path(causes, path, source),
        "nfs" => nfs(causes, path, source),
        "iscsi" => iscsi(causes, path, source, owner),
        "fc" => fibre_channel(causes, path, source),
        "flexVolume" => flex(causes, path, source),
        "flocker" => flocker(causes, path, source),
        "quobyte" => quobyte(causes, path, source),
        "azureDisk" => azure_disk(causes, path, source),
        "storageos" => storage_os(causes, path, source, owner),
        "cinder" => {
            need(causes, path, source, &["volumeID"]);
            secret(causes, path, source, owner);
        }
        "glusterfs" => {
            need(causes, path, source, &["endpoints", "path"]);
            if !owner.is_of_pod {
                endpoints_namespace(causes, &path.field("endpointsNamespace"), &source["endpointsNamespace"]);
            }
        }
        "azureFile" => {
            need(causes, path, source, &["secretName", "shareName"]);
            if !owner.is_of_pod && source["secretNamespace"] == "" {
                causes.required(&path.field("secretNamespace"), "");
            }
        }
        "gcePersistentDisk" => {
            need(causes, path, source, &["pdName"]);
            partition(causes, path, source);
        }
        "awsElasticBlockStore" => {
            need(causes, path, source, &["volumeID"]);
            partition(causes, path, source);
        }
        "rbd" => {
            monitors(causes, path, source);
            need(causes, path, source, &["image"]);
        }
        "gitRepo" => {
            need(causes, path, source, &["repository"]);
            relative(causes, &path.field("directory"), text(&source["directory"]));
        }
        "cephfs" => monitors(causes, path, source),
        "vsphereVolume" => need(causes, path, source, &["volumePath"]),
        "photonPersistentDisk" => need(causes, path, source, &["pdID"]),
        "portworxVolume" => need(causes, path, source, &["volumeID"]),
        "scaleIO" => need(causes, path, source, &["gateway", "system", "volumeName"]),
        _ => {}
    }
}

/// Checks that these texts are not empty.
pub fn need(causes: &mut Causes, path: &Path, source: &Value, fields: &[&str]) {
    for field in fields {
        if text(&source[*field]).is_empty() {
            causes.required(&path.field(field), "");
        }
    }
}

/// Checks the name of a storage driver.
pub fn driver(causes: &mut Causes, path: &Path, name: &str) {
    if name.is_empty() {
        return causes.required(path, "");
    }
    if name.len() > MAX_DRIVER {
        causes.too_long(path, MAX_DRIVER);
    }
    causes.format(path, name, format::dns1123_subdomain(&name.to_lowercase()));
}

fn host_path(causes: &mut Causes, path: &Path, source: &Value) {
    let directory = text(&source["path"]);
    if directory.is_empty() {
        return causes.required(&path.field("path"), "");
    }
    if has_backstep(directory) {
        causes.invalid(&path.field("path"), &source["path"], "must not contain '..'");
    }
    host_path_type(causes, &path.field("type"), &source["type"]);
}

fn nfs(causes: &mut Causes, path: &Path, source: &Value) {
    need(causes, path, source, &["server", "path"]);
    let directory = text(&source["path"]);
    if !directory.starts_with('/') {
        causes.invalid(&path.field("path"), &directory.into(), "must be an absolute path");
    }
}

fn partition(causes: &mut Causes, path: &Path, source: &Value) {
    if source["partition"].as_i64().is_some_and(|number| !(0..=255).contains(&number)) {
        let detail = "must be between 1 and 255, inclusive";
        causes.invalid(&path.field("partition"), &source["partition"], detail);
    }
}

fn monitors(causes: &mut Causes, path: &Path, source: &Value) {
    if items(&source["monitors"]).next().is_none() {
        causes.required(&path.field("monitors"), "");
    }
}

/// Checks the secret of a source. In a persistent volume, the secret has a namespace.
fn secret(causes: &mut Causes, path: &Path, source: &Value, owner: Owner<'_>) {
    if !source["secretRef"].is_null() {
        let fields: &[&str] = if owner.is_of_pod { &["name"] } else { &["name", "namespace"] };
        need(causes, &path.field("secretRef"), &source["secretRef"], fields);
    }
}

fn endpoints_namespace(causes: &mut Causes, path: &Path, namespace: &Value) {
    match namespace.as_str() {
        None => {}
        Some("") => {
            let detail = "if the endpointnamespace is set, it must be a valid namespace name";
            causes.invalid(path, namespace, detail);
        }
        Some(name) => causes.format(path, name, format::dns1123_label(name)),
    }
}

fn iscsi(causes: &mut Causes, path: &Path, source: &Value, owner: Owner<'_>) {
    need(causes, path, source, &["targetPortal"]);
    let (portal, initiator) = (text(&source["targetPortal"]), source["initiatorName"].as_str());
    if !owner.is_of_pod && initiator.is_some() && is_long_target(owner.name, portal) {
        causes.invalid(&path.field("targetportal"), &portal.into(), TOO_LONG);
    }
    match text(&source["iqn"]) {
        "" => causes.required(&path.field("iqn"), ""),
        name => iscsi_name(causes, &path.field("iqn"), name, owner),
    }
    causes.in_range(&path.field("lun"), &source["lun"], 0..=255);
    let has_chap = source["chapAuthDiscovery"] == true || source["chapAuthSession"] == true;
    if has_chap && source["secretRef"].is_null() {
        causes.required(&path.field("secretRef"), "");
    }
    if !owner.is_of_pod && !source["secretRef"].is_null() {
        need(causes, &path.field("secretRef"), &source["secretRef"], &["name"]);
    }
    if let Some(name) = initiator {
        iscsi_name(causes, &path.field("initiatorname"), name, owner);
    }
}

/// The error text if the volume's name and the target's address are too long together.
pub(super) const TOO_LONG: &str = "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if \
    iscsi.initiatorName is specified.";

/// Whether the name of a volume and the address of its iSCSI target are too long for an initiator.
pub(super) fn is_long_target(name: &str, portal: &str) -> bool {
    name.len() + 1 + portal.len() > MAX_TARGET
}

fn iscsi_name(causes: &mut Causes, path: &Path, name: &str, owner: Owner<'_>) {
    let has_type = ["iqn", "eui", "naa"].iter().any(|prefix| name.starts_with(prefix));
    let detail = match has_type || !owner.is_of_pod {
        true => "must be valid format",
        false => "must be valid format starting with iqn, eui, or naa",
    };
    if !has_type || !is_iscsi_name(name) {
        causes.invalid(path, &name.into(), detail);
    }
}

fn is_iscsi_name(name: &str) -> bool {
    // The form is: a type, any one character, then `count` letters and digits.
    let has_digits = |rest: &str, count: usize| {
        let mut rest = rest.chars();
        rest.next().is_some_and(|first| first != '\n')
            && rest.as_str().len() == count
            && rest.all(|one| one.is_ascii_alphanumeric())
    };
    if let Some(rest) = name.strip_prefix("eui") {
        return has_digits(rest, 16);
    }
    if let Some(rest) = name.strip_prefix("naa") {
        return has_digits(rest, 32);
    }
    name.len() <= MAX_ISCSI_NAME && name.match_indices("iqn.").any(|(at, _)| is_qualified(&name[at + 4..]))
}

/// Whether a text is a month, the name of an authority, and a string: `2001-04.com.example:storage`.
fn is_qualified(text: &str) -> bool {
    let Some((authority, string)) = text.split_once(':') else { return false };
    let Some((date, name)) = authority.split_at_checked(8) else { return false };
    let is_date = date.bytes().enumerate().all(|(at, byte)| match at {
        4 => byte == b'-',
        7 => byte == b'.',
        _ => byte.is_ascii_digit(),
    });
    is_date
        && !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte))
        && !string.is_empty()
        && !string.contains([',', ';', '*', '&', '$', '|', ' ', '\t', '\n', '\r', '\x0c'])
}

fn fibre_channel(causes: &mut Causes, path: &Path, source: &Value) {
    let has = |list: &str| items(&source[list]).next().is_some();
    let here = path.field("targetWWNs");
    match (has("targetWWNs"), has("wwids")) {
        (false, false) => causes.required(&here, "must specify either targetWWNs or wwids, but not both"),
        (true, true) => {
            let detail = "targetWWNs and wwids can not be specified simultaneously";
            causes.invalid(&here, &source["targetWWNs"], detail);
        }
        _ => {}
    }
    if has("targetWWNs") {
        match &source["lun"] {
            Value::Null => causes.required(&path.field("lun"), "lun is required if targetWWNs is specified"),
            lun => causes.in_range(&path.field("lun"), lun, 0..=255),
        }
    }
}

fn flex(causes: &mut Causes, path: &Path, source: &Value) {
    need(causes, path, source, &["driver"]);
    for (key, _) in entries(&source["options"]) {
        let domain = key.split_once('/').map_or(key.as_str(), |(domain, _)| domain);
        let dotted = format!(".{}", domain.to_lowercase());
        if dotted.ends_with(".kubernetes.io") || dotted.ends_with(".k8s.io") {
            let detail = "kubernetes.io and k8s.io namespaces are reserved";
            causes.invalid(&path.field("options").key(key), &key.as_str().into(), detail);
        }
    }
}

fn flocker(causes: &mut Causes, path: &Path, source: &Value) {
    let name = text(&source["datasetName"]);
    match (name.is_empty(), text(&source["datasetUUID"]).is_empty()) {
        (true, true) => causes.required(path, "one of datasetName and datasetUUID is required"),
        (false, false) => {
            let detail = "datasetName and datasetUUID can not be specified simultaneously";
            causes.invalid(path, &"resource".into(), detail);
        }
        _ => {}
    }
    if name.contains('/') {
        causes.invalid(&path.field("datasetName"), &name.into(), "must not contain '/'");
    }
}

fn quobyte(causes: &mut Causes, path: &Path, source: &Value) {
    const PAIRS: &str = "must be a host:port pair or multiple pairs separated by commas";
    let registry = text(&source["registry"]);
    if registry.is_empty() {
        causes.required(&path.field("registry"), PAIRS);
    } else if text(&source["tenant"]).len() > 64 {
        let detail = "must be a UUID and may not exceed a length of 64 characters";
        causes.required(&path.field("tenant"), detail);
    } else {
        for _ in registry.split(',').filter(|pair| !is_host_and_port(pair)) {
            causes.invalid(&path.field("registry"), &registry.into(), PAIRS);
        }
    }
    need(causes, path, source, &["volume"]);
}

/// Whether a text is a host and a port. An IPv6 address is in brackets.
fn is_host_and_port(text: &str) -> bool {
    let host = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once("]:") {
            Some((_, port)) => return !port.contains([':', '[', ']']),
            None => return false,
        },
        None => text.rsplit_once(':').map(|(host, _)| host),
    };
    host.is_some_and(|host| !host.contains(':')) && !text.contains(['[', ']'])
}

fn azure_disk(causes: &mut Causes, path: &Path, source: &Value) {
    need(causes, path, source, &["diskName", "diskURI"]);
    let modes = &["None", "ReadOnly", "ReadWrite"];
    causes.optional_word(&path.field("cachingMode"), &source["cachingMode"], modes);
    let kinds = &["Dedicated", "Managed", "Shared"];
    causes.optional_word(&path.field("kind"), &source["kind"], kinds);
    let uri = text(&source["diskURI"]);
    let (prefix, known) = match source["kind"].as_str() {
        None => return,
        Some("Managed") => (
            "/subscriptions/",
            "/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}",
        ),
        Some(_) => {
            ("https://", "https://{account-name}.blob.core.windows.net/{container-name}/{disk-name}.vhd")
        }
    };
    if !uri.starts_with(prefix) {
        causes.unsupported(&path.field("diskURI"), &uri.into(), &[known]);
    }
}

fn storage_os(causes: &mut Causes, path: &Path, source: &Value, owner: Owner<'_>) {
    match text(&source["volumeName"]) {
        "" => causes.required(&path.field("volumeName"), ""),
        name => causes.format(&path.field("volumeName"), name, format::dns1123_label(name)),
    }
    let namespace = text(&source["volumeNamespace"]);
    if !namespace.is_empty() {
        causes.format(&path.field("volumeNamespace"), namespace, format::dns1123_label(namespace));
    }
    secret(causes, path, source, owner);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::found;
    use super::*;

    fn said(kind: &str, source: Value, is_of_pod: bool) -> Vec<String> {
        let owner = Owner { name: "v", is_of_pod };
        found(|causes| shared(causes, &Path::root("s"), kind, &source, owner))
    }

    #[test]
    fn an_object_has_one_source() {
        let of = |object: Value| {
            let mut first = None;
            let kinds = ["hostPath", "gcePersistentDisk", "cephfs"];
            let causes = found(|causes| {
                let one = one(causes, &Path::root("v"), &object, &kinds);
                first = one.map(|source| format!("{} at {}", source.kind, source.path));
            });
            (causes, first)
        };
        assert_eq!(of(json!({})), (vec!["v: Required value: must specify a volume type".to_owned()], None));
        let disk = "gcePersistentDisk at v.persistentDisk".to_owned();
        let forbidden = "v.cephFS: Forbidden: may not specify more than 1 volume type".to_owned();
        assert_eq!(of(json!({"gcePersistentDisk": {}, "cephfs": {}})), (vec![forbidden], Some(disk)));
    }

    #[test]
    fn sources_need_their_fields() {
        for (kind, source) in [
            ("hostPath", json!({"path": "/a", "type": "Directory"})),
            ("nfs", json!({"server": "s", "path": "/a"})),
            ("iscsi", json!({"targetPortal": "a:1", "iqn": "iqn.2001-04.com.example:disk", "lun": 0})),
            ("iscsi", json!({"targetPortal": "a:1", "iqn": "eui.0123456789abcdef"})),
            ("fc", json!({"wwids": ["a"]})),
            ("fc", json!({"targetWWNs": ["a"], "lun": 3})),
            ("flexVolume", json!({"driver": "a/b", "options": {"x": "y"}})),
            ("flocker", json!({"datasetName": "a"})),
            ("quobyte", json!({"registry": "a:1,[::1]:2", "volume": "v"})),
            ("azureDisk", json!({"diskName": "a", "diskURI": "https://a", "kind": "Shared"})),
            ("gitRepo", json!({"repository": "a", "directory": "b"})),
            ("rbd", json!({"monitors": ["a"], "image": "b"})),
            ("storageos", json!({"volumeName": "a"})),
        ] {
            assert_eq!(said(kind, source, true), [""; 0], "{kind}");
        }
        for (kind, source, expect) in [
            ("hostPath", json!({"type": "x"}), "s.path: Required value"),
            ("nfs", json!({"server": "s", "path": "a"}), "s.path: Invalid value: \"a\": must be an absolute"),
            (
                "iscsi",
                json!({"targetPortal": "a", "iqn": "x"}),
                "s.iqn: Invalid value: \"x\": must be valid format starting",
            ),
            ("iscsi", json!({"targetPortal": "a", "iqn": "iqn.2001-04.a"}), "s.iqn: Invalid value"),
            ("iscsi", json!({"targetPortal": "a", "iqn": "naa.1", "lun": 0}), "s.iqn: Invalid value"),
            ("fc", json!({}), "s.targetWWNs: Required value"),
            ("fc", json!({"targetWWNs": ["a"]}), "s.lun: Required value: lun is required"),
            (
                "flexVolume",
                json!({"driver": "a", "options": {"k8s.io/x": ""}}),
                "s.options[k8s.io/x]: Invalid",
            ),
            ("flocker", json!({"datasetName": "a/b"}), "s.datasetName: Invalid value"),
            ("quobyte", json!({"registry": "a", "volume": "v"}), "s.registry: Invalid value: \"a\""),
            (
                "azureDisk",
                json!({"diskName": "a", "diskURI": "x", "kind": "Managed"}),
                "s.diskURI: Unsupported value: \"x\"",
            ),
            ("gitRepo", json!({"repository": "a", "directory": "/b"}), "s.directory: Invalid value"),
            ("cephfs", json!({}), "s.monitors: Required value"),
            (
                "gcePersistentDisk",
                json!({"pdName": "a", "partition": 256}),
                "s.partition: Invalid value: 256",
            ),
            ("storageos", json!({"volumeName": "A"}), "s.volumeName: Invalid value"),
            ("cinder", json!({"volumeID": "a", "secretRef": {}}), "s.secretRef.name: Required value"),
        ] {
            let causes = said(kind, source, true);
            assert!(causes.len() == 1 && causes[0].starts_with(expect), "{expect}: {causes:?}");
        }
    }

    #[test]
    fn sources_of_persistent_volumes_name_namespaces() {
        let secret = json!({"volumeID": "a", "secretRef": {"name": "s"}});
        assert!(said("cinder", secret.clone(), true).is_empty());
        assert_eq!(said("cinder", secret, false), ["s.secretRef.namespace: Required value"]);
        let endpoints = json!({"endpoints": "e", "path": "p", "endpointsNamespace": "A"});
        assert!(said("glusterfs", endpoints.clone(), true).is_empty());
        assert!(
            said("glusterfs", endpoints, false)[0].starts_with("s.endpointsNamespace: Invalid value: \"A\"")
        );
        let long = "x".repeat(64);
        let target = json!({"targetPortal": long, "iqn": "eui.0123456789abcdef", "initiatorName": "eui.0123456789abcdef"});
        assert!(said("iscsi", target.clone(), true).is_empty(), "the caller checks the name");
        assert!(said("iscsi", target, false)[0].starts_with("s.targetportal: Invalid value"));
    }
}

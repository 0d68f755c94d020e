//! Mounts and block devices of containers. Sources: `ValidateVolumeMounts` and `ValidateVolumeDevices` of
//! `pkg/apis/core/validation`.

use std::collections::HashSet;

use serde_json::Value;

use super::file_path::{has_backstep, relative};
use super::volume::Volumes;
use super::{Causes, Path, items, text};

/// The names and the paths of a list of mounts or devices.
struct MountNames<'a> {
    names: HashSet<&'a str>,
    paths: HashSet<&'a str>,
}

impl<'a> MountNames<'a> {
    fn of(list: &'a Value, path: &str) -> Self {
        MountNames {
            names: items(list).map(|(_, one)| text(&one["name"])).collect(),
            paths: items(list).map(|(_, one)| text(&one[path])).collect(),
        }
    }
}

/// Checks the mounts and the block devices of a container.
pub(super) fn all(causes: &mut Causes, path: &Path, container: &Value, volumes: &Volumes<'_>) {
    let devices = MountNames::of(&container["volumeDevices"], "devicePath");
    mounts(causes, &path.field("volumeMounts"), container, &devices, volumes);
    let mounts = MountNames::of(&container["volumeMounts"], "mountPath");
    self::devices(causes, &path.field("volumeDevices"), container, &mounts, volumes);
}

fn mounts(
    causes: &mut Causes,
    path: &Path,
    container: &Value,
    devices: &MountNames<'_>,
    volumes: &Volumes<'_>,
) {
    let mut paths = HashSet::new();
    for (index, mount) in items(&container["volumeMounts"]) {
        let here = path.index(index);
        let (name, at) = (text(&mount["name"]), text(&mount["mountPath"]));
        if name.is_empty() {
            causes.required(&here.field("name"), "");
        }
        if !volumes.contains_key(name) {
            causes.not_found(&here.field("name"), &name.into());
        }
        if at.is_empty() {
            causes.required(&here.field("mountPath"), "");
        }
        if !paths.insert(at) {
            causes.invalid(&here.field("mountPath"), &at.into(), "must be unique");
        }
        if devices.names.contains(name) {
            causes.invalid(&here.field("name"), &name.into(), "must not already exist in volumeDevices");
        }
        if devices.paths.contains(at) {
            let detail = "must not already exist as a path in volumeDevices";
            causes.invalid(&here.field("mountPath"), &at.into(), detail);
        }
        let (sub, expr) = (text(&mount["subPath"]), text(&mount["subPathExpr"]));
        // Upstream reports the following fields without the index of the mount.
        relative(causes, &path.field("subPath"), sub);
        if !sub.is_empty() && !expr.is_empty() {
            let detail = "subPathExpr and subPath are mutually exclusive";
            causes.invalid(&here.field("subPathExpr"), &expr.into(), detail);
        }
        relative(causes, &path.field("subPathExpr"), expr);
        propagation(causes, &path.field("mountPropagation"), mount, container);
        recursive(causes, &path.field("recursiveReadOnly"), mount);
    }
}

fn propagation(causes: &mut Causes, path: &Path, mount: &Value, container: &Value) {
    let propagation = &mount["mountPropagation"];
    causes.optional_word(path, propagation, &["Bidirectional", "HostToContainer", "None"]);
    if propagation == "Bidirectional" && container["securityContext"]["privileged"] != true {
        causes.forbidden(path, "Bidirectional mount propagation is available only to privileged containers");
    }
}

fn recursive(causes: &mut Causes, path: &Path, mount: &Value) {
    match mount["recursiveReadOnly"].as_str() {
        None | Some("Disabled") => {}
        Some("Enabled" | "IfPossible") => {
            if mount["readOnly"] != true {
                causes.forbidden(path, "may only be specified when readOnly is true");
            }
            if !matches!(mount["mountPropagation"].as_str(), None | Some("None")) {
                let detail = "may only be specified when mountPropagation is None or not specified";
                causes.forbidden(path, detail);
            }
        }
        Some(_) => {
            let known = &["Disabled", "Enabled", "IfPossible"];
            causes.unsupported(path, &mount["recursiveReadOnly"], known);
        }
    }
}

fn devices(
    causes: &mut Causes,
    path: &Path,
    container: &Value,
    mounts: &MountNames<'_>,
    volumes: &Volumes<'_>,
) {
    let (mut names, mut paths) = (HashSet::new(), HashSet::new());
    for (index, device) in items(&container["volumeDevices"]) {
        let (name, at) = (text(&device["name"]), text(&device["devicePath"]));
        let (by_name, by_path) = (path.index(index).field("name"), path.index(index).field("devicePath"));
        if name.is_empty() {
            causes.required(&by_name, "");
        }
        if names.contains(name) {
            causes.invalid(&by_name, &name.into(), "must be unique");
        }
        match volumes.get(name) {
            None => causes.not_found(&by_name, &name.into()),
            Some(volume) if volume["persistentVolumeClaim"].is_null() && volume["ephemeral"].is_null() => {
                let detail =
                    "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode";
                causes.invalid(&by_name, &name.into(), detail);
            }
            Some(_) => {}
        }
        if at.is_empty() {
            causes.required(&by_path, "");
        }
        if paths.contains(at) {
            causes.invalid(&by_path, &at.into(), "must be unique");
        }
        if has_backstep(at) {
            causes.invalid(&by_path, &at.into(), "can not contain backsteps ('..')");
        } else {
            paths.insert(at);
        }
        if mounts.names.contains(name) {
            causes.invalid(&by_name, &name.into(), "must not already exist in volumeMounts");
        }
        if mounts.paths.contains(at) {
            causes.invalid(&by_path, &at.into(), "must not already exist as a path in volumeMounts");
        }
        if !name.is_empty() {
            names.insert(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::found;
    use super::*;

    fn said(container: &Value) -> Vec<String> {
        let claim = json!({"persistentVolumeClaim": {"claimName": "c"}});
        let directory = json!({"emptyDir": {}});
        let volumes = Volumes::from([("claim", &claim), ("other", &claim), ("directory", &directory)]);
        found(|causes| all(causes, &Path::root("c"), container, &volumes))
    }

    fn device(name: &str, path: &str) -> Value {
        json!({"name": name, "devicePath": path})
    }

    fn mount(more: Value) -> Value {
        let mut mount = json!({"name": "directory", "mountPath": "/d"});
        mount.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        mount
    }

    #[test]
    fn block_devices_are_claims_and_have_their_own_path() {
        let of = |devices: Value| said(&json!({"volumeDevices": devices}));
        assert!(of(json!([device("claim", "/dev/a"), device("other", "/dev/b")])).is_empty());
        let at = "c.volumeDevices[0]";
        assert_eq!(of(json!([device("missing", "/dev/a")])), [format!("{at}.name: Not found: \"missing\"")]);
        assert!(of(json!([device("directory", "/dev/a")]))[0].contains("can only use volume source type"));
        assert_eq!(
            of(json!([device("claim", "/dev/../a")])),
            [format!("{at}.devicePath: Invalid value: \"/dev/../a\": can not contain backsteps ('..')")]
        );
        assert_eq!(of(json!([device("claim", "")])), [format!("{at}.devicePath: Required value")]);
        let twice = of(json!([device("claim", "/dev/a"), device("claim", "/dev/a")]));
        assert_eq!(
            twice,
            [
                "c.volumeDevices[1].name: Invalid value: \"claim\": must be unique",
                "c.volumeDevices[1].devicePath: Invalid value: \"/dev/a\": must be unique",
            ]
        );
    }

    #[test]
    fn a_volume_is_a_mount_or_a_device() {
        let both = said(&json!({"volumeDevices": [device("claim", "/a")],
            "volumeMounts": [{"name": "claim", "mountPath": "/a"}]}));
        let expect = [
            "c.volumeMounts[0].name: Invalid value: \"claim\": must not already exist in volumeDevices",
            "c.volumeMounts[0].mountPath: Invalid value: \"/a\": must not already exist as a path in volumeDevices",
            "c.volumeDevices[0].name: Invalid value: \"claim\": must not already exist in volumeMounts",
            "c.volumeDevices[0].devicePath: Invalid value: \"/a\": must not already exist as a path in volumeMounts",
        ];
        assert_eq!(both, expect);
    }

    #[test]
    fn recursive_read_only_mounts_are_read_only() {
        let of = |more: Value| said(&json!({"volumeMounts": [mount(more)]}));
        assert!(of(json!({"recursiveReadOnly": "Enabled", "readOnly": true})).is_empty());
        assert!(of(json!({"recursiveReadOnly": "Disabled"})).is_empty());
        let at = "c.volumeMounts.recursiveReadOnly";
        assert_eq!(
            of(json!({"recursiveReadOnly": "IfPossible", "mountPropagation": "HostToContainer"})),
            [
                format!("{at}: Forbidden: may only be specified when readOnly is true"),
                format!(
                    "{at}: Forbidden: may only be specified when mountPropagation is None or not specified"
                ),
            ]
        );
        assert!(
            of(json!({"recursiveReadOnly": "x"}))[0].starts_with(&format!("{at}: Unsupported value: \"x\""))
        );
        let sub = of(json!({"subPath": "../x"}));
        assert_eq!(sub, ["c.volumeMounts.subPath: Invalid value: \"../x\": must not contain '..'"]);
    }
}

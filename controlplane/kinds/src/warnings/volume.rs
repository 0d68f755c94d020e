//! Volumes of pods, PersistentVolumes, claims and storage classes.

use serde_json::Value;

use super::{Found, MAX_COMPARED, fraction, items, keys, label, node_term, text};

const STORAGE_CLASS: (&str, &str) = (
    "volume.beta.kubernetes.io/storage-class",
    "deprecated since v1.8; use \"storageClassName\" attribute instead",
);
const MOUNT_OPTIONS: (&str, &str) = (
    "volume.beta.kubernetes.io/mount-options",
    "deprecated since v1.31; use \"mountOptions\" attribute instead",
);
/// Deprecated or removed volume types: the field, its name in the warning as upstream writes it, and the message.
const REMOVED: [(&str, &str, &str); 9] = [
    ("photonPersistentDisk", "photonPersistentDisk", "deprecated in v1.11, non-functional in v1.16+"),
    ("gitRepo", "gitRepo", "deprecated in v1.11, and disabled by default in v1.33+"),
    ("scaleIO", "scaleIO", "deprecated in v1.16, non-functional in v1.22+"),
    ("flocker", "flocker", "deprecated in v1.22, non-functional in v1.25+"),
    ("storageos", "storageOS", "deprecated in v1.22, non-functional in v1.25+"),
    ("quobyte", "quobyte", "deprecated in v1.22, non-functional in v1.25+"),
    ("glusterfs", "glusterfs", "deprecated in v1.25, non-functional in v1.26+"),
    ("cephfs", "cephfs", "deprecated in v1.28, non-functional in v1.31+"),
    ("rbd", "rbd", "deprecated in v1.28, non-functional in v1.31+"),
];
/// The types of [`REMOVED`] that cause a warning in PersistentVolumes.
const REMOVED_PERSISTENT: [&str; 6] =
    ["cephfs", "photonPersistentDisk", "scaleIO", "storageos", "glusterfs", "rbd"];

/// A path in a volume, and the source that it comes from.
struct FilePath<'a> {
    path: &'a str,
    source: Source<'a>,
}

/// A source of a projected volume. Paths refer to their source and do not copy its name, which may be very long.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// The only source of its volume, so warnings show the path alone.
    Whole,
    Named {
        kind: &'static str,
        name: &'a str,
    },
    Unnamed(&'static str),
}

/// Warns about the volumes of a pod.
pub(super) fn of_pod(found: &mut Found, prefix: &str, volumes: &Value) {
    for (index, volume) in items(volumes) {
        for (field, shown, message) in REMOVED {
            if !volume[field].is_null() {
                found.add(format!("{prefix}spec.volumes[{index}].{shown}: {message}"));
            }
        }
        let claim = &volume["ephemeral"]["volumeClaimTemplate"]["spec"];
        if !claim.is_null() {
            let path = format!("{prefix}spec.volumes[{index}].ephemeral.volumeClaimTemplate.spec");
            claim_spec(found, &path, claim);
        }
    }
    for (_, volume) in items(volumes) {
        overlaps(found, volume);
    }
}

/// Warns about a PersistentVolume.
pub(super) fn persistent(found: &mut Found, volume: &Value) {
    let spec = &volume["spec"];
    annotations(found, volume, &[STORAGE_CLASS, MOUNT_OPTIONS]);
    if spec["persistentVolumeReclaimPolicy"] == "Recycle" {
        found.add(
            "spec.persistentVolumeReclaimPolicy: The Recycle reclaim policy is deprecated. Instead, the recommended approach \
             is to use dynamic provisioning."
                .to_owned(),
        );
    }
    for (index, term) in items(&spec["nodeAffinity"]["required"]["nodeSelectorTerms"]) {
        node_term(found, &format!("spec.nodeAffinity.required.nodeSelectorTerms[{index}]"), term, false);
    }
    for field in REMOVED_PERSISTENT {
        if let Some((_, shown, message)) = REMOVED.iter().find(|(name, ..)| *name == field)
            && !spec[field].is_null()
        {
            found.add(format!("spec.{shown}: {message}"));
        }
    }
}

/// Warns about a claim.
pub(super) fn claim(found: &mut Found, claim: &Value) {
    annotations(found, claim, &[STORAGE_CLASS]);
    claim_spec(found, "spec", &claim["spec"]);
}

/// Warns about the sizes in a claim.
pub(super) fn claim_spec(found: &mut Found, path: &str, spec: &Value) {
    for list in ["requests", "limits"] {
        let amount = &spec["resources"][list]["storage"];
        found.add_at(|| format!("{path}.resources.{list}[storage]"), fraction(amount));
    }
}

pub(super) fn class(found: &mut Found, class: &Value) {
    for (index, topology) in items(&class["allowedTopologies"]) {
        for (number, expression) in items(&topology["matchLabelExpressions"]) {
            if let Some((_, message)) = label(text(&expression["key"])) {
                found.add(format!(
                    "allowedTopologies[{index}].matchLabelExpressions[{number}].key: {message}"
                ));
            }
        }
    }
}

pub(super) fn capacity(found: &mut Found, capacity: &Value) {
    let topology = &capacity["nodeTopology"];
    node_term(found, "nodeTopology", topology, false);
    for (key, message) in keys(&topology["matchLabels"]).filter_map(label) {
        found.add(format!("nodeTopology.matchLabels.{key}: {message}"));
    }
}

fn annotations(found: &mut Found, object: &Value, deprecated: &[(&str, &str)]) {
    for (key, message) in deprecated {
        if !object["metadata"]["annotations"][*key].is_null() {
            found.add(format!("metadata.annotations[{key}]: {message}"));
        }
    }
}

/// Warns about files of a volume that hide each other.
fn overlaps(found: &mut Found, volume: &Value) {
    let name = text(&volume["name"]);
    for (field, kind, object) in
        [("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName"), ("downwardAPI", "", "")]
    {
        let source = &volume[field];
        let what = match kind {
            "" => "DownwardAPI".to_owned(),
            kind => format!("{kind} {:?}", text(&source[object])),
        };
        compare(found, &format!("volume {name:?} ({what})"), &paths_of(source, Source::Whole));
    }
    let mut paths = Vec::new();
    for (_, source) in items(&volume["projected"]["sources"]) {
        if source.as_object().is_some_and(serde_json::Map::is_empty) {
            found.add(format!("volume {name:?} (Projected) has no sources provided"));
        }
        for (field, kind) in [("configMap", "ConfigMap"), ("secret", "Secret")] {
            let object = &source[field];
            paths.extend(paths_of(object, Source::Named { kind, name: text(&object["name"]) }));
        }
        paths.extend(paths_of(&source["downwardAPI"], Source::Unnamed("DownwardAPI")));
        let token = text(&source["serviceAccountToken"]["path"]);
        if !token.is_empty() {
            paths.push(FilePath {
                path: token.trim_end_matches('/'),
                source: Source::Unnamed("ServiceAccountToken"),
            });
        }
    }
    compare(found, &format!("volume {name:?} (Projected)"), &paths);
}

fn paths_of<'a>(object: &'a Value, source: Source<'a>) -> Vec<FilePath<'a>> {
    let paths = items(&object["items"]).map(|(_, item)| text(&item["path"]).trim_end_matches('/'));
    paths.map(|path| FilePath { path, source }).collect()
}

fn compare(found: &mut Found, volume: &str, paths: &[FilePath<'_>]) {
    for (index, path) in paths.iter().enumerate().filter(|(_, path)| !path.path.is_empty()) {
        for other in paths.iter().take(index.min(MAX_COMPARED)).filter(|other| path.overlaps(other)) {
            if found.is_full() {
                return;
            }
            found.add(format!("{volume}: overlapping paths: {} with {}", path.shown(), other.shown()));
        }
    }
}

// === impl FilePath ===

impl FilePath<'_> {
    /// Whether the paths are equal, or one path is a parent directory of the other path.
    fn overlaps(&self, other: &Self) -> bool {
        let is_below = |below: &str, above: &str| {
            below.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        !other.path.is_empty() && (is_below(self.path, other.path) || is_below(other.path, self.path))
    }

    fn shown(&self) -> String {
        match self.source {
            Source::Whole => format!("{:?}", self.path),
            Source::Named { kind, name } => format!("{:?} ({kind} {name:?})", self.path),
            Source::Unnamed(kind) => format!("{:?} ({kind})", self.path),
        }
    }
}

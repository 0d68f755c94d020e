//! Files of projected volumes, computed from the objects that they refer to. Pure.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use coracle_values::CollectMap;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{
    ConfigMap, DownwardAPIVolumeFile, KeyToPath, Pod, Secret, ServiceAccountTokenProjection, Volume,
    VolumeProjection,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::downward;
use super::error::SetUpError;

const DEFAULT_MODE: u32 = 0o644;
/// Maximum bytes of the files that the node writes for one pod. A key can be projected to many files, which are in
/// memory and do not count for the pod's memory limit.
pub(super) const POD_MAX: usize = 64 << 20;
/// Maximum names in the path of a file. The removal and the comparison of directories need an open descriptor for each
/// level.
const DEPTH_MAX: usize = 64;

/// The bytes that remain for files of one volume.
pub(super) struct Budget {
    left: usize,
    /// Bytes that the files of this volume take.
    taken: usize,
    /// Minimum bytes that a file takes: the size of a page.
    page: usize,
}

/// A volume that is projected into files. `configMap`, `secret` and `downwardAPI` volumes are projections with one
/// source and have directories of their own type.
#[derive(Clone, Debug)]
pub(super) struct Projection {
    pub(super) plugin: &'static str,
    pub(super) mode: u32,
    pub(super) parts: Vec<Part>,
}

#[derive(Clone, Debug)]
pub(super) enum Part {
    Object(ObjectPart),
    Downward(Vec<DownwardAPIVolumeFile>),
    Token(ServiceAccountTokenProjection),
}

#[derive(Clone, Debug)]
pub(super) struct ObjectPart {
    pub(super) kind: Kind,
    pub(super) name: String,
    optional: bool,
    items: Vec<KeyToPath>,
}

/// Kinds of objects that volumes are filled from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    ConfigMap,
    Secret,
}

/// The content of a config map or secret.
pub(super) type Data = BTreeMap<String, Vec<u8>>;

/// One file to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct File {
    pub(super) data: Vec<u8>,
    pub(super) mode: u32,
    pub(super) owner: Option<u32>,
}

/// Files by path in the volume.
pub(super) type Payload = BTreeMap<String, File>;

// === impl Budget ===

impl Budget {
    /// The budget of one volume on a machine with this page size in bytes. The pod's other volumes have `of_others`
    /// bytes of files.
    pub(super) fn new(page: usize, of_others: usize) -> Self {
        Self { left: POD_MAX.saturating_sub(of_others), taken: 0, page }
    }

    /// Bytes of the files.
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// Takes the bytes of one file, and a page for each directory of its path.
    ///
    /// # Errors
    /// When the pod's files are too large, or the path is too deep.
    pub(super) fn take(&mut self, path: &str, bytes: usize) -> Result<(), SetUpError> {
        let depth = path.split('/').count();
        if depth > DEPTH_MAX {
            return Err(SetUpError::TooDeep { most: DEPTH_MAX });
        }
        let directories = (depth - 1) * self.page;
        let needed = bytes.max(1).next_multiple_of(self.page).checked_add(directories);
        let left = needed.and_then(|needed| self.left.checked_sub(needed));
        let left = left.ok_or(SetUpError::TooLarge { mebibytes: POD_MAX >> 20 })?;
        self.taken += self.left - left;
        self.left = left;
        Ok(())
    }
}

// === impl Kind ===

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::ConfigMap => "configmap",
            Kind::Secret => "secret",
        }
    }
}

pub(super) fn config_map_data(map: ConfigMap) -> Data {
    let text = map.data.into_iter().flatten().map(|(key, value)| (key, value.into_bytes()));
    let binary = map.binary_data.into_iter().flatten().map(|(key, ByteString(value))| (key, value));
    text.chain(binary).collect_map()
}

pub(super) fn secret_data(secret: Secret) -> Data {
    let data = secret.data.into_iter().flatten().map(|(key, ByteString(value))| (key, value));
    let text = secret.string_data.into_iter().flatten().map(|(key, value)| (key, value.into_bytes()));
    data.chain(text).collect_map()
}

// === impl Projection ===

impl Projection {
    /// None if the volume has another type, or projects an unsupported source.
    pub(super) fn of(volume: &Volume) -> Option<Projection> {
        let mode = |mode: Option<i32>| mode.and_then(|m| u32::try_from(m).ok()).unwrap_or(DEFAULT_MODE);
        let object = |kind, name: Option<&String>, optional: Option<bool>, items: &Option<Vec<KeyToPath>>| {
            Part::Object(ObjectPart {
                kind,
                name: name.cloned().unwrap_or_default(),
                optional: optional == Some(true),
                items: items.clone().unwrap_or_default(),
            })
        };
        if let Some(map) = &volume.config_map {
            let part = object(Kind::ConfigMap, Some(&map.name), map.optional, &map.items);
            return Some(Projection {
                plugin: "kubernetes.io~configmap",
                mode: mode(map.default_mode),
                parts: vec![part],
            });
        }
        if let Some(secret) = &volume.secret {
            let part = object(Kind::Secret, secret.secret_name.as_ref(), secret.optional, &secret.items);
            return Some(Projection {
                plugin: "kubernetes.io~secret",
                mode: mode(secret.default_mode),
                parts: vec![part],
            });
        }
        if let Some(downward) = &volume.downward_api {
            let part = Part::Downward(downward.items.clone().unwrap_or_default());
            return Some(Projection {
                plugin: "kubernetes.io~downward-api",
                mode: mode(downward.default_mode),
                parts: vec![part],
            });
        }
        let projected = volume.projected.as_ref()?;
        let parts = projected.sources.iter().flatten().map(|source: &VolumeProjection| {
            if let Some(map) = &source.config_map {
                Some(object(Kind::ConfigMap, Some(&map.name), map.optional, &map.items))
            } else if let Some(secret) = &source.secret {
                Some(object(Kind::Secret, Some(&secret.name), secret.optional, &secret.items))
            } else if let Some(downward) = &source.downward_api {
                Some(Part::Downward(downward.items.clone().unwrap_or_default()))
            } else {
                source.service_account_token.clone().map(Part::Token)
            }
        });
        Some(Projection {
            plugin: "kubernetes.io~projected",
            mode: mode(projected.default_mode),
            parts: parts.collect::<Option<_>>()?,
        })
    }
}

// === impl ObjectPart ===

impl ObjectPart {
    /// Bytes of the files of this source, with a page for each file and each directory.
    pub(super) fn weight(&self, data: &Data, page: usize) -> usize {
        let of = |path: &str, value: &Vec<u8>| value.len().saturating_add(pages(path).saturating_mul(page));
        if self.items.is_empty() {
            return data.iter().map(|(key, value)| of(key, value)).fold(0, usize::saturating_add);
        }
        let found = self.items.iter().filter_map(|item| Some(of(&item.path, data.get(&item.key)?)));
        found.fold(0, usize::saturating_add)
    }

    /// The files of this source. No data means that the object does not exist.
    pub(super) fn files(
        &self,
        data: Option<&Data>,
        default: u32,
        budget: &mut Budget,
    ) -> Result<Payload, SetUpError> {
        let mut file = |path: &str, value: &Vec<u8>, mode: Option<i32>| {
            budget.take(path, value.len())?;
            let mode = mode.and_then(|m| u32::try_from(m).ok()).unwrap_or(default);
            Ok::<_, SetUpError>(File { data: value.clone(), mode, owner: None })
        };
        let Some(data) = data else {
            return if self.optional {
                Ok(Payload::new())
            } else {
                Err(SetUpError::NotFound { kind: self.kind.name(), name: self.name.clone() })
            };
        };
        if self.items.is_empty() {
            return data.iter().map(|(key, value)| Ok((key.clone(), file(key, value, None)?))).collect();
        }
        let mut files = Payload::new();
        for item in &self.items {
            match data.get(&item.key) {
                Some(value) => {
                    files.insert(clean(&item.path), file(&item.path, value, item.mode)?);
                }
                None if self.optional => {}
                None => return Err(SetUpError::NoKey { kind: self.kind.name(), key: item.key.clone() }),
            }
        }
        Ok(files)
    }
}

/// A file and its directories.
fn pages(path: &str) -> usize {
    path.split('/').count()
}

/// Bytes of files of the downward API, with a page for each file and each directory. A file is assumed to have 16
/// pages, because it may show all annotations.
pub(super) fn downward_weight(items: &[DownwardAPIVolumeFile], page: usize) -> usize {
    let of = |item: &DownwardAPIVolumeFile| (pages(&item.path) + 16).saturating_mul(page);
    items.iter().map(of).fold(0, usize::saturating_add)
}

/// The files of the downward API.
pub(super) fn downward_files(
    pod: &Pod,
    node: &BTreeMap<String, Quantity>,
    items: &[DownwardAPIVolumeFile],
    default: u32,
    budget: &mut Budget,
) -> Result<Payload, SetUpError> {
    let mut files = Payload::new();
    for item in items {
        let data = downward::content(pod, node, item)?.into_bytes();
        budget.take(&item.path, data.len())?;
        let mode = item.mode.and_then(|m| u32::try_from(m).ok()).unwrap_or(default);
        files.insert(clean(&item.path), File { data, mode, owner: None });
    }
    Ok(files)
}

/// The path of a file without `.` and repeated slashes, which the API server allows. A path that leads out of the
/// volume still leads out of the volume.
pub(super) fn clean(path: &str) -> String {
    let parts = Path::new(path).components().filter(|part| *part != Component::CurDir);
    parts.collect::<PathBuf>().to_string_lossy().into_owned()
}

/// The file of a token: readable by its owner only, if there is an owner or a group.
pub(super) fn token_file(token: String, default: u32, owner: Option<u32>, fs_group: Option<u32>) -> File {
    let mode = if owner.is_some() || fs_group.is_some() { 0o600 } else { default };
    File { data: token.into_bytes(), mode, owner }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn part(volume: serde_json::Value) -> (ObjectPart, u32) {
        let projection =
            Projection::of(&serde_json::from_value(volume).expect("volume")).expect("a projection");
        match projection.parts.into_iter().next() {
            Some(Part::Object(part)) => (part, projection.mode),
            other => panic!("no object: {other:?}"),
        }
    }

    fn data() -> Data {
        BTreeMap::from([("a".to_owned(), b"1".to_vec()), ("b".to_owned(), b"2".to_vec())])
    }

    fn files_of(part: &ObjectPart, data: Option<&Data>, mode: u32) -> Result<Payload, SetUpError> {
        part.files(data, mode, &mut Budget::new(4096, 0))
    }

    #[test]
    fn a_file_takes_a_page_of_the_machine_at_least() {
        for page in [4 << 10, 64 << 10] {
            let mut budget = Budget::new(page, 0);
            assert!((0..POD_MAX / page).all(|_| budget.take("f", 1).is_ok()), "{page}");
            assert!(budget.take("f", 1).is_err(), "{page}");
        }
    }

    #[test]
    fn the_directories_of_a_path_take_memory_and_their_depth_is_limited() {
        let mut budget = Budget::new(4096, 0);
        let deepest = ["d"; DEPTH_MAX].join("/");
        let count = (0..).take_while(|_| budget.take(&deepest, 1).is_ok()).count();
        assert_eq!(count, POD_MAX / 4096 / DEPTH_MAX);
        let deeper = Budget::new(4096, 0).take(&format!("{deepest}/f"), 1).expect_err("too deep");
        assert!(matches!(deeper, SetUpError::TooDeep { .. }), "{deeper}");
    }

    #[test]
    fn files_of_a_pod_cannot_multiply_a_value_without_end() {
        let many = |count: usize| -> Vec<_> {
            (0..count).map(|at| json!({"key": "k", "path": format!("f{at}")})).collect()
        };
        let large = Data::from([("k".to_owned(), vec![0; 1 << 20])]);
        let (part, mode) = part(json!({"name": "v", "secret": {"secretName": "s", "items": many(40)}}));
        let mut budget = Budget::new(4096, 0);
        assert_eq!(part.files(Some(&large), mode, &mut budget).expect("below the limit").len(), 40);
        let second = part.files(Some(&large), mode, &mut budget).expect_err("a second volume of the pod");
        assert!(matches!(second, SetUpError::TooLarge { .. }), "{second}");
        let (part, mode) =
            self::part(json!({"name": "v", "configMap": {"name": "c", "items": many(20_000)}}));
        let empty = Data::from([("k".to_owned(), Vec::new())]);
        files_of(&part, Some(&empty), mode).expect_err("each file takes memory");
    }

    #[test]
    fn all_keys_become_files_unless_items_choose() {
        let (all, mode) = part(json!({"name": "v", "configMap": {"name": "c", "defaultMode": 0o400}}));
        let files = files_of(&all, Some(&data()), mode).expect("files");
        assert_eq!(files.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(files["a"].mode, 0o400);
        let (some, mode) = part(
            json!({"name": "v", "secret": {"secretName": "s", "items": [{"key": "b", "path": "deep/c", "mode": 0o600}]}}),
        );
        let files = files_of(&some, Some(&data()), mode).expect("files");
        assert_eq!(
            files,
            Payload::from([("deep/c".to_owned(), File { data: b"2".to_vec(), mode: 0o600, owner: None })])
        );
    }

    #[test]
    fn paths_are_cleaned_but_do_not_become_paths_in_the_volume() {
        let paths = ["./a", "a//b/", "a/./b", "../x", "/x", "a/../../x", "."].map(clean);
        assert_eq!(paths, ["a", "a/b", "a/b", "../x", "/x", "a/../../x", ""]);
        let (items, mode) = part(
            json!({"name": "v", "configMap": {"name": "c", "items": [{"key": "a", "path": "./ca.crt"}]}}),
        );
        let files = files_of(&items, Some(&data()), mode).expect("files");
        assert_eq!(files.keys().collect::<Vec<_>>(), ["ca.crt"]);
    }

    #[test]
    fn a_missing_object_or_key_is_upstreams_error_unless_optional() {
        let (map, mode) =
            part(json!({"name": "v", "configMap": {"name": "y", "items": [{"key": "k", "path": "k"}]}}));
        assert_eq!(files_of(&map, None, mode).expect_err("absent").to_string(), "configmap \"y\" not found");
        assert_eq!(
            files_of(&map, Some(&data()), mode).expect_err("no key").to_string(),
            "configmap references non-existent config key: k"
        );
        let (secret, mode) =
            part(json!({"name": "v", "secret": {"secretName": "s", "items": [{"key": "k", "path": "k"}]}}));
        assert_eq!(
            files_of(&secret, Some(&data()), mode).expect_err("no key").to_string(),
            "references non-existent secret key: k"
        );
        let (optional, mode) = part(
            json!({"name": "v", "secret": {"secretName": "s", "optional": true, "items": [{"key": "k", "path": "k"}]}}),
        );
        assert_eq!(files_of(&optional, None, mode).expect("optional"), Payload::new());
        assert_eq!(files_of(&optional, Some(&data()), mode).expect("optional"), Payload::new());
    }

    #[test]
    fn a_projection_with_an_unsupported_source_is_rejected() {
        let volume = json!({"name": "v", "projected": {"sources": [{"clusterTrustBundle": {"path": "x"}}]}});
        assert!(Projection::of(&serde_json::from_value(volume).expect("volume")).is_none());
    }
}

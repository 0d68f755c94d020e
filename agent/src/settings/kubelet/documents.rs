//! The files of one configuration: the file of `--config`, and the files of `--config-dir`, which are merged into it.
//!
//! Source: `mergeKubeletConfigurations` of upstream's `cmd/kubelet/app`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_yaml_ng::{Mapping, Value};

/// Extension of the files of `--config-dir`, as in the kubelet.
const EXTENSION: &str = "conf";

/// One file: its fields, and its name in errors.
pub(super) struct Document {
    pub(super) place: String,
    pub(super) fields: Mapping,
}

/// The merged fields of all files. Each file takes precedence over earlier files, by the rules of JSON merge patches
/// (RFC 7396): objects are merged, arrays and single values are replaced, and null removes a field.
pub(super) fn merged(documents: &[Document]) -> Mapping {
    let mut all = documents.first().map(|document| document.fields.clone()).unwrap_or_default();
    for document in documents.iter().skip(1) {
        merge(&mut all, &document.fields);
    }
    all
}

fn merge(target: &mut Mapping, patch: &Mapping) {
    for (key, value) in patch {
        match value {
            Value::Null => drop(target.remove(key)),
            // A new object is merged into an empty object, which removes its nulls.
            Value::Mapping(patch) => {
                let mut below = match target.get_mut(key) {
                    Some(Value::Mapping(below)) => std::mem::take(below),
                    _ => Mapping::new(),
                };
                merge(&mut below, patch);
                target.insert(key.clone(), Value::Mapping(below));
            }
            value => drop(target.insert(key.clone(), value.clone())),
        }
    }
}

/// The name in errors of the last file that has the field at a path. Without such a file, the first file.
pub(super) fn place<'a>(documents: &'a [Document], path: &str) -> &'a str {
    let giving = documents.iter().rev().find(|document| has(&document.fields, path));
    giving.or(documents.first()).map_or("", |document| document.place.as_str())
}

fn has(fields: &Mapping, path: &str) -> bool {
    match path.split_once('.') {
        Some((first, rest)) => {
            fields.get(first).and_then(Value::as_mapping).is_some_and(|below| has(below, rest))
        }
        None => fields.contains_key(path),
    }
}

/// The files of a directory and of its subdirectories, in the order of their names. Files without the extension `.conf`
/// are ignored.
pub(crate) fn in_directory(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let context = || format!("cannot read the directory {}", directory.display());
    let mut entries = std::fs::read_dir(directory)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(context)?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.path();
        // Links to directories are not followed, as in the kubelet.
        if entry.file_type().with_context(context)?.is_dir() {
            found.extend(in_directory(&path)?);
        } else if path.extension().is_some_and(|extension| extension == EXTENSION) {
            found.push(path);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(place: &str, yaml: &str) -> Document {
        Document { place: place.to_owned(), fields: serde_yaml_ng::from_str(yaml).unwrap() }
    }

    #[test]
    fn later_files_replace_values_and_arrays_merge_objects_and_remove_by_null() {
        let documents = [
            document("a", "{maxPods: 5, clusterDNS: [a, b], evictionHard: {x: 1, y: 2}, port: 1}"),
            document("b", "{maxPods: 6, clusterDNS: [c], evictionHard: {y: 3, z: 4}, port: null}"),
            document("c", "{evictionHard: {x: null}}"),
        ];
        let expected: Mapping =
            serde_yaml_ng::from_str("{maxPods: 6, clusterDNS: [c], evictionHard: {y: 3, z: 4}}").unwrap();
        assert_eq!(merged(&documents), expected);
        assert_eq!(place(&documents, "maxPods"), "b");
        assert_eq!(place(&documents, "evictionHard"), "c");
        assert_eq!(place(&documents, "address and port"), "a");
    }

    #[test]
    fn nulls_of_a_new_object_are_removed() {
        let documents = [
            document("a", "{maxPods: 5, port: 1}"),
            document("b", "{evictionHard: {x: null, y: 1}, port: {z: null}}"),
        ];
        let expected: Mapping =
            serde_yaml_ng::from_str("{maxPods: 5, port: {}, evictionHard: {y: 1}}").unwrap();
        assert_eq!(merged(&documents), expected);
        assert_eq!(merged(&[]), Mapping::new());
    }

    #[test]
    fn the_place_of_a_field_below_an_object_is_the_file_that_has_it() {
        let documents = [
            document("a", "{authentication: {anonymous: {enabled: true}}}"),
            document("b", "{authentication: {webhook: {enabled: true}}}"),
        ];
        assert_eq!(place(&documents, "authentication.anonymous.enabled"), "a");
        assert_eq!(place(&documents, "authentication.webhook.enabled"), "b");
    }

    #[test]
    fn files_of_a_directory_are_read_in_the_order_of_their_names() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("15-more")).unwrap();
        for name in ["20-b.conf", "10-a.conf", "15-more/x.conf", "README", "30.yaml"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let expected = ["10-a.conf", "15-more/x.conf", "20-b.conf"].map(|name| dir.path().join(name));
        assert_eq!(in_directory(dir.path()).unwrap(), expected);
        assert!(in_directory(&dir.path().join("absent")).is_err());
    }
}

//! The Container Device Interface (CDI): devices described by files of their vendors.
//!
//! The code follows the public specification (0.3 to 1.x). It does not use the existing crate, which contains a JSON
//! schema validator, a command line and a file watcher. The files are read when a container requests a device, which is
//! rare. They are not watched or cached.
//!
//! [`spec`] has the file format, [`find`](Registry::find) selects the file of a device, [`edit`] applies its changes.

mod edit;
mod error;
mod spec;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coracle_proto::cri::ContainerConfig;
use oci_spec::runtime::Spec;

pub(crate) use self::error::CdiError;
use self::spec::{ContainerEdits, File};

/// Annotations with device names, from kubelets without the CRI field. The rest of the key is chosen by the device plugin.
const ANNOTATION: &str = "cdi.k8s.io/";

/// The devices that a container requests, without duplicates: first by the field, then by annotations.
pub(crate) fn requested(config: &ContainerConfig) -> Result<Vec<String>, CdiError> {
    let mut annotations: Vec<(&String, &String)> =
        config.annotations.iter().filter(|(key, _)| key.starts_with(ANNOTATION)).collect();
    annotations.sort_unstable();
    let fields = config.cdi_devices.iter().map(|device| device.name.as_str());
    let listed = annotations.into_iter().flat_map(|(_, value)| value.split(',').map(str::trim));
    let mut names: Vec<String> = Vec::new();
    for name in fields.chain(listed) {
        if spec::parse_name(name).is_none() {
            return Err(CdiError::Name(name.to_owned()));
        }
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// Accepts any bytes: a description is parsed or refused with an error.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    for json in [true, false] {
        if let Ok(file) = spec::parse(data, json) {
            let names: Vec<String> =
                file.devices.iter().map(|device| format!("{}={}", file.kind, device.name)).collect();
            let registry = Registry { files: vec![(0, file)], notes: Vec::new() };
            let mut spec = Spec::default();
            for (device, edits) in registry.find(&names).unwrap_or_default() {
                let _refused = edit::apply(&mut spec, &device, &edits);
            }
        }
    }
}

/// Applies the changes of the requested devices to a container's spec.
pub(crate) fn inject(spec: &mut Spec, names: &[String], dirs: &[PathBuf]) -> Result<(), CdiError> {
    if names.is_empty() {
        return Ok(());
    }
    for (device, edits) in Registry::read(dirs).find(names)? {
        edit::apply(spec, &device, &edits)?;
    }
    Ok(())
}

/// All CDI files. A file in a later directory has precedence.
#[derive(Debug, Default)]
struct Registry {
    /// Each file with the rank of its directory.
    files: Vec<(usize, File)>,
    notes: Vec<String>,
}

// === impl Registry ===

impl Registry {
    fn read(dirs: &[PathBuf]) -> Self {
        let mut registry = Self::default();
        for (rank, dir) in dirs.iter().enumerate() {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
            paths.sort_unstable();
            for path in paths {
                match read_file(&path) {
                    Some(Ok(file)) => registry.files.push((rank, file)),
                    Some(Err(why)) => registry.notes.push(format!("{}: {why}", path.display())),
                    None => {}
                }
            }
        }
        registry
    }

    /// The changes for these devices, in order. Changes for all devices of a file come once, before the first device of
    /// the file.
    fn find(mut self, names: &[String]) -> Result<Vec<(String, ContainerEdits)>, CdiError> {
        let mut edits = Vec::new();
        let mut lost = Vec::new();
        let mut seen: BTreeMap<usize, ()> = BTreeMap::new();
        for name in names {
            match self.holder(name) {
                Ok(at) => {
                    let file = &self.files[at].1;
                    if seen.insert(at, ()).is_none() {
                        edits.push((name.clone(), file.container_edits.clone()));
                    }
                    let device = spec::parse_name(name).map_or("", |(_, device)| device);
                    let found = file.devices.iter().find(|other| other.name == device);
                    edits.extend(found.map(|found| (name.clone(), found.container_edits.clone())));
                }
                Err(why) => {
                    self.notes.extend(why);
                    lost.push(name.clone());
                }
            }
        }
        if lost.is_empty() {
            return Ok(edits);
        }
        Err(CdiError::Unresolvable { devices: lost, notes: self.notes })
    }

    /// The file that has a device. If several files have it, the file of the highest rank counts. Two files of this
    /// rank are an error.
    fn holder(&self, name: &str) -> Result<usize, Option<String>> {
        let Some((kind, device)) = spec::parse_name(name) else { return Err(None) };
        let has = |file: &File| file.kind == kind && file.devices.iter().any(|other| other.name == device);
        let holders = self.files.iter().enumerate().filter(|(_, (_, file))| has(file));
        let holders: Vec<(usize, usize)> = holders.map(|(at, (rank, _))| (at, *rank)).collect();
        let highest = holders.iter().map(|(_, rank)| *rank).max().ok_or(None)?;
        let mut best = holders.iter().filter(|(_, rank)| *rank == highest);
        match (best.next(), best.next()) {
            (Some((at, _)), None) => Ok(*at),
            _ => Err(Some(format!("{name} is in more than one file"))),
        }
    }
}

/// Maximum size of a CDI file in bytes.
const FILE_MAX: u64 = 4 << 20;

/// Reads a CDI file; `None` for a file with another extension.
fn read_file(path: &Path) -> Option<Result<File, String>> {
    let extension = path.extension()?.to_str()?;
    if !matches!(extension, "json" | "yaml") {
        return None;
    }
    let text = match coracle_tree::read(path, FILE_MAX) {
        Ok(text) => text,
        Err(error) => return Some(Err(error.to_string())),
    };
    Some(spec::parse(&text, extension == "json"))
}

#[cfg(test)]
mod tests;

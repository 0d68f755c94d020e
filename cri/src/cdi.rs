//! The Container Device Interface: devices that are described by files of their vendors.
//!
//! Own code over the public specification (0.3 to 1.x), since the crate for it brings a JSON schema
//! validator, a command line and a file watcher. The files are read when a container asks for a device,
//! which is rare: nothing is watched and nothing is kept.
//!
//! Read [`spec`] for what a file may say, [`find`](Registry::find) for which file counts, [`edit`] for what it
//! changes.

mod edit;
mod spec;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coracle_proto::cri::ContainerConfig;
use oci_spec::runtime::Spec;

use spec::{ContainerEdits, File};

/// Annotations that name devices, of kubelets before the field; the part after it is the plugin's.
const ANNOTATION: &str = "cdi.k8s.io/";

/// Why devices cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CdiError {
    #[error("{0:?} is no qualified device name: it must be vendor/class=name")]
    Name(String),
    #[error("unresolvable CDI devices {}{}", .devices.join(", "), in_brackets(.notes))]
    Unresolvable { devices: Vec<String>, notes: Vec<String> },
    #[error("CDI device {device} needs {what}, which this runtime does not do")]
    Unsupported { device: String, what: &'static str },
    #[error("look at the device node {}", .path.display())]
    Node { path: PathBuf, source: std::io::Error },
    #[error("the CDI device node {} is no device", .path.display())]
    NoNode { path: PathBuf },
    #[error("CDI hook {0:?} is of no kind that the OCI has")]
    Hook(String),
}

/// What is said of files that could not be used: one of them may have held the device.
fn in_brackets(notes: &[String]) -> String {
    if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) }
}

/// The devices that a container asks for, each once: by the field, then by annotations.
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

/// Any bytes: a description is taken or refused in words.
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

/// Gives a container its devices.
pub(crate) fn inject(spec: &mut Spec, names: &[String], dirs: &[PathBuf]) -> Result<(), CdiError> {
    if names.is_empty() {
        return Ok(());
    }
    for (device, edits) in Registry::read(dirs).find(names)? {
        edit::apply(spec, &device, &edits)?;
    }
    Ok(())
}

/// All files, those of later directories counting more.
#[derive(Debug, Default)]
struct Registry {
    /// A file and the rank of its directory.
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

    /// What to change for these devices, in order: what a file says for all its devices once, before
    /// the first of them.
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

    /// The file that a device is taken from: of the highest rank that has it, where it must be alone.
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

/// Largest CDI file in bytes.
const FILE_MAX: u64 = 4 << 20;

/// `None` for a file that is none of ours.
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

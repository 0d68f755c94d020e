//! Entry points of the fuzz targets in `integration/fuzz`, and the test that replays their corpora with a
//! stable compiler. Each accepts any bytes and panics on a failure.

use std::path::Path;

use crate::config::{Limits, Platform};
use crate::digest::{Algorithm, Digest};
use crate::manifest::{self, Chosen, Search, Step};
use crate::reference::Reference;
use crate::unpack::{Rebuilt, unpack_with_recipe};

/// Small limits, so that an input cannot keep the fuzzer busy.
const LIMITS: Limits =
    Limits { layer_bytes: 4 << 20, layer_entries: 200, ratio: 250, ratio_from: 1 << 20, zstd_window_log: 27 };

/// Fuzz target: manifests, indexes and configurations.
pub fn manifest(data: &[u8]) {
    let platform = Platform::host();
    if let Ok(mut search) = Search::new(data, &platform) {
        // The input is also the content of each requested document.
        while let Ok(step) = search.next() {
            let _refused = match step {
                Step::Document(wanted) => search.document(&wanted, data),
                Step::Configuration(candidate) => search.configuration(candidate, data.to_vec()),
                Step::Found(_) => break,
            };
        }
    }
    if let Ok(parsed) = manifest::parse_config(data, 1, &platform, Chosen::Direct) {
        assert_eq!(parsed.diff_ids.len(), 1);
        // A configuration that was accepted once is accepted again after a restart.
        assert!(manifest::read_config(data).is_ok());
    }
}

/// Fuzz target: a layer. Nothing is written outside its directory, and an accepted layer can be rebuilt.
pub fn layer(data: &[u8]) {
    let Ok(directory) = TempDir::new() else { return };
    let (files, recipe) = (directory.0.join("fs"), directory.0.join("recipe"));
    let unpacked = unpack_with_recipe(data, &files, &LIMITS, &recipe, Algorithm::Sha256);
    let Ok(entries) = std::fs::read_dir(&directory.0) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        assert!(name == "fs" || name == "recipe", "{name:?} was written beside the layer");
    }
    let Ok(unpacked) = unpacked else { return };
    if let Ok(mut rebuilt) = Rebuilt::open(&recipe, &files) {
        let mut archive = Vec::new();
        let read = std::io::Read::read_to_end(&mut rebuilt, &mut archive);
        assert!(read.is_ok(), "the layer cannot be rebuilt: {read:?}");
        assert_eq!(Digest::of(&archive), unpacked.diff_id);
        assert_eq!(Rebuilt::length(&recipe, &files).ok(), Some(archive.len() as u64));
    }
}

/// Fuzz target: registry settings (`hosts.toml`).
pub fn hosts(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    crate::registry::fuzz_hosts(text);
}

/// Fuzz target: image names. A parsed name is equal after formatting and parsing.
pub fn reference(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(reference) = Reference::parse(text) {
        let written = reference.to_string();
        assert_eq!(Reference::parse(&written).as_ref(), Ok(&reference), "{written}");
    }
}

/// Fuzz target: authentication challenges of registries.
pub fn challenge(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    crate::registry::fuzz_challenge(text);
}

/// A temporary directory in memory, removed when dropped.
struct TempDir(std::path::PathBuf);

// === impl TempDir ===

impl TempDir {
    fn new() -> std::io::Result<TempDir> {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let next = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("coracle-fuzz-{}-{next}", std::process::id());
        let directory = TempDir(Path::new("/dev/shm").join(name));
        std::fs::create_dir_all(directory.0.join("fs"))?;
        Ok(directory)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpora_are_replayed() {
        type Target = fn(&[u8]);
        let targets: [(&str, Target); 5] = [
            ("manifest", super::manifest),
            ("layer", super::layer),
            ("hosts", super::hosts),
            ("reference", super::reference),
            ("challenge", super::challenge),
        ];
        for (name, target) in targets {
            coracle_testing::replay_corpus(name, target);
        }
    }
}
